"""The C++ extension module, loaded in one place; None where it is not built."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["extension"]

try:
    extension: Any = import_module("unisono._engine")
except ImportError:
    extension = None
