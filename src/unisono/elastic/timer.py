"""torch.distributed.elastic.timer's path: `expires`."""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections.abc import Iterator
from typing import Any

from unisono.errors import InvalidArgumentError

__all__ = ["expires"]

_ends: list[float] = []
_lock = threading.Lock()


@contextlib.contextmanager
def expires(after: float, scope: str | None = None, client: Any = None) -> Iterator[None]:
    """End this process with code 1 if the with block takes longer than `after` seconds.

    The stacks of all threads are written to file descriptor 2 first. No server is needed (torch's
    needs one). Blocks may be nested, and may run on several threads.

    Args:
        after: Seconds.
        scope: Accepted for torch's sake, as `client`.
        client: See `scope`.

    Raises:
        InvalidArgumentError: `after` is not positive, or longer than a thread can wait.
    """
    if not after > 0:
        raise InvalidArgumentError(f"expires takes a positive number of seconds, got {after!r}")
    if after > threading.TIMEOUT_MAX:
        raise InvalidArgumentError(
            f"expires takes at most {threading.TIMEOUT_MAX:.0f} seconds, got {after!r}"
        )
    end = time.monotonic() + after
    with _lock:
        _ends.append(end)
    try:
        with _lock:
            _arm()
        yield
    finally:
        with _lock:
            _ends.remove(end)
            _arm()


def _arm() -> None:
    """Let Python's watchdog, of which there is one, end the process at the first end."""
    if _ends:
        left = max(min(_ends) - time.monotonic(), 1e-3)
        # sys.stderr may be an object without a file.
        faulthandler.dump_traceback_later(left, exit=True, file=2)
    else:
        faulthandler.cancel_dump_traceback_later()
