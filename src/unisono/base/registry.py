"""Names that other packages can add to: backends, transports."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from unisono.errors import InvalidArgumentError

T = TypeVar("T")


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
        self._loaded: set[str] = set()
        # Ranks may be threads: a name that another rank is loading is no unknown name.
        self._lock = threading.RLock()

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
            InvalidArgumentError: The name is unknown; the text lists the known names.
        """
        if name not in self._values and name not in (known := self.known()):
            raise InvalidArgumentError(f"unknown {self._what} {name!r} (known: {', '.join(known)})")
        return self._values[name]

    def known(self) -> tuple[str, ...]:
        """Return the names in alphabetical order, those of entry points included."""
        # Imported here, because it loads the zip and e-mail modules. Few programs need it.
        from importlib.metadata import entry_points

        with self._lock:
            for point in entry_points(group=self._group):
                if point.name not in self._loaded:
                    self._loaded.add(point.name)
                    point.load()()
        return tuple(sorted(self._values))

    def added(self) -> tuple[str, ...]:
        """Return the names that are known so far, in the order in which they were added."""
        return tuple(self._values)
