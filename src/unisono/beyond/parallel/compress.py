"""Gradients as codes of one or two bytes, with error feedback.

What the codes lack is added to the next gradient of the same parameters, so it is late, not lost.
A rank keeps the errors of what it sends, and the owner of a part of the sum those of its codes.

Source: Seide et al., "1-bit stochastic gradient descent" (2014); Tang et al., "DoubleSqueeze:
parallel stochastic gradient descent with double-pass error-compensated compression" (2019).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from unisono.beyond.parallel.hooks import for_reducer
from unisono.core.base.types import ReduceOp
from unisono.core.engines.block_codes import COMPRESSIONS
from unisono.core.groups.world import resolve
from unisono.errors import ArgumentTypeError, InvalidArgumentError, NotInGroupError

__all__ = ["CompressState", "compress_hook"]


class CompressState:
    """The state of `compress_hook` between iterations.

    Args:
        group: The ranks that average; None: the default group of each call.
        compress: As for all_reduce.
        error_feedback: Add what the codes lack to the next gradient.

    Attributes:
        lost: For each bucket its parameters, and [n] float32 that this rank has not yet sent.
            A pickled state has none.

    Raises:
        InvalidArgumentError: `compress` is no kind of code.
    """

    def __init__(
        self, group: Any = None, compress: str = "int8", *, error_feedback: bool = True
    ) -> None:
        if compress not in COMPRESSIONS:
            known = ", ".join(COMPRESSIONS)
            raise InvalidArgumentError(f"compress={compress!r}, expected one of {known}")
        self.group = group
        self.compress = compress
        self.error_feedback = error_feedback
        self.lost: dict[int, tuple[list[Any], torch.Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lost": {}}


def compress_hook(state: CompressState, bucket: Any) -> Any:
    """Average the gradients by codes, for DistributedDataParallel of unisono or of torch.

        model.register_comm_hook(CompressState(compress="int8"), compress_hook)

    Communication runs while backward computes.

    Cost: 1 byte sent where float32 has 4, and 4 bytes of each rank's memory for an element.
    """
    if not isinstance(state, CompressState):
        raise ArgumentTypeError(
            f"the state of compress_hook must be a CompressState, got {type(state).__name__}",
            hint='register_comm_hook(CompressState(compress="int8"), compress_hook)',
        )
    group, flat = resolve(state.group), bucket.buffer()
    if group is None:
        raise NotInGroupError("compress_hook on a rank outside its process group")
    kept: Any = None
    if state.error_feedback:
        # torch may give parameters other buckets after the first iteration. Weak references,
        # because a new model's parameters may have the ids of those of a freed model.
        index, parameters = bucket.index(), bucket.parameters()
        known, left = state.lost.get(index, ([], flat))
        if [id(ref()) for ref in known] == [id(each) for each in parameters]:
            flat.add_(left)
        else:
            state.lost[index] = (
                [weakref.ref(each) for each in parameters],
                torch.zeros(flat.numel()),
            )
        kept = state.lost[index][1].numpy()
    how = {"compress": state.compress, "_lost": kept, "async_op": True}
    work = group.all_reduce(flat, ReduceOp.AVG, **how)
    return for_reducer(bucket, work.get_future().then(lambda done: done.value()[0]))


# torch's class takes no other annotation of a bucket than its own.
compress_hook.__annotations__.clear()
