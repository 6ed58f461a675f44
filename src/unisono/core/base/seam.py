"""The seam: the one module that decides between C++ and Python.

Every other module takes from here what exists in both languages, and does not ask which one it got.
`cpp` has the rest of C++.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

from unisono.core.base import config
from unisono.core.base.extension import extension as _extension
from unisono.core.base.extension import why_absent as why_absent

T = TypeVar("T")


class _Python:
    """Stands for the extension module without it; has the names that modules use unasked."""

    BUILD = ""
    dtype_codes: Any = staticmethod(dict)
    isa = staticmethod(str)
    isas: Any = staticmethod(list)

    def ticks(self) -> tuple[int, int]:
        return time.monotonic_ns(), time.monotonic_ns()

    def make_function(self, function: T, *_: object) -> T:
        return function

    def _nothing(self, *_: object) -> None:
        """Do nothing: it prepares what only C++ does."""

    add_own_folder = array_of = mark_worker = _nothing
    resume_calls = set_default = set_world = suspend_calls = _nothing


cpp: Any = _extension or _Python()
"""The extension module, or what stands for it."""


def choose(name: str, twin: T) -> T:
    """Return what has this name in C++; without C++ its twin in Python."""
    chosen: T = getattr(_extension, name, twin)
    return chosen


def is_native_built() -> bool:
    """Whether the extension module is built, and fits this version."""
    return _extension is not None


def is_wanted() -> bool:
    """Whether the C++ engine is there and UNISONO_ENGINE does not forbid it."""
    return is_native_built() and config.get("UNISONO_ENGINE") != "reference"
