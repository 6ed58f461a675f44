"""`unisono simulate`: its table, its files, and what it refuses."""

import json
import re

import pytest

from unisono.workbench.cli.main import main
from unisono.workbench.simulate import LogGOPS, from_goal
from unisono.workbench.simulate.evaluators.loggops import run


def table(text):
    """Return the cells of the table's rows."""
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


def simulate(capsys, *words):
    assert main(["simulate", *words]) == 0
    return table(capsys.readouterr().out)


def test_summit_fitted_on_three_points_predicts_the_others(capsys, golden):
    published = golden["summit_8B"]
    sizes = published["gpus"]
    words = ("-p", ",".join(map(str, sizes[:6])), "--algorithm", "ring,node_tree")
    rows = simulate(capsys, "all_reduce", *words, "--net", "summit")
    assert len(rows) == 12
    for gpus, _, algorithm, time_us, *_, measured, error, _ in rows:
        series = published["ring_us" if algorithm == "ring" else "tree_us"]
        expected = series[sizes.index(int(gpus))]
        assert float(measured.replace(",", "")) == pytest.approx(expected, abs=0.06)
        off = float(time_us.replace(",", "")) / expected - 1
        assert abs(off) < 0.05
        assert float(error) == pytest.approx(100 * off, abs=0.11)


def test_summit_at_24576_gpus(capsys, golden):
    words = ("-p", "24576", "--algorithm", "ring,node_tree", "--net", "summit")
    ring, tree = simulate(capsys, "all_reduce", *words)
    times = [float(row[3].replace(",", "")) for row in (ring, tree)]
    published = golden["summit_8B"]
    assert times[0] == pytest.approx(published["ring_us"][-1], rel=0.05)
    assert times[1] == pytest.approx(published["tree_us"][-1], rel=0.05)
    low, high = published["ratio_24576"]
    assert low < times[0] / times[1] < high


def test_json_holds_the_table(capsys, tmp_path):
    file = tmp_path / "out.json"
    words = ("-p", "16", "--hosts", "4", "-b", "1M", "--net", "fat-tree", "--json", str(file))
    rows = simulate(capsys, "all_reduce", *words)
    document = json.loads(file.read_text())
    assert [row["algorithm"] for row in document["rows"]] == [row[2] for row in rows]
    assert {"ring", "two_level", "node_tree"} <= {row["algorithm"] for row in document["rows"]}
    for cells, row in zip(rows, document["rows"], strict=True):
        parts = [row[part] for part in ("latency_us", "bytes_us", "busy_us", "ends_us")]
        assert sum(parts) == pytest.approx(row["time_us"])
        assert float(cells[3].replace(",", "")) == pytest.approx(row["time_us"], abs=0.5)
    ring = next(row for row in document["rows"] if row["algorithm"] == "ring")
    assert (ring["messages"], ring["bytes"]) == (16 * 30, 30 << 20)


def test_alpha_beta_and_a_file(capsys, tmp_path):
    """T = 2(p-1) (latency + bytes/p / bandwidth) for a ring."""
    file = tmp_path / "mine.toml"
    file.write_text('topology = "full"\nlatency_us = 3\ngbps = 2.0\n')
    words = ("-p", "8", "-b", "64K", "--net", str(file), "--algorithm", "ring")
    ((*_, time, latency, bytes_, busy, ends),) = simulate(capsys, "all_reduce", *words)
    assert [latency, busy, ends] == ["42.0", "0.0", "0.0"]
    assert float(bytes_) == pytest.approx(14 * 8192 / 2000, abs=0.05)
    assert float(time) == pytest.approx(42 + 14 * 8192 / 2000, abs=0.05)
    assert simulate(capsys, "all_reduce", *words, "--model", "alpha-beta")[0][3] == time


def test_loggops_and_goal(capsys, tmp_path):
    file = tmp_path / "reduce.goal"
    words = ("-p", "8", "-b", "1K", "--algorithm", "binomial", "--goal", str(file))
    ((*_, time),) = simulate(capsys, "reduce", *words, "--model", "loggops")
    assert time == "34.9"
    assert max(run(from_goal(file.read_text()), LogGOPS()).finish_ps) == 34_914_000


def test_a_time_with_a_tilde_is_approximate(capsys):
    words = ("-p", "32768", "--algorithm", "recursive_doubling", "-b", "1M", "--net", "fat-tree")
    ((*_, time, _latency, _bytes, busy, _ends),) = simulate(capsys, "scan", *words)
    assert re.fullmatch(r"~[\d,.]+", time)
    assert busy != "0.0"


def test_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.png"
    words = ("-p", "96,192", "--algorithm", "ring", "--net", "summit", "--plot", str(file))
    simulate(capsys, "all_reduce", *words)
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["all_reduce", "--net", "nowhere"], "; or a file that ends in .toml)"),
        (["all_reduce", "--net", "no/file.toml"], "no network 'no/file.toml'"),
        (["all_reduce", "--algorithm", "rings"], "all_reduce has no algorithm 'rings'"),
        (["all_reduce", "-p", "10", "--hosts", "4"], "-p [10] do not fill 4 hosts"),
        (["all_reduce", "-p", "8,16", "--hosts", "4"], "--hosts needs one number of ranks"),
        (["all_reduce", "-b", "8", "-e", "4"], "-b 8 is larger than -e 4"),
        (["all_reduce", "-p", "9", "--algorithm", "cube_mesh"], "needs world size 8, got 9"),
        (["broadcast", "-p", "4", "--root", "4", "--algorithm", "ring"], "root is 4, expected"),
    ],
)
def test_bad_words_are_refused(capsys, words, expected):
    assert main(["simulate", *words]) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("latency = 3", "bad.toml: no key 'latency' (known: "),
        ("gbps = true", "gbps is True, expected a value like inf"),
        ('interfaces = "two"', "interfaces is 'two', expected a value like 1"),
        ('topology = "mesh"', "topology is 'mesh', not hosts or switch"),
        ("latency_us = [", "bad.toml: Invalid value"),
    ],
)
def test_bad_files_are_refused(capsys, tmp_path, text, expected):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    assert main(["simulate", "all_reduce", "--net", str(file)]) == 1
    assert expected in capsys.readouterr().err


def test_unwritable_files_are_refused(capsys):
    words = ["all_reduce", "-p", "2", "--algorithm", "ring", "--json", "/no/such/file.json"]
    assert main(["simulate", *words]) == 1
    assert "cannot write /no/such/file.json" in capsys.readouterr().err
