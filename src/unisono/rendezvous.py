"""The path torch.distributed.rendezvous; `unisono.rendezvous(url)` also works after its import."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from unisono.core.rendezvous import register_rendezvous_handler as register_rendezvous_handler
from unisono.core.rendezvous import rendezvous as rendezvous
from unisono.core.stores import Store

__all__ = ["register_rendezvous_handler", "rendezvous"]


class _CallableModule(ModuleType):
    """A module that is callable, because its import hides the function of the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        return rendezvous(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
