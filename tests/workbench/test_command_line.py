"""What all commands share: flags, sizes, names of operations, JSON, colours, help."""

import argparse
import io
import json
import sys

import pytest

from unisono.launcher.output.colours import has_colours
from unisono.launcher.output.console import Console, WorkerName
from unisono.workbench.cli.main import main, make_parser
from unisono.workbench.cli.run.output import log_options

COMMANDS = ("run", "bench", "simulate", "draw", "explain", "tune", "doctor")


def parse(*words):
    return make_parser().parse_args(words)


@pytest.fixture
def plain_terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("flag", ["-n", "-np", "--ranks", "--nproc-per-node"])
@pytest.mark.parametrize("name", COMMANDS)
def test_one_flag_has_the_number_of_ranks(name, flag):
    more = {
        "bench": ["all_reduce"],
        "simulate": ["all_reduce"],
        "draw": ["all_reduce", "--algorithm", "ring", "-o", "x.svg"],
        "explain": ["all_reduce", "1M"],
        "run": ["train.py"],
    }.get(name, [])
    options = parse(name, flag, "3", *more)
    if (name, flag) == ("bench", "-n"):
        assert options.number == 3
        return
    number = vars(options).get("ranks") or options.nproc_per_node
    assert number == {"run": (0, 3), "simulate": [3]}.get(name, 3)


@pytest.mark.parametrize(
    "word",
    ["allreduce", "AllReduce", "all-reduce", "all_reduce", "all_reduce_perf", "MPI_Allreduce"],
)
def test_operations_have_the_names_of_mpi_and_nccl_too(word):
    for words in (("simulate",), ("bench",), ("tune",)):
        options = parse(*words, word)
        assert vars(options).get("ops", [vars(options).get("op")]) == ["all_reduce"]
    assert parse("explain", word, "1 MiB").size == 1 << 20
    assert parse("explain", "bcast", "0").op == "broadcast"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["simulate", "all_redce"], "(is all_reduce meant?)"),
        (["simluate", "all_reduce"], "(is simulate meant?)"),
        (["simulate", "all_reduce", "--outptu", "x"], "(is --output meant?)"),
    ],
)
def test_what_is_meant_is_named(words, meant, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert meant in capsys.readouterr().err


def test_unisono_alone_and_help_show_the_help(capsys, monkeypatch):
    shown = []
    for words in ([], ["help"], ["--help"], ["help", "draw"], ["draw", "--help"]):
        monkeypatch.setattr(sys, "argv", ["unisono", *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2] != shown[3] == shown[4]


def test_help_has_80_columns_and_the_algorithms(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (commands,) = (
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    for name in commands.choices:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        text = capsys.readouterr().out
        assert [line for line in text.splitlines() if len(line) > 80] == []
        assert ("recursive_doubling" in text) == (name in ("bench", "simulate", "draw", "explain"))


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "all_reduce", "1M", "-n", "4"),
        ("simulate", "all_reduce", "-n", "4", "--algorithm", "ring"),
        ("tune", "--show"),
        ("draw", "all_reduce", "-n", "4", "--algorithm", "ring"),
        ("synthesize", "all_reduce", "-n", "4", "-b", "1M", "--candidates", "5"),
    ],
)
def test_json_without_a_file_replaces_the_text(words, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main([*words, "--json"]) == 0
    text = capsys.readouterr().out
    assert main([*words, "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(text)
    shown = capsys.readouterr().out
    assert shown != text
    assert words[0] in ("tune", "draw") or "ring" in shown


def document(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_of_a_drawing_has_its_messages(capsys):
    ring = ("all_reduce", "-n", "4", "--algorithm", "ring")
    found = document(capsys, "draw", *ring)
    assert (found["rounds"], found["unit"], found["end"], found["fault"]) == (6, "round", 6, None)
    assert sorted((m["begin"], m["source"], m["target"]) for m in found["messages"]) == [
        (k, rank, (rank + 1) % 4) for k in range(6) for rank in range(4)
    ]
    timed = document(capsys, "draw", *ring, "--net", "switch", "-b", "1M")
    (row,) = document(capsys, "simulate", *ring, "--net", "switch", "-b", "1M")["rows"]
    assert (timed["unit"], timed["end"]) == ("us", pytest.approx(row["time_us"]))
    assert timed["end"] == pytest.approx(max(m["end"] for m in timed["messages"]), rel=0.2)
    with pytest.raises(SystemExit):
        main(["draw", *ring])
    assert "is required: -o/--output, --json" in capsys.readouterr().err


def test_json_of_a_search_has_all_candidates(capsys, tmp_path):
    more = ("-n", "4", "-b", "1M", "--net", "switch")
    path = str(tmp_path / "best.py")
    found = document(capsys, "synthesize", "all_reduce", *more, "--candidates", "5", "-o", path)
    times = [each["time_us"] for each in found["candidates"]]
    assert times == sorted(times)
    assert found["bound_us"] <= times[0] <= found["shipped"]["time_us"]
    assert (found["ended"], found["files"], len(times) >= 5) == ("candidates", [path], True)
    ring = next(each for each in found["candidates"] if each["schedule"] == "ring")
    assert (ring["rounds"], ring["bytes_sent_per_byte"]) == (6, 1.5)  # 2 (p - 1), 2 (p - 1) / p
    assert main(["synthesize", "all_reduce", *more, "--json", str(tmp_path / "no" / "x.json")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_iters_beside_the_n_of_nccl_tests_are_refused(capsys):
    assert main(["bench", "all_reduce", "-n", "4", "--ranks", "2", "--iters", "9"]) == 1
    assert (
        "-n 4 --iters 9: both are the calls per round, because another flag sets the ranks, as in "
        "nccl-tests"
    ) in capsys.readouterr().err


def test_top_takes_a_job_after_json(monkeypatch, capsys):
    """`--json` was a switch of this command."""
    seen = []
    monkeypatch.setattr(
        "unisono.workbench.cli.look.look.find_jobs", lambda which, token: seen.append(which) or []
    )
    for words in (["--json", "4242"], ["4242", "--json"], ["--json"]):
        assert main(["top", *words]) == 0
        assert json.loads(capsys.readouterr().out) == {"jobs": []}
    assert seen == ["4242", "4242", None]


def test_json_of_tune_is_for_its_tables(capsys):
    assert main(["tune", "--json"]) == 1
    assert "tune: --json is for --show" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["png", "pdf", "svg", "html"])
def test_pictures(ending, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"x.{ending}"
    words = ("simulate", "all_reduce", "-n", "4,8", "--algorithm", "ring", "-o", str(path))
    assert main([*words]) == 0
    assert path.stat().st_size > 1000
    assert ending != "html" or "<svg" in path.read_text()


def test_o_of_bench_is_a_reduce_op_or_a_picture():
    options = parse("bench", "all_reduce", "-o", "max", "-o", "out.svg")
    assert (options.op, options.output) == ("max", "out.svg")
    assert parse("bench", "all_reduce", "--plot", "out.png").output == "out.png"
    with pytest.raises(SystemExit):
        parse("bench", "all_reduce", "-o", "maximum")


def test_colours_are_for_terminals(monkeypatch, plain_terminal):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert has_colours(Terminal())
    assert not has_colours(io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert has_colours(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colours(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colours(Terminal())


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}, False),
    ],
)
def test_variables_for_colours_hold_for_the_table_of_bench(
    variables, coloured, monkeypatch, plain_terminal, capsys
):
    pytest.importorskip("rich")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "unisono.workbench.bench.launch.run_ranks",
        lambda plan: iter([{"kind": "note", "text": "a note"}]),
    )
    main(["bench", "all_reduce"])
    out = capsys.readouterr().out
    assert "a note" in out
    assert ("\x1b[" in out) == coloured


def test_the_prefix_of_each_rank_has_its_colour():
    sink = io.BytesIO()
    console = Console(sink, prefix="[{rank}] ", fold=False, clock=lambda: 0.0, colours=True)
    for rank in (0, 1):
        console.sink_of(WorkerName(rank=rank, local_rank=rank)).write(b"text\n")
    first, second = sink.getvalue().splitlines()
    assert first.endswith(b"[0] \x1b[0mtext")
    assert second.endswith(b"[1] \x1b[0mtext")
    assert first[:5] != second[:5]


@pytest.mark.parametrize("load", [0.5, 1e6])
def test_a_busy_machine_is_named(load, monkeypatch, capsys):
    from unisono.core.platform import machine
    from unisono.workbench.bench.plan import BenchPlan
    from unisono.workbench.bench.report import ReportTable

    monkeypatch.setattr(machine, "load_average", lambda: load)
    table = ReportTable(BenchPlan(ops=("all_reduce",), nprocs=2))
    table.take({"kind": "start", "group": "g", "versions": {}})
    assert ("# the machine is busy (load 1000000.0" in capsys.readouterr().out) == (load > 1)


def test_a_program_in_place_of_a_script(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for word, hint in (
        ("python", "leave out python, or give --no-python"),
        ("sh", "for a program, give --no-python"),
    ):
        monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
        with pytest.raises(SystemExit):
            main(["run", "-n", "2", word, "x.py"])
        assert hint in capsys.readouterr().err


def test_workers_that_are_replaced_have_numbers_of_their_own(monkeypatch):
    """A worker's rank changes when the group is reconfigured, and its prefix does not."""
    monkeypatch.delenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", raising=False)
    for words, prefix in (([], "[rank {rank}] "), (["--restart", "worker"], "[worker {rank}] ")):
        options = parse("run", *words, "x.py")
        assert log_options(options, None).default_prefix == prefix
