"""The verifier must find every kind of planted error, and say where it is."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from unisono.core.schedules.algorithms.shared_memory.one_shot import reduce_in_rank_order
from unisono.core.schedules.ir import (
    Buf,
    Op,
    Schedule,
    copy,
    post,
    recv,
    recv_reduce,
    reduce,
    send,
)
from unisono.core.schedules.registry import build
from unisono.core.schedules.verify import verify
from unisono.errors import ScheduleError

OP, PEER, SRC, DST_BUF, DST, N = 1, 2, 4, 5, 6, 7


def edited(schedule, edit):
    """Return the schedule with `edit(k, rows)` applied to the rows of each round."""

    def exchange(k, ranks):
        rows = np.concatenate([np.empty((0, 8), np.int64), *schedule.exchange(k, ranks)])
        return [edit(k, rows)]

    return replace(schedule, exchange=exchange)


def row_of(rows, rank, *ops):
    return np.flatnonzero((rows[:, 0] == rank) & np.isin(rows[:, OP], ops))[0]


def without(k_at, rank, *ops):
    def edit(k, rows):
        return np.delete(rows, row_of(rows, rank, *ops), axis=0) if k == k_at else rows

    return edit


def changed(k_at, rank, ops, column, value):
    def edit(k, rows):
        rows = rows.copy()
        if k == k_at:
            rows[row_of(rows, rank, *ops), column] = value
        return rows

    return edit


def doubled(k_at, rank, *ops):
    def edit(k, rows):
        at = row_of(rows, rank, *ops)
        return np.insert(rows, at, rows[at], axis=0) if k == k_at else rows

    return edit


RING = build("all_reduce", "ring", 4)
PAIR = build("all_reduce", "recursive_doubling", 4)
SCATTER = build("reduce_scatter", "pairwise", 4)
SHOT = build("all_reduce", "one_shot", 4)


@pytest.mark.parametrize(
    ("schedule", "edit", "words"),
    [
        (RING, without(5, 2, Op.SEND), ["deadlock", "3 for 2", "round 6 (k=5)"]),
        (RING, without(0, 2, Op.SEND), ["rank 3, round 1 (k=0)", "sent in round 2"]),
        (RING, without(5, 3, Op.RECV), ["rank 2 sends 1 messages more than 3 takes"]),
        (RING, doubled(5, 1, Op.SEND), ["rank 1 sends 1 messages more than 2 takes"]),
        (PAIR, changed(1, 0, [Op.SEND, Op.RECV_REDUCE], PEER, 1), ["rank 2"]),
        (RING, changed(0, 1, [Op.RECV_REDUCE], OP, Op.RECV), ["has contributions of"]),
        (RING, changed(3, 1, [Op.RECV], OP, Op.RECV_REDUCE), ["rank 1, round 4 (k=3)", "twice"]),
        (RING, changed(0, 1, [Op.RECV_REDUCE], DST, 1), ["sizes"]),
        (RING, changed(0, 1, [Op.RECV_REDUCE], DST, 4), ["chunks [4, 5)", "which has 4"]),
        (RING, changed(0, 1, [Op.RECV_REDUCE], N, 2), ["sizes"]),
        (
            RING,
            changed(0, 1, [Op.SEND], SRC, -1),
            ["rank 1, round 1 (k=0), step 0", "chunks [-1, 0)"],
        ),
        (RING, changed(0, 1, [Op.SEND], PEER, 1), ["SEND to rank 1"]),
        (RING, changed(0, 1, [Op.SEND], PEER, 9), ["SEND to rank 9"]),
        (RING, changed(0, 1, [Op.RECV_REDUCE], PEER, 1), ["RECV_REDUCE from rank 1"]),
        (RING, changed(0, 1, [Op.SEND], OP, Op.POST), ["RECV_REDUCE from rank 1 meets a post"]),
        (SHOT, changed(0, 0, [Op.READ_REDUCE], OP, Op.RECV_REDUCE), ["meets a post"]),
        (SCATTER, changed(0, 1, [Op.RECV_REDUCE], DST_BUF, Buf.INPUT), ["INPUT is read-only"]),
        (SHOT, without(0, 2, Op.READ), ["rank 2, round 1 (k=0)", "contribution of rank 2 twice"]),
        (SHOT, without(0, 2, Op.POST), ["deadlock", "for 2"]),
        (RING, changed(0, 1, [Op.SEND], OP, 9), ["rank 1, round 1 (k=0)", "unknown op 9"]),
    ],
)
def test_planted_error_is_found(schedule, edit, words):
    verify(schedule)
    with pytest.raises(ScheduleError) as caught:
        verify(edited(schedule, edit))
    for word in words:
        assert word in caught.value.what


def hand_made(collective, rounds, **kwargs):
    """Return a schedule for two ranks from a list of rounds."""

    def exchange(k, ranks):
        return [rows[np.isin(rows[:, 0], ranks)] for rows in rounds[k]]

    return Schedule(collective, "hand_made", 2, len(rounds), exchange, **kwargs)


R0, R1, BOTH = np.array([0]), np.array([1]), np.array([0, 1])


def test_waiting_in_a_circle_is_a_deadlock():
    first_receive = [
        recv_reduce(BOTH, 1 - BOTH, Buf.OUTPUT, 0),
        send(BOTH, 1 - BOTH, Buf.OUTPUT, 0),
    ]
    with pytest.raises(ScheduleError, match=r"deadlock.*0 for 1, 1 for 0") as caught:
        verify(hand_made("all_reduce", [first_receive]))
    assert "wait for messages that are sent after receives that wait: " in caught.value.what
    assert caught.value.hint.endswith(" put the sends of a round first")
    # What is sent in a later round does not come either way.
    with pytest.raises(ScheduleError, match="messages that never come: 0 for 1") as caught:
        verify(hand_made("all_reduce", [first_receive[:1], first_receive[1:]]))
    assert caught.value.hint is None


def test_same_sum_in_another_order_is_not_the_same():
    """Three contributions summed as (0+1)+2 on one rank and 0+(1+2) on another."""

    def exchange(k, r):
        others = (r[:, None] + (1, 2)) % 3
        yield send(r[:, None], others, Buf.OUTPUT, 0)
        yield recv_reduce(r[:, None], others, Buf.OUTPUT, 0)

    with pytest.raises(ScheduleError, match="rank 1 is reduced in another order than on rank 0"):
        verify(Schedule("all_reduce", "sloppy", 3, 1, exchange))


def test_a_sum_that_one_rank_rounds_in_between_is_not_the_same():
    def exchange(k, r, divides=True):
        yield post(r, -1, Buf.OUTPUT, 0)
        rows = np.concatenate(list(reduce_in_rank_order(r, np.arange(3)[None])))
        divider = copy(r, (Buf.OUTPUT, 0), (Buf.SCRATCH, 1), where=r == 2)
        last = np.flatnonzero(rows[:, 0] == 2)[-1:]
        yield np.insert(rows, last, divider, axis=0) if divides and len(divider) else rows

    parts = {"output_chunks": 1, "scratch_chunks": 2}
    verify(Schedule("all_reduce", "wrong", 3, 1, partial(exchange, divides=False), **parts))
    with pytest.raises(ScheduleError, match=r"OUTPUT.0. of rank 2 is reduced in another order"):
        verify(Schedule("all_reduce", "wrong", 3, 1, exchange, **parts))


def test_undefined_data_is_not_read():
    rounds = [[send(R1, 0, Buf.OUTPUT, 0), recv(R0, 1, Buf.OUTPUT, 0)]]
    with pytest.raises(
        ScheduleError, match=r"rank 1, .*reads OUTPUT\[0\], which is undefined"
    ) as caught:
        verify(hand_made("broadcast", rounds, root=0))
    assert caught.value.hint is None
    with pytest.raises(ScheduleError, match=r"reads OUTPUT\[0\], which is undefined") as caught:
        verify(hand_made("all_gather", rounds, input_chunks=1, output_chunks=2))
    assert "the data of the call is in INPUT" in caught.value.hint


def test_a_buffer_without_chunks_is_named():
    rounds = [[send(R1, 0, Buf.INPUT, 0), recv_reduce(R0, 1, Buf.OUTPUT, 0)]]
    with pytest.raises(ScheduleError, match=r"\[0, 1\) of INPUT, which has 0") as caught:
        verify(hand_made("all_reduce", rounds))
    assert "is in OUTPUT" in caught.value.hint
    # A buffer of which the schedule has fewer chunks; but a gather has them on its root.
    few = Schedule("all_reduce", "few", 2, 1, lambda k, r: [send(r, 1 - r, Buf.OUTPUT, r, 1)])
    with pytest.raises(ScheduleError, match=r"\[1, 2\) of OUTPUT, which has 1") as caught:
        verify(few)
    assert caught.value.hint == "output_chunks= of the Schedule is 1"
    elsewhere = replace(few, collective="gather", root=1, output_chunks=2)
    with pytest.raises(ScheduleError, match=r"\[0, 1\) of OUTPUT, which has 0") as caught:
        verify(elsewhere)
    assert caught.value.hint is None


def test_undefined_data_is_not_reduced_into():
    rounds = [[send(R0, 1, Buf.INPUT, 1), recv_reduce(R1, 0, Buf.OUTPUT, 0)]]
    schedule = hand_made("reduce_scatter", rounds, input_chunks=2)
    with pytest.raises(ScheduleError, match=r"reduces into OUTPUT\[0\]"):
        verify(schedule)


def test_missing_result_is_found():
    with pytest.raises(ScheduleError, match=r"OUTPUT\[0\] of rank 1 is undefined"):
        verify(hand_made("broadcast", [[]], root=0))


def test_wrong_block_is_found():
    def own(r):
        return [copy(r, (Buf.INPUT, 0), (Buf.OUTPUT, 1 - r))]

    def exchange(k, r):
        yield send(r, 1 - r, Buf.INPUT, 0)
        yield recv(r, 1 - r, Buf.OUTPUT, r)

    swapped = Schedule(
        "all_gather", "swapped", 2, 1, exchange, input_chunks=1, output_chunks=2, before=own
    )
    with pytest.raises(ScheduleError, match=r"OUTPUT\[0\] of rank 0 holds data \(1, 0\)"):
        verify(swapped)


def test_different_data_is_not_reduced_together():
    rounds = [
        [copy(BOTH, (Buf.INPUT, 0), (Buf.OUTPUT, 0)), reduce(BOTH, (Buf.INPUT, 1), (Buf.OUTPUT, 0))]
    ]
    schedule = hand_made("reduce_scatter", rounds, input_chunks=2)
    with pytest.raises(ScheduleError, match=r"reduces data \(0, 0\) with data \(1, 0\)"):
        verify(schedule)


def test_overlapping_places_are_found():
    def own(r):
        yield copy(r, (Buf.SCRATCH, 0), (Buf.SCRATCH, 1), 2)

    schedule = replace(build("all_gather", "bruck", 3), before=own)
    with pytest.raises(ScheduleError, match="COPY within SCRATCH: places overlap"):
        verify(schedule)


def test_uneven_blocks_do_not_fit_into_one_another():
    """Equal blocks may pass through any scratch block; uneven ones only through their own."""
    ring = build("reduce_scatter", "ring", 4)
    verify(ring)
    with pytest.raises(ScheduleError, match="sizes"):
        verify(replace(ring, uneven_ok=True))


def test_barrier_must_reach_everybody():
    half = replace(build("barrier", "dissemination", 4), rounds=1)
    with pytest.raises(ScheduleError, match="has contributions of 0,3, expected 0,1,2,3"):
        verify(half)


def test_using_own_block_too_early_is_not_in_place():
    """A ring that accumulates in OUTPUT destroys INPUT when both are the same memory."""

    def exchange(k, r):
        yield send(r, (r + 1) % 3, Buf.OUTPUT if k else Buf.INPUT, np.where(k, 0, (r - 1) % 3))
        yield recv(r, (r - 1) % 3, Buf.OUTPUT, 0)
        yield reduce(r, (Buf.INPUT, (r - k - 2) % 3), (Buf.OUTPUT, 0))

    greedy = Schedule("reduce_scatter", "greedy", 3, 2, exchange, input_chunks=3)
    verify(greedy)
    with pytest.raises(ScheduleError):
        verify(greedy, in_place=True)


def test_error_says_where():
    with pytest.raises(ScheduleError) as caught:
        verify(edited(RING, changed(3, 1, [Op.RECV], OP, Op.RECV_REDUCE)))
    context = caught.value.context
    assert (context.rank, context.world_size, context.op) == (1, 4, "all_reduce")
    assert context.step == 7
