"""The shell of the elastic rendezvous over every kind of store, with threads as agents."""

import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from tests.support.together import on_threads
from unisono.core.base.net.interfaces import reachable_hosts
from unisono.core.rendezvous import endpoint
from unisono.core.rendezvous.agents.dynamic import DynamicRendezvous
from unisono.core.rendezvous.agents.member import End, Stop, Timing
from unisono.core.rendezvous.agents.state import (
    AgentsState,
    Failed,
    JobLimits,
    Join,
    Node,
    NodeLost,
    Phase,
    Succeeded,
    dumps,
    loads,
)
from unisono.core.rendezvous.agents.transitions import apply
from unisono.core.rendezvous.agents.worker_world import WorkerWorld
from unisono.core.rendezvous.endpoint import (
    address_here,
    is_of_this_host,
    open_endpoint,
    own_address,
    parse_endpoint,
)
from unisono.core.stores import FileStore, HashStore, PrefixStore, TCPStore
from unisono.core.stores.tcp.token import REFUSED_KEY
from unisono.core.stores.tcp.wire import RequestOp
from unisono.errors import RendezvousError

LIMIT_S = 90.0


class Agent:
    """A rendezvous whose orders are read with a time-out."""

    def __init__(self, number, limits, open_store, **options):
        self.name = f"n{number}"
        node = Node(id=self.name, host=f"h{number}", address="", nprocs=1)
        self._knocks = queue.SimpleQueue()
        self.rendezvous = DynamicRendezvous(
            lambda canceled: (open_store(), "127.0.0.1"),
            node,
            limits,
            replace(
                options.pop("timing", Timing(dead_after_s=LIMIT_S, last_call_s=0.1)),
                poll_s=0.02,
                beat_s=0.2,
            ),
            run_id="job",
            wake=lambda: self._knocks.put(None),
            **options,
        )

    def order(self):
        self._knocks.get(timeout=LIMIT_S)
        return self.rendezvous.next_order()

    def world(self):
        """Wait for a world; end the workers of those that are over."""
        while not isinstance(order := self.order(), WorkerWorld):
            assert isinstance(order, Stop)
            self.rendezvous.stopped()
        return order


@pytest.fixture(params=["hash", "file", "tcp"])
def open_store(request, tmp_path):
    """A function that opens one more handle to the same store."""
    if request.param == "hash":
        shared = HashStore()
        yield lambda: PrefixStore("shared", shared)
        shared.close()
    elif request.param == "file":
        yield lambda: FileStore(str(tmp_path / "store"))
    else:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield lambda: TCPStore("127.0.0.1", server.port)
        server.close()


@pytest.fixture
def agents(open_store):
    started = []

    def start(count, limits, **options):
        new = [Agent(len(started) + i, limits, open_store, **options) for i in range(count)]
        started.extend(new)
        return new

    yield start
    for agent in started:
        agent.rendezvous.close()


def test_agents_agree_on_ranks_and_on_the_workers_store(agents):
    three = agents(3, JobLimits(min_nodes=3, max_nodes=3, max_restarts=0))
    worlds = [agent.world() for agent in three]
    assert sorted(world.group_rank for world in worlds) == [0, 1, 2]
    assert len({world.members for world in worlds}) == 1
    assert {world.epoch for world in worlds} == {1}
    [port] = {world.master_port for world in worlds}
    with TCPStore("127.0.0.1", port) as store:
        store.set("k", "v")


def test_restart_has_a_fresh_store(agents):
    both = agents(2, JobLimits(min_nodes=2, max_nodes=2, max_restarts=1))
    first = [agent.world() for agent in both]
    with TCPStore("127.0.0.1", first[0].master_port) as store:
        store.set("old", "value")
    both[0].rendezvous.report(Failed, 1, original=True, reason="boom")
    for agent in both:
        assert isinstance(agent.order(), Stop)
        agent.rendezvous.stopped()
    second = [agent.world() for agent in both]
    assert [(world.epoch, world.restarts) for world in second] == [(2, 1), (2, 1)]
    assert [w.group_rank for w in first] == [w.group_rank for w in second]
    with TCPStore("127.0.0.1", second[0].master_port) as store:
        assert not store.check(["old"])


def test_a_world_that_ends_before_its_workers_can_start(agents, open_store):
    # The first node is lost before it has opened the workers' store.
    limits = JobLimits(min_nodes=1, max_nodes=2, max_restarts=0)
    first = Node(id="first", host="h", address="", nprocs=1)
    store = PrefixStore("unisono/rendezvous/job", open_store(), owns_store=True)
    store.add("beat/first", 1)
    store.set("state", dumps(apply(AgentsState(), Join(first, limits))))
    [agent] = agents(1, limits)
    with store:
        while (text := store.get("state")) and loads(text).phase is not Phase.RUNNING:
            pass
        assert [node.id for node in loads(text).order] == ["first", agent.name]
        # Its heartbeat shows that the agent has read the state of this world.
        seen = store.add(f"beat/{agent.name}", 0)
        while store.add(f"beat/{agent.name}", 0) < seen + 2:
            pass
        store.set("state", dumps(apply(loads(text), NodeLost("first", "no heartbeat"))))
    # The first order is a world: the agent has no workers that it could stop.
    world = agent.order()
    assert isinstance(world, WorkerWorld)
    assert (world.epoch, [node.id for node in world.members]) == (2, [agent.name])


def test_workers_may_say_that_they_were_the_reason(agents):
    both = agents(2, JobLimits(min_nodes=2, max_nodes=2, max_restarts=0))
    for agent in both:
        agent.world()
    both[0].rendezvous.report(Failed, 1, original=False, reason="peer lost")
    assert both[1].order() == Stop(1, "peer lost", unexplained=True)
    both[1].rendezvous.report(Failed, 1, original=True, reason="boom")
    for agent in both:
        agent.rendezvous.stopped()
        while isinstance(order := agent.order(), Stop):
            pass
        assert order == End(False, "boom")
        assert agent.rendezvous.state.blamed == "n1"


def test_reports_are_exchanged_after_the_end(agents):
    both = agents(2, JobLimits(min_nodes=2, max_nodes=2, max_restarts=0))
    for agent in both:
        agent.world()
    both[1].rendezvous.report(Failed, 1, original=True, reason="boom")
    for agent in both:
        assert isinstance(agent.order(), Stop)
        agent.rendezvous.stopped()
        assert agent.order() == End(False, "boom")
        assert agent.rendezvous.state.blamed == "n1"
    exchanges = [agent.rendezvous.exchange for agent in both]
    texts = on_threads(*map(partial, exchanges, ("zero", "one"), [LIMIT_S] * 2))
    assert [sorted(each) for each in texts] == [["one", "zero"]] * 2


@pytest.mark.sweep(1)
def test_reports_are_not_awaited_of_a_node_that_is_lost_after_the_end(agents):
    limits = JobLimits(min_nodes=2, max_nodes=2, max_restarts=0)
    living, dying = both = agents(2, limits, timing=Timing(dead_after_s=2.0, last_call_s=0.1))
    for agent in both:
        agent.world()
    dying.rendezvous.report(Failed, 1, original=True, reason="boom")
    for agent in both:
        assert isinstance(agent.order(), Stop)
        agent.rendezvous.stopped()
        assert agent.order() == End(False, "boom")
    # It ends without a word.
    dying.rendezvous._leaving = True
    assert living.rendezvous.exchange("text", 20.0) == ["text"]
    assert dying.name not in living.rendezvous.state.present


def test_single_node_restarts_without_pause(agents):
    [agent] = agents(1, JobLimits(min_nodes=1, max_nodes=1, max_restarts=3))
    for epoch in (1, 2, 3, 4):
        world = agent.world()
        assert (world.epoch, world.restarts) == (epoch, epoch - 1)
        if epoch < 4:
            agent.rendezvous.report(Failed, epoch, original=True, reason="boom")
    agent.rendezvous.report(Succeeded, 4)
    agent.rendezvous.stopped()
    assert agent.order() == End(True, "boom")


@pytest.mark.sweep(1)
def test_lost_agent_is_noticed(agents):
    # On a busy machine the second may come a second after the first.
    timing = Timing(dead_after_s=2.0, last_call_s=3.0)
    limits = JobLimits(min_nodes=1, max_nodes=2, max_restarts=0)
    [living, dying] = agents(2, limits, timing=timing)
    assert len(living.world().members) == 2
    dying.world()
    # It stops without a word: its thread ends, nothing is said to the others.
    dying.rendezvous._leaving = True
    world = living.world()
    assert (world.epoch, [node.id for node in world.members]) == (2, ["n0"])


class Halting(PrefixStore):
    """A store whose user stands still after a request, while the other agents go on."""

    def __init__(self, shared, clock):
        super().__init__("shared", shared)
        self.requests_left = 0
        self._clock = clock
        self._halted = threading.Semaphore(0)

    def halt(self, request):
        """Let the user stand still after a request from now on, and wait until it goes on."""
        self.requests_left = request
        assert self._halted.acquire(timeout=LIMIT_S)

    def get(self, key, timeout=None):
        return self._after(super().get(key, timeout))

    def multi_get(self, keys, timeout=None):
        return self._after(super().multi_get(keys, timeout))

    def add(self, key, amount):
        return self._after(super().add(key, amount))

    def check(self, keys, timeout=None):
        return self._after(super().check(keys, timeout))

    def _after(self, answer):
        self.requests_left -= 1
        if self.requests_left == 0:
            beats_of(super(), "n0", 2)
            self._clock.ahead_s = 1000.0 + getattr(self._clock, "ahead_s", 0.0)
            self._halted.release()
        return answer


def beats_of(store, name, count):
    """Wait for heartbeats of an agent."""
    key = f"unisono/rendezvous/job/beat/{name}"
    seen = store.add(key, 0)
    while store.add(key, 0) < seen + count:
        pass


@pytest.fixture
def refusing(monkeypatch):
    """A store without a token, which notes that it has refused a host."""
    monkeypatch.delenv("UNISONO_TOKEN", raising=False)
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as server:
        server._call(RequestOp.COMPARE_SET, REFUSED_KEY, b"", b"10.0.0.9:4242")
        yield server


def test_refused_stranger_does_not_end_a_job_whose_nodes_come(refusing):
    limits = JobLimits(min_nodes=2, max_nodes=2, max_restarts=0)
    open_client = partial(TCPStore, "127.0.0.1", refusing.port)
    first = Agent(0, limits, open_client)
    with closing(first.rendezvous):
        beats_of(refusing, "n0", 3)
        with closing((second := Agent(1, limits, open_client)).rendezvous):
            assert [len(agent.world().members) for agent in (first, second)] == [2, 2]


def test_refused_node_ends_the_wait_for_it_after_the_grace(refusing, monkeypatch):
    monkeypatch.setattr("unisono.core.stores.tcp.client._REFUSAL_GRACE_S", 0.05)
    limits = JobLimits(min_nodes=2, max_nodes=2, max_restarts=0)
    agent = Agent(0, limits, partial(TCPStore, "127.0.0.1", refusing.port))
    with closing(agent.rendezvous):
        end = agent.order()
    assert not end.ok
    assert "the rendezvous store refused 10.0.0.9:4242, which is on another machine" in end.reason
    assert "1 of 2 nodes came (set UNISONO_TOKEN" in end.reason


def test_agent_that_stood_still_takes_no_other_for_lost(monkeypatch):
    # Only the clock of a thread that stood still is ahead.
    clock = threading.local()
    fake = SimpleNamespace(monotonic=lambda: time.monotonic() + getattr(clock, "ahead_s", 0.0))
    monkeypatch.setattr("unisono.core.rendezvous.agents.dynamic.time", fake)
    limits = JobLimits(min_nodes=1, max_nodes=2, max_restarts=0)
    timing = Timing(dead_after_s=LIMIT_S, last_call_s=LIMIT_S)
    with HashStore() as shared:
        plain, halting = PrefixStore("shared", shared), Halting(shared, clock)
        first = Agent(0, limits, lambda: PrefixStore("shared", shared), timing=timing)
        sleeper = Agent(1, limits, lambda: halting, timing=timing)
        with closing(first.rendezvous), closing(sleeper.rendezvous):
            for agent in (first, sleeper):
                agent.world()
            # After each request: some between two heartbeats, some of a heartbeat.
            for request in range(1, 13):
                halting.halt(request)
                beats_of(plain, "n1", 2)
                state = loads(plain.get("unisono/rendezvous/job/state"))
                assert (state.epoch, [n.id for n in state.members]) == (1, ["n0", "n1"])


BEATING = """
import signal
from tests.core.rendezvous.test_dynamic import Agent, HashStore, JobLimits, beats_of
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.alarm(60)
shared = HashStore()
agent = Agent(0, JobLimits(min_nodes=2, max_nodes=2, max_restarts=0), lambda: shared)
print(agent.rendezvous._thread.native_id, flush=True)
while True:
    beats_of(shared, "n0", 2)
    print("beats", flush=True)
    input()
"""


@pytest.mark.linux("sends a signal to a thread")
def test_heartbeats_go_on_if_a_signal_came_while_the_agent_was_stopped():
    command = [sys.executable, "-c", BEATING]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, bufsize=1) as agent:
        try:
            thread = int(agent.stdout.readline())
            for _ in range(5):
                assert agent.stdout.readline() == "beats\n"
                agent.send_signal(signal.SIGSTOP)
                os.waitpid(agent.pid, os.WUNTRACED)
                time.sleep(0.05)  # longer than the pause of the thread, which is in it mostly
                assert ctypes.CDLL(None).tgkill(agent.pid, thread, signal.SIGUSR1) == 0
                agent.send_signal(signal.SIGCONT)
                agent.stdin.write("\n")
        finally:
            agent.kill()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", ("host", 29400)),
        ("host:1", ("host", 1)),
        ("[fd00::1]:7", ("fd00::1", 7)),
        ("[fd00::1]", ("fd00::1", 29400)),
        ("fd00::1", ("fd00::1", 29400)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
    ],
)
def test_endpoints(text, expected):
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize("text", ["", ":1", "host:", "host:x", "host:65536", "host:-1"])
def test_endpoints_that_are_none(text):
    with pytest.raises(RendezvousError):
        parse_endpoint(text)


def test_published_address_belongs_to_this_host_by_its_ports(monkeypatch):
    monkeypatch.setenv("UNISONO_PUBLISH", "192.0.2.7")
    assert not is_of_this_host(
        "192.0.2.7", 7000
    )  # perhaps another machine's behind the same router
    assert address_here("192.0.2.7") == "localhost"
    assert address_here("127.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("UNISONO_PORTS", "7000-7003")
    assert is_of_this_host("192.0.2.7", 7003)
    assert not is_of_this_host("192.0.2.8", 7003)
    assert not is_of_this_host("192.0.2.7", 7004)  # another container's
    assert own_address("192.0.2.8") == "192.0.2.7"


def test_local_addresses():
    assert is_of_this_host("127.0.0.1")
    assert is_of_this_host("localhost")
    assert not is_of_this_host("192.0.2.1")  # reserved for documentation
    assert not is_of_this_host("no.such.host.invalid")
    assert is_of_this_host(f"{socket.gethostname()}.no.such.domain.invalid")
    # Other nodes cannot use what means this host to everyone.
    for host in ("127.0.0.1", "localhost", "0.0.0.0", "::"):
        assert own_address(host) in (reachable_hosts() or [host])


def test_first_agent_on_the_host_serves_the_store(port):
    options = {"hosting": None, "timeout_s": LIMIT_S, "read_timeout_s": 5.0}
    first = open_endpoint("127.0.0.1", port, canceled=lambda: False, **options)
    second = open_endpoint("127.0.0.1", port, canceled=lambda: False, **options)
    try:
        assert (first.is_master, second.is_master) == (True, False)
        with pytest.raises(RendezvousError, match="cannot host the rendezvous"):
            open_endpoint(
                "127.0.0.1", port, canceled=lambda: False, **(options | {"hosting": True})
            )
    finally:
        second.close()
        first.close()


@pytest.mark.parametrize(("token", "served"), [("", "127.0.0.1"), ("secret", "::")])
def test_localhost_is_open_to_other_nodes_only_with_a_token(token, served, port, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UNISONO_TOKEN", token)
    options = {"hosting": None, "timeout_s": LIMIT_S, "read_timeout_s": 5.0}
    with open_endpoint("127.0.0.1", port, canceled=lambda: False, **options) as store:
        assert store.host == served


def test_host_that_does_not_answer_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(endpoint, "_QUIET_S", 0.0)
    monkeypatch.setattr(endpoint, "_SLICE_S", 0.01)
    turns = iter([False] * 3 + [True])
    options = {"hosting": False, "timeout_s": LIMIT_S, "read_timeout_s": 5.0}
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"no rendezvous at 127.0.0.1:{port} within"):
            open_endpoint("127.0.0.1", port, canceled=lambda: next(turns), **options)
    assert len(caplog.records) == 1
    assert caplog.messages[0].startswith(f"no rendezvous at 127.0.0.1:{port} yet: ")
