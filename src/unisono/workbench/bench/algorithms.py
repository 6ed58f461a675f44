"""Algorithms of a command line: a name, a function of a Python file, or a program of MSCCL."""

from __future__ import annotations

import importlib.util
import sys
from hashlib import blake2b
from pathlib import Path
from types import FunctionType, ModuleType

from unisono.core.base.host import reason_of
from unisono.errors import InvalidArgumentError

HELP = "name, FILE.py:function, or FILE.xml of MSCCL"


def named(op: str, text: str) -> str:
    """Return the name of an algorithm; register it first if it is in a file.

    A name may have hyphens.

    Raises:
        InvalidArgumentError: The file cannot be read, or has no algorithm of this operation.
        ScheduleError: The algorithm of an XML file is wrong.
    """
    from unisono.core.schedules.msccl import from_msccl
    from unisono.core.schedules.registry import register_algorithm, register_schedule

    file, colon, function = (text, "", "") if text.endswith(".py") else text.rpartition(":")
    try:
        if text.endswith(".xml"):
            schedule = from_msccl(Path(text).read_text(encoding="utf-8"))
            if schedule.collective != op:
                raise InvalidArgumentError(f"{text} has {schedule.collective}, expected {op}")
            register_schedule(schedule)
            return schedule.algorithm
        if not file.endswith(".py"):
            return text.replace("-", "_")
        module = _module(file)
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {file or text}: {reason_of(error)}") from None
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{text} is no text: {error}") from None
    builder = getattr(module, function, None) if colon else None
    if not callable(builder):
        own = [
            name for name, value in vars(module).items()
            if isinstance(value, FunctionType) and value.__module__ == module.__name__
        ]  # fmt: skip
        what = f"has no function {function!r}" if colon else "needs a function"
        known = ", ".join(f"{file}:{name}" for name in own) or "the file has none"
        raise InvalidArgumentError(f"--algorithm {text}: {file} {what}", hint=f"write {known}")
    register_algorithm(op, function, builder)
    return function


def proof_note(op: str, name: str, p: int, root: int, local: int) -> str:
    """Return a text if an algorithm is not proved for `p` ranks themselves, else "".

    Raises:
        ScheduleError: It is wrong for fewer ranks.
    """
    from unisono.core.schedules.registry import proved_sizes

    sizes = proved_sizes(op, name, p, root, local)
    if sizes == (p,):
        return ""
    on = " and ".join(map(str, sizes))
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
