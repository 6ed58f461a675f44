"""torch futures whose value C++ and Python accept."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

__all__ = ["listed"]


def listed(future: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a future of `tensors` whose C++ type is a list of tensors.

    DDP's FP16_COMPRESS hook, in C++, asserts this type. Futures made in Python have the type
    "Python object". Only the interpreter of TorchScript makes typed futures. It takes some 40 us.

    Args:
        future: The result is done when this future is done, and has the same error.
        tensors: The value.
    """
    return _script()(future, tensors)


@functools.cache
def _script() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(_forked)


def _after(gate: torch.jit.Future[int], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.jit.wait(gate)
    return tensors


def _forked(
    gate: torch.jit.Future[int], tensors: list[torch.Tensor]
) -> torch.jit.Future[list[torch.Tensor]]:
    # Only from TorchScript. Called from Python, fork would run `_after` at once and block.
    return torch.jit.fork(_after, gate, tensors)
