"""Every example: on forked ranks in all sizes, and as a user starts it, under the launcher."""

import contextlib
import importlib
import io
import os
import re
import runpy
import shutil
import sys
import traceback
import warnings
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import unisono
from tests.support.launches import RUN, Launch, environment
from tests.support.programs import python

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 100.0

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
TORCH = [needs_torch, pytest.mark.whole("loads torch on every rank")]


def launch(script, nprocs, *arguments, cwd, program=None):
    """Run a script to its end; returns exit code, sorted lines of stdout, and stderr."""
    words = ("--nproc-per-node", nprocs, script, *arguments)
    # With more threads than free cores, those of a matrix product wait for each other for seconds.
    run = Launch(*words, cwd=cwd, program=program, OMP_NUM_THREADS="1", PYTHONWARNINGS="error")
    try:
        code, out, err = run.finish()
    finally:
        run.close()
    return code, sorted(out.splitlines()), err


def play(rank, script, filters):
    """Run a script on a rank; return its exit code, output and error."""
    out, err = io.StringIO(), io.StringIO()
    sys.path.insert(0, os.path.dirname(script))
    warnings.simplefilter(filters)
    code = 0
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            code, text = (ended.code, "") if isinstance(ended.code, int) else (1, str(ended.code))
            err.write(text)
        except Exception:
            code = 1
            traceback.print_exc(file=err)
    return code, out.getvalue(), err.getvalue()


def played(script, size, filters="error"):
    """Run a script on forked ranks; returns largest exit code, sorted output, and all errors."""
    ranks = unisono.launch(play, size, (str(script), filters), start_method="forkserver")
    codes, outs, errs = zip(*ranks, strict=True)
    return max(codes), sorted("".join(outs).splitlines()), "".join(errs)


def two_groups(size):
    sums = [10 * sum(range(0, size, 2)), 10 * sum(range(1, size, 2))]
    for rank in range(size):
        members = len(range(rank % 2, size, 2))
        place = f"number {rank // 2} of {members} in its group"
        own, other = sums[rank % 2], sums[1 - rank % 2]
        yield f"rank {rank}, {place}: own sum {own}, the other group's {other}"


def ring(size):
    for rank in range(size):
        yield f"rank {rank}: came by in the order {[(rank - i) % size for i in range(size)]}"


def softmax_norm(size):
    vector = np.random.default_rng(0).normal(1000, 50, 100_003)
    length = np.linalg.norm(vector) * 1e200
    for rank in range(size):
        count = len(range(rank, len(vector), size))
        total = "all probabilities 1.000000000000"
        yield f"rank {rank}: {count} elements, {total}, norm {length:.9e}"


def scatter(size):
    sums = np.random.default_rng(0).integers(0, 1_000_000, (3 * size, 1000)).sum(axis=1)
    for rank in range(size):
        mine = sums[3 * rank : 3 * rank + 3].tolist()
        yield f"rank {rank}: the sums of my 3 rows are {mine}"


def jacobi(size):
    square = np.zeros((62, 62))
    square[:, 0] = 1
    for _ in range(200):
        beside = square[:-2, 1:-1], square[2:, 1:-1], square[1:-1, :-2], square[1:-1, 2:]
        square[1:-1, 1:-1] = np.mean(beside, axis=0)
    grid = {1: (1, 1), 2: (1, 2), 4: (2, 2)}[size]
    yield f"{size} ranks as a grid {grid}: mean {square[1:-1, 1:-1].mean():.6f}, right: True"


def window_halo(size):
    rod = np.zeros(122)
    rod[0] = 1
    for _ in range(300):
        rod[1:-1] = (rod[:-2] + rod[2:]) / 2
    yield f"{size} ranks: mean {rod[1:-1].mean():.9f}"


def work_queue(size):
    steps = 0
    for n in range(1, 201):
        while n != 1:
            n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
    yield f"200 tasks, {steps} steps"


def parameter_server(size):
    yield f"{size} ranks: y = 3.00 x + -1.00"


def unix_transport(size):
    sums = (size * np.arange(3.0) + sum(range(size))).tolist()
    for rank in range(size):
        yield f"rank {rank}: the sum is {sums}"


def torch_tensors(size):
    for rank in range(size):
        column = [sum(range(size))] * 4
        yield f"rank {rank}: mean {(size + 1) / 2}, column {column}"


@pytest.mark.parametrize(
    ("expected", "nprocs"),
    [
        (two_groups, 2),
        (two_groups, 5),
        (unix_transport, 3),
        *[(lines, n) for lines in (jacobi, ring, softmax_norm, scatter) for n in (1, 2, 4)],
        *[(lines, n) for lines in (window_halo, work_queue, parameter_server) for n in (1, 3)],
        pytest.param(torch_tensors, 3, marks=TORCH),
    ],
)
def test_prints_what_the_oracle_says(expected, nprocs):
    # Other packages may have warnings of their own.
    filters = "default" if expected is torch_tensors else "error"
    result = played(EXAMPLES / f"{expected.__name__}.py", nprocs, filters)
    assert result == (0, list(expected(nprocs)), "")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("expected", [jacobi, two_groups, ring, softmax_norm, scatter, work_queue])
def test_as_a_user_starts_it(expected, tmp_path):
    result = launch(EXAMPLES / f"{expected.__name__}.py", 2, cwd=tmp_path, program=RUN)
    assert result == (0, list(expected(2)), "")


@pytest.mark.parametrize("nprocs", [1, 4])
def test_broadcast_weights_ends_with_those_of_the_last_rank(nprocs):
    code, lines, err = played(EXAMPLES / "broadcast_weights.py", nprocs)
    assert (code, err) == (0, "")
    digests = [re.fullmatch(r"rank \d+: (\w{12}) became (\w{12})", line).groups() for line in lines]
    assert len(digests) == nprocs
    source = digests[-1][0]
    assert [after for _, after in digests] == [source] * nprocs
    assert source not in [before for before, _ in digests[:-1]]


def run(*command, limit_s=LIMIT_S, **variables):
    """Run a program of Python to its end; returns exit code, stdout and stderr."""
    env = environment(OMP_NUM_THREADS="1", **variables)
    done = python(*command, limit_s=limit_s, env=env)
    return done.returncode, done.stdout, done.stderr


def test_engines_serve_whole_versions_while_weights_change():
    words = "--width", "64", "--requests", "20", "--versions", "3"
    code, lines, err = launch(EXAMPLES / "serve_weights.py", 5, *words, cwd=EXAMPLES)
    assert (code, err) == (0, "")
    names = [re.match(r"(\w+) *: \d+ answers, median [\d.]+ ms, p99 ", line)[1] for line in lines]
    assert names == ["after", "before", "during", "start"]


def test_two_jobs():
    code, out, err = run(EXAMPLES / "two_jobs.py", PYTHONWARNINGS="error")
    numbers = "both 1111, gathered 11 11 1100 1100"
    sums = {"left": 11, "right": 1100}
    lines = [f"{job} {r}: own {own}, {numbers}" for job, own in sums.items() for r in (0, 1)]
    assert (code, sorted(out.splitlines()), err) == (0, lines, "")


@needs_torch
@pytest.mark.whole("loads torch on each rank")
@pytest.mark.parametrize("launcher", [["unisono", "run"], ["torch.distributed.run"]], ids=str)
def test_torch_ddp_under_both_launchers(launcher):
    code, out, err = run("-m", *launcher, "--nproc-per-node", "2", EXAMPLES / "torch_ddp.py")
    assert code == 0, err
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "all 2 ranks hold the same parameters" in out


@needs_torch
@pytest.mark.whole("loads torch ten times")
@pytest.mark.timeout(250)
def test_torch_handover_survives_a_crash_of_each_job():
    code, out, err = run(EXAMPLES / "torch_handover.py", limit_s=240)
    assert code == 0, out + err
    assert "WRONG" not in err
    assert len(re.findall("has the trainer's weights by ticket", out)) == 3
    assert out.count(": crashes\n") == 2


def test_two_groups_needs_two_ranks():
    code, lines, err = played(EXAMPLES / "two_groups.py", 1)
    assert (code, lines) == (1, [])
    assert "two groups need at least two ranks" in err


def with_fault(name, old, new, folder):
    """Return a copy of an example in which `old` is replaced; its imports come along."""
    for path in (*EXAMPLES.glob("*.py"), EXAMPLES / "digits.csv.gz"):
        shutil.copy(path, folder)
    script = folder / name
    text = script.read_text()
    assert old in text
    script.write_text(text.replace(old, new))
    return script


def test_torch_tensors_says_so_without_torch(tmp_path):
    script = with_fault("torch_tensors.py", 'find_spec("torch")', 'find_spec("tporch")', tmp_path)
    assert played(script, 2) == (0, ["skipped: torch is not installed"] * 2, "")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("two_groups.py", "(own, group=mine)", "(own)"),
        ("jacobi.py", "exchange(block, mesh)\n        ", ""),
        ("ring.py", "outgoing = collected[", "outgoing = 0 * collected["),
        ("softmax_norm.py", "over_all(powers.sum(), dist.ReduceOp.SUM)", "powers.sum()"),
        ("softmax_norm.py", "* np.sqrt(", "* np.cbrt("),
        ("scatter.py", "rows.sum(axis=1)", "rows[:, 1:].sum(axis=1)"),
        ("broadcast_weights.py", "src=source)", "src=source if weight.size < 4096 else rank)"),
        pytest.param(*("torch_tensors.py", "ReduceOp.AVG", "ReduceOp.SUM"), marks=TORCH),
    ],
)
def test_fault_is_noticed(name, old, new, tmp_path):
    code, _, err = played(with_fault(name, old, new, tmp_path), 2, "default")
    assert code == 1
    assert "WRONG" in err or "CollectiveMismatchError" in err


def table_of(lines):
    """Return the summary that train_digits prints, by name."""
    return dict(re.findall(r"^(\w.*?)  +(\S.*)$", "\n".join(lines), re.MULTILINE))


def difference_in(lines):
    return float(table_of(lines)["largest difference to rank 0 alone"].split()[0])


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("nprocs", "epochs", "batch", "accuracy"),
    [
        (1, 8, 150, 0.95),
        (2, 8, 97, 0.95),
        (4, 8, 150, 0.95),
        # The last batch of an epoch has one image, so that three shares are empty.
        (4, 4, 1499, 0.0),
    ],
)
def test_train_digits(tmp_path, nprocs, epochs, batch, accuracy):
    options = ("--epochs", epochs, "--batch", batch, "--min-accuracy", accuracy)
    code, lines, err = launch(EXAMPLES / "train_digits.py", nprocs, *options, cwd=tmp_path)
    assert (code, err) == (0, "")
    reached = [re.search(r"test accuracy +([\d.]+)%  step", line) for line in lines]
    reached = [float(found[1]) for found in reached if found]
    assert len(reached) == epochs
    assert reached[-1] >= 100 * accuracy
    misread = [re.match(r"(\d+) of 297 test images are misread", line) for line in lines]
    assert [297 - round(2.97 * reached[-1])] == [int(found[1]) for found in misread if found]
    table = table_of(lines)
    assert {f"rank {rank}" for rank in range(nprocs)} <= set(table)
    assert table["ranks"] == str(nprocs)
    assert table["weights equal on all ranks"] == "yes, bit for bit"
    difference = difference_in(lines)
    assert difference <= 1e-11
    # A difference of zero would mean that nothing was added up in another order.
    assert (difference > 0) == (nprocs > 1)
    assert 0 < int(table["of it communicating and waiting"].partition("%")[0]) < 100


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("old", "new", "failed"),
    [
        ("/ len(batch)", "/ len(share)", "difference to rank 0 alone"),
        (
            "ranks.start_sum(gradient)",
            "gradient.shape[1] == 10 or ranks.start_sum(gradient)",
            "weights equal on all ranks, difference to rank 0 alone",
        ),
        (
            "dist.broadcast(weight, src=0)",
            "pass",
            "weights equal on all ranks, difference to rank 0 alone",
        ),
        ("", "", "test accuracy"),
    ],
    ids=["wrong scale", "a layer left out", "no broadcast", "too few epochs"],
)
def test_train_digits_fails(old, new, failed, tmp_path):
    script = with_fault("train_digits.py", old, new, tmp_path)
    accuracy = 1.0 if failed == "test accuracy" else 0.0
    code, lines, err = launch(script, 2, "--epochs", 2, "--min-accuracy", accuracy, cwd=tmp_path)
    assert code == 1
    assert f"FAILED: {failed}\n" in err
    # A fault must stand out from rounding by far, or the tolerance would be a guess.
    assert (difference_in(lines) > 1e-3) == ("difference" in failed)


@pytest.mark.skipif(find_spec("rich") is None, reason="rich is not installed")
def test_train_digits_on_a_terminal(tmp_path):
    # The launcher's option as in `make demo`.
    words = ["--fold=never", "-n2", EXAMPLES / "train_digits.py", "--epochs", 5]
    variables = {"TERM": "xterm-256color", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    run = Launch(*words, "--min-accuracy", 0.9, cwd=tmp_path, terminal=True, **variables)
    try:
        code, text, _ = run.finish()
    finally:
        run.close()
    assert code == 0, text
    assert "training on 2 ranks" in text
    assert "100%" in text
    assert "│ weights equal on all ranks         │ yes, bit for bit" in text
    shown = len(re.findall(r"\d \(is \d\)|   \d    ", text))
    assert shown >= 10
    assert text.count("▀") == shown * 4 * 8  # a half block in levels of grey for 2 pixels


def elastic(script, *options, cwd):
    words = ("--restart", "worker", "--max-restarts", 2, "-n4", script, *options)
    run = Launch(*words, cwd=cwd, OMP_NUM_THREADS="1", PYTHONWARNINGS="error")
    try:
        code, out, err = run.finish()
    finally:
        run.close()
    return code, out, err


@pytest.mark.whole("starts 7 workers")
@pytest.mark.linux("the launcher watches pidfds")
def test_elastic_digits(tmp_path):
    picture = tmp_path / "picture.svg"
    code, out, err = elastic(EXAMPLES / "elastic_digits.py", "--plot", picture, cwd=tmp_path)
    assert code == 0, err
    assert (
        "120 steps count, 7 workers\nsame weights as without faults, but for rounding: yes" in out
    )
    assert len(re.findall(r"was killed by SIGKILL; replacement \d of 2", err)) == 2
    sizes = [line.count("worker") for line in out.splitlines() if re.match(r"step +\d+: w", line)]
    # A replacement may come before the ranks make a step without the lost worker.
    assert (sizes[0], sizes[-1], max(sizes)) == (4, 5, 5)
    assert picture.read_text(encoding="utf-8").count("killed after step") == 2


@pytest.mark.whole("starts 7 workers")
@pytest.mark.linux("the launcher watches pidfds")
def test_elastic_digits_fails(tmp_path):
    script = with_fault("elastic_digits.py", "weight / len(indices)", "1 / len(indices)", tmp_path)
    code, _, err = elastic(script, "--epochs", 6, cwd=tmp_path)
    assert code == 1
    assert "FAILED: difference" in err


def test_timeline_draws_each_worker(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    timeline = importlib.import_module("timeline")
    workers = [["a", "b"]] * 3 + [["a"]] * 2 + [["a", "c"]] * 5
    record = [timeline.Moment(100.0 + n, each, n / 10) for n, each in enumerate(workers)]
    picture = ElementTree.fromstring(timeline.draw(record))
    space = "{http://www.w3.org/2000/svg}"
    texts = [each.text for each in picture.iter(f"{space}text")]
    assert [each for each in texts if each in "abc"] == ["a", "b", "c"]
    assert {"killed after step 3", "from step 6", "9.0 s, step 10"} <= set(texts)
    bars = [each for each in picture.iter(f"{space}rect") if "rx" in each.attrib]
    widths = [float(each.get("width")) for each in bars]
    # In units of the time between two steps.
    unit = widths[0] / 9
    assert [round(width / unit) for width in widths] == [9, 2, 4]
    [curve] = picture.iter(f"{space}polyline")
    assert len(curve.get("points").split()) == 10


def test_display_draws_what_it_is_given(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    display = importlib.import_module("display")
    assert display.chart([0, 1], 0, 2, height=2) == [" █", "▁█"]
    image = np.random.default_rng(0).integers(0, 2, (8, 8))
    halves = {" ": (0, 0), "▄": (0, 1), "▀": (1, 0), "█": (1, 1)}
    drawn = [[halves[text] for text, _ in line] for line in display.picture(image.ravel(), False)]
    np.testing.assert_array_equal(np.moveaxis(drawn, 2, 1).reshape(8, 8), image)
