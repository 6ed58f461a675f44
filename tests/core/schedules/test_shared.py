"""Shared programs, executed on simulated slots: the same answers as with messages."""

from collections import Counter

import numpy as np
import pytest

from tests.core.schedules.test_program import (
    DATA_COLLECTIVES,
    PAIRS,
    expected,
    make_inputs,
    schedules,
)
from unisono.core.schedules.ir import ROOTED, Buf, Op, Schedule, post, read_reduce
from unisono.core.schedules.lowering.layout import buffer_bounds, layout_for
from unisono.core.schedules.lowering.program import lower
from unisono.core.schedules.lowering.shared import ALIGN, lower_shared
from unisono.core.schedules.registry import available, build, entry

REDUCES = (Op.RECV_REDUCE, Op.READ_REDUCE, Op.REDUCE)
POSTS = (Op.SEND, Op.POST)


class Rank:
    """One rank of the simulation: its buffers, its slot and how far it has published."""

    def __init__(self, program, source, target, slot_count):
        self.program = program
        self.scratch = np.full(program.pieces_scratch, 55, target.dtype)
        self.source, self.target = source, target
        self.slot = np.full(slot_count, -7, target.dtype)
        self.posters = {}
        self.readers = {}
        self.stage = 0

    def span(self, buf, offset, count):
        buffer = {Buf.INPUT: self.source, Buf.OUTPUT: self.target, Buf.SCRATCH: self.scratch}[buf]
        view = buffer[offset : offset + count]
        assert len(view) == count
        return view

    def pieces(self):
        """Yield the rows of each piece; the buffers move on behind each."""
        for first, end, repeats, input_shift, output_shift in self.program.loops.tolist():
            for _ in range(repeats):
                yield self.program.pieces[first:end].tolist()
                self.source = self.source[input_shift:]
                self.target = self.target[output_shift:]


def run_piece(ranks, rows_of):
    """Execute one piece on all ranks; a rank waits where its peer has not published yet."""
    at = [0] * len(ranks)
    for rank in ranks:
        rank.stage = 0
    progress = True
    while progress:
        progress = False
        for number, rank in enumerate(ranks):
            rows = rows_of[number]
            while at[number] < len(rows):
                row = rows[at[number]]
                op, peer, src, src_off, dst, dst_off, count, whose, slot_off, stage, goes_on = row
                if goes_on:
                    following = rows[at[number] + 1]
                    assert {op, following[0]} <= {*REDUCES}
                    assert following[4:7] == [dst, dst_off, count]
                holder = ranks[whose]
                if op in POSTS:
                    end = slot_off + count
                    assert end <= len(holder.slot), "the slot is too small"
                    if whose == number:
                        assert (rank.slot[slot_off:end] == -7).all(), "two posts share a place"
                    else:
                        assert holder.readers[slot_off] == {number}, "others want what is there"
                    holder.slot[slot_off:end] = rank.span(src, src_off, count)
                    holder.posters[slot_off] = number
                    following = rows[at[number] + 1 : at[number] + 2]
                    if not following or following[0][0] not in POSTS:
                        rank.stage = stage
                else:
                    if op in (Op.COPY, Op.REDUCE):
                        data = rank.span(src, src_off, count)
                    elif ranks[peer].stage < stage:
                        break
                    else:
                        assert holder.posters[slot_off] == peer, "it has been overwritten"
                        holder.readers.setdefault(slot_off, set()).add(number)
                        data = holder.slot[slot_off : slot_off + count]
                    into = rank.span(dst, dst_off, count)
                    left = (
                        rank.span(src, src_off, count)
                        if op == Op.READ_REDUCE and src >= 0
                        else into
                    )
                    into[:] = left + data if op in REDUCES else data
                at[number] += 1
                progress = True
    assert at == [len(rows) for rows in rows_of], "some ranks wait for ever"
    for rank in ranks:
        rank.slot[:] = -7
        rank.posters.clear()
        rank.readers.clear()


def execute_shared(schedule, count, inputs, outputs, itemsize, slot_bytes):
    p = schedule.world_size
    programs = [lower_shared(schedule, r, count, itemsize, slot_bytes) for r in range(p)]
    if programs[0] is None:
        assert programs == [None] * p, "ranks disagree whether it fits"
        return False
    assert len({tuple(program.loops[:, 2]) for program in programs}) == 1, "pieces differ by rank"
    ranks = [
        Rank(program, source, target, slot_bytes // itemsize)
        for program, source, target in zip(programs, inputs, outputs, strict=True)
    ]
    for rows_of in zip(*(rank.pieces() for rank in ranks), strict=True):
        run_piece(ranks, rows_of)
    return True


@pytest.mark.sweep(60)
@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
@pytest.mark.parametrize(("itemsize", "slot_bytes"), [(4, 512 * 1024), (8, 16 * 1024)])
def test_result_equals_numpy(collective, algorithm, itemsize, slot_bytes, buffer_sizes, drawn):
    rng = np.random.default_rng(2)
    fitted = 0
    for schedule in schedules(collective, algorithm):
        p = schedule.world_size
        for count in drawn((0, 1, p + 1, 997, 5000), 1, always=(p + 1,)):
            layouts = [layout_for(schedule, count)] * p
            inputs, outputs = make_inputs(schedule, layouts, buffer_sizes, rng)
            want = expected(schedule, layouts, inputs, [out.copy() for out in outputs])
            if not execute_shared(schedule, count, inputs, outputs, itemsize, slot_bytes):
                continue
            fitted += 1
            for rank, array in enumerate(want):
                if array is not None:
                    where = f"{schedule} rank {rank} count {count}"
                    np.testing.assert_array_equal(outputs[rank], array, err_msg=where)
    assert fitted, "nothing fitted: the test has tested nothing"


def places_by_loops(schedule, size):
    """Return per rank the (slot, offset, stage) of its posts and reads, worked out row by row."""
    p = schedule.world_size
    units = min(size, schedule.block_chunks)
    programs = [lower(schedule, r, layout_for(schedule, units)).steps.tolist() for r in range(p)]
    programs = [[row for row in rows if row[6]] for rows in programs]
    posts, stages = [[] for _ in range(p)], [0] * p
    for rank, rows in enumerate(programs):
        for at, row in enumerate(rows):
            if row[0] in POSTS:
                stages[rank] += at == 0 or rows[at - 1][0] not in POSTS
                posts[rank].append((row[1], stages[rank], *row[2:4], row[6]))
    # Equal posts of a stage are one.
    once = {
        (rank, n): (rank, [post[1:] for post in own].index(own[n][1:]))
        for rank, own in enumerate(posts)
        for n in range(len(own))
    }
    readers = Counter(once.values())
    homes = {(rank, n): (rank, n) for rank in range(p) for n in range(len(posts[rank]))}
    taken, uses = dict(homes), [[] for _ in range(p)]
    for rank, rows in enumerate(programs):
        coming = {
            q: iter([(q, n) for n, post in enumerate(posts[q]) if post[0] in (-1, rank)])
            for q in range(p)
        }
        free, number = {}, 0
        for op, peer, *source, dst, dst_off, count, _ in rows:
            if op in POSTS:
                taken[rank, number] = free.pop((*source, count), (rank, number))
                if once[rank, number] == (rank, number):
                    uses[rank].append((rank, number))
                number += 1
            elif op not in (Op.COPY, Op.REDUCE):
                uses[rank].append(operand := once[next(coming[peer])])
                alone = p == 2 or posts[operand[0]][operand[1]][0] == rank
                alone &= readers[operand] == 1
                if op in REDUCES and alone:
                    free[dst, dst_off, count] = operand
    at_home = {post for post, place in taken.items() if place == post}
    places = {post: place if place in at_home else post for post, place in taken.items()}
    bounds = buffer_bounds(schedule, 0, layout_for(schedule, size))
    offsets = {}
    for rank, own in enumerate(posts):
        filled = 0
        for n, (_, _, buf, first, count) in enumerate(own):
            offsets[rank, n] = filled
            if places[rank, n] == once[rank, n] == (rank, n):
                length = bounds[buf][first + count] - bounds[buf][first] if units < size else count
                filled += -(-length // ALIGN) * ALIGN
    return [
        [[places[u][0], offsets[places[u]], posts[u[0]][u[1]][1]] for u in used] for used in uses
    ]


def check_places(schedule, drawn):
    """Ranks that derive other slots, offsets or stages read wrong memory or wait for ever."""
    for size in drawn((1, schedule.block_chunks, 300 * schedule.block_chunks), 1):
        wanted = places_by_loops(schedule, size)
        for rank in drawn(range(schedule.world_size), 2):
            rows = lower_shared(schedule, rank, size, 1, 1 << 40).pieces
            rows = rows[~np.isin(rows[:, 0], (Op.COPY, Op.REDUCE))]
            assert rows[:, 7:10].tolist() == wanted[rank], f"{schedule} rank {rank} size {size}"


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_a_rank_gets_the_places_that_a_loop_over_all_ranks_gives(collective, algorithm, drawn):
    for schedule in schedules(collective, algorithm, drawn(range(2, 18), 4, always=(2, 3, 8))):
        check_places(schedule, drawn)


@pytest.mark.parametrize("collective", [c for c in DATA_COLLECTIVES if available(c, 4, local=2)])
def test_places_of_two_levels_equal_those_of_the_loop(collective, drawn):
    worlds = [(p, local) for p in range(4, 18) for local in range(2, p) if p % local == 0]
    for p, local in drawn(worlds, 3):
        if "two_level" in available(collective, p, local=local):
            root = p // 2 if collective in ROOTED else -1
            for pipeline in (1, 3) if entry(collective, "two_level").pipelined else (1,):
                check_places(build(collective, "two_level", p, root, pipeline, local), drawn)


@pytest.mark.parametrize("p", [2, 3, 8, 33])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_any_amount_fits_with_one_shot(collective, p):
    schedule = build(collective, "one_shot", p)
    for count in (1, 10**3, 10**6, 5 * 2**30 // p):
        program = lower_shared(schedule, 0, count, 4, 512 * 1024)
        covered = int((program.loops[:, 2] * program.loops[:, 4]).sum())
        assert covered == count
        rows = program.pieces[np.isin(program.pieces[:, 0], POSTS)]
        assert int((rows[:, 8] + rows[:, 6]).max()) * 4 <= 512 * 1024


def test_small_data_is_one_piece():
    program = lower_shared(build("all_reduce", "one_shot", 4), 2, 10, 4, 512 * 1024)
    assert program.loops.tolist() == [[0, len(program.pieces), 1, 0, 10]]


@pytest.mark.parametrize("algorithm", ["one_shot", "dissemination", "linear"])
def test_a_barrier_has_no_steps_because_the_agreement_is_one(algorithm):
    program = lower_shared(build("barrier", algorithm, 3), 1, 0, 1, 4096)
    assert program.pieces.shape == (0, 11)
    assert program.loops.tolist() == [[0, 0, 1, 0, 0]]
    assert len(program.steps), "with messages the ranks need the steps"


@pytest.mark.parametrize("p", [2, 3, 8])
def test_a_result_goes_where_its_last_operand_was_read(p):
    """Of two_shot's posts the last is the result: it needs no room of its own."""
    for rank in range(p):
        rows = lower_shared(build("all_reduce", "two_shot", p), rank, 640 * p, 4, 1 << 19).pieces
        *operands, result = rows[rows[:, 0] == Op.POST]
        last = rows[rows[:, 0] == Op.READ_REDUCE][-1]
        assert [row[7] for row in operands] == [rank] * (p - 1)
        assert result[7] == last[1] == (rank - 1) % p
        assert result[8] == last[8]
        assert result[9] > last[9]
        for row in rows[rows[:, 0] == Op.READ]:
            assert row[7] == (row[1] - 1) % p


def test_what_others_still_read_stays_where_it_is():
    """All ranks read the same operand; who is first must not put a result there."""

    def exchange(k, r):
        yield post(r, -1, Buf.OUTPUT, 0)
        for i in (1, 2):
            yield read_reduce(r, (r + i) % 3, Buf.OUTPUT, 0)

    schedule = Schedule("all_reduce", "twice", 3, 2, exchange)
    for rank in range(3):
        rows = lower_shared(schedule, rank, 90, 4, 1 << 19).pieces
        assert rows[rows[:, 0] == Op.POST, 7].tolist() == [rank, rank]


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"])
@pytest.mark.parametrize("p", [2, 3, 8])
def test_a_one_shot_program_begins_with_its_posts(collective, p):
    """The agreement travels with a first post; behind a copy it would cost a round of its own."""
    schedule = build(collective, "one_shot", p)
    for rank in range(p):
        rows = lower_shared(schedule, rank, layout_for(schedule, 5).count, 4, 1 << 19).pieces
        posts = np.flatnonzero(rows[:, 0] == Op.POST)
        assert posts[0] == 0
        assert (np.diff(posts) == 1).all()


def test_rows_over_the_same_elements_are_joined():
    def ops(collective, rank, p=2):
        rows = lower_shared(build(collective, "one_shot", p), rank, 10, 4, 1 << 19).pieces
        return [Op(op) for op in rows[:, 0]], rows

    assert ops("all_reduce", 0)[0] == [Op.POST, Op.READ_REDUCE]
    # Rank 1 reads a lower rank's value, which RECV_REDUCE puts first: as if it set its own aside.
    assert ops("all_reduce", 1)[0] == [Op.POST, Op.RECV_REDUCE]
    assert Op.REDUCE in ops("all_reduce", 2, 3)[0], "two posts cannot be read at once"
    names, rows = ops("reduce_scatter", 1, 3)
    assert names == [Op.POST, Op.POST, Op.READ_REDUCE, Op.READ_REDUCE]
    assert rows[2:, 2].tolist() == [Buf.INPUT, -1]
