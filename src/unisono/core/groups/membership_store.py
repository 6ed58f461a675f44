"""The keys of a job whose ranks come and go: the document, and the answers to commits."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.rendezvous.agents.state import dumps
from unisono.core.rendezvous.membership import MembershipEvent, MembershipState, apply, loads
from unisono.core.stores import PrefixStore, Store
from unisono.core.stores.api import Value, changed_too_often
from unisono.errors import StoreTimeoutError

T = TypeVar("T")

_KEY = "document"
_OF_GENERATION = re.compile(r"(?:formed/)?(\d+)\.(\d+)(?:/|$)")

LOOK_S = 0.02
"""Pause between two looks at the other processes.

A shorter pause loads the store, a longer one delays the survivors of a rank that ends in a meeting.
"""

YES, NO = b"yes", b"no"
"""The answers to the question whether a step counts."""


def first_proposal(store: Store, key: str, proposal: bytes, timeout: Timeout) -> bytes:
    """Return the answer to a question, which is the first proposal of all ranks."""
    # If the store does not answer, the check ends in time.
    store.check([key], timeout)
    return store.compare_set(key, b"", proposal)


class Document:
    """The membership document in the store of a job."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("unisono/membership", store)

    def read(self, timeout: Timeout | None = None) -> MembershipState:
        """Return the present state; `timeout` is the store's time to answer."""
        return loads(self._text(timeout))

    def change(self, event: MembershipEvent, timeout: Timeout | None = None) -> MembershipState:
        """Apply an event; return the state after it."""
        text = self._text(timeout)
        deadline = Deadline(self._store.timeout)
        while True:
            before = loads(text)
            after = apply(before, event)
            desired = dumps(after)
            if after == before:
                return after
            if (answer := self._store.compare_set(_KEY, text, desired)) == desired:
                if after.generation > max(1, before.generation):
                    self._store.set(f"formed/{after.world}.{after.generation}", b"")
                return after
            if deadline.expired():
                raise changed_too_often(self._store, _KEY, deadline)
            # A store answers with the expected value if the key was deleted.
            text = b"" if answer == text else answer

    def gone(self, timeout: Timeout) -> tuple[list[int], list[str]]:
        """Return the founders' ranks, and the hosts, of the nodes that the launcher gave up."""
        if not self._store.check(["gone"], timeout):
            return [], []
        ranks, hosts = json.loads(self._store.get("gone", timeout))
        return ranks, hosts

    def wait(self, world: int, generation: int) -> None:
        """Wait for a moment, or until this generation is formed."""
        with contextlib.suppress(StoreTimeoutError):
            self._store.wait([f"formed/{world}.{generation}"], LOOK_S)

    def part(self, state: MembershipState) -> PrefixStore:
        """Return the part of the store that belongs to the present generation alone."""
        return PrefixStore(f"{state.world}.{state.generation}", self._store)

    def clear_before(self, state: MembershipState) -> None:
        """Delete the keys of the generations before a state's; their members cannot go on."""
        for key in self._store.list_keys():
            found = _OF_GENERATION.match(key)
            if found and (int(found[1]), int(found[2])) < (state.world, state.generation):
                self._store.delete_key(key)

    def _text(self, timeout: Timeout | None) -> bytes:
        there = self._store.check([_KEY], timeout)
        return self._store.get(_KEY, timeout) if there else b""


class WatchedStore(PrefixStore):
    """A store whose waits call `check` now and then, which may end them by an exception."""

    def __init__(self, store: Store, check: Callable[[], None]) -> None:
        super().__init__("group", store)
        self.check_members: Callable[[], None] | None = check

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        return self._in_slices(lambda slice_s: PrefixStore.get(self, key, slice_s), timeout)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._in_slices(lambda slice_s: PrefixStore.wait(self, keys, slice_s), timeout)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        self._in_slices(
            lambda slice_s: PrefixStore.barrier(self, key, world_size, slice_s), timeout
        )

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        if self.check_members is not None:
            self.check_members()
        return super().compare_set(key, expected, desired)

    def _in_slices(self, call: Callable[[Timeout | None], T], timeout: Timeout | None) -> T:
        if self.check_members is None:
            return call(timeout)
        deadline = Deadline(self.timeout if timeout is None else timeout)
        while True:
            try:
                return call(min(5 * LOOK_S, deadline.remaining()))
            except StoreTimeoutError:
                if deadline.expired():
                    raise
            self.check_members()
