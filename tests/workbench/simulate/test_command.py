"""`unisono simulate`: its table, its files, and what it refuses."""

import json
import re
import threading

import pytest

from tests.support.tools import tool
from unisono.core.schedules import Topology, select
from unisono.errors import UnknownNameError
from unisono.workbench.cli.against import causes
from unisono.workbench.cli.main import main
from unisono.workbench.cli.simulate import machine_of
from unisono.workbench.cli.terminal import working
from unisono.workbench.simulate import LogGOPS, from_goal
from unisono.workbench.simulate.evaluators.loggops import run


def table(text):
    """Return the cells of the table's rows."""
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


def simulate(capsys, *words):
    """Return the cells of each row, without those from `pieces` on."""
    return [cells[:8] for cells in whole(capsys, *words)]


def whole(capsys, *words):
    assert main(["simulate", *words]) == 0
    return table(capsys.readouterr().out)


def test_summit_fitted_on_three_points_predicts_the_others(capsys, golden):
    published = golden["summit_8B"]
    sizes = published["gpus"]
    words = ("-p", ",".join(map(str, sizes[:6])), "--algorithm", "ring,node_tree")
    rows = whole(capsys, "all_reduce", *words, "--net", "summit")
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
    tree, ring = simulate(capsys, "all_reduce", *words)
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


def test_algorithms_with_spaces_and_in_several_flags(capsys):
    words = ("all_reduce", "-n", "4", "--algorithm", "ring, tree", "--algorithm", "swing")
    assert {row[2] for row in simulate(capsys, *words)} == {"ring", "tree", "swing"}


def test_alpha_beta_has_no_bound(capsys, tmp_path):
    """What a tree sends to its children at once takes less than a link needs for the bytes."""
    file = tmp_path / "out.json"
    words = ["simulate", "all_reduce", "-n", "8", "-b", "64M", "--algorithm", "double_tree,ring"]
    assert main([*words, "--model", "alpha-beta", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "# model alpha-beta: messages share no link, so what a rank sends to many" in out
    assert " bound" not in out
    rows = json.loads(file.read_text())["rows"]
    assert [row["bound_us"] for row in rows] == [None, None]
    assert main([*words, "--json", str(file)]) == 0
    assert "share no link" not in capsys.readouterr().out
    assert all(row["bound_us"] <= row["time_us"] for row in json.loads(file.read_text())["rows"])
    # 2 (p-1)/p n/B
    least = 2 * 7 / 8 * (64 << 20) / 12_500
    assert rows[0]["time_us"] < least
    compressed = ["simulate", "all_gather", "--compress", "int8", "--model", "alpha-beta"]
    assert main([*compressed, "-n", "4", "-b", "1M"]) == 0
    assert " bound" not in capsys.readouterr().out


def test_loggops_and_goal(capsys, tmp_path):
    file, net = tmp_path / "reduce.goal", tmp_path / "loggopsim.toml"
    net.write_text("L_ns = 2500\no_ns = 1500\ng_ns = 1000\nG_ns = 6\nO_ns = 0\n")
    words = ("-p", "8", "-b", "1K", "--algorithm", "binomial", "--goal", str(file))
    words += ("--net", str(net), "--model", "loggops")
    ((*_, time, _, _, _, _),) = simulate(capsys, "reduce", *words)
    assert time == "34.9"
    assert max(run(from_goal(file.read_text()), LogGOPS()).finish_ps) == 34_914_000


def test_a_time_with_a_tilde_is_approximate(capsys):
    words = ("-p", "32768", "--algorithm", "recursive_doubling", "-b", "1M", "--net", "fat-tree")
    ((*_, time, _latency, _bytes, busy, _ends),) = simulate(capsys, "scan", *words)
    assert re.fullmatch(r"~[\d,.]+", time)
    assert busy != "0.0"


def test_equal_lines_of_a_plot_are_seen(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.svg"
    words = ("-n", "4", "-b", "1M", "-e", "16M", "--algorithm", "swing,halving_doubling")
    rows = simulate(capsys, "all_reduce", *words, "-o", str(file))
    assert len({row[3] for row in rows}) == len(rows) / 2, "all times are equal"
    text = file.read_text()
    widths = []
    for colour in ("#1f77b4", "#ff7f0e"):
        [style, *_] = re.findall(f'style="(fill: none; stroke: {colour}[^"]*)"', text)
        widths.append(float((re.findall(r"stroke-width: ([\d.]+)", style) or ["1"])[0]))
    # The second is drawn over the first.
    assert widths[0] > widths[1] + 1


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
        (["all_reduce", "-p", "6", "--hosts", "4"], "-n 6 does not fill 4 hosts"),
        (
            ["all_reduce", "--net", "nvlink", "--algorithm", "two_shot", "-b", "64M"],
            "8 channels of all_reduce (two_shot) on 16 ranks, 8 per host: expected all_reduce, ",
        ),
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
        ("send_us = -5", "send_us is -5, expected a number 0 or more, and at most 1e9"),
        ("latency_us = nan", "latency_us is nan, expected a number 0 or more"),
        ("start_us = inf", "start_us is inf, expected a number 0 or more"),
        ("gbps = 0", "gbps is 0, expected a number above 0"),
        ("copy_gbps = nan", "copy_gbps is nan, expected a number above 0"),
        ("cores = -1", "cores is -1, expected a number 0 or more"),
        ("interfaces = 0", "interfaces is 0, expected a number 1 or more"),
        ("L_ns = nan", "L_ns is nan, expected a number 0 or more"),
        ("[algorithms.ring]\nrecv_us = -1", "recv_us is -1, expected a number 0 or more"),
        ("algorithms = 3", "bad.toml: algorithms has no table of keys per algorithm"),
        ("published = 3", "bad.toml: published has no microseconds by size, algorithm and ranks"),
        ("gbps = 1e-300", "gbps is 1e-300, expected a number above 0 (at least 1e-6)"),
        (
            "interfaces = 1000000000",
            "interfaces is 1000000000, expected a number 1 or more, and at ",
        ),
        (
            "channels = 1000000000",
            "channels is 1000000000, expected a number 1 or more, and at most",
        ),
        (
            "efficiency = 5",
            "efficiency is 5, expected a number above 0 (at least 1e-6), and at most 1",
        ),
        ("[algorithms.rnig]\ngbps = 1", "bad.toml: no algorithm 'rnig' (known: bine, "),
        ("[published.8.ring]\n16 = 0", "bad.toml: [published.8.ring] has 0.0 us on 16 ranks"),
        ("[published.8.ring]\n16 = nan", "[published.8.ring] has nan us on 16 ranks"),
        ("[published.-8.ring]\n16 = 3", "[published.-8.ring] has 3.0 us on 16 ranks"),
        ('routing = "best"', "routing is 'best', not adaptive or hashed"),
    ],
)
def test_bad_files_are_refused(capsys, tmp_path, text, expected):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    assert main(["simulate", "all_reduce", "--net", str(file)]) == 1
    assert expected in capsys.readouterr().err


def test_the_text_of_a_file_is_text(capsys, tmp_path):
    file = tmp_path / "bad.toml"
    file.write_bytes(b'about = "\xe9"')
    assert main(["simulate", "all_reduce", "--net", str(file)]) == 1
    assert "bad.toml is no text: 'utf-8' codec" in capsys.readouterr().err
    file.write_text('about = "a\\u001b[31mred"')
    assert main(["simulate", "all_reduce", "-p", "2", "--net", str(file)]) == 0
    assert "bad.toml: a?[31mred\n" in capsys.readouterr().out


def test_unwritable_files_are_refused(capsys):
    words = ["all_reduce", "-p", "2", "--algorithm", "ring", "--json", "/no/such/file.json"]
    assert main(["simulate", *words]) == 1
    assert "cannot write /no/such/file.json" in capsys.readouterr().err


def test_an_export_changes_no_time_and_loggops_follows_the_net(capsys, tmp_path):
    words = ("-p", "16", "--hosts", "4", "-b", "1M", "--net", "fat-tree", "--algorithm", "ring")
    plain = simulate(capsys, "all_reduce", *words)
    assert simulate(capsys, "all_reduce", *words, "--goal", str(tmp_path / "x.goal")) == plain
    program = from_goal((tmp_path / "x.goal").read_text())
    assert main(["simulate", "all_reduce", *words, "--model", "loggops"]) == 0
    out = capsys.readouterr().out
    # 1.6 us between hosts, 0.3 us per message, 12.5 GB/s.
    assert "L 1600 ns, o 300 ns, g 0 ns, G 0.08 ns, O 0 ns" in out
    model = LogGOPS(1_600_000, 300_000, 0, 80, 0)
    expected = max(run(program, model).finish_ps) / 1e6
    assert float(table(out)[0][3]) == pytest.approx(expected, abs=0.05)


def test_published_times_stand_beside_what_was_measured_only(capsys):
    words = ("-p", "96", "--net", "summit", "--algorithm", "ring")
    for op, more, expected in (
        ("all_reduce", (), True),
        ("broadcast", (), False),
        ("all_reduce", ("--hosts", "12"), False),
        ("all_reduce", ("--model", "links"), False),
    ):
        (row,) = whole(capsys, op, *words, *more)
        assert ("173.6" in row) == expected, (op, more)


def test_explain_and_simulate_answer_alike(capsys):
    """Both take the pipeline of a group, and show it."""
    words = ("-p", "16", "--hosts", "4")
    rows = whole(capsys, "all_reduce", *words, "-b", "4M", "--net", "fat-tree")
    assert main(["explain", "all_reduce", "4M", *words, "--net", "fat-tree"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    told = {line[0]: (line[2], line[3]) for line in lines if len(line) >= 4 and line[1].isdigit()}
    assert told == {row[2]: (row[8], row[3]) for row in rows}
    assert {row[8] for row in rows} > {"1"}


def test_bandwidths_as_nccl_tests_and_a_lower_bound(capsys):
    """busbw = 2 (p-1)/p algbw; a ring on one switch without latency is as fast as any."""
    (row,) = whole(capsys, "all_reduce", "-p", "16", "-b", "1M", "--algorithm", "ring")
    time, algbw, busbw, bound = (float(row[at].replace(",", "")) for at in (3, 9, 10, 11))
    assert algbw == pytest.approx((1 << 20) / time / 1000, abs=0.01)
    assert busbw == pytest.approx(algbw * 30 / 16, abs=0.02)
    # 2 latencies of 1 us, 15/8 of 1 MiB at 12.5 GB/s, a send and a receive.
    assert bound == pytest.approx(2 + 2 * 15 / 16 * (1 << 20) / 12.5e3 + 0.6, abs=0.06)
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather"):
        for net in ("switch", "fat-tree"):
            for row in whole(capsys, op, "-p", "16", "--net", net, "-b", "64K"):
                assert float(row[11].replace(",", "")) <= float(row[3].replace(",", "")) + 0.1


def test_a_time_that_depends_on_the_order_of_equal_times_has_its_range(capsys):
    words = ("-p", "16", "--hosts", "4", "-b", "1M", "--net", "fat-tree")
    words += ("--algorithm", "ring,halving_doubling")
    ring, halving = whole(capsys, "all_reduce", *words)
    assert ring[12] == "-"
    least, most = map(float, halving[12].split("-"))
    assert least <= float(halving[3]) <= most
    assert least < most


def test_a_long_run_says_that_it_goes_on(monkeypatch):
    told, lines = threading.Event(), []

    class Stream:
        def write(self, text):
            lines.append(text)
            told.set()

        def flush(self):
            pass

    monkeypatch.setattr("sys.stderr", Stream())
    with working("ring, 4 ranks", 0.01):
        assert told.wait(30)
    assert re.fullmatch(r"# ring, 4 ranks: \d+ s so far", lines[0])


NCCL_TESTS = """\
# nThread 1 nGpus 1 minBytes 268435456 maxBytes 1073741824 step: 2(factor) warmup iters: 5
# Using devices
#  Rank  0 Group  0 Pid 181932 on    node-a device  0 [0x10] NVIDIA A100-SXM4-40GB
#  Rank  1 Group  0 Pid 181933 on    node-b device  0 [0x10] NVIDIA A100-SXM4-40GB
#                                                  out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)
   268435456      67108864     float     sum      -1    {first}   30.00   30.00      0    9000.0
  1073741824     268435456     float     sum      -1    {last}   30.00   30.00      0    9000
# Out of bounds values : 0 OK
"""


def test_against_the_output_of_nccl_tests(capsys, tmp_path):
    """2 ranks on 2 hosts: a measurement with half of the interface's bandwidth is explained."""
    net, file = tmp_path / "two.toml", tmp_path / "out.txt"
    net.write_text("ranks_per_host = 1\ninterfaces = 1\nlatency_us = 5\ngbps = 20\n")
    for slower, told in ((1.0, False), (2.0, True)):
        times = [f"{slower * nbytes / 20e3:.1f}" for nbytes in (1 << 28, 1 << 30)]
        file.write_text(NCCL_TESTS.format(first=times[0], last=times[1]))
        words = ("--net", str(net), "--against", str(file), "--algorithm", "ring")
        assert main(["simulate", "all_reduce", *words]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"# all_reduce on 2 ranks, {file} against net {net}")
        (*_, ratio, name) = table(out)[1]
        assert (float(ratio), name) == (pytest.approx(slower, abs=0.02), "ring")
        assert ("- interfaces at half of their bandwidth: 107," in out) == told
        assert ("what would explain it" in out) == told
    file.write_text("nothing")
    assert main(["simulate", "all_reduce", "--against", str(file)]) == 1
    assert "out.txt has no line of nccl-tests: size, count, ..., time" in capsys.readouterr().err
    assert main(["simulate", "all_reduce", "--against", str(tmp_path / "none")]) == 1
    assert re.search(r"cannot read .*none: No such file", capsys.readouterr().err)


def test_against_refuses_what_it_would_ignore(capsys, tmp_path):
    file, own = tmp_path / "out.txt", tmp_path / "mine.py"
    file.write_text(NCCL_TESTS.format(first=9000.0, last=18000.0))
    words = ["all_reduce", "--against", str(file)]
    given = ["-p", "4", "--hosts", "2", "-b", "8", "-e", "64", "--json", "a", "--plot", "b"]
    assert main(["simulate", *words, *given]) == 1
    expected = "out.txt makes no use of --json, --plot, -b, -e, -n, --hosts"
    assert expected in capsys.readouterr().err
    for op in ("barrier", "scan"):
        assert main(["simulate", op, *words[1:]]) == 1
        assert f"--against: nccl-tests has no {op}" in capsys.readouterr().err
    # An algorithm of a file, a size of 0, and the ranks of the command.
    own.write_text(
        "from unisono.lowlevel import build\n"
        "def mine_against(p):\n    return build('all_reduce', 'ring', p)\n"
    )
    zero = "           0             0     float     sum      -1    5.0   0.00   0.00      0    5.0"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([zero, *(line for line in lines if "Rank" not in line)]))
    words += ["--algorithm", f"{own}:mine_against"]
    assert main(["simulate", *words, "-p", "4"]) == 0
    assert [row[-1] for row in table(capsys.readouterr().out)] == ["mine_against"] * 2
    assert main(["simulate", *words, "-p", "4,8"]) == 1
    assert "out.txt makes no use of a second -n" in capsys.readouterr().err


BENCH = """\
# unisono bench: 2 ranks; <ProcessGroup 'default' rank=0 size=2 cpu=unisono over={over}>
# time, algbw, busbw: ring
#
# Collective test starting: broadcast
#         size         count      type   redop  root     time    algbw    busbw  #wrong      tree   /tree
#          (B)    (elements)                             (us)   (GB/s)   (GB/s)              (us)   ratio
       1048576        262144   float32    none     0    11.00     1.00     1.00       0     12.00    0.92
# Collective test starting: all_reduce
#         size         count      type   redop  root     time    algbw    busbw  #wrong      gloo   /gloo      tree   /tree
#          (B)    (elements)                             (us)   (GB/s)   (GB/s)              (us)   ratio      (us)   ratio
          1024           256   float32     sum    -1     2.95     0.35     0.35       0      9.90    0.30      4.11    0.72
       1048576        262144   float32     sum    -1    21.00     1.00     1.00       0     99.00    0.20   2200.00    0.01
# Collective test concluded: all_reduce
"""  # noqa: E501


def bench_file(folder, kind, over):
    """Write what `unisono bench` prints of a run, as text or as its document."""
    file = folder / f"bench.{kind}"
    if kind == "txt":
        file.write_text(BENCH.format(over=over))
        return str(file)
    times = {
        ("broadcast", 1 << 20): (11, None, 12),
        ("all_reduce", 1024): (2.95, 9.9, 4.11),
        ("all_reduce", 1 << 20): (21, 99, 2200),
    }
    rows = [
        {
            "op": op,
            "size_bytes": nbytes,
            "results": {
                library: us and {"time_us": us}
                for library, us in zip(("unisono", "gloo", "tree"), each, strict=True)
            },
        }
        for (op, nbytes), each in times.items()
    ]
    plan = {"algorithm": "ring", "nprocs": 2, "hosts": 0}
    file.write_text(json.dumps({"group": f"<over={over}>", "plan": plan, "rows": rows}))
    return str(file)


@pytest.mark.parametrize("kind", ["txt", "json"])
def test_against_a_bench_takes_its_ranks_operation_and_algorithms(capsys, tmp_path, kind):
    file = bench_file(tmp_path, kind, "tcp")
    net = tmp_path / "two.toml"
    net.write_text('topology = "full"\ngbps = 1\nlatency_us = 10\n')
    words = ("--net", str(net), "--against", file)
    for more, expected in (
        ((), [("1024", "3.0", "ring"), ("1048576", "21.0", "ring"), *2 * [("", "", "tree")]]),
        (("--algorithm", "tree"), [("1024", "4.1", "tree"), ("1048576", "2,200.0", "tree")]),
    ):
        assert main(["simulate", "all_reduce", *words, *more]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"# all_reduce on 2 ranks, {file} against net {net}")
        rows = table(out)
        assert len(rows) == len(expected)
        for row, (nbytes, us, name) in zip(rows, expected, strict=True):
            assert (nbytes or row[0], us or row[1], name) == (row[0], row[1], row[-1])
    # A tree of 2 ranks: 10 us twice, and the bytes twice at 1 GB/s, or in pieces of a group.
    assert 1058 < float(rows[1][3].replace(",", "")) < 2 * (10 + 1048.576) + 1
    assert main(["simulate", "broadcast", *words, "--algorithm", "tree"]) == 0
    assert table(capsys.readouterr().out)[0][:2] == ["1048576", "12.0"]
    for words_, told in (
        (("all_reduce", "--algorithm", "swing"), "has times of ring, tree, not of swing"),
        (("all_reduce", "--algorithm", "gloo"), "has times of ring, tree, not of gloo"),
        (("all_gather",), "has broadcast, all_reduce, not all_gather"),
        (("all_reduce", "-n", "16"), "makes no use of -n"),
    ):
        assert main(["simulate", words_[0], *words, *words_[1:]]) == 1
        assert told in capsys.readouterr().err


def test_against_a_run_in_shared_memory_explains_nothing(capsys, tmp_path):
    for kind in ("txt", "json"):
        file = bench_file(tmp_path, kind, "shared-memory")
        assert main(["simulate", "all_reduce", "--against", file]) == 0
        out = capsys.readouterr().out
        assert f"# {file} is a run in shared memory, which is not modelled" in out
        assert "what would explain it" not in out
    other = tmp_path / "other.json"
    other.write_text('{"rows": []}')
    assert main(["simulate", "all_reduce", "--against", str(other)]) == 1
    assert "is no document of `unisono bench --json`" in capsys.readouterr().err


def test_against_a_bench_of_what_a_group_chooses(capsys, tmp_path):
    """The algorithm is not in the file: it is the choice of a group, per size."""
    file = tmp_path / "bench.txt"
    lines = BENCH.format(over="tcp").replace("2 ranks", "8 ranks").splitlines()
    file.write_text("\n".join(line for line in lines if "busbw: ring" not in line))
    assert main(["simulate", "all_reduce", "--against", str(file)]) == 0
    out = capsys.readouterr().out
    assert "does not name its algorithm; predicted is the algorithm that a group takes" in out
    taken = [select("all_reduce", n, Topology(8, False, 1, 0)).algorithm for n in (1024, 1 << 20)]
    assert [row[-1] for row in table(out)] == [*taken, "tree", "tree"]
    assert taken[0] != taken[1]


def test_against_a_text_without_an_operation_or_ranks(capsys, tmp_path):
    file = tmp_path / "out.txt"
    text = NCCL_TESTS.format(first=9000.0, last=18000.0)
    file.write_text(text)
    for op, told in (
        ("broadcast", "out.txt has rows with redop sum and root -1: no broadcast"),
        ("all_gather", "out.txt has rows with redop sum: no all_gather"),
        ("reduce", "out.txt has rows with root -1: no reduce"),
    ):
        assert main(["simulate", op, "--against", str(file)]) == 1
        assert told in capsys.readouterr().err
    # Newer ones name their operation.
    file.write_text("# Collective test starting: reduce_scatter_perf\n" + text)
    assert main(["simulate", "all_reduce", "--against", str(file)]) == 1
    assert "out.txt has reduce_scatter, not all_reduce" in capsys.readouterr().err
    file.write_text("\n".join(line for line in text.splitlines() if "Rank" not in line))
    assert main(["simulate", "all_reduce", "--against", str(file)]) == 1
    assert "out.txt names no ranks" in capsys.readouterr().err


SCALE = tool("scale", "benchmarks")


@pytest.mark.parametrize(
    "figure",
    [
        pytest.param(each, marks=pytest.mark.whole("many messages") if each.slow else ())
        for each in SCALE.MACHINES
        if each.ranks < 1000
    ],
)
def test_machines_predict_published_measurements(figure):
    off = abs(SCALE.predicted(figure) / figure.published - 1)
    assert 0.1 * figure.missed <= off < 0.1 * (1 + 1.5 * figure.missed)


def test_machines_whose_switches_reduce(capsys, tmp_path):
    words = ("-p", "4", "--net", "dgx-h100", "-b", "64K")
    bounds = {
        row[2]: float(row[11].replace(",", "")) for row in whole(capsys, "all_reduce", *words)
    }
    assert "nvls" in bounds
    # A rank sends all its data once, by its port and its interface.
    assert bounds["ring"] == pytest.approx((64 << 10) / (370.8e3 + 45.5e3) + 3.4 + 8.4, abs=0.1)
    for algorithm, *more in (
        ("nvls_tree",), ("nvls", "--goal", str(tmp_path / "x.goal")), ("nvls", "--net", "switch"),
    ):  # fmt: skip
        assert main(["simulate", "all_reduce", *words, "--algorithm", algorithm, *more]) == 1
        expected = " has no switches that reduce for them; nvls needs one host, nvls_tree"
        expected = " has switches that reduce, GOAL has none" if "--goal" in more else expected
        assert expected in capsys.readouterr().err


def measured_on(folder, hosts, nbytes, us):
    """Write a file of nccl-tests of one time, 8 ranks per host; return its name."""
    lines = [f"#  Rank  {n} Group  0 Pid 1 on  node-{n // 8} device  0" for n in range(8 * hosts)]
    lines.append("# size count type redop root time")
    lines.append(f"{nbytes} {nbytes // 4} float sum -1 {us:.1f} 30.00 30.00 0 {us:.1f}")
    (folder / "out.txt").write_text("\n".join(lines))
    return str(folder / "out.txt")


def test_what_explains_a_gap_where_switches_reduce(capsys, tmp_path):
    """Also if the switches are all that was asked for."""
    off = "- no reductions in switches (NCCL_NVLS_ENABLE=0): "
    late = "- 100 us more per message between hosts: "
    nbytes = 1 << 21
    ring = SCALE.predicted(SCALE.Figure("", "dgx-h100", 8, nbytes, "ring", 0, busbw=False))
    for hosts, size, us, words, name, told in (
        (1, nbytes, 1.1 * ring, (), "nvls", off),
        (1, nbytes, 1.1 * ring, ("--algorithm", "ring,nvls"), "nvls", off),
        (1, nbytes, 1.1 * ring, ("--algorithm", "nvls"), "nvls", "- nothing that is known here"),
        # A machine has another latency for nvls_tree than for others.
        (2, 1024, 266.8, ("--algorithm", "nvls_tree"), "nvls_tree", late),
    ):
        file = measured_on(tmp_path, hosts, size, us)
        words = (*words, "--net", "dgx-h100", "--against", file)
        assert main(["simulate", "all_reduce", *words]) == 0
        out = capsys.readouterr().out
        assert [row[-1] for row in table(out)] == [name]
        assert told in out


@pytest.mark.parametrize("name", ["dgx-h100", "gb200-nvl72"])
def test_what_explains_a_gap_changes_what_algorithms_have_of_their_own(name):
    net = machine_of(name)
    tried = []
    assert not list(causes(net, 1.0, lambda machine: tried.append(machine) or 0.0))
    for machine in tried:
        changed = {key for key in net.values if machine.values[key] != net.values[key]}
        assert changed
        for algorithm in ("nvls", "nvls_tree", "ring"):
            own, before = machine.of(algorithm), net.of(algorithm)
            assert changed == {key for key in own if own[key] != before[key]}
    fewer = [m for m in tried if m.values["inside_gbps"] == 25 or m.values["channels"] == 1]
    assert [m.reducing("all_reduce", 8) for m in fewer] == [(), ()]


def test_a_refusal_is_printed_once(capsys):
    words = ("-p", "4", "--net", "dgx-a100", "-b", "8", "-e", "64", "-f", "8")
    assert main(["simulate", "all_reduce", *words]) == 0
    assert capsys.readouterr().out.count("channels of all_reduce (one_shot) on 4 ranks") == 1


def test_every_shipped_machine_runs(capsys):
    with pytest.raises(UnknownNameError) as caught:
        machine_of("nowhere")
    names = re.search(r"known: (.*); or", caught.value.what)[1].split(", ")
    assert len(names) > 10
    assert "page" not in names
    for name in names:
        machine = machine_of(name)
        assert machine.values["about"]
        assert machine.values["source"]
        p = machine.values["ranks_per_host"]
        if machine.values["topology"] == "graph":
            p = 1 + max(link[0] for link in machine.values["links"])
        assert whole(capsys, "all_reduce", "-p", str(p), "--net", name, "--algorithm", "ring")


RING = """
from unisono.lowlevel import Buf, Schedule, recv, recv_reduce, send

def right(p, shift=0):
    "A ring."
    def exchange(k, r):
        take, first = (recv_reduce, r - k) if k < p - 1 else (recv, r - k + p + shift)
        chunk = first % p
        return [
            send(r, (r + 1) % p, Buf.OUTPUT, chunk),
            take(r, (r - 1) % p, Buf.OUTPUT, (chunk - 1) % p),
        ]
    return Schedule("all_reduce", "right", p, 2 * (p - 1), exchange, output_chunks=p)

def wrong(p):
    return right(p, 1)

def nothing(p):
    pass
"""


@pytest.fixture
def own_ring(tmp_path, monkeypatch):
    from unisono.core.schedules import build, registry

    table = {op: dict(names) for op, names in registry._TABLE.items()}
    monkeypatch.setattr(registry, "_TABLE", table)
    (tmp_path / "own.py").write_text(RING)
    monkeypatch.chdir(tmp_path)
    yield
    build.cache_clear()


@pytest.mark.usefixtures("own_ring")
def test_a_world_too_large_for_a_proof_says_so(capsys):
    words = ["simulate", "all_reduce", "--model", "alpha-beta", "-n", "600", "--algorithm"]
    assert main([*words, "own.py:wrong"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "at the end OUTPUT[0] of rank 0 has contributions of" in err
    assert main([*words, "own.py:right,ring"]) == 0
    out = capsys.readouterr().out
    assert "# right is NOT PROVED on 600 ranks, but on 24, 56 and 120\n" in out
    rows = {line.split()[2]: line for line in out.splitlines() if line.startswith("  ")}
    assert "right (not proved)" in rows["right"]
    assert "not proved" not in rows["ring"]
    assert main([*words[:-2], "16", "--algorithm", "own.py:right"]) == 0
    assert "not proved" not in capsys.readouterr().out.lower()


@pytest.mark.usefixtures("own_ring")
def test_a_file_without_a_function_names_its_functions(capsys):
    for name, text in (
        ("own.py", "own.py: which function?"),
        ("own.py:rihgt", "no function 'rihgt'"),
    ):
        assert main(["simulate", "all_reduce", "--algorithm", name]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert text in err
        assert "hint: it has own.py:right, own.py:wrong, own.py:nothing" in err


@pytest.mark.usefixtures("own_ring")
def test_explain_takes_a_file(capsys):
    assert main(["explain", "own.py:right"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("right, all_reduce: A ring.\n")
    assert "rank 0  >1 +3      >1 +3      >1 +3      >1 <3 " in out
    assert "--algorithm own.py:right -o right.html" in out
    assert main(["explain", "own.py:wrong"]) == 1
    assert capsys.readouterr().out == ""
    assert main(["explain", "own.py:nothing"]) == 1
    text = "own.py:nothing returns no schedule for 4 ranks: it returned None, expected a Schedule"
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "net"),
    [
        (["-n", "16", "--hosts", "4"], "fat-tree"),
        (["-n", "16", "--hosts", "16"], "switch"),
        (["-n", "10", "--hosts", "3"], "fat-tree"),
        (["-n", "8", "--hosts", "2", "--net", "switch"], "switch"),
    ],
)
def test_hosts_have_links_and_predictions_are_those_of_explain(tmp_path, words, net):
    file, other = tmp_path / "a.json", tmp_path / "b.json"
    assert main(["simulate", "all_reduce", "-b", "64K", *words, "--json", str(file)]) == 0
    assert json.loads(file.read_text())["net"] == net
    assert main(["explain", "all_reduce", "64K", *words, "--json", str(other)]) == 0
    simulated, explained = (json.loads(each.read_text())["rows"] for each in (file, other))
    expected = {row["algorithm"]: row["predicted_us"] for row in explained}
    assert {row["algorithm"]: row["time_us"] for row in simulated} == expected


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["-n", "16", "--hosts", "4"], "--hosts 4: 4 ranks per host"),
        (["-n", "10", "--hosts", "3"], "4 ranks per host, 2 on the last; algorithms that need eq"),
        (["-n", "8", "--hosts", "2", "--net", "switch"], "net switch has no hosts: its links stay"),
        (["-b", "8", "-e", "64M", "-f", "8"], "the last size is 16777216 B: -f 8 does not meet -e"),
    ],
)
def test_the_header_says_what_is_simulated(capsys, words, note):
    assert main(["simulate", "all_reduce", "--algorithm", "ring", *words]) == 0
    assert note in capsys.readouterr().out.splitlines()[1]


def test_the_header_has_the_latency_from_rank_to_rank(capsys, tmp_path):
    """Of a file without `about`; a message crosses two links of a switch, or one between hosts."""
    net = tmp_path / "mine.toml"
    for topology, us in (("switch", 10), ("full", 5), ("hosts", 5)):
        net.write_text(f'topology = "{topology}"\nlatency_us = 5\n')
        assert main(["simulate", "all_reduce", "--net", str(net), "--algorithm", "ring"]) == 0
        head, far, *_ = capsys.readouterr().out.splitlines()
        assert head == f"# all_reduce; net {net}"
        assert far == f"# an empty message to the farthest of 16 ranks: {us} us"
    for op in ("simulate all_reduce", "explain all_reduce 1M"):
        assert main([*op.split(), "-r", "3"]) == 1
        assert "-r 3: all_reduce has no root" in capsys.readouterr().err


def test_two_levels_on_unequal_hosts(capsys):
    words = ["-n", "8", "--hosts", "3", "--algorithm", "two-level"]
    assert main(["simulate", "all_reduce", *words]) == 1
    text = (
        "all_reduce (two_level) needs equally many ranks on each host; 8 ranks on 3 hosts are 3 "
        "per host, and 2 on the last"
    )
    assert text in capsys.readouterr().err


def test_ctrl_c_ends_a_command_without_a_traceback(capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("unisono.workbench.cli.simulate._rows", interrupted)
    assert main(["simulate", "all_reduce"]) == 130
    assert capsys.readouterr().err == "unisono: interrupted\n"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.9, 2000, [1, 10, 100, 1000]), (6, 40, [10, 20, 30]), (1200, 9000, [2000, 3000, 5000]),
        (120, 180, [120, 140, 160, 180]), (1000, 1010, [1000, 1002, 1004, 1006, 1008, 1010]),
    ],
)  # fmt: skip
def test_a_logarithmic_axis_has_three_numbers(low, high, expected):
    from unisono.workbench.bench.plot import ticks

    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["-b", "64K", "-e", "1G", "-f", "16384"], ["16 ranks", "64 KiB", "1 GiB", "100,000"]),
        (["-n", "8,64", "-b", "64K"], ["64 KiB", ">8<", ">64<"]),
    ],
)
def test_a_picture_names_what_is_fixed(monkeypatch, tmp_path, words, texts):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    colours = set()
    for names in ("ring,tree", "tree,ring"):
        file = tmp_path / f"{names}.svg"
        assert main(["simulate", "all_reduce", "--algorithm", names, *words, "-o", str(file)]) == 0
        text = file.read_text()
        assert [each for each in texts if each not in text] == []
        assert "e+" not in "".join(re.findall(r">([^<]*)</text>", text))
        colours.add(text.index(">ring<") < text.index(">tree<"))
    assert colours == {True, False}
