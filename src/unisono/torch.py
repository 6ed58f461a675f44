"""The plug-in for torch.distributed at its public place; importing it registers "unisono"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.adapters import torch as _plug_in
from unisono.adapters.torch import register

if TYPE_CHECKING:
    from unisono.adapters.torch import ProcessGroup, TorchStore, reconfigure

__all__ = ["ProcessGroup", "TorchStore", "reconfigure", "register"]


def __getattr__(name: str) -> object:
    return getattr(_plug_in, name)
