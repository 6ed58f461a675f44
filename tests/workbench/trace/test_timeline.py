"""The time axis of several hosts, and the timeline in Chrome's format."""

import json
import random
from collections import defaultdict

import pytest

from tests.workbench.trace.test_analysis import SECOND, record, world
from unisono.core.recorder.flight_recorder import GroupRecords, Origin, RankRecords
from unisono.workbench.trace.chrome import chrome_trace
from unisono.workbench.trace.clocks import Trip, align
from unisono.workbench.trace.joined import by_rank, join, shifted

AHEAD_NS = 1_700_000_000 * SECOND


class Hosts:
    """Ranks on hosts whose clocks are wrong by known times, and calls at known true times."""

    def __init__(self, seed, places):
        self.draw = random.Random(seed)
        self.places = places
        # What a host's monotonic and wall clocks are ahead of the truth.
        self.clocks = {
            host: (self.draw.randrange(10**15), self.draw.randrange(-(10**9), 10**9))
            for host in places
        }
        self.records = [[] for _ in places]
        self.now_ns = 10**12

    def wall(self, rank, true_ns):
        return true_ns + AHEAD_NS + self.clocks[self.places[rank]][1]

    def call(self, op, ranks):
        """Each rank begins within 1 ms, and ends when the last has begun and some time is over."""
        begun = {rank: self.now_ns + self.draw.randrange(10**6) for rank in ranks}
        for rank, begin_ns in begun.items():
            end_ns = max(begun.values()) + self.draw.randrange(10_000, 100_000)
            self.add(rank, op, begin_ns, end_ns)
        self.now_ns += 2 * 10**6

    def message(self, source, target):
        begin_ns = self.now_ns + self.draw.randrange(10**6)
        self.add(source, "send", begin_ns, begin_ns + 1000, peer=target)
        end_ns = begin_ns + self.draw.randrange(10_000, 100_000)
        self.add(target, "recv", self.now_ns, end_ns, peer=source)
        self.now_ns += 2 * 10**6

    def add(self, rank, op, begin_ns, end_ns, **more):
        mine = self.records[rank]
        same = sum((each.op in ("send", "recv")) == (op in ("send", "recv")) for each in mine)
        begin_ns, end_ns = self.wall(rank, begin_ns), self.wall(rank, end_ns)
        times = {"enqueued_ns": begin_ns, "started_ns": begin_ns, "ended_ns": end_ns}
        mine.append(record(len(mine) + 1, op, seq=same + 1, **times, **more))

    def ranks(self):
        """Return what the ranks have recorded; the wall clock of `read` is that of the host."""
        found = []
        for rank, (host, mine) in enumerate(zip(self.places, self.records, strict=True)):
            monotonic = self.now_ns + self.clocks[host][0]
            origin = Origin(host, rank, f"boot {host}", monotonic, self.wall(rank, self.now_ns))
            group = GroupRecords("0", "default", tuple(range(len(self.places))), mine)
            found.append(RankRecords(rank, [group], origin))
        return by_rank(found)

    def wrong_ns(self, axis):
        """Return how far the times of each host are wrong on an axis, by host."""
        reference = self.clocks[self.places[0]][1]
        return {
            host: abs(axis.shift_ns[rank] + self.clocks[host][1] - reference)
            for rank, host in enumerate(self.places)
            if host != self.places[0]
        }


@pytest.mark.parametrize("seed", range(20))
def test_clocks_are_wrong_by_no_more_than_the_stated_error(seed):
    hosts = Hosts(seed, ["a", "a", "b", "c", "b"])
    for _ in range(20):
        hosts.call("all_reduce", range(5))
        hosts.call("broadcast", range(5))  # says nothing about the clocks
    ranks = hosts.ranks()
    axis = align(ranks, join(ranks))
    wrong = hosts.wrong_ns(axis)
    assert wrong.keys() == axis.error_ns.keys() == {"b", "c"}
    for host, wrong_ns in wrong.items():
        # Two ranks that come last in turn bound the clocks from both sides, within 0.1 ms each.
        assert wrong_ns <= axis.error_ns[host] < 600_000
    assert axis.shift_ns[0] == axis.shift_ns[1] == 0
    assert "error at most" in str(axis)


@pytest.mark.parametrize("seed", range(10))
def test_clocks_along_a_path_of_messages(seed):
    hosts = Hosts(seed, ["a", "b", "c"])
    for _ in range(5):
        for source, target in ((0, 1), (1, 0), (1, 2), (2, 1)):
            hosts.message(source, target)
    ranks = hosts.ranks()
    axis = align(ranks, join(ranks))
    wrong = hosts.wrong_ns(axis)
    assert wrong["b"] <= axis.error_ns["b"] <= 100_000
    assert wrong["c"] <= axis.error_ns["c"] <= 200_000


def test_clocks_without_calls_are_asked_or_unknown():
    hosts = Hosts(3, ["a", "b"])
    hosts.message(0, 1)  # in one direction only
    hosts.call("broadcast", [0, 1])
    ranks = hosts.ranks()
    axis = align(ranks, join(ranks))
    assert (axis.shift_ns[1], axis.error_ns, axis.worst_ns()) == (0, {"b": None}, None)
    assert str(axis) == "time axis: clock of a; wall clocks with unknown error: b"
    trips = [
        Trip("viewer", 5000, f"boot {host}", hosts.clocks[host][0] + 5300, 6000)
        for host in ("a", "b")
    ]
    axis = align(ranks, join(ranks), trips)
    assert hosts.wrong_ns(axis)["b"] <= axis.error_ns["b"] < 1100


def test_one_clock_has_no_error():
    hosts = Hosts(1, ["a", "a"])
    hosts.call("all_reduce", [0, 1])
    ranks = hosts.ranks()
    axis = align(ranks, join(ranks))
    assert (axis.shift_ns, str(axis)) == ({0: 0, 1: 0}, "time axis: one clock, error 0")


# ---- Chrome's format --------------------------------------------------------------------------


def parse(document):
    """Check a document by the rules of the format; return slices, arrows and queued parts."""
    events = json.loads(json.dumps(document))["traceEvents"]
    slices, flows, queued = defaultdict(list), defaultdict(dict), defaultdict(dict)
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    threads = [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"]
    # Perfetto takes threads of one number for one thread, also if their processes differ.
    assert len({thread for _, thread in threads} | named) == len(threads) + len(named)
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} <= event.keys()
        assert event["pid"] in named
        place = event["pid"], event["tid"]
        if event["ph"] == "X":
            assert place in threads
            assert event["dur"] > 0 <= event["ts"]
            # As Perfetto reads it: cut to nanoseconds.
            begin_ns = int(event["ts"] * 1000)
            slices[place].append((begin_ns, begin_ns + int(event["dur"] * 1000), event))
        elif event["ph"] in "sf":
            assert event["ph"] not in flows[event["id"]]
            flows[event["id"]][event["ph"]] = event
        elif event["ph"] in "be":
            key = event["pid"], event["id2"]["local"]
            assert event["ph"] not in queued[key]
            queued[key][event["ph"]] = event
        else:
            assert event["ph"] == "M"
    for mine in slices.values():
        # Sorted so that a slice comes before those inside it.
        ends = []
        for begin, end, _ in sorted(mine, key=lambda each: (each[0], -each[1])):
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1], "slices of one track overlap"
            ends.append(end)
    for flow in flows.values():
        assert flow.keys() == {"s", "f"}
        assert flow["f"]["bp"] == "e"
        for end in flow.values():
            around = slices[end["pid"], end["tid"]]
            at_ns = int(end["ts"] * 1000)
            assert any(begin <= at_ns <= till for begin, till, _ in around)
    for pair in queued.values():
        assert pair.keys() == {"b", "e"}
        assert pair["b"]["ts"] <= pair["e"]["ts"]
    return [each for mine in slices.values() for _, _, each in mine], flows, queued


def arrows_of(flows):
    return sorted((f["s"]["name"], f["s"]["pid"], f["f"]["pid"]) for f in flows.values())


def test_timeline_of_a_small_world():
    second = [
        record(1, at_s=2, took_s=1),
        record(2, "send", seq=1, at_s=4, took_s=0.1, peer=0),
        record(3, seq=2, at_s=5, took_s=None),
        record(4, seq=3, at_s=5.5, took_s=None, started_ns=None, outcome="queued"),
    ]
    first = [
        record(1, at_s=1, took_s=2, waited_ns=SECOND, waited_for=1, algorithm="ring"),
        record(2, "recv", seq=1, at_s=3, took_s=2, peer=1),
        record(3, "recv", seq=2, at_s=4, took_s=None, peer=1),
    ]
    ranks = world(first, second)
    document = chrome_trace(ranks, join(ranks), align(ranks, join(ranks)))
    slices, flows, queued = parse(document)
    assert arrows_of(flows) == [("last rank", 1, 0), ("message", 1, 0)]
    assert sorted((s["pid"], s["name"], s["ts"], round(s["dur"])) for s in slices) == [
        (0, "all_reduce #1", 0, 2e6),
        (0, "recv #1", 2e6, 2e6),
        (0, "recv #2 under way", 3e6, 56e6),
        (0, "waits for rank 1", 0, 1e6),
        (0, "waits for rank 1", 2e6, 1e6),
        (1, "all_reduce #1", 1e6, 1e6),
        (1, "all_reduce #2 under way", 4e6, 55e6),
        (1, "send #1", 3e6, 1e5),
    ]
    args = next(s["args"] for s in slices if (s["pid"], s["name"]) == (0, "all_reduce #1"))
    assert args == {
        **{"number": 1, "dtype": "float32", "count": 4, "bytes": 16, "algorithm": "ring"},
        **{"route": "messages", "call site": "train.py:8 in step", "outcome": "completed"},
        **{"waited us": 1e6, "waited for rank": 1},
    }
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"].endswith("_name")]
    # Two receives overlap, so they have two rows.
    assert names == [
        *("rank 0 (h, pid 1)", "default", "default, messages", "default, messages"),
        *("rank 1 (h, pid 1)", "default", "default, messages"),
    ]
    [part] = queued.values()
    assert (part["b"]["ts"], part["e"]["ts"]) == (4.5e6, 59e6)


def test_message_that_is_queued_has_no_slice():
    """NCCL queues messages, too."""
    first = [record(1, "send", at_s=4, took_s=0.1, peer=1)]
    second = [record(1, "recv", at_s=3, took_s=None, started_ns=None, outcome="queued", peer=0)]
    ranks = world(first, second)
    slices, flows, queued = parse(chrome_trace(ranks, join(ranks), align(ranks, join(ranks))))
    assert [(each["pid"], each["name"]) for each in slices] == [(0, "send #1")]
    assert arrows_of(flows) == []
    assert len(queued) == 1


@pytest.mark.parametrize("seed", range(10))
def test_timeline_of_random_hosts(seed):
    hosts = Hosts(seed, ["a", "a", "b", "b"])
    for _ in range(40):
        if hosts.draw.random() < 0.5:
            hosts.call("all_reduce", range(4))
        else:
            hosts.message(*hosts.draw.sample(range(4), 2))
    ranks = hosts.ranks()
    axis = align(ranks, join(ranks))
    ranks = shifted(ranks, axis.shift_ns)
    slices, flows, _ = parse(chrome_trace(ranks, join(ranks), axis))
    assert sum(s["name"].startswith("recv") for s in slices) == sum(
        flow["s"]["name"] == "message" for flow in flows.values()
    )
    # Arrows point to the future, up to the error of the axis.
    slack_us = axis.worst_ns() / 1e3
    assert all(flow["s"]["ts"] <= flow["f"]["ts"] + 2 * slack_us for flow in flows.values())
