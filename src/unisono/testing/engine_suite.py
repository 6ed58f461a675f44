"""The conformance suite of engines: every engine that passes it can serve a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from unisono.core.base.buffers import Array
from unisono.core.base.deadline import Deadline
from unisono.core.base.threads.completion import Completion
from unisono.core.base.types import DType, RedOpType, ReduceOp, dtype_named
from unisono.core.engines import Call, Engine, Exchange, Prepared, Task
from unisono.core.schedules import Program, available, build, layout_for, lower
from unisono.core.schedules.ir import COLLECTIVES, ROOTED
from unisono.errors import (
    ClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InternalError,
    PeerFailedError,
    PeerLostError,
    UnisonoError,
    UsageError,
)
from unisono.testing.answers import UFUNCS, case
from unisono.testing.expect import PATIENCE_S, checks_in, equal, in_threads, is_a, opened, raises

__all__ = ["ENGINE_CHECKS", "check_engine"]

MakeEngines = Callable[[int], Sequence[Engine]]

_FLOAT32 = dtype_named("float32")


def check_engine(make: MakeEngines) -> None:
    """Run every check of `ENGINE_CHECKS`, each on new engines.

    Args:
        make: Function that takes a world size and returns the connected engines of all ranks in
            this process. The suite closes them.

    Raises:
        AssertionError: The engine behaves differently. The text names the difference.
    """
    for check in ENGINE_CHECKS:
        check(make)


# ---- helpers ------------------------------------------------------------------------------


def _task(
    program: Program,
    output: Array | None,
    *,
    input: Array | None = None,
    agreed: tuple[object, ...] = ("same",),
    dtype: DType = _FLOAT32,
    op: ReduceOp = ReduceOp.SUM,
    timeout_s: float = PATIENCE_S,
    finish: Callable[[], None] = lambda: None,
) -> Task:
    call = Call.of("test", f"test({', '.join(map(str, agreed))})", agreed)
    prepared = Prepared(call, program, dtype, op)
    return Task(prepared, input, output, Deadline(timeout_s), finish=finish)


def _submit(engine: Engine, task: Task, *, inline: bool = True) -> Completion:
    engine.submit(task, completion := Completion(), inline=inline)
    return completion


def _run(engine: Engine, task: Task, *, inline: bool = True) -> BaseException | None:
    """Run a task to its end; return its error."""
    completion = _submit(engine, task, inline=inline)
    if inline:
        equal("an inline task is done on return", completion.done(), True)
    equal("done in time", completion.wait_until(Deadline(PATIENCE_S)), True)
    return completion.error


def _sum_program(rank: int, size: int, count: int) -> Program:
    schedule = build("all_reduce", "linear", size)
    return lower(schedule, rank, layout_for(schedule, count))


def _all_reduce(engine: Engine, count: int = 3, **options: Any) -> BaseException | None:
    """Run an all_reduce of arrays filled with 1, and check the output."""
    comm = engine.comm
    data = np.ones(count, np.float32)
    error = _run(engine, _task(_sum_program(comm.rank, comm.size, count), data, **options))
    if error is None:
        equal("sum", data.tolist(), [float(comm.size)] * count)
    elif isinstance(error, CollectiveMismatchError):
        equal("data after a mismatch", data.tolist(), [1.0] * count)
    return error


def _everywhere(engines: Sequence[Engine], **options: Any) -> None:
    """Check that an all_reduce of all ranks works."""
    errors = in_threads([partial(_all_reduce, engine, **options) for engine in engines])
    for error in errors:
        if error is not None:
            raise error


# ---- results ------------------------------------------------------------------------------


def _compare(
    engines: Sequence[Engine],
    collective: str,
    algorithm: str,
    count: int,
    dtype: DType = _FLOAT32,
    op: ReduceOp = ReduceOp.SUM,
    *,
    inline: bool = True,
) -> None:
    """Run one collective on all ranks and compare with NumPy."""
    size = len(engines)
    root = size - 1 if collective in ROOTED else -1
    schedule = build(collective, algorithm, size, root)
    layout = layout_for(schedule, count)
    inputs, outputs, expected = case(collective, size, count, root, dtype, op)
    # Copied now, because a broadcast or a reduce overwrites its data, which `expected` may share.
    wanted = [None if e is None else e.copy() for e in expected]
    given = [None if i is None else i.copy() for i in inputs]
    agreed = (collective, algorithm, count, dtype.name, op.name)

    def body(rank: int) -> None:
        task = _task(
            lower(schedule, rank, layout),
            outputs[rank],
            input=inputs[rank],
            agreed=agreed,
            dtype=dtype,
            op=op,
        )
        if (error := _run(engines[rank], task, inline=inline)) is not None:
            raise error

    in_threads([partial(body, rank) for rank in range(size)])
    for rank in range(size):
        what = f"{agreed}, rank {rank} of {size}"
        want, before = wanted[rank], given[rank]
        if want is not None:
            np.testing.assert_array_equal(outputs[rank], want, what)
        if before is not None:
            np.testing.assert_array_equal(inputs[rank], before, f"{what}: input")


def _check_schedules(make: MakeEngines) -> None:
    for size in (1, 2, 3, 5, 8):
        with opened(make, size) as engines:
            for collective in COLLECTIVES:
                for algorithm in available(collective, size):
                    count = 0 if collective == "barrier" else 2 * size + 1
                    _compare(engines, collective, algorithm, count)


def _check_counts(make: MakeEngines) -> None:
    with opened(make, 3) as engines:
        for count in (0, 1, 2, 50_000):
            for algorithm in ("ring", "tree", "two_shot"):
                _compare(engines, "all_reduce", algorithm, count)
            _compare(engines, "all_to_all", "pairwise", count, inline=False)


def _check_dtypes(make: MakeEngines) -> None:
    names = "bool int8 uint16 int64 float16 float32 float64 bfloat16 complex128"
    with opened(make, 3) as engines:
        for dtype in map(dtype_named, names.split()):
            for op in UFUNCS:
                bits = op.op in (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR)
                order = op.op in (RedOpType.MIN, RedOpType.MAX)
                if (bits and dtype.kind in "fc") or (order and dtype.kind == "c"):
                    continue
                _compare(engines, "all_reduce", "ring", 7, dtype, op)
        _compare(engines, "all_gather", "ring", 7, dtype_named("float8_e5m2"))


# ---- agreement ----------------------------------------------------------------------------


def _check_mismatch(make: MakeEngines) -> None:
    for size in (2, 3, 5):
        with opened(make, size) as engines:
            for odd in range(size):
                bodies = [
                    partial(_all_reduce, e, agreed=("odd" if e.comm.rank == odd else "even",))
                    for e in engines
                ]
                for rank, error in enumerate(in_threads(bodies)):
                    found = is_a(f"rank {rank}", error, CollectiveMismatchError)
                    for text in ("test(odd)", "test(even)"):
                        equal(f"{text!r} is named", text in found.what, True)
                    equal("group is usable", found.context.usable, True)
                    if rank != odd:
                        equal("ranks to blame", found.context.peers, (odd,))
                _everywhere(engines)


def _check_exchange(make: MakeEngines) -> None:
    size = 3
    tables: list[Array] = []

    def check(call: Call, table: Array) -> None:
        tables.append(table.copy())
        if (table == 99).any():
            raise CollectiveMismatchError("99 was sent")

    def body(engine: Engine, numbers: list[int], even: int) -> tuple[BaseException | None, Array]:
        rank = engine.comm.rank
        data = np.ones(4, np.float32)
        # The own program sums 1 element, the program after an exchange sums 4.
        own, other = _sum_program(rank, size, 1), _sum_program(rank, size, 4)
        task = _task(own, data)
        task.prepared.exchange = Exchange(even, np.array(numbers, np.int64), check, other)
        return _run(engine, task), data

    with opened(make, size) as engines:
        for words, numbers, called, total in (
            ([1, 1, 1], [1, 2, 3], 0, [3, 1, 1, 1]),
            ([1, 2, 1], [1, 2, 3], size, [3, 3, 3, 3]),
            ([0, 1, 1], [1, 2, 3], size, [3, 3, 3, 3]),
            ([0, 0, 0], [1, 2, 99], size, [1, 1, 1, 1]),
        ):
            tables.clear()
            bodies = [
                partial(body, e, [numbers[e.comm.rank], 7], words[e.comm.rank]) for e in engines
            ]
            for error, data in in_threads(bodies):
                if 99 in numbers:
                    is_a("bad numbers", error, CollectiveMismatchError)
                else:
                    equal("error", error, None)
                equal(f"data after words {words}", data.tolist(), total)
            equal("checks", len(tables), called)
            for table in tables:
                equal("numbers of all ranks", table.tolist(), [[n, 7] for n in numbers])
        _everywhere(engines)


# ---- failures -----------------------------------------------------------------------------


def _check_deadline(make: MakeEngines) -> None:
    for size, absent in ((2, (1,)), (4, (0, 2))):
        with opened(make, size) as engines:
            _everywhere(engines)
            present = [engine for engine in engines if engine.comm.rank not in absent]
            errors = in_threads([partial(_all_reduce, e, timeout_s=0.2) for e in present])
            for error in errors:
                found = is_a("rank that waited", error, CollectiveTimeoutError)
                equal("ranks to blame", found.context.peers, absent)
                equal("group is usable", found.context.usable, False)
            # A late rank gets the error at once, not after its own deadline.
            for rank in absent:
                is_a("rank that came late", _all_reduce(engines[rank]), CollectiveTimeoutError)


def _check_abort(make: MakeEngines) -> None:
    with opened(make, 3) as engines:
        waiting = [
            _submit(e, _task(_sum_program(e.comm.rank, 3, 1), np.ones(1, np.float32)), inline=False)
            for e in engines[:2]
        ]
        queued = _submit(
            engines[0], _task(_sum_program(0, 3, 1), np.ones(1, np.float32)), inline=False
        )
        engines[1].abort("enough of this")
        for completion in [*waiting, queued]:
            equal("done in time", completion.wait_until(Deadline(PATIENCE_S)), True)
            error = is_a("aborted", completion.error, CollectiveAbortedError)
            equal("the reason is reported", "enough of this" in error.what, True)
            equal("ranks to blame", error.context.peers, (1,))
        is_a("a later call", _all_reduce(engines[2]), CollectiveAbortedError)


def _check_own_failure(make: MakeEngines) -> None:
    def fail() -> None:
        raise OSError("disk full")

    with opened(make, 2) as engines:
        bodies = [partial(_all_reduce, engines[0], finish=fail), partial(_all_reduce, engines[1])]
        first, _ = in_threads(bodies)
        equal("cause", repr(is_a("rank 0", first, InternalError).__cause__), "OSError('disk full')")
        error = is_a("rank 1, later", _all_reduce(engines[1]), PeerFailedError)
        equal("the reason is reported", "disk full" in error.what, True)


def _check_lost(make: MakeEngines) -> None:
    with opened(make, 3) as engines:
        _everywhere(engines)
        bodies: list[Callable[[], BaseException | None]]
        bodies = [partial(_all_reduce, engine) for engine in engines[:2]]
        errors = in_threads([*bodies, lambda: engines[2].close()])
        for error in errors[:2]:
            found = is_a("rank that stayed", error, PeerLostError)
            equal("ranks to blame", found.context.peers, (2,))


# ---- order and life -----------------------------------------------------------------------


def _check_order(make: MakeEngines) -> None:
    """Check that asynchronous and inline tasks run in the order of submission on every rank."""
    size, count = 3, 30

    def body(engine: Engine) -> None:
        rank = engine.comm.rank
        data = np.ones(2, np.float64)
        order: list[int] = []
        pending = []
        for i in range(count):
            schedule = build("all_reduce", ["linear", "ring"][i % 2], size)
            program = lower(schedule, rank, layout_for(schedule, 2))
            task = _task(
                program, data, agreed=(i,), dtype=dtype_named("float64"),
                finish=partial(order.append, i),
            )  # fmt: skip
            pending.append(_submit(engine, task, inline=i % 7 == rank))
        for completion in pending:
            equal("done in time", completion.wait_until(Deadline(PATIENCE_S)), True)
            equal("error", completion.error, None)
        equal("order", order, list(range(count)))
        equal("sum of sums", data.tolist(), [float(size**count)] * 2)

    with opened(make, size) as engines:
        in_threads([partial(body, engine) for engine in engines])


def _check_callbacks(make: MakeEngines) -> None:
    """Check that a callback may submit, but may not wait for its own thread."""

    def body(engine: Engine) -> None:
        rank = engine.comm.rank
        later = [Completion(), Completion()]
        refused: list[Exception] = []

        def make_task() -> Task:
            return _task(_sum_program(rank, 2, 1), np.ones(1, np.float32))

        def callback(_: Completion) -> None:
            engine.submit(make_task(), later[0], inline=False)
            try:
                # The task before is queued, and only this thread could run it.
                engine.submit(make_task(), later[1], inline=True)
            except UsageError as error:
                refused.append(error)
            raise RuntimeError("an error in a callback ends only the callback")

        first = Completion()
        first.add_callback(callback)
        engine.submit(make_task(), first, inline=False)
        for completion in (first, later[0]):
            equal("done in time", completion.wait_until(Deadline(PATIENCE_S)), True)
            equal("error", completion.error, None)
        equal("refused waits", len(refused), 1)

    with opened(make, 2) as engines:
        in_threads([partial(body, engine) for engine in engines])
        _everywhere(engines)


def _check_close(make: MakeEngines) -> None:
    with opened(make, 2) as engines:
        first = engines[0]
        tasks = [_task(_sum_program(0, 2, 1), np.ones(1, np.float32)) for _ in range(3)]
        running, *queued = [_submit(first, task, inline=False) for task in tasks]
        first.close()
        for completion in (running, *queued):
            equal("done after close", completion.done(), True)
        is_a("the running task", running.error, UnisonoError)
        for completion in queued:
            is_a("a queued task", completion.error, ClosedError)
        raises("a task for a closed engine", ClosedError, lambda: _submit(first, tasks[0]))
        first.close()
        equal("a rank that stayed has an error", _all_reduce(engines[1]) is not None, True)


ENGINE_CHECKS = checks_in(globals())
