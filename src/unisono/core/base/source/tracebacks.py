"""Tracebacks that end in the user's line: without the frames of this library.

Only an uncaught `UnisonoError` or KeyboardInterrupt is printed so, and an exception that a
`UnisonoError` brought from another process. In another exception the frames of this library may be
what its reader needs.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from unisono.core.base import config
from unisono.errors import UnisonoError

OWN_FOLDER = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../..")) + os.sep
"""Folder of this library."""

own_folders = [OWN_FOLDER]
"""Folders of this library and of torch, if the program calls this library through torch."""

_WITHIN = re.compile(r"\n*\n\nAt:\n(?:  .+\(\d+\): .+\n?)+")
"""The frames that C++ of torch appends to the text of an error of a callback."""

_lock = threading.RLock()
_is_installed = False


def is_own(file: str) -> bool:
    """Whether a file belongs to this library, or to torch; see `own_folders`.

    contextlib does, too: its frames lie between those of the library.
    """
    return file.startswith((*own_folders, contextlib.__file__))


def hide_own_frames() -> None:
    """Print uncaught errors of this library without its frames, from now on; in IPython, too.

    A debugger, and code that catches the error, see the whole traceback.
    """
    global _is_installed
    with _lock:
        if _is_installed:
            return
        _is_installed = True
    sys.excepthook = _trimming(sys.excepthook)
    of_threads = threading.excepthook

    def of_thread(args: Any) -> None:
        with trimmed(args.exc_value):
            of_threads(args)

    threading.excepthook = of_thread
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()) is not None:
        shows = shell.showtraceback

        def of_cell(*args: Any, **keywords: Any) -> None:
            with trimmed(sys.exc_info()[1]):
                shows(*args, **keywords)

        shell.showtraceback = of_cell


def _trimming(previous: Callable[..., object]) -> Callable[..., None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with trimmed(error):
            previous(kind, error, error.__traceback__ if trace is not None else None)

    return hook


@contextlib.contextmanager
def trimmed(error: BaseException | None) -> Iterator[None]:
    """Hide the frames of this library in an error and its causes, inside the with block.

    A cause of which nothing new is left is hidden, too. Does nothing if UNISONO_FULL_TRACEBACK is
    set.
    """
    whole: dict[BaseException, tuple[TracebackType | None, tuple[Any, ...]]] = {}
    repeated: dict[BaseException, BaseException | None] = {}
    todo = [error] if config.get("UNISONO_FULL_TRACEBACK") == "0" else []
    while todo:
        each = todo.pop()
        if each is not None and each not in whole:
            whole[each] = each.__traceback__, each.args
            todo += [each.__cause__, each.__context__]
    has_own = isinstance(error, (UnisonoError, KeyboardInterrupt)) or (
        error is not None and isinstance(error.__cause__, UnisonoError)
    )
    try:
        for each, (trace, args) in whole.items():
            if has_own:
                if repeats_its_cause(each):
                    repeated[each], each.__cause__ = each.__cause__, None
                each.__traceback__ = _outside(trace)
            elif type(each) is RuntimeError and args and isinstance(args[0], str):
                each.args = (_WITHIN.sub(_without_own, args[0]), *args[1:])
        yield
    finally:
        for each, (trace, args) in whole.items():
            each.__traceback__, each.args = trace, args
        for each, cause in repeated.items():
            each.__cause__ = cause


def repeats_its_cause(error: BaseException) -> bool:
    """Whether an error has the text of its cause, which was raised inside this library.

    unisono.MPI's errors have such causes.
    """
    cause = error.__cause__
    return (
        isinstance(cause, UnisonoError)
        and _outside(cause.__traceback__) is None
        and str(cause) in str(error)
    )


def _without_own(found: re.Match[str]) -> str:
    return "" if any(folder in found[0] for folder in own_folders) else found[0]


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this library; None if no other frame is left."""
    entries = []
    while trace is not None:
        if not is_own(trace.tb_frame.f_code.co_filename):
            entries.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for entry in reversed(entries):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept
