"""Loggers: one tree below "unisono".

A program that configures `logging` sees everything as usual. Of one that does not, warnings go to
standard error: a slow engine or a callback that raised must not pass unseen. UNISONO_LOG asks for
more there, or less.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading

from unisono.base import config
from unisono.errors import InvalidArgumentError

__all__ = ["get_logger", "log_once"]

_said: set[tuple[object, ...]] = set()
_saying = threading.Lock()


class _LastResort(logging.Handler):
    """As `logging.lastResort`, and says whose line it is."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record if no handler of the program's own sees it."""
        if sys.stderr and not logging.getLogger().handlers and _ROOT.handlers == [self]:
            # A closed pipe must not end the thread that says something, nor what it serves.
            with contextlib.suppress(OSError, ValueError):
                print(f"unisono: {self.format(record)}", file=sys.stderr)


def _make_root() -> logging.Logger:
    root = logging.getLogger("unisono")
    level = config.get("UNISONO_LOG").upper()
    if not level:
        root.addHandler(_LastResort(logging.WARNING))
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


def log_once(log: logging.Logger, level: int, text: str, *arguments: object) -> None:
    """Log what has not been logged before, also if several threads come to it at once."""
    line = (log.name, level, text, *arguments)
    with _saying:
        if line in _said:
            return
        _said.add(line)
    log.log(level, text, *arguments)
