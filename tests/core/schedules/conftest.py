"""A tiny engine: executes the programs of all ranks in one thread, on NumPy arrays."""

from collections import defaultdict, deque

import numpy as np
import pytest

from unisono.core.schedules.ir import Buf, Op
from unisono.core.schedules.lowering.layout import buffer_bounds
from unisono.core.schedules.lowering.program import lower

REDUCES = (Op.RECV_REDUCE, Op.READ_REDUCE, Op.REDUCE)


def execute(schedule, layouts, inputs, outputs, reduce_op=np.add):
    """Run all ranks to the end; `inputs` and `outputs` are the ranks' arrays."""
    p = schedule.world_size
    programs = [lower(schedule, rank, layouts[rank]) for rank in range(p)]
    buffers = []
    for rank in range(p):
        scratch = np.full(programs[rank].scratch_count, 77, outputs[rank].dtype)
        buffers.append({Buf.INPUT: inputs[rank], Buf.OUTPUT: outputs[rank], Buf.SCRATCH: scratch})
    queues = defaultdict(deque)
    todo = [deque(program.steps.tolist()) for program in programs]

    def span(rank, buf, offset, count):
        view = buffers[rank][Buf(buf)][offset : offset + count]
        assert len(view) == count, f"rank {rank}: {Buf(buf).name} ends before {offset + count}"
        return view

    progress = True
    while progress:
        progress = False
        for rank in range(p):
            while todo[rank]:
                op, peer, src_buf, src_off, dst_buf, dst_off, count, goes_on = todo[rank][0]
                if goes_on:
                    following = todo[rank][1]
                    assert {op, following[0]} <= {*REDUCES}
                    assert following[4:7] == [dst_buf, dst_off, count]
                if op in (Op.SEND, Op.POST):
                    data = span(rank, src_buf, src_off, count).copy()
                    for q in [peer] if peer >= 0 else set(range(p)) - {rank}:
                        queues[rank, q].append(data)
                else:
                    if op in (Op.COPY, Op.REDUCE):
                        data = span(rank, src_buf, src_off, count)
                    elif not queues[peer, rank]:
                        break
                    else:
                        data = queues[peer, rank].popleft()
                    assert len(data) == count
                    target = span(rank, dst_buf, dst_off, count)
                    target[:] = reduce_op(target, data) if op in REDUCES else data
                todo[rank].popleft()
                progress = True
    assert not any(todo), "some ranks never got their messages"
    assert not any(queues.values()), "messages are left over"


def buffer_sizes(schedule, rank, layout):
    """Return the elements of INPUT and OUTPUT that a caller must give on `rank`."""
    bounds = buffer_bounds(schedule, rank, layout)
    sizes = {buf: int(bounds[buf][-1]) if len(bounds[buf]) else 0 for buf in Buf}
    if schedule.collective == "scatter" and rank != schedule.root:
        sizes[Buf.INPUT] = 0
    if schedule.collective == "gather" and rank != schedule.root:
        sizes[Buf.OUTPUT] = 0
    return sizes[Buf.INPUT], sizes[Buf.OUTPUT]


@pytest.fixture(name="execute")
def _execute():
    return execute


@pytest.fixture(name="buffer_sizes")
def _buffer_sizes():
    return buffer_sizes
