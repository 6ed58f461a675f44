"""Loggers: one tree below "unisono", silent unless the user or UNISONO_LOG asks.

A program that configures `logging` sees everything as usual. UNISONO_LOG=INFO is for programs
that do not: it prints to standard error.
"""

from __future__ import annotations

import logging

from unisono.base import config
from unisono.errors import InvalidArgumentError

__all__ = ["get_logger"]


def _make_root() -> logging.Logger:
    root = logging.getLogger("unisono")
    level = config.get("UNISONO_LOG").upper()
    if not level:
        root.addHandler(logging.NullHandler())
        return root
    if level not in logging.getLevelNamesMapping():
        known = ", ".join(logging.getLevelNamesMapping())
        raise InvalidArgumentError(f"UNISONO_LOG={level!r} is not a level (known: {known})")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    root.addHandler(handler)
    root.setLevel(level)
    return root


_ROOT = _make_root()


def get_logger(name: str) -> logging.Logger:
    """Return the logger "unisono.<name>"."""
    return _ROOT.getChild(name)
