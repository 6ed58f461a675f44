"""Training over ranks that come and go: ElasticJob, ElasticSampler.

This module does without torch. Modules and optimizers of torch take part by `state_dict`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from unisono.beyond.membership import membership_of_world, reconfigure
from unisono.beyond.state_sync import copy_state
from unisono.beyond.steps import Step, step
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.integers import as_integer
from unisono.core.base.log import get_logger
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import require_group
from unisono.errors import (
    ArgumentTypeError,
    CollectiveAbortedError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    PeerError,
    StepAborted,
    StoreError,
)

__all__ = ["ElasticJob", "ElasticSampler", "Share"]

_log = get_logger("parallel.elastic")

# The other ranks go on after these errors.
_LOST = (StepAborted, PeerError, CollectiveTimeoutError, CollectiveAbortedError)


class ElasticJob:
    """Repeats steps over the ranks that are there, and keeps the state of the job on all of them.

        job = ElasticJob({"model": net, "optimizer": optimizer})
        while job.global_step < 1000:
            with job.step() as s:
                loss_of(model, sampler.share(job.global_step)).backward()
                s.commit()
                optimizer.step()

    Newcomers run the same program. Rank 0 of the first generation gives its state to the others.

    Args:
        state: The state as for `sync_state`. A value can also be an object with `state_dict` and
            `load_state_dict`: a module, an optimizer, a scheduler.
        timeout: See `reconfigure`, as also for `min_size` and `max_size`.

    Attributes:
        state: The same dict. An object that pickle copies is replaced in it on newcomers.
        global_step: Number of steps that count; equal on all ranks.

    Raises:
        ArgumentTypeError: `state` is not a dict.
        NotInitializedError: No default group was made by `init_process_group`.
    """

    def __init__(
        self,
        state: dict[Any, Any],
        *,
        timeout: Timeout | None = None,
        min_size: int = 1,
        max_size: int | None = None,
    ) -> None:
        if not isinstance(state, dict):
            raise ArgumentTypeError(f"ElasticJob: state must be a dict, got {type(state).__name__}")
        self.state = state
        self.global_step = 0
        self._timeout = timeout
        self._limits: dict[str, Any] = {"min_size": min_size, "max_size": max_size}
        rank = require_group(None).rank()
        self._holds_state = membership_of_world().sources[:1] == (rank,)
        # The group all of whose ranks hold the state.
        self._group: ProcessGroup | None = None
        self._must_meet = False

    @contextlib.contextmanager
    def step(self) -> Iterator[Step]:
        """Run one step; it counts if the block reaches `commit`.

        Before the block: after a loss, or if a process waits to join, the ranks call `reconfigure`,
        and newcomers get the state. Lines after `commit` change the state, and run only if the step
        counts. They must not communicate.

        If a rank is lost before the commit, the block ends, and a warning is logged. On no rank the
        step counts. Buffers of modules are as before the block, gradients are cleared. The caller
        begins the step again by its loop. If the store gives no answer to the commit, the block
        ends in the same way. If the other ranks have counted the step, this rank gets their state.

        Raises:
            RendezvousError: See `reconfigure`.
            StoreConnectionError: See `reconfigure`.
            InvalidArgumentError: The states of ranks have different structures.
            CollectiveError: All ranks that held the state are lost.
        """
        self._gather()
        undo = self._undo()
        one = step()
        try:
            with one:
                yield one
        except (*_LOST, StoreError) as error:
            # `reconfigure` asks again if the store gave a commit no answer.
            lost = isinstance(error, _LOST) or membership_of_world().undecided
            if one.committed or not lost:
                raise
            self._must_meet = True
            undo()
            _log.warning("step %d is repeated: %s", self.global_step, error.what)
        if one.committed:
            self.global_step += 1
            self._must_meet = one.changed

    def _gather(self) -> None:
        """Meet until all ranks of a generation hold the state."""
        while self._must_meet or self._group is not require_group(None):
            try:
                if self._must_meet:
                    reconfigure(self._timeout, **self._limits)
                    self._must_meet = False
                self._share_state()
            except _LOST as error:
                self._must_meet = True
                _log.warning("the ranks meet again: %s", error.what)

    def _share_state(self) -> None:
        group, membership = require_group(None), membership_of_world()
        deadline = Deadline(group.timeout_s if self._timeout is None else self._timeout)
        held = np.zeros(group.size(), np.int32)
        content: dict[Any, Any] = {}
        # False if a step counts for which this rank got no answer from the store.
        self._holds_state = self._holds_state and membership.me.current
        with step() as one:
            held[group.rank()] = self._holds_state
            group.all_reduce(held)
            if not held.all():
                content = {"global_step": self.global_step, "state": self._described()}
                copy_state(content, tuple(map(int, held.nonzero()[0])), deadline)
            # Either all ranks hold the state now, or the same ranks as before.
            one.commit()
        if not self._holds_state:
            self._load(content)
            membership.hold_state()
        self._holds_state, self._group, self._must_meet = True, group, one.changed

    def _described(self) -> dict[Any, Any]:
        return {
            key: value.state_dict() if hasattr(value, "load_state_dict") else value
            for key, value in self.state.items()
        }

    def _load(self, content: dict[Any, Any]) -> None:
        self.global_step = content["global_step"]
        for key, value in content["state"].items():
            mine: Any = self.state.get(key)
            if hasattr(mine, "load_state_dict"):
                mine.load_state_dict(value)
            else:
                self.state[key] = value

    def _undo(self) -> Callable[[], None]:
        """Return a function that takes back what a step changes in modules before its commit."""
        modules = [each for each in self.state.values() if hasattr(each, "buffers")]
        # A forward pass changes buffers, such as the statistics of a batch norm.
        before = [(each, each.clone()) for module in modules for each in module.buffers()]

        def undo() -> None:
            for buffer, value in before:
                buffer.copy_(value)
            for module in modules:
                module.zero_grad()

        return undo


class Share(NamedTuple):
    """The samples of a rank in one step.

    Attributes:
        indices: [n] numbers of the samples.
        weight: Factor for the mean over these samples. The average of the products over all ranks
            is the mean over the batch.
    """

    indices: np.ndarray
    weight: float


class ElasticSampler:
    """Divides the samples of an epoch into batches, and a batch between the ranks that are there.

    The batch of a step depends on nothing but the step. If a step is repeated with other ranks, it
    has the same samples. So the committed steps of an epoch use each sample exactly once, and a
    lost rank changes a training by rounding only. All ranks, also newcomers, need the same
    arguments.

    An epoch has ceil(length / batch_size) steps, whose batches differ by at most one sample.

    Args:
        length: Number of samples.
        batch_size: Largest number of samples in a step, on all ranks together.
        shuffle: Whether each epoch has an order of its own.
        seed: Of the orders; at least 0.

    Attributes:
        steps_per_epoch: Number of steps in an epoch.

    Raises:
        InvalidArgumentError: `length` or `batch_size` is less than 1, or `seed` less than 0.
    """

    def __init__(
        self, length: int, batch_size: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._length = as_integer(length, "length")
        batch_size = as_integer(batch_size, "batch_size")
        if self._length < 1 or batch_size < 1:
            raise InvalidArgumentError(
                f"ElasticSampler: expected length and batch_size of at least 1, got {length} and "
                f"{batch_size}"
            )
        self.steps_per_epoch = -(-self._length // batch_size)
        self._shuffle = shuffle
        self._seed = as_integer(seed, "seed")
        if self._seed < 0:
            raise InvalidArgumentError(f"ElasticSampler: seed={seed}, expected at least 0")
        self._order = (-1, np.arange(self._length))

    def batch(self, step: int) -> np.ndarray:
        """Return [n] the samples of a step, on all ranks together."""
        epoch, number = divmod(as_integer(step, "step"), self.steps_per_epoch)
        if epoch < 0:
            raise InvalidArgumentError(f"ElasticSampler: step={step}, expected at least 0")
        if self._shuffle and self._order[0] != epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(self._length)
            self._order = (epoch, order)
        begin, end = (self._length * n // self.steps_per_epoch for n in (number, number + 1))
        return self._order[1][begin:end]

    def share(self, step: int, group: ProcessGroup | None = None) -> Share:
        """Return this rank's part of a batch: every p-th sample, for p ranks.

        A rank for which no sample is left gets the first sample, with weight 0. Call it inside the
        block of `ElasticJob.step`, because the ranks can change before the block.

        Raises:
            InvalidArgumentError: `step` is negative.
            NotInitializedError: There is no default group, and `group` is None.
        """
        members = require_group(group)
        batch = self.batch(step)
        mine = batch[members.rank() :: members.size()]
        if mine.size == 0:
            return Share(batch[:1], 0.0)
        return Share(mine, mine.size * members.size() / batch.size)
