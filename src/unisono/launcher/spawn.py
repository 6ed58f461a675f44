"""`spawn`: run a function in N processes, each with the environment of its rank.

Each child imports the main module, gets its environment and reports its exception over a socket
pair. The function and its arguments are in a file in memory. The parent starts all children, then
opens the store, and then sends the environments. A forked child thus inherits neither the store's
sockets nor a lock of its server thread. The parent's environment never changes.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple, Never, Protocol, TypeVar, TypeVarTuple, cast, overload

from unisono.core.base.config import environ, get
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.host import GUARD_HINT, is_importing_main
from unisono.core.base.integers import as_integer
from unisono.core.base.source.tracebacks import hide_own_frames, trimmed
from unisono.core.base.text import takes_own_keywords
from unisono.core.platform.posix import SIGKILL
from unisono.core.platform.processes import open_exit_fd, parent_death_hook
from unisono.core.stores import TCPStore
from unisono.errors import (
    ArgumentTypeError,
    Context,
    InvalidArgumentError,
    LaunchError,
    UsageError,
    WorkerFailedError,
)
from unisono.launcher.environment import LOOPBACK, NodePlace, new_launch_id, worker_environment
from unisono.launcher.payload import CallArguments, loads_result
from unisono.launcher.report import ExitLog, leavers
from unisono.launcher.signals import deferred, run_deferred
from unisono.launcher.spec import GRACE_S
from unisono.launcher.workers.worker import Worker
from unisono.launcher.workers.worker_group import WorkerGroup

R = TypeVar("R", covariant=True)
Ts = TypeVarTuple("Ts")

Returns = Literal["nothing", "result", "messages"]

_START_METHODS = ("spawn", "fork", "forkserver")
_PARENT_POLL_S = 0.5
_POLL_S = 0.05
_KILL_TIMEOUT_S = 10.0
_MAIN_LOCK = threading.Lock()
_STARTING_FILES = (__file__, multiprocessing.spawn.__file__, "<frozen runpy>", runpy.__file__)
_IMPORT_HINT = (
    "define the function at the top level of a module that a child can import, or use "
    "`unisono.pool` or `unisono.launch`, which with cloudpickle also take functions of a notebook"
)


def _watch_parent(parent_pid: int, use_death_signal: bool) -> None:
    """Make this child end when its parent ends.

    Args:
        parent_pid: The process that has this child; 0 if the fork server has it.
        use_death_signal: Whether the kernel's signal at the parent's end is of use.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def is_orphan() -> bool:
        # A child that was forked later has the pipe behind `parent` open, too, and keeps it so.
        return parent_pid not in (0, os.getppid())

    if use_death_signal and parent_death_hook()():
        if is_orphan() or not parent.is_alive():
            # The parent died before, so the kernel will send no signal.
            os._exit(1)
        return

    def die_with_parent() -> None:
        while parent.is_alive() and not is_orphan():
            parent.join(_PARENT_POLL_S)
        os.kill(os.getpid(), SIGKILL)

    threading.Thread(target=die_with_parent, name="unisono-parent", daemon=True).start()


def _child(
    call: CallArguments,
    main: dict[str, str],
    rank: int,
    link: Any,
    parent_pid: int,
    use_death_signal: bool,
    returns: Returns,
) -> None:
    _watch_parent(parent_pid, use_death_signal)
    # The parent shows the traceback, so this hook prints nothing. Hooks that wrap it must run: a
    # process group reports to the other ranks in its hook why this rank failed.
    sys.excepthook = lambda *error: None
    process: Any = multiprocessing.current_process()
    hint: str | None = GUARD_HINT
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.write_through:
        # PYTHONUNBUFFERED would write a text and its end apart, and lines of ranks would mix.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        run_deferred()
        process._inheriting = True  # as multiprocessing does; `is_importing_main` reads it
        multiprocessing.spawn.prepare(main)
        del process._inheriting
        hint = _IMPORT_HINT
        fn, args = call.load()
        hint = None
        link.send(_ChildReport())
        os.environ.update(link.recv())
        if returns == "messages":
            fn(rank, link, *args)
            return
        result = fn(rank, *args)
        if returns == "result":
            link.send(_ChildReport(result=result))
    except KeyboardInterrupt:
        # Ctrl-C reaches the parent too, and the parent reports it.
        sys.exit(128 + signal.SIGINT)
    except BaseException as error:
        if hint is None and isinstance(error, SystemExit):
            raise
        # Drop the frames above the user's code, which the user has not written.
        with trimmed(error):
            below = error.__traceback__
            while below is not None and below.tb_frame.f_code.co_filename in _STARTING_FILES:
                below = below.tb_next
            trace = traceback.format_exception(type(error), error, below or error.__traceback__)
        text = "".join(trace).rstrip()
        pickled = pickled_error(error) if hint is None else b""
        link.send(_ChildReport(text=text, error=pickled, hint=hint))
        sys.excepthook(type(error), error, below)
        sys.exit((isinstance(error, SystemExit) and error.code) or 1)


class _ChildReport(NamedTuple):
    """The last report of a child; an empty report follows when the function is loaded.

    Attributes:
        result: Result of the function, pickled; None before its end.
        text: Traceback, or "".
        error: The exception, pickled; empty if it was raised before the function was called.
        hint: Hint for the user.
        missing: Text that replaces the traceback if the child leaves none.
    """

    result: Any = None
    text: str = ""
    error: bytes = b""
    hint: str | None = None
    missing: str = "it left no traceback; see its standard error"


def pickled_error(error: BaseException) -> bytes:
    """Return a pickled exception for the parent to raise; empty if it cannot be pickled."""
    # Only cloudpickle can pickle an exception whose class is defined in a notebook. It makes a copy
    # of such a class, which the parent of a forked child does not know.
    for pickler in (pickle, sys.modules.get("cloudpickle")):
        with contextlib.suppress(Exception):
            return bytes(cast(Any, pickler).dumps(error))
    return b""


@contextlib.contextmanager
def _hidden_main(start_method: str) -> Iterator[dict[str, str]]:
    """Keep multiprocessing from importing the main module in a child that starts meanwhile.

    `_child` imports the module, because only `_child` can report an error to the parent.

    Yields:
        The arguments by which `multiprocessing.spawn.prepare` imports the module. They are empty
        if the program was not read from a file, or if children are forked.
    """
    if start_method == "fork":
        yield {}
        return
    module = sys.modules["__main__"]
    with _MAIN_LOCK:
        data = multiprocessing.spawn.get_preparation_data("")
        main = {key: text for key, text in data.items() if key.startswith("init_main")}
        spec = getattr(module, "__spec__", None)
        # A child of multiprocessing does not import a module of this name: it is its own.
        module.__spec__ = ModuleSpec("__main__", None)
        try:
            yield main if os.path.exists(main.get("init_main_from_path", "/")) else {}
        finally:
            module.__spec__ = spec


class _Child(Worker):
    """A child that calls the function, and what it has reported.

    It stays in the process group of its parent, so that Ctrl-C reaches it, too.

    Attributes:
        has_loaded: Whether it has imported the main module and loaded the function.
    """

    def __init__(
        self,
        rank: int,
        process: Any,
        link: Any,
        report: _ChildReport,
        is_own: bool,
        returns: Returns,
    ) -> None:
        # The fork server writes the exit code into the pipe behind `sentinel`. Without the server
        # it is no sure sign, because a forked grandchild keeps the pipe open.
        exit_fd = open_exit_fd(process.pid) if is_own else None
        if not is_own:
            # Without a descriptor the group polls. The child runs, so an error would lose it.
            with contextlib.suppress(OSError):
                exit_fd = os.dup(process.sentinel)
        super().__init__(rank, process.pid, exit_fd)
        self.process: BaseProcess = process
        self.link = link
        self.report = report
        self.has_loaded = False
        self._once = returns == "messages"

    @property
    def reports(self) -> bool:
        """Whether reports come by the link; after the first one it may have messages instead."""
        return not self.link.closed and not (self._once and self.has_loaded)

    def read(self) -> None:
        """Read the reports that have come."""
        with contextlib.suppress(EOFError, OSError):
            while self.reports and self.link.poll(0):
                self.report = self.link.recv()
                self.has_loaded = self.has_loaded or not self.report.text
            return
        self.link.close()

    def close(self) -> None:
        super().close()
        self.link.close()

    def _status(self) -> int | None:
        return self.process.exitcode

    def _kill(self) -> None:
        if self.exit_code is None:
            self.process.kill()

    def _wait(self, timeout_s: float) -> int | None:
        # Otherwise multiprocessing keeps the object and its descriptors in a list.
        self.process.join(timeout_s)
        return self.process.exitcode


class SpawnContext:
    """The children of one `spawn`.

    Args:
        fn: See `spawn`.
        args: See `spawn`.
        nprocs: See `spawn`.
        daemon: See `spawn`.
        start_method: See `spawn`.
        joins: Whether the calling thread lives until the children have ended.
        returns: What a child sends: the "result" of `fn`, for `results`, or "messages": `fn` gets
            its Connection to this process after the rank, and `links` has the other ends.
    """

    def __init__(
        self,
        fn: Callable[..., object],
        args: Sequence[object],
        nprocs: int,
        *,
        daemon: bool = False,
        start_method: str,
        joins: bool = True,
        returns: Returns = "nothing",
    ) -> None:
        hide_own_frames()
        self._group: WorkerGroup[_Child] = WorkerGroup(GRACE_S)
        self._exits = ExitLog(lambda rank: self._group.workers[rank].report.text)
        self._store: TCPStore | None = None
        self._call = CallArguments(fn, tuple(args))
        self._daemon, self._returns, self._method = daemon, returns, start_method
        # The fork server lives as long as its children, so its end is not a usable sign.
        self._parent_pid = 0 if start_method == "forkserver" else os.getpid()
        self._joins, self._maker = joins, os.getpid()
        try:
            self._start(range(nprocs))
            token = get("UNISONO_TOKEN") or new_launch_id()
            with deferred():
                self._store = TCPStore(
                    LOOPBACK, 0, is_master=True, wait_for_workers=False, token=token
                )
            self._place = NodePlace.alone(
                nprocs, master_port=self._store.port, run_id=new_launch_id(), token=token
            )
            self._send_environment(self._group.workers)
        except BaseException:
            self._stop(grace_s=0.0)
            raise

    def _start(self, ranks: Iterable[int]) -> None:
        context: Any = multiprocessing.get_context(self._method)
        # The kernel sends the signal when the *thread* that forked ends. A thread that does not
        # wait for the children may end before them.
        is_main = threading.current_thread() is threading.main_thread()
        use_death_signal = self._parent_pid > 0 and (self._joins or is_main)
        with _hidden_main(self._method) as main:
            starting = _ChildReport()
            for name in main.values():
                text = f"it ended while it imported {name}; see its standard error"
                starting = _ChildReport(hint=GUARD_HINT, missing=text)
            for rank in ranks:
                ours, link = multiprocessing.Pipe(duplex=True)
                with link, deferred():
                    process = context.Process(
                        target=_child,
                        args=(
                            *(self._call, main, rank, link),
                            *(self._parent_pid, use_death_signal, self._returns),
                        ),
                        name=f"unisono-rank-{rank}",
                        daemon=self._daemon,
                    )
                    process.start()
                    is_own, returns = self._parent_pid > 0, self._returns
                    self._group.add(_Child(rank, process, ours, starting, is_own, returns))

    def _send_environment(self, children: Iterable[_Child]) -> None:
        for child in children:
            env = worker_environment(child.rank, self._place, inherited=environ())
            with contextlib.suppress(OSError):  # the child has died, which join() will report
                child.link.send(env)

    def wait_loaded(self, ranks: Iterable[int]) -> None:
        """Wait until the children of some ranks have loaded the function.

        Raises:
            WorkerFailedError: One of them ended before. All children have been stopped.
        """
        children = [self._group.workers[rank] for rank in ranks]
        while starting := [child for child in children if not child.has_loaded]:
            exits = [child.exit for child in starting]
            links = [child.link for child in starting if child.reports]
            limit_s = _POLL_S if None in exits else None
            connection.wait([each for each in (*links, *exits) if each is not None], limit_s)
            for child in starting:
                has_ended = child.poll() is not None  # before the last look at its reports
                child.read()
                if has_ended and not child.has_loaded:
                    self._group.running.remove(child)
                    self._take_end(child)
                    self._stop(grace_s=0.0)
                    self._raise_failure()

    def end_of(self, rank: int) -> str | None:
        """Return how the process of a rank ended; None while it runs."""
        child = self._group.workers[rank]
        if (code := child.poll()) is None:
            return None
        return self._exits.failure(rank, child.pid, code).line()

    def restart(self, ranks: Collection[int]) -> None:
        """Kill what is left of children, and start others for their ranks."""
        for child in [self._group.workers[rank] for rank in ranks]:
            self._group.replace(child, None)
            child.process.close()
        self._start(ranks)
        self._group.workers.sort(key=lambda child: child.rank)
        self._send_environment([self._group.workers[rank] for rank in ranks])

    @property
    def is_own(self) -> bool:
        """Whether this process has made the children; a fork of it has a copy of this object."""
        return self._maker == os.getpid()

    @property
    def processes(self) -> list[BaseProcess]:
        """The child of each rank."""
        return [child.process for child in self._group.workers]

    @property
    def links(self) -> list[Any]:
        """The Connection to each rank, with `returns="messages"`."""
        return [child.link for child in self._group.workers]

    @property
    def results(self) -> dict[int, Any]:
        """Results of `fn`, by rank that ended without an exception (`returns="result"`)."""
        found = {child.rank: child.report.result for child in self._group.workers}
        return {rank: result for rank, result in found.items() if result is not None}

    def pids(self) -> list[int]:
        """Return the children's process ids, by rank."""
        return self._group.pids()

    def join(
        self,
        timeout: Timeout | None = None,
        grace_period: Timeout | None = None,
        *,
        stop_on_failure: bool = True,
    ) -> bool:
        """Wait until all children have ended; False if `timeout` passes first.

        Args:
            timeout: Time-out; None waits without a limit.
            grace_period: If a child fails, the others get SIGTERM, and after this time (5 s
                if None) SIGKILL.
            stop_on_failure: Whether to stop the other children if a child fails.

        Raises:
            WorkerFailedError: A child failed. The text ends with the traceback of the child that
                failed first.
        """
        deadline = Deadline(float("inf") if timeout is None else timeout)
        grace_s = Deadline(GRACE_S if grace_period is None else grace_period).timeout_s
        wait_s = self._exits.known_in_s if stop_on_failure else lambda: float("inf")
        try:
            while self._group.running and wait_s() > 0.0:
                self._wait(min(deadline.remaining(), wait_s()))
                if self._group.running and deadline.expired():
                    return False
        except BaseException:
            self._stop(grace_s)
            raise
        self._stop(grace_s)
        self._raise_failure()
        return True

    def kill(self) -> None:
        """Stop the children that still run, without a grace period."""
        self._stop(grace_s=0.0)

    def close_ended(self) -> None:
        """Close the objects of children that have ended; one may run on after SIGKILL."""
        for process in self.processes:
            with contextlib.suppress(ValueError):
                process.close()

    def error_of(self, rank: int) -> Exception | None:
        """Return the exception of a child; None if it raised none, or if it cannot be pickled."""
        try:
            error = loads_result(self._group.workers[rank].report.error)
        except Exception:
            return None
        return error if isinstance(error, Exception) else None

    def _wait(self, limit_s: float) -> None:
        """Wait for a report or the end of a child, and handle all that came."""
        links = {child.link: child for child in self._group.running if child.reports}
        for link in self._group.wait(limit_s, links):
            links[link].read()
        for child in self._group.ended():
            self._take_end(child)

    def _take_end(self, child: _Child) -> None:
        child.read()
        child.reap()
        if not child.stopped:
            self._exits.add(child.rank, child.pid, child.exit_code or 0)

    def _raise_failure(self) -> None:
        failures = self._exits.failures()
        if not failures:
            return
        first, *others = failures
        size = len(self._group.workers)
        lines = [f"first failure of {size} processes: {first.line_with_reason()}"]
        lines += [f"then {other.line_with_reason()}" for other in others]
        if left := leavers(first, self._exits.left_s):
            lines.append(left)
        report = self._group.workers[first.rank].report
        lines.append(first.text or report.missing)
        # A signal is no error of the child's code. The traceback of an error may end with the hint.
        no_hint = first.exit_code < 0 or (report.hint or "") in first.text
        raise WorkerFailedError(
            "\n".join(lines),
            context=Context(rank=first.rank, world_size=size),
            hint=None if no_hint else report.hint,
        )

    def _stop(self, grace_s: float) -> None:
        """Stop the children that still run, and release all resources of this context."""
        group = self._group
        self._wait(0.0)
        try:
            group.grace_s, last = grace_s, Deadline(grace_s + _KILL_TIMEOUT_S)
            group.stop(signal.SIGTERM)
            while group.running and not last.expired():
                group.kill_if_due()
                self._wait(min(group.kill_in_s(), last.remaining()))
        finally:
            self._release()
        if group.running:
            raise LaunchError(
                f"ranks {[child.rank for child in group.running]} did not end within "
                f"{_KILL_TIMEOUT_S:g} s of SIGKILL"
            )

    def _release(self) -> None:
        for child in self._group.workers:
            child.close()
        if self._store is not None:
            self._store.close()
            self._store = None


def check_start(call: str, fn: object, args: object, nprocs: Any, start_method: str) -> int:
    """Check the arguments and the caller of `spawn` or `launch`; return `nprocs` as an int.

    Args:
        call: The call with the names of its arguments, for the hint.
        fn: See `spawn`.
        args: See `spawn`.
        nprocs: See `spawn`.
        start_method: See `spawn`.

    Raises:
        ArgumentTypeError: `fn`, `args` or `nprocs` has the wrong type.
        InvalidArgumentError: `nprocs` or `start_method` is invalid.
        UsageError: The caller is a child that is running the parent's script again, and would
            start children, too.
    """
    if is_importing_main():
        raise UsageError("processes cannot be started by one that is starting", hint=GUARD_HINT)
    is_list = isinstance(args, Sequence) and not isinstance(args, (str, bytes))
    for name, value, expected, fits in (
        ("fn", fn, "a function", callable(fn)),
        ("args", args, "a tuple or list of arguments", is_list),
        ("nprocs", nprocs, "an integer", hasattr(nprocs, "__index__")),
    ):
        if not fits:
            raise ArgumentTypeError(
                f"{name} must be {expected}, got {type(value).__name__}", hint=call
            )
    number = as_integer(nprocs, "nprocs")
    if number < 1:
        raise InvalidArgumentError(f"nprocs must be at least 1, got {number}")
    if start_method not in _START_METHODS:
        known = ", ".join(_START_METHODS)
        raise InvalidArgumentError(f"start_method must be one of {known}; got {start_method!r}")
    return number


def check_arguments(name: str, fn: Callable[..., object], args: Sequence[object]) -> None:
    """Check that a function takes a rank and the arguments of `spawn` or `launch`.

    Raises:
        ArgumentTypeError: It does not.
    """
    from inspect import signature

    try:
        parameters = signature(fn)
    except (TypeError, ValueError):  # of some functions in C the parameters are unknown
        return
    try:
        parameters.bind(0, *args)
    except TypeError as error:
        called = getattr(fn, "__name__", repr(fn))
        raise ArgumentTypeError(
            f"{called}{parameters} does not take the rank and {len(args)} arguments: {error}",
            hint=f"{name} calls fn(rank, *args)",
        ) from None


class Untyped(Protocol[R]):
    """A function of type Callable[..., R], whose parameters type checkers cannot compare."""

    def __call__(self, *args: Never, **keywords: Never) -> R: ...


# As for `launch`, type checkers compare a tuple of arguments with the parameters of `fn`.
@overload
def spawn(
    fn: Callable[[int], object],
    *,
    nprocs: int = ...,
    join: Literal[True] = ...,
    daemon: bool = ...,
    start_method: str = ...,
) -> None: ...


@overload
def spawn(
    fn: Callable[[int, *Ts], object] | Untyped[object],
    args: tuple[*Ts] | list[Any],
    nprocs: int = ...,
    join: Literal[True] = ...,
    daemon: bool = ...,
    start_method: str = ...,
) -> None: ...


@overload
def spawn(
    fn: Callable[[int, *Ts], object] | Untyped[object],
    args: tuple[*Ts] | list[Any] = ...,
    nprocs: int = ...,
    *,
    join: Literal[False],
    daemon: bool = ...,
    start_method: str = ...,
) -> SpawnContext: ...


@takes_own_keywords
def spawn(
    fn: Callable[..., object],
    args: Sequence[object] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """Run `fn(i, *args)` in `nprocs` processes, i = 0 .. nprocs - 1.

    Each child has RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ... in its environment, and the
    parent serves the store. `init_process_group()` therefore needs no arguments inside `fn`. If
    the parent dies for any reason, the children are killed.

    Args:
        fn: The function. With "spawn" and "forkserver" it must be importable from its module.
        args: Further arguments, the same for every child.
        nprocs: Number of processes.
        join: Whether to wait for the processes. Otherwise call `join()` on the result.
        daemon: As in `multiprocessing`: whether the children may not have children.
        start_method: "spawn", "fork" or "forkserver".

    Returns:
        None, or with `join=False` the context of the running children.

    Raises:
        ArgumentTypeError: `fn`, `args` or `nprocs` has the wrong type.
        InvalidArgumentError: `nprocs` or `start_method` is invalid.
        UsageError: A child, which runs the script to find `fn`, has reached this call, too.
        WorkerFailedError: A child failed (`join=True`). The others have been stopped. The text
            ends with the traceback of the child that failed first.

    Source: torch 2.13, torch.multiprocessing.spawn.
    """
    nprocs = check_start("spawn(fn, args, nprocs), args=(x,)", fn, args, nprocs, start_method)
    check_arguments("spawn", fn, args)
    context = SpawnContext(fn, args, nprocs, daemon=daemon, start_method=start_method, joins=join)
    if not join:
        return context
    try:
        context.join()
    finally:
        context.close_ended()
    return None
