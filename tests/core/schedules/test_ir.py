import numpy as np
import pytest

from unisono.core.schedules.ir import COLLECTIVES, ROOTED, Buf, Op, ceil_log2, is_power_of_two, send
from unisono.core.schedules.registry import available, build


def test_rows_broadcast_over_ranks_and_keep_their_order():
    ranks = np.array([2, 5])[:, None]
    rows = send(ranks, np.array([7, 8]), Buf.OUTPUT, ranks * 10, where=ranks + np.arange(2) != 3)
    assert rows.tolist() == [
        [2, Op.SEND, 7, Buf.OUTPUT, 20, -1, -1, 1],
        [5, Op.SEND, 7, Buf.OUTPUT, 50, -1, -1, 1],
        [5, Op.SEND, 8, Buf.OUTPUT, 50, -1, -1, 1],
    ]


@pytest.mark.parametrize(
    ("collective", "algorithm", "p"),
    [(c, a, p) for p in (1, 2, 7, 8, 12) for c in COLLECTIVES for a in available(c, p)],
)
def test_one_rank_gets_the_rows_it_gets_among_all(collective, algorithm, p):
    schedule = build(collective, algorithm, p, p - 1 if collective in ROOTED else -1)
    everyone = np.arange(p)
    for k in range(schedule.stages):
        rows = schedule.steps(k, everyone)
        assert rows.dtype == np.int64
        assert rows.shape[1] == 8
        for rank in range(p):
            alone = schedule.steps(k, np.array([rank]))
            assert alone.tolist() == rows[rows[:, 0] == rank].tolist()
        backwards = schedule.steps(k, everyone[::-1])
        assert sorted(backwards.tolist()) == sorted(rows.tolist())


@pytest.mark.parametrize(
    ("algorithm", "pipeline"),
    [
        ("ring", 1),
        ("double_tree", 8),
        ("tree", 8),
        ("recursive_doubling", 1),
        ("halving_doubling", 1),
    ],
)
def test_a_round_of_24576_ranks(algorithm, pipeline):
    p = 24576
    schedule = build("all_reduce", algorithm, p, -1, pipeline)
    rows = schedule.steps(schedule.rounds // 2, np.arange(p))
    sends = rows[rows[:, 1] == Op.SEND]
    takes = rows[np.isin(rows[:, 1], (Op.RECV, Op.RECV_REDUCE))]
    assert len(sends) > 0
    # Messages match within the round: from, to, and how many chunks.
    sent = sends[:, [0, 2, 7]]
    taken = takes[:, [2, 0, 7]]
    assert np.array_equal(sent[np.lexsort(sent.T)], taken[np.lexsort(taken.T)])


class Counter:
    """NumPy for `ir`, which counts the calls of `empty` and the rows that they make."""

    def __init__(self):
        self.calls = self.rows = 0

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, shape, dtype):
        self.calls += 1
        self.rows += int(np.prod(shape[1:]))
        return np.empty(shape, dtype)


@pytest.mark.parametrize(
    ("collective", "algorithm"), [(c, a) for c in COLLECTIVES for a in available(c, 48)]
)
def test_rows_are_made_for_active_ranks_only(collective, algorithm, monkeypatch):
    """With 24,576 ranks it took 4 to 26 s to make rows for all ranks and to drop most of them."""
    schedule = build(collective, algorithm, 48, 7 if collective in ROOTED else -1)
    monkeypatch.setattr("unisono.core.schedules.ir.np", counter := Counter())
    kept = sum(len(schedule.steps(k, np.arange(48))) for k in range(schedule.stages))
    assert counter.rows == kept


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_reductions_in_the_order_of_ranks_are_a_few_tables(collective, monkeypatch):
    """A table per turn took 26 s with 24,576 ranks."""
    schedule = build(collective, "rank_order", 48, 7 if collective == "reduce" else -1)
    monkeypatch.setattr("unisono.core.schedules.ir.np", counter := Counter())
    for k in range(schedule.stages):
        schedule.steps(k, np.array([5]))
    assert counter.calls <= 6 * schedule.stages


@pytest.mark.parametrize("n", range(1, 70))
def test_powers_of_two(n):
    assert is_power_of_two(n) == (bin(n).count("1") == 1)
    assert 2 ** ceil_log2(n) >= n
    assert ceil_log2(n) == 0 or 2 ** (ceil_log2(n) - 1) < n
