"""Large arrays: in huge pages, which other ranks read without a copy, and beyond 2**32 bytes."""

import contextlib
import mmap
from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from tests.support.operations import Operations
from unisono.core.engines import is_native_built
from unisono.errors import CollectiveMismatchError


class Given(Operations):
    """Operations on arrays that are written again as soon as a call has returned."""

    def read(self, values):
        self.given.append(values.copy())
        return self.given[-1]

    def move(self, name):
        self.given = []
        getattr(self, name)()
        for array in self.given:
            array.fill(-1)


@pytest.mark.ranks(2, 3, kind="both")
def test_large_moves(rank):
    p = dist.get_world_size()
    for k in range(4):
        calls = Given(rank, p, 600_000, k % p, shift=k)
        for name in ("all_to_all_single", "all_gather_into_tensor", "scatter", "gather"):
            calls.move(name)
        calls.broadcast()
        calls.check(k)


def _number(source, to, k):
    return 1_000_000_000 * (source + 10 * to + 100 * k)


@pytest.mark.ranks(2, 3, kind="both")
def test_messages(rank):
    """Send arrays in a ring, in each way that exists."""
    p, size = dist.get_world_size(), 400_000
    right, left = (rank + 1) % p, (rank - 1) % p
    given, got, step = in_huge_pages(size), in_huge_pages(size), np.arange(size)
    for k in range(5):
        given[:] = _number(rank, right, k) + step
        got[:] = -1
        if k == 0:  # both send first, and what was sent later is received first
            dist.send(given, right, tag=1)
            dist.send(step[:3], right, tag=2)
            few = np.zeros(3, np.int64)
            dist.recv(few, left, tag=2)
            assert (few == step[:3]).all()
            dist.recv(got, left, tag=1)
        elif k == 1:
            works = [dist.irecv(got, left), dist.isend(given, right)]
            for work in works:
                work.wait()
        elif k == 2:
            work = dist.isend(given, right)
            assert p > 2 or dist.recv(got) == left
            assert p == 2 or dist.recv(got, left) == left
            work.wait()
        elif k == 3:
            work = dist.irecv(got[::2], left)
            dist.send(given[::2], right)
            work.wait()
            got[1::2] = _number(left, rank, k) + step[1::2]
        else:  # a buffer that is too small, then one that is not
            works = [dist.isend(given, right), dist.isend(given, right)]
            with pytest.raises(CollectiveMismatchError, match=rf"sent int64\[{size}\]"):
                dist.recv(got[1:], left)
            assert (got == -1).all()
            dist.recv(got, left)
            for work in works:
                work.wait()
        assert (got == _number(left, rank, k) + step).all()
        # What was sent may be written again at once.
        given[:] = -2
    dist.barrier()


def in_huge_pages(size):
    """Return an array of numbers in huge pages."""
    huge_bytes = 2 << 20
    # Shared memory, which is what Python maps unasked, has huge pages by other rules.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, 8 * size + huge_bytes, flags=private)
    # The kernel may know none.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    numbers = np.frombuffer(memory, np.int64)
    gap = -numbers.ctypes.data % huge_bytes // 8
    return numbers[gap : gap + size]


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
