"""A process group that answers a collective call with the prepared call, for the C++ engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.groups.keywords import How
from unisono.groups.operations import CHECKS, OPS
from unisono.groups.process_group import ProcessGroup


class Preparing(ProcessGroup):
    """A group whose collectives check their arguments and return what `Engine.prepare` returns.

    They run nothing. If the arguments of a public function are new, C++ calls the Python function
    on such a group. So defaults, roots and checks are written only once.

    Args:
        group: The real group. If an attribute hides one of its methods, Python makes the calls.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.real = group
        self._hidden = OPS.keys() & vars(group).keys()
        vars(self).update({name: vars(group)[name] for name in vars(group).keys() - self._hidden})

    def _call_collective(
        self, op: str, arguments: tuple[Any, ...], how: How, splits: Sequence[int] | None = None
    ) -> Any:
        if op in self._hidden:
            return None
        _, arguments = CHECKS[op](self, *arguments)
        options = self._options(op, splits, **how)._replace(prepare=True)
        backend = self.backends.get("cpu")
        return None if backend is None else getattr(backend, op)(*arguments, options).prepared

    def refuse(
        self, op: str, error: BaseException, arguments: Sequence[Any] = (), **how: Any
    ) -> None:
        """Do nothing: the call that follows on the real group reports its error."""
