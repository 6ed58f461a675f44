"""Versions of weights in a folder: a publisher that waits for nobody, subscribers that come and go.

A version is a file that has a name only if it is whole. So it is seen whole or not at all, also if
its writers die.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Mapping
from typing import Any

from unisono.beyond.reshard.checkpoints import INCOMPLETE, copy_out, save
from unisono.beyond.reshard.parts import ArrayParts, named_parts
from unisono.beyond.reshard.safetensors import StoredArray, identity_of, opened
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.integers import as_integer
from unisono.core.base.threads.streams import on_host
from unisono.core.c10d.objects.call import ObjectCall
from unisono.core.c10d.queries import get_rank, is_initialized
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import Group, require_group
from unisono.core.platform.files import lock
from unisono.errors import CollectiveTimeoutError, InvalidArgumentError

_VERSION = re.compile(r"(\d{10})\.safetensors")

_locking: weakref.WeakSet[Publisher] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In the child of a fork: let go of the locks, which would outlast the parent."""
    for publisher in list(_locking):
        publisher._unlock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


class Publisher:
    """Publishes versions of weights in a folder; it waits for no subscriber.

        publisher = dist.Publisher("/dev/shm/weights", dtype="bfloat16")     # all trainer ranks
        version = publisher.publish({"w": dist.Sharded(...)})                # between two steps

    A version is a file that gets its name when it is whole. If the publisher dies, the last whole
    version stays, and a new publisher of the folder goes on after it. A folder has one publisher at
    a time. The ranks of the publisher and the subscribers must see the folder: /dev/shm on one
    host, a network file system otherwise. There a version that is removed while a rank copies it
    may kill this process by SIGBUS: keep enough of them.

    Args:
        folder: Made if it does not exist.
        group: The ranks that publish; the default group if None.
        dtype: As of `save_arrays`.
        keep: Versions that stay; older ones are removed. A subscriber that reads one goes on.

    Attributes:
        version: The last version; 0 if there is none.

    Raises:
        InvalidArgumentError: `keep` is less than 1.
        CollectiveError: The folder cannot be made, or has another publisher.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        group: Group = None,
        *,
        dtype: Any = None,
        keep: int = 2,
        timeout: Timeout | None = None,
    ) -> None:
        self._group = pg = require_group(group)
        with ObjectCall(pg, "Publisher", timeout, None) as call:

            def check() -> None:
                self._folder, self._dtype = os.fsdecode(os.fspath(folder)), dtype
                self._keep = as_integer(keep, "keep")
                if self._keep < 1:
                    raise InvalidArgumentError(f"keep={keep}: expected at least 1 version")

            call.check(check)
            call.label = f"Publisher({self._folder!r})"
            found = call.on_all(self._prepare, f"cannot use {self._folder}")
        self.version: int = found[0]

    def _prepare(self) -> int:
        if self._group.rank() != 0:
            return 0
        os.makedirs(self._folder, exist_ok=True)
        folder = os.open(self._folder, os.O_RDONLY)
        # The lock lasts as long as the publisher, or its process.
        self._unlock = weakref.finalize(self, os.close, folder)
        _locking.add(self)
        try:
            lock(folder)
        except BlockingIOError:
            raise OSError(None, "it has another publisher") from None
        except OSError:
            # A file system without locks; a version is never replaced there either.
            pass
        for name in os.listdir(self._folder):
            # Of a publisher that died.
            if re.fullmatch(_VERSION.pattern + INCOMPLETE, name):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._folder, name))
        return self._newest()

    def _newest(self) -> int:
        return max(_versions(self._folder), default=0) if self._group.rank() == 0 else 0

    def publish(self, arrays: Mapping[str, Any], *, timeout: Timeout | None = None) -> int:
        """Write the next version, and return its number; a collective call.

        Args:
            arrays: As of `save_arrays`. They may be changed on return.
            timeout: As there.

        Raises:
            UnisonoError: As of `save_arrays`. There is no such version then, but if only its name
                could not be stored.
        """
        with ObjectCall(self._group, "Publisher.publish", timeout, None) as call:
            # After an error there may be a version that not all ranks know.
            newest = call.on_all(
                lambda: max(self.version, self._newest()), f"cannot use {self._folder}"
            )
        number: int = max(newest) + 1
        path = _path(self._folder, number)
        try:
            save(arrays, path, self._group, self._dtype, timeout, is_new=True)
        except BaseException:
            self.version = max([self.version, *_versions(self._folder)])
            raise
        self.version = number
        if self._group.rank() == 0:
            for old in _versions(self._folder):
                if old <= number - self._keep:
                    # What stays is removed after the next version.
                    with contextlib.suppress(OSError):
                        os.unlink(_path(self._folder, old))
        return number


class Subscriber:
    """Takes the versions that a `Publisher` publishes, when it can; also after a restart.

        subscriber = dist.Subscriber("/dev/shm/weights")
        while serving:
            subscriber.take({"w": dist.Sharded(...)})      # between two requests

    Args:
        folder: Of the publisher.
        group: Ranks that take the same version at the same time, by a collective `take`; None:
            this process alone.

    Attributes:
        version: The version that was taken last; 0 if there is none.
    """

    def __init__(self, folder: str | os.PathLike[str], *, group: Group = None) -> None:
        self._folder = os.fsdecode(os.fspath(folder))
        self._group: ProcessGroup | None = None if group is None else require_group(group)
        self.version = 0
        # Which file that was.
        self._identity = ""

    @on_host
    def take(self, arrays: Mapping[str, Any], *, timeout: Timeout | None = None) -> int | None:
        """Copy the newest version into arrays if it is another one; return its number, or None.

        It has no larger number than the one before if the folder was made anew. With a group all
        ranks take it if one of them has not taken it.

        Args:
            arrays: As of `load_arrays`; ranks are those of the group or, without one, of the world.
            timeout: Of the call; the group's if None, 60 s without one.

        Raises:
            InvalidArgumentError: An array does not fit; without a group.
            CollectiveError: An array does not fit on a rank of the group. The arrays are undefined.
            CollectiveTimeoutError: Each version was removed before it could be opened.
        """
        if self._group is None:
            return self._take_alone(arrays, Deadline(60.0 if timeout is None else timeout))
        pg = self._group
        with ObjectCall(pg, "Subscriber.take", timeout, None) as call:
            own: list[dict[str, ArrayParts]] = []
            rank = pg.ranks[pg.rank()]
            call.check(lambda: own.append(named_parts("take", arrays, rank, write=True)))
            failed = f"cannot read {self._folder}"
            while True:
                # The version that all see; the publisher may go on meanwhile.
                seen = call.on_all(lambda: (*self._newest(), self.version), failed)
                number: int = min(newest for newest, _, _ in seen)
                if not number or all(
                    is_taken if newest == number else taken == number
                    for newest, is_taken, taken in seen
                ):
                    return None
                found: list[tuple[dict[str, StoredArray], str]] = []
                done = call.on_all(lambda: self._open(number, found), failed)  # noqa: B023
                if all(done):
                    break
            path = _path(self._folder, number)
            call.on_all(lambda: copy_out(path, found[0][0], own[0]), f"cannot take {path}")
        self.version, self._identity = number, found[0][1]
        return number

    def _take_alone(self, arrays: Mapping[str, Any], deadline: Deadline) -> int | None:
        rank = get_rank() if is_initialized() else -1
        parts = named_parts("take", arrays, rank, write=True)
        found: list[tuple[dict[str, StoredArray], str]] = []
        while True:
            number, is_taken = self._newest()
            if not number or is_taken:
                return None
            if self._open(number, found):
                break
            if deadline.expired():
                raise CollectiveTimeoutError(
                    f"Subscriber.take timed out after {deadline}: each version of {self._folder} "
                    "was removed before it could be opened",
                    hint="publish less often, or with a larger keep=",
                )
        copy_out(_path(self._folder, number), found[0][0], parts)
        self.version, self._identity = number, found[0][1]
        return number

    def _newest(self) -> tuple[int, bool]:
        """Return the number of the newest version, and whether it was taken."""
        number = max(_versions(self._folder), default=0)
        if not number or number != self.version:
            return number, False
        with contextlib.suppress(FileNotFoundError):
            # A folder that was made anew may have the same number.
            return number, identity_of(os.stat(_path(self._folder, number))) == self._identity
        return number, False

    def _open(self, number: int, found: list[tuple[dict[str, StoredArray], str]]) -> bool:
        """Open a version; return False if it was removed."""
        with contextlib.suppress(FileNotFoundError):
            found.append(opened(_path(self._folder, number)))
        return bool(found)


def _path(folder: str, number: int) -> str:
    return os.path.join(folder, f"{number:010}.safetensors")


def _versions(folder: str) -> list[int]:
    """Return the numbers of the versions in a folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [int(match[1]) for name in names if (match := _VERSION.fullmatch(name))]
