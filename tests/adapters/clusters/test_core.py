"""The core of unisono.ray, dask and spark, with processes in place of a framework."""

import importlib
import os
import pickle
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import pytest

from tests.adapters.clusters import ranks
from unisono.adapters.clusters import member, outcomes
from unisono.adapters.clusters.meeting import (
    FAILED,
    JOINED,
    STARTED,
    Meeting,
    attend,
    close_meeting,
    end_start,
    open_meeting,
    post,
    posts,
)
from unisono.adapters.clusters.member import RankOutcome
from unisono.adapters.clusters.outcomes import CallOnRanks, collect
from unisono.core.base.deadline import Deadline
from unisono.errors import (
    CollectiveMismatchError,
    Context,
    InvalidArgumentError,
    NotInitializedError,
    PeerFailedError,
    PeerLostError,
    RendezvousError,
    StoreConnectionError,
    UnsupportedError,
    UsageError,
    WorkerFailedError,
)

HERE = "127.0.0.1"


class Processes(CallOnRanks):
    """A framework of executors with one process each."""

    def __init__(self, executors, meeting):
        super().__init__(meeting, [f"process {rank}" for rank in range(meeting.size)])
        self.executors = executors
        self.pending = {}

    def submit(self, fn, *args):
        for rank, executor in enumerate(self.executors[: self.meeting.size]):
            if executor is not None:
                self.pending[executor.submit(take_part, self.meeting, rank, fn, *args)] = rank
        return self

    def poll(self, timeout_s):
        for future in wait(self.pending, timeout_s, FIRST_COMPLETED).done:
            rank = self.pending.pop(future)
            try:
                yield future.result()
            except BrokenProcessPool:
                yield RankOutcome(rank=rank, lost="its process ended")


def take_part(meeting, rank, fn, *args):
    return member.attempt(meeting, rank, lambda: member.join_and_call(meeting, rank, fn, *args))


def use_python():
    os.environ["UNISONO_ENGINE"] = "reference"


@pytest.fixture
def executors():
    pools = [ProcessPoolExecutor(1, get_context("forkserver")) for _ in range(3)]
    yield pools
    for pool in pools:
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def meet():
    """Return a function that opens a meeting; at the end all of them are closed."""
    opened = []

    def open_one(size, timeout=60, backend=None):
        opened.append(open_meeting(HERE, size, timeout, backend, "pickle"))
        return opened[-1]

    yield open_one
    for each in opened:
        close_meeting(each)


def run(executors, meeting, fn, *args, start_s=60):
    return collect(
        Processes(executors, meeting).submit(fn, *args), Deadline(start_s), hint="wait for it"
    )


def test_groups_have_tokens_of_their_own(meet):
    first, second = meet(2), meet(2)
    assert first.token != second.token
    assert len(first.token) == 64
    assert first.token not in f"{first} {first!r}"
    with pytest.raises(InvalidArgumentError, match="a group needs at least 1 rank, got 0"):
        meet(0)


def test_results_by_rank_and_the_next_group(executors, meet):
    for size in (3, 2):
        assert run(executors, meet(size), ranks.summed, 2.0) == ranks.expected(size, 2.0)
    # The start's time-out is not that of the group.
    assert run(executors, meet(2, timeout=50), ranks.token) == [("", 1800.0)] * 2


@pytest.mark.native
def test_ranks_of_two_engines_are_refused(executors, meet):
    """As workers of Ray, Dask and Spark whose nodes differ."""
    executors[1].submit(use_python).result()
    with pytest.raises(
        UnsupportedError, match=r"one engine, but .*\(version.* on rank 0, Python on "
    ):
        run(executors, meet(2), ranks.summed, 2.0)


def test_first_cause_is_raised(executors, meet):
    with pytest.raises(CollectiveMismatchError):
        run(executors, meet(3), ranks.mismatched)
    with pytest.raises(KeyError, match="of rank 1") as caught:
        run(executors, meet(3), ranks.raising, 1)
    assert isinstance(caught.value.__cause__, WorkerFailedError)
    assert "rank 1 of 3 (process 1, pid " in str(caught.value.__cause__)
    assert " raised an error\nTraceback (most" in str(caught.value.__cause__)
    assert caught.value.__notes__[0].startswith("raised on rank 1 of 3 (process 1, pid ")
    assert run(executors, meet(3), ranks.summed, 2.0) == ranks.expected(3, 2.0)


def test_rank_that_raises_no_exception_fails_at_once(executors, meet):
    began_s = time.monotonic()
    with pytest.raises(WorkerFailedError, match=r"rank 1 of 3 raised asyncio.*CancelledError"):
        run(executors, meet(3), ranks.cancelled, 1)
    assert time.monotonic() - began_s < 30


def test_lost_rank_is_named_by_a_survivor(executors, meet, monkeypatch):
    # On a busy machine the survivors need longer.
    monkeypatch.setattr(outcomes, "SETTLE_S", 100)
    with pytest.raises(PeerLostError, match="all_reduce #") as caught:
        run(executors, meet(3), ranks.dying, 1, 7)
    assert caught.value.context.peers == (1,)
    assert "rank 1 (process 1) was lost: its process ended" in caught.value.__notes__


def test_rank_that_has_not_started_is_named(executors, meet):
    meeting = meet(3, timeout=0.3)
    # The other ranks would wait 5 s longer; the store that closes ends their waits.
    with pytest.raises(
        RendezvousError, match=r"1 of 3 ranks had not started after 0\.3 s"
    ) as caught:
        run([*executors[:2], None], meeting, ranks.summed, 2.0, start_s=3)
    assert "rank 2 (process 2)" in caught.value.what
    assert caught.value.context.peers == (2,)
    assert caught.value.hint == "wait for it"


def test_ranks_that_wait_end_when_another_fails(executors, meet):
    """Rank 1 never joins; rank 0 waits for it at the store, at most 65 s."""
    meeting = meet(2)
    waiting = executors[0].submit(take_part, meeting, 0, ranks.summed, 2.0)
    while not posts(meeting, STARTED):
        time.sleep(0.01)
    end_start(meeting)
    outcome = waiting.result(timeout=30)
    assert isinstance(pickle.loads(outcome.error), StoreConnectionError)


def test_rank_that_comes_too_late_fails_at_once(meet, monkeypatch):
    monkeypatch.setattr("unisono.adapters.clusters.meeting._CONNECT_S", 60.0)
    meeting = meet(2)
    close_meeting(meeting)
    began_s = time.monotonic()
    with pytest.raises(StoreConnectionError) as caught:
        attend(meeting)
    text = " is closed because another rank has failed, or cannot be reached"
    assert caught.value.what.endswith(text)
    assert time.monotonic() - began_s < 30


def test_rank_that_starts_again_is_refused(meet):
    """Dask does so if a new worker has the address of a dead worker."""
    meeting = meet(1)
    assert take_part(meeting, 0, int).value == 0
    error = pickle.loads(take_part(meeting, 0, int).error)
    assert type(error) is PeerLostError
    assert error.what == "rank 0 starts a second time: the framework has lost a rank of this group"
    assert error.context.peers == (0,)


def test_start_ends_only_if_a_rank_waits(meet):
    meeting = meet(2)
    post(meeting, JOINED, 0, b"")
    post(meeting, JOINED, 1, b"")
    end_start(meeting)
    post(meeting, FAILED, 1, b"text")
    assert posts(meeting, FAILED) == {1: b"text"}


def test_second_rank_in_a_process_is_refused(meet):
    first, other = meet(2), meet(2)
    inside, done = threading.Event(), threading.Event()

    def hold():
        inside.set()
        done.wait(30)

    thread = threading.Thread(target=member.attempt, args=(first, 0, hold))
    thread.start()
    inside.wait(30)
    try:
        same, another = member.attempt(first, 1, int), member.attempt(other, 1, int)
        again = member.attempt(first, 0, int)
    finally:
        done.set()
        thread.join()
    for outcome, text in [
        (same, f"ranks 0 and 1 are threads of one process, {os.getpid()}: each rank needs"),
        (
            another,
            f"rank 1 cannot start: process {os.getpid()} still runs an earlier call as rank 0",
        ),
        (again, f"rank 0 cannot start: process {os.getpid()} still runs an earlier call as rank 0"),
    ]:
        error = pickle.loads(outcome.error)
        assert isinstance(error, UsageError)
        assert text in error.what
    assert member.attempt(other, 1, int).value == 0


def test_call_outside_of_the_group_is_refused(meet):
    with pytest.raises(NotInitializedError, match="rank 1 is no longer in this group: it raised"):
        member.call(meet(2), 1, int)


class Known(CallOnRanks):
    """Outcomes that are there already."""

    def __init__(self, meeting, found):
        super().__init__(meeting, [f"place {rank}" for rank in range(meeting.size)])
        self.found = found

    def poll(self, timeout_s):
        found, self.found = self.found, []
        return found


def failed(rank, error):
    try:
        raise error
    except BaseException as raised:
        return member.failure(meeting_of(3), rank, raised)


def wrapped(error):
    outer = RuntimeError("step failed")
    outer.__cause__ = error
    return outer


def meeting_of(size):
    return Meeting(HERE, 0, "", size, 1.0, None, "pickle")


def lost_error(*peers):
    return PeerLostError("all_reduce failed", context=Context(peers=peers))


@pytest.mark.parametrize(
    ("found", "expected", "peers"),
    [
        # A consequence comes first, the cause later.
        ([failed(0, PeerFailedError("x")), failed(2, KeyError("cause"))], KeyError, None),
        ([failed(0, StoreConnectionError("x")), failed(1, OSError("cause"))], OSError, None),
        ([failed(0, wrapped(PeerFailedError("x"))), failed(1, KeyError("cause"))], KeyError, None),
        # The framework's report and a survivor's: the survivor knows the operation.
        ([RankOutcome(rank=1, lost="gone"), failed(0, lost_error(1))], PeerLostError, (1,)),
        # The survivor's error is about another rank.
        ([RankOutcome(rank=1, lost="gone"), failed(0, lost_error(2))], PeerLostError, (1,)),
        (
            [RankOutcome(rank=1, lost="gone"), failed(0, ValueError("of the user"))],
            ValueError,
            None,
        ),
        ([failed(0, lost_error(2)), failed(1, lost_error(2))], PeerLostError, (2,)),
        # A host with two ranks was lost; the survivor's call needed one of them.
        (
            [
                RankOutcome(rank=2, lost="gone"),
                RankOutcome(rank=1, lost="gone"),
                failed(0, lost_error(2)),
            ],
            PeerLostError,
            (1, 2),
        ),
    ],
)
def test_cause_is_found(found, expected, peers, monkeypatch):
    monkeypatch.setattr(outcomes, "SETTLE_S", 0.01)
    with pytest.raises(expected) as caught:
        collect(Known(meeting_of(3), found))
    assert type(caught.value) is expected
    assert peers is None or caught.value.context.peers == peers
    if any(outcome.lost for outcome in found):
        assert "was lost: gone" in str([caught.value, *getattr(caught.value, "__notes__", [])])
    missing = sorted({0, 1, 2} - {outcome.rank for outcome in found})
    notes = caught.value.__notes__
    assert (f"ranks {missing} had not ended 0.01 s later" in notes) is bool(missing)


def test_all_ranks_of_a_lost_host_are_named(monkeypatch):
    monkeypatch.setattr(outcomes, "SETTLE_S", 0.01)
    found = [RankOutcome(rank=rank, lost=f"gone {rank}") for rank in (2, 1)]
    with pytest.raises(
        PeerLostError, match=r"^ranks 1 and 2 of 3 \(.*\) were lost: gone 2"
    ) as caught:
        collect(Known(meeting_of(3), found))
    assert caught.value.context.peers == (1, 2)
    assert any("rank 1 (" in note and "gone 1" in note for note in caught.value.__notes__)


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("no")


def test_error_that_cannot_be_pickled_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(outcomes, "SETTLE_S", 0.01)
    with pytest.raises(WorkerFailedError, match=r"rank 0 of 3 raised .*Unpicklable: text\n"):
        collect(Known(meeting_of(3), [failed(0, Unpicklable("text"))]))


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()])
def test_end_of_a_rank_does_not_end_the_caller(error, monkeypatch):
    monkeypatch.setattr(outcomes, "SETTLE_S", 0.01)
    with pytest.raises(WorkerFailedError, match=f"rank 1 of 3 raised {type(error).__name__}"):
        collect(Known(meeting_of(3), [failed(1, error)]))


def test_error_outside_of_the_function_has_no_process(monkeypatch):
    """The process in which the framework raised it may be the caller's."""
    monkeypatch.setattr(outcomes, "SETTLE_S", 0.01)
    outcome = member.failure(meeting_of(3), 1, ValueError("x"), outcomes.OUTSIDE)
    with pytest.raises(ValueError, match="x") as caught:
        collect(Known(meeting_of(3), [outcome]))
    assert caught.value.__notes__[0] == "raised on rank 1 of 3 (place 1, outside of the function)"


@pytest.mark.parametrize(
    ("name", "package", "text"),
    [
        ("ray", "ray", "unisono.ray needs Ray: pip install 'unisono[ray]'"),
        ("dask", "distributed", "unisono.dask needs Dask: pip install 'unisono[dask]'"),
        ("spark", "pyspark", "unisono.spark needs PySpark: pip install 'unisono[spark]'"),
    ],
)
def test_module_without_its_package_is_an_import_error(name, package, text, monkeypatch):
    for module in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    for module in (f"unisono.{name}", f"unisono.adapters.clusters.{name}"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"unisono.{name}")
    assert str(caught.value) == text
