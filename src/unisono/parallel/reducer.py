"""The reduction of gradients while backward is still computing others.

Theory of operation: a backward pass is reduced if it comes from what a forward pass returned; hooks
on that say so. torch calls another hook when the gradient of a parameter is complete. It is copied
into its bucket; when a bucket is full, and all buckets before it are under way, its reduction
begins, on the group's progress thread. When all are under way and backward has come to its end, a
callback of the autograd engine waits for them and copies the averages back. Buckets are reduced in
their order, so that all ranks make the same calls whatever order their gradients come in. A large
gradient is a bucket by itself, reduced where it is: two copies of it would cost as much again.

Source: torch.nn.parallel.DistributedDataParallel's reducer (2.13); Li et al.: "PyTorch distributed:
experiences on accelerating data parallel training", VLDB 2020.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.errors import UnsupportedError, UsageError
from unisono.groups.process_group import ProcessGroup
from unisono.groups.work import Future, Work
from unisono.parallel.buckets import Bucket, assign_buckets
from unisono.parallel.hooks import Hook, sum_flat

__all__ = ["Reducer"]

# From here on two copies of a gradient cost clearly more than a call of its own.
_ALONE_BYTES = 4 * 1024 * 1024


_PARAMETERS = operator.attrgetter("_parameters")
_MODULES = operator.attrgetter("_modules")
# Those of scripted modules are no dicts.
_VALUES = operator.methodcaller("values")
_KIND = operator.attrgetter("requires_grad", "dtype", "shape")


def _held(modules: Sequence[Any]) -> list[Any]:
    """Return the modules and parameters in modules, and the kinds of these."""
    values = itertools.chain.from_iterable
    inner = values(map(_VALUES, map(_MODULES, modules)))
    parameters = list(values(map(_VALUES, map(_PARAMETERS, modules))))
    return [*inner, *parameters, [_KIND(p) for p in parameters if p is not None]]


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    if len(one) != len(other) or one[-1] != other[-1]:
        return False
    return all(map(operator.is_, one[:-1], other[:-1]))


class Reducer:
    """Averages the gradients of some parameters over a group, backward pass after backward pass.

    Args:
        named: Names and parameters, the same on all ranks.
        group: The ranks.
        caps_bytes: See `assign_buckets`.
        find_unused: Look in each pass for parameters that it will not reach.
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
        self._hook: Hook | None = None
        self._state: Any = None
        self._kinds = [(p.dtype, p.shape) for p in self._parameters]
        self._modules: list[Any] = []
        # What they held, and of what kind it was, when that was last found to be fine.
        self._fine: list[Any] = []
        self._fill_buckets(_ALONE_BYTES)
        # Of the pass in progress.
        self._expecting = False
        self._started = False
        self._ready: set[int] = set()
        self._unused: set[int] = set()
        self._under_way: list[Work | Future] = []
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
            UsageError: There is one already, or a backward pass has begun and not ended.
        """
        if self._hook is not None:
            raise UsageError("a communication hook is registered already")
        if self._started:
            raise UsageError("a communication hook cannot be registered during a backward pass")
        self._hook, self._state = hook, state
        # A hook makes several calls of a bucket, or casts it: one large one is better.
        self._fill_buckets(math.inf)

    def prepare(self, outputs: Any) -> None:
        """Expect backward passes from `outputs`."""
        # At once, for a loss may depend on something else that the module has kept.
        self._expect(self._unreached(outputs) if self._find_unused else set())
        again = functools.partial(_expect_again, weakref.ref(self), self._unused)
        for tensor in _tensors(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(again)

    def _expect(self, unused: set[int]) -> None:
        if not self._started:
            self._expecting, self._unused = True, unused

    def suspend(self) -> None:
        """Let the next backward pass add to the gradients without reducing them."""
        self._expecting = False

    def require_finished(self) -> None:
        """Check that the last pass reduced everything.

        Raises:
            UsageError: It did not; names the parameters that got no gradient.
        """
        if not self._started:
            return
        missing = [name for n, name in enumerate(self._names) if n not in self._ready]
        got_none = f"{len(missing)} of {len(self._names)} parameters got no gradient: "
        raise UsageError(
            "the last backward pass of DistributedDataParallel was not finished: "
            + (got_none + _listed(missing) if missing else "its reduction failed"),
            hint="if it raised an error, make a new DistributedDataParallel; if forward does not "
            "use all parameters every time, pass find_unused_parameters=True; outputs that a loss "
            "does not use count as used",
        )

    def require_unchanged(self, module: Any) -> None:
        """Check that the module has the parameters that it was wrapped with.

        Raises:
            UsageError: It has not; names those that are new, frozen, or of another dtype or shape.
        """
        # To walk through a module takes three times as long as to look at what its parts hold.
        if self._modules and _same(self._fine, _held(self._modules)):
            return
        self._require_unchanged(module)
        self._modules = list(module.modules())
        self._fine = _held(self._modules)

    def _require_unchanged(self, module: Any) -> None:
        now = [id(p) for p in module.parameters() if p.requires_grad]
        if not now:
            return  # all are frozen, as a GAN's other half is for a while: nothing will come
        before = [id(p) for p in self._parameters]
        kinds = [(p.dtype, p.shape) for p in self._parameters]
        if now == before and kinds == self._kinds:
            return
        known = zip(self._names, self._parameters, strict=True)
        names = {id(p): name for name, p in (*known, *module.named_parameters())}
        pairs = zip(before, kinds, self._kinds, strict=True)
        changes = {
            "new, or frozen before": set(now) - set(before),
            "frozen or gone": set() if self._find_unused else set(before) - set(now),
            "of another dtype or shape": {p for p, kind, was in pairs if kind != was},
        }
        told = [
            f"{_listed(sorted(names[p] for p in changed))} ({what})"
            for what, changed in changes.items()
            if changed
        ]
        if told:
            raise UsageError(
                f"parameters changed after DistributedDataParallel was made: {'; '.join(told)}",
                hint="change the module first and wrap it afterwards; frozen parameters also pass "
                "with find_unused_parameters=True",
            )

    # ---- during backward ------------------------------------------------------------------

    def arrived(self, number: int) -> None:
        """Take the gradient of a parameter, which is complete now."""
        if not self._expecting:
            return
        if not self._started:
            self._begin()
            for unused in sorted(self._unused):
                self._mark_ready(unused)
        if number in self._ready:
            raise UsageError(
                f"parameter {self._names[number]!r} got its gradient twice in one backward pass",
                hint="forward is called once, or several modules share the parameter: reduce "
                "their gradients in one backward pass over the sum of the losses",
            )
        self._mark_ready(number)

    def _begin(self) -> None:
        self._started = True
        self._ready.clear()
        self._under_way.clear()
        for bucket, members in zip(self._buckets, self._members, strict=True):
            bucket.pending = len(members)

    def _mark_ready(self, number: int) -> None:
        bucket, at = self._place[number]
        gradient = None if number in self._unused else self._parameters[number].grad
        if gradient is not None and gradient.layout != torch.strided:
            raise UnsupportedError(
                f"the gradient of {self._names[number]!r} is {gradient.layout}; "
                "DistributedDataParallel reduces dense ones",
                hint="use sparse=False in the embedding",
            )
        # As torch does, which multiplies by the reciprocal: so the bits agree.
        bucket.take(at, gradient, 1.0 if self._hook else 1.0 / self._group.size())
        self._ready.add(number)
        bucket.pending -= 1
        while len(self._under_way) < len(self._buckets):
            bucket = self._buckets[len(self._under_way)]
            if bucket.pending:
                break
            self._under_way.append(self._reduce(bucket))
            if len(self._under_way) == len(self._buckets):
                # Gradients may come in several backward passes, each over a part of the outputs.
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _reduce(self, bucket: Bucket) -> Work | Future:
        if self._hook is None:
            return self._group.all_reduce(bucket.buffer(), async_op=True)
        return self._hook(self._state, bucket)

    def _finish(self) -> None:
        """Wait for all reductions and hand the averages out; runs when backward has ended."""
        used = self._used_anywhere()
        for bucket, members, reduction in zip(
            self._buckets, self._members, self._under_way, strict=True
        ):
            value = reduction.wait()
            if self._hook is None:
                flat = bucket.buffer()
            else:
                flat = value[0] if isinstance(value, (list, tuple)) else value
            bucket.hand_out(flat, [used is None or bool(used[n]) for n in members])
        self._under_way.clear()
        self._started = self._expecting = False

    def _used_anywhere(self) -> Tensor | None:
        """Return [parameters] of 0 and 1: which were used on some rank; None if all were."""
        if not self._find_unused:
            return None
        used = torch.ones(len(self._parameters), dtype=torch.int32)
        used[sorted(self._unused)] = 0
        return sum_flat(self._group, used).wait().clamp_(max=1)

    # ---- unused parameters ----------------------------------------------------------------

    def _unreached(self, outputs: Any) -> set[int]:
        """Return the parameters that a backward pass from `outputs` will not reach."""
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
    """Return what torch calls; a parameter's C++ part must not keep the reducer alive."""

    def hook(parameter: Any) -> None:
        alive = reducer()
        if alive is not None:
            alive.arrived(number)

    return hook


def _expect_again(reducer: weakref.ref[Reducer], unused: set[int], gradient: Any) -> None:
    """Say that a backward pass has come to an output; torch calls it."""
    if (alive := reducer()) is not None:
        alive._expect(unused)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"


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
