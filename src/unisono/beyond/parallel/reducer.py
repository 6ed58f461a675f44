"""Reduce gradients while backward still computes other gradients.

Theory of operation: a backward pass is reduced if it reaches an output of a forward pass. Hooks on
the outputs detect this. Another hook runs when the gradient of a parameter is complete, and copies
the gradient into its bucket. When a bucket is full and the reductions of all buckets before it have
begun, its reduction begins on the group's progress thread. When all have begun and backward has
ended, a callback of the autograd engine waits for them. It copies the averages back to the
gradients. Buckets are reduced in their order, so that all ranks make the same calls for any order
of gradients. A large gradient is a bucket by itself and is reduced in place, because two copies of
it would take as long as the reduction.

Source: torch.nn.parallel.DistributedDataParallel's reducer (2.13); Li et al.: "PyTorch distributed:
experiences on accelerating data parallel training", VLDB 2020.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unisono.beyond.parallel.buckets import Bucket, assign_buckets
from unisono.beyond.parallel.hooks import Hook, sum_flat
from unisono.beyond.parallel.module_check import listed
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.operations.work import Future, Work
from unisono.errors import UnsupportedError, UsageError

__all__ = ["Reducer"]

# From this size on two copies of a gradient take clearly longer than a separate call.
_ALONE_BYTES = 4 * 1024 * 1024


@dataclass
class _Pass:
    """The state of one backward pass.

    Attributes:
        expecting: Whether the next backward pass is to be reduced.
        started: Whether a gradient has arrived.
        unused: Numbers of the parameters that the pass does not reach.
        ready: Numbers of the parameters whose gradient is in its bucket.
        under_way: Reductions that have begun, in the order of the buckets.
    """

    expecting: bool = False
    started: bool = False
    unused: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    under_way: list[Work | Future] = field(default_factory=list)


class Reducer:
    """Averages the gradients of some parameters over a group in every backward pass.

    Args:
        named: Names and parameters, the same on all ranks.
        group: The ranks.
        caps_bytes: See `assign_buckets`.
        find_unused: Whether to look in each pass for parameters that the pass does not reach.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Any]],
        group: ProcessGroup,
        caps_bytes: Sequence[int],
        find_unused: bool,
    ) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [p for _, p in named]
        self._group = group
        self._find_unused = find_unused
        self._caps_bytes = caps_bytes
        self._hook: Callable[[Bucket], Future] | None = None
        self._fill_buckets(_ALONE_BYTES)
        self._pass = _Pass()
        for n, p in enumerate(self._parameters):
            p.register_post_accumulate_grad_hook(_hook(weakref.ref(self), n))

    def _fill_buckets(self, alone_bytes: float) -> None:
        numbers = assign_buckets(self._parameters, self._caps_bytes, alone_bytes)
        self._buckets = [
            Bucket(i, [self._parameters[n] for n in members], i + 1 == len(numbers))
            for i, members in enumerate(numbers)
        ]
        self._members = numbers
        self._place = {
            n: (bucket, i)
            for bucket, members in zip(self._buckets, numbers, strict=True)
            for i, n in enumerate(members)
        }

    def register_hook(self, state: Any, hook: Hook) -> None:
        """Use `hook(state, bucket)` instead of the plain average.

        Raises:
            UsageError: There is a hook already, or a backward pass has begun and not ended.
        """
        if self._hook is not None:
            raise UsageError("a communication hook is registered already")
        if self._pass.started:
            raise UsageError("a communication hook cannot be registered during a backward pass")
        self._hook = functools.partial(hook, state)
        # A hook makes several calls per bucket, or casts it: few large buckets are faster.
        self._fill_buckets(math.inf)

    def regroup(self, group: ProcessGroup) -> None:
        """Reduce over another group from now on; a pass that failed is forgotten."""
        if isinstance(self._hook, functools.partial) and self._hook.args[0] is self._group:
            self._hook = functools.partial(self._hook.func, group)
        self._group = group
        # New buckets, so that nothing that the old group still writes can reach the next pass.
        self._fill_buckets(_ALONE_BYTES if self._hook is None else math.inf)
        self._pass = _Pass()

    def prepare(self, outputs: Any) -> None:
        """Expect backward passes from `outputs`."""
        # Expect a pass now: a loss may depend only on a tensor that the module has kept.
        self._expect(self._unreached(outputs) if self._find_unused else set())
        again = functools.partial(_expect_again, weakref.ref(self), self._pass.unused)
        for tensor in _tensors(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(again)

    def _expect(self, unused: set[int]) -> None:
        if not self._pass.started:
            self._pass.expecting, self._pass.unused = True, unused

    def suspend(self) -> None:
        """Let the next backward pass add to the gradients without reducing them."""
        self._pass.expecting = False

    def require_finished(self) -> None:
        """Check that the last pass reduced all gradients.

        Raises:
            UsageError: It did not. The text names the parameters that got no gradient.
        """
        if not self._pass.started:
            return
        missing = [name for n, name in enumerate(self._names) if n not in self._pass.ready]
        got_none = f"{len(missing)} of {len(self._names)} parameters got no gradient: "
        raise UsageError(
            "the last backward pass of DistributedDataParallel was not finished: "
            + (got_none + listed(missing) if missing else "its reduction failed"),
            hint="if it raised an error, make a new DistributedDataParallel. If forward does not "
            "use all parameters every time, pass find_unused_parameters=True. Outputs that a loss "
            "does not use count as used",
        )

    # ---- during backward ------------------------------------------------------------------

    def arrived(self, number: int) -> None:
        """Copy the complete gradient of a parameter into its bucket."""
        if not self._pass.expecting:
            return
        if not self._pass.started:
            self._begin()
            for unused in sorted(self._pass.unused):
                self._mark_ready(unused)
        if number in self._pass.ready:
            raise UsageError(
                f"parameter {self._names[number]!r} got its gradient twice in one backward pass",
                hint="forward is called once, or several modules share the parameter: reduce "
                "their gradients in one backward pass over the sum of the losses",
            )
        self._mark_ready(number)

    def _begin(self) -> None:
        self._pass.started = True
        for bucket, members in zip(self._buckets, self._members, strict=True):
            bucket.pending = len(members)

    def _mark_ready(self, number: int) -> None:
        bucket, at = self._place[number]
        gradient = None if number in self._pass.unused else self._parameters[number].grad
        if gradient is not None and gradient.layout != torch.strided:
            raise UnsupportedError(
                f"the gradient of {self._names[number]!r} is {gradient.layout}; "
                "DistributedDataParallel reduces dense gradients",
                hint="use sparse=False in the embedding",
            )
        # torch multiplies by the reciprocal; a division would give other bits.
        bucket.take(at, gradient, 1.0 if self._hook else 1.0 / self._group.size())
        self._pass.ready.add(number)
        bucket.pending -= 1
        under_way = self._pass.under_way
        while len(under_way) < len(self._buckets):
            bucket = self._buckets[len(under_way)]
            if bucket.pending:
                break
            under_way.append(self._reduce(bucket))
            if len(under_way) == len(self._buckets):
                # Queue it here: gradients may come from several calls of backward, each over a
                # part of the outputs.
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _reduce(self, bucket: Bucket) -> Work | Future:
        if self._hook is None:
            return self._group.all_reduce(bucket.buffer(), async_op=True)
        return self._hook(bucket)

    def _finish(self) -> None:
        """Wait for all reductions and set the gradients to the averages; runs after backward."""
        used = self._used_anywhere()
        for bucket, members, reduction in zip(
            self._buckets, self._members, self._pass.under_way, strict=True
        ):
            value = reduction.wait()
            if self._hook is None:
                flat = bucket.buffer()
            else:
                flat = value[0] if isinstance(value, (list, tuple)) else value
            bucket.hand_out(flat, [used is None or bool(used[n]) for n in members])
        self._pass = _Pass()

    def _used_anywhere(self) -> Tensor | None:
        """Return [parameters] of 0 and 1: 1 if some rank used the parameter; None if all were."""
        if not self._find_unused:
            return None
        used = torch.ones(len(self._parameters), dtype=torch.int32)
        used[sorted(self._pass.unused)] = 0
        return sum_flat(self._group, used).wait().clamp_(max=1)

    # ---- unused parameters ----------------------------------------------------------------

    def _unreached(self, outputs: Any) -> set[int]:
        """Return the numbers of the parameters that a backward pass from `outputs` cannot reach."""
        todo = [t.grad_fn for t in _tensors(outputs) if t.grad_fn is not None]
        seen = set(todo)
        reached: set[int] = set()
        while todo:
            node = todo.pop()
            if hasattr(node, "variable"):
                reached.add(id(node.variable))
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)
        return {n for n, p in enumerate(self._parameters) if id(p) not in reached}


def _hook(reducer: weakref.ref[Reducer], number: int) -> Callable[[Any], None]:
    """Return the hook of a parameter; its weak reference does not keep the reducer alive."""

    def hook(parameter: Any) -> None:
        alive = reducer()
        if alive is not None:
            alive.arrived(number)

    return hook


def _expect_again(reducer: weakref.ref[Reducer], unused: set[int], gradient: Any) -> None:
    """Expect a backward pass that has reached an output; torch calls this hook."""
    if (alive := reducer()) is not None:
        alive._expect(unused)


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in a module's output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _tensors(getattr(value, name))
