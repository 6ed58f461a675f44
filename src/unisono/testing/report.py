"""The text about the ranks that failed in a test: each rank's own traceback."""

from __future__ import annotations

import importlib.util
import os
import reprlib
import sysconfig
import traceback
import types
from typing import NamedTuple

import unisono
from unisono.core.base.grouping import grouped
from unisono.core.base.source.tracebacks import repeats_its_cause
from unisono.core.base.text import name_ranks
from unisono.errors import InternalError
from unisono.launcher.traceback_text import is_consequence

__all__ = ["RankFailure", "frames_of", "report"]

_HERE = os.path.dirname(__file__)
_PACKAGE = os.path.join(os.path.dirname(unisono.__file__), "")
# Frames of these files and packages do not explain a failure.
_WRAPPERS = (
    *(os.path.join(_HERE, name) for name in ("ranks.py", "plugin.py")),
    *(
        # `run` calls coroutines through asyncio. Pytest need not lie in this environment.
        os.path.join(os.path.dirname(spec.origin), "")
        for spec in map(importlib.util.find_spec, ("_pytest", "pluggy", "asyncio"))
        if spec and spec.origin
    ),
)
_LIBRARIES = (
    *(os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "purelib", "platlib")),
    _PACKAGE,
    "<frozen ",
)
_VARIABLES = 20
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 16


class RankFailure(NamedTuple):
    """The exception of one rank as text.

    Attributes:
        line: The exception's class and its first line.
        text: The traceback.
        variables: The local variables at a plain `assert`, which itself shows no values.
        is_peer: Whether the exception only reports the failure of another rank, also if another
            exception was raised from such a one.
    """

    line: str
    text: str
    variables: str
    is_peer: bool

    @classmethod
    def of(cls, error: BaseException) -> RankFailure:
        """Describe an exception in the rank that raised it."""
        first = str(error).partition("\n")[0]
        line = f"{type(error).__name__}: {first}" if first else type(error).__name__
        trace = traceback.TracebackException.from_exception(error)
        _hide_wrappers(trace, error)
        text = "".join(trace.format()).rstrip()
        return cls(line, text, _variables(error), is_consequence(text))


def frames_of(stack: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames without those of `run` and pytest."""
    return [frame for frame in stack if not frame.filename.startswith(_WRAPPERS)]


def report(failures: dict[int, RankFailure], world_size: int, kind: str) -> str:
    """Return the text about all ranks that failed, in the order of `failures`.

    Ranks with equal tracebacks are shown once. A rank that reports only another rank's failure
    gets one line, unless it is the first.
    """
    first = next(iter(failures), None)
    short = {rank for rank, failure in failures.items() if failure.is_peer and rank != first}
    parts = []
    alike = ((rank if rank in short else each.text, rank) for rank, each in failures.items())
    for ranks in grouped(alike).values():
        failure = failures[ranks[0]]
        kinds = {"threads": "thread", "processes": "process"}[kind] if len(ranks) == 1 else kind
        part = f"{name_ranks(sorted(ranks))} of {world_size} ({kinds}): {failure.line}"
        if ranks[0] not in short:
            part += f"\n{failure.text}"
            if failure.variables:
                part += f"\nlocal variables on rank {ranks[0]}:\n{failure.variables}"
        parts.append(part)
    return "\n\n".join(parts)


def _hide_wrappers(trace: traceback.TracebackException, error: BaseException) -> None:
    trace.stack[:] = frames_of(trace.stack) or trace.stack
    if type(error).__module__.startswith("unisono.") and not isinstance(error, InternalError):
        # The error's text explains it; the last frame is the call in the test.
        own = [f for f in trace.stack if not f.filename.startswith(_PACKAGE)]
        trace.stack[:] = own or trace.stack[-1:]
    if repeats_its_cause(error):
        trace.__cause__ = None
    for name in ("__cause__", "__context__"):
        if (other := getattr(trace, name)) is not None:
            _hide_wrappers(other, getattr(error, name))
    for each, part in zip(
        getattr(trace, "exceptions", None) or (), getattr(error, "exceptions", ()), strict=False
    ):
        _hide_wrappers(each, part)


def _variables(error: BaseException) -> str:
    """Return the local variables of the innermost frame of a test, if its `assert` failed."""
    frames = [
        frame
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_LIBRARIES)
    ]
    # pytest's rewritten `assert` shows the values in its text.
    if not isinstance(error, AssertionError) or not frames or "@pytest_ar" in frames[-1].f_globals:
        return ""
    hidden = (types.ModuleType, types.FunctionType, type)
    shown = [(k, v) for k, v in frames[-1].f_locals.items() if not isinstance(v, hidden)]
    return "\n".join(f"  {k} = {' '.join(_SHORT.repr(v).split())}" for k, v in shown[:_VARIABLES])
