"""Whether the calling thread is in a signal handler that interrupted a method with a lock."""

from __future__ import annotations

from typing import Any


def has_lock(lock: Any) -> bool:
    """Whether the calling thread has a lock, an RLock or Condition, already.

    It then is in a signal handler or a destructor, and interrupts the owner, which is itself.
    """
    # A Condition asks its lock in this way.
    return bool(lock._is_owned())
