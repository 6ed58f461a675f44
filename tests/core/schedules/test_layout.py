import numpy as np
import pytest

from unisono.core.schedules.ir import Buf
from unisono.core.schedules.lowering.layout import buffer_bounds, layout_for
from unisono.core.schedules.registry import build


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 1000, 10**12 + 3])
def test_vector_chunks_are_balanced(count):
    schedule = build("all_reduce", "ring", 7)
    bounds = buffer_bounds(schedule, 3, layout_for(schedule, count))[Buf.OUTPUT]
    assert bounds.tolist() == [i * count // 7 for i in range(8)]
    sizes = np.diff(bounds)
    assert sizes.sum() == count
    assert sizes.max() - sizes.min() <= 1


def test_blocks_follow_one_another():
    schedule = build("all_gather", "bruck", 4)
    bounds = buffer_bounds(schedule, 2, layout_for(schedule, 5))
    assert bounds[Buf.INPUT].tolist() == [0, 5]
    assert bounds[Buf.OUTPUT].tolist() == [0, 5, 10, 15, 20]
    assert bounds[Buf.SCRATCH].tolist() == [0, 5, 10, 15, 20]


def test_scratch_repeats_the_work_chunks():
    schedule = build("reduce_scatter", "halving_doubling", 3)
    layout = layout_for(schedule, 0, in_splits=[2, 0, 7])
    bounds = buffer_bounds(schedule, 1, layout)
    assert bounds[Buf.INPUT].tolist() == bounds[Buf.SCRATCH].tolist() == [0, 2, 2, 9]
    assert bounds[Buf.OUTPUT].tolist() == [0, 0]


def test_all_to_all_has_its_own_splits_on_both_sides():
    schedule = build("all_to_all", "pairwise", 3)
    bounds = buffer_bounds(schedule, 0, layout_for(schedule, 0, [1, 2, 3], [1, 0, 5]))
    assert bounds[Buf.INPUT].tolist() == [0, 1, 3, 6]
    assert bounds[Buf.OUTPUT].tolist() == [0, 1, 1, 6]


def test_a_barrier_is_empty():
    schedule = build("barrier", "linear", 3)
    assert buffer_bounds(schedule, 0, layout_for(schedule, 0))[Buf.OUTPUT].tolist() == [0, 0]
