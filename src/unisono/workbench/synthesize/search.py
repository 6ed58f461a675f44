"""The search: plans are proved and timed, and the best are changed again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import NamedTuple

import numpy as np

from unisono.core.schedules import available
from unisono.core.schedules.ir import Schedule
from unisono.core.schedules.registry import entry
from unisono.core.schedules.verify import verify
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate import simulate
from unisono.workbench.synthesize.plans import Plan, Problem, Shipped, first_plans

# A proof of more ranks takes too long for hundreds of candidates.
MOST_RANKS = 512
# Plans of a kind that are changed further. More: a wider search, less deep.
_PARENTS = 8
# Bytes per element in the simulator.
ITEMSIZE = 4
# Changes in a row that are known already, after which there are no more.
STALE = 1000


@dataclass(frozen=True)
class Candidate:
    """A plan whose schedule was proved, and its time in virtual time."""

    plan: Plan
    schedule: Schedule
    us: float


class SearchLimits(NamedTuple):
    """When a search ends, and how it begins.

    Attributes:
        most: Candidates, the shipped algorithms not counted.
        seconds: Limit of time; a shipped algorithm is always timed.
        seed: Seed of random numbers.
    """

    most: int
    seconds: float
    seed: int


@dataclass(frozen=True)
class Synthesis:
    """The result of a search.

    Attributes:
        best: All candidates, the fastest first.
        shipped: The fastest shipped algorithm, as a group takes it; None if none was timed.
        refused: Plans that the network refused.
        ended: Why the search ended: "candidates", "seconds", or "plans" if there are no more.
    """

    best: tuple[Candidate, ...]
    shipped: Candidate | None
    refused: int
    ended: str


def search(
    problem: Problem,
    limits: SearchLimits,
    depth_of: Callable[[str], int],
    progress: Callable[[int, int, str], None] = lambda done, count, text: None,
) -> Synthesis:
    """Search for the schedule that takes the least time.

    The shipped algorithms come first, those of the fewest steps before the others. With one seed
    the plans are the same, in the same order.

    Args:
        problem: What is searched for.
        limits: When the search ends, and its seed.
        depth_of: Function that returns the pipeline depth of a group for an algorithm.
        progress: Called with the candidates so far, their number, and the best plan.

    Raises:
        InvalidArgumentError: There are too many ranks, or no algorithm runs on the network.
    """
    if problem.ranks > MOST_RANKS:
        raise InvalidArgumentError(
            f"synthesize: {problem.ranks} ranks, expected at most {MOST_RANKS}, because each "
            "candidate is proved",
            hint="synthesize for fewer hosts; multi_level has the levels of any number of ranks",
        )
    names = available(problem.op, problem.ranks, local=problem.local)
    known: list[Plan] = [
        Shipped(name, depth_of(name) if entry(problem.op, name).pipelined else 1) for name in names
    ]
    known.sort(key=lambda plan: _count_steps(plan, problem))
    random, found, refused = Random(limits.seed), list[Candidate](), 0
    begun, ended = time.monotonic(), "plans"
    shipped: Candidate | None = None
    first = chain(known, first_plans(problem, random))
    for done, plan in enumerate(_plans(first, problem, found, random), -len(known)):
        if done >= limits.most:
            ended = "candidates"
            break
        if (found or done >= 0) and time.monotonic() - begun > limits.seconds:
            ended = "seconds"
            break
        candidate = _candidate(plan, problem)
        if candidate is None:
            refused += 1
            continue
        found.append(candidate)
        found.sort(key=_order)
        tried, most = done + 1, limits.most
        if done < 0:
            shipped, tried, most = found[0], tried + len(known), len(known)
        progress(tried, most, f"{found[0].us:,.1f} us: {found[0].plan}")
    if not found:
        raise InvalidArgumentError(
            f"no algorithm of {problem.op} runs on net {problem.machine.name}"
        )
    return Synthesis(tuple(found), shipped, refused, ended)


def _count_steps(plan: Plan, problem: Problem) -> int:
    """Return the steps of the last rank, which show how long a proof takes."""
    schedule, last = plan.schedule(problem), np.array([problem.ranks - 1])
    return sum(len(schedule.steps(k, last)) for k in range(schedule.stages)) if schedule else 0


def _order(candidate: Candidate) -> tuple[float, int]:
    return candidate.us, candidate.schedule.rounds


def _plans(
    first: Iterable[Plan], problem: Problem, found: list[Candidate], random: Random
) -> Iterator[Plan]:
    """Yield the first plans, then changes of the best; each once."""
    seen: set[Plan] = set()
    for plan in first:
        if plan not in seen:
            seen.add(plan)
            yield plan
    # A small world has few plans. All of them are known when changes find nothing new.
    stale = 0
    while found and stale < STALE:
        # The best of each kind, the better ones more often, so that no kind displaces the others.
        kinds = sorted({type(each.plan).__name__ for each in found})
        kind = random.choice(kinds)
        best = [each for each in found if type(each.plan).__name__ == kind][:_PARENTS]
        plan = best[int(len(best) * random.random() ** 2)].plan.changed(problem, random)
        stale += 1
        if plan not in seen:
            seen.add(plan)
            stale = 0
            yield plan


def _candidate(plan: Plan, problem: Problem) -> Candidate | None:
    """Return the plan with its proved schedule and its time; None if it is refused."""
    net, schedule = problem.machine, plan.schedule(problem)
    if schedule is None:
        return None
    try:
        run, network = net.in_channels(schedule, problem.local)
        verify(schedule)
        result = simulate(
            run, problem.nbytes, network, net.costs(schedule.algorithm), itemsize=ITEMSIZE,
            padded=net.values["padded"], contended=net.values["model"] == "links",
        )  # fmt: skip
    except InvalidArgumentError:
        return None
    return Candidate(plan, schedule, result.last_us)
