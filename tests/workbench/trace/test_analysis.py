"""`unisono trace FILES`: the verdict on files, of unisono and of NCCL."""

import os
import pickle
from dataclasses import replace

import pytest

from tests.support import dumps
from tests.support.dumps import DEFAULT, HALF, entry, open_entry
from unisono.core.recorder.flight_recorder import (
    GroupRecords,
    Origin,
    RankRecords,
    encode,
    encode_short,
)
from unisono.core.recorder.records import TraceRecord
from unisono.errors import InvalidArgumentError
from unisono.workbench.cli.main import main
from unisono.workbench.trace.analysis import findings_of, report
from unisono.workbench.trace.decoding import decode
from unisono.workbench.trace.joined import by_rank, join

SECOND = 1_000_000_000
EIGHT = ((8,), (8,))


def record(number, op="all_reduce", at_s=0.0, took_s=0.5, **more):
    begin_ns = round((100 + at_s) * SECOND)
    is_message = op in ("send", "recv")
    values = {
        **{"number": number, "seq": number, "op": op, "dtype": "float32", "count": 4},
        **{"nbytes": 16, "algorithm": "", "route": "messages", "peer": None},
        **{"tag": 0 if is_message else None, "fingerprint": 0 if is_message else 77},
        **{"file": "train.py", "line": 8, "function": "step", "outcome": "completed"},
        **{"enqueued_ns": begin_ns, "started_ns": begin_ns, "waited_ns": 0, "waited_for": None},
        **{"ended_ns": None if took_s is None else begin_ns + round(took_s * SECOND)},
    }
    if took_s is None:
        values["outcome"] = "running"
    return TraceRecord(**values | more)


def world(*ranks, read_s=60.0):
    """Return the records of ranks that were read at the same time."""
    origin = Origin("h", 1, "boot", 0, round((100 + read_s) * SECOND))
    members = tuple(range(len(ranks)))
    return by_rank(
        [
            RankRecords(rank, [GroupRecords("0", "default", members, list(mine))], origin)
            for rank, mine in enumerate(ranks)
        ]
    )


def lines(ranks):
    return list(report(ranks, join(ranks)))


def verdict(ranks):
    return lines(ranks)[0]


def test_calls_that_match():
    late = record(2, at_s=4, took_s=0.1)
    # Only the name of a file is shown.
    early = record(
        2, at_s=1, file="/home/you/train.py", took_s=3.1, waited_ns=3 * SECOND, waited_for=1
    )
    found = lines(world([record(1), early], [record(1), late]))
    assert found == [
        "the 2 calls match; the longest wait is 3 s, of rank 0 for rank 1 in all_reduce #2",
        "waited for rank 1: 3 s in 1 calls; longest 3 s, of rank 0 for rank 1 in all_reduce #2",
        "waited in all_reduce (train.py:8): 3 s in 1 calls; longest 3 s, of rank 0 for rank 1 in "
        "all_reduce #2",
    ]


def test_rank_that_never_started_a_call():
    there = [record(1), record(2), record(3, at_s=10, took_s=None)]
    assert lines(world(there, [record(1)], there))[:2] == [
        "group 'default': rank 1 never started all_reduce #2, in which ranks 0 and 2 waited "
        "500 ms (train.py:8)",
        "group 'default': behind #3 by 2: rank 1",
    ]
    assert verdict(world(there, there[:2], there)) == (
        "group 'default': rank 1 never started all_reduce #3, in which ranks 0 and 2 waited 50 s "
        "(train.py:8)"
    )


def test_rank_of_a_running_job_that_has_not_started_a_call():
    there = [record(1), record(2, took_s=None), record(1, "recv", took_s=None, peer=1)]
    ranks = world(there, [record(1)], [record(1)])
    running = {
        rank: replace(each, origin=replace(each.origin, runs=True)) for rank, each in ranks.items()
    }
    for have, seen in (("never", ranks), ("have not", running)):
        found = lines({rank: decode(encode(each)) for rank, each in seen.items()})
        assert found[0].startswith(f"group 'default': ranks 1 and 2 {have} started all_reduce #2, ")
        alone = "has not" if have == "have not" else have
        assert f"recv #1 of rank 0 waits for rank 1, which {alone} sent it" in found[1]


def test_rank_that_was_read_before_a_call_is_not_blamed():
    ranks = world([record(1), record(2, at_s=10)], [record(1)])
    ranks[1] = replace(ranks[1], origin=replace(ranks[1].origin, wall_ns=105 * SECOND))
    assert findings_of(ranks, join(ranks)) == []


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"op": "barrier", "dtype": "", "count": 0}, "barrier"),
        ({"count": 8}, "all_reduce of 8 float32"),
        ({"dtype": "int8"}, "all_reduce of 4 int8"),
        ({}, "all_reduce of 4 float32 (another argument)"),
    ],
)
def test_call_that_differs(other, text):
    usual, wrong = record(1), replace(record(1), fingerprint=78, line=9, **other)
    usual_text = "all_reduce of 4 float32" + (" (another argument)" if not other else "")
    assert verdict(world([usual], [wrong], [usual])) == (
        f"group 'default': call #1 differs: rank 1: {text} (train.py:9); "
        f"ranks 0 and 2: {usual_text} (train.py:8)"
    )


def test_no_rank_of_two_is_taken_for_right():
    ranks = world([record(1)], [record(1, fingerprint=78)])
    assert findings_of(ranks, join(ranks))[0].ranks == (0, 1)


def test_failed_call_and_rank_without_a_file():
    lost = record(1, outcome="peer lost")
    ranks = world([lost], [lost], [])
    del ranks[2]
    assert lines(ranks)[:2] == [
        "group 'default': all_reduce #1 did not end on ranks 0 and 1, and rank 2 left no records "
        "(train.py:8)",
        "group 'default': there are no records of rank 2",
    ]
    assert verdict(world([lost], [record(1)])) == (
        "group 'default': all_reduce #1 is peer lost on rank 0; completed on rank 1 (train.py:8)"
    )


def test_call_that_a_rank_does_not_end():
    ranks = world([record(1)], [record(1, took_s=None)])
    assert findings_of(ranks, join(ranks))[0].ranks == (1,)
    assert not findings_of(world([record(1)], [record(1, took_s=None)], read_s=1.0), join(ranks))


def test_lost_records_are_not_missing_calls():
    full = [record(number, at_s=number) for number in range(1, 8)]
    assert verdict(world(full, full[4:])).startswith("the 7 calls match")
    # A ring full of messages has no collective any more.
    messages = [record(3000, "send", peer=0, at_s=8)]
    assert verdict(world(full, messages)).startswith("the 7 calls match")


def test_messages_without_a_counterpart():
    sent, waits = record(1, "send", peer=1), record(2, "send", at_s=2, took_s=None, peer=1)
    got = record(1, "recv", peer=0)
    assert verdict(world([sent, waits], [got])) == (
        "group 'default': send #2 of rank 0 waits for rank 1, which never received it (train.py:8)"
    )
    assert verdict(world([sent], [got, record(2, "recv", took_s=None, peer=0)])) == (
        "group 'default': recv #2 of rank 1 waits for rank 0, which never sent it (train.py:8)"
    )
    late = record(2, "recv", outcome="timed out", peer=0)
    assert verdict(world([sent], [got, late])) == (
        "group 'default': recv #2 of rank 1 is timed out (train.py:8)"
    )
    assert findings_of(world([sent], [got]), join(world([sent], [got]))) == []


# ---- dumps of NCCL ----------------------------------------------------------------------------


@pytest.mark.parametrize("as_json", [False, True])
def test_dumps_of_nccl(tmp_path, capsys, as_json):
    world_of = {"g0": range(3), "g1": range(2)}
    mine = [
        entry(0, 1, "all_reduce", DEFAULT),
        entry(1, 1, "_all_gather_base", HALF, ((4,), (8,))),
        entry(2, 2, "all_reduce", DEFAULT, EIGHT),
        open_entry(3, 3, "broadcast", DEFAULT),
    ]
    third = [mine[0], entry(1, 2, "all_reduce", DEFAULT)]
    all_dumps = [dumps.dump(mine, **world_of)] * 2 + [dumps.dump(third, g0=range(3))]
    assert main(["trace", *dumps.write(tmp_path, all_dumps, as_json=as_json)]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "group 'default_pg': call #2 differs: rank 2: all_reduce of 4 float32 (train.py:12); "
        "ranks 0 and 1: all_reduce of 8 float32 (train.py:12)",
        "group 'default_pg': behind #3 by 1: rank 2",
    ]
    # The folder, with one rank missing.
    (tmp_path / "nccl_trace_rank_2").unlink()
    assert main(["trace", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "group 'default_pg': broadcast #3 did not end on ranks 0 and 1, and rank 2 left no records "
        "(train.py:13)"
    )


def test_call_of_nccl_without_an_end_has_no_duration(tmp_path, capsys):
    mine = [entry(0, 1, "all_reduce", DEFAULT), open_entry(1, 2, "all_reduce", DEFAULT)]
    all_dumps = [dumps.dump(each, g0=range(2)) for each in (mine, mine[:1])]
    assert main(["trace", *dumps.write(tmp_path, all_dumps)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "group 'default_pg': rank 1 never started all_reduce #2, in which rank 0 waited "
        "(train.py:12)"
    )
    # After its end, it has one.
    mine[1] = entry(1, 2, "all_reduce", DEFAULT)
    assert main(["trace", *dumps.write(tmp_path, all_dumps)]) == 0
    assert "in which rank 0 waited 1 us (train.py:12)" in capsys.readouterr().out


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("has_ended", [False, True])
def test_dumps_of_gloo(tmp_path, capsys, as_json, has_ended):
    """Rank 1 lacks a call; rank 2, which has made no call of the sub-group, may be a member."""
    first = dumps.gloo_entry(0, 1, "all_reduce", DEFAULT, as_json=as_json)
    last = [
        dumps.gloo_entry(1, 2, "all_reduce", DEFAULT, as_json=as_json, retired=has_ended),
        dumps.gloo_entry(2, 1, "all_reduce", HALF, as_json=as_json, retired=has_ended),
    ]
    all_dumps = [
        dumps.gloo_dump([first, *last], ()),
        dumps.gloo_dump([first], range(4)),
        dumps.gloo_dump([first, last[0]], ()),
    ]
    assert main(["trace", *dumps.write(tmp_path, all_dumps, as_json=as_json)]) == 0
    sites = ("", "") if as_json else (" (train.py:12)", " (train.py:11)")
    sub = "only rank 0 made all_reduce #1" if has_ended else "all_reduce #1 did not end on rank 0"
    assert capsys.readouterr().out.splitlines()[:4] == [
        "group 'default_pg': rank 1 never started all_reduce #2, in which ranks 0 and 2 "
        f"waited{sites[0]}",
        f"group '1': {sub}, and the files do not name the group's members{sites[1]}",
        "group 'default_pg': there are no records of rank 3",
        "group 'default_pg': behind #2 by 1: rank 1",
    ]


def test_members_of_a_sub_group_are_those_with_calls(tmp_path, capsys):
    """Rank 1 is no member of the sub-group of ranks 0 and 2, so it is not behind."""
    calls = [dumps.gloo_entry(n, n + 1, "all_reduce", HALF) for n in range(2)]
    ranks = [dumps.gloo_dump(each, ()) for each in (calls, [], calls[:1])]
    assert main(["trace", *dumps.write(tmp_path, ranks)]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "group '1': rank 2 never started all_reduce #2, in which rank 0 waited (train.py:12)",
        "group '1': behind #2 by 1: rank 2",
    ]
    # One file with the members is enough for all of them.
    ranks[2]["pg_config"]["1"] = {"name": "1", "desc": "undefined", "ranks": "[0, 2, 3]"}
    assert main(["trace", *dumps.write(tmp_path, ranks)]) == 0
    assert "group '1': there are no records of rank 3" in capsys.readouterr().out


def test_names_of_a_stranger_do_not_control_the_terminal(tmp_path, capsys):
    mine = [entry(0, 1, "all_reduce", DEFAULT)]
    theirs = [entry(0, 1, "\x1b[2J", DEFAULT)]
    files = dumps.write(tmp_path, [dumps.dump(each, g0=range(2)) for each in (mine, theirs)])
    assert main(["trace", *files]) == 0
    out = capsys.readouterr().out
    assert "rank 1: ?[2J of 4 float32" in out
    assert "\x1b" not in out


def test_host_and_class_in_a_file_do_not_control_the_terminal(tmp_path, capsys):
    for rank in range(2):
        origin = Origin(f"\x1b[2J{rank}", 1, str(rank), 0, 0)
        group = GroupRecords("0", "default", (0, 1), [record(1)])
        (tmp_path / f"trace_rank_{rank}").write_bytes(encode(RankRecords(rank, [group], origin)))
    assert main(["trace", str(tmp_path)]) == 0
    (tmp_path / "trace_rank_2").write_bytes(b"cos\n\x1b[2J\n.")
    assert main(["trace", str(tmp_path)]) == 1
    out, error = capsys.readouterr()
    assert "time axis: clock of ?[2J0; error at most 500000.0 us (?[2J1)" in out
    assert "a trace file has no place for os.?[2J" in error
    assert "\x1b" not in out + error


def test_picture_of_nccls_dumps(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    mine = [entry(0, 1, "_all_gather_base", DEFAULT, ((4,), (8,)))]
    mine[0]["frames"][0]["filename"] = "$x$y.py"
    files = dumps.write(tmp_path, [dumps.dump(mine, g0=range(2)), dumps.dump([], g0=range(2))])
    assert main(["trace", *files, "-o", str(tmp_path / "a.svg")]) == 0
    assert "<!-- all_gather_base -->" in (tmp_path / "a.svg").read_text()
    assert capsys.readouterr().out.startswith("group 'default_pg': rank 1 never started")


def test_files_that_cannot_be_read(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("code",)

    (tmp_path / "evil_0").write_bytes(pickle.dumps({"entries": [Evil()]}))
    with pytest.raises(InvalidArgumentError, match=r"no place for builtins\.print"):
        decode((tmp_path / "evil_0").read_bytes())
    assert main(["trace", str(tmp_path / "evil_0")]) == 1


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["trace_rank_0", "other_0"], "there are two files of rank 0"),
        (
            ["large_0", "x_1"],
            "trace: cannot read {0}: it has 536870913 bytes, at most 536870912 are",
        ),
        (["trace"], "the name of {0} does not end in a rank"),
        (["missing_0", "missing_1"], "trace: cannot read {0}: No such file or directory"),
    ],
)
def test_files_without_a_world(tmp_path, capsys, names, text):
    paths = [str(tmp_path / name) for name in names]
    for path in paths:
        if "missing" not in path:
            with open(path, "wb") as file:
                file.write(pickle.dumps(dumps.dump([], g0=range(2))))
                # A hole takes no space.
                file.truncate((1 << 29) + 1 if "large" in path else None)
    assert main(["trace", *paths]) == 1
    assert text.format(*paths) in capsys.readouterr().err


def damaged(**values):
    group = GroupRecords("0", "default", (0, 1), [record(1, **values)])
    return encode_short(RankRecords(0, [group], Origin("h", 1, "c", 0, 0)))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (damaged(enqueued_ns="\x1b[2J"), "enqueued_ns is '\\\\x1b[2J', expected int"),
        (damaged(peer=1.5), "peer is 1.5, expected int | None"),
        (
            damaged().replace(b'"ranks": [0, 1]', b'"ranks": [0, {}]'),
            "ranks is {}, expected int",
        ),
        (damaged().replace(b'"rank": 0', b'"rank": "0"'), "rank is '0', expected int | None"),
        (damaged().replace(b'"pid": 1', b'"pid": []'), "pid is [], expected int"),
    ],
)
def test_damaged_file_is_named(tmp_path, capsys, content, text):
    (tmp_path / "trace_rank_0").write_bytes(content)
    assert main(["trace", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"cannot read {tmp_path / 'trace_rank_0'}: this is no file of a flight rec" in error
    assert text in error


def test_named_pipe_in_a_folder_is_left_out(tmp_path, capsys):
    """An open of the pipe would wait for a writer."""
    (tmp_path / "trace_rank_0").write_bytes(damaged())
    os.mkfifo(tmp_path / "pipe_1")
    (tmp_path / "folder").mkdir()
    assert main(["trace", str(tmp_path)]) == 0
    out, error = capsys.readouterr()
    assert out.startswith("the 1 calls match")
    assert error.splitlines() == [
        f"trace: {tmp_path / name} is no regular file: left out" for name in ("folder", "pipe_1")
    ]
    assert main(["trace", str(tmp_path / "pipe_1")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"trace: {tmp_path / 'pipe_1'} is no regular file: left out\n")
    assert "there are no records" in error


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("/no/such/folder", "trace: cannot read /no/such/folder: No such file or directory"),
        (
            "no_such_file",
            "trace: there is no file 'no_such_file', and no rank of 'no_such_file' an",
        ),
    ],
)
def test_missing_file_is_called_a_file(capsys, name, text):
    assert main(["trace", name]) == 1
    assert text in capsys.readouterr().err


def test_empty_folder(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 1
    assert "trace: there are no records" in capsys.readouterr().err
