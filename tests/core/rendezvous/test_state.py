"""The elastic rendezvous: examples, every interleaving of small worlds, and random long lives."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.cluster import TIMING, Cluster, node
from tests.support.selection import examples
from unisono.core.rendezvous.agents.member import AgentMemory, End, decide, observe
from unisono.core.rendezvous.agents.state import (
    AgentsState,
    Cause,
    Failed,
    Idle,
    JobLimits,
    Join,
    LastCallPassed,
    Left,
    NodeLost,
    Phase,
    Replaced,
    Succeeded,
    Unmet,
    dumps,
    loads,
)
from unisono.core.rendezvous.agents.transitions import apply
from unisono.errors import RendezvousError


def limits(low, high=None, restarts=0, replaces=False, durable=False):
    return JobLimits(
        min_nodes=low,
        max_nodes=high or low,
        max_restarts=restarts,
        replaces=replaces,
        durable=durable,
    )


def elastic(low, high, restarts=0, durable=True):
    """The limits of a world whose nodes come and go."""
    return limits(low, high, restarts, replaces=True, durable=durable)


def joined(limits, count):
    state = AgentsState()
    for number in range(count):
        state = apply(state, Join(node(number), limits))
    return state


def ids(state):
    return [member.id for member in state.members]


def test_world_forms_when_the_last_possible_node_has_come():
    state = joined(limits(2), 1)
    assert (state.phase, state.epoch, ids(state)) == (Phase.JOINING, 0, ["n0"])
    state = apply(state, Join(node(1), limits(2)))
    assert (state.phase, state.epoch, ids(state)) == (Phase.RUNNING, 1, ["n0", "n1"])


def test_last_call_forms_a_world_of_those_who_are_there():
    state = joined(limits(2, 4), 2)
    assert state.phase is Phase.JOINING
    assert apply(joined(limits(2, 4), 1), LastCallPassed(0)).phase is Phase.JOINING
    assert apply(state, LastCallPassed(1)) is state
    assert ids(apply(state, LastCallPassed(0))) == ["n0", "n1"]


def test_first_restart_needs_no_last_call():
    state = apply(joined(limits(1, 4, restarts=1), 2), LastCallPassed(0))
    state = apply(state, Failed("n1", 1, True, "boom"))
    assert (state.phase, state.restarts) == (Phase.JOINING, 1)
    for number in (1, 0):
        state = apply(state, Join(node(number), limits(1, 4, restarts=1)))
    # Ranks stay with their nodes.
    assert (state.phase, state.epoch, ids(state)) == (Phase.RUNNING, 2, ["n0", "n1"])


def test_a_second_consequence_changes_nothing():
    state = apply(joined(limits(3, restarts=1), 3), Failed("n0", 1, False, "peer lost"))
    assert apply(state, Failed("n1", 1, False, "peer lost, too")) is state
    assert (state.restarts, state.blamed) == (0, "n0")


@pytest.mark.parametrize("restarts", [0, 1])
def test_consequence_of_a_lost_node_costs_no_restart(restarts):
    rules = limits(1, 2, restarts=restarts)
    state = apply(joined(rules, 2), Failed("n0", 1, False, "peer lost"))
    assert state.phase is Phase.JOINING
    state = apply(state, Join(node(0), rules))
    # Not before it is known why: as a restart it could be one too many.
    assert apply(state, LastCallPassed(1)) is state
    state = apply(state, NodeLost("n1", "n1 was lost"))
    assert (state.phase, state.restarts, ids(state)) == (Phase.RUNNING, 0, ["n0"])


def test_consequence_counts_if_every_node_is_back():
    rules = limits(2, restarts=1)
    state = apply(joined(rules, 2), Failed("n0", 1, False, "peer lost"))
    for number in range(2):
        state = apply(state, Join(node(number), rules))
    assert (state.phase, state.epoch, state.restarts) == (Phase.RUNNING, 2, 1)
    state = apply(state, Failed("n0", 2, False, "peer lost"))
    for number in range(2):
        state = apply(state, Join(node(number), rules))
    assert (state.phase, state.reason) == (Phase.FAILED, "peer lost")


def test_the_cause_may_be_told_after_the_consequence():
    state = apply(joined(limits(2), 2), Failed("n0", 1, False, "peer lost"))
    state = apply(state, Failed("n1", 1, True, "boom"))
    assert (state.phase, state.reason, state.blamed) == (Phase.FAILED, "boom", "n1")


def test_new_node_makes_a_larger_world():
    rules = limits(1, 3)
    state = apply(joined(rules, 2), LastCallPassed(0))
    state = apply(state, Join(node(2), rules))
    assert (state.phase, state.cause, state.restarts) == (Phase.JOINING, Cause.MEMBERSHIP, 0)
    for number in (1, 0):
        state = apply(state, Join(node(number), rules))
    assert ids(state) == ["n0", "n1", "n2"]


def test_spare_node_waits_and_takes_a_place_that_becomes_free():
    rules = limits(2, restarts=1)
    state = apply(joined(rules, 2), Join(node(2), rules))
    assert [n.id for n in state.waiting] == ["n2"]
    # A failure alone frees no place: the old nodes come back.
    failed = apply(state, Failed("n0", 1, True, "boom"))
    assert [n.id for n in failed.waiting] == ["n2"]
    state = apply(apply(state, NodeLost("n0", "lost")), Join(node(1), rules))
    assert (state.phase, ids(state)) == (Phase.RUNNING, ["n1", "n2"])


def test_nodes_come_and_go_in_a_running_world():
    rules = elastic(1, 3, restarts=2)
    state = apply(joined(rules, 2), LastCallPassed(0))
    state = apply(state, Join(node(2), rules))
    assert (state.phase, state.epoch, ids(state)) == (Phase.RUNNING, 1, ["n0", "n1", "n2"])
    assert (state.holders(), [n.joined for n in state.order]) == (
        ["n0", "n1"],
        [False, False, True],
    )
    assert apply(state, Idle("n2", 1, False)).holders(without="n0") == ["n1", "n2"]
    waits = apply(state, Join(node(3), rules))
    state = apply(waits, NodeLost("n0", "node h0 was lost"))
    # The spare node gets the place, and a number that no node had before.
    assert (state.epoch, ids(state)) == (1, ["n1", "n2", "n3"])
    assert [n.id for n in state.order] == ["n0", "n1", "n2", "n3"]
    # What a node reports that was lost no longer counts; it may come back.
    assert apply(state, Failed("n0", 1, True, "boom")) is state
    state = apply(apply(state, Left("n2", "left")), Join(node(0), rules))
    assert [n.id for n in state.order] == ["n0", "n1", "n2", "n3", "n0"]
    for number in (1, 3, 0):
        assert state.phase is Phase.RUNNING
        state = apply(state, Succeeded(f"n{number}", 1))
    assert state.phase is Phase.FINISHED


def test_a_world_ends_if_a_node_leaves_before_the_ranks_met():
    rules = elastic(1, 3)
    state = apply(apply(joined(rules, 2), LastCallPassed(0)), Join(node(2), rules))
    assert apply(state, Unmet("n0", 1)) is state, "no rank is missing"
    state = apply(state, NodeLost("n1", "node h1 was lost"))
    assert [n.id for n in state.gone] == ["n1"]
    # A node that joined later has no rank for which the others wait.
    assert apply(state, NodeLost("n2", "node h2 was lost")).gone == state.gone
    assert apply(state, Unmet("n1", 1)) is apply(state, Unmet("n0", 0)) is state
    state = apply(state, Unmet("n0", 1))
    assert (state.phase, state.cause, state.restarts) == (Phase.JOINING, Cause.MEMBERSHIP, 0)
    assert state.reason.endswith(" was lost or left before the ranks met")
    for number in (0, 2):
        state = apply(state, Join(node(number), rules))
    assert (state.phase, state.epoch, ids(state), state.gone) == (
        Phase.RUNNING,
        2,
        ["n0", "n2"],
        (),
    )


def test_a_world_ends_with_too_few_nodes_or_without_its_store():
    rules = elastic(2, 3)
    state = apply(joined(rules, 3), Left("n0", "left"))
    assert (state.phase, state.reason) == (Phase.RUNNING, "left")
    assert apply(state, Left("n1", "left")).phase is Phase.JOINING
    rules = elastic(1, 3, durable=False)
    state = joined(rules, 3)
    assert apply(state, NodeLost("n1", "lost")).phase is Phase.RUNNING
    assert apply(state, NodeLost("n0", "lost")).phase is Phase.JOINING
    assert apply(state, Left("n0", "left")).phase is Phase.JOINING
    serving = replace(node(5), serves=True)
    state = apply(apply(joined(rules, 2), Join(serving, rules)), Join(node(6), rules))
    # The workers' store is on the host of the agents' store, whose agent stays if it leaves.
    assert ids(state) == ["n5", "n0", "n1"]
    assert apply(state, Left("n5", "left")).phase is Phase.RUNNING
    assert apply(state, NodeLost("n5", "lost")).phase is Phase.JOINING


def test_nodes_that_were_never_taken_in_do_not_finish_a_job():
    rules = elastic(1, 3)
    state = apply(apply(joined(rules, 1), LastCallPassed(0)), Join(node(1), rules))
    done = apply(apply(state, Succeeded("n0", 1)), Succeeded("n1", 1, idle=True))
    assert done.phase is Phase.FINISHED
    state = apply(apply(state, Left("n0", "left")), Succeeded("n1", 1, idle=True))
    assert (state.phase, state.cause, state.restarts) == (Phase.JOINING, Cause.MEMBERSHIP, 0)
    assert apply(state, Join(node(1), rules)).epoch == 2


def test_restarts_and_replacements_of_all_nodes_are_counted_together():
    rules = elastic(2, 2, restarts=2)
    state = apply(joined(rules, 2), Replaced("n0", 1))
    state = apply(state, Replaced("n1", 1))
    assert state.replaced == 2
    assert apply(state, Replaced("n0", 1)) is state
    assert apply(state, Failed("n0", 1, True, "boom")).phase is Phase.FAILED


def test_clean_leave_never_closes_the_rendezvous():
    rules = limits(2)
    state = apply(joined(rules, 2), Left("n1", "signal"))
    assert (state.phase, state.over) == (Phase.JOINING, False)
    state = apply(state, Join(node(0), rules))
    state = apply(state, Join(node(7), rules))
    assert (state.phase, state.epoch, ids(state)) == (Phase.RUNNING, 2, ["n0", "n7"])


def test_lost_node_ends_a_job_that_must_not_restart_and_cannot_go_on():
    state = apply(joined(limits(2), 2), NodeLost("n1", "node h1 was lost"))
    assert state.phase is Phase.FAILED
    expected = "node h1 was lost; 1 of at least 2 nodes left, and --max-restarts is 0"
    assert state.reason == expected


def test_lost_node_is_told_by_its_host_though_it_was_only_expected():
    state = joined(limits(2), 2)
    member, _, _ = decide(AgentMemory(node=node(0), limits=limits(2)), state, 0.0)
    for now in (0.0, 5.0, 10.0):
        member = observe(member, {"n1": 1}, now)
    ended = apply(state, Failed("n0", 1, False, "a peer was lost"))
    assert ended.expected == ("n0", "n1")
    _, events, _ = decide(member, ended, 10.0)
    assert NodeLost("n1", "node h1 was lost (no heartbeat for 10 s)") in events


def test_nobody_joins_when_part_of_the_work_is_done():
    rules = limits(1, 3)
    state = apply(apply(joined(rules, 2), LastCallPassed(0)), Succeeded("n0", 1))
    state = apply(state, Join(node(2), rules))
    assert (state.phase, [n.id for n in state.waiting]) == (Phase.RUNNING, ["n2"])
    assert apply(state, Succeeded("n1", 1)).phase is Phase.FINISHED


def test_node_that_waited_is_let_in_when_the_world_ends():
    rules = limits(1, 3, restarts=1)
    state = apply(apply(joined(rules, 2), LastCallPassed(0)), Succeeded("n0", 1))
    state = apply(state, Join(node(2), rules))
    state = apply(state, Failed("n1", 1, True, "boom"))
    assert (ids(state), state.waiting, state.expected) == (["n2"], (), ("n0", "n1"))


@pytest.mark.parametrize("original", [True, False])
def test_failure_that_is_told_too_late_is_ignored(original):
    rules = limits(1, 2, restarts=3)
    state = apply(apply(joined(rules, 2), NodeLost("n1", "lost")), Join(node(0), rules))
    assert (state.phase, state.epoch) == (Phase.RUNNING, 2)
    assert apply(state, Failed("n0", 1, original, "peer lost")) is state


@pytest.mark.parametrize("event", [Left("n0", "left"), NodeLost("n0", "lost")])
def test_node_that_is_done_may_go(event):
    state = apply(apply(joined(limits(2), 2), Succeeded("n0", 1)), event)
    assert (state.phase, ids(state), state.present) == (Phase.RUNNING, ["n0", "n1"], ("n1",))
    assert apply(state, event) is state
    assert loads(dumps(state)) == state
    # The host of the store serves the nodes that are present: at the end none is left to wait for.
    state = apply(state, Succeeded("n1", 1))
    assert (state.phase, state.present) == (Phase.FINISHED, ("n1",))


def test_node_that_has_gone_is_expected_if_the_world_ends():
    rules = limits(2)
    state = apply(apply(joined(rules, 2), Succeeded("n0", 1)), Left("n0", "done"))
    state = apply(state, Failed("n1", 1, False, "a peer was lost"))
    assert (state.expected, state.present, state.left) == (("n0", "n1"), ("n0", "n1"), ())
    # Without that event, n1 would wait for an explanation until its join timed out.
    assert apply(state, NodeLost("n0", "no heartbeat")).phase is Phase.FAILED


def test_different_limits_are_refused():
    with pytest.raises(RendezvousError, match=r"h1 was started with --nnodes 2:3 .*2:2"):
        apply(joined(limits(2), 1), Join(node(1), limits(2, 3)))
    other = replace(limits(2), replaces=True)
    with pytest.raises(RendezvousError, match=r"--max-restarts 0 --restart worker, but the job"):
        apply(joined(limits(2), 1), Join(node(1), other))


def test_same_node_rank_twice_is_refused():
    first, second = (replace(node(i), node_rank=0) for i in range(2))
    state = apply(AgentsState(), Join(first, limits(2)))
    with pytest.raises(RendezvousError, match="--node-rank 0 of host h1 is taken by host h0"):
        apply(state, Join(second, limits(2)))


def test_node_rank_of_a_node_that_lives_is_taken():
    cluster = Cluster(limits(2, restarts=1))
    cluster.add(node_rank=0), cluster.add(node_rank=1)
    cluster.pass_time(5)
    late = cluster.add(node_rank=1)
    cluster.pass_time(15)
    assert late.end == End(
        False,
        "--node-rank 1 of host h2 is taken by host h1 "
        "(give each node a different --node-rank, 0 to nnodes - 1)",
    )
    assert "n2" not in cluster.state.present
    assert (cluster.state.phase, cluster.state.epoch) == (Phase.RUNNING, 1)


def test_node_rank_of_a_lost_node_is_free():
    cluster = Cluster(limits(2, restarts=1))
    cluster.add(node_rank=0)
    lost = cluster.add(node_rank=1)
    cluster.pass_time(5)
    cluster.crash(lost)
    late = cluster.add(node_rank=1)
    cluster.pass_time(TIMING.dead_after_s + 5)
    assert (late.end, late.started) == (None, [2])
    assert ids(cluster.state) == ["n0", "n2"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_node_rank_decides_the_group_rank(order):
    state = AgentsState()
    for rank in order:
        state = apply(state, Join(replace(node(rank), node_rank=rank), limits(3)))
    assert ids(state) == ["n0", "n1", "n2"]


@pytest.mark.parametrize("text", [b"{}", b"[]", b"no json", b'{"epoch": 1}', b"\xff"])
def test_foreign_documents_are_refused(text):
    with pytest.raises(RendezvousError, match="not one of this version"):
        loads(text)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "rules",
    [
        *(limits(1), limits(2), limits(1, 2), limits(2, restarts=1), limits(1, 2, 1)),
        *(elastic(1, 2, restarts=1), elastic(1, 2, durable=False)),
    ],
    ids=str,
)
def test_every_sequence_of_events_of_two_nodes(rules):
    """All documents that any order of events can lead to obey the invariants of Cluster.check."""
    cluster = Cluster(rules)
    # What may be said at all; the epoch is the present one or, said too late, the one before.
    seen, frontier = {AgentsState()}, [AgentsState()]
    while frontier:
        state = frontier.pop()
        epochs = [e for e in (state.epoch - 1, state.epoch) if e >= 0]
        events = [LastCallPassed(e) for e in epochs]
        for n in (node(0), node(1)):
            events += [Join(n, rules), Left(n.id, "left"), NodeLost(n.id, "lost")]
            for epoch in epochs:
                events += [Failed(n.id, epoch, original, "boom") for original in (True, False)]
                events.append(Succeeded(n.id, epoch))
                if rules.replaces:
                    events += [Idle(n.id, epoch, idle) for idle in (True, False)]
                    events += [Succeeded(n.id, epoch, True), Replaced(n.id, epoch)]
                    events.append(Unmet(n.id, epoch))
        for event in events:
            cluster.state = state
            cluster.worlds = {}
            cluster.reported_failures = set(range(1, state.epoch + 1))
            cluster.apply(event)
            after = cluster.state
            small = after.epoch <= (1 if rules.replaces else 3) and len(after.order) <= 3
            if small and after not in seen:
                seen.add(after)
                frontier.append(after)
    phases = {Phase.JOINING, Phase.RUNNING, Phase.FINISHED, Phase.FAILED}
    if rules == limits(1, 2):
        # Only consequences can be reported here without an original failure; both end it.
        assert {s.phase for s in seen} == phases
    assert {Phase.JOINING, Phase.RUNNING, Phase.FINISHED} <= {s.phase for s in seen}
    assert len(seen) > 20


# Turns count twice, because all else waits for them.
AGENTS = ["turn", "turn", "obey", "succeed", "fail", "suffer", "crash", "leave", "beat", "replace"]
STEPS = st.one_of(
    *(st.tuples(st.just(what), st.integers(0, 5)) for what in AGENTS),
    st.tuples(st.just("add"), st.just(0)),
    st.tuples(st.just("time"), st.integers(1, 40)),
)
RULES = st.builds(
    lambda low, more, restarts, *coming: limits(low, low + more, restarts, *coming),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)


def play(cluster, steps):
    for what, number in steps:
        if what == "time":
            cluster.now += number
            continue
        if what == "add":
            if len(cluster.agents) < 6:
                cluster.add()
            continue
        agent = cluster.agents[number % len(cluster.agents)]
        if what == "fail":
            cluster.fail(agent, original=True)
        elif what == "suffer":
            cluster.fail(agent, original=False)
        else:
            getattr(cluster, what)(agent)


@examples(300, 80)
@given(
    rules=RULES,
    count=st.integers(1, 4),
    formed=st.booleans(),
    steps=st.lists(STEPS, max_size=60),
)
# The last call is not repeated while a node that knows the cause is expected.
@example(rules=limits(1, 2), count=2, formed=True, steps=[("suffer", 0), ("turn", 0), ("time", 25)])
def test_any_life_ends_in_progress(rules, count, formed, steps):
    cluster = Cluster(rules)
    for _ in range(count):
        cluster.add()
    if formed:
        cluster.pass_time(60)
    play(cluster, steps)
    # From here on nothing goes wrong any more.
    cluster.pass_time(120)
    if not cluster.active:
        return
    if cluster.state.over:
        pytest.fail("somebody goes on with a job that is over")
    running = {agent.runs for agent in cluster.active}
    members = set(ids(cluster.state))
    if cluster.state.phase is Phase.RUNNING:
        # Crashed agents were noticed: all members live, and all run (or have finished) this world.
        alive = {agent.member.node.id for agent in cluster.active}
        assert members - alive <= set(cluster.state.succeeded)
        for agent in cluster.active:
            if agent.member.node.id in members:
                assert agent.runs == cluster.state.epoch or (
                    agent.member.node.id in cluster.state.succeeded
                )
    else:
        assert running <= {0}
        assert len(cluster.active) < rules.min_nodes
    cluster.pass_time(TIMING.join_timeout_s + 50)
    for agent in cluster.active:
        assert cluster.state.phase is Phase.RUNNING, "nobody waits for ever"
        assert agent.member.node.id in cluster.state.present


@examples(100, 60)
@given(rules=RULES, kills=st.lists(st.integers(0, 4), max_size=8))
def test_no_restart_is_lost_and_none_is_counted_twice(rules, kills):
    cluster = Cluster(rules)
    for _ in range(rules.max_nodes):
        cluster.add()
    cluster.pass_time(60)
    for number in kills:
        if cluster.state.over:
            break
        epoch = cluster.state.epoch
        cluster.fail(cluster.agents[number % len(cluster.agents)], original=True)
        cluster.pass_time(20)
        if not cluster.state.over:
            assert cluster.state.epoch == epoch + 1
    assert cluster.state.restarts == min(len(kills), rules.max_restarts)
    assert cluster.state.over == (len(kills) > rules.max_restarts)


def test_heartbeat_tells_a_crashed_agent():
    cluster = Cluster(limits(1, 2, restarts=1))
    for _ in range(2):
        cluster.add()
    cluster.pass_time(5)
    assert cluster.state.phase is Phase.RUNNING
    cluster.crash(cluster.agents[1])
    cluster.pass_time(TIMING.dead_after_s - 5)
    assert len(cluster.state.members) == 2, "too early"
    cluster.pass_time(15)
    assert ids(cluster.state) == ["n0"]
    assert (cluster.state.epoch, cluster.state.restarts) == (2, 0)
    assert cluster.agents[0].started == [1, 2]


def test_agent_that_crashed_after_its_work_was_done():
    cluster = Cluster(limits(2))
    first, second = cluster.add(), cluster.add()
    cluster.pass_time(5)
    cluster.succeed(second)
    cluster.crash(second)
    cluster.pass_time(60)
    assert (cluster.state.phase, cluster.state.epoch) == (Phase.RUNNING, 1)
    cluster.succeed(first)
    cluster.pass_time(5)
    assert first.end == End(True, "")


def test_agent_that_only_slept_comes_back():
    cluster = Cluster(limits(1, 2, restarts=1))
    for _ in range(2):
        cluster.add()
    cluster.pass_time(5)
    sleeper = cluster.agents[1]
    sleeper.alive = False
    cluster.pass_time(30)
    assert ids(cluster.state) == ["n0"]
    sleeper.alive = True
    cluster.pass_time(30)
    assert ids(cluster.state) == ["n0", "n1"]
    assert sleeper.started[-1] == cluster.state.epoch


def pair_that_runs():
    """Return a cluster of two agents that run the world of both, which may come and go."""
    cluster = Cluster(elastic(1, 2))
    for _ in range(2):
        cluster.add()
    cluster.pass_time(15)
    assert (cluster.state.phase, ids(cluster.state)) == (Phase.RUNNING, ["n0", "n1"])
    return cluster


@pytest.mark.parametrize("at", ["before it read heartbeats", "while it read them", "after that"])
def test_agent_that_stood_still_takes_no_other_for_lost(at):
    cluster = pair_that_runs()
    first, sleeper = cluster.agents
    read = {"n0": first.beats}
    for _ in range(30):
        cluster.now += 1
        cluster.beat(first)
    if at == "while it read them":
        # What the store answered before the agent stood still.
        sleeper.member = observe(sleeper.member, read, cluster.now)
    elif at == "before it read heartbeats":
        cluster.beat(sleeper)
    cluster.turn(sleeper)
    assert ids(cluster.state) == ["n0", "n1"]
    cluster.crash(first)
    cluster.pass_time(TIMING.dead_after_s + 10)
    assert ids(cluster.state) == ["n1"]


def test_lost_node_may_join_again_before_its_next_heartbeat_is_read():
    cluster = pair_that_runs()
    first, sleeper = cluster.agents
    for _ in range(3):
        cluster.now += 5
        cluster.beat(first)
    cluster.turn(first)
    assert ids(cluster.state) == ["n0"]
    cluster.turn(sleeper)
    cluster.obey(sleeper)
    for agent in (sleeper, first):
        cluster.turn(agent)
    assert (ids(cluster.state), cluster.state.epoch) == (["n0", "n1"], 1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nobody_is_lost_if_the_whole_machine_stood_still(order):
    cluster = pair_that_runs()
    cluster.now += 100
    # The agent that goes on first finds the heartbeats of the other as they were before.
    for number in order:
        cluster.beat(cluster.agents[number])
        cluster.turn(cluster.agents[number])
    cluster.pass_time(50)
    assert (cluster.state.phase, cluster.state.epoch) == (Phase.RUNNING, 1)
    assert ids(cluster.state) == ["n0", "n1"]


def test_nobody_waits_for_ever():
    cluster = Cluster(limits(2))
    agent = cluster.add()
    cluster.pass_time(TIMING.join_timeout_s - 10)
    assert agent.end is None
    cluster.pass_time(20)
    expected = "the rendezvous timed out after 600 s: 1 of at least 2 nodes came (h0)"
    assert agent.end == End(False, expected)
