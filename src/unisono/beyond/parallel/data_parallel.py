"""DistributedDataParallel: copies of one model on all ranks, each with a part of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from unisono.beyond.parallel.hooks import Hook
from unisono.beyond.parallel.module_check import ModuleCheck
from unisono.beyond.parallel.reducer import Reducer
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import current, resolve
from unisono.errors import ArgumentTypeError, InvalidArgumentError, NotInGroupError

__all__ = ["DistributedDataParallel"]

_MIB = 1024 * 1024

# The first bucket is small, so that communication begins early in backward.
_FIRST_BUCKET_BYTES = 1 * _MIB


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module so that backward leaves the gradients' average over all ranks.

    grad = (grad_0 + grad_1 + ... + grad_{p-1}) / p

    If every rank's loss is a mean over the same number of samples, this is the gradient of the mean
    over all samples. The constructor copies the parameters and buffers of rank 0 to the other
    ranks. Equal steps of equal optimizers then keep the copies bitwise equal.

    Communication runs while backward computes (see `reducer.py`). With two ranks the
    result has the bits of torch's DistributedDataParallel on Gloo. With more ranks the order of
    sums differs, so the results differ by rounding.

    On the default group the average is over the ranks that are there. After `reconfigure` the next
    forward pass takes the new default group. In generations after the first, newcomers included,
    the first forward pass makes the copies, not the constructor.

    Args:
        module: The module, on the CPU; the same on all ranks.
        process_group: The group; the default group, also a later one, if None.
        bucket_cap_mb: MiB of gradients per message.
        broadcast_buffers: Copy rank 0's buffers to the other ranks before each forward pass that
            follows a pass with reduction.
        init_sync: Copy rank 0's parameters and buffers, see above.
        find_unused_parameters: Look in each forward pass for parameters that its outputs do not
            depend on. A parameter that no rank uses keeps its gradient. A parameter that some
            ranks use gets the average, in which the other ranks count as zero.

    Raises:
        NotInGroupError: This rank is no member of the group.
        InvalidArgumentError: No parameter needs a gradient, or `bucket_cap_mb` is not positive.
        CollectiveMismatchError: The ranks' modules differ in sizes or dtypes.

    Source: torch.nn.parallel.DistributedDataParallel (2.13).
    """

    def __init__(
        self,
        module: Any,
        *,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise ArgumentTypeError(f"module must be a torch.nn.Module, got {module!r}")
        if bucket_cap_mb <= 0:
            raise InvalidArgumentError(f"bucket_cap_mb={bucket_cap_mb}, expected more than 0")
        group = resolve(process_group)
        if group is None:
            raise NotInGroupError("DistributedDataParallel on a rank outside its process group")
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise InvalidArgumentError("no parameter of the module needs a gradient")
        self.module = module
        self.process_group = group
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self._follows = process_group is None
        self._init_sync = self._copy_due = init_sync
        membership = current().membership
        # Survivors make no constructor, so a newcomer must make the calls of their forward pass.
        later = self._follows and membership is not None and membership.generation > 1
        self._buffers_due = later
        if not later:
            self._copy_model()
        cap_bytes = int(bucket_cap_mb * _MIB)
        caps_bytes = [min(_FIRST_BUCKET_BYTES, cap_bytes), cap_bytes]
        self._reducer = Reducer(named, group, caps_bytes, find_unused_parameters)
        self._module_check = ModuleCheck(named, find_unused_parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and expect a backward pass from its outputs.

        Raises:
            UsageError: The last backward pass did not reach all parameters, or the module no longer
                has the parameters with which it was wrapped. The text names them.
        """
        self._follow()
        self._copy_model()
        reduces = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self._reducer.require_finished()
        if reduces:
            self._module_check.require_unchanged(self.module)
        if self._buffers_due and self.broadcast_buffers:
            self._copy_from_first([b for _, b in self.module.named_buffers()])
        self._buffers_due = self.require_backward_grad_sync
        outputs = self.module(*args, **kwargs)
        if reduces:
            self._reducer.prepare(outputs)
        else:
            self._reducer.suspend()
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients without reducing them, for forward passes inside the with block.

        The first backward pass of a forward pass outside the block reduces the sum.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Use `hook(state, bucket)` to average the gradients of each bucket.

        Raises:
            UsageError: There is a hook already, or a backward pass is under way.
        """
        self._reducer.register_hook(state, hook)

    def _follow(self) -> None:
        """Use the default group that `reconfigure` has made, if the group before is closed."""
        if not self._follows or self.process_group.backends or (made := current().default) is None:
            return
        self._reducer.regroup(made)
        self.process_group = made
        self._copy_due, self._buffers_due = self._init_sync, True

    def _copy_model(self) -> None:
        if self._copy_due:
            self._copy_from_first([p for _, p in self.module.named_parameters()])
            self._copy_from_first([b for _, b in self.module.named_buffers()])
            self._copy_due = self._buffers_due = False

    def _copy_from_first(self, tensors: list[Any]) -> None:
        works = [self.process_group.broadcast(t.detach(), 0, async_op=True) for t in tensors]
        for work in works:
            work.wait()
