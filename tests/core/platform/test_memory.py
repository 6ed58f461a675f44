"""The memory that is left, by files of the kernel as several systems show them."""

import pytest

from unisono.core.platform import machine, memory

MIB = 1 << 20
MEMINFO = "MemTotal: 9 kB\nMemAvailable: 2097152 kB\nSwapFree: 1024 kB\n"
V2 = "/sys/fs/cgroup/"
V1 = "/sys/fs/cgroup/memory/"
STAT = "active_file 1048576\nshmem 7\ninactive_file 2097152\n"


@pytest.mark.parametrize(
    ("files", "mib"),
    [
        ({}, None),
        ({"/proc/meminfo": MEMINFO}, 2049),
        # The strictest limit may be that of a cgroup above. Cached files can be dropped.
        (
            {
                "/proc/self/cgroup": "0::/a/b\n",
                V2 + "a/memory.max": f"{100 * MIB}\n",
                V2 + "a/memory.current": f"{30 * MIB}\n",
                V2 + "a/memory.stat": STAT,
                V2 + "a/b/memory.max": "max\n",
                V2 + "a/b/memory.current": f"{20 * MIB}\n",
            },
            100 - 30 + 3 + 1,
        ),
        # In a container its own cgroup may be the folder of all, in spite of its path.
        (
            {
                "/proc/self/cgroup": "4:cpuset,memory:/job/1\n0::/\n",
                V1 + "memory.limit_in_bytes": f"{50 * MIB}\n",
                V1 + "memory.usage_in_bytes": f"{60 * MIB}\n",
                V1 + "memory.stat": STAT + "total_inactive_file 1048576\n",
            },
            1,
        ),
    ],
)
def test_available_memory(monkeypatch, files, mib):
    files = {"/proc/meminfo": MEMINFO if files else "", **files}
    for module in (machine, memory):
        monkeypatch.setattr(module, "read_text", lambda path: files.get(path, ""))
    assert memory.available_memory_bytes() == (None if mib is None else mib * MIB)
