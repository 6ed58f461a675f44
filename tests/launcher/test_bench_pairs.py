"""The pairs of ranks of the benchmark of messages."""

import pytest

from tests.support.programs import python
from unisono.bench.plan import BenchPlan
from unisono.testing.hosts import why_no_hosts


@pytest.mark.parametrize(
    ("nprocs", "hosts", "pairs"),
    [
        (2, 0, [(0, 1)]),
        (5, 0, [(0, 1), (2, 3)]),
        (4, 1, [(0, 1), (2, 3)]),
        (2, 2, [(0, 1)]),
        (4, 2, [(0, 2), (1, 3)]),
        (6, 3, [(0, 2), (1, 3)]),
        (12, 4, [(0, 3), (1, 4), (2, 5), (6, 9), (7, 10), (8, 11)]),
    ],
)
def test_pairs_lie_on_different_hosts(nprocs, hosts, pairs):
    plan = BenchPlan(("sendrecv",), nprocs, hosts)
    assert plan.pairs() == pairs
    peers = {rank: plan.peer_of(rank) for rank in range(nprocs)}
    paired = {pair for low, high in pairs for pair in ((low, high), (high, low))}
    assert {pair for pair in peers.items() if pair[1] is not None} == paired


@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
def test_the_table_shows_the_pairs_and_the_data_is_right():
    words = "bench sendrecv --hosts 2 --nproc-per-node 2 -b 8 -e 8 --iters 3 --rounds 2"
    done = python("-m", "unisono", *words.split())
    assert done.returncode == 0, done.stderr
    assert "# pairs of ranks: 0-2 1-3\n" in done.stdout
    assert "# Out of bounds values : 0 OK" in done.stdout
