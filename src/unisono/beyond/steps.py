"""Steps that count on all surviving ranks or on none.

A commit has two rounds. No rank ends round 1 before every rank has begun it, and the same holds for
round 2. A rank that has ended round 2 knows that all ranks ended round 1, and returns. If a round
fails, the store decides, and the first rank to ask fixes the answer for all:

    failed in    proposal    so far
    round 1      no          no rank can end round 2, so none has counted the step
    round 2      yes         every rank has called commit(); a rank may have counted the step

If a rank has counted the step, no rank failed in round 1, so the answer is yes.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np

from unisono.core.base.types import ReduceOp
from unisono.core.groups.membership_store import NO, YES, first_proposal
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import current, require_group
from unisono.errors import (
    CollectiveMismatchError,
    CommunicationError,
    Context,
    StepAborted,
    UsageError,
)


class Step:
    """One step of a job, see `step`.

    Attributes:
        committed: Whether the step counts.
        changed: After `commit`: whether `membership_changed` was true on a rank; equal on all.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.committed = False
        self.changed = False
        self._group = group

    def commit(self) -> None:
        """Agree with all ranks that the step counts. Call it once, as the last call of the step.

        If a rank is lost meanwhile, either all survivors return from this call or all raise.

        Raises:
            StepAborted: The step does not count on any rank.
            CollectiveMismatchError: Other ranks made another call.
            StoreError: A rank was lost, and the store that decides does not answer. If the step
                counts, `sync_state` fills the state of this rank after `reconfigure`.
            UsageError: The step is committed already.
        """
        if self.committed:
            raise UsageError("commit() was called twice in one step")
        group, membership = self._group, current().membership
        # Equal on all ranks that make this call, whatever errors they have survived.
        group.counts["commit"] += 1
        number = next(iter(group.backends.values())).last_number() or -group.counts["commit"]
        seen = membership is not None and membership.has_changed(group)
        changed, asked = np.array([seen], np.int64), False
        try:
            group.all_reduce(changed, ReduceOp.MAX, _label="commit")
            asked = True
            group.barrier(_label="commit")
        except CommunicationError as error:
            if not _ends_group(error):
                raise
            if not self._ask(f"commit/{number}", YES if asked else NO):
                raise
            changed[:] = True
        self.committed, self.changed = True, bool(changed[0])

    def _ask(self, key: str, proposal: bytes) -> bool:
        """Return whether the step counts: the first proposal of all ranks is the answer."""
        group, membership = self._group, current().membership
        if membership is None:
            return first_proposal(group.store, key, proposal, group.timeout_s) == YES
        membership.undecided = key, proposal
        answer = first_proposal(group.store, key, proposal, group.timeout_s)
        # A later generation deletes the answers of its predecessors.
        is_late = membership.is_succeeded()
        membership.undecided = None
        return answer == YES and not is_late

    def __enter__(self) -> Self:
        self._since = self._group.place()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.committed or error is None:
            return
        reasons = [each.broken() for each in self._group.backends.values()]
        if isinstance(error, CommunicationError) and _ends_group(error):
            what, context = error.what, error.context
        elif type(error) is RuntimeError and (broken := list(filter(None, reasons))):
            # torch's DistributedDataParallel raises a RuntimeError in place of the error of a call.
            what, context = broken[0], Context()
        else:
            known = self._group.is_known_to_all(error, self._since)
            if not known and not any(reasons):
                # The other ranks are in a call of this step, and must not take one of the next.
                self._group.refuse("step", error)
            return
        if not any(reasons):
            # A smaller group has lost a rank. The other ranks must leave the step, too.
            self._group.abort("a step was aborted")
        raise StepAborted(
            f"the step does not count: {what}",
            context=context,
            hint="call reconfigure(), sync_state() and repeat the step",
        ) from error


def step() -> Step:
    """Return a context manager for one step of the default group.

        with dist.step() as s:
            dist.all_reduce(gradient)
            s.commit()
        weights -= rate * gradient

    Change the state of the job only after `commit`. If a rank is lost before that, the block ends
    with StepAborted on all survivors, and the step counts nowhere. Without `commit` a step does not
    count either.

    Raises:
        NotInitializedError: There is no default group.
    """
    return Step(require_group(None))


def _ends_group(error: CommunicationError) -> bool:
    return not isinstance(error, CollectiveMismatchError) and error.context.usable is not True
