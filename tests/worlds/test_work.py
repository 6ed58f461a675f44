"""Work and Future: waiting, polling, chaining, awaiting."""

import logging

import pytest

from tests.support import several
from tests.worlds import work_bodies
from unisono import Future, collect_all
from unisono.errors import CollectiveTimeoutError, UsageError
from unisono.testing import run

BODIES = [
    work_bodies.states,
    work_bodies.dropped,
    work_bodies.chains,
    work_bodies.awaited,
    work_bodies.threads,
]


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
@pytest.mark.parametrize("body", BODIES, ids=lambda v: v.__name__)
def test_on_threads(body, transport):
    run(body, 2, transport=transport)


def test_on_processes():
    run(several.run_all, 2, ranks="processes", args=(BODIES,))


def test_a_wait_in_a_callback_is_refused():
    for told in run(work_bodies.waiting_in_a_callback, 2):
        assert len(told) == 3
        assert told[0] == "all_reduce on group 'default' waits for the thread it runs on"
        assert set(told[1:]) == {
            "wait() in a callback, on the thread that runs the operations of this group, would "
            "wait for itself"
        }


def test_a_destroyed_group_ends_what_is_queued():
    told = run(work_bodies.destroyed, 2)[0]
    assert told[0][0] in ("CollectiveAbortedError", "ClosedError")
    assert "destroyed" in told[0][1]
    assert told[1] == (
        "ClosedError",
        "group '1' was destroyed before all_reduce(float64[1], SUM) ran",
    )


def test_a_future_by_hand(caplog):
    future, seen = Future(), []
    future.add_done_callback(lambda f: seen.append(f.value()))
    future.add_done_callback(lambda f: 1 / 0)
    with pytest.raises(UsageError, match="the future has no value yet"):
        future.value()
    assert (future.done(), future.exception(), repr(future)) == (False, None, "<Future pending>")
    with pytest.raises(CollectiveTimeoutError, match=r"no value after 0\.01 s"):
        future.wait(0.01)
    with caplog.at_level(logging.ERROR):
        future.set_result(5)
    assert "a done-callback raised" in caplog.text
    assert (future.wait(), future.value(), seen, future.done()) == (5, 5, [5], True)
    assert repr(future) == "<Future done>"
    for call in (lambda: future.set_result(6), lambda: future.set_exception(ValueError())):
        with pytest.raises(UsageError, match="the future is done already"):
            call()
    assert future.value() == 5, "a refused set_result must not change the value"
    future.add_done_callback(lambda f: seen.append("late"))
    assert seen == [5, "late"]


def test_a_failed_future():
    future = Future()
    chained = future.then(lambda f: f.value())
    handled = future.then(lambda f: type(f.exception()).__name__)
    future.set_exception(KeyError("x"))
    for failed in (future, chained):
        with pytest.raises(KeyError):
            failed.wait()
        assert isinstance(failed.exception(), KeyError)
    assert handled.wait() == "KeyError"
    assert repr(future) == "<Future failed: KeyError('x')>"


def test_a_callback_cannot_end_the_thread_it_runs_on():
    future = Future()
    ended = future.then(lambda f: exit(3))
    future.add_done_callback(lambda f: exit(3))
    future.set_result(None)
    assert isinstance(ended.exception(), SystemExit)


def test_collect_all():
    futures = [Future(), Future()]
    both = collect_all(futures)
    futures[1].set_result(1)
    assert not both.done()
    futures[0].set_result(0)
    assert [f.value() for f in both.wait()] == [0, 1]
    assert collect_all([]).wait() == []
    failed, other = Future(), Future()
    both = collect_all([failed, other])
    failed.set_exception(ValueError("no"))
    assert not both.done()
    other.set_result(1)
    with pytest.raises(ValueError, match="no"):
        both.wait()


def test_collect_all_is_that_of_torch():
    torch = pytest.importorskip("torch")
    outcomes = []
    for kind, collect in ((Future, collect_all), (torch.futures.Future, torch.futures.collect_all)):
        futures = [kind(), kind()]
        both = collect(futures)
        futures[1].set_exception(ValueError("no"))
        outcomes.append(both.done())
        futures[0].set_result(1)
        try:
            outcomes.append(len(both.wait()))
        except ValueError:
            outcomes.append("raised")
    assert outcomes[:2] == outcomes[2:] == [False, "raised"]
