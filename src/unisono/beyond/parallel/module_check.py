"""Check that a wrapped module still has the parameters with which it was wrapped."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from unisono.errors import UsageError

__all__ = ["ModuleCheck", "listed"]

_PARAMETERS = operator.attrgetter("_parameters")
_MODULES = operator.attrgetter("_modules")
# A method, because the containers of scripted modules are no dicts.
_VALUES = operator.methodcaller("values")
_KIND = operator.attrgetter("requires_grad", "dtype", "shape")


class ModuleCheck:
    """Detects new, removed, frozen and changed parameters of a module.

    Args:
        named: Names and parameters of the module when it was wrapped.
        find_unused: Whether frozen and removed parameters are allowed.
    """

    def __init__(self, named: Sequence[tuple[str, Any]], find_unused: bool) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [p for _, p in named]
        self._kinds = [(p.dtype, p.shape) for p in self._parameters]
        self._find_unused = find_unused
        self._modules: list[Any] = []
        # The contents of `_modules` when they last passed the check.
        self._contents: list[Any] = []

    def require_unchanged(self, module: Any) -> None:
        """Check that the module has the parameters with which it was wrapped.

        Raises:
            UsageError: Parameters are new, frozen, or of another dtype or shape. The text names
                them.
        """
        # To walk through a module takes three times as long as to look at the parts of it.
        if self._modules and _same(self._contents, _contents(self._modules)):
            return
        self._require_unchanged(module)
        self._modules = list(module.modules())
        self._contents = _contents(self._modules)

    def _require_unchanged(self, module: Any) -> None:
        now = [id(p) for p in module.parameters() if p.requires_grad]
        if not now:
            return  # all are frozen, like the other half of a GAN for a while: no gradient comes
        before = [id(p) for p in self._parameters]
        kinds = [(p.dtype, p.shape) for p in self._parameters]
        if now == before and kinds == self._kinds:
            return
        known = zip(self._names, self._parameters, strict=True)
        names = {id(p): name for name, p in (*known, *module.named_parameters())}
        pairs = zip(before, kinds, self._kinds, strict=True)
        changes = {
            "new, or frozen before": set(now) - set(before),
            "frozen or gone": set() if self._find_unused else set(before) - set(now),
            "of another dtype or shape": {p for p, kind, was in pairs if kind != was},
        }
        texts = [
            f"{listed(sorted(names[p] for p in changed))} ({what})"
            for what, changed in changes.items()
            if changed
        ]
        if texts:
            raise UsageError(
                f"parameters changed after DistributedDataParallel was made: {'; '.join(texts)}",
                hint="change the module first and wrap it afterwards; frozen parameters also pass "
                "with find_unused_parameters=True",
            )


def listed(names: Sequence[str]) -> str:
    """Return the first names as text."""
    return f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"


def _contents(modules: Sequence[Any]) -> list[Any]:
    """Return the modules and parameters in modules, then the kinds of these parameters."""
    values = itertools.chain.from_iterable
    inner = values(map(_VALUES, map(_MODULES, modules)))
    parameters = list(values(map(_VALUES, map(_PARAMETERS, modules))))
    return [*inner, *parameters, [_KIND(p) for p in parameters if p is not None]]


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    if len(one) != len(other) or one[-1] != other[-1]:
        return False
    return all(map(operator.is_, one[:-1], other[:-1]))
