"""What `import torch` calls, through the entry point group "torch.backends"."""

from __future__ import annotations

from importlib import import_module

from unisono.base.log import get_logger

__all__ = ["torch_backend"]


def torch_backend() -> None:
    """Register the backend "unisono" with torch.distributed; an error is logged, never raised.

    An exception here would make `import torch` fail, for programs too that never heard of us.
    """
    try:
        import_module("unisono.torch")
    except Exception:
        get_logger("autoload").warning("no backend 'unisono' for torch", exc_info=True)
