"""More than 2**32 bytes in one call."""

from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from unisono.engines import is_native_built

NBYTES = 5 << 30


def why_not() -> str:
    """Return why this cannot be tested here, or nothing."""
    if not is_native_built():
        return "the C++ engine is not built"
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return "needs 16 GiB of free memory" if free_kib < 16 << 20 else ""


@pytest.mark.whole("takes 10 GiB and 16 s")
@pytest.mark.skipif(why_not() != "", reason=why_not() or "-")
@pytest.mark.ranks(2, timeout=600)
def test_five_gib(rank):
    x = np.full(NBYTES, rank + 1, np.uint8)
    marks = np.arange(0, NBYTES, NBYTES // 7)
    dist.all_reduce(x)
    assert (x[marks] == 3).all()
    x[marks] = rank
    dist.broadcast(x, 1)
    assert (x[marks] == 1).all()
    if rank == 0:
        x[marks] = 77
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
        assert (x[marks] == 77).all()
