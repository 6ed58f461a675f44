"""Files that all ranks write and read together, against NumPy's tofile and fromfile."""

import errno
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from unisono.beyond import files
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    CollectiveError,
    CollectiveMismatchError,
    InvalidArgumentError,
    UsageError,
)


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def blocks_of(shape, cuts):
    """Return (starts, extents) of the blocks of a grid; `cuts` has the parts of each dimension."""
    edges = [np.linspace(0, n, parts + 1).astype(int) for n, parts in zip(shape, cuts, strict=True)]
    grid = np.ndindex(*cuts)
    return [
        (
            tuple(int(e[i]) for e, i in zip(edges, at, strict=True)),
            tuple(int(e[i + 1] - e[i]) for e, i in zip(edges, at, strict=True)),
        )
        for at in grid
    ]


def part_of(whole, block):
    return whole[(..., *(slice(s, s + n) for s, n in zip(*block, strict=True)))]


CASES = {
    1: [((5, 3), (1, 1)), ((), ())],
    3: [((7,), (3,)), ((7, 5), (3, 1)), ((4, 9), (1, 3)), ((2, 3, 9), (1, 3, 1)), ((2,), (3,))],
    4: [((8, 8), (2, 2)), ((5, 4, 6), (1, 2, 2)), ((5, 4, 6), (2, 2, 1)), ((0, 4), (4, 1))],
}


@pytest.mark.ranks(1, 3, 4, kind="both")
def test_blocks_are_written_and_read(rank, folder):
    for number, (shape, cuts) in enumerate(CASES[dist.get_world_size()]):
        for dtype in (np.float64, np.int8, np.complex64):
            whole = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
            block = blocks_of(shape, cuts)[rank]
            path = folder / f"{number}-{np.dtype(dtype)}"
            with dist.open_file(path, "w") as file:
                mine = part_of(whole, block)  # strided for most cuts
                file.write_block(mine, shape, block[0])
                file.write_block(mine.copy(), shape, block[0])
                assert file.position == 2 * whole.nbytes
            np.testing.assert_array_equal(np.fromfile(path, dtype), np.tile(whole.ravel(), 2))
            with dist.open_file(path) as file:
                again = np.zeros((*block[1], 2), dtype)[..., 0]
                file.read_block(again, shape, block[0])
                np.testing.assert_array_equal(again, mine)
                # All ranks may read the same elements.
                first = np.zeros_like(whole)
                file.read_block(first, shape, (0,) * len(shape))
                np.testing.assert_array_equal(first, whole)
    dist.barrier()
    assert not list(folder.glob("*.incomplete"))


@pytest.mark.ranks(3, kind="both")
def test_arrays_in_the_order_of_ranks(rank, folder):
    path = folder / "in-order"
    with dist.open_file(path, "w") as file:
        offsets = [file.write_in_order(np.full(rank * n, rank, np.int16)) for n in (1, 3, 0)]
    lengths = [[r * n for r in range(3)] for n in (1, 3, 0)]
    begins = np.concatenate([[0], np.cumsum(np.ravel(lengths))])[:-1].reshape(3, 3)
    assert offsets == (2 * begins[:, rank]).tolist()
    expected = [r for row in lengths for r, n in enumerate(row) for _ in range(n)]
    np.testing.assert_array_equal(np.fromfile(path, np.int16), expected)


@pytest.mark.ranks(2, kind="both")
def test_a_file_has_its_name_only_when_it_is_complete(rank, folder):
    path = folder / "state"
    path.write_bytes(b"old")
    dist.barrier()
    file = dist.open_file(path, "w")
    file.write_block(np.full(1, rank, np.int8), (2,), (rank,))
    assert path.read_bytes() == b"old"
    [part] = folder.glob("state.*.incomplete")
    assert part.read_bytes() == b"\0\1"
    dist.barrier()
    file.close()
    file.close()
    assert path.read_bytes() == b"\0\1"
    with pytest.raises(ClosedError, match="state was closed"):
        file.write_in_order(np.zeros(1))
    dist.barrier()
    with pytest.raises(UsageError), dist.open_file(path, "w") as file:
        file.read_block(np.full(1, 5, np.int8), (2,), (rank,))
    dist.barrier()
    assert path.read_bytes() == b"\0\1"
    assert os.listdir(folder) == ["state"]


@pytest.mark.ranks(3, kind="both")
def test_blocks_that_do_not_tile_the_array(rank, folder):
    with dist.open_file(folder / "x", "w") as file:
        overlap = ": the blocks of rank 0 ((2,) at (0,)) and rank 1 ((2,) at (1,)) overlap"
        with pytest.raises(CollectiveError, match=re.escape(overlap)):
            file.write_block(np.zeros(2), (5,), (rank,))
        with pytest.raises(CollectiveError, match=r"blocks have 3 elements, the array \[5\] has 5"):
            file.write_block(np.zeros(1), (5,), (rank,))
        kind = InvalidArgumentError if rank == 1 else CollectiveMismatchError
        with pytest.raises(kind, match=r"a block \[1\] at \[7\] does not fit into \[3\]"):
            file.write_block(np.zeros(1), (3,), (7 if rank == 1 else rank,))
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 called write_block\(float64"):
            file.write_block(np.zeros(1, np.float32 if rank else np.float64), (3,), (rank,))
        with pytest.raises(ArgumentTypeError, match="shape must be a list of integers, got 3"):
            file.write_block(np.zeros(1), 3, (rank,))
        with pytest.raises(UsageError, match="was opened with mode 'w'"):
            file.read_block(np.zeros(1), (3,), (rank,))
        assert file.position == 0
        file.write_block(np.full(1, rank, np.int8), (3,), (rank,))
    assert (folder / "x").read_bytes() == b"\0\1\2"


@pytest.mark.ranks(3, kind="both")
def test_an_error_of_one_rank_is_raised_on_all(rank, folder, monkeypatch):
    with pytest.raises(CollectiveError, match="rank 0: No such file or directory"):
        dist.open_file(folder / "no" / "x", "w")
    (folder / "short").write_bytes(b"12345")
    dist.barrier()
    with (
        dist.open_file(folder / "short") as file,
        pytest.raises(CollectiveError, match="it has 5 bytes, expected 6 from byte 0"),
    ):
        file.read_block(np.zeros(2, np.int8), (6,), (2 * rank,))
    with pytest.raises(InvalidArgumentError, match="mode='a': expected 'r' or 'w'"):
        dist.open_file(folder / "x", "a")
    with pytest.raises(ArgumentTypeError, match="path must be a path"):
        dist.open_file(3.5)
    with pytest.raises(CollectiveMismatchError, match="open_file"):
        dist.open_file(folder / f"{rank}", "w")


def full_at_0(fd, data, offset, write=os.pwrite):
    """Report a full disk for the first byte of the file."""
    if offset == 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(fd, data, offset)


@pytest.mark.ranks(2, kind="processes")
def test_what_a_failed_write_left_behind_the_end_is_cut_off(rank, folder, monkeypatch):
    with dist.open_file(folder / "x", "w") as file:
        with monkeypatch.context() as patch:
            patch.setattr(files, "pwrite", full_at_0)
            with pytest.raises(CollectiveError, match="rank 0: No space left"):
                file.write_block(np.full(8, 5, np.int8), (16,), (8 * rank,))
        file.write_block(np.full(1, rank, np.int8), (2,), (rank,))
    assert (folder / "x").read_bytes() == b"\0\1"


@pytest.mark.ranks(2, kind="both")
def test_a_path_that_is_no_file(rank, folder):
    if rank == 0:
        (folder / "folder").mkdir()
        os.mkfifo(folder / "pipe")
    dist.barrier()
    for name in ("folder", "pipe"):
        for mode in ("r", "w"):
            with pytest.raises(CollectiveError, match="rank 0: it is not a regular file"):
                dist.open_file(folder / name, mode)
    for mode in ("r", "w"):
        with pytest.raises(CollectiveError, match=r"rank 0: ValueError\('embedded null"):
            dist.open_file("a\0b", mode)
    dist.barrier()
    assert sorted(os.listdir(folder)) == ["folder", "pipe"]


@pytest.mark.ranks(2, kind="both")
def test_a_file_stays_open_if_a_rank_alone_closes_it(rank, folder):
    file = dist.open_file(folder / "x", "w")
    write = partial(file.write_block, np.full(1, rank, np.int8), (2,), (rank,))
    with pytest.raises(CollectiveMismatchError, match=r"called CollectiveFile\.close"):
        (write if rank else file.close)()
    write()
    file.close()
    assert (folder / "x").read_bytes() == b"\0\1"


@pytest.mark.ranks(2, kind="both")
def test_an_error_of_another_rank_leaves_no_incomplete_file(rank, folder):
    expected = ZeroDivisionError if rank == 1 else CollectiveMismatchError
    with pytest.raises(expected), dist.open_file(folder / "x", "w"):
        assert 1 / (1 - rank)
    dist.barrier()
    assert os.listdir(folder) == []
    aside = dist.new_group()
    if rank == 0:
        with pytest.raises(TimeoutError):
            dist.open_file(folder / "late", "w", aside, timeout=0.2)
    dist.barrier()
    assert os.listdir(folder) == []


@pytest.mark.ranks(2, kind="threads")
def test_offsets_beyond_4_gib(rank, folder):
    path = folder / "sparse"
    if rank == 0:
        with open(path, "wb") as file:
            file.seek(5 << 30)
            file.write(bytes(range(100)))
            file.truncate(6 << 30)
    dist.barrier()
    found = np.zeros((1, 1, 50), np.uint8)
    with dist.open_file(path) as file:
        file.read_block(found, (6, 1 << 20, 1 << 10), (5, 0, 50 * rank))
    np.testing.assert_array_equal(found.ravel(), np.arange(50) + 50 * rank)


def full(fd, data, offset):
    """Write 3 bytes, then report a full disk."""
    if len(data) > 3:
        return os.pwritev(fd, [data[:3]], offset)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.ranks(3, kind="processes")
def test_a_full_disk_on_one_rank(rank, folder, monkeypatch):
    whole = np.arange(12, dtype=np.int16)
    with dist.open_file(folder / "x", "w") as file:
        with monkeypatch.context() as patch:
            if rank == 1:
                patch.setattr(files, "pwrite", full)
            with pytest.raises(CollectiveError, match="rank 1: No space left") as caught:
                file.write_block(whole[4 * rank : 4 * rank + 4], (12,), (4 * rank,))
        assert caught.value.context.peers == (1,)
        file.write_block(whole[4 * rank : 4 * rank + 4], (12,), (4 * rank,))
    np.testing.assert_array_equal(np.fromfile(folder / "x", np.int16), whole)


@pytest.mark.ranks(2, kind="processes")
def test_ranks_that_do_not_see_the_same_folder(rank, folder, monkeypatch):
    mine = folder / f"host{rank}"
    mine.mkdir()
    monkeypatch.chdir(mine)
    with pytest.raises(CollectiveError, match="rank 1: No such file or directory") as caught:
        dist.open_file("state", "w")
    assert "network file system" in str(caught.value)
    dist.barrier()
    assert os.listdir(".") == []
    (Path(mine) / "size").write_bytes(b"1" * (rank + 1))
    dist.barrier()
    with pytest.raises(CollectiveError, match="size has different sizes in bytes: rank 0: 1, r"):
        dist.open_file("size")
