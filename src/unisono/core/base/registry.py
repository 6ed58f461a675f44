"""Names that other packages can add to: backends, transports."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from unisono.core.base.log import get_logger, log_once
from unisono.errors import InvalidArgumentError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

_LOG = get_logger("base")

# How long a thread waits for another one that adds the names of a package. Without a limit, each
# could wait for a module that the other one imports.
_ADD_S = 10.0


def _is_foreign(point: EntryPoint) -> bool:
    return not point.value.startswith("unisono.")


def _is_installed() -> bool:
    """Whether there are entries of unisono's own; a folder of its source alone has none."""
    from importlib.metadata import entry_points

    return not all(map(_is_foreign, entry_points(group="unisono.backends")))


class Registry(Generic[T]):
    """Values by lower-case name.

    Args:
        what: The kind of the values, for errors.
        group: The entry-point group of other packages. Each entry is a callable without arguments,
            which adds a name.
        values: By name; those of the library.
    """

    def __init__(self, what: str, group: str, values: dict[str, T]) -> None:
        self._what = what
        self._group = group
        self._values = values
        # By name and value of an entry. Ranks may be threads: a name that another rank is adding
        # is no unknown name. A callable may ask for names itself.
        self._locks: dict[tuple[str, str], threading.RLock] = {}
        self._called: set[tuple[str, str]] = set()
        self._errors: dict[tuple[str, str], Exception] = {}

    def add(self, name: str, value: T) -> None:
        """Make a value known.

        Raises:
            InvalidArgumentError: The name is taken, or no lower-case identifier.
        """
        if name != name.lower() or not name.isidentifier():
            raise InvalidArgumentError(
                f"{self._what} name {name!r} must be a lower-case identifier"
            )
        if name in self._values:
            raise InvalidArgumentError(f"{self._what} {name!r} is registered already")
        self._values[name] = value

    def get(self, name: str) -> T:
        """Return a value.

        Raises:
            InvalidArgumentError: The name is unknown; the text lists the known names, and the
                entries that failed.
        """
        if name not in self._values:
            # First, because nobody needs the others then.
            self._load(name)
        if name not in self._values and name not in (known := self.known()):
            failed = "".join(f"; {key[0]} failed: {why!r}" for key, why in [*self._errors.items()])
            raise InvalidArgumentError(
                f"unknown {self._what} {name!r} (known: {', '.join(known)}{failed})",
                hint=None if _is_installed() else "unisono is not installed here: pip install -e .",
            )
        return self._values[name]

    def known(self) -> tuple[str, ...]:
        """Return the names in alphabetical order, those without a value (None) first.

        Those of entry points are included. An entry that fails is logged.
        """
        self._load()
        for (name, _), error in [*self._errors.items()]:
            log_once(_LOG, logging.WARNING, "%s %r failed: %s", self._what, name, repr(error))
        return tuple(sorted(self._values, key=lambda name: (self._values[name] is not None, name)))

    def added(self) -> tuple[str, ...]:
        """Return the names that are known so far, in the order in which they were added."""
        return tuple(self._values)

    def _load(self, name: str | None = None) -> None:
        """Call the entries of a name, or all, unless they were called before."""
        # Imported here, because it loads the zip and e-mail modules. Few programs need it.
        from importlib.metadata import entry_points

        # Those of the library first, so that no other package takes their names.
        for point in sorted(entry_points(group=self._group), key=_is_foreign):
            key = point.name, point.value
            if name not in (None, point.name) or (key in self._called and key in self._errors):
                continue
            try:
                # Not under a lock, because another thread may be importing the same module.
                register = point.load()
                lock = self._locks.setdefault(key, threading.RLock())
                if not lock.acquire(timeout=_ADD_S):
                    raise TimeoutError("another thread has not finished it")
                try:
                    if key not in self._called:
                        self._called.add(key)
                        register()
                finally:
                    lock.release()
                self._errors.pop(key, None)
            except Exception as error:
                self._errors[key] = error
