"""Register "unisono" in torch.distributed's table of backends."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as torch_dist

from unisono.adapters.torch.name import NAME, answer_libraries
from unisono.errors import InvalidArgumentError, UnsupportedError

__all__ = ["register"]


def register() -> None:
    """Make "unisono" a backend of torch.distributed; a second call does nothing.

    Raises:
        UnsupportedError: This torch was built without torch.distributed.

    Source: torch.distributed.Backend.register_backend (2.13).
    """
    if not torch_dist.is_available():
        raise UnsupportedError(
            "unisono.torch needs torch.distributed, which this build of torch lacks",
            hint="`import unisono as dist` works without it, on torch tensors, too",
        )
    if NAME.upper() not in torch_dist.Backend._plugins:
        # A list, because torch would iterate over the letters of a string.
        torch_dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    # Now, because libraries that are imported later may take functions out of torch.
    with contextlib.suppress(InvalidArgumentError):  # the first group raises it
        answer_libraries()


def _create(options: Any, pg_options: Any) -> Any:
    """Return this rank's process group; torch calls it on every member of a new group."""
    # Imported here, because most programs that import torch make no process group.
    from unisono.adapters.torch.membership import create

    return create(options, pg_options)
