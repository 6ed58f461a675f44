"""Agents under a virtual clock: the real state machine, everything around it simulated."""

from dataclasses import dataclass, field, replace

from unisono.core.rendezvous.agents.member import (
    AgentMemory,
    End,
    Start,
    Stop,
    Timing,
    decide,
    observe,
    stopped,
)
from unisono.core.rendezvous.agents.state import (
    AgentsState,
    Failed,
    JobLimits,
    Left,
    Node,
    Phase,
    Replaced,
    Succeeded,
    dumps,
    loads,
)
from unisono.core.rendezvous.agents.transitions import apply

TIMING = Timing(join_timeout_s=600.0, last_call_s=30.0, dead_after_s=10.0)


def node(number: int, nprocs: int = 1) -> Node:
    return Node(id=f"n{number}", host=f"h{number}", address=f"10.0.0.{number}", nprocs=nprocs)


@dataclass
class Agent:
    member: AgentMemory
    alive: bool = True
    beats: int = 0
    runs: int = 0
    must_stop: bool = False
    end: End | None = None
    started: list[int] = field(default_factory=list)


class Cluster:
    """A shared state and the agents that work on it; every step checks the invariants."""

    def __init__(self, limits: JobLimits) -> None:
        self.limits = limits
        self.state = AgentsState()
        self.now = 0.0
        self.agents: list[Agent] = []
        self.worlds: dict[int, tuple[str, ...]] = {}
        self.original_failures: set[int] = set()
        self.reported_failures: set[int] = set()

    def add(self, node_rank: int | None = None) -> Agent:
        new = replace(node(len(self.agents)), node_rank=node_rank)
        member = AgentMemory(node=new, limits=self.limits, timing=TIMING)
        agent = Agent(member)
        self.agents.append(agent)
        return agent

    def apply(self, event: object) -> None:
        before = self.state
        self.state = apply(before, event)
        assert loads(dumps(self.state)) == self.state
        self.check(before)

    def check(self, before: AgentsState) -> None:
        state, limits = self.state, self.limits
        assert state.epoch in (before.epoch, before.epoch + 1)
        assert len(state.members) <= limits.max_nodes
        assert state.restarts + state.replaced <= limits.max_restarts
        assert state.restarts - before.restarts in (0, 1)
        # Exact: no more restarts than worlds in which a worker failed.
        assert state.restarts <= len(self.reported_failures)
        everybody = state.present
        assert len(set(everybody)) == len(everybody), "a node has two places"
        if state.phase is Phase.RUNNING:
            ids = tuple(n.id for n in state.members)
            assert len(ids) >= limits.min_nodes
            assert {*state.idle, *state.succeeded} <= set(ids)
            # One world per epoch: its members and their ranks never change. If nodes come and go,
            # a rank is never given twice.
            order = tuple(n.id for n in state.order)
            founders = tuple(n.id for n in state.order if not n.joined)
            assert self.worlds.setdefault(state.epoch, founders) == founders
            if limits.replaces:
                assert set(ids) <= set(order)
                grew = before.epoch == state.epoch and before.phase is Phase.RUNNING
                assert not grew or state.order[: len(before.order)] == before.order
            else:
                assert ids == founders == order
        if before.over:
            assert state.phase is before.phase, "over is over"

    def turn(self, agent: Agent) -> None:
        """Let an agent look at the state and act, as its thread does."""
        if not agent.alive or agent.end is not None:
            return
        for _ in range(20):
            agent.member, events, actions = decide(agent.member, self.state, self.now)
            for event in events:
                self.apply(event)
            for action in actions:
                self.act(agent, action)
            if not events:
                return
        raise AssertionError(f"an agent says the same for ever: {events} in {self.state}")

    def act(self, agent: Agent, action: object) -> None:
        match action:
            case Start(epoch):
                assert not agent.runs, "two worlds at once on one node"
                if not self.limits.replaces:
                    assert self.worlds[epoch].count(agent.member.node.id) == 1
                    assert epoch not in agent.started, "a world is run once"
                agent.runs = epoch
                agent.started.append(epoch)
            case Stop(epoch):
                assert agent.runs == epoch
                agent.must_stop = True
            case End():
                assert not agent.runs
                agent.end = action
                # The agent leaves, so that the others need not wait for its heartbeat.
                self.apply(Left(agent.member.node.id, "ended"))

    def workers_end(self, agent: Agent) -> None:
        agent.runs = 0
        agent.must_stop = False
        agent.member = stopped(agent.member)

    def fail(self, agent: Agent, original: bool) -> None:
        """The workers of an agent fail, if it has any."""
        if not agent.alive or not agent.runs:
            return
        self.reported_failures.add(agent.runs)
        if original:
            self.original_failures.add(agent.runs)
        self.apply(Failed(agent.member.node.id, agent.runs, original, "boom"))
        self.workers_end(agent)

    def succeed(self, agent: Agent) -> None:
        if agent.alive and agent.runs and not agent.must_stop:
            self.apply(Succeeded(agent.member.node.id, agent.runs))
            self.workers_end(agent)

    def replace(self, agent: Agent) -> None:
        """A worker is replaced, if a restart is left."""
        if agent.alive and agent.runs:
            self.apply(Replaced(agent.member.node.id, agent.runs))

    def obey(self, agent: Agent) -> None:
        """The workers end because they were told to."""
        if agent.alive and agent.must_stop:
            self.workers_end(agent)

    def crash(self, agent: Agent) -> None:
        agent.alive = False
        agent.runs = 0

    def leave(self, agent: Agent) -> None:
        if agent.alive and agent.end is None:
            self.apply(Left(agent.member.node.id, "signal"))
            self.crash(agent)

    def beat(self, agent: Agent) -> None:
        if agent.alive and agent.end is None:
            agent.beats += 1
            ids = set(self.state.present) - {agent.member.node.id}
            counts = {a.member.node.id: a.beats for a in self.agents if a.member.node.id in ids}
            agent.member = observe(agent.member, counts, self.now)

    def pass_time(self, seconds: float, *, step: float = 5.0) -> None:
        """Everybody who lives does all that can be done, while time goes by."""
        until = self.now + seconds
        while self.now < until:
            self.now += step
            for agent in self.agents:
                self.beat(agent)
            for _ in range(4):
                for agent in self.agents:
                    self.turn(agent)
                    self.obey(agent)

    @property
    def active(self) -> list[Agent]:
        return [a for a in self.agents if a.alive and a.end is None]
