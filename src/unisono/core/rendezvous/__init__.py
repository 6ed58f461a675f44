"""Rendezvous: turn a URL into a store, a rank and a world size."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from unisono.core.rendezvous.registry import Handler as Handler
from unisono.core.rendezvous.registry import (
    register_rendezvous_handler as register_rendezvous_handler,
)
from unisono.core.rendezvous.registry import rendezvous as rendezvous
from unisono.core.stores import Store

__all__ = ["Handler", "register_rendezvous_handler", "rendezvous"]


class _CallableModule(ModuleType):
    """A package that is callable, so that users can call `unisono.rendezvous(url)`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        return rendezvous(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
