"""The function that `import torch` calls, through the entry point group "torch.backends"."""

from __future__ import annotations

import logging
from importlib import import_module


def torch_backend() -> None:
    """Register the backend "unisono" with torch.distributed; log an error, but never raise it.

    An exception here, or during the import of this module, would make `import torch` fail, also in
    programs that do not use unisono. So modules of unisono, even its logger, are imported only in
    the try block.
    """
    try:
        import_module("unisono.adapters.torch")
        # Also for a program whose groups are of torch's own backends.
        import_module("unisono.core.base.source.stacks").offer_stack()
    except Exception:
        logging.getLogger("unisono.autoload").warning(
            "no backend 'unisono' for torch", exc_info=True
        )
