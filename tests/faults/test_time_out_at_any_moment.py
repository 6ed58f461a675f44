"""A call that its time-out ends at any moment: right numbers or an error, on every rank."""

import time

import numpy as np
import pytest

import unisono as dist
from tests.support.operations import Operations
from unisono.errors import CollectiveTimeoutError
from unisono.testing import run

PATIENT_S = 60.0
# Of arrays of 8 bytes. NumPy puts the last into huge pages, which others read where they lie.
SIZES = [1, 20_000, 700_000]
CALLS = ["all_reduce", "broadcast", "all_gather_into_tensor", "all_to_all_single", "scatter"]


def at_the_brink(rank, seed, rounds):
    """Return how many calls ended well and how many badly; check the numbers of the former.

    In every call but a group's first, one rank may come late and one may not wait for it. Whoever
    gets an error gives its memory to something else at once, and no other rank may take that for a
    result.
    """
    p, ended = dist.get_world_size(), {"well": 0, "badly": 0}
    for number in range(rounds):
        shared = np.random.default_rng((seed, number))
        late, impatient = (int(who) for who in shared.integers(p, size=2))
        pg = dist.new_group(list(range(p)), timeout=PATIENT_S)
        for call_number in range(8):
            kind, n = int(shared.integers(len(CALLS))), int(shared.choice(SIZES))
            pause_s, jitter_s = (float(each) for each in shared.exponential(0.002, 2))
            if rank == late:
                time.sleep(pause_s)
            hurries = rank == impatient and call_number > 0
            brink_s = max(1e-6, pause_s + jitter_s - 0.002)
            how = {"group": pg, "timeout": brink_s if hurries else PATIENT_S}
            calls = Operations(rank, p, n, number % p, shift=number, how=how)
            try:
                getattr(calls, CALLS[kind])()
            except CollectiveTimeoutError:
                for array, _ in calls.made:
                    array.fill(-1)
                ended["badly"] += 1
                break
            calls.check(seed, number, kind, n, rank)
            ended["well"] += 1
        # Nobody makes the next group before all have left this one.
        dist.barrier()
        dist.destroy_process_group(pg)
    return ended


ROUNDS = 6


@pytest.mark.sweep(2)
@pytest.mark.parametrize("per_host", ["1", ""])
@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_whoever_gets_a_result_gets_the_right_one(monkeypatch, ranks, per_host):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", per_host)
    ends = run(at_the_brink, 3, ranks=ranks, args=(1, ROUNDS), timeout=120.0)
    assert all(ended["well"] >= ROUNDS >= ended["badly"] for ended in ends)
