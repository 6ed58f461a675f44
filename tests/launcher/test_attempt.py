"""One attempt alone: what it does when an order, a signal and a worker's end come together."""

import sys
import time

import pytest

from unisono.core.base.deadline import Deadline
from unisono.launcher.attempt import Attempt, LaunchResources
from unisono.launcher.environment import NodePlace
from unisono.launcher.output.files import LogOptions, Output
from unisono.launcher.signals import Signals
from unisono.launcher.spec import LaunchSpec
from unisono.launcher.workers.cpu_binding import Binding
from unisono.launcher.workers.descendants import Descendants
from unisono.launcher.workers.warm import WarmWorkers

pytestmark = pytest.mark.linux("watches pidfds")

FOREVER = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
ONE_FAILS = [sys.executable, "-S", "-c", "import os, signal; os.environ['RANK'] == '1' or "
             "signal.pause(); raise SystemExit(3)"]  # fmt: skip


@pytest.fixture
def attempt_of():
    """Return a function that runs an attempt of two workers to its end."""
    output = Output(LogOptions(), run_id="test", nprocs=2, notify=print)
    failures = []

    def run(command, stop_in_s, **fields):
        spec = LaunchSpec(commands=[command] * 2, **fields)
        with Signals() as signals:
            resources = LaunchResources(
                spec=spec,
                binding=Binding(),
                signals=signals,
                warm=WarmWorkers(spec.commands, 0),
                descendants=Descendants(),
            )
            attempt = Attempt(
                resources,
                output,
                NodePlace.alone(2, master_port=1, run_id="test"),
                0,
                stop_in_s=stop_in_s,
                on_failure=failures.append,
            )
            return attempt.run(), failures

    yield run
    output.close(1.0, lambda: False)


def test_order_to_stop_that_came_before_the_start_is_not_missed(attempt_of):
    # No wake-up will follow it, so an attempt that waits first would wait without a limit.
    outcome, failures = attempt_of(FOREVER, lambda: 0.0)
    assert (outcome.stopped, outcome.failures, outcome.ended_well) == ((0, 1), (), False)
    assert outcome.signum is None
    assert failures == []


def test_order_to_stop_in_a_while_lets_workers_say_why_they_end(attempt_of):
    # A node that only lost a peer was quicker than the worker which that peer was.
    outcome, failures = attempt_of(ONE_FAILS, Deadline(60.0).remaining)
    assert [(f.rank, f.exit_code) for f in outcome.failures] == [(1, 3)]
    assert outcome.stopped == (0,)
    assert failures == list(outcome.failures)


def test_workers_that_do_not_end_by_themselves_are_stopped_then(attempt_of):
    outcome, failures = attempt_of(FOREVER, Deadline(0.1).remaining)
    assert (outcome.stopped, outcome.failures, failures) == ((0, 1), (), [])


def test_end_of_a_worker_is_noticed_without_a_time_limit(attempt_of):
    outcome, failures = attempt_of(ONE_FAILS, lambda: float("inf"))
    assert [(f.rank, f.exit_code) for f in outcome.failures] == [(1, 3)]
    assert [f.rank for f in failures] == [1]
    assert outcome.stopped == (0,)


def test_when_each_worker_left(attempt_of):
    before_s = time.time()
    outcome, _ = attempt_of([sys.executable, "-S", "-c", ""], lambda: float("inf"))
    assert outcome.ended_well
    assert set(outcome.left_s) == {0, 1}
    assert all(before_s <= left_s <= time.time() for left_s in outcome.left_s.values())
