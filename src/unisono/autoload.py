"""What `import torch` calls, through the entry point group "torch.backends"."""

from __future__ import annotations

import logging
from importlib import import_module

__all__ = ["torch_backend"]


def torch_backend() -> None:
    """Register the backend "unisono" with torch.distributed; an error is logged, never raised.

    An exception here, or where this module is loaded, would make `import torch` fail, for programs
    too that never heard of us. So nothing of ours is imported but in the try block, the logger
    with its settings neither.
    """
    try:
        import_module("unisono.torch")
    except Exception:
        logging.getLogger("unisono.autoload").warning(
            "no backend 'unisono' for torch", exc_info=True
        )
