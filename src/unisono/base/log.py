"""Loggers: one tree below "unisono", silent until the user or UNISONO_LOG asks."""

from __future__ import annotations

import logging

__all__ = ["get_logger"]

_ROOT = logging.getLogger("unisono")
_ROOT.addHandler(logging.NullHandler())


def get_logger(name: str) -> logging.Logger:
    """Return the logger "unisono.<name>"."""
    return _ROOT.getChild(name)
