"""The membership document: examples, every order of events of small worlds, and a virtual clock."""

import random
from dataclasses import replace

import pytest

from unisono.core.rendezvous.agents.state import dumps
from unisono.core.rendezvous.membership import (
    AWAY_S,
    BROKEN_S,
    SILENT_S,
    VANISHED_S,
    Attendance,
    Come,
    Connected,
    Expired,
    JoinRequest,
    Member,
    MembershipState,
    MembersLost,
    Silent,
    WaitingMember,
    apply,
    founder,
    loads,
    next_event,
)
from unisono.errors import RendezvousError

WORLD = 1


def arrival(who, **limits):
    return WaitingMember(
        member=Member(id=who if isinstance(who, str) else founder(WORLD, who)), **limits
    )


def come(who, generation=1, size=4, **limits):
    founders = size if generation == 1 else 0
    return Come(arrival(who, **limits), WORLD, generation, founders)


def after(*events, state=None):
    state = state or MembershipState()
    for event in events:
        state = apply(state, event)
    return state


def ids(*ranks):
    return tuple(each if isinstance(each, str) else founder(WORLD, each) for each in ranks)


def test_generation_forms_when_the_last_living_member_has_come():
    state = after(come(3), come(0), MembersLost(ids(2), 1))
    assert (state.generation, state.missing()) == (1, (1, 2))
    state = apply(state, come(1))
    # Survivors keep their order.
    assert (state.generation, state.ids, state.came) == (2, ids(0, 1, 3), ())


def test_newcomers_come_last_in_their_order_and_up_to_the_limit():
    state = after(JoinRequest(arrival("y")), JoinRequest(arrival("x")), JoinRequest(arrival("z")))
    state = after(come(1, size=2), come(0, size=2, max_size=4), state=state)
    assert state.ids == ids(0, 1, "y", "x")
    assert [each.id for each in state.waiting] == ["z"]
    # The newcomers, too, know the limit.
    assert state.max_size == 4
    # The newcomers count for the quorum when all are connected.
    assert state.agreed == ids(0, 1)
    assert apply(state, Connected(2)).agreed == state.ids


def test_max_size_excludes_no_survivor():
    state = after(JoinRequest(arrival("x")), *(come(rank, max_size=2) for rank in range(4)))
    assert state.ids == ids(0, 1, 2, 3)


def test_min_size_waits_for_newcomers():
    state = after(come(0, size=2, min_size=2), MembersLost(ids(1), 1))
    assert state.generation == 1
    assert after(Expired(ids(0)[0], 1), state=state).came == ()
    assert after(JoinRequest(arrival("x")), state=state).ids == ids(0, "x")


@pytest.mark.parametrize(
    ("there", "may"),
    [((0, 1, 2), True), ((1, 2, 3), True), ((0, 3), True), ((2, 3), False), ((0,), False)],
)
def test_more_than_half_or_half_with_the_lowest_rank_goes_on(there, may):
    absent = tuple(each for each in ids(0, 1, 2, 3) if each not in ids(*there))
    state = after(*(come(rank) for rank in there), MembersLost(absent, 1))
    assert (state.generation == 2, state.is_possible()) == (may, may)


def test_a_deadline_forms_the_generation_without_a_slow_rank():
    state = after(come(0), come(1), come(3))
    assert state.generation == 1
    state = apply(state, Expired(ids(1)[0], 1))
    assert (state.generation, state.ids) == (2, ids(0, 1, 3))
    # The slow rank finds a document without it.
    late = apply(state, come(2))
    assert late is state


def test_a_deadline_without_quorum_withdraws_the_rank():
    state = after(come(3), come(2), Expired(ids(3)[0], 1))
    assert (state.generation, [each.id for each in state.came]) == (1, [ids(2)[0]])


def test_a_rank_that_was_blamed_and_comes_in_time_takes_part():
    state = after(come(0), MembersLost(ids(1), 1), Silent(ids(2), 1), come(2), come(1), come(3))
    assert state.ids == ids(0, 1, 2, 3)


def test_a_rank_that_came_and_ended_is_left_out():
    state = after(come(0), come(1), come(2), MembersLost(ids(2, 3), 1))
    assert (state.generation, state.ids) == (2, ids(0, 1))


def test_a_world_made_later_over_the_same_store_starts_anew():
    old = after(come(0, size=2), come(1, size=2))
    new = apply(old, Come(WaitingMember(member=Member(id="2.0")), 2, 1, 3))
    assert (new.world, new.generation, len(new.members)) == (2, 1, 3)
    assert apply(new, come(0, size=2)) is new


def test_document_survives_the_store():
    state = after(
        JoinRequest(arrival("x", max_size=3)), come(0), MembersLost(ids(1), 1), Silent(ids(3), 1)
    )
    assert loads(dumps(state)) == state
    assert loads(b"") == MembershipState()
    with pytest.raises(RendezvousError, match="not one of this version"):
        loads(b"{}")


# ---- every order of events ----------------------------------------------------------------------


class Model:
    """The document and what each process knows of it; the test's own account of the rules.

    `inside` has the generation in which a process computes, or -1 while it is in a meeting.
    """

    def __init__(self, founders, newcomers):
        self.founders, self.newcomers = ids(*range(founders)), newcomers
        begun = MembershipState(
            world=WORLD,
            generation=1,
            members=tuple(Member(id=each) for each in self.founders),
            agreed=self.founders,
        )
        self.start = begun, tuple((each, 1) for each in self.founders), (self.founders,)

    def successors(self, node):
        """Yield the nodes after each possible event, however wrong its report may be."""
        state, inside, worlds = node
        inside = dict(inside)
        g = state.generation
        for who, at in inside.items():
            if at > 0:
                changed = {**inside, who: -at}
                yield self.node(apply(state, self.come(who, at)), changed, worlds)
            elif who in state.ids and -at < g:
                # It reads the document.
                yield self.node(state, {**inside, who: g}, worlds)
            yield self.node(apply(state, MembersLost((who,), g)), inside, worlds)
            yield self.node(apply(state, Expired(who, g)), inside, worlds)
        for who in self.newcomers:
            if who not in inside:
                joined = {**inside, who: 0}
                yield self.node(apply(state, JoinRequest(arrival(who))), joined, worlds)
        yield self.node(apply(state, Connected(g)), inside, worlds)

    def come(self, who, generation):
        founders = len(self.founders) if generation == 1 else 0
        return Come(arrival(who), WORLD, generation, founders)

    def node(self, state, inside, worlds):
        if state.generation > len(worlds):
            worlds = (*worlds, state.ids)
        return state, tuple(sorted(inside.items())), worlds

    def check(self, before, node):
        (old, _, _), (state, inside, worlds) = before, node
        assert len(set(state.ids)) == len(state.ids)
        assert set(state.agreed) <= set(state.ids)
        assert state.agreed
        came = {each.id for each in state.came}
        assert not came & {*state.lost, *state.silent}
        assert state.generation in (old.generation, old.generation + 1)
        if state.generation == old.generation:
            assert state.ids == old.ids
        else:
            survivors = [each for each in state.ids if each in old.ids]
            assert survivors == [each for each in old.ids if each in state.ids]
            assert state.ids[: len(survivors)] == tuple(survivors)
            assert old.has_quorum(survivors)
        # A generation is whole if all its members compute in it: no other can make a call.
        where = dict(inside)
        whole = [
            number
            for number, members in enumerate(worlds, 1)
            if all(where.get(each) == number for each in members)
        ]
        assert len(whole) <= 1


@pytest.mark.parametrize(
    ("founders", "newcomers", "generations"),
    [(2, ("x",), 4), (3, (), 4), (3, ("x",), 3), (4, (), 2)],
)
def test_every_order_of_events_keeps_one_world(founders, newcomers, generations):
    model = Model(founders, newcomers)
    seen, todo, formed = {model.start}, [model.start], 0
    while todo:
        node = todo.pop()
        if node[0].generation >= generations:
            formed += 1
            continue
        for following in model.successors(node):
            if following not in seen:
                model.check(node, following)
                seen.add(following)
                todo.append(following)
    assert formed > 10


# ---- a virtual clock ----------------------------------------------------------------------------


def attendance(who, generation=1, timeout_s=10.0):
    return Attendance(id=ids(who)[0], generation=generation, began_s=100.0, timeout_s=timeout_s)


def test_a_lost_rank_is_reported_soon_and_only_once():
    state, mine = after(come(0), come(1)), attendance(0)
    assert next_event(mine, state, 100.0, unreachable=ids(1, 2)) is None
    soon_s = 100.0 + BROKEN_S
    event = next_event(mine, state, soon_s, unreachable=ids(1, 2))
    # A rank that came is alive, even if the link to it is broken.
    assert event == MembersLost(ids(2), 1)
    assert next_event(mine, apply(state, event), soon_s, unreachable=ids(1, 2)) is None
    event = next_event(mine, state, 100.0, ended=ids(1))
    assert event == MembersLost(ids(1), 1)


def test_a_rank_without_links_waits_for_ranks_that_may_be_alive():
    mine, all_others = attendance(0, timeout_s=100.0), ids(1, 2, 3)
    alone, pair = after(come(0)), after(come(0), come(1))

    def reports(state, late_s, away=all_others, **facts):
        return next_event(mine, state, 100.0 + late_s, unreachable=away, **facts)

    # Without them there is no quorum.
    assert reports(alone, AWAY_S - 0.1) is None
    assert reports(alone, AWAY_S) == MembersLost(all_others, 1)
    # Their hosts acknowledge nothing, so they hardly come.
    assert reports(alone, VANISHED_S - 0.1, vanished=all_others) is None
    assert reports(alone, VANISHED_S, vanished=all_others) == MembersLost(all_others, 1)
    assert reports(alone, VANISHED_S, vanished=ids(2, 3)) is None
    # Two of four with the lowest rank are a quorum; but the own host may be the cause.
    assert reports(pair, SILENT_S - 0.1) is None
    assert reports(pair, SILENT_S) == MembersLost(ids(2, 3), 1)
    # A link to another rank shows that it is not.
    assert reports(alone, BROKEN_S, away=ids(3)) == MembersLost(ids(3), 1)
    # A process that has ended does not come any more.
    assert reports(alone, 0.0, ended=ids(2)) == MembersLost(ids(2), 1)


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_ranks_that_lose_all_links_at_once_stay_together(size):
    draw = random.Random(size)
    for _ in range(50):
        # When each rank comes, in tenths of a second.
        begins = {each: draw.randrange(int(10 * SILENT_S)) / 10 for each in ids(*range(size))}
        state, waits, now = MembershipState(), {}, 0.0
        while state.generation < 2:
            for who in draw.sample(sorted(begins), size):
                if begins[who] <= now and who not in waits:
                    waits[who] = Attendance(id=who, generation=1, began_s=now, timeout_s=60.0)
                    state = apply(state, come(who, size=size))
                elif who in waits and state.generation == 1:
                    others = [each for each in begins if each != who]
                    event = next_event(waits[who], state, now, unreachable=others)
                    state = apply(state, event) if event else state
            now += 0.1
        assert state.ids == ids(*range(size))


def test_a_blamed_rank_has_time_to_come():
    state, mine = after(come(0)), attendance(0)
    assert next_event(mine, state, 100.0, blamed=ids(3)) is None
    event = next_event(mine, state, 100.0 + SILENT_S, blamed=ids(3))
    assert event == Silent(ids(3), 1)
    assert next_event(mine, apply(state, come(3)), 101.0, blamed=ids(3)) is None


def test_the_deadline_is_reported_when_it_has_passed():
    state, mine = after(come(0)), attendance(0, timeout_s=2.0)
    assert next_event(mine, state, 101.9) is None
    assert next_event(mine, state, 102.0) == Expired(mine.id, 1)
    newcomer = Attendance(id="x", generation=0, began_s=0.0, timeout_s=1.0)
    state = apply(state, JoinRequest(arrival("x")))
    # A newcomer has no links, so it reports no other rank.
    assert next_event(newcomer, state, 0.5, ended=ids(2), blamed=ids(2)) is None
    assert not apply(state, next_event(newcomer, state, 1.0)).waiting


class Life:
    """One random life of a job under a virtual clock: processes end, stop, go on and join."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.now, self.state = 0.0, MembershipState()
        self.size = self.random.randint(2, 6)
        self.at = dict.fromkeys(ids(*range(self.size)), 1)
        self.waits, self.ended, self.stopped, self.out = {}, set(), set(), set()
        self.joined = 0
        self.worlds = {1: ids(*range(self.size))}

    def tell(self, event):
        if event is not None:
            old, self.state = self.state, apply(self.state, event)
            if self.state.generation > max(1, old.generation):
                assert self.state.generation not in self.worlds
                self.worlds[self.state.generation] = self.state.ids

    def turn(self, who):
        """One turn of a living process; what `reconfigure` does."""
        members = self.worlds[max(self.worlds)]
        if who in self.waits:
            mine = self.waits[who]
            if self.state.generation > mine.generation and who in self.state.ids:
                del self.waits[who]
                self.at[who] = self.state.generation
            elif mine.generation and mine.generation < self.state.generation:
                del self.waits[who]
                self.out.add(who)
            else:
                ended = {each for each in (*members, *self.state.ids) if each in self.ended}
                gone = {each for each in members if each in self.ended | self.out}
                self.tell(
                    next_event(
                        mine,
                        self.state,
                        self.now,
                        ended=ended,
                        unreachable=gone,
                        blamed=self.stopped,
                    )
                )
                waiting = {each.id for each in (*self.state.came, *self.state.waiting)}
                if mine.generation == self.state.generation and who not in waiting:
                    del self.waits[who]
                    self.out.add(who)
        elif self.at[who] and set(self.worlds[self.at[who]]) & (
            self.ended | self.stopped | self.out
        ):
            generation = self.at[who]
            self.tell(come(who, generation, self.size))
            self.waits[who] = Attendance(
                id=who, generation=generation, began_s=self.now, timeout_s=5.0
            )

    def disturb(self):
        living = [each for each in self.at if each not in self.ended | self.out]
        what = self.random.random()
        if what < 0.04 and living:
            self.ended.add(self.random.choice(living))
        elif what < 0.08 and living:
            self.stopped.add(self.random.choice(living))
        elif what < 0.16 and self.stopped:
            self.stopped.discard(self.random.choice(sorted(self.stopped)))
        elif what < 0.20 and self.joined < 3:
            who = f"new{self.joined}"
            self.joined += 1
            self.at[who] = 0
            self.tell(JoinRequest(arrival(who)))
            self.waits[who] = Attendance(id=who, generation=0, began_s=self.now, timeout_s=60.0)

    def living(self):
        return [e for e in self.at if e not in self.ended | self.stopped | self.out]

    def run(self):
        for _ in range(300):
            self.disturb()
            self.settle(0.1)
        # Then nothing happens any more: every process that waits must come to an end.
        self.stopped.clear()
        for _ in range(800):
            self.settle(0.1)
        assert not [who for who in self.waits if who in self.living()]
        groups = {}
        for who in self.living():
            groups.setdefault(self.at[who], set()).add(who)
        whole = [g for g, there in groups.items() if there == set(self.worlds.get(g, ()))]
        assert len(whole) <= 1
        return len(self.worlds)

    def settle(self, seconds):
        self.now += seconds
        for who in self.random.sample(self.living(), len(self.living())):
            self.turn(who)


def test_random_lives_end_in_one_world_without_a_rank_that_waits():
    worlds = [Life(seed).run() for seed in range(150)]
    # The lives are no trivial ones.
    assert sum(number >= 3 for number in worlds) > 30


def test_a_proposal_of_another_generation_changes_nothing():
    state = after(come(0), come(1), come(2), come(3))
    for event in (MembersLost(ids(0), 1), Silent(ids(0), 1), Connected(1), Expired(ids(0)[0], 1)):
        assert apply(state, event) is state
    assert replace(state, lost=()) == state
