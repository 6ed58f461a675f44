"""PowerSGD: send a gradient as the product of two thin matrices.

A gradient matrix M [n, m] is replaced by P Qᵀ with P [n, r] and Q [m, r]. Each training iteration
does one step of power iteration and starts with the last Q. The difference between M and the
product is added to the next gradient (error feedback), so it is not lost.

Source: Vogels, Karimireddy, Jaggi: "PowerSGD: practical low-rank gradient compression for
distributed optimization", NeurIPS 2019; torch.distributed's hook of that name (2.13).
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.beyond.parallel.buckets import Bucket
from unisono.beyond.parallel.hooks import all_reduce_hook, for_reducer, sum_flat
from unisono.core.groups.world import Group, require_group
from unisono.core.operations.work import Future
from unisono.errors import InvalidArgumentError

__all__ = ["PowerSGDState", "power_sgd_hook"]


class PowerSGDState:
    """The state of `power_sgd_hook` between iterations.

    Args:
        group: The ranks that average, also as torch's group; None: the default group.
        matrix_approximation_rank: r. A larger r approximates better and sends more.
        start_power_sgd_iter: Number of first iterations without compression. Gradients change
            fastest at the beginning.
        min_compression_rate: Compress a matrix only if n*m is larger than (n+m)*r times this.
        use_error_feedback: Add the error of the approximation to the next gradient.
        warm_start: Begin the power iteration with the last Q.
        random_seed: Seed of the first Q; equal on all ranks.

    Raises:
        InvalidArgumentError: r < 1.
    """

    def __init__(
        self,
        group: Group,
        matrix_approximation_rank: int = 1,
        start_power_sgd_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        random_seed: int = 0,
    ) -> None:
        if matrix_approximation_rank < 1:
            raise InvalidArgumentError(
                f"matrix_approximation_rank={matrix_approximation_rank}, expected 1 or more"
            )
        self.group = group
        self.rank = matrix_approximation_rank
        self.start_power_sgd_iter = start_power_sgd_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.random_seed = random_seed
        self.iteration = 0
        self.errors: dict[int, Tensor] = {}
        self.factors: dict[tuple[int, int], Tensor] = {}

    def compresses(self, n: int, m: int) -> bool:
        """Return whether a matrix [n, m] is sent as two factors."""
        r = min(n, m, self.rank)
        return (n + m) * r * self.min_compression_rate < n * m


def power_sgd_hook(state: PowerSGDState, bucket: Bucket) -> Future:
    """Average matrices by their factors, and vectors and small matrices without compression.

    The three sums of a bucket run one after another on the calling thread, so that all ranks make
    them in the same order. Unlike the other hooks, this hook does not overlap with backward.

    Cost: all_reduce of the vectors, of all P and of all Q: (n+m)*r elements for each matrix.
    """
    # torch's class gives parameters other buckets in the first iterations.
    first = 2 if isinstance(bucket, torch.distributed.GradBucket) else 0
    if state.iteration < max(first, state.start_power_sgd_iter):
        done = all_reduce_hook(state.group, bucket)
    else:
        average = Future()
        average.set_result(_average(state, bucket))
        done = for_reducer(bucket, average)
    if bucket.is_last():
        state.iteration += 1
    return done


def _average(state: PowerSGDState, bucket: Bucket) -> Tensor:
    """Replace the bucket's gradients by an approximation of their average over the ranks."""
    number, flat = bucket.index(), bucket.buffer()
    if number in state.errors:
        flat.add_(state.errors[number])
    own = [g.clone() for g in bucket.gradients()] if state.use_error_feedback else []
    gradients = bucket.gradients()
    wide = [i for i, g in enumerate(gradients) if state.compresses(*_as_matrix(g).shape)]
    matrices = [_as_matrix(gradients[i]) for i in wide]
    rest = [g for i, g in enumerate(gradients) if i not in wide]
    _average_all(state, rest)
    starts = [_start(state, (number, i), m) for i, m in zip(wide, matrices, strict=True)]
    p_factors = [m @ q for m, q in zip(matrices, starts, strict=True)]
    _average_all(state, p_factors)
    p_factors = [torch.linalg.qr(p).Q for p in p_factors]
    q_factors = [m.t() @ p for m, p in zip(matrices, p_factors, strict=True)]
    _average_all(state, q_factors)
    for i, matrix, p, q in zip(wide, matrices, p_factors, q_factors, strict=True):
        state.factors[number, i] = q
        torch.matmul(p, q.t(), out=matrix)
    if state.use_error_feedback:
        # The errors of all ranks add up to the error of the average. Uncompressed gradients have
        # no error.
        lost = [o - g if i in wide else torch.zeros_like(g)
                for i, (o, g) in enumerate(zip(own, gradients, strict=True))]  # fmt: skip
        state.errors[number] = torch.cat([each.reshape(-1) for each in lost])
    return flat


def _as_matrix(gradient: Tensor) -> Tensor:
    """Return a gradient [n, ...] as [n, m]; a vector as one row, never compressed."""
    rows = gradient.shape[0] if gradient.dim() > 1 else 1
    return gradient.view(rows, -1)


def _start(state: PowerSGDState, key: tuple[int, int], matrix: Tensor) -> Tensor:
    """Return the first Q [m, r], with orthonormal columns: the last Q, or a random Q."""
    n, m = matrix.shape
    q = state.factors.get(key) if state.warm_start else None
    if q is None or not bool(q.any()):
        # Its own generator: every rank draws the same numbers, and other users of random numbers
        # get the numbers that they would get without this hook.
        generator = torch.Generator().manual_seed(hash((state.random_seed, *key)) % 2**63)
        shape = (m, min(n, m, state.rank))
        q = torch.randn(shape, generator=generator, dtype=torch.float64).to(matrix.dtype)
    return torch.linalg.qr(q).Q


def _average_all(state: PowerSGDState, tensors: list[Tensor]) -> None:
    """Replace tensors by their averages over the ranks, in one message."""
    if not tensors:
        return
    group = require_group(state.group)
    flat = torch.cat([t.reshape(-1) for t in tensors]).div_(group.size())
    sum_flat(group, flat).wait()
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


# As of the other hooks.
power_sgd_hook.__annotations__.clear()
