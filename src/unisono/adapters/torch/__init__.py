"""The plug-in for torch.distributed: `torch.distributed.init_process_group("unisono")`.

Importing this package registers the backend. If unisono is installed, `import torch` imports it
through the entry point group "torch.backends". Only this package, `unisono.parallel` and
`unisono.nn.functional` import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.adapters.torch.registration import register

if TYPE_CHECKING:
    from unisono.adapters.torch.membership import reconfigure as reconfigure
    from unisono.adapters.torch.process_group import ProcessGroup as ProcessGroup
    from unisono.adapters.torch.store import TorchStore as TorchStore

__all__ = ["ProcessGroup", "TorchStore", "reconfigure", "register"]

_HOMES = {"ProcessGroup": "process_group", "TorchStore": "store", "reconfigure": "membership"}

register()


def __getattr__(name: str) -> object:
    # Loaded on first use, because every `import torch` imports this package.
    if name not in _HOMES:
        raise AttributeError(f"module 'unisono.torch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"unisono.adapters.torch.{_HOMES[name]}"), name)
