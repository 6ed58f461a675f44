"""Groups whose ranks are the tasks of a Spark barrier stage."""

from __future__ import annotations

import contextlib
import functools
import queue
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from unisono.adapters.clusters import member
from unisono.adapters.clusters.meeting import (
    FAILED,
    Meeting,
    close_meeting,
    open_meeting,
    post,
    posts,
)
from unisono.adapters.clusters.member import RankOutcome
from unisono.adapters.clusters.outcomes import OUTSIDE, CallOnRanks, collect
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.integers import as_integer
from unisono.errors import ArgumentTypeError, ClosedError, LaunchError, UnisonoError

try:
    from py4j.protocol import Py4JError
    from pyspark import BarrierTaskContext, InheritableThread, SparkContext
    from pyspark import cloudpickle as _pickler
    from pyspark.sql import SparkSession
except ImportError as error:
    raise ImportError("unisono.spark needs PySpark: pip install 'unisono[spark]'") from error

_LOOK_S = 0.1
"""How often the caller looks for failures that ranks have posted before Spark reports the end."""

_END_S = 0.2
"""How long the caller waits for the end of a cancelled job, which Spark ends in its own time."""

_CAUSE = re.compile(r"org\.apache\.spark\.[\w.]+: (.+?)(?:\. |$)", re.MULTILINE)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?: .*\n)+\S.*")
_LOST_TASK = re.compile(r"barrier task \w+\(\d+, (\d+)\) finished unsuccessfully")


def run(
    spark: SparkSession | SparkContext,
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: Timeout = 60,
    backend: str | None = None,
) -> list[Any]:
    """Call `fn(*args)` in a Spark barrier stage as the ranks of a group; return results by rank.

    Inside `fn` the default process group has one rank per task; the rank is the number of the
    partition. The group ends with the call. The driver serves the store of the group.

    Args:
        spark: Session or context of a driver; not of Spark Connect.
        fn: Function of `args`. Spark pickles it.
        size: Number of ranks. Spark starts them when it has a free slot for each of them.
        args: The same for every rank.
        timeout: For the start of all ranks; seconds or timedelta. Calls in the group have the
            default time-out of `init_process_group`.
        backend: As for `init_process_group`.

    Raises:
        RendezvousError: Ranks did not start in time; names them.
        PeerLostError: The process of a task died; names its rank.
        LaunchError: Spark ended the job for another reason.
        Exception: The error of the rank that failed first. Its cause is a WorkerFailedError that
            ends with the traceback.
    """
    context = spark if isinstance(spark, SparkContext) else getattr(spark, "sparkContext", None)
    if not isinstance(context, SparkContext):
        raise ArgumentTypeError(
            "spark must be a SparkSession with a SparkContext, which Spark Connect lacks, got "
            f"{type(spark).__module__}.{type(spark).__name__}"
        )
    size = as_integer(size, "size")
    if context._jsc is None:
        raise ClosedError("the SparkContext is stopped")
    hint = (
        f"a barrier stage starts when Spark has a free slot for each of its {size} tasks; there "
        f"are {context.defaultParallelism} slots"
    )
    host = context.getConf().get("spark.driver.host") or "127.0.0.1"
    meeting = open_meeting(host, size, timeout, backend, _pickler.__name__)
    job = _BarrierStage(context, meeting, functools.partial(_task, meeting, fn, args))
    try:
        return collect(job, Deadline(timeout), hint=hint)
    finally:
        job.end()


class _BarrierStage(CallOnRanks):
    """A barrier stage in a thread. Ranks post failures at the store, because Spark reports one."""

    def __init__(
        self,
        context: SparkContext,
        meeting: Meeting,
        task: Callable[[Iterable[int]], Iterator[bytes]],
    ) -> None:
        super().__init__(meeting, [f"Spark task {rank}" for rank in range(meeting.size)])
        self._context = context
        self._group = f"unisono-{uuid.uuid4().hex}"
        self._ended: queue.Queue[list[RankOutcome] | Exception] = queue.Queue()
        self._seen: set[int] = set()
        self._thread = InheritableThread(target=self._run, args=(task,), daemon=True)
        self._thread.start()

    def _run(self, task: Callable[[Iterable[int]], Iterator[bytes]]) -> None:
        try:
            self._context.setJobGroup(self._group, "unisono.spark.run", interruptOnCancel=True)
            size = self.meeting.size
            ranks = self._context.parallelize(range(size), size).barrier().mapPartitions(task)
            self._ended.put([_pickler.loads(data) for data in ranks.collect()])
        except Exception as error:
            self._ended.put(error)

    def poll(self, timeout_s: float) -> list[RankOutcome]:
        """Wait for the end of the job, or for failures that ranks have posted."""
        deadline = Deadline(timeout_s)
        ended: list[RankOutcome] | Exception = []
        while not ended and not (failed := self._posted()) and not deadline.expired():
            with contextlib.suppress(queue.Empty):
                ended = self._ended.get(timeout=min(_LOOK_S, deadline.remaining()))
        if isinstance(ended, Exception):
            self.over = True
            time.sleep(_LOOK_S)  # Survivors may be about to post what they know.
            failed += self._posted()
            ended = self._lost(ended)
        return [*failed, *ended]

    def _posted(self) -> list[RankOutcome]:
        found = posts(self.meeting, FAILED)
        new = sorted(found.keys() - self._seen)
        self._seen.update(new)
        return [_pickler.loads(found[rank]) for rank in new]

    def _lost(self, error: Exception) -> list[RankOutcome]:
        """Return which rank Spark reports as failed; none if another failure ended the job.

        Raises:
            Exception: The error if it is not Spark's.
            LaunchError: The job ended for another reason than a lost rank.
        """
        if not isinstance(error, Py4JError):
            raise error
        text = str(error)
        if task := _LOST_TASK.search(text):
            rank = int(task[1])
            if raised := _TRACEBACK.search(text, task.end()):
                return [RankOutcome(rank=rank, text=raised[0], place=OUTSIDE)]
            return [RankOutcome(rank=rank, lost=_cause(text, task.end()))]
        if not self._seen:
            raise LaunchError(f"Spark ended the job: {_cause(text)}") from error
        return []

    def end(self) -> None:
        """Cancel the job if it has not ended, and close the store."""
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._group)
        close_meeting(self.meeting)
        self._thread.join(_END_S)


def _cause(text: str, start: int = 0) -> str:
    """Return the first sentence of the first error of Spark in a text."""
    found = _CAUSE.search(text, start)
    return found[1] if found else text.partition("\n")[0]


def _task(
    meeting: Meeting, fn: Callable[..., Any], args: tuple[Any, ...], _: Iterable[int]
) -> Iterator[bytes]:
    """Be a rank; a failure is a result too, because Spark shows an error of one task only."""
    rank = BarrierTaskContext.get().partitionId()
    outcome = member.attempt(meeting, rank, lambda: member.join_and_call(meeting, rank, fn, *args))
    try:
        data = _pickler.dumps(outcome)
    except Exception as error:
        outcome = member.failure(meeting, rank, error)
        data = _pickler.dumps(outcome)
    if outcome.failed:
        # If the store is closed, the outcome is a consequence, or Spark hands it over.
        with contextlib.suppress(UnisonoError):
            post(meeting, FAILED, rank, data)
    yield data
