from functools import partial

import numpy as np
import pytest

from tests.support.oracle import outcome
from unisono.core.schedules.ir import COLLECTIVES, ROOTED, VECTOR_COLLECTIVES, Op
from unisono.core.schedules.lowering.layout import layout_for
from unisono.core.schedules.lowering.program import lower
from unisono.core.schedules.registry import available, build, entry

DATA_COLLECTIVES = [c for c in COLLECTIVES if c != "barrier"]
PAIRS = sorted({(c, a) for c in DATA_COLLECTIVES for p in (8, 12) for a in available(c, p)})
UNEVEN_PAIRS = [pair for pair in PAIRS if entry(*pair).uneven]
WORLD_SIZES = (1, 2, 3, 4, 5, 7, 8, 13)


def schedules(collective, algorithm, sizes=WORLD_SIZES):
    for p in sizes:
        if algorithm in available(collective, p):
            root = (p * 2) // 3 if collective in ROOTED else -1
            yield build(collective, algorithm, p, root)
            if entry(collective, algorithm).pipelined:
                yield build(collective, algorithm, p, root, 4)


def make_inputs(schedule, layouts, buffer_sizes, rng):
    """Return the ranks' INPUT and OUTPUT; what is undefined at the start holds -99."""
    inputs, outputs = [], []
    in_place = schedule.collective in VECTOR_COLLECTIVES
    for rank, layout in enumerate(layouts):
        n_in, n_out = buffer_sizes(schedule, rank, layout)
        inputs.append(rng.integers(-1000, 1000, n_in))
        inputs[-1].flags.writeable = False
        defined = in_place and (schedule.collective != "broadcast" or rank == schedule.root)
        outputs.append(rng.integers(-1000, 1000, n_out) if defined else np.full(n_out, -99))
    return inputs, outputs


def expected(schedule, layouts, inputs, outputs):
    """Return what each rank's OUTPUT must hold, None where it is unspecified."""
    given = outputs if schedule.collective in VECTOR_COLLECTIVES else inputs

    def blocks(rank):
        splits = layouts[rank].in_splits or (layouts[rank].count,) * schedule.world_size
        return np.split(inputs[rank], np.cumsum(splits)[:-1])

    return outcome(schedule.collective, given, schedule.root, partial(np.sum, axis=0), blocks)


def check(schedule, layouts, execute, buffer_sizes, rng):
    inputs, outputs = make_inputs(schedule, layouts, buffer_sizes, rng)
    want = expected(schedule, layouts, inputs, [out.copy() for out in outputs])
    execute(schedule, layouts, inputs, outputs)
    for rank, array in enumerate(want):
        if array is not None:
            where = f"{schedule} rank {rank} {layouts[rank]}"
            np.testing.assert_array_equal(outputs[rank], array, err_msg=where)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_result_equals_numpy(collective, algorithm, execute, buffer_sizes, drawn):
    rng = np.random.default_rng(1)
    sizes = drawn(WORLD_SIZES, 1, always=(1, 2, 3, 5, 8))
    for schedule in schedules(collective, algorithm, sizes):
        p = schedule.world_size
        for count in sorted({0, 1, p - 1, p + 1, int(rng.integers(2 * p, 9 * p))}):
            layouts = [layout_for(schedule, count)] * p
            check(schedule, layouts, execute, buffer_sizes, rng)


@pytest.mark.parametrize(("collective", "algorithm"), UNEVEN_PAIRS)
def test_uneven_blocks_equal_numpy(collective, algorithm, execute, buffer_sizes):
    rng = np.random.default_rng(2)
    for schedule in schedules(collective, algorithm):
        p = schedule.world_size
        matrix = rng.integers(0, 6, (p, p))
        layouts = []
        for rank in range(p):
            if collective == "all_to_all":
                splits = {"in_splits": matrix[rank], "out_splits": matrix[:, rank]}
            elif collective in ("all_gather", "gather"):
                splits = {"out_splits": matrix[0]}
            else:
                splits = {"in_splits": matrix[0]}
            layouts.append(layout_for(schedule, 0, **splits))
        check(schedule, layouts, execute, buffer_sizes, rng)


@pytest.mark.parametrize("algorithm", [a for c, a in PAIRS if c == "all_reduce"])
@pytest.mark.parametrize("reduce_op", [np.add, np.multiply])
def test_all_reduce_gives_the_same_bits_on_all_ranks(algorithm, reduce_op, execute):
    rng = np.random.default_rng(3)
    for schedule in schedules("all_reduce", algorithm):
        p, count = schedule.world_size, 97
        # Wide exponents: any other order of additions shows in the last bits.
        numbers = rng.standard_normal((p, count)) * 10.0 ** rng.integers(-3, 4, (p, count))
        outputs = list(numbers.astype(np.float32))
        want = reduce_op.reduce(numbers.astype(np.float32).astype(np.float64), axis=0)
        empty = [np.empty(0, np.float32)] * p
        execute(schedule, [layout_for(schedule, count)] * p, empty, outputs, reduce_op)
        for out in outputs:
            assert out.tobytes() == outputs[0].tobytes()
        scale = np.abs(numbers).sum(axis=0) if reduce_op is np.add else np.abs(want)
        assert np.all(np.abs(outputs[0] - want) <= p * 1e-6 * scale)


def test_barrier_keeps_its_empty_messages(execute):
    for algorithm in available("barrier", 5):
        schedule = build("barrier", algorithm, 5)
        layout = layout_for(schedule, 0)
        assert len(lower(schedule, 1, layout).steps) > 0
        assert (lower(schedule, 1, layout).steps[:, 6] == 0).all()
        empty = [np.empty(0)] * 5
        execute(schedule, [layout] * 5, empty, empty)


def test_empty_data_needs_no_steps():
    schedule = build("all_reduce", "ring", 4)
    assert len(lower(schedule, 0, layout_for(schedule, 0)).steps) == 0


def test_program_of_a_small_ring_by_hand():
    schedule = build("all_reduce", "ring", 2)
    program = lower(schedule, 0, layout_for(schedule, 5))
    assert program.steps.tolist() == [
        [Op.SEND, 1, 1, 0, -1, -1, 2, 0],
        [Op.RECV_REDUCE, 1, -1, -1, 1, 2, 3, 0],
        [Op.SEND, 1, 1, 2, -1, -1, 3, 0],
        [Op.RECV, 1, -1, -1, 1, 0, 2, 0],
    ]
    assert program.scratch_count == 0
    assert not program.steps.flags.writeable


def test_programs_are_cached():
    schedule = build("all_reduce", "ring", 2)
    layout = layout_for(schedule, 5)
    assert lower(schedule, 0, layout) is lower(schedule, 0, layout_for(schedule, 5))


def test_scratch_is_only_what_the_rank_needs():
    schedule = build("gather", "binomial", 8, 0)
    layout = layout_for(schedule, 10)
    needs = [lower(schedule, rank, layout).scratch_count for rank in range(8)]
    assert needs == [80, 10, 20, 10, 40, 10, 20, 10]
