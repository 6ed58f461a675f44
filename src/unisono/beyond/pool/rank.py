"""A rank of a pool: it waits for calls, makes them, and sends back what they return or raise."""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import os
import signal
import sys
import tokenize
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from unisono.beyond.pool.display import Shown, show, show_figures, take_displayed
from unisono.beyond.pool.main_names import (
    end_call,
    loads_in_main,
    names_of_cell,
    note_assigned,
    note_start,
)
from unisono.beyond.pool.memory import attach, attached, drop, dumps_with
from unisono.beyond.pool.watch import answer_on_thread, open_backends
from unisono.core.base.source.tracebacks import is_own, trimmed
from unisono.core.c10d.lifecycle import destroy_process_group, init_process_group
from unisono.core.groups.world import current, process_world
from unisono.core.stores import PrefixStore, TCPStore
from unisono.launcher.launch import pickling
from unisono.launcher.payload import Payload, loads_result, remember_source
from unisono.launcher.spawn import pickled_error


class RaisedError(NamedTuple):
    """What a call raised.

    Attributes:
        error: The exception, pickled; empty if it cannot be.
        text: Its traceback, from the frame of the called function on.
    """

    error: bytes
    text: str


class CallAnswer(NamedTuple):
    """The answer of a rank to a call, before its result.

    Attributes:
        number: Number of the message that it answers.
        raised: What the call raised, or None if a result follows.
        groups: "broken" if a group of the rank makes no calls any more, or the call has destroyed
            the default group. "used" if the call may have made a call of a group, or a group.
            Otherwise "".
        result: The result, which the parent adds.
        shown: What the notebook shows.
    """

    number: int
    raised: RaisedError | None
    groups: str
    result: Payload | None = None
    shown: tuple[Shown, ...] = ()


def serve(rank: int, link: Any, world_size: int, with_group: bool) -> None:
    """Make the calls that come over a link, until it closes."""
    _Rank(rank, link, world_size, with_group).serve()


class _Rank:
    def __init__(self, rank: int, link: Any, world_size: int, with_group: bool) -> None:
        self._rank, self._link, self._world_size = rank, link, world_size
        self._pid = os.getpid()
        self._in_call = False
        self._store = None
        if with_group:
            port = int(os.environ["MASTER_PORT"])
            self._store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
        else:
            process_world.hint = "tasks of an executor have no group: use unisono.pool"
        # The backend of the kernel has no kernel here. With another one figures stay open.
        self._has_figures = with_group and "inline" in os.environ.get("MPLBACKEND", "")
        if self._has_figures:
            os.environ["MPLBACKEND"] = "agg"
            vars(builtins).setdefault("display", show)
        signal.signal(signal.SIGINT, self._interrupt)
        np.random.seed()  # forked ranks would draw the same numbers; Python seeds `random` anew
        note_start()

    def _interrupt(self, signum: int, frame: object) -> None:
        # Ctrl-C on a terminal comes twice: from the terminal, and from the pool.
        if self._in_call:
            self._in_call = False
            raise KeyboardInterrupt

    def serve(self) -> None:
        while True:
            try:
                name, *args = self._link.recv()
            except (EOFError, OSError):
                return
            if name == "end":
                if current().default is not None:
                    destroy_process_group()
                return
            getattr(self, name)(*args)

    def output(self) -> None:
        """Take the pipe that replaces the standard output and the standard error."""
        fd = reduction.recv_handle(self._link)
        for target in (1, 2):
            os.dup2(fd, target)
        os.close(fd)
        # A line is shown when it ends, also if the parent's output is no terminal. A forked rank
        # has the parent's streams, which may lead elsewhere. Other objects may hold the old ones.
        for fd, name in ((1, "stdout"), (2, "stderr")):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                getattr(sys, name).reconfigure(line_buffering=True)
            stream = open(  # noqa: SIM115  it stays
                *(fd, "w", 1), encoding="utf-8", errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)

    def attach(self, key: str, nbytes: int) -> None:
        """Take memory of the parent."""
        attach(key, reduction.recv_handle(self._link), nbytes)

    def watch(self) -> None:
        """Take the link that asks what this rank does."""
        answer_on_thread(Connection(reduction.recv_handle(self._link)))

    def drop(self, key: str) -> None:
        """Let memory of the parent go."""
        drop(key)

    def group(self, number: int, generation: int) -> None:
        """Replace the group; all ranks do."""

        def made() -> None:
            with contextlib.suppress(Exception):  # a broken group, which has its reason
                if current().default is not None:
                    destroy_process_group()
            assert self._store is not None
            store = PrefixStore(f"pool/{generation}", self._store)
            init_process_group(store=store, rank=self._rank, world_size=self._world_size)

        self._answer(number, made)

    def report(self, number: int, text: str) -> None:
        """End the calls of the other ranks, for a reason."""

        def made() -> None:
            for _, backend in open_backends():
                backend.abort(text, failed=True)

        self._answer(number, made)

    def call(self, number: int) -> None:
        """Make a call."""
        payload = Payload.received(self._link)

        def made() -> Any:
            fn, args, keywords = payload.load_once(loads_in_main)
            value = fn(*args, **keywords)
            if self._has_figures:
                show_figures()
            return value

        self._answer(number, made)
        end_call()  # the pickle of the result may need the names

    def _answer(self, number: int, fn: Callable[[], Any]) -> None:
        before = _calls_made()
        result: Payload | None = None
        raised = None
        try:
            self._in_call = True
            try:
                value = fn()
            finally:
                self._in_call = False
            self._end_fork(None)
            what = f"the result of rank {self._rank}"
            with pickling(value, what, partial(dumps_with, attached)) as dumps:
                result = Payload(value, dumps)
        except BaseException as error:
            self._end_fork(error)
            raised = raised_by(error, __file__)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        groups = "used" if _calls_made() != before else ""
        has_lost = self._store is not None and current().default is None
        if has_lost or any(each.broken() is not None for _, each in open_backends()):
            groups = "broken"
        self._link.send(CallAnswer(number, raised, groups, shown=tuple(take_displayed())))
        if result is not None:
            result.send(self._link, os.getppid())

    def _end_fork(self, error: BaseException | None) -> None:
        """End a process that a call has forked: the answer is not its own."""
        if os.getpid() == self._pid:
            return
        code: Any = 0 if error is None else 1
        if isinstance(error, SystemExit):
            code = error.code or 0
        elif error is not None:
            traceback.print_exception(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)


def _calls_made() -> object:
    """Return an object that a call of a group changes, as do a message and a new group."""
    world = current()
    counts: list[Any] = [world.made, dict(world.made_local), dict(world.passed)]
    for group, backend in open_backends():
        if (trace := backend.trace) is None:
            return object()  # nothing counts the messages
        counts.append((id(group), backend.last_number(), trace.recorder.last))
    return counts


def run_each(fn: Any, tasks: list[tuple[Any, ...]]) -> list[Any]:
    """Return the results of several calls."""
    return [fn(*args) for args in tasks]


def run_each_kept(fn: Any, tasks: list[tuple[Any, ...]]) -> list[Any]:
    """Return the results of several calls; in place of one that raised, its RaisedError."""
    found: list[Any] = []
    for args in tasks:
        try:
            found.append(fn(*args))
        except Exception as error:
            found.append(raised_by(error, __file__))
    return found


def run_cell(source: str, number: int) -> None:
    """Run the source of a cell in the main module.

    Its last value is shown, unless a semicolon follows, and its figures.
    """
    name = f"<ranks {number}>"
    remember_source(name, source)
    try:
        tree = ast.parse(source, name)
    except SyntaxError as error:
        if (error.text or "").lstrip().startswith(("%", "!")):
            error.add_note("magics and commands of the shell do not run on ranks")
        raise error.with_traceback(None) from None
    note_assigned(names_of_cell(tree))
    space = vars(sys.modules["__main__"])
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), space)
    if isinstance(last, ast.Expr):
        code = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
        value = eval(code, space)
        if value is not None and not _is_quiet(source):
            show(value)
    show_figures()


def _is_quiet(source: str) -> bool:
    kinds = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [each.string for each in tokens if each.type not in kinds][-1:] == [";"]


def raised_by(error: BaseException, above: str) -> RaisedError:
    """Return what a call has raised, without the first frames, of the file `above`."""
    with trimmed(error):
        below = error.__traceback__
        while below is not None and _is_above(below.tb_frame.f_code.co_filename, above):
            below = below.tb_next
        # The text of the one has the line, and that of the other the module.
        if not isinstance(error, (SyntaxError, ImportError)):
            below = below or error.__traceback__
        lines = traceback.format_exception(type(error), error, below)
    return RaisedError(pickled_error(error), "".join(lines).rstrip())


def _is_above(file: str, above: str) -> bool:
    # The frames between are of the unpickler.
    return file == above or is_own(file) or "cloudpickle" in file


def error_of(raised: RaisedError) -> BaseException | None:
    """Return the exception of a rank, or None if it cannot be loaded."""
    try:
        error = loads_result(raised.error)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
