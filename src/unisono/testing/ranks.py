"""Run one function on several ranks, as threads or as processes, and collect the results."""

from __future__ import annotations

import contextvars
import functools
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from unisono.backends import CPUOptions
from unisono.base.config import VARIABLES, environ
from unisono.c10d.lifecycle import init_process_group
from unisono.errors import LaunchError, PeerError, WorkerFailedError
from unisono.groups.world import World, current, use
from unisono.launcher import SpawnContext
from unisono.stores import HashStore, Store

__all__ = ["run"]

Body = Callable[..., Any]


@dataclass
class _RankResult:
    """The result of one rank, or its error with the traceback as text."""

    time_s: float
    result: Any = None
    error: BaseException | None = None
    text: str = ""


class _Call(NamedTuple):
    """The call that every rank makes; the function and settings of `run`."""

    fn: Body
    args: Sequence[Any]
    timeout: float
    options: CPUOptions


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
        fn: The function. For processes it must be importable, and its results picklable.
        world_size: Number of ranks.
        ranks: "threads" (fast, one process) or "processes" (as in production).
        args: Further arguments, the same on every rank.
        timeout: Time-out in seconds of every call in the group. The whole run may take twice as
            long.
        transport: "inproc" or "tcp"; by default inproc for threads, tcp for processes.
        engine: "native" or "reference"; by default the value of UNISONO_ENGINE.
        dead: Ranks that are expected to die without a result (processes only). Their result is
            None.

    Raises:
        Exception: That of the rank that failed first, with the traceback of that rank as its
            cause. Errors that report only the failure of another rank do not count.
        LaunchError: A rank did not end, or a rank died. The text names the rank or the cause.
    """
    call = _Call(fn, args, timeout, CPUOptions(transport=transport, engine=engine))
    if ranks == "threads":
        outcomes = _run_threads(call, world_size)
    elif ranks == "processes":
        outcomes = _run_processes(call, world_size, dead)
    else:
        raise ValueError(f"ranks must be 'threads' or 'processes', got {ranks!r}")
    failed = [
        (isinstance(outcome.error, PeerError), outcome.time_s, rank)
        for rank, outcome in enumerate(outcomes)
        if outcome is not None and outcome.error is not None
    ]
    if failed:
        _, _, rank = min(failed)
        outcome = outcomes[rank]
        assert outcome is not None
        assert outcome.error is not None
        raise outcome.error from LaunchError(f"rank {rank} of {world_size} failed:\n{outcome.text}")
    for rank, outcome in enumerate(outcomes):
        if outcome is None and rank not in dead:
            raise LaunchError(f"rank {rank} of {world_size} ended without a result")
    return [None if outcome is None else outcome.result for outcome in outcomes]


def _body(rank: int, call: _Call, world_size: int = -1, store: Store | None = None) -> _RankResult:
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
    except BaseException as error:
        if (group := current().default) is not None:
            # Without this the other ranks would wait for this rank until their time-out.
            group.report_failure("".join(traceback.format_exception_only(error)).strip())
        return _RankResult(time.monotonic(), error=error, text=traceback.format_exc().rstrip())
    else:
        return _RankResult(time.monotonic(), result=result)
    finally:
        current().close()


def _run_threads(call: _Call, world_size: int) -> list[_RankResult | None]:
    store = HashStore()
    outcomes: list[_RankResult | None] = [None] * world_size

    def rank_thread(rank: int) -> None:
        with use(World()):
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
    for thread in threads:
        thread.start()
    end = time.monotonic() + 2 * call.timeout
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if stuck := [thread.name for thread in threads if thread.is_alive()]:
        raise LaunchError(f"{', '.join(stuck)} did not end within {2 * call.timeout:g} s")
    return outcomes


def _run_processes(call: _Call, world_size: int, dead: Collection[int]) -> list[_RankResult | None]:
    context = SpawnContext(
        _process_rank,
        (call, _settings()),
        world_size,
        start_method="forkserver",
        use_death_signal=False,
        return_results=True,
    )
    failure: WorkerFailedError | None = None
    try:
        ended = context.join(2 * call.timeout, stop_on_failure=not dead)
    except WorkerFailedError as error:
        ended, failure = True, error
    if not ended:
        context.kill()
        raise LaunchError(f"the ranks did not end within {2 * call.timeout:g} s")
    outcomes = [context.results.get(rank) for rank in range(world_size)]
    missing = [rank for rank, o in enumerate(outcomes) if o is None and rank not in dead]
    failed = any(outcome is not None and outcome.error is not None for outcome in outcomes)
    if missing and failure is not None and not failed:
        raise failure
    return outcomes


def _settings() -> dict[str, str]:
    # Without the token, which the launcher sets.
    names = VARIABLES.keys() - {"UNISONO_TOKEN"}
    return {name: value for name, value in environ().items() if name in names}


def _process_rank(rank: int, call: _Call, settings: dict[str, str]) -> _RankResult:
    # The fork server that made this process may have been started with other settings.
    for name in _settings().keys() - settings.keys():
        del os.environ[name]
    os.environ.update(settings)
    outcome = _body(rank, call)
    try:
        pickle.loads(pickle.dumps(outcome))
    except Exception as error:
        cause = LaunchError(f"rank {rank}: neither result nor error can be pickled: {error!r}")
        return _RankResult(outcome.time_s, error=cause, text=outcome.text)
    return outcome
