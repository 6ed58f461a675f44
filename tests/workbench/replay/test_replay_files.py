"""`unisono replay`: other numbers of ranks, files of torch and of Chakra, and what it refuses."""

import json

import pytest

from tests.support import dumps
from tests.support.dumps import DEFAULT, HALF, entry
from tests.workbench.replay.test_replay import SECOND, US, begun, blocking, own, steps_of
from tests.workbench.trace.test_analysis import record
from unisono.core.recorder.flight_recorder import GroupRecords
from unisono.errors import InvalidArgumentError
from unisono.workbench.cli.main import main
from unisono.workbench.cli.trace.gather import read_files
from unisono.workbench.replay import chakra
from unisono.workbench.replay.engine import play
from unisono.workbench.replay.job import MESSAGE, Job, JobCall, JobGroup, JobStep
from unisono.workbench.replay.pricing import RecordedTimes
from unisono.workbench.replay.records import job_of
from unisono.workbench.replay.scale import Replicas, replicas_of, resized
from unisono.workbench.trace.joined import by_rank, join

# ---- other numbers of ranks -------------------------------------------------------------------


def grid(names=("tp", "dp"), *, op="all_gather"):
    """Return a job of 4 ranks: tensor groups (0, 1), (2, 3), data groups (0, 2), (1, 3)."""
    tensor, data = names
    groups = [
        JobGroup("all", (0, 1, 2, 3)), JobGroup(tensor, (0, 1)), JobGroup(tensor, (2, 3)),
        JobGroup(data, (0, 2)), JobGroup(data, (1, 3)),
    ]  # fmt: skip
    calls = [
        JobCall(f"{op} #1", "all_reduce" if number < 3 else op, number, group.ranks, 64, 4, "ring")
        for number, group in enumerate(groups)
    ]
    calls.append(JobCall("send #1", MESSAGE, 0, (2, 3), 8))
    steps = [
        [blocking(rank + 1, n) for n, call in enumerate(calls) if rank in call.members]
        for rank in range(4)
    ]
    return Job(groups, calls, steps, [0, 1, 2, 3], [], [])


def test_replicas_are_copied_and_the_data_groups_grow():
    job = grid()
    replicas = replicas_of(job, ())
    assert replicas == Replicas(2, 2)
    new, origins = resized(job, [0, 1, 0, 1], replicas, (), blocks=False)
    assert origins == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [(group.name, group.ranks) for group in new.groups] == [
        ("all", tuple(range(8))), ("tp", (0, 1)), ("tp", (4, 5)), ("tp", (2, 3)), ("tp", (6, 7)),
        ("dp", (0, 2, 4, 6)), ("dp", (1, 3, 5, 7)),
    ]  # fmt: skip
    by_name = {(new.groups[call.group].name, call.members): call for call in new.calls}
    # Shards of all ranks together keep their size; the algorithm is chosen again.
    assert by_name["dp", (0, 2, 4, 6)].nbytes == 64
    assert (by_name["dp", (0, 2, 4, 6)].algorithm, by_name["tp", (4, 5)].algorithm) == ("", "ring")
    assert [call.members for call in new.calls if call.op == MESSAGE] == [(2, 3), (6, 7)]
    assert new.start_ps == [0, 1, 2, 3] * 2
    for rank, steps in enumerate(new.steps):
        assert all(rank in new.calls[step.call].members for step in steps)
        assert [step.gap_ps for step in steps] == [(rank % 4 + 1) * US] * len(job.steps[rank % 4])
    blocks, _ = resized(job, [0, 1, 0, 1], replicas, (), blocks=True)
    assert {call.nbytes for call in blocks.calls if len(call.members) == 4} == {128}


def test_half_of_the_replicas():
    new, origins = resized(grid(), [1], Replicas(2, 2), (), blocks=False)
    assert origins == [2, 3]
    assert [(group.name, group.ranks) for group in new.groups] == [
        ("all", (0, 1)), ("tp", (0, 1)), ("dp", (0,)), ("dp", (1,)),
    ]  # fmt: skip
    assert [call.members for call in new.calls] == [(0, 1), (0, 1), (0,), (1,), (0, 1)]


def test_expert_groups_inside_blocks_of_replicas_are_copied():
    groups = [JobGroup("dp", (0, 1, 2, 3)), JobGroup("ep", (0, 1)), JobGroup("ep", (2, 3))]
    calls = [JobCall("c", "all_to_all", n, g.ranks, 8) for n, g in enumerate(groups)]
    steps = [[blocking(1, 0), blocking(1, 1 + rank // 2)] for rank in range(4)]
    job = Job(groups, calls, steps, [0] * 4, [], [])
    replicas = replicas_of(job, ())
    new, _ = resized(job, [0, 1, 2, 3, 0, 1], replicas, (), blocks=False)
    assert [g.ranks for g in new.groups] == [(0, 1, 2, 3, 4, 5), (0, 1), (4, 5), (2, 3)]
    with pytest.raises(InvalidArgumentError) as caught:
        resized(job, [0, 1, 2, 3, 0], replicas, (), blocks=False)
    expected = (
        "replay: --ranks: it is not clear how group 'ep' (ranks 0, 1) changes: 5 replicas cut it"
    )
    assert caught.value.what == expected
    assert "replay: --ranks: it is not clear how group '" in expected


_UNKNOWN = "it is not known which group has a rank of each data-parallel replica (groups: "


@pytest.mark.parametrize(
    ("names", "grow", "expected"),
    [
        (
            ("a", "b"),
            (),
            _UNKNOWN,
        ),
        (
            ("dp", "data"),
            (),
            _UNKNOWN,
        ),
        (("a", "b"), ("c",), ": there is no group of that name with evenly spaced ranks (groups: "),
    ],
)
def test_what_is_not_clear_is_refused(names, grow, expected):
    with pytest.raises(InvalidArgumentError) as caught:
        replicas_of(grid(names), grow)
    assert expected in caught.value.what
    assert replicas_of(grid(names), ("b" if "b" in names else "data",)) == Replicas(2, 2)


def test_groups_between_some_replicas_are_refused():
    groups = [JobGroup("dp", (0, 1, 2, 3)), JobGroup("x", (0, 2)), JobGroup("x", (1, 3))]
    calls = [JobCall("c", "all_reduce", n, g.ranks, 8) for n, g in enumerate(groups)]
    steps = [[blocking(1, 0), blocking(1, 1 + rank % 2)] for rank in range(4)]
    job = Job(groups, calls, steps, [0] * 4, [], [])
    with pytest.raises(InvalidArgumentError, match=r"group 'x'.*: its replicas are not neighbours"):
        resized(job, [0, 1, 2, 3] * 2, Replicas(4, 1), (), blocks=False)
    new, _ = resized(job, [0, 1, 2, 3] * 2, Replicas(4, 1), ("dp", "x"), blocks=False)
    assert [g.ranks for g in new.groups[1:]] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_a_lost_host_takes_its_replicas(tmp_path, capsys):
    own(tmp_path, *[steps_of(0)] * 6)
    net, out = tmp_path.parent / f"{tmp_path.name}.toml", tmp_path.parent / f"{tmp_path.name}.json"
    net.write_text("ranks_per_host = 2\nlatency_us = 1000\n")
    words = ["replay", str(tmp_path), "--net", str(net), "--json", str(out)]
    assert main([*words, "--lose-host", "1"]) == 0
    assert json.loads(out.read_text())[1]["ranks"] == 4
    assert main([*words, "-p", "12", "--lose-host", "5"]) == 0
    assert json.loads(out.read_text())[1]["ranks"] == 10
    assert main([*words, "--lose-host", "3"]) == 1
    assert " replicas have ranks on it, expected some and not all" in capsys.readouterr().err


# ---- torch's files ----------------------------------------------------------------------------


def test_a_dump_of_nccl(tmp_path):
    """Calls of 1 us, 1 ms after the one before, of which the GPU of rank 1 begins one later."""
    late = {"time_discovered_started_ns": 1_700_000_000_002_000_400}
    ranks = [
        [entry(1, 1, "all_reduce", DEFAULT), entry(2, 2, "_allgather_base", DEFAULT, **more)]
        for more in ({}, late)
    ]
    files = dumps.write(tmp_path, [dumps.dump(each, g0=(0, 1)) for each in ranks])
    found = by_rank(read_files(files))
    job = job_of(found, join(found))
    assert [(c.op, c.nbytes, c.itemsize) for c in job.calls] == [
        ("all_reduce", 16, 4), ("all_gather", 32, 4),
    ]  # fmt: skip
    run = play(job, RecordedTimes(job))
    assert run.begins[1] == {0: 1000 * US, 1: 1000 * US + 400_000}
    assert run.end_ps(0) == run.end_ps(1) == 1001 * US


def test_calls_that_overlap_are_asynchronous(tmp_path):
    """The call of the half ends after the next of the default group has begun."""
    long = {"time_discovered_completed_ns": 1_700_000_000_002_500_000}
    mine = [
        entry(1, 1, "all_reduce", HALF, **long), entry(2, 1, "all_reduce", DEFAULT),
        entry(3, 2, "all_reduce", DEFAULT),
    ]  # fmt: skip
    files = dumps.write(tmp_path, [dumps.dump(mine, g0=(0, 1), g1=(0, 1))] * 2)
    found = by_rank(read_files(files))
    job = job_of(found, join(found))
    kinds = [
        (job.groups[job.calls[step.call].group].name, step.makes, step.waits)
        for step in job.steps[0]
    ]
    assert kinds == [
        ("half", True, False), ("default_pg", True, True), ("half", False, True),
        ("default_pg", True, True),
    ]  # fmt: skip


def test_the_item_of_several_tensors_is_that_of_their_type(tmp_path):
    mine = [
        entry(
            n, n, "allreduce_coalesced", DEFAULT, input_sizes=[[4], [4, 4]], input_dtypes=[of] * 2
        )
        for n, of in enumerate(("Float", "Half", "ComplexDouble", "Bool", "Float8_e5m2"), 1)
    ]
    files = dumps.write(tmp_path, [dumps.dump(mine, g0=(0, 1))] * 2)
    found = by_rank(read_files(files))
    assert [(c.itemsize, c.nbytes) for c in job_of(found, join(found)).calls] == [
        (4, 80), (2, 40), (16, 320), (1, 20), (1, 20),
    ]  # fmt: skip


def test_a_dump_of_gloo_has_no_ends(tmp_path, capsys):
    mine = [dumps.gloo_entry(n, n, "allreduce", DEFAULT) for n in (1, 2, 3)]
    files = dumps.write(tmp_path, [dumps.gloo_dump(mine, (0, 1))] * 2)
    assert main(["replay", *files]) == 0
    text = capsys.readouterr().out
    assert "the files have no ends of calls: the time of calls counts as compute" in text
    assert "all 2,000.0 us, exposed 0.0%, 2 ranks" in text


# ---- Chakra -----------------------------------------------------------------------------------


def varint(value):
    value &= (1 << 64) - 1
    found = bytearray()
    while True:
        byte, value = value & 127, value >> 7
        found.append(byte | (128 if value else 0))
        if not value:
            return bytes(found)


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def node(number, kind, *deps, us=0, **attributes):
    found = field(1, number) + field(2, f"node {number}") + field(3, kind)
    found += field(5, b"".join(map(varint, deps))) if deps else b""
    found += field(7, us)
    for name, value in attributes.items():
        place = 29 if isinstance(value, str) else 9
        found += field(10, field(1, name) + field(place, value))
    return found


def trace(*nodes):
    messages = [field(1, "0.0.4"), *nodes]
    return b"".join(varint(len(each)) + each for each in messages)


COMP, SEND, RECV, COLL = 4, 5, 6, 7


def step_of(first, rank):
    """Compute 30 us, an all_reduce beside 20 us, and 10 us after it."""
    return [
        node(first, COMP, *([first - 1] if first > 1 else []), us=30 + rank),
        node(first + 1, COLL, first, comm_type=0, comm_size=4000, pg_name="dp"),
        node(first + 2, COMP, first, us=20),
        node(first + 3, COMP, first + 1, first + 2, us=10),
    ]


def test_a_chakra_trace(tmp_path, capsys):
    for rank in range(2):
        content = trace(*[each for n in range(5) for each in step_of(1 + 4 * n, rank)])
        (tmp_path / f"job.{rank}.et").write_bytes(content)
    net, out = tmp_path.parent / f"{tmp_path.name}.toml", tmp_path.parent / f"{tmp_path.name}.json"
    # 2 ranks exchange all: latency + 4000 / 1000 us. If that is hidden, the slower rank counts, and
    # else each rank waits for the message of the other, so that a step takes the mean of the two.
    for latency, step_us in ((3, 31 + 20 + 10), (33, 30.5 + 37 + 10)):
        net.write_text(f'topology = "full"\nlatency_us = {latency}\ngbps = 1.0\n')
        words = ["replay", str(tmp_path), "--net", str(net), "--json", str(out)]
        assert main(words) == 0
        (predicted,) = json.loads(out.read_text())
        assert predicted["step_us"] == pytest.approx(step_us)
        assert predicted["groups"][0]["group"] == "dp"
    assert main(["replay", str(tmp_path)]) == 1
    assert "replay: the files have no times of calls: give --net" in capsys.readouterr().err


def test_messages_and_deps_of_chakra():
    sends = [node(1, COMP, us=5), node(2, SEND, 1, comm_src=0, comm_dst=1, comm_size=10)]
    takes = [node(1, RECV, comm_src=0, comm_dst=1, comm_size=10), node(2, COMP, 1, us=7)]
    job = chakra.job_of({0: chakra.nodes_of(trace(*sends)), 1: chakra.nodes_of(trace(*takes))})
    assert [(c.op, c.members, c.nbytes) for c in job.calls] == [(MESSAGE, (0, 1), 10)]
    assert job.steps[1][:2] == [JobStep(0, 0, makes=True), JobStep(0, 0, waits=True)]
    assert job.steps[1][2] == JobStep(7 * US)


@pytest.mark.parametrize("kind", [COLL, SEND])
def test_sizes_whose_times_do_not_fit_are_refused(tmp_path, capsys, kind):
    """They had times of 0, or a KeyError."""
    for size, expected in (
        (10**17, "#1 has 100000000000000000 bytes, expected at most 1125899906842624"),
        ((1 << 50) - 8, " s on a link, expected at most 10000 s"),
    ):
        for rank in range(2):
            kinds = kind + (kind == SEND) * rank
            ends = {"comm_src": 0, "comm_dst": 1} if kind == SEND else {"comm_type": 0}
            content = trace(node(1, kinds, comm_size=size, **ends))
            (tmp_path / f"job.{rank}.et").write_bytes(content)
        assert main(["replay", str(tmp_path), "--net", "ethernet-25"]) == 1
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (
            [[node(1, COMP, 2), node(2, COMP, 1)]],
            " nodes of the Chakra trace depend on each other in a circle",
        ),
        ([[node(1, COLL, comm_type=17)]], "rank 0: node 1 has comm_type 17, expected 0 to 9"),
        (
            [[node(1, COLL, comm_size=8)], [node(1, COLL, comm_size=9)]],
            "replay: all_reduce #1 is all_reduce of 8 bytes, and all_reduce of 9 bytes on rank 1",
        ),
        (
            [[node(1, COLL), node(2, COLL)], [node(1, COLL)]],
            "all_reduce #2 of group 'all ranks' is made by rank 0, but not by rank 1",
        ),
        *(
            ([[node(1, COLL, comm_size=size)]], " has comm_size .*, expected a number of 0 or more")
            for size in (-1, "many")
        ),
    ],
)
def test_wrong_chakra_traces(nodes, expected):
    with pytest.raises(InvalidArgumentError, match=expected):
        chakra.job_of({r: chakra.nodes_of(trace(*each)) for r, each in enumerate(nodes)})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05ab",
        b"\xff" * 12,
        trace(),
        trace(b"\x0f"),
        trace(b"\x0a\x7fab"),
        b"\x00\x02\x0b\x01",
    ],
)
def test_no_chakra_trace(content):
    is_none(content)


def is_none(content):
    with pytest.raises(InvalidArgumentError, match="this is no Chakra trace: "):
        chakra.nodes_of(content)


def wired(number, kind):
    """Return a field of a wire type."""
    value = {0: b"\x01", 1: b"\x01" * 8, 2: b"\x02ab", 5: b"\x01" * 4}[kind]
    return varint(number << 3 | kind) + value


@pytest.mark.parametrize("kind", [0, 1, 2, 5])
def test_wrong_wire_types_of_chakra(kind):
    attribute = {
        0: (7, 9, 11, 13, 15, 17, 27), 1: (3, 21, 25), 2: (1, 29, 4, 31), 5: (5, 19, 23),
    }  # fmt: skip
    node_fields = {0: (1, 3, 7), 1: (), 2: (2, 10), 5: ()}
    for right, numbers in attribute.items():
        for number in numbers:
            content = trace(field(10, wired(number, kind)))
            if kind == right or number in (4, 31):
                assert len(chakra.nodes_of(content)) == 1
            else:
                is_none(content)
    for right, numbers in node_fields.items():
        for number in numbers:
            if kind != right:
                is_none(trace(wired(number, kind)))
    for number in (4, 5):
        if kind in (1, 5):
            is_none(trace(wired(number, kind)))
        else:
            assert chakra.nodes_of(trace(wired(number, kind)))[0].deps


def test_nodes_have_numbers_of_their_own():
    with pytest.raises(InvalidArgumentError, match=r"no Chakra trace: 2 nodes have the number 7$"):
        chakra.nodes_of(trace(node(1, COMP), node(7, COMP), node(7, COLL)))


# ---- refusals ---------------------------------------------------------------------------------


def call(*words, capsys):
    assert main(["replay", *map(str, words)]) == 1
    return capsys.readouterr().err


def test_wrong_files_are_named(tmp_path, capsys):
    bad = tmp_path / "trace_rank_0"
    bad.write_bytes(b"nothing")
    assert f"cannot read {bad}: this is no file of a flight recorder" in call(bad, capsys=capsys)
    other = tmp_path / "job.0.et"
    other.write_bytes(b"\x05ab")
    assert f"replay: cannot read {other}: this is no Chakra" in call(other, capsys=capsys)
    assert f"replay: {bad} is no Chakra trace" in call(bad, other, capsys=capsys)
    nameless = tmp_path / "job.et"
    nameless.write_bytes(b"")
    assert f"replay: the name of {nameless} does not end in RANK.et" in call(
        nameless, capsys=capsys
    )
    bad.unlink()
    first, second = tmp_path / "a.2.et", tmp_path / "b.02.et"
    for each in (first, second):
        each.write_bytes(trace(node(1, COLL)))
    expected = f"replay: {first} and {second} are both of rank 2"
    assert expected in call(first, second, capsys=capsys)
    assert " are both of rank " in expected
    assert "replay: no file of rank 0, or ranks are not" in call(first, capsys=capsys)
    for each in (first, second):
        each.unlink()
    own(tmp_path, steps_of(0), steps_of(1))
    (tmp_path / "trace_rank_0").unlink()
    assert "replay: no file of rank 0, or ranks are not numbered from 0" in call(
        tmp_path / "trace_rank_1", capsys=capsys
    )
    assert "replay: there are no records" in call(tmp_path / "empty" / "", capsys=capsys) or True


def test_wrong_records_are_named(tmp_path):
    def refused(*ranks):
        found = own(tmp_path, *ranks)
        with pytest.raises(InvalidArgumentError) as caught:
            job_of(found, join(found))
        return caught.value.what

    one, two, three = (begun(record(n, at_s=n)) for n in (1, 2, 3))
    assert refused([one, two, three], [one, three]) == (
        "replay: group 'default': all_reduce #2 has not ended on rank 1, but a later call has"
    )
    assert refused([one], [begun(record(1, "broadcast", at_s=1))]) == (
        "replay: group 'default': call #1 is all_reduce on rank 0 and broadcast on rank 1"
    )
    assert refused([record(1, took_s=None)], [one]) == (
        "replay: no call has ended on all ranks of its group"
    )


def test_calls_at_the_end_that_have_not_ended_are_left_out(tmp_path, capsys):
    own(tmp_path, [*steps_of(0), record(11, at_s=60, took_s=None)], steps_of(1))
    assert main(["replay", str(tmp_path)]) == 0
    assert "left out, its time counts as compute: all_reduce (1)" in capsys.readouterr().out


def test_a_message_of_a_rank_to_itself_is_left_out(tmp_path, capsys):
    own(
        tmp_path,
        [begun(record(1)), record(1, "send", at_s=1, peer=0), record(1, "recv", at_s=2, peer=0)],
    )
    assert main(["replay", str(tmp_path)]) == 0
    assert "left out, its time counts as compute: message (2)" in capsys.readouterr().out


def test_messages_are_replayed(tmp_path):
    send = record(1, "send", at_s=1, took_s=0.5, peer=1)
    takes = record(1, "recv", at_s=0, took_s=2, peer=0)
    ranks = own(tmp_path, [send], [takes])
    job = job_of(ranks, join(ranks))
    run = play(job, RecordedTimes(job))
    assert run.ends == [{0: 3 * SECOND // 2, 1: 2 * SECOND}]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-p", "4"], "replay: -n needs --net"),
        (["--slow-link", "interface 0=2", "--place", "turn"], "replay: --slow-link, --place needs"),
        (["--slow", "7=2"], "replay: --slow 7: expected a rank of 0 to 1"),
        (["--net", "switch", "--place", "0,0"], " places, expected each of 0 to "),
        (
            ["--net", "switch", "--slow-link", "wire 0=2"],
            "replay: there is no link 'wire 0'; links",
        ),
        (["--net", "switch", "-p", "3", "--hosts", "2"], ""),
        (
            ["-o", "x.txt"],
            "replay: -o x.txt: expected one of .json, .svg, .png, .pdf, .html at its end",
        ),
    ],
)
def test_wrong_words(tmp_path, capsys, words, expected):
    own(tmp_path, steps_of(0), steps_of(1))
    if expected:
        assert expected in call(tmp_path, *words, capsys=capsys)
    else:
        assert main(["replay", str(tmp_path), *words]) == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--slow", "1"], "expected NAME=FACTOR, got "),
        (["--compute-scale", "-1"], "expected a number of 0 or more, got "),
        (["--place", "x"], "expected blocks, turn, or numbers with commas, got "),
    ],
)
def test_wrong_values(capsys, words, expected):
    with pytest.raises(SystemExit):
        main(["replay", "x", *words])
    assert f"argument {words[0]}: {expected}" in capsys.readouterr().err


def test_ranks_that_are_no_replicas_are_refused(tmp_path, capsys):
    pair = [begun(record(1, at_s=2, nbytes=64, count=16))]
    ranks = [[begun(record(1, at_s=1))]] * 4
    more = [GroupRecords(f"{n}", "dp", (n, n + 2), pair) for n in (0, 1)]
    more += [GroupRecords(f"{n + 2}", "tp", (2 * n, 2 * n + 1), pair) for n in (0, 1)]
    own(tmp_path, *ranks, more=more)
    words = [tmp_path, "--net", "switch"]
    assert main(["replay", *map(str, words), "-p", "6"]) == 0
    assert ": a replica has 2 ranks, expected a multiple" in call(*words, "-p", 5, capsys=capsys)
    groups = [JobGroup("dp", (0, 1, 2)), JobGroup("x", (0, 3))]
    with pytest.raises(InvalidArgumentError) as caught:
        replicas_of(Job(groups, [], [[]] * 4, [0] * 4, [], []), ())
    assert "ranks, 1 apart, do not fill the 4 ranks of the job" in caught.value.what
    assert " apart, do not fill the " in caught.value.what


def test_a_message_between_replicas_is_refused():
    job = grid()
    job.calls[-1] = JobCall("send #1", MESSAGE, 0, (0, 2), 8)
    job.steps[2][-1] = job.steps[3].pop()
    job.steps[0].append(blocking(1, len(job.calls) - 1))
    new, _ = resized(job, [0, 1, 0, 1], Replicas(2, 2), (), blocks=False)
    assert [each.members for each in new.calls if each.op == MESSAGE] == [(0, 2), (4, 6)]
    with pytest.raises(InvalidArgumentError) as caught:
        resized(job, [0, 1, 0], Replicas(2, 2), (), blocks=False)
    expected = "replay: --ranks: send #1 between ranks 0 and 2 has no like in 3 replicas"
    assert caught.value.what == expected
    assert " has no like in " in expected


def test_operations_without_schedules_and_other_models_are_refused(tmp_path, capsys):
    mine = [begun(record(1, "neighbor_all_to_all", at_s=1)), begun(record(2, at_s=3))]
    own(tmp_path, mine, mine)
    assert main(["replay", str(tmp_path)]) == 0
    meets = [begun(record(1, "new_group", at_s=1, dtype="", count=0, nbytes=0))]
    found = own(tmp_path, meets, meets)
    assert [(c.name, c.op) for c in job_of(found, join(found)).calls] == [
        ("new_group #1", "barrier"),
    ]  # fmt: skip
    own(tmp_path, mine, mine)
    err = call(tmp_path, "--net", "switch", capsys=capsys)
    assert "neighbor_all_to_all #1 cannot be simulated, neighbor_all_to_all has no sched" in err
    net = tmp_path.parent / f"{tmp_path.name}.toml"
    net.write_text('model = "loggops"\n')
    err = call(tmp_path, "--net", net, capsys=capsys)
    assert f"replay: net {net} is for the model loggops, expected links or alpha-beta" in err


def test_sub_groups_of_own_files(tmp_path):
    pair = [begun(record(1, at_s=2, nbytes=64, count=16))]
    more = [GroupRecords("1", "tp", (1, 2), pair)]
    ranks = own(tmp_path, *[[begun(record(1, at_s=1))]] * 3, more=more)
    job = job_of(ranks, join(ranks))
    assert [(job.groups[c.group].name, c.members, c.nbytes) for c in job.calls] == [
        ("default", (0, 1, 2), 16), ("tp", (1, 2), 64),
    ]  # fmt: skip
    assert [len(steps) for steps in job.steps] == [1, 2, 2]
