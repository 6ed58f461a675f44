"""Run one function on several ranks, as threads or as processes, and collect the results."""

from __future__ import annotations

import contextvars
import copyreg
import functools
import importlib
import inspect
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, reduction
from numbers import Integral
from typing import Any, Literal, NamedTuple

from unisono.core.backends import CPUOptions
from unisono.core.base.config import VARIABLES, environ
from unisono.core.base.source.where import stack_of
from unisono.core.base.text import name_ranks, shown
from unisono.core.c10d.lifecycle import init_process_group
from unisono.core.groups.world import World, current, process_world, use
from unisono.core.stores import HashStore, Store
from unisono.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    LaunchError,
    UnisonoError,
    WorkerFailedError,
)
from unisono.launcher import SpawnContext
from unisono.launcher.launch import pickling
from unisono.testing.modules import Modules
from unisono.testing.report import RankFailure, frames_of, report
from unisono.testing.stuck import StackFiles, stuck_report

__all__ = ["run"]
__tracebackhide__ = True  # for pytest: the frames of this file

Body = Callable[..., Any]

_LEFT_HINT = "a thread cannot be ended: it may still run in later tests; a process can be"
_GRACE_S = 10.0
"""After the first failure, for threads that do something else than wait for another rank."""
_POLL_S = 0.1
_THREAD_HINT = (
    "ranks are threads here, and this thread is none: give it the context of its rank, as in "
    "Thread(target=contextvars.copy_context().run, args=(f,))"
)
_STUCK_HINT = "a test that needs more time sets timeout="


@dataclass
class _RankResult:
    """The result of one rank, or its error and the text about it."""

    time_s: float
    result: Any = None
    error: BaseException | None = None
    failure: RankFailure | None = None


class _RankedCall(NamedTuple):
    """The call that every rank makes; the function and settings of `run`."""

    fn: Body
    args: Sequence[Any]
    timeout: float
    options: CPUOptions


# The results by rank, and why ranks without a result have none.
_Ended = tuple[list[_RankResult | None], UnisonoError | None]


def run(
    fn: Body,
    world_size: int,
    *,
    ranks: Literal["threads", "processes"] = "threads",
    args: Sequence[Any] = (),
    timeout: float = 60.0,
    transport: str | None = None,
    engine: str | None = None,
    dead: Collection[int] = (),
) -> list[Any]:
    """Call `fn(rank, *args)` on every rank of a new world; return the results by rank.

    Inside `fn` the default process group exists, and `unisono.get_rank()` is `rank`, for threads
    and for processes. The world is destroyed afterwards.

    Args:
        fn: The function; a coroutine that it returns is run to its end. For processes its name must
            be in its module, and its results must be picklable. A process that cannot import the
            module loads it from its file.
        world_size: Number of ranks.
        ranks: "threads" (fast, one process) or "processes" (as in production).
        args: Further arguments, the same on every rank.
        timeout: Time-out in seconds of every call in the group. The whole run may take twice as
            long.
        transport: "inproc", "tcp" or a registered name; by default the value of
            UNISONO_TRANSPORT, whose "auto" is inproc for threads and tcp for processes.
        engine: "native" or "reference"; by default the value of UNISONO_ENGINE.
        dead: Ranks that are expected to die without a result (processes only). Their result is
            None.

    Raises:
        Exception: That of the rank that failed first. Its cause has the tracebacks of all ranks
            that failed. Errors that report only the failure of another rank do not count.
        ArgumentTypeError: `fn` is no function.
        InvalidArgumentError: `world_size` is no number of ranks; or the function or an argument
            cannot be sent to processes: the text names it.
        LaunchError: A rank did not end, or a rank died. The text names the rank, and its line or
            the cause.
    """
    _check_call(fn, world_size)
    call = _RankedCall(fn, args, timeout, CPUOptions(transport=transport, engine=engine))
    if ranks == "threads":
        outcomes, end = _run_threads(call, world_size)
    elif ranks == "processes":
        outcomes, end = _run_processes(call, world_size, dead)
    else:
        raise InvalidArgumentError(f"ranks must be 'threads' or 'processes', got {ranks!r}")
    failed = [
        (outcome.failure.is_peer, outcome.time_s, rank, outcome)
        for rank, outcome in enumerate(outcomes)
        if outcome is not None and outcome.failure is not None
    ]
    failed.sort(key=lambda each: each[:3])
    text = report({rank: o.failure for *_, rank, o in failed if o.failure}, world_size, ranks)
    if text and (left := _returned(outcomes)):
        text = f"{name_ranks(left)} of {world_size} returned before this call\n\n{text}"
    if isinstance(end, WorkerFailedError) and failed:
        text, end = f"{text}\n\n{end.what}", None
    error = end or next((outcome.error for *_, outcome in failed), None)
    if error is not None:
        raise error from (LaunchError(text) if text else None)
    for rank, outcome in enumerate(outcomes):
        if outcome is None and rank not in dead:
            raise LaunchError(f"rank {rank} of {world_size} ended without a result")
    return [None if outcome is None else outcome.result for outcome in outcomes]


def _check_call(fn: Any, world_size: Any) -> None:
    if not callable(fn):
        raise ArgumentTypeError(f"run(fn, world_size): fn must be a function, got {fn!r}")
    if not isinstance(world_size, Integral) or world_size < 1:
        raise InvalidArgumentError(
            f"run(fn, world_size): world_size must be a number of ranks, got {world_size!r}"
        )


def _returned(outcomes: list[_RankResult | None]) -> list[int]:
    """Return the ranks of which the others report only that they were lost: they returned."""
    failed = [each for each in outcomes if each is not None and each.failure is not None]
    if None in outcomes or not all(each.failure and each.failure.is_peer for each in failed):
        return []
    first = min(failed, key=lambda each: each.time_s)
    context = getattr(first.error, "context", None)
    peers = range(len(outcomes)) if context is None else context.peers
    return [
        rank
        for rank, each in enumerate(outcomes)
        if each and not each.failure and rank in peers and each.time_s < first.time_s
    ]


def _body(
    rank: int, call: _RankedCall, world_size: int = -1, store: Store | None = None
) -> _RankResult:
    """Run one rank in the current world."""
    try:
        init_process_group(
            timeout=call.timeout,
            pg_options=call.options,
            rank=rank if store else -1,
            world_size=world_size,
            store=store,
        )
        result = call.fn(rank, *call.args)
        if isinstance(result, Coroutine):
            import asyncio  # few tests need it

            result = asyncio.run(result)
    except BaseException as error:
        if (group := current().default) is not None:
            # Without this the other ranks would wait for this rank until their time-out.
            group.report_failure("".join(traceback.format_exception_only(error)).strip())
        # Here, where the error is current, so that calls of other groups are cancelled.
        current().close()
        return _RankResult(time.monotonic(), error=error, failure=RankFailure.of(error))
    else:
        return _RankResult(time.monotonic(), result=result)
    finally:
        current().close()


def _run_threads(call: _RankedCall, world_size: int) -> _Ended:
    store = HashStore()
    outcomes: list[_RankResult | None] = [None] * world_size
    worlds = [World() for _ in range(world_size)]

    def rank_thread(rank: int) -> None:
        with use(worlds[rank]):
            outcomes[rank] = _body(rank, call, world_size, store)

    # Each thread gets a copy of the caller's context, so that settings (NumPy's errstate) hold.
    threads = [
        threading.Thread(
            target=functools.partial(contextvars.copy_context().run, rank_thread, rank),
            name=f"rank-{rank}",
            daemon=True,
        )
        for rank in range(world_size)
    ]
    # Otherwise MPI.COMM_WORLD would be a world of one in other threads.
    hint, process_world.hint = process_world.hint, _THREAD_HINT
    try:
        return _joined(threads, outcomes, call, world_size)
    except BaseException as error:
        # Ctrl-C. The end of the process would wait for the calls of these threads.
        for group in [group for world in worlds for group in world.groups.copy().values()]:
            group.abort(type(error).__name__)
        raise
    finally:
        process_world.hint = hint


def _joined(
    threads: Sequence[threading.Thread],
    outcomes: list[_RankResult | None],
    call: _RankedCall,
    world_size: int,
) -> _Ended:
    for thread in threads:
        thread.start()
    end, limit = time.monotonic() + 2 * call.timeout, ""
    for thread in threads:
        while thread.is_alive() and (left := end - time.monotonic()) > 0:
            thread.join(min(left, _POLL_S))
            failed = [(o.time_s, r) for r, o in enumerate(outcomes) if o and o.failure]
            # A rank that waits for another has ended by now; what else it does no one can end.
            if failed and (soon := min(failed)[0] + _GRACE_S) < end:
                end, limit = soon, f"within {_GRACE_S:g} s of the failure of rank {min(failed)[1]}"
    if stuck := {
        rank: thread.ident or 0 for rank, thread in enumerate(threads) if thread.is_alive()
    }:
        frames = sys._current_frames()
        stacks = {rank: stack_of(frames.get(ident)) for rank, ident in stuck.items()}
        text = stuck_report(stacks, world_size, call.timeout, limit)
        return outcomes.copy(), LaunchError(text, hint=_LEFT_HINT if limit else _STUCK_HINT)
    return outcomes, None


def _run_processes(call: _RankedCall, world_size: int, dead: Collection[int]) -> _Ended:
    server: Any = forkserver._forkserver
    if server._preload_modules == ["__main__"]:  # the default; a caller's own list stays
        # The server that ranks are forked from imports unisono once for all ranks.
        forkserver.set_forkserver_preload(["__main__", __name__])
    end: UnisonoError | None = None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        files = StackFiles(folder)
        with _naming_arguments(call):
            context = SpawnContext(
                _process_rank,
                (Modules(call.fn, *call.args), _sendable(call), _settings(), files),
                world_size,
                start_method="forkserver",
                returns="result",
            )
        try:
            if not context.join(2 * call.timeout, stop_on_failure=not dead):
                pids = dict(enumerate(context.pids()))
                # A process that has ended may have left its number to another.
                stuck = {rank: pid for rank, pid in pids.items() if context.end_of(rank) is None}
                stacks = files.ask(stuck)
                context.kill()
                if stacks:
                    text = stuck_report(stacks, world_size, call.timeout)
                    end = LaunchError(text, hint=_STUCK_HINT)
        except WorkerFailedError as error:
            if any(rank not in context.results and rank not in dead for rank in range(world_size)):
                end = error
    return [context.results.get(rank) for rank in range(world_size)], end


@contextmanager
def _naming_arguments(call: _RankedCall) -> Iterator[None]:
    """Say in an error of pickle which argument it is about."""
    try:
        yield
    except UnisonoError:
        raise
    except Exception as error:
        names = [*inspect.signature(call.fn).parameters][1:]
        for name, value in zip(names, call.args, strict=False):
            try:
                reduction.ForkingPickler.dumps(value)
            except Exception as own:
                # Locks, for example, can be pickled only for a process that starts.
                if shown(own) == shown(error):
                    raise InvalidArgumentError(
                        f"argument {name!r} cannot be sent to processes: {shown(error)}",
                        hint="make it inside the test, or run the ranks as threads",
                    ) from error
        raise


def _settings() -> dict[str, str]:
    # Without the token, which the launcher sets.
    names = VARIABLES.keys() - {"UNISONO_TOKEN"}
    return {name: value for name, value in environ().items() if name in names}


@dataclass(frozen=True)
class _ByValue:
    """A function that another process cannot import: it is defined inside a test."""

    pickled: bytes

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return pickle.loads(self.pickled)(*args, **keywords)


def _sendable(call: _RankedCall) -> _RankedCall:
    """Return a call whose function processes can load."""
    if "<" not in getattr(call.fn, "__qualname__", ""):
        return call
    with pickling(call.fn, "the function") as dumps:
        return call._replace(fn=_ByValue(bytes(dumps(call.fn))))


def _pytest_outcome(name: str, text: str, *place: Any) -> BaseException:
    error: BaseException = getattr(importlib.import_module("pytest"), name).Exception(text)
    error.unisono_place = place  # type: ignore[attr-defined]  # for the plug-in
    return error


def _place(error: BaseException) -> tuple[str, int]:
    frame = frames_of(traceback.extract_tb(error.__traceback__))[-1]
    return frame.filename, frame.lineno or 0


def _process_rank(
    rank: int, _: None, call: _RankedCall, settings: dict[str, str], files: StackFiles
) -> _RankResult:
    # The fork server that made this process may have been started with other settings.
    for name in _settings().keys() - settings.keys():
        del os.environ[name]
    os.environ.update(settings)
    with files.offered(rank):
        outcome = _body(rank, call)
    kind: Any = type(outcome.error)
    if kind.__module__ == "builtins" and hasattr(pytest := sys.modules.get("pytest"), "skip"):
        # skip, xfail, fail: pytest calls their classes builtin, so that pickle cannot find them.
        kinds = {getattr(pytest, name).Exception: name for name in ("skip", "xfail", "fail")}
        if kind in kinds:
            copyreg.pickle(kind, lambda e: (_pytest_outcome, (kinds[kind], e.msg, *_place(e))))
    try:
        pickle.loads(pickle.dumps(outcome))
    except Exception as error:
        cause = LaunchError(f"rank {rank}: neither result nor error can be pickled: {error!r}")
        failure = outcome.failure or RankFailure.of(cause)
        return _RankResult(outcome.time_s, error=cause, failure=failure)
    return outcome
