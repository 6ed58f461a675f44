// On which NUMA node the kernel takes the pages of shared memory.
#pragma once

#include <cstddef>

namespace unisono {

// Ask for the pages of [at, at + nbytes), in a shared mapping of a memory file, from a node. It holds
// for every process that has the file, and for pages that no process has touched yet; so nothing is
// touched now. Pages that are only partly in the range are left out. Nothing happens if `node` is
// negative, if the node has no memory left, or if the kernel refuses, as in many containers: then a
// page comes from the node of the process that touches it first.
void prefer_node(void* at, size_t nbytes, int node);

}  // namespace unisono
