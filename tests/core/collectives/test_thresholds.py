"""Values at sizes about each threshold of shared memory: lines, slots, pieces, rings, caches."""

import numpy as np
import pytest

import unisono as dist

KIB = 1024
THRESHOLDS = (96, 4 * KIB, 8 * KIB, 16 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 2048 * KIB)
SIZES = [nbytes + more for nbytes in THRESHOLDS for more in (-1, 0, 1)]


def block(rank, call, nbytes):
    """[nbytes] what a rank contributes to a call: no two ranks, calls or offsets look alike."""
    return np.resize((np.arange(251) * 7 + rank * 89 + call * 31).astype(np.uint8), nbytes)


@pytest.mark.ranks(2, 3)
def test_values_at_sizes_about_the_thresholds(rank):
    p = dist.get_world_size()
    for call, nbytes in enumerate([*SIZES, *reversed(SIZES)]):
        expected = [block(each, call, nbytes) for each in range(p)]
        mine, root = expected[rank].copy(), call % p
        parts = [np.empty(nbytes, np.uint8) for _ in range(p)] if rank == root else None
        dist.gather(mine, parts, root)
        assert parts is None or np.array_equal(parts, expected), nbytes
        got = np.empty(nbytes, np.uint8)
        dist.scatter(got, parts, root)
        assert np.array_equal(got, expected[rank]), nbytes
        every = np.empty(p * nbytes, np.uint8)
        dist.all_gather_single(every, mine)
        assert np.array_equal(every, np.concatenate(expected)), nbytes
        swapped = np.empty_like(every)
        dist.all_to_all_single(swapped, every)
        assert np.array_equal(swapped, np.tile(expected[rank], p)), nbytes
        total = mine.copy()
        dist.all_reduce(total)
        assert np.array_equal(total, sum(expected[1:], expected[0].copy())), nbytes
        # The last, because the others read what the root then changes.
        dist.broadcast(got if rank != root else mine, root)
        assert np.array_equal(got if rank != root else mine, expected[root]), nbytes
        mine[:] = 0


@pytest.mark.ranks(2)
def test_messages_of_sizes_about_the_thresholds_in_both_directions(rank):
    for call, nbytes in enumerate([*SIZES, *reversed(SIZES)]):
        got = np.empty(nbytes, np.uint8)
        for sender in (0, 1):
            if rank == sender:
                given = block(rank, call, nbytes)
                dist.send(given, 1 - rank)
                given[:] = 0  # the message has its own copy, or has come
            else:
                dist.recv(got, sender)
                assert np.array_equal(got, block(sender, call, nbytes)), nbytes
        both = dist.isend(block(rank, call + 1, nbytes), 1 - rank), dist.irecv(got, 1 - rank)
        for work in both:
            work.wait()
        assert np.array_equal(got, block(1 - rank, call + 1, nbytes)), nbytes
