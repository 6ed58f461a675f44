"""Loops of different length: a rank without further data shadows the calls of the others.

    with Join([trainer]):
        for batch in batches:                  # fewer on some ranks
            Join.notify_join_context(trainer)  # first of all calls of a step
            trainer.step(batch)

A class whose steps make collective calls is a `Joinable`. Its `JoinHook` makes the same calls with
values that change no result, such as zeros for a sum.

Source: torch.distributed.algorithms.join (2.13).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from unisono.core.c10d.collectives import all_reduce
from unisono.core.groups.world import Group, require_group
from unisono.core.operations.work import Work
from unisono.errors import CollectiveError, InvalidArgumentError

__all__ = ["Join", "JoinHook", "Joinable"]


class JoinHook:
    """What a rank without further data does in place of its steps; by default nothing."""

    def main_hook(self) -> None:
        """Shadow the calls of one step."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Finish, when no rank has data; `is_last_joiner` is True on those with most steps."""


class _Role(NamedTuple):
    """The part of a joinable in the context that it is in."""

    notifies: bool = False
    throws: bool = False


class Joinable(ABC):
    """A class whose steps make collective calls. Its `__init__` must call this one."""

    def __init__(self) -> None:
        super().__init__()
        self._role = _Role()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook; `kwargs` are those of `Join`."""

    @property
    @abstractmethod
    def join_device(self) -> Any:
        """The device of the calls; NumPy arrays are used here on every device."""

    @property
    @abstractmethod
    def join_process_group(self) -> Group:
        """The group of the calls."""


class Join:
    """Keeps ranks in step whose loops in the with block have different lengths.

    Args:
        joinables: All objects whose steps make calls; of one group.
        enable: Whether the context does anything.
        throw_on_early_termination: Raise on all ranks when the first rank has no data left.
        **kwargs: For `join_hook` of each joinable.

    Raises:
        InvalidArgumentError: No joinable, or joinables of several groups.
        CollectiveError: A rank has no data left, with `throw_on_early_termination`.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        groups = {require_group(each.join_process_group) for each in joinables}
        if len(groups) != 1:
            raise InvalidArgumentError(f"Join got joinables of {len(groups)} groups, expected one")
        self._group = groups.pop()
        self._enable, self._throws = enable, throw_on_early_termination
        self._hooks = [each.join_hook(**kwargs) for each in joinables]
        for number, each in enumerate(joinables):
            each._role = _Role(enable and number == 0, throw_on_early_termination)

    def __enter__(self) -> None:
        """Begin; the loop follows."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Shadow the other ranks' steps until no rank has data."""
        if not self._enable or kind is not None:
            return
        is_last = True
        while _total(self._group, 0):
            if self._throws:
                _total(self._group, 1)
                raise CollectiveError(f"rank {self._group.rank()} has no data left for its loop")
            for hook in self._hooks:
                hook.main_hook()
            is_last = False
        for hook in self._hooks:
            hook.post_hook(is_last)

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Work | None:
        """Report that this rank has data for a step; the first joinable of the context does it."""
        if not joinable._role.notifies:
            return None
        group = require_group(joinable.join_process_group)
        work = all_reduce(np.ones(1), group=group, async_op=True)
        if joinable._role.throws and _total(group, 0):
            raise CollectiveError(f"a rank has no data left for the loop of rank {group.rank()}")
        return work


def _total(group: Group, mine: float) -> float:
    """Return the sum of a number over all ranks."""
    all_reduce(total := np.array([mine], float), group=group)
    return float(total[0])
