"""Random programs of verified schedules give NumPy's answer on real threads."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.together import on_threads
from tests.support.transport_worlds import reference_engines
from unisono.core.base.deadline import Deadline
from unisono.core.base.threads.completion import Completion
from unisono.core.base.types import ReduceOp, dtype_named
from unisono.core.engines import Call, Prepared, Task
from unisono.core.schedules import Program, build, layout_for, lower
from unisono.core.schedules.ir import Buf, Op

INT64 = dtype_named("int64")


def run_all(tasks):
    """Run one task on each rank of a new world."""
    engines = reference_engines(len(tasks))
    ends = [Completion() for _ in tasks]
    on_threads(
        *(
            partial(engine.submit, task, end, inline=True)
            for engine, task, end in zip(engines, tasks, ends, strict=True)
        )
    )
    for engine in engines:
        engine.close()
    for end in ends:
        assert end.done()
        if end.error is not None:
            raise end.error


def task(program, output, input=None, op=ReduceOp.SUM):
    prepared = Prepared(Call.of("test", "test()", ()), program, INT64, op)
    return Task(prepared, input, output, Deadline(20))


def rows(*steps):
    table = np.array(steps, np.int64).reshape(-1, 7)
    return Program(np.pad(table, ((0, 0), (0, 1))), 8)


@settings(max_examples=60)
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(list(Op)), st.integers(0, 4), st.integers(0, 4), st.integers(0, 3)
        ),
        max_size=25,
    )
)
def test_random_steps_mean_what_the_step_language_says(moves):
    """Rank 0 sends whenever rank 1 receives; rank 1's memory is simulated one step at a time."""
    sender, receiver = [], []
    memory = np.arange(8, dtype=np.int64)
    source = np.arange(100, 108, dtype=np.int64)
    for op, at, other, count in moves:
        if op in (Op.SEND, Op.POST):
            continue
        if op in (Op.COPY, Op.REDUCE):
            if abs(at - other) < count:
                continue  # overlapping places have no meaning
            receiver.append((op, -1, Buf.OUTPUT, other, Buf.OUTPUT, at, count))
            value = memory[other : other + count].copy()
        else:
            give = Op.POST if op in (Op.READ, Op.READ_REDUCE) else Op.SEND
            sender.append((give, 1, Buf.OUTPUT, other, -1, -1, count))
            # The sender changes its memory at once: what was sent must be the value before.
            sender.append((Op.REDUCE, -1, Buf.INPUT, 0, Buf.OUTPUT, 0, 8))
            receiver.append((op, 0, -1, -1, Buf.OUTPUT, at, count))
            value = source[other : other + count].copy()
            source += 1
        if op in (Op.REDUCE, Op.RECV_REDUCE, Op.READ_REDUCE):
            memory[at : at + count] += value
        else:
            memory[at : at + count] = value
    outputs = [np.arange(100, 108, dtype=np.int64), np.arange(8, dtype=np.int64)]
    ones = np.ones(8, np.int64)
    run_all([task(rows(*sender), outputs[0], ones), task(rows(*receiver), outputs[1])])
    np.testing.assert_array_equal(outputs[1], memory)
    np.testing.assert_array_equal(outputs[0], source)


@pytest.mark.parametrize("size", [2, 3])
def test_failed_call_keeps_no_buffer_alive(size):
    """The transport remembers why a group broke; its frames must not hold the user's arrays."""
    import gc
    import weakref

    engines = reference_engines(size)
    schedule = build("all_reduce", "linear", size)
    for engine in engines[1:]:
        engine.abort("a test")
    output = np.ones(3, np.int64)
    gone = weakref.ref(output)
    end = Completion()
    engines[0].submit(task(lower(schedule, 0, layout_for(schedule, 3)), output), end, inline=True)
    assert end.error is not None
    del output, end
    gc.collect()
    assert gone() is None
    for engine in engines:
        engine.close()
