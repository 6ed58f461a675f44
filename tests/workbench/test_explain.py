"""`unisono explain`: the algorithm of a call, the reason, and the times of the others."""

import os
import re
import subprocess
import sys

import pytest

import unisono
from unisono.core.backends import tuning
from unisono.core.schedules import Topology, available, build, select
from unisono.core.schedules.choice.tables import ChoiceTable, GroupShape, Rule
from unisono.workbench.cli.main import main
from unisono.workbench.simulate import Costs, LinkSpec, Switch, simulate

KIB, MIB = 1024, 1024**2


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    names = ("ALGO", "ENGINE", "SHARED_MEMORY", "TRANSPORT", "DETERMINISTIC", "RANKS_PER_HOST",
             "NODES")  # fmt: skip
    for name in (f"UNISONO_{name}" for name in names):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("UNISONO_TUNING", "")


def explain(capsys, *words):
    """Return the two sentences, and the cells by algorithm; "-" for a column that is not there."""
    assert main(["explain", *words]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    columns = lines[2].replace(" us", "").split()
    assert columns[:3] == ["algorithm", "rounds", "pieces"]
    rows = {}
    for name, rounds, _, *rest in [line.split() for line in lines[3:]]:
        times = [rest.pop(0) if what in columns else "-" for what in ("predicted", "measured")]
        rows[name] = [rounds, *times, *rest]
    return lines[:2], rows


@pytest.mark.native
def test_the_built_in_rule_on_one_host(capsys):
    (what, why), rows = explain(capsys, "all_reduce", "1M", "-p", "4")
    assert what == "all_reduce of 1 MiB on 4 ranks over shared memory"
    assert why == "takes two_shot: the built-in rule has it from 43,691 B on (one_shot below)"
    assert set(rows) == set(available("all_reduce", 4))
    assert rows["two_shot"] == ["2", "-", "-", "<-", "taken"]
    assert rows["ring"] == ["6", "-", "-"]


def test_predictions_are_those_of_the_simulator(capsys, monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    (what, why), rows = explain(capsys, "broadcast", "1M", "-p", "6", "--root", "2")
    assert what == "broadcast of 1 MiB on 6 ranks over tcp"
    assert why.startswith("takes double_tree in 2 pieces: the built-in rule has it from ")
    spec = LinkSpec(1_000_000, 12.5)
    costs = Costs(send_ps=300_000, recv_ps=300_000, reduction=LinkSpec(0, 40))
    for name, (_, predicted, *_) in rows.items():
        depth = select("broadcast", MIB, Topology(6), name).pipeline
        schedule = build("broadcast", name, 6, 2, depth)
        expected = simulate(schedule, MIB, Switch(6, spec), costs, itemsize=4).last_us
        assert float(predicted.replace(",", "")) == pytest.approx(expected, abs=0.06)
    times = [float(row[1].replace(",", "")) for row in rows.values()]
    assert times == sorted(times)


@pytest.mark.native
def test_hosts_have_levels(capsys):
    words = ("all_reduce", "1M", "-p", "16", "--hosts", "4", "--model", "alpha-beta")
    (what, why), rows = explain(capsys, *words)
    assert what == "all_reduce of 1 MiB on 16 ranks of 4 hosts over tcp"
    assert why.startswith("takes two_level: ")
    assert rows["two_level"][2:] == ["-", "<-", "taken"]


@pytest.mark.native
def test_hosts_that_are_far_apart(capsys):
    words = ("all_reduce", "8", "-p", "4", "--hosts", "2", "--round-trip", "10000")
    (_, why), rows = explain(capsys, *words)
    assert "the built-in estimate for 16 ms between hosts has it up to " in why
    # A delay is half of the round trip of this class.
    [taken] = [row for row in rows.values() if row[-1] == "taken"]
    assert 8000 < float(taken[1].replace(",", "")) < 8100
    assert 16_000 < float(rows["halving_doubling"][1].replace(",", "")) < 16_100


@pytest.mark.native
@pytest.mark.parametrize(
    ("per_host", "words", "shape"),
    [
        ("2", "on 8 ranks of 4 hosts over tcp", "native-tcp-8-2"),
        ("3", "on 8 ranks of 3 hosts over tcp", "native-tcp-8-1"),
        ("8", "on 8 ranks over shared memory", "native-shared-memory-8-8"),
    ],
)
def test_ranks_per_host_of_the_environment(capsys, monkeypatch, per_host, words, shape):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", per_host)
    assert main(["explain", "all_reduce", "1M", "-p", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"all_reduce of 1 MiB {words}"
    assert f"# table for {shape}: none" in lines


@pytest.mark.native
@pytest.mark.parametrize("variable", [False, True])
def test_nodes_of_a_host_have_levels(capsys, monkeypatch, variable):
    words = ["explain", "all_reduce", "1M", "-n", "8"]
    if variable:
        monkeypatch.setenv("UNISONO_NODES", "4")
    else:
        words += ["--nodes", "2"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "all_reduce of 1 MiB on 8 ranks of 2 nodes over shared memory",
        "takes two_level: the built-in estimate for 2 nodes has it from 2,462 B on (one_shot "
        "below)",
    ]
    assert "# table for native-shared-memory-8-4: none" in lines
    assert "# predicted: net two-socket, 8 per host, 4 per node, model links" in lines
    rows = {line.split()[0]: line.split() for line in lines[5:]}
    assert rows["two_level"][-2:] == ["<-", "taken"]
    assert float(rows["two_level"][3]) < float(rows["two_shot"][3])


@pytest.mark.native
@pytest.mark.parametrize("nodes", ["1", "3"])
def test_nodes_that_are_no_levels(capsys, nodes):
    assert main(["explain", "all_reduce", "1M", "-n", "8", "--nodes", nodes]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all_reduce of 1 MiB on 8 ranks over shared memory"
    assert lines[1].startswith("takes two_shot: the built-in rule has it")
    assert "# table for native-shared-memory-8-8: none" in lines


@pytest.mark.native
def test_nodes_of_several_hosts_are_no_levels(capsys):
    assert main(["explain", "all_reduce", "1M", "-n", "8", "--hosts", "2", "--nodes", "2"]) == 1
    assert "--nodes 2: only ranks that share memory use nodes" in capsys.readouterr().err


@pytest.mark.native
def test_the_last_host_may_have_fewer_ranks(capsys):
    words = ("all_reduce", "1M", "-p", "7", "--hosts", "2", "--net", "fat-tree")
    assert main(["explain", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all_reduce of 1 MiB on 7 ranks of 2 hosts over tcp"
    assert "# table for native-tcp-7-1-250us: none" in lines
    assert "# predicted: net fat-tree, 4 per host, model links" in lines


def test_an_empty_call(capsys, monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    (what, why), rows = explain(capsys, "all_reduce", "0", "-p", "4")
    assert what == "all_reduce of 0 B on 4 ranks over tcp"
    assert why.startswith("takes recursive_doubling: ")
    assert {cells[1] for cells in rows.values()} == {"0.0"}


@pytest.mark.native
def test_a_table_and_its_times(capsys):
    times = {"linear": (40.0, 10.0), "one_shot": (50.0, 50.0)}
    shape = GroupShape("native", "tcp", 8, 4, 250)
    rules = (Rule("reduce", 0, 2 * KIB, "linear"),)
    table = ChoiceTable(
        shape, tuning.machine(), unisono.__version__, rules, {("reduce", KIB): times}
    )
    tuning.save(table)
    words = ("reduce", "800", "-p", "8", "--hosts", "2")
    (_, why), rows = explain(capsys, *words)
    assert why == f"takes linear: table {table.digest} has it for 0 B to 2 KiB"
    assert list(rows)[:2] == ["linear", "one_shot"]
    assert [rows[name][2] for name in ("linear", "one_shot", "ring")] == ["20.0", "50.0", "-"]
    (_, why), rows = explain(capsys, "reduce", "1M", "-p", "8", "--hosts", "2")
    assert "the built-in rule has it" in why
    # The measured size is too far away.
    assert {row[2] for row in rows.values()} == {"-"}
    # Other groups have no table.
    (_, why), _ = explain(capsys, "reduce", "800", "-p", "8")
    assert "the built-in rule has it" in why


def test_wishes_are_the_reason(capsys, monkeypatch):
    (_, why), _ = explain(capsys, "all_reduce", "1K", "--algorithm", "ring")
    assert why == "takes ring: the call asks for it"
    monkeypatch.setenv("UNISONO_ALGO", "reduce:ring;all_reduce:tree")
    (_, why), _ = explain(capsys, "all_reduce", "1K", "-p", "3")
    assert why.startswith("takes tree: UNISONO_ALGO=reduce:ring;all_reduce:tree permits it, and ")


def test_a_fixed_order_of_reduction(capsys, monkeypatch):
    monkeypatch.setenv("UNISONO_DETERMINISTIC", "1")
    (_, why), rows = explain(capsys, "all_reduce", "1M", "-p", "4")
    assert why == "takes rank_order: UNISONO_DETERMINISTIC reduces in the order of ranks"
    assert rows["rank_order"][-1] == "taken"
    (_, why), _ = explain(capsys, "broadcast", "1K")
    assert "the built-in rule" in why


def test_mpi_has_collectives_of_its_own(capsys, monkeypatch):
    monkeypatch.setenv("UNISONO_ENGINE", "mpi")
    (_, why), _ = explain(capsys, "all_reduce", "1M", "-p", "4")
    assert why == "takes mpi: MPI chooses"
    (_, why), _ = explain(capsys, "all_reduce", "1M", "--algorithm", "ring")
    assert why == "takes ring: the call asks for it"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["all_reduce", "1K", "-p", "9", "--hosts", "4"], "-n 9 does not fill 4 hosts"),
        (["all_reduce", "1K", "--algorithm", "rings"], "all_reduce has no algorithm 'rings'"),
        (["all_reduce", "1K", "--net", "nowhere"], "no network 'nowhere'"),
        (["broadcast", "1K", "--root", "2"], "root is 2, expected 0..1"),
    ],
)
def test_bad_words_are_refused(capsys, words, expected):
    assert main(["explain", *words]) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("both", [False, True])
def test_a_reader_that_has_left_ends_a_command_without_a_word(both):
    """As in `unisono explain ... | head`: the code is that of other programs, 128 + SIGPIPE."""
    reader, pipe = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "unisono", "explain", "all_reduce", "1M", "-p", "4"]
    try:
        ended = subprocess.run(
            command, stdout=pipe, stderr=pipe if both else subprocess.PIPE, timeout=120
        )
    finally:
        os.close(pipe)
    assert (ended.returncode, ended.stderr or b"") == (141, b"")


def test_each_algorithm_is_explained_from_its_docstrings(capsys):
    from unisono.core.schedules.registry import ALGORITHMS, operations_of

    for name in ALGORITHMS:
        assert main(["explain", name]) == 0
        out = capsys.readouterr().out
        first, *others = operations_of(name)
        assert out.startswith(f"{name}, {first}: "), out
        assert "not given" not in out
        for op in others:
            assert f"\n{op}: " in out
        assert re.search(r"^[48] ranks(, [24] hosts)?, \d+ rounds?$", out, re.MULTILINE), out


def test_the_commands_of_each_algorithm_run(capsys, monkeypatch, tmp_path):
    from unisono.core.schedules.registry import ALGORITHMS

    monkeypatch.chdir(tmp_path)
    for name in ALGORITHMS:
        assert main(["explain", name]) == 0
        draw, compare = re.findall(r"it +unisono (.*)$", capsys.readouterr().out, re.MULTILINE)
        assert main(draw.split()) == 0
        words = compare.split()
        op, p, hosts = words[1], int(words[3]), int(words[5])
        assert name in available(op, p, local=p // hosts)
        if p == 8:
            assert main(words) == 0
            assert f" {name} " in capsys.readouterr().out


def test_the_picture_of_an_algorithm_has_its_messages(capsys):
    assert main(["explain", "recursive_doubling"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("4 ranks, 2 rounds")
    assert [line.split() for line in lines[at + 1 : at + 6]] == [
        ["round", "1", "2"],
        *(["rank", str(r), f">{r ^ 1}", f"+{r ^ 1}", f">{r ^ 2}", f"+{r ^ 2}"] for r in range(4)),
    ]


OWN = """
from unisono.core.schedules import build
from unisono.lowlevel import Buf, Schedule, recv_reduce, send

def pairs(p):
    def exchange(k, r):
        other = (r + p // 2) % p
        return [send(r, other, Buf.OUTPUT, 0), recv_reduce(r, other, Buf.OUTPUT, 0)]
    return Schedule("all_reduce", "x", p, 1, exchange)

def index(p):
    return build("all_reduce", "ring", [8][p == 4])

def not_four(p):
    if p == 4:
        raise ValueError("8 ranks")
    return build("all_reduce", "ring", p)
"""


@pytest.mark.parametrize(
    ("function", "size", "fault"),
    [
        ("pairs", "2 ranks, 1 round", "all_reduce (pairs): at the end OUTPUT[0] of rank 0 has "),
        ("index", "8 ranks, 14 rounds", "register 'index': the builder raised IndexError("),
        ("not_four", "8 ranks, 14 rounds", None),
    ],
)
def test_a_size_for_which_an_algorithm_of_a_file_is_wrong(
    capsys, monkeypatch, tmp_path, function, size, fault
):
    """The rounds are those of a size that is right; ValueError is for a size that is not served."""
    from unisono.core.schedules import registry

    table = {op: dict(names) for op, names in registry._TABLE.items()}
    monkeypatch.setattr(registry, "_TABLE", table)
    (tmp_path / "own.py").write_text(OWN)
    try:
        assert main(["explain", f"{tmp_path / 'own.py'}:{function}"]) == 0
    finally:
        build.cache_clear()
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines[lines.index(size) + 1 :] if line.startswith("#")]
    assert len(told) == bool(fault)
    assert all(line.startswith(f"# WRONG for 4 ranks: {fault}") for line in told)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ringg"], "argument OP: invalid choice: 'ringg' (choose from all_reduce, "),
        (["all_reduce"], "the following arguments are required: SIZE"),
        (["ring", "1M"], "ring is an algorithm, which has no SIZE"),
        (["ring", "--hosts", "2"], "ring is an algorithm, which has no --hosts"),
        (["all_reduce", "1M", "ring"], "unrecognized arguments: ring"),
        (["ring", "--net", "no"], "ring is an algorithm, which has no --net"),
    ],
)
def test_words_that_are_no_operation_or_algorithm(capsys, words, expected):
    with pytest.raises(SystemExit) as ended:
        main(["explain", *words])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_flags_stand_anywhere(capsys):
    outputs = []
    for words in ("all_reduce 1M -n 3", "all_reduce -n 3 1M", "-n 3 all_reduce 1M"):
        assert main(["explain", *words.split()]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0].startswith("all_reduce of 1 MiB on 3 ranks")
    assert len(set(outputs)) == 1


def test_an_algorithm_is_shown_on_the_ranks_asked_for(capsys):
    assert main(["explain", "ring", "-n", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("3 ranks, 4 rounds")
    assert [line.split() for line in lines[at + 2 : at + 5]] == [
        ["rank", str(r), *f">{(r + 1) % 3} +{(r - 1) % 3}".split() * 2,
         *f">{(r + 1) % 3} <{(r - 1) % 3}".split() * 2]
        for r in range(3)
    ]  # fmt: skip
    assert any(line.startswith("draw it     unisono draw all_reduce -n 3 ") for line in lines)
    assert main(["explain", "cube_mesh", "-n", "4"]) == 1
    assert "needs world size 8, got 4" in capsys.readouterr().err


def test_many_ranks_leave_out_what_takes_minutes(capsys, monkeypatch):
    from unisono.workbench.cli import explain as module

    monkeypatch.setattr(module, "MANY", 8)
    monkeypatch.setattr(module, "_MOST_STEPS", 100)
    words = ("all_reduce", "1K", "-p", "16", "--net", "switch", "--model", "alpha-beta")
    assert main(["explain", *words]) == 0
    out = capsys.readouterr().out
    assert re.search(r"# one_shot: \d+ steps in a round are left out: they take minutes", out)
    assert re.search(r"^one_shot +1 +1 +-", out, re.MULTILINE)
    assert re.search(r"^ring +30 +1 +[\d.]+", out, re.MULTILINE)
    # Of messages that share no link the predictions order nothing.
    assert re.search(r"^# model alpha-beta: messages share no link, .* counts it$", out, re.M)
    assert out.splitlines()[-1] == "# fastest: not known, because messages share no link here"
    words = (*words[:-1], "links")
    assert main(["explain", *words]) == 0
    out = capsys.readouterr().out
    times = {
        line.split()[0]: float(line.split()[3].replace(",", ""))
        for line in out.splitlines()
        if re.match(r"\w+ +\d+ +\d+ +[\d,.]+", line)
    }
    assert out.splitlines()[-1] == f"# fastest: {min(times, key=times.get)}"
    assert "share no link" not in out


def test_predictions_for_many_ranks_count_the_links_of_all_messages(capsys, monkeypatch):
    """What two_shot sends to all others at once shares the sender's link: 2 (p-1)/p n/B."""
    from unisono.workbench.cli import explain as module
    from unisono.workbench.simulate.evaluators import evaluate

    monkeypatch.setattr(module, "MANY", 8)
    monkeypatch.setattr(evaluate, "_EVENT_ROWS", 0)
    words = ("all_reduce", "16M", "-n", "25", "--hosts", "25", "--net", "switch")
    assert main(["explain", *words]) == 0
    out = capsys.readouterr().out
    assert "# predicted: net switch, 1 per host, model links\n" in out
    times = dict(re.findall(r"^(\w+) +[\d,]+ +\d+ +(~?[\d,.]+)", out, re.MULTILINE))
    us = {name: float(time.strip("~").replace(",", "")) for name, time in times.items()}
    assert min(us.values()) >= 2 * 24 / 25 * (16 << 20) / 12_500
    assert us[out.splitlines()[-1].removeprefix("# fastest: ")] == min(us.values())
    assert times["two_shot"].startswith("~")
    assert times["ring"][0] != "~"


SLOW = """
about = "2 hosts, 1 Gb/s"
source = "round numbers"
topology = "switch"
latency_us = 50
gbps = 0.125
"""


def test_compress_is_taken_only_where_the_call_allows_it(capsys, tmp_path):
    (net := tmp_path / "slow.toml").write_text(SLOW)
    call = ["all_reduce", "16M", "-n", "2", "--hosts", "2", "--net", str(net)]
    _, rows = explain(capsys, *call)
    assert not [name for name in rows if name.startswith("compress")]
    plain = min(float(row[1].replace(",", "")) for row in rows.values())
    for kind, coding_ns, least in (("int8", 0.32, 3), ("fp8", 0.715, 3), ("bf16", 0.23, 1.8)):
        (_, takes), rows = explain(capsys, *call, "--compress", kind)
        assert takes == f"takes compress={kind}: the call allows it"
        rounds, predicted, _, *mark = rows[f"compress={kind}"]
        assert (rounds, mark) == ("2", ["<-", "taken"])
        # Each rank sends half of the codes twice, in one piece: all work shows. It encodes
        # all elements, and decodes half of them, then all.
        n = 16 * MIB // 4
        nbytes = 2 * n if kind == "bf16" else n + n // 32
        us = float(predicted.replace(",", ""))
        assert us == pytest.approx(nbytes / 125 + coding_ns * n / 1e3, rel=0.02)
        assert us < plain / least
    assert main(["simulate", "all_gather", "-p", "4", "-b", "1M", "--compress", "int8"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^# compress=int8: all_gather \(\w+\) of 270,336 B of codes", text, re.M)
    assert re.search(r"^ +4 +1048576 compress=int8 ", text, re.M)
    for command in (["explain", "broadcast", "1M"], ["simulate", "broadcast"]):
        assert main([*command, "--compress", "int8"]) == 1
        assert "--compress: broadcast has none, only all_reduce" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "takes", "why"),
    [
        (
            "all_reduce 64K -p 4",
            "one_shot",
            "with it if every GPU has an NVLink to each other; else",
        ),
        (
            "all_reduce 1M -p 4",
            "two_shot",
            "with it if every GPU has an NVLink to each other; else",
        ),
        ("all_reduce 64K -p 8", "one_shot", "each other, or cube_mesh in a hybrid cube mesh; else"),
        ("all_reduce 16M -p 4", "nccl", "NCCL chooses"),
        ("all_reduce 64K -p 9", "nccl", "NCCL chooses"),
        ("all_reduce 64K -p 4 --hosts 2", "nccl", "NCCL chooses"),
        ("broadcast 64K -p 4", "nccl", "NCCL chooses"),
    ],
)
def test_gpus(capsys, monkeypatch, words, takes, why):
    command = ["explain", *words.split(), "--device", "cuda"]
    assert main(command) == 0
    assert "takes nccl: NCCL chooses" in capsys.readouterr().out
    monkeypatch.setenv("ENABLE_INTRA_NODE_COMM", "1")
    assert main(command) == 0
    what, taken = capsys.readouterr().out.splitlines()
    assert what.endswith(" of 2 hosts, on GPUs" if "--hosts" in words else " of 1 host, on GPUs")
    assert taken.startswith(f"takes {takes}: ")
    assert why in taken
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    assert main(command) == 0
    assert capsys.readouterr().out.endswith("takes nccl: NCCL chooses\n")


@pytest.mark.parametrize("flag", ["--algorithm=ring", "--compress=int8", "--round-trip=9"])
def test_flags_without_a_meaning_on_gpus(capsys, flag):
    with pytest.raises(SystemExit):
        main(["explain", "all_reduce", "64K", "--device", "cuda", flag])
    name = flag.partition("=")[0]
    assert f"--device cuda takes no {name}: NCCL chooses" in capsys.readouterr().err
