"""A rank that leaves out a call is an error on all ranks, never a sum of two different steps."""

import asyncio
import contextlib
import resource
import threading
from contextlib import contextmanager

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable, f32, fails, finish
from unisono.core.base.deadline import Deadline
from unisono.core.base.types import dtype_named
from unisono.core.engines import Call, Prepared, Task
from unisono.core.engines.api import NO_STEPS
from unisono.core.transports.messages import Failure
from unisono.errors import (
    ArgumentTypeError,
    CollectiveAbortedError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    UnisonoError,
    UnsupportedError,
)


def ends():
    """Return new errors, because an error keeps the frames through which it came."""
    return [
        MemoryError("no memory"),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        RecursionError("too deep"),
        SystemExit(3),
        GeneratorExit(),
        ValueError("a value"),
        TypeError("a type"),
        StopIteration(),
    ]


class Hostile:
    """An array, an object and a list of numbers: every use of it raises an error."""

    def __init__(self, error):
        self.error = error

    def _raise(self, *_):
        raise self.error

    __array_interface__ = property(_raise)
    __reduce_ex__ = __iter__ = _raise


class HostileSerializer(dist.PickleSerializer):
    """Raises an error in place of the bytes of an object."""

    def __init__(self, error):
        self.error = error

    def dumps(self, obj, buffer_callback=None):
        raise self.error


def rows(value):
    return [value] + [1] * (dist.get_world_size() - 1)


def objects():
    return [None] * dist.get_world_size()


# name -> (the call of the rank that fails, the call of the other ranks)
CALLS = {
    "all_reduce": (
        lambda hostile, **how: dist.all_reduce(hostile, **how),
        lambda **how: dist.all_reduce(f32(), **how),
    ),
    "broadcast": (
        lambda hostile, **how: dist.broadcast(hostile, 0, **how),
        lambda **how: dist.broadcast(f32(), 0, **how),
    ),
    "all_gather": (
        lambda hostile, **how: dist.all_gather([hostile] * dist.get_world_size(), f32(), **how),
        lambda **how: dist.all_gather([f32() for _ in objects()], f32(), **how),
    ),
    "all_to_all_single": (
        lambda hostile, **how: dist.all_to_all_single(
            f32(dist.get_world_size()), f32(dist.get_world_size()), hostile, None, **how
        ),
        lambda **how: dist.all_to_all_single(
            f32(dist.get_world_size()), f32(dist.get_world_size()), **how
        ),
    ),
    "method in c10d's form": (
        lambda hostile, **how: finish(dist.group.WORLD.allreduce([hostile])),
        lambda **how: finish(dist.group.WORLD.allreduce([f32()])),
    ),
}
OBJECT_CALLS = {
    "all_gather_object": lambda obj, **how: dist.all_gather_object(objects(), obj, **how),
    "gather_object": lambda obj, **how: dist.gather_object(
        obj, objects() if dist.get_rank() == 0 else None, **how
    ),
    "broadcast_object_list": lambda obj, **how: dist.broadcast_object_list([obj], **how),
    "scatter_object_list": lambda obj, **how: dist.scatter_object_list(
        [None], [obj] * dist.get_world_size() if dist.get_rank() == 0 else None, **how
    ),
    "all_reduce_object": lambda obj, **how: dist.all_reduce_object(obj, lambda a, b: a, **how),
}


MISSING = (MemoryError, RuntimeError)


def same_kind(error):
    """Expect this very error, whatever its class."""
    return pytest.raises(type(error))


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.ranks(2, 3, engine="both")
def test_whatever_ends_a_call_before_it_began_refuses_it(rank, async_op):
    odd = dist.get_world_size() - 1
    for hostile, good in CALLS.values():
        for error in ends():
            if rank == odd:
                with same_kind(error):
                    finish(hostile(Hostile(error), async_op=async_op))
            else:
                reason = f"rank {odd} called", "but refused it: ", type(error).__name__
                with fails(CollectiveMismatchError, *reason) as caught:
                    finish(good(async_op=async_op))
                assert caught.value.context.usable is True
            check_usable()


@pytest.mark.ranks(2, 3, engine="both")
def test_whatever_a_serializer_raises_reaches_all_ranks(rank):
    for name, call in OBJECT_CALLS.items():
        for error in ends():
            with same_kind(error) if rank == 0 else fails(CollectiveError, type(error).__name__):
                call(1, serializer=HostileSerializer(error) if rank == 0 else None)
                # Only the root of a gather reads the objects.
                assert (rank != 0, name, isinstance(error, Exception)) == (
                    True,
                    "gather_object",
                    True,
                )
                raise CollectiveError(type(error).__name__)
            check_usable()


@pytest.mark.ranks(3, engine="both")
def test_whatever_ends_a_message_before_it_began_concerns_no_other_rank(rank):
    """A message is no collective call: nothing is refused, and the next message is matched."""
    for error in ends():
        for name in ("send", "recv", "isend", "irecv"):
            for arguments in ((Hostile(error), 1), (f32(), HostileRoot(error))):
                if rank == 0:
                    with same_kind(error):
                        finish(getattr(dist, name)(*arguments))
        if rank == 0:
            dist.send(f32(), 1)
        elif rank == 1:
            dist.recv(f32(), 0)
        check_usable()


@pytest.mark.ranks(2, engine="both")
def test_whatever_a_sender_of_objects_raises_reaches_the_receiver(rank):
    for error in ends():
        if rank == 0:
            with same_kind(error):
                dist.send_object_list([1], 1, serializer=HostileSerializer(error))
        else:
            with fails(CollectiveError, "rank 0 had nothing to send", type(error).__name__):
                dist.recv_object_list([None], 0)
        check_usable()


@pytest.mark.ranks(2, engine="both")
def test_a_block_left_by_an_exception_refuses_its_call(rank, tmp_path_factory):
    def coalescing():
        with dist._coalescing_manager():
            dist.all_reduce(f32())
            yield
            dist.all_reduce(f32())

    def file():
        with dist.open_file("/dev/shm/unisono-in-step", "w") as opened:
            yield
            opened.write_in_order(np.ones(1))

    def step():
        with dist.step() as made:
            dist.all_reduce(f32())
            yield
            made.commit()

    for block in (coalescing, file, step):
        for error in ends():
            if isinstance(error, (StopIteration, GeneratorExit)):
                continue  # they would end the generator of this test
            body = block()
            next(body)
            if rank == 1:
                with same_kind(error):
                    body.throw(error)
            else:
                name = type(error).__name__
                with fails(CollectiveMismatchError, "rank 1 called", "but refused it: ", name):
                    next(body)
            check_usable()


@pytest.mark.ranks(2, engine="both")
def test_an_asynchronous_block_left_by_an_exception_breaks_the_group(rank):
    group = dist.new_group([0, 1])
    if rank == 1:
        with (
            pytest.raises(ValueError, match="a value"),
            dist._coalescing_manager(group, None, True),
        ):
            raise ValueError("a value")
    else:
        with fails(CollectiveAbortedError, "ValueError in a coalescing block on rank 1"):
            with dist._coalescing_manager(group, None, True) as manager:
                dist.all_reduce(f32(), group=group)
                dist.all_reduce(np.ones(1), group=group)
            manager.wait()
    with pytest.raises(CollectiveAbortedError):
        dist.all_reduce(f32(), group=group)


@contextmanager
def no_refusal(group):
    """Let a rank fail to refuse a call too."""
    backend = group.backends["cpu"]

    def refuse(*_, **__):
        raise MemoryError("no memory for a refusal")

    backend.refuse = refuse
    yield
    del backend.refuse


@pytest.mark.ranks(2, 3, engine="both")
def test_a_rank_that_cannot_even_refuse_breaks_the_group_with_its_next_call(rank):
    group = dist.new_group(timeout=30)
    if rank == 0:
        with no_refusal(group), pytest.raises(MemoryError, match=r"no memory$"):
            dist.all_reduce(Hostile(MemoryError("no memory")), group=group)
    for _ in range(2):
        with fails(CollectiveAbortedError, "all_reduce ended before it began"):
            dist.all_reduce(f32(), group=group)


@pytest.mark.ranks(2, 3, engine="both")
def test_each_of_several_refused_calls_in_a_row_counts(rank):
    for _ in range(4):
        if rank == 0:
            # Python gives each MemoryError the memory, and so the identity, of the last one. Unlike
            # pytest.raises, this keeps none.
            with contextlib.suppress(MemoryError), dist._coalescing_manager():
                raise MemoryError("no memory")
        else:
            with fails(CollectiveMismatchError, "rank 0 called", "but refused it: "):
                dist.all_reduce(f32())
    check_usable()


class HostileRoot:
    """A rank of which every use raises an error."""

    def __init__(self, error):
        self.error = error

    def __index__(self):
        raise self.error


def in_block(block, error):
    """Leave a block by an error, or end it if there is none."""
    with block as made:
        if error is not None:
            raise error
        if hasattr(made, "commit"):
            made.commit()
        elif not hasattr(made, "path"):
            dist.all_reduce(f32())


TWICE = {
    "coalescing": lambda error: in_block(dist._coalescing_manager(), error),
    "step": lambda error: in_block(dist.step(), error),
    "file": lambda error: in_block(dist.open_file("/dev/shm/unisono-twice", "w"), error),
    "root": lambda error: dist.broadcast(f32(), 0 if error is None else HostileRoot(error)),
    "form": lambda error: finish(
        dist.group.WORLD.allreduce([f32() if error is None else Hostile(error)])
    ),
    "array": lambda error: dist.all_reduce(f32() if error is None else Hostile(error)),
    "serializer": lambda error: dist.all_gather_object(
        objects(), 1, serializer=None if error is None else HostileSerializer(error)
    ),
}


@pytest.mark.parametrize("block", TWICE)
@pytest.mark.ranks(2, engine="both")
def test_one_error_that_ends_several_calls_in_a_row_refuses_each(rank, block):
    for error in (MemoryError("no memory"), TypeError("a type"), ArgumentTypeError("a type")):
        for _ in range(3):
            if rank == 1:
                with same_kind(error):
                    TWICE[block](error)
            else:
                with fails(CollectiveError, "rank 1"):
                    TWICE[block](None)
        check_usable()


@pytest.mark.ranks(3, engine="both")
def test_an_error_of_another_group_or_of_a_message_refuses_the_call_of_a_block(rank):
    pair = dist.new_group([0, 1], timeout=0.2)

    def message():
        dist.recv(f32(), 2, timeout=0.01)

    def other_group():
        dist.barrier(pair)

    for fails_here in (message, other_group):
        if rank == 0:
            with pytest.raises(CollectiveTimeoutError), dist._coalescing_manager():
                fails_here()
        else:
            with fails(CollectiveMismatchError, "rank 0 called", "but refused it: "):
                dist.all_reduce(f32())
    check_usable()


@contextmanager
def stream_that_waits():
    """Make a stream the current one, whose calls begin after `gate.set()`."""
    gate = threading.Event()
    stream = dist.Stream("in step")
    with dist.stream(stream):
        stream.submit(gate.wait, 60)
        yield gate
        gate.set()


@pytest.mark.ranks(2, 3, engine="both")
def test_a_refused_call_keeps_its_place_behind_calls_that_wait_for_their_stream(rank):
    odd, size = dist.get_world_size() - 1, dist.get_world_size()
    good = [np.full(3, 10.0**k) for k in range(3)]
    wrong = "no operation" if rank == odd else dist.ReduceOp.SUM
    with stream_that_waits():
        works = [dist.all_reduce(x, async_op=True) for x in good[:2]]
        if rank == odd:
            with fails(ArgumentTypeError, "got 'no operation'"):
                dist.all_reduce(f32(), wrong, async_op=True)
        else:
            refused = dist.all_reduce(f32(), wrong, async_op=True)
        works.append(dist.all_reduce(good[2], async_op=True))
    for work in works:
        work.wait()
    assert [x[0] for x in good] == [size, 10 * size, 100 * size]
    if rank != odd:
        with fails(CollectiveMismatchError, f"rank {odd} called", "but refused it: "):
            refused.wait()
    check_usable()


@pytest.mark.ranks(2, engine="both")
def test_an_argument_that_lets_an_earlier_call_begin_is_reported(rank):
    class Root:
        """Raises an error when the call in the stream has ended."""

        def __index__(self):
            gate.set()
            work.wait_on_host()
            raise MemoryError("no memory")

    with stream_that_waits() as gate:
        work = dist.all_reduce(f32(), async_op=True)
        if rank == 0:
            with pytest.raises(MemoryError):
                dist.broadcast(f32(), Root())
        else:
            gate.set()
            with fails(CollectiveMismatchError, "rank 0 called", "but refused it: MemoryError"):
                dist.broadcast(f32(), 0, async_op=True).wait_on_host()
    check_usable()


@pytest.mark.ranks(2, engine="both")
def test_a_refusal_on_the_thread_of_a_stream_leaves_the_next_call_alone(rank):
    backend, refuses, made = dist.group.WORLD.backends["cpu"], threading.Event(), threading.Event()

    def refuse(*arguments, **how):
        refuses.set()
        assert made.wait(60)
        del backend.refuse
        backend.refuse(*arguments, **how)

    with stream_that_waits() as gate:
        if rank == 0:
            backend.refuse = refuse
        first = dist.all_reduce(np.array([None]) if rank == 0 else f32(), async_op=True)
        gate.set()
        assert rank != 0 or refuses.wait(60)
        second = dist.all_reduce(f32(), async_op=True)
        made.set()
    with pytest.raises((UnsupportedError, CollectiveMismatchError)):
        first.wait()
    second.wait()
    check_usable()


def leave_out(group):
    """Count a call that this rank does not make."""
    turn = group.backends["cpu"]._engine._turn
    assert turn.take() > 0
    turn.give()


@pytest.mark.parametrize("how", ["sync", "async", "average"])
@pytest.mark.ranks(2, 3, engine="both")
def test_ranks_whose_numbers_differ_get_an_error_and_no_sum(rank, how):
    compare_numbers(rank, how)


@pytest.mark.ranks(3, transport="tcp")
def test_ranks_that_exchange_messages_compare_their_numbers(rank):
    compare_numbers(rank, "sync")


def compare_numbers(rank, how):
    """Let rank 1 count a call that it leaves out; no later call may give a result."""
    group = dist.new_group(timeout=1)
    x = np.full(4, rank + 1.0)
    engine = group.backends["cpu"]._engine
    for _ in range(2):
        dist.all_reduce(x.copy(), group=group)
    if rank == 1:
        leave_out(group)
    op = dist.ReduceOp.AVG if how == "average" else dist.ReduceOp.SUM
    for at in range(2):
        with pytest.raises(UnisonoError) as caught:
            finish(dist.all_reduce(x, op, group, async_op=how == "async"))
        assert (x == rank + 1).all(), "a sum of two different calls"
        if engine.name == "native":
            assert isinstance(caught.value, CollectiveMismatchError)
            assert caught.value.context.peers == (1,)
            assert "rank 1 is in call #4, all_reduce(float64[4]" in caught.value.what
            ranks = "rank 0 is" if dist.get_world_size() == 2 else "ranks 0 and 2 are"
            assert f"{ranks} in call #3, all_reduce(float64[4]" in caught.value.what
            assert caught.value.what.count(" at test_left_out_calls.py:") == 2
            assert at == 0 or "the group is broken" in caught.value.what
        else:
            assert isinstance(caught.value, CollectiveTimeoutError)
        assert caught.value.context.usable is False


@pytest.mark.native
@pytest.mark.ranks(2)
def test_a_table_of_sizes_has_the_number_of_its_call(rank):
    """A rank that left a call after its agreement gives no row of the call's table."""
    group = dist.new_group(timeout=5)
    dist.barrier(group)
    prepared = Prepared(Call.of("test", "test()", ("test",)), NO_STEPS, dtype_named("uint8"))
    for skipped in (0, 1):
        task = Task(prepared, None, None, Deadline(5), seq=7 + rank * skipped)
        engine = group.backends["cpu"]._engine
        if skipped:
            with pytest.raises((CollectiveMismatchError, Failure), match=r"test|differently"):
                engine._gather(task, np.array([rank]))
        else:
            assert engine._gather(task, np.array([rank])).tolist() == [[0], [1]]


def available(extra_bytes):
    """Let this process have no more memory than now, and some bytes; None: as much as it wants."""
    if extra_bytes is None:
        limit = resource.RLIM_INFINITY
    else:
        with open("/proc/self/statm", encoding="ascii") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


@pytest.mark.ranks(2, kind="processes", engine="both")
def test_steps_stay_apart_if_a_rank_runs_out_of_memory(rank):
    wide = np.zeros((4_000_000, 2))
    whole = np.zeros(8_000_000)
    calls = {
        "a strided array": lambda: dist.all_reduce(wide[:, 0]),
        "a factor": lambda: dist.all_reduce(whole, dist.ReduceOp.PREMUL_SUM(2.0)),
        "an asynchronous call": lambda: finish(dist.all_reduce(wide[:, 0], async_op=True)),
        "in place": lambda: dist.all_to_all_single(whole, whole),
    }
    for name, call in calls.items():
        check_usable()
        if rank == 1:
            available(4 << 20)
        try:
            # Also "can't start new thread".
            with pytest.raises(MISSING if rank == 1 else CollectiveMismatchError):
                call()
        finally:
            available(None)
        for step in range(3):
            wide[:, 0] = 100 * step + rank
            dist.all_reduce(wide[:, 0])
            assert (wide[:, 0] == 200 * step + 1).all(), (name, step)


@pytest.mark.ranks(2, 3, engine="both")
def test_a_monitored_barrier_with_wrong_arguments_is_an_error_on_all_ranks(rank):
    for odd in range(dist.get_world_size()):
        if rank == odd:
            with fails(ArgumentTypeError, "timeout must be seconds"):
                dist.monitored_barrier(timeout="soon")
        else:
            with fails(CollectiveMismatchError, f"rank {odd} called it, but refused it"):
                dist.monitored_barrier()
    dist.monitored_barrier()
    check_usable()
