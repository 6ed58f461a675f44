"""IntraNodeComm: all-reduce of small arrays by kernels that read the memory of the other GPUs.

    ranks of a host     CUDA IPC maps the memory of each rank into all ranks
    a call              one kernel per rank (intra_node.cu), on the stream of NCCL's kernels
    an error            the host sets the stop word, which ends every wait of the kernels

NCCL serves every other call. The choice depends only on what is compared on all ranks.

Source: torch.distributed's IntraNodeComm, with its algorithms, sizes and variable. Here ranks may
share a GPU, and every number of ranks up to 8 is served.
"""

from __future__ import annotations

import ctypes
import functools
import json
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.adapters.nccl.gpu import GPU, checked
from unisono.adapters.nccl.nvrtc import compiled
from unisono.core.backends.api import CallOptions, GroupSpec
from unisono.core.backends.cpu import CPUBackend
from unisono.core.base import config
from unisono.core.base.text import name_ranks
from unisono.core.base.types import DType, RedOpType, ReduceOp
from unisono.core.engines.shared_memory import memory_host
from unisono.errors import UnisonoError

VARIABLE = "ENABLE_INTRA_NODE_COMM"
"""torch's variable."""

ALGORITHMS = ("one_shot", "two_shot", "cube_mesh")
DTYPES = ("float32", "float16", "bfloat16")
ONE_SHOT_BYTES, TWO_SHOT_BYTES = 256 << 10, 10 << 20
MOST_RANKS = 8
_QUAD = 4

_THREADS, _MOST_BLOCKS = 512, 24
_MEETINGS = 3
"""Of a call, at most."""
_MEMORY_BYTES = 4096 + TWO_SHOT_BYTES
"""Flags and the slot."""
_ROW_BYTES = 4096


class CubePlace(NamedTuple):
    """A rank's place in a hybrid cube mesh.

    Attributes:
        quad: Bits of the four ranks that are linked to one another, this rank included.
        relay: The rank of the other quad that is linked to this rank.
    """

    quad: int
    relay: int


def algorithm_of(nbytes: int, *, is_cube: bool) -> str | None:
    """Return the kernel for a call of `nbytes`, or None: NCCL.

    A cube mesh has no links for the other two kernels.
    """
    if nbytes <= ONE_SHOT_BYTES:
        return "cube_mesh" if is_cube else "one_shot"
    return "two_shot" if nbytes <= TWO_SHOT_BYTES and not is_cube else None


def places_of(links: Sequence[int]) -> list[CubePlace] | None:
    """Return the place of each rank in a hybrid cube mesh, or None if the links are none.

    Args:
        links: For each rank the bits of the ranks that it is linked to, without its own.
    """
    ranks, made = range(len(links)), []
    if len(links) != 2 * _QUAD:
        return None
    for rank in ranks:
        near = [peer for peer in ranks if links[rank] >> peer & 1]
        # The relay is linked to the other quad only, so it has no neighbour of this rank.
        relays = [peer for peer in near if not links[peer] & links[rank]]
        if len(near) != _QUAD or len(relays) != 1:
            return None
        quad = (links[rank] | 1 << rank) & ~(1 << relays[0])
        made.append(CubePlace(quad, relays[0]))
    quads_agree = all(
        made[peer].quad == made[rank].quad
        for rank in ranks
        for peer in ranks
        if made[rank].quad >> peer & 1
    )
    relays_agree = all(made[place.relay].relay == rank for rank, place in enumerate(made))
    return made if quads_agree and relays_agree else None


def blocks_of(nbytes: int, algorithm: str, size: int, most: int = _MOST_BLOCKS) -> int:
    """Return the number of blocks; equal on all ranks, because block b meets the blocks b."""
    packs = -(-nbytes // 16)
    if algorithm == "two_shot":
        packs = -(-packs // size)
    return max(1, min(most, -(-packs // _THREADS)))


def most_blocks_of(gpus: Sequence[tuple[str, int]]) -> int:
    """Return the most blocks of a kernel, so that the ranks of a GPU have room for all of theirs.

    Blocks wait for those of other ranks. Those wait for ever for room if the processes of a GPU run
    at the same time (MPS). A multiprocessor has room for one block at least.

    Args:
        gpus: For each rank the name of its GPU, and the number of multiprocessors.
    """
    ranks_of = Counter(name for name, _ in gpus)
    return min(_MOST_BLOCKS, *(number // ranks_of[name] for name, number in gpus))


class IntraNodeComm:
    """The memory, the kernels and the meetings of one rank.

    Args:
        gpu: Of this rank; must be current.
        stream: For the kernels.
        rank: This rank in the group.
        size: Number of ranks.

    Attributes:
        most_blocks: Of a kernel; equal on all ranks.

    Raises:
        UnisonoError: CUDA or NVRTC refuses; nothing is left.
    """

    def __init__(self, gpu: GPU, stream: Any, rank: int, size: int) -> None:
        self._gpu, self._stream, self._rank, self._size = gpu, stream, rank, size
        self._place: CubePlace | None = None
        self.most_blocks = _MOST_BLOCKS
        self._meeting = 0
        self._lock = threading.Lock()
        self._module: Any = None
        self._kernels: dict[tuple[str, str], Any] = {}
        self._memory: list[int] = [0] * size
        self._word = 0
        driver = gpu.driver
        try:
            code = compiled(gpu.capability, size)
            self._module = checked(driver.cuModuleLoadData(code), "to load kernels")
            # Now: CUDA loads a kernel when it is first asked for, and may then wait for all kernels
            # of the process, also for one that waits for another rank.
            for algorithm in ALGORITHMS:
                for dtype in DTYPES:
                    name = f"{algorithm}_{dtype}".encode()
                    found = driver.cuModuleGetFunction(self._module, name)
                    self._kernels[algorithm, dtype] = checked(found, "to find a kernel")
            # Not from a pool, whose memory has no handle.
            self._memory[rank] = int(checked(driver.cuMemAlloc(_MEMORY_BYTES), "to get memory"))
            # Portable and mapped.
            self._word = int(checked(driver.cuMemHostAlloc(4, 3), "to get memory of the host"))
            ctypes.c_uint32.from_address(self._word).value = 0
            handle = int(stream.handle)
            checked(driver.cuMemsetD8Async(self._memory[rank], 0, _MEMORY_BYTES, handle), "to fill")
            # Before another rank may raise a flag.
            checked(driver.cuStreamSynchronize(handle), "to fill")
        except BaseException:
            self.free()
            raise

    def handle(self) -> bytes:
        """Return what another process needs to map the memory."""
        made = checked(self._gpu.driver.cuIpcGetMemHandle(self._memory[self._rank]), "to share")
        return ctypes.string_at(made.getPtr(), 64)

    def map(self, handles: Sequence[bytes], names: Sequence[int]) -> None:
        """Map the memory of the other ranks.

        Args:
            handles: Of all ranks.
            names: The numbers of the ranks in the world, for errors.

        Raises:
            CommunicationError: CUDA refuses, as for ranks that are threads of one process.
        """
        driver = self._gpu.driver
        for rank, handle in enumerate(handles):
            if rank != self._rank:
                given = driver.CUipcMemHandle()
                ctypes.memmove(given.getPtr(), handle, 64)
                # 1: with access to another GPU.
                opened = driver.cuIpcOpenMemHandle(given, 1)
                what = f"to map the memory of rank {names[rank]}"
                self._memory[rank] = int(checked(opened, what))

    def place(self, place: CubePlace | None) -> None:
        """Set the place in a hybrid cube mesh; None: every rank is linked to every other."""
        self._place = place

    def algorithm(self, dtype: DType, op: ReduceOp, elements: int) -> str | None:
        """Return the kernel for an all_reduce, or None if NCCL serves it."""
        if op.op is not RedOpType.SUM or op.factor is not None or dtype.name not in DTYPES:
            return None
        return algorithm_of(elements * dtype.itemsize, is_cube=self._place is not None)

    def all_reduce(self, algorithm: str, dtype: DType, address: int, elements: int) -> None:
        """Enqueue a call in place. All ranks must make the same calls in the same order.

        Cost: of n bytes on p ranks: one_shot reads pn, two_shot 2n, cube_mesh 5n.
        """
        if not elements:
            return
        nbytes = elements * dtype.itemsize
        # The flags begin with 0.
        self._meeting += _MEETINGS
        quad, relay = self._place or (0, 0)

        # The memory of the host has one address for the host and all GPUs.
        call = _call_type(self._size)(
            tuple(self._memory), address, address, self._word, nbytes,
            self._meeting, self._rank, quad, relay,
        )  # fmt: skip
        kernel = self._kernels[algorithm, dtype.name]
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(call))
        blocks = blocks_of(nbytes, algorithm, self._size, self.most_blocks)
        grid, block = (blocks, 1, 1), (_THREADS, 1, 1)
        launched = self._gpu.driver.cuLaunchKernel(
            kernel, *grid, *block, 0, int(self._stream.handle), ctypes.addressof(arguments), 0
        )
        checked(launched, f"to launch {algorithm}")

    def stop(self) -> None:
        """End the waits of all kernels, also of later ones. The group must be broken before."""
        with self._lock:
            if self._word:
                ctypes.c_uint32.from_address(self._word).value = 1

    def free(self) -> None:
        """Unmap and free all memory; first waits for the stream. The GPU must be current.

        Other ranks may still have the memory mapped. CUDA's manual leaves open what happens then;
        its drivers keep the memory until they unmap it. NCCL relies on that, too.
        """
        driver = self._gpu.driver
        with self._lock:
            memory, self._memory = self._memory, [0] * self._size
            word, self._word = self._word, 0
            module, self._module = self._module, None
        # A kernel may not have begun, because it waits for other work of the program.
        driver.cuStreamSynchronize(int(self._stream.handle))
        for rank, address in enumerate(memory):
            if address and rank != self._rank:
                driver.cuIpcCloseMemHandle(address)
        if memory[self._rank]:
            driver.cuMemFree(memory[self._rank])
        if word:
            driver.cuMemFreeHost(word)
        if module is not None:
            driver.cuModuleUnload(module)


@functools.cache
def _call_type(size: int) -> type[ctypes.Structure]:
    """Return the kernels' struct Call for a number of ranks."""
    far, near = ctypes.c_uint64, ctypes.c_uint32
    fields: list[tuple[str, Any]] = [("memory", far * size)]
    fields += [(name, far) for name in ("input", "output", "stop", "nbytes", "meeting")]
    fields += [(name, near) for name in ("rank", "quad", "relay")]
    return type("_Call", (ctypes.Structure,), {"_fields_": fields})


def is_wanted() -> bool:
    """Whether this rank asks for it."""
    return config.is_true(VARIABLE)


def connect(
    gpu: GPU, stream: Any, spec: GroupSpec, control: CPUBackend, options: CallOptions
) -> tuple[IntraNodeComm | None, str]:
    """Return the communicator, or None and the reason; a collective with one answer on all ranks.

    Args:
        gpu: Of this rank; must be current.
        stream: For the kernels.
        spec: The group.
        control: CPU group of the same ranks.
        options: Of the calls on it.
    """

    def agreed(row: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        """Return the rows of all ranks, and the first reason against it."""
        rows = _gathered(row, spec.size, control, options)
        whys = [f"rank {spec.ranks[at]}: {each['why']}" for at, each in enumerate(rows)
                if each["why"]]  # fmt: skip
        return rows, whys[0] if whys else ""

    if not 2 <= spec.size <= MOST_RANKS:
        return None, f"{spec.size} ranks; it serves 2 to {MOST_RANKS}"
    comm: IntraNodeComm | None = None
    row: dict[str, Any] = {"why": "", "host": memory_host(), "gpu": gpu.uuid, "handle": ""}
    # Whatever fails on one rank, all ranks must take part in what follows.
    try:
        row["multiprocessors"] = gpu.multiprocessors
        comm = IntraNodeComm(gpu, stream, spec.rank, spec.size)
        row["handle"] = comm.handle().hex()
    except Exception as error:
        row["why"] = _text_of(error)
    try:
        rows, why = agreed(row)
        if not why and (not row["host"] or len({each["host"] for each in rows}) > 1):
            why = "the ranks are on several hosts"
        if not why:
            assert comm is not None
            gpus = [(each["gpu"], each["multiprocessors"]) for each in rows]
            comm.most_blocks = most_blocks_of(gpus)
            row = {"why": "", "links": 0}
            try:
                row["links"] = gpu.links([each["gpu"] for each in rows])
                comm.map([bytes.fromhex(each["handle"]) for each in rows], spec.ranks)
            except Exception as error:
                row["why"] = _text_of(error)
            rows, why = agreed(row)
            why = why or _placed(comm, spec, [each["links"] for each in rows])
    except BaseException:
        if comm is not None:
            comm.free()
        raise
    if why and comm is not None:
        comm.free()
        comm = None
    return comm, why


def _text_of(error: Exception) -> str:
    """Return a short line about an error, which may be of any library."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, UnisonoError):
        text = f"{error.what}; {error.hint}" if error.hint else error.what
    return " ".join(text.replace("\0", " ").split())[:200]


def _placed(comm: IntraNodeComm, spec: GroupSpec, links: list[int]) -> str:
    """Set the place of a rank; return the reason if the links are neither of the two kinds."""
    everyone = (1 << len(links)) - 1
    links = [each & ~(1 << at) for at, each in enumerate(links)]
    apart = [spec.ranks[at] for at, each in enumerate(links) if each | 1 << at != everyone]
    if not apart:
        return ""
    if (places := places_of(links)) is None:
        return f"{name_ranks(apart)} have no NVLink to each other rank, and there is no cube mesh"
    comm.place(places[spec.rank])
    return ""


def _gathered(
    row: dict[str, Any], size: int, control: CPUBackend, options: CallOptions
) -> list[dict[str, Any]]:
    """Return the rows of all ranks."""
    mine = np.zeros(_ROW_BYTES, np.uint8)
    text = json.dumps(row).encode()
    mine[: len(text)] = np.frombuffer(text, np.uint8)
    rows = np.zeros((size, _ROW_BYTES), np.uint8)
    pending = control.all_gather_into_tensor(rows, mine, options)
    if pending.error is not None:
        raise pending.error
    return [json.loads(each.tobytes().rstrip(b"\0")) for each in rows]
