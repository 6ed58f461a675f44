"""From the states of the ranks to the rank for which a job waits. Pure but for /proc."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from unisono.core.base.grouping import grouped
from unisono.core.base.source.where import states_of
from unisono.core.base.text import name_ranks
from unisono.workbench.cli.look.ask import RankState

# By which part of its time a rank waits less if it slows the job down.
_SLOW_SHARE = 0.1

# Fewer calls prove nothing: ranks start at different times, and wait long in their first call.
_MANY_CALLS = 20


class JobView(NamedTuple):
    """The ranks of one job.

    Attributes:
        name: Of the job.
        world_size: Number of ranks.
        states: Of the ranks that answered, by rank.
        silent: Process id of each other rank of this host and the kernel's report of it, by rank.
    """

    name: str
    world_size: int
    states: dict[int, RankState]
    silent: dict[int, tuple[int, str]] = {}  # noqa: RUF012  never changed

    @property
    def title(self) -> str:
        """What a person knows the job by: "job 1f2e (train.py): 4 ranks, 3 answer"."""
        programs = dict.fromkeys(state.get("program") for state in self.states.values())
        text = ", ".join(filter(None, programs))
        of = f" ({text})" if text else ""
        return f"job {self.name}{of}: {self.world_size} ranks, {len(self.states)} answer"

    def place(self, rank: int) -> str:
        """Return where a rank is: "is in load (data.py:57)"."""
        if rank in self.states:
            return f"is {self.states[rank]['place'] or 'in no Python code'}"
        return self.silent.get(rank, (0, "does not answer"))[1]

    def process(self, rank: int) -> str:
        """Return the process of a silent rank, as " (process 5438)"; "" if it is not known."""
        return f" (process {self.silent[rank][0]})" if rank in self.silent else ""


def jobs_of(states: Sequence[RankState]) -> list[JobView]:
    """Return the jobs to which the states belong."""
    names = dict.fromkeys(state["job"] for state in states)
    found = {name: [state for state in states if state["job"] == name] for name in names}
    return [
        JobView(
            name, mine[0]["world_size"], {state["rank"]: state for state in mine}, _silent(mine)
        )
        for name, mine in found.items()
    ]


def _silent(states: Sequence[RankState]) -> dict[int, tuple[int, str]]:
    """Return `JobView.silent` for the ranks of this host that did not answer."""
    here = [state["pids"] for state in states if state["host"] == platform.node()]
    pids = {int(rank): pid for each in here for rank, pid in each.items()}
    for state in states:
        pids.pop(state["rank"], None)
    # All at once, because the kernel is observed for some time.
    reports = states_of(pids.values())
    return {rank: (pid, reports[pid]) for rank, pid in pids.items()}


class CallWait(NamedTuple):
    """Ranks that wait in one call of a group.

    Attributes:
        group: Name of the group.
        ranks: Global ranks of its members.
        call: The call, as "all_reduce #812".
        waiting: Global ranks that are in the call.
        missing: Global ranks that are not, or do not answer.
        since_s: How long the first of them has been in the call; None if it is unknown.
    """

    group: str
    ranks: tuple[int, ...]
    call: str
    waiting: list[int]
    missing: list[int]
    since_s: float | None


def waits_of(job: JobView) -> list[CallWait]:
    """Return the calls in which ranks of a job are, those with missing ranks first."""
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, dict[str, Any]]] = {}
    for rank, state in job.states.items():
        for group in state["groups"]:
            key = group["group"], tuple(group["ranks"])
            by_group.setdefault(key, {})[rank] = group
    found = []
    for (name, ranks), views in by_group.items():
        running = {rank: view for rank, view in views.items() if view["runs"]}
        for seq in sorted({view["seq"] for view in running.values()}):
            waiting = sorted(rank for rank, view in running.items() if view["seq"] == seq)
            behind = [r for r in ranks if r not in views or views[r]["seq"] < seq]
            call = f"{running[waiting[0]]['call'].partition('(')[0]} #{seq}"
            times = [_since_s(running[rank]) for rank in waiting]
            since_s = max((time for time in times if time is not None), default=None)
            found.append(CallWait(name, ranks, call, waiting, behind, since_s))
        for rank, view in views.items():
            found += _messages(name, ranks, rank, view, job.states[rank])
    return sorted(found, key=lambda wait: (not wait.missing, wait.waiting))


def _since_s(view: dict[str, Any]) -> float | None:
    """Return since when the collective runs: recorded, or seen by this client."""
    calls = [each for each in view.get("open", ()) if not each["message"]]
    times = [each["since_s"] for each in calls if each["seq"] == view["seq"]]
    return times[0] if times else view.get("since_s")


def _messages(
    name: str, ranks: tuple[int, ...], rank: int, view: dict[str, Any], state: RankState
) -> Iterator[CallWait]:
    """Return the messages for which the calling thread waits: those of lines in its stack."""
    frames = [tuple(f[:2]) for s in state["stacks"] if s["calls"] for f in s["frames"]]
    for each in view.get("open", ()):
        if each["message"] and tuple(each["at"]) in frames:
            missing = [] if each["peer"] is None else [each["peer"]]
            yield CallWait(name, ranks, each["call"], [rank], missing, each["since_s"])


def verdict_of(job: JobView) -> list[str]:
    """Return a line for each wait: "ranks 0 and 1 wait in all_reduce #8 for rank 2, which ..."."""
    lines = []
    for wait in waits_of(job):
        group = "" if len(wait.ranks) == job.world_size else f" of group '{wait.group}'"
        since = "" if wait.since_s is None else f" for {wait.since_s:.1f} s"
        ranks = name_ranks(wait.waiting)
        if not wait.missing:
            lines.append(f"{ranks} {_is(wait.waiting)} in {wait.call}{group}{since}")
            continue
        blamed = _placed(job, wait.missing, ", which")
        wait_for = "waits" if len(wait.waiting) == 1 else "wait"
        lines.append(f"{ranks} {wait_for} in {wait.call}{group}{since} for {'; '.join(blamed)}")
    if lines or any(state["groups"] for state in job.states.values()):
        return (lines or ["no rank is in a collective call"]) + _slow_rank(job)
    return _placed(job, list(job.states))


def _placed(job: JobView, ranks: Sequence[int], which: str = "") -> list[str]:
    """Return "ranks 1 and 2 are in load (data.py:5)" for each place of these ranks."""
    places = grouped(((job.place(rank), job.process(rank)), rank) for rank in ranks)
    lines = []
    for (place, process), same in places.items():
        verb, _, rest = place.partition(" ")
        if len(same) > 1:
            verb = {"is": "are", "does": "do"}.get(verb, verb)
        lines.append(f"{name_ranks(same)}{process}{which} {verb} {rest}")
    return lines


def wait_share(groups: Sequence[dict[str, Any]]) -> float | None:
    """Return the share of its time that a rank has waited in these groups; None without records."""
    traced = [group for group in groups if "waited_s" in group]
    if not traced:
        return None
    age_s = max(group["age_s"] for group in traced) or 1.0
    # Messages overlap.
    return min(1.0, float(sum(group["waited_s"] for group in traced)) / age_s)


def _slow_rank(job: JobView) -> list[str]:
    """Return a line for the rank that waits far less than the other ranks.

    All ranks of a collective wait for the last rank. So the slowest rank waits least, also if the
    others wait for one another in turn.
    """
    shares = {
        rank: share
        for rank, state in job.states.items()
        if (share := wait_share(state["groups"])) is not None
    }
    calls = max(
        (view["seq"] for state in job.states.values() for view in state["groups"]), default=0
    )
    if len(shares) < 2 or calls < _MANY_CALLS:
        return []
    slow = min(shares, key=shares.__getitem__)
    mine, others = shares.pop(slow), sum(shares.values()) / len(shares)
    if others - mine < _SLOW_SHARE:
        return []
    times = f"it has waited {mine:.0%} of its time, the other ranks {others:.0%}"
    return [f"rank {slow}, which {job.place(slow)}, slows the job down: {times}"]


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
