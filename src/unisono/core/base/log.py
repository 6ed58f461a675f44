"""Loggers: one tree below "unisono".

A program that configures `logging` gets all records as usual. If a program does not, warnings go to
standard error: a slow engine or an exception in a callback must not go unnoticed. UNISONO_LOG sets
another level for standard error.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading

from unisono.core.base import config
from unisono.core.base.deadline import Deadline
from unisono.errors import InvalidArgumentError

_WHO = "%(asctime)s rank %(rank)s pid %(process)d %(name)s %(levelname)s %(message)s"
_rank: int | None = None
_logged: set[tuple[object, ...]] = set()
# Reentrant, because a signal handler may log while its thread holds the lock.
_logged_lock = threading.RLock()


def must_pass(error: BaseException) -> bool:
    """Whether an exception of a user's function must reach the program: Ctrl-C in its main thread.

    Any other exception ends with the function, because other calls need the thread.
    """
    return isinstance(error, KeyboardInterrupt) and (
        threading.current_thread() is threading.main_thread()
    )


class _Logger(logging.Logger):
    """A logger whose records raise nothing, whatever a handler or filter of the program does.

    The threads that log also run calls. An exception would end such a thread, and with it each wait
    for one of its calls.
    """

    def handle(self, record: logging.LogRecord) -> None:
        """Pass the record on; print an exception of a handler as `logging` does."""
        try:
            super().handle(record)
        except BaseException as error:
            if must_pass(error):
                raise
            # Standard error may be closed.
            with contextlib.suppress(Exception):
                logging.Handler().handleError(record)


class _LastResort(logging.Handler):
    """A handler like `logging.lastResort` that puts "unisono:" before each line."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record if the program has no handler of its own."""
        if sys.stderr and not logging.getLogger().handlers and _ROOT.handlers == [self]:
            # Without this a closed pipe would end the thread that logs.
            with contextlib.suppress(OSError, ValueError):
                print(f"unisono: {self.format(record)}", file=sys.stderr)


def set_rank(rank: int | None) -> None:
    """Set the rank that lines of UNISONO_LOG name; None means the environment's RANK, if any."""
    global _rank
    _rank = rank


def _add_rank(record: logging.LogRecord) -> bool:
    record.rank = config.environ().get("RANK", "-") if _rank is None else _rank
    return True


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
    handler.setFormatter(logging.Formatter(_WHO))
    handler.addFilter(_add_rank)
    root.addHandler(handler)
    root.setLevel(level)
    return root


_ROOT = _make_root()


def get_logger(name: str) -> logging.Logger:
    """Return the logger "unisono.<name>"."""
    logger = _ROOT.getChild(name)
    # Not by `setLoggerClass`, which would change the loggers of other threads meanwhile, too.
    logger.__class__ = _Logger
    return logger


def log_raised(log: logging.Logger, text: str, *arguments: object) -> None:
    """Log the exception that is being handled; raise nothing, even if it cannot be shown."""
    try:
        log.exception(text, *arguments, stacklevel=2)
    except Exception:
        log.error(f"{text}; the exception cannot be shown", *arguments, stacklevel=2)


def log_once(log: logging.Logger, level: int, text: str, *arguments: object) -> None:
    """Log a record unless an equal record was logged before, even by another thread."""
    line = (log.name, level, text, *arguments)
    with _logged_lock:
        if line in _logged:
            return
        _logged.add(line)
    log.log(level, text, *arguments)


class LogLimit:
    """Logs the first warnings of a while, and sums up the others in one line.

    Strangers that knock by the thousand must not fill the log. Used by one thread.

    Args:
        log: Where to log.
        window_s: The while, in seconds.
    """

    # More would hide other lines of the log.
    _LINES = 5

    def __init__(self, log: logging.Logger, window_s: float = 60.0) -> None:
        self._log = log
        self._window_s = window_s
        self._ends: Deadline | None = None
        self._shown = self._hidden = 0
        self._last = ""

    def add(self, line: str) -> None:
        """Log a line, or count it for the next summary."""
        if self._ends is None or (self._ends.expired() and not self._hidden):
            self._ends, self._shown = Deadline(self._window_s), 0
        if self._shown < self._LINES:
            self._shown += 1
            self._log.warning("%s", line)
        else:
            self._hidden += 1
            self._last = line

    def sum_up(self, *, ends: bool = False) -> float | None:
        """Log the summary if it is due; return the seconds until then, None if there is none."""
        if not self._hidden or self._ends is None:
            return None
        if not ends and not self._ends.expired():
            return self._ends.remaining()
        self._log.warning("%d more lines like these, the last: %s", self._hidden, self._last)
        self._hidden = 0
        return None
