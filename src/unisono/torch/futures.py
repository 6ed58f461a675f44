"""torch futures that end as an operation does, with values that C++ and Python both accept."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["listed", "opened"]


def opened(gate: Any, outcome: Callable[[], list[Any]]) -> Any:
    """Return the future of `outcome()`, called once `gate` is done; its error is a real one.

    Raised inside C++, an error becomes one of the C++ future. With `set_exception` it would stay a
    Python value, on which torch's DDP ends with a segmentation fault.
    """
    return gate.then(lambda _: outcome())


def listed(future: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the future of `tensors` whose C++ type is a list of tensors.

    DDP's FP16_COMPRESS hook, in C++, asserts that type; what Python makes is of type "Python
    object". Only the interpreter of TorchScript makes typed futures. It costs some 40 us.

    Args:
        future: When it is done; its error becomes the error of the result.
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
    # Called from Python, fork would run at once and wait for ever.
    return torch.jit.fork(_after, gate, tensors)
