"""Algorithms of a command line: a name, a function of a Python file, or a program of MSCCL."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from unisono.core.base.host import reason_of
from unisono.errors import InvalidArgumentError

if TYPE_CHECKING:
    from unisono.core.schedules.ir import Schedule

HELP = "name, FILE.py:function, or FILE.xml of MSCCL"


def is_file(text: str) -> bool:
    """Return whether a text names an algorithm in a file."""
    return text.endswith((".py", ".xml")) or text.rpartition(":")[0].endswith(".py")


def named(op: str, text: str) -> str:
    """Return the name of an algorithm; register it first if it is in a file.

    A name may have hyphens.

    Raises:
        InvalidArgumentError: The file cannot be read, or has no algorithm of this operation.
        ScheduleError: The algorithm of an XML file is wrong.
    """
    from unisono.core.schedules.registry import entry, register_algorithm, register_schedule

    if not is_file(text):
        return text.replace("-", "_")
    if text.endswith(".xml"):
        schedule = _program(text)
        if schedule.collective != op:
            raise InvalidArgumentError(f"{text} has {schedule.collective}, expected {op}")
        register_schedule(schedule)
        return schedule.algorithm
    name, function = text.rpartition(":")[2], _function(text)
    if (own := _operation(function)[0]) not in ("", op):
        entry(own, "linear")
        raise InvalidArgumentError(f"{text} is an algorithm of {own}, not of {op}")
    register_algorithm(op, name, function)
    return name


def label(text: str) -> str:
    """Return the name of an algorithm in a table: of a file its function, or the name of the file.

    It reads no file.
    """
    if text.endswith(".xml"):
        return Path(text).stem
    return text.rpartition(":")[2] if is_file(text) else text.replace("-", "_")


def operation_of(text: str) -> str:
    """Return the operation of an algorithm in a file.

    Raises:
        InvalidArgumentError: The file cannot be read, or the function returns no schedule for a
            power of two as world size, up to 64.
    """
    if text.endswith(".xml"):
        return _program(text).collective
    found, problem = _operation(_function(text))
    if found:
        return found
    raise InvalidArgumentError(f"{text} returns no schedule for 4 ranks: {problem}")


def _operation(builder: Callable[..., Any]) -> tuple[str, str]:
    """Return the operation of a function, "" if it is not known, and what it did first instead."""
    from unisono.core.schedules.families import line_of
    from unisono.core.schedules.ir import Schedule

    problem = ""
    given = {"local": 2, "root": 0, "pipeline": 1}
    takes = inspect.signature(builder).parameters
    for p in (4, 8, 16, 32, 64):
        try:
            built = builder(p, **{key: given[key] for key in given if key in takes})
        except Exception as error:
            problem = problem or repr(error) + line_of(builder, error)
        else:
            if isinstance(built, Schedule):
                return built.collective, ""
            problem = problem or f"it returned {built!r}, expected a Schedule"
    return "", problem


def _program(file: str) -> Schedule:
    """Return the schedule of an XML file."""
    from unisono.core.schedules.msccl import from_msccl

    try:
        return from_msccl(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {file}: {reason_of(error)}") from None
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{file} is no text: {error}") from None


def _function(text: str) -> Callable[..., Any]:
    """Return the function of FILE.py:function."""
    file, _, function = (text, "", "") if text.endswith(".py") else text.rpartition(":")
    try:
        module = _module(file)
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {file}: {reason_of(error)}") from None
    found = getattr(module, function, None) if function else None
    if found is not None and callable(found):
        builder: Callable[..., Any] = found
        return builder
    own = [
        name for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    ]  # fmt: skip
    known = ", ".join(f"{file}:{name}" for name in own)
    raise InvalidArgumentError(
        f"{file} has no function {function!r}" if function else f"{file}: which function?",
        hint=f"it has {known}" if known else "it has no functions",
    )


def check_hosts(op: str, name: str, p: int, per_host: int, part: str = "host") -> None:
    """Check that an algorithm for equal hosts has them, or equal nodes of one host.

    Raises:
        InvalidArgumentError: The last host has fewer ranks, there is one host, or one rank on each.
    """
    from unisono.core.schedules.registry import entry

    if not entry(op, name).two_level:
        return
    if not 1 < per_host < p:
        raise InvalidArgumentError(
            f"{op} ({name}) needs several hosts with 2 ranks or more; {p} ranks are "
            + (f"{p} hosts here" if per_host == 1 else "1 host here"),
            hint="--hosts 2 makes two of them"
            if p % 2 == 0 and p > 2
            else "for instance -n 4 --hosts 2",
        )
    if p % per_host:
        raise InvalidArgumentError(
            f"{op} ({name}) needs equally many ranks on each {part}; {p} ranks on "
            f"{-(-p // per_host)} {part}s are {per_host} per {part}, and {p % per_host} on the last"
        )


def check_root(op: str, root: int) -> None:
    """Check that an operation for which a root is given has one.

    Raises:
        InvalidArgumentError: It has none.
    """
    from unisono.core.schedules.ir import ROOTED

    if root and op not in ROOTED:
        raise InvalidArgumentError(f"-r {root}: {op} has no root")


def proof_note(op: str, name: str, p: int, root: int, local: int) -> str:
    """Return a text if an algorithm is not proved for `p` ranks themselves, else "".

    Raises:
        ScheduleError: It is wrong for fewer ranks.
    """
    from unisono.core.schedules.registry import proved_sizes

    sizes = proved_sizes(op, name, p, root, local)
    if sizes == (p,):
        return ""
    on = " and ".join(filter(None, [", ".join(map(str, sizes[:-1])), *map(str, sizes[-1:])]))
    return f"{name} is NOT PROVED on {p:,} ranks" + (f", but on {on}" if on else "")


def _module(file: str) -> ModuleType:
    """Return the module of a file, imported once, as Python runs a script."""
    path = Path(file).resolve()
    # Dataclasses and pickle look for the module by its name.
    name = f"unisono_algorithms.{path.stem}_{blake2b(bytes(path), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except OSError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise InvalidArgumentError(f"{file} cannot be imported: {error!r}") from error
    return module
