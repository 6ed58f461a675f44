"""`unisono bench`: conventions against nccl-tests' formulas, and real runs with few calls."""

import importlib.util
import json
import math
import os
import re
import signal
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.oracle import outcome
from tests.support.programs import python
from unisono.core.base import document
from unisono.core.engines import is_native_built
from unisono.core.platform.machine import CAN_BIND, allowed_cpus
from unisono.core.platform.processes import children
from unisono.errors import InvalidArgumentError, LaunchError, UnsupportedError
from unisono.testing.hosts import why_no_hosts
from unisono.workbench.bench import launch as bench_launch
from unisono.workbench.bench import libraries
from unisono.workbench.bench import peers as bench_peers
from unisono.workbench.bench.data import Data
from unisono.workbench.bench.launch import run_ranks
from unisono.workbench.bench.plan import (
    DTYPES,
    OPS,
    REDOPS,
    BenchPlan,
    Case,
    LoopPlan,
    SizeRange,
    cases,
    parse_nbytes,
)
from unisono.workbench.bench.report import ReportTable, bandwidths, fixed, ratio, summary
from unisono.workbench.bench.worker import MAX_ITERS, ROUND_S, calibrated
from unisono.workbench.cli.main import main

QUICK = ("--iters", "2", "--rounds", "2", "-w", "0")


def installed(*modules):
    return all(importlib.util.find_spec(module) for module in modules)


needs_gloo = pytest.mark.skipif(not installed("torch"), reason="needs torch")
needs_mpi = pytest.mark.skipif(
    not installed("mpi4py") or bench_peers.mpiexec() is None, reason="needs mpi4py and mpiexec"
)
MPI_WHOLE = [needs_mpi, pytest.mark.whole("starts mpiexec")]
needs_matplotlib = pytest.mark.skipif(not installed("matplotlib"), reason="needs matplotlib")


@pytest.fixture
def bench(capfd):
    """Return a function that runs the command; it returns exit code, stdout and stderr."""
    return lambda *words: (main(["bench", *map(str, words)]), *capfd.readouterr())


def row(op="all_reduce", nbytes=1024, wrong=0, ranks=4, **times_us):
    results = {
        name: time_us and {"time_us": time_us, "best_us": time_us / 2, "wrong": wrong}
        for name, time_us in times_us.items()
    }
    return {
        "op": op,
        "size_bytes": nbytes,
        "count": nbytes // 4,
        "dtype": "float32",
        "redop": "sum",
        "root": -1,
        "ranks": ranks,
        "results": results,
    }


# ---- sizes, factors ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *(("8", 8), ("64k", 65536), ("64M", 64 << 20), ("2G", 2 << 30), ("1T", 1 << 40)),
        *((text, 1 << 20) for text in ("1MiB", "1MB", "1 MB", "1 mib", " 1M ", "1024KiB")),
        *(("1.5M", 3 << 19), ("8 B", 8), ("0.25 KiB", 256)),
        *(("1e6", 10**6), ("1.5e6", 1_500_000), ("2E+3 B", 2000)),
    ],
)
def test_sizes_are_powers_of_1024_unless_they_have_an_exponent(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "0", "M", "8X", "-1", "0.3K", "1.5", "8  M", "8iB", "1e3K", "1e-3"]
)
def test_other_sizes_are_refused(text):
    with pytest.raises(InvalidArgumentError, match="must be a size"):
        parse_nbytes(text)


def test_sizes_go_up_by_a_factor_or_by_a_step():
    by_factor = BenchPlan(ops=("all_reduce",), nprocs=2, sizes=SizeRange(8, 200, factor=4))
    assert [c.nbytes for c in cases("all_reduce", by_factor)] == [8, 32, 128]
    by_step = BenchPlan(ops=("all_reduce",), nprocs=2, sizes=SizeRange(8, 24, step_bytes=8))
    assert [c.nbytes for c in cases("all_reduce", by_step)] == [8, 16, 24]


@pytest.mark.parametrize("op", [op for op in OPS if op != "barrier"])
def test_sizes_are_whole_blocks_and_none_comes_twice(op):
    plan = BenchPlan(ops=(op,), nprocs=3, sizes=SizeRange(4, 64))
    found = [(c.count, c.nbytes) for c in cases(op, plan)]
    unit = 12 if OPS[op].blocks else 4
    counts = [1, 2, 5] if OPS[op].blocks else [1, 2, 4, 8, 16]
    assert found == [(count, count * unit) for count in counts]


def test_barrier_has_one_line_without_a_size():
    plan = BenchPlan(ops=("barrier",), nprocs=2)
    assert [(c.count, c.nbytes) for c in cases("barrier", plan)] == [(0, 0)]


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("all_gather", 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_to_all", 3 / 4),
        ("gather", 3 / 4),
        ("scatter", 3 / 4),
        ("broadcast", 1),
        ("reduce", 1),
        ("sendrecv", 1),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(op, factor):
    algbw, busbw = bandwidths(row(op, nbytes=8_000_000, ranks=4, unisono=1000.0), "unisono")
    assert algbw == pytest.approx(8.0)
    assert busbw == pytest.approx(8.0 * factor)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BenchPlan(("sendrecv",), 2, root=2), "-r 2 is not one of the 2 ranks"),
        (lambda: BenchPlan(("sendrecv",), 1), "sendrecv needs at least 2 ranks"),
        (
            lambda: BenchPlan(("sendrecv",), 2, hosts=2, peers=("mpi",)),
            "--hosts goes with --peer gloo only",
        ),
        (
            lambda: BenchPlan(("barrier",), 2, peers=("nccl",)),
            "--device cpu does not go with --peer nccl; nccl and nccl4py need --device cuda, the "
            "other peers --device cpu",
        ),
        (
            lambda: BenchPlan(("barrier",), 2, peers=("nccl4py",)),
            "--device cpu does not go with --peer nccl4py; nccl and nccl4py need --device cuda",
        ),
        (
            lambda: BenchPlan(("barrier",), 2, device="cuda", algorithm="ring"),
            "--device cuda takes no --algorithm, --engine or --hosts: NCCL moves the data",
        ),
        (lambda: SizeRange(min_bytes=16, max_bytes=8), "-b 16 is larger than -e 8"),
        (lambda: SizeRange(factor=1), "-f must be at least 2"),
    ],
)
def test_impossible_plans_name_the_flag(make, text):
    with pytest.raises(InvalidArgumentError, match=text):
        make()


def test_plan_survives_a_command_line():
    plan = BenchPlan(ops=("reduce", "barrier"), nprocs=3, peers=("gloo",), engine="reference")
    assert document.loads(BenchPlan, document.dumps(plan)) == plan


def test_store_names_the_script_that_measures_stores(capsys):
    assert main(["bench", "store"]) == 1
    assert "run benchmarks/store.py" in capsys.readouterr().err


# ---- how many calls ------------------------------------------------------------------------


@pytest.mark.parametrize("call_s", [1e-8, 3e-6, 250e-6, 1.9e-3, 0.04])
@pytest.mark.parametrize("slow", [(), (0,), (0, 1, 4, 7, 9)])
def test_calls_of_a_round_take_about_its_time_though_some_are_slow(call_s, slow):
    made = 0

    def loop_s(iters):
        nonlocal made
        calls = range(made, made + iters)
        made += iters
        return iters * call_s + 0.05 * sum(number in slow for number in calls)

    wanted = max(1, min(MAX_ITERS, ROUND_S / call_s))
    assert calibrated(loop_s) == pytest.approx(wanted, rel=0.2)


# ---- the check of results ------------------------------------------------------------------


def reduced(arrays, redop):
    if redop == "avg":
        total = np.sum(arrays, axis=0, dtype=np.float64) / len(arrays)
        return np.trunc(total) if arrays[0].dtype.kind in "iu" else total
    return {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max}[redop](arrays, axis=0)


def results(op, ranks, plan):
    """Return what every rank's output must be, computed from all inputs; None: undefined."""
    given = [data.input.copy() for data in ranks]
    if op == "sendrecv":
        return [given[1], given[0], None]

    def blocks(rank):
        return np.split(given[rank], plan.nprocs)

    return outcome(op, given, plan.root, lambda arrays: reduced(arrays, plan.redop), blocks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [op for op in OPS if op != "barrier"])
def test_check_finds_every_wrong_element_and_no_other(op, dtype):
    for redop in REDOPS if OPS[op].reduces else ["sum"]:
        plan = BenchPlan(ops=(op,), nprocs=3, sizes=SizeRange(6000, 6000), dtype=dtype, redop=redop,
                    root=1)  # fmt: skip
        (case,) = cases(op, plan)
        ranks = [Data(case, plan, rank) for rank in range(3)]
        for data in ranks:
            data.fill_for_check()
        before = [data.count_wrong() for data in ranks]
        expected = results(op, ranks, plan)
        for data, right in zip(ranks, expected, strict=True):
            if right is None:
                assert data.count_wrong() == 0
                continue
            data.output[:] = right
            assert data.count_wrong() == 0, redop
            data.output[[0, -1]] += 1
            assert data.count_wrong() == 2, redop
        assert any(before), "a call that does nothing would pass"


@pytest.mark.parametrize("redop", REDOPS)
def test_timing_in_place_keeps_numbers_what_they_are(redop):
    plan = BenchPlan(ops=("all_reduce",), nprocs=2, sizes=SizeRange(8, 8), redop=redop)
    (case,) = cases("all_reduce", plan)
    data = Data(case, plan, 0)
    data.fill_for_timing()
    once = reduced([data.output, data.output], redop)
    np.testing.assert_array_equal(once, data.output)


# ---- the report ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "text"),
    [(1.234, "1.23"), (12345.678, "12345.7"), (1234567.8, "1234568"), (123456789.0, "1.2e+08")],
)
def test_numbers_fit_their_column(number, text):
    assert fixed(number) == text


def test_summary_has_geometric_means_and_the_cells_above_1():
    rows = [
        row(nbytes=8, unisono=1.0, gloo=10.0, mpi=2.0),
        row(nbytes=16, unisono=2.0, gloo=10.0, mpi=1.0),
        row(nbytes=32, unisono=4.0, gloo=None, mpi=1.0),
    ]
    found = summary(rows, ("gloo", "mpi"))["all_reduce"]
    assert found["gloo"]["cells"] == 2
    assert found["gloo"]["geometric_mean"] == pytest.approx(math.sqrt(0.1 * 0.2))
    assert found["gloo"]["above_1"] == []
    assert found["mpi"]["geometric_mean"] == pytest.approx((0.5 * 2 * 4) ** (1 / 3))
    assert found["mpi"]["above_1"] == [16, 32]
    assert (found["mpi"]["worst"], found["mpi"]["worst_bytes"]) == (4.0, 32)


def test_table_has_the_columns_of_nccl_tests_and_two_per_peer(capsys):
    table = ReportTable(BenchPlan(ops=("all_reduce",), nprocs=4, peers=("gloo", "mpi")))
    table.take({"kind": "row", **row(nbytes=8_000_000, unisono=1000.0, gloo=4000.0, mpi=None)})
    table.end()
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if " size " in line)
    line = next(line for line in lines if " 8000000 " in line)
    assert head.split()[1:] == [
        "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong",
        "gloo", "/gloo", "mpi", "/mpi",
    ]  # fmt: skip
    assert line.split() == [
        "8000000", "2000000", "float32", "sum", "-1", "1000.00", "8.00", "12.00", "0",
        "4000.00", "0.25", "-", "-",
    ]  # fmt: skip
    assert head.index("busbw") + len("busbw") == line.index("12.00") + len("12.00")
    assert "# Out of bounds values : 0 OK" in lines


def test_rich_adds_colours_and_changes_no_character(capsys, monkeypatch):
    rich_console = pytest.importorskip("rich.console")
    plan = BenchPlan(ops=("all_reduce",), nprocs=4, peers=("gloo", "mpi"))
    message = {"kind": "row", **row(unisono=2.0, gloo=4.0, mpi=1.0, wrong=1)}
    ReportTable(plan).take(dict(message))
    plain = capsys.readouterr().out
    coloured = rich_console.Console(force_terminal=True, width=200, highlight=False)
    monkeypatch.setattr("unisono.workbench.bench.report._console", lambda: coloured)
    table = ReportTable(plan)
    with coloured.capture() as captured:
        table.take(dict(message))
    assert "\x1b[31m" in captured.get()
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", captured.get())
    assert [line.rstrip() for line in stripped.splitlines()] == plain.splitlines()


# ---- the command ---------------------------------------------------------------------------


def test_wrong_results_are_shown_and_fail_the_command(monkeypatch, capsys):
    messages = [{"kind": "row", **row(unisono=1.0, wrong=3)}]
    monkeypatch.setattr(bench_launch, "run_ranks", lambda plan: iter(messages))
    assert main(["bench", "all_reduce"]) == 1
    assert "# Out of bounds values : 3 FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "needs", "extra"),
    [
        (["-o", "x.png"], "matplotlib", "plot"),
        (["--peer", "gloo"], "torch", "torch"),
        (["--peer", "mpi"], "mpi4py", "bench"),
        (["--peer", "nccl4py", "--device", "cuda"], "torch and nccl", "nccl"),
        (["--device", "cuda"], "torch and nccl", "nccl"),
    ],
)
def test_what_is_missing_is_named_before_anything_runs(
    flags, needs, extra, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "all_reduce", *flags]) == 1
    error = capsys.readouterr().err
    assert f"{flags[0]}" in error
    assert f"needs {needs}" in error
    assert f"pip install 'unisono[{extra}]'" in error


MINE = """
from unisono.lowlevel import build
def mine(p):
    if p == 3:
        raise ValueError("not for 3")
    return build("all_reduce", "ring", p)
"""


def test_several_algorithms_take_turns(bench, tmp_path):
    """The first has the columns of unisono; one that does not serve the ranks is left out."""
    (tmp_path / "own.py").write_text(MINE)
    own, path = f"{tmp_path / 'own.py'}:mine", tmp_path / "out.json"
    words = ("-b", 64, "-e", 64, *QUICK, "--json", path, "--algorithm", f"tree,{own},two-shot")
    for ranks in (2, 3):
        code, out, err = bench("all_reduce", "sendrecv", "--ranks", ranks, *words)
        assert (code, err) == (0, "")
        assert "# time, algbw, busbw: tree\n" in out
        head = next(line for line in out.splitlines() if " size " in line).split()
        assert head[-4:] == ["mine", "/mine", "two_shot", "/two_shot"]
        assert ("not for 3" in out) == (ranks == 3)
        document = json.loads(path.read_text())
        reduced, sent = (r["results"] for r in document["rows"])
        there = {name for name, each in reduced.items() if each and each["wrong"] == 0}
        assert there == {"unisono", own, "two-shot"} - ({own} if ranks == 3 else set())
        assert {name for name, each in sent.items() if each} == {"unisono"}
        assert ("tree / mine" in out) == (ranks == 2)
        assert "tree / two_shot" in out


def test_messages_have_no_algorithm(bench):
    code, out, err = bench("sendrecv", "-b", 8, "-e", 8, *QUICK, "--algorithm", "ring,tree")
    assert (code, err) == (0, "")
    assert "# note: tree cannot do sendrecv: messages have no algorithm" in out


def test_types_of_deepspeed_that_a_processor_lacks():
    library = object.__new__(libraries._DeepSpeed)
    library._level = 1
    plan = SimpleNamespace(redop="sum", dtype="float16")
    data = SimpleNamespace(plan=plan, case=SimpleNamespace(op="all_reduce"))
    with pytest.raises(UnsupportedError) as caught:
        library.call(data)
    assert caught.value.what == "this processor lacks its instructions for float16"


def test_a_wrong_result_of_a_further_algorithm_fails_the_command(monkeypatch, capsys):
    message = {"kind": "row", **row(unisono=1.0, tree=1.0)}
    message["results"]["tree"]["wrong"] = 1
    monkeypatch.setattr(bench_launch, "run_ranks", lambda plan: iter([message]))
    assert main(["bench", "all_reduce", "--algorithm", "ring,tree"]) == 1
    capsys.readouterr()
    # A flag that is repeated adds.
    assert main(["bench", "all_reduce", "--algorithm", "ring", "--algorithm", "tre"]) == 1
    assert "is 'tree' meant?" in capsys.readouterr().err


def test_every_operation_runs_and_is_right(bench, tmp_path):
    path = tmp_path / "out.json"
    code, out, err = bench(
        "all", "--nproc-per-node", 3, "-b", 24, "-e", "6K", "-f", 256, "-d", "int32", "-r", 2,
        *QUICK, "--json", path,
    )  # fmt: skip
    assert (code, err) == (0, "")
    document = json.loads(path.read_text())
    assert {r["op"] for r in document["rows"]} == set(OPS)
    for found in document["rows"]:
        own = found["results"]["unisono"]
        assert own["wrong"] == 0
        assert own["iters"] == 2
        assert len(own["rounds_us"]) == 2
        assert own["time_us"] == pytest.approx(np.median(own["rounds_us"]), abs=1e-3)
        assert own["time_us"] > 0
        assert f"{found['size_bytes']:>12}" in out
    assert {"cpu", "cores", "python", "numpy", "load_before", "load_after"} <= set(
        document["machine"]
    )
    assert out.count("# Out of bounds values : 0 OK") == len(OPS)


def test_all_types_and_all_reduce_ops_as_in_nccl_tests(bench, tmp_path):
    path = tmp_path / "out.json"
    code, out, err = bench(
        *("reduce_scatter", "all_gather", "barrier", "-d", "all", "-o", "all", "-b", 24, "-e", 24),
        *(*QUICK, "--json", path),
    )
    assert (code, err) == (0, "")
    document = json.loads(path.read_text())
    seen = [(row["op"], row["dtype"], row["redop"]) for row in document["rows"]]
    assert seen == [
        *(("reduce_scatter", dtype, redop) for dtype in DTYPES for redop in REDOPS),
        *(("all_gather", dtype, "none") for dtype in DTYPES),
        ("barrier", "none", "none"),
    ]
    assert [row["results"]["unisono"]["wrong"] for row in document["rows"]] == [0] * len(seen)
    assert out.count("# Collective test starting: ") == 3


def test_bfloat16_needs_a_package(monkeypatch, capsys):
    monkeypatch.setattr(bench_launch, "run_ranks", lambda plan: iter(()))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "all_reduce", "-d", "bfloat16"]) == 1
    error = capsys.readouterr().err
    assert "-d bfloat16 needs ml_dtypes" in error
    assert "pip install ml_dtypes" in error
    assert main(["bench", "all_reduce", "-d", "all"]) == 0
    assert capsys.readouterr().out == (
        "# note: -d all: without bfloat16, which needs the package ml_dtypes\n"
    )
    assert main(["bench", "all_reduce", "-o", "all", "--plot", "x.png"]) == 1
    assert "--plot draws one type and one reduce op" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "nprocs", "notes"),
    [
        ("", 2, []),
        ("-t 1 -g 1 -p 0 -z 0", 2, []),
        ("-n 4", 4, ["-n 4: 4 ranks; --iters sets the calls per round"]),
        ("-n 4 --iters 9", 4, ["-n 4: 4 ranks; --iters sets the calls per round"]),
        ("-n 4 --ranks 3", 3, ["-n 4: calls per round, as in nccl-tests: another flag sets"]),
        ("-n 4 -np 3", 3, ["-n 4: calls per round, as in nccl-tests: another flag sets"]),
        ("-n 4 -g 1", 2, ["-n 4: calls per round, as in nccl-tests: another flag sets"]),
        ("-g 8", 8, ["-t 1 -g 8: 8 ranks, each a process of its own"]),
        ("--nthreads 2 --ngpus 3 --nproc-per-node 2", 12, ["-t 2 -g 3: 12 ranks, each a process"]),
        ("-g 2 --hosts 3", 6, ["-t 1 -g 2: 6 ranks"]),
        ("--parallel_init 1 --blocking 1", 2, ["-p 1: no effect; ", "-z 1: no effect; "]),
    ],
)
def test_flags_of_nccl_tests_mean_here(monkeypatch, capsys, flags, nprocs, notes):
    plans = []
    monkeypatch.setattr(bench_launch, "run_ranks", lambda plan: iter(plans.append(plan) or ()))
    assert main(["bench", "all_reduce", *flags.split()]) == 0
    assert [plan.nprocs for plan in plans] == [nprocs]
    iters = 9 if "--iters" in flags else 4 if "calls per round, as" in "".join(notes) else 0
    assert plans[0].loop.iters == iters
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(notes)
    assert all(line.startswith(f"# note: {note}") for line, note in zip(lines, notes, strict=True))


def test_operations_with_commas(monkeypatch, capsys):
    plans = []
    monkeypatch.setattr(bench_launch, "run_ranks", lambda plan: iter(plans.append(plan) or ()))
    assert main(["bench", "broadcast,MPI_Reduce, allgather", "barrier"]) == 0
    assert plans[0].ops == ("broadcast", "reduce", "all_gather", "barrier")
    with pytest.raises(SystemExit):
        main(["bench", "broadcast,redcue"])
    assert "invalid choice: 'broadcast,redcue' (choose from " in capsys.readouterr().err


@pytest.mark.whole("loads torch twice")
@needs_gloo
def test_bfloat16_of_gloo_is_right(bench, tmp_path):
    path = tmp_path / "out.json"
    flags = ("-d", "bfloat16", "-b", 64, "-e", 64, *QUICK, "--peer", "gloo", "--json", path)
    code, _, err = bench("all_reduce", "all_gather", *flags)
    assert (code, err) == (0, "")
    rows = json.loads(path.read_text())["rows"]
    assert [row["results"]["gloo"]["wrong"] for row in rows] == [0, 0]


@pytest.mark.whole("loads torch twice")
@needs_gloo
@pytest.mark.parametrize(
    "peers", [["gloo"], pytest.param(["gloo", "mpi"], marks=needs_mpi)], ids=str
)
def test_peers_run_in_the_same_processes_and_are_right(bench, tmp_path, peers):
    path = tmp_path / "out.json"
    flags = [word for peer in peers for word in ("--peer", peer)]
    code, out, err = bench("all", "-b", 64, "-e", 64, *QUICK, *flags, "--json", path)
    assert (code, err) == (0, "")
    document = json.loads(path.read_text())
    for found in document["rows"]:
        for library in ("unisono", *peers):
            assert found["results"][library], (found["op"], library, document["notes"])
            assert found["results"][library]["wrong"] == 0, (found["op"], library)
    assert {"torch", *(["mpi4py", "mpi"] if "mpi" in peers else [])} <= set(document["machine"])
    assert [out.count(f"# unisono / {peer}") for peer in peers] == [len(OPS)] * len(peers)


def test_a_plain_copy_has_the_bytes_that_a_rank_must_get(bench, tmp_path):
    path = tmp_path / "out.json"
    words = ("-b", "128K", "-e", "512K", "-f", 4, *QUICK, "--peer", "copy", "--json", path)
    code, out, err = bench("all", *words)
    assert (code, err) == (0, "")
    document = json.loads(path.read_text())
    for found in document["rows"]:
        copy = found["results"]["copy"]
        # Below 256 KiB it would show the time of a call in Python.
        assert (copy is not None) == (found["size_bytes"] >= 256 << 10), found
        assert copy is None or (copy["wrong"] is None and copy["time_us"] > 0)
    assert [text for text in document["notes"] if "WRONG" in text] == []
    assert out.count("# unisono / copy") == len(OPS) - 1  # barrier has no bytes


def test_a_plain_copy_of_few_bytes_is_refused():
    small = SimpleNamespace(case=SimpleNamespace(nbytes=(256 << 10) - 1), plan=None)
    with pytest.raises(UnsupportedError) as caught:
        libraries._Copy().call(small)
    assert caught.value.what == "below 262144 bytes it would show the time of a call"


@pytest.mark.parametrize("nprocs", [2, 5])
@pytest.mark.parametrize("root", [0, 1])
def test_bytes_that_a_copy_moves_are_those_that_ranks_receive(nprocs, root):
    plan = BenchPlan(tuple(OPS), nprocs, root=root, dtype="int8")
    part, whole = 60, 60 * nprocs
    every = {
        "all_reduce": 2 * (nprocs - 1) * whole // nprocs,
        "all_gather": (nprocs - 1) * part,
        "reduce_scatter": (nprocs - 1) * part,
        "all_to_all": (nprocs - 1) * part,
        "sendrecv": whole,
    }
    at_root = {"reduce": whole, "gather": (nprocs - 1) * part}
    elsewhere = {"broadcast": whole, "scatter": part}
    for op in set(OPS) - {"barrier"}:
        for rank in range(nprocs):
            expected = every.get(op, at_root.get(op, 0) if rank == root else elsewhere.get(op, 0))
            assert plan.copied(Case(op, part, whole), rank) == expected, (op, rank)


def peer(name, *modules):
    """A peer with a folder of its own; the test is left out without it."""
    there = installed(*modules) and Path(bench_peers.peer_file(name)).exists()
    reason = f"{name} is not installed; `make peers PEERS={name}`"
    return pytest.param(name, marks=pytest.mark.skipif(not there, reason=reason))


@pytest.mark.whole("starts mpiexec twice")
@needs_mpi
@pytest.mark.parametrize("other", [peer("intel-mpi", "mpi4py"), peer("open-mpi", "mpi4py")])
def test_mpi_libraries_take_turns_in_one_table(bench, tmp_path, other):
    path = tmp_path / "out.json"
    words = ("-b", 64, "-e", 64, *QUICK, "--peer", "mpi", "--peer", other, "--json", path)
    code, out, err = bench("all", *words)
    assert (code, err) == (0, "")
    document = json.loads(path.read_text())
    assert [row["op"] for row in document["rows"]] == list(OPS)
    for found in document["rows"]:
        results = found["results"]
        assert {name: each["wrong"] for name, each in results.items()} == dict.fromkeys(
            ("unisono", "mpi", other), 0
        )
        assert [len(each["rounds_us"]) for each in results.values()] == [4, 2, 2]
        rounds_us = results["unisono"]["rounds_us"]
        assert results["unisono"]["time_us"] == np.median(rounds_us)
        for name, own in (("mpi", rounds_us[:2]), (other, rounds_us[2:])):
            assert results[name]["unisono_time_us"] == pytest.approx(np.median(own), abs=1e-3)
    named = {"intel-mpi": "Intel(R) MPI Library", "open-mpi": "Open MPI v"}[other]
    assert document["machine"][other].startswith(named), "the ranks loaded another library"
    assert document["machine"]["mpi"] != document["machine"][other]
    columns = ("mpi", other.replace("-", "_"))
    assert [out.count(f"# unisono / {name} ") for name in columns] == [len(OPS)] * 2


@pytest.mark.whole("loads torch twice")
@pytest.mark.parametrize("name", [peer("deepspeed", "torch")])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_deepspeeds_sum_is_right_and_what_it_lacks_is_named(
    bench, monkeypatch, tmp_path, name, dtype
):
    stores, store = [], bench_launch.TCPStore
    monkeypatch.setattr(
        bench_launch, "TCPStore", lambda *a, **k: stores.append(store(*a, **k)) or stores[0]
    )
    path = tmp_path / "out.json"
    words = ("-b", 64, "-e", "2M", "-f", 32768, "-d", dtype, *QUICK, "--peer", name)
    code, out, err = bench("all_reduce", "barrier", *words, "--json", path)
    assert (code, err) == (0, "")
    results = [row["results"][name] for row in json.loads(path.read_text())["rows"]]
    right = [0, 0] if dtype == "float32" else [None, None]
    assert [each and each["wrong"] for each in results] == [*right, None]
    only = "it has only all_reduce, sum, of float32, float16, bfloat16"
    assert f"# note: deepspeed cannot do barrier: {only}" in out
    assert (f"# note: deepspeed cannot do all_reduce: {only}" in out) == (dtype == "float64")
    left = Path("/dev/shm").glob(f"deepspeed_*_{stores[0].port}_*")
    assert not list(left), "a gigabyte after ten runs"


def test_a_process_has_one_mpi_library_and_the_first_has_the_other_peers():
    plan = BenchPlan(("barrier",), 2, peers=("mpi", "gloo", "intel-mpi", "open-mpi", "deepspeed"))
    worlds = plan.worlds()
    assert [each.peers for each in worlds] == [
        ("mpi", "gloo", "deepspeed"),
        ("intel-mpi",),
        ("open-mpi",),
    ]
    assert [each.loop.turn for each in worlds] == [(0, 3), (1, 3), (2, 3)]
    assert document.loads(BenchPlan, document.dumps(worlds[1])) == worlds[1]
    assert BenchPlan(("barrier",), 2, peers=("gloo",)).worlds()[0].peers == ("gloo",)


def test_rows_of_sets_of_ranks_become_one():
    def message(wrong, *rounds_us, **others):
        own = {"time_us": sum(rounds_us) / 2, "best_us": min(rounds_us), "rounds_us": rounds_us}
        own |= {"iters": 7, "wrong": wrong}
        return {"kind": "row", "op": "reduce", "results": {"unisono": own, **others}}

    gloo, mpi = {"time_us": 7.0, "best_us": 6.0}, {"time_us": 10.0, "best_us": 10.0}
    merged = bench_launch._merged([message(1, 3.0, 4.0, gloo=gloo), message(2, 1.0, 9.0, mpi=mpi)])
    own = {"time_us": 3.5, "best_us": 1.0, "rounds_us": [3.0, 4.0, 1.0, 9.0], "iters": 7}
    assert merged["results"] == {"unisono": {**own, "wrong": 3}, "gloo": gloo, "mpi": mpi}
    assert [ratio(merged, name) for name in ("gloo", "mpi")] == [3.5 / 7.0, 5.0 / 10.0]
    assert [ratio(merged, name, "best_us") for name in ("gloo", "mpi")] == [3.0 / 6.0, 1.0 / 10.0]
    unchecked = bench_launch._merged([message(None, 1.0), message(None, 2.0)])
    assert unchecked["results"]["unisono"]["wrong"] is None


def test_busy_processes_run_until_the_measurement_ends(bench, monkeypatch, tmp_path):
    started, begin = [], bench_launch._busy
    monkeypatch.setattr(bench_launch, "_busy", lambda n: started.extend(begin(n)) or started)
    path = tmp_path / "out.json"
    code, out, err = bench("barrier", "--load", 3, *QUICK, "--json", path)
    assert (code, err) == (0, "")
    assert "# 3 busy processes beside the ranks\n" in out
    assert json.loads(path.read_text())["plan"]["load"] == 3
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 3


@pytest.mark.skipif(not CAN_BIND, reason="processes cannot be bound here")
def test_ranks_are_bound_to_cores_if_asked():
    found = set()
    for bind in (False, True):
        plan = BenchPlan(("barrier",), 2, loop=LoopPlan(rounds=1, iters=1, bind=bind))
        before = children()
        for message in run_ranks(plan):
            if message["kind"] == "start":
                ranks = children() - before
                found |= {(bind, tuple(os.sched_getaffinity(pid))) for pid in ranks}
    every = tuple(allowed_cpus())
    assert {cpus for bind, cpus in found if not bind} == {every}
    assert {(True, (cpu,)) for cpu in every[:2]} <= found


@pytest.mark.parametrize("name", ["intel-mpi", "open-mpi", "deepspeed"])
def test_a_peer_that_is_not_installed_is_named_with_how_to_install_it(name, monkeypatch, capsys):
    monkeypatch.setattr(bench_peers, "FOLDER", "/nowhere")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert main(["bench", "all_reduce", "--peer", name]) == 1
    error = capsys.readouterr().err
    file = bench_peers.peer_file(name)
    assert f"--peer {name} needs {file}, which is not there" in error
    assert f"make peers PEERS={name}" in error
    assert ("pip install --prefix /nowhere/" in error) == (name != "deepspeed")


@pytest.mark.whole("loads torch four times")
@needs_gloo
@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
def test_ranks_on_several_hosts_are_right(tmp_path):
    path = tmp_path / "out.json"
    words = ["--hosts=2", "--nproc-per-node=2", "-b1024", "-e1024", "--peer=gloo"]
    # A process of its own, because the command moves to another network.
    done = python("-m", "unisono", "bench", "all_reduce", *QUICK, "--json", path, *words)
    assert done.returncode == 0, done.stderr
    assert "# unisono bench: 4 ranks on 2 hosts; " in done.stdout
    results = json.loads(path.read_text())["rows"][0]["results"]
    assert {name: each["wrong"] for name, each in results.items()} == {"unisono": 0, "gloo": 0}


@pytest.mark.whole("loads torch twice")
@needs_gloo
def test_what_a_peer_lacks_is_said_and_left_out(bench):
    flags = ("-b", 8, "-e", 8, *QUICK, "-o", "avg", "-d", "int32", "--peer", "gloo")
    code, out, err = bench("all_reduce", *flags)
    assert (code, err) == (0, "")
    # torch's own words.
    assert "# note: gloo cannot do all_reduce: result type Float can't be cast to the" in out
    assert [line.split()[-2:] for line in out.splitlines() if "avg  " in line] == [["-", "-"]]


@pytest.mark.whole("loads torch twice")
@needs_gloo
def test_averages_of_gloo_are_right(bench, tmp_path):
    path = tmp_path / "out.json"
    words = ("-b", 64, "-e", 64, *QUICK, "-o", "avg", "--peer", "gloo", "--json", path)
    code, _, err = bench("all_reduce", "reduce", "reduce_scatter", *words)
    assert (code, err) == (0, "")
    results = [row["results"] for row in json.loads(path.read_text())["rows"]]
    assert [each["gloo"]["wrong"] for each in results] == [0, 0, 0]


@pytest.mark.parametrize("op", ["all_reduce", "reduce", "reduce_scatter"])
def test_nccl_of_torch_gets_averages(op):
    asked = []
    given = {name: lambda *words: asked.append(words[-1]) for name in (op, f"{op}_single")}
    fake = SimpleNamespace(ReduceOp=SimpleNamespace(AVG="torch's AVG"), **given)
    plan = BenchPlan(ops=(op,), nprocs=2, redop="avg", sizes=SizeRange(8, 8))
    (case,) = cases(op, plan)
    library = libraries._C10d("nccl", fake, lambda tensor: tensor, fake.ReduceOp, {}, {})
    library.call(Data(case, plan, 0))()
    assert asked == ["torch's AVG"]


@pytest.mark.parametrize("flags", [(), pytest.param(("--peer", "mpi"), marks=MPI_WHOLE)], ids=str)
def test_failing_rank_ends_the_command_and_is_named(bench, flags):
    code, _, err = bench("all_reduce", "--algorithm", "cube_mesh", *QUICK, *flags)
    assert code == 1
    assert "unisono: error: " in err
    assert "rank" in err
    assert "world size 8" in err


class Silent:
    """Ranks that run without end and send no message."""

    stopped = False

    def __init__(self, plan, port):
        pass

    def wait(self, limit_s):
        return False

    def stop(self):
        Silent.stopped = True


def test_ranks_that_say_nothing_are_ended(monkeypatch):
    monkeypatch.setattr(bench_launch, "_Spawned", Silent)
    plan = BenchPlan(ops=("barrier",), nprocs=2, loop=LoopPlan(timeout_s=0.001))
    with pytest.raises(LaunchError, match=r"no rank of 2 sent a message for 0\.002 s"):
        list(run_ranks(plan))
    assert Silent.stopped


# ---- the picture ---------------------------------------------------------------------------


@needs_matplotlib
def test_plot_draws_every_library_and_operation(bench, monkeypatch, tmp_path):
    sizes = [row(nbytes=nbytes, unisono=1.0, gloo=2.0) for nbytes in (8, 64)]
    rows = [*sizes, row("barrier", 0, unisono=1.0), *[each | {"op": "reduce"} for each in sizes]]
    messages = [{"kind": "row", **each} for each in rows]
    monkeypatch.setattr(bench_launch, "run_ranks", lambda plan: iter(messages))
    code, _, err = bench("all_reduce", "barrier", "reduce", "--plot", tmp_path / "out.png")
    assert (code, err) == (0, "")
    picture = (tmp_path / "out.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack_from(">II", picture, 16)
    assert (width, height) == (1000, 650), "two operations have several sizes"


@needs_matplotlib
def test_the_legend_of_a_plot_names_the_algorithm(bench, monkeypatch, tmp_path):
    rows = [row(nbytes=nbytes, unisono=1.0, gloo=2.0) for nbytes in (8, 64)]
    monkeypatch.setattr(
        bench_launch, "run_ranks", lambda plan: iter([{"kind": "row", **each} for each in rows])
    )
    file = tmp_path / "out.svg"
    for words, expected in (((), "unisono"), (("--algorithm", "two-shot"), "two_shot")):
        code, _, err = bench("all_reduce", *words, "--plot", file)
        assert (code, err) == (0, "")
        # matplotlib writes each text as a comment before its shapes.
        legend = re.findall("<!-- (unisono|two_shot|gloo) -->", file.read_text())
        assert legend == [expected, "gloo"]


@needs_matplotlib
def test_a_plot_has_a_colour_for_each_algorithm(tmp_path):
    """Also beside unisono's own blue, and for as many as anyone compares."""
    from unisono.workbench.bench.plot import plot

    names = ("unisono", "tree", "swing", "linear", "gloo", "mpi", "copy", "two_shot")
    rows = [row(nbytes=n, **{name: k + 1.0 for k, name in enumerate(names)}) for n in (8, 64)]
    host = {"cpu": "", "cores": 1, "load_before": 0, "load_after": 0}
    result = {"rows": rows, "machine": host, "plan": {"nprocs": 2, "dtype": "float32"}}
    file = tmp_path / "out.svg"
    plot(result, str(file))
    lines = re.findall(
        r"fill: none; stroke: (#\w{6}); stroke-width: (?:2\.2|1\.4)", file.read_text()
    )
    assert len({*lines}) == len(names)
    blues = [int(colour[5:], 16) for colour in lines if colour.startswith(("#00", "#1f"))]
    assert blues.count(0xB2) == 3  # two panels and the legend
    assert "#1f77b4" not in lines


@needs_matplotlib
def test_plot_of_one_size_is_refused(tmp_path):
    from unisono.workbench.bench.plot import plot

    with pytest.raises(InvalidArgumentError, match="several sizes"):
        plot({"rows": [row(unisono=1.0)]}, str(tmp_path / "out.png"))


@pytest.mark.whole("a program of benchmarks/")
@pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built")
def test_the_price_of_the_agreement_is_measured(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks/checks.py"
    python(script, "--rounds=1", "--sizes=8,64", "--json", tmp_path / "rows", check=True)
    rows = json.loads((tmp_path / "rows").read_text())["rows"]
    names = [
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "broadcast",
    ]
    wanted = [(name, nbytes) for nbytes in (8, 64) for name in names]
    assert [(row["call"], row["nbytes"]) for row in rows] == wanted
    assert all(row["checked_us"] > 0 < row["unchecked_us"] for row in rows)


# ---- pairs of ranks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nprocs", "hosts", "pairs"),
    [
        (2, 0, [(0, 1)]),
        (5, 0, [(0, 1), (2, 3)]),
        (4, 1, [(0, 1), (2, 3)]),
        (2, 2, [(0, 1)]),
        (4, 2, [(0, 2), (1, 3)]),
        (6, 3, [(0, 2), (1, 3)]),
        (12, 4, [(0, 3), (1, 4), (2, 5), (6, 9), (7, 10), (8, 11)]),
    ],
)
def test_pairs_lie_on_different_hosts(nprocs, hosts, pairs):
    plan = BenchPlan(("sendrecv",), nprocs, hosts)
    assert plan.pairs() == pairs
    peers = {rank: plan.peer_of(rank) for rank in range(nprocs)}
    paired = {pair for low, high in pairs for pair in ((low, high), (high, low))}
    assert {pair for pair in peers.items() if pair[1] is not None} == paired


@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
def test_the_table_shows_the_pairs_and_the_data_is_right():
    words = "bench sendrecv --hosts 2 --nproc-per-node 2 -b 8 -e 8 --iters 3 --rounds 2"
    done = python("-m", "unisono", *words.split())
    assert done.returncode == 0, done.stderr
    assert "# pairs of ranks: 0-2 1-3\n" in done.stdout
    assert "# Out of bounds values : 0 OK" in done.stdout
