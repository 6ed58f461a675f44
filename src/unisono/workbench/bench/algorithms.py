"""Algorithms of a command line: a name, a function of a Python file, or a program of MSCCL."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

from unisono.core.base.host import reason_of
from unisono.errors import InvalidArgumentError

HELP = "name, FILE.py:function, or FILE.xml of MSCCL"


def named(op: str, text: str) -> str:
    """Return the name of an algorithm; register it first if it is in a file.

    Raises:
        InvalidArgumentError: The file cannot be read, or has no algorithm of this operation.
        ScheduleError: The algorithm of an XML file is wrong.
    """
    from unisono.core.schedules.msccl import from_msccl
    from unisono.core.schedules.registry import entry, register_algorithm, register_schedule

    file, colon, function = text.rpartition(":")
    try:
        if text.endswith(".xml"):
            schedule = from_msccl(Path(text).read_text(encoding="utf-8"))
            if schedule.collective != op:
                raise InvalidArgumentError(f"{text} has {schedule.collective}, expected {op}")
            register_schedule(schedule)
            return schedule.algorithm
        if not (colon and file.endswith(".py")):
            return text
        with contextlib.suppress(InvalidArgumentError):
            # A second look at the file would make another function.
            known: Any = getattr(entry(op, function).builder, "__wrapped__", None)
            if known is not None and known.__code__.co_filename == file:
                return function
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {file or text}: {reason_of(error)}") from None
    builder = getattr(module, function, None)
    if not callable(builder):
        raise InvalidArgumentError(f"{file} has no function {function!r}")
    register_algorithm(op, function, builder)
    return function
