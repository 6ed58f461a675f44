"""More than 2**32 bytes in one call."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from unisono.engines import is_native_built
from unisono.testing import run

NBYTES = 5 << 30


def why_not() -> str:
    """Return why this cannot be tested here, or nothing."""
    if not is_native_built():
        return "the C++ engine is not built"
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    if free_kib < 16 << 20:
        return "needs 16 GiB of free memory"
    if os.getloadavg()[0] > 1:
        return "takes minutes on a machine that has other work"
    return ""


def five_gib(rank):
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


@pytest.mark.skipif(why_not() != "", reason=why_not() or "-")
def test_five_gib():
    run(five_gib, 2, timeout=600)
