"""`unisono synthesize`: known optima, never slower than the shipped, files that run, refusals."""

import math
import re
import shlex
from random import Random

import numpy as np
import pytest

from unisono.core.schedules import available, registry, select
from unisono.core.schedules.msccl import from_msccl, to_msccl
from unisono.core.schedules.verify import verify
from unisono.errors import InvalidArgumentError
from unisono.workbench.bench.algorithms import named
from unisono.workbench.cli.main import main
from unisono.workbench.cli.simulate import local_of, machine_of, topology_on
from unisono.workbench.simulate import Graph, LinkSpec, simulate
from unisono.workbench.simulate.bounds import least_us
from unisono.workbench.synthesize import written
from unisono.workbench.synthesize.plans import Levels, Problem, Shipped, Trees, links_of
from unisono.workbench.synthesize.search import SearchLimits, search
from unisono.workbench.synthesize.trees import spread

MIB = 1 << 20


def find(op, p, nbytes, net="switch", most=150, seed=0, **values):
    """Search without a limit of time; also return the bound."""
    machine = machine_of(net)
    machine.values.update(values)
    network, topology = machine.network("", p), topology_on(machine, p)
    root = 0 if op in ("broadcast", "reduce", "gather", "scatter") else -1
    found = search(
        Problem(op, p, local_of(machine, p), root, nbytes, machine, network),
        SearchLimits(most, 1e9, seed),
        lambda name: select(op, nbytes, topology, name).pipeline,
    )
    return found, least_us(op, nbytes, network, machine.costs(""), root=root)


FREE = {"send_us": 0.0, "recv_us": 0.0, "reduce_gbps": float("inf")}


def test_large_data_take_the_bound_of_bandwidth():
    """On one switch no rank can receive less than 2n(p-1)/p; a ring does not send more."""
    found, bound_us = find("all_reduce", 5, 4 * MIB, most=20, **FREE)
    assert bound_us <= found.best[0].us <= 1.02 * bound_us


def test_small_data_take_the_least_number_of_rounds():
    """If a message costs its sender time, trees of ceil(lg p) rounds win; the search finds one."""
    for p in (4, 8, 16):
        found, _ = find("broadcast", p, 8, most=90, send_us=100.0, recv_us=0.0, latency_us=0.001)
        rounds = (p - 1).bit_length()
        assert found.best[0].us == pytest.approx(100 * rounds, rel=0.01)


def test_two_hosts_send_each_byte_once_between_them():
    """Each host of 4 ranks must send and receive n; inside everything is free."""
    found, bound_us = find(
        "all_reduce", 8, 64 * MIB, "fat-tree", most=30, ranks_per_host=4, inside_us=0.0,
        inside_gbps=float("inf"), latency_us=0.0, **FREE,
    )  # fmt: skip
    assert found.best[0].us == pytest.approx(bound_us, rel=0.01)


@pytest.mark.parametrize(
    ("nbytes", "steps", "rounds"), [(256, 2, 2.0), (64 * MIB, 3, 7 / 6)], ids=["small", "large"]
)
def test_the_optima_of_sccl_on_a_dgx_1(nbytes, steps, rounds):
    """All-gather: 2 steps are the fewest, and 7/6 rounds per chunk the least, in 3 steps.

    Source: microsoft/msccl-tools, SYNTHESIS.md.
    """
    found, _ = find("all_gather", 8, nbytes, "dgx-1", most=130)
    best = found.best[0]
    assert best.schedule.rounds == steps
    if nbytes > MIB:
        assert best.us == pytest.approx(rounds * nbytes / 8 / 25e3, rel=0.01)
        assert found.shipped.us > 2 * best.us


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "broadcast", "all_to_all", "gather"])
@pytest.mark.parametrize("net", ["switch", "fat-tree", "dgx-1", "dgx-h100"])
def test_never_slower_than_the_shipped(op, net):
    found, bound_us = find(op, 8, 65536, net, most=12, ranks_per_host=4)
    assert found.shipped is not None
    assert bound_us <= found.best[0].us <= found.shipped.us
    assert list(found.best) == sorted(found.best, key=lambda each: (each.us, each.schedule.rounds))
    for each in found.best[:3]:
        verify(each.schedule)


def test_one_seed_is_one_search():
    first, second = (find("all_reduce", 4, 65536, most=70, seed=5)[0] for _ in range(2))
    assert [(each.plan, each.us) for each in first.best] == [
        (each.plan, each.us) for each in second.best
    ]


@pytest.mark.parametrize("plan", [
    Trees(3, (2, 1), 4), Levels(()), Shipped("ring", 1),
], ids=["trees", "levels", "shipped"])  # fmt: skip
def test_changed_plans_are_plans(plan):
    """All changes of all kinds are proved."""
    from unisono.core.schedules.algorithms.multi_level import digits

    net = machine_of("dgx-1")
    problem = Problem("all_reduce", 8, 4, -1, MIB, net, net.network("", 8))
    plan = Levels(tuple(digits(8, (4, 2)))) if plan == Levels(()) else plan
    chance, kinds = Random(3), set()
    for _ in range(40):
        plan = plan.changed(problem, chance)
        kinds.add(str(plan))
        verify(plan.schedule(problem))
    assert len(kinds) > 10 or isinstance(plan, Shipped)


@pytest.mark.parametrize(
    "op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
)
def test_trees_are_proved(op):
    net = machine_of("ndv2-2")
    problem = Problem(op, 16, 1, 3, MIB, net, net.network("", 16))
    verify(Trees(4, (1, 2), 9).schedule(problem))


def test_trees_without_a_way():
    assert spread(2, {(0, 1): 1}, [0, 1], (1,), Random(0)) is None


def test_links_of_a_network():
    assert links_of(machine_of("dgx-1").network("", 8))[0, 1] == 2
    assert links_of(machine_of("switch").network("", 8)) == {}
    lanes = {(0, 1): math.inf, (1, 0): 4.0, (1, 2): 2.0, (2, 1): math.inf}
    graph = Graph(3, {ends: LinkSpec(0, gbps) for ends, gbps in lanes.items()})
    assert links_of(graph) == {(0, 1): 2, (1, 0): 2, (1, 2): 1, (2, 1): 2}
    free = Graph(2, {(0, 1): LinkSpec(0, math.inf), (1, 0): LinkSpec(0, math.inf)})
    assert links_of(free) == {(0, 1): 1, (1, 0): 1}


def run(capsys, *words):
    assert main(["synthesize", *map(str, words)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("op", ["all_gather", "reduce"])
def test_files_run_as_the_schedule(op, capsys, tmp_path):
    python, xml = tmp_path / f"found_{op}.py", tmp_path / "found.xml"
    words = [op, "-p", 8, "--net", "dgx-1", "-b", "1M", "--candidates", 60, "-r", 2, "-o", python]
    words += ["-o", xml] if op == "all_gather" else []
    out = run(capsys, *words)
    (time,) = re.findall(r"^ +([\d.]+) ", out, re.MULTILINE)[:1]
    for command in re.findall(r"^wrote .*: unisono (.*)$", out, re.MULTILINE):
        assert main(command.split()) == 0
        cells = capsys.readouterr().out.splitlines()[-1].split()
        # A program of MSCCL may have another order of messages that come at once.
        assert float(cells[3]) == pytest.approx(float(time), rel=0.05)
    assert f"--algorithm {python}:found_{op}" in out


def test_the_command_of_a_file_has_the_model(capsys, tmp_path):
    words = ["all_reduce", "-p", 8, "--net", "fat-tree", "--model", "alpha-beta"]
    out = run(capsys, *words, "--candidates", 5, "-o", tmp_path / "a b.py")
    (time,) = re.findall(r"^ +([\d.]+) ", out, re.MULTILINE)[:1]
    (command,) = re.findall(r"^wrote .*: unisono (.*)$", out, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[3] == time


def test_a_program_of_msccl_that_is_read_back_is_the_same():
    found, _ = find("all_reduce", 8, MIB, "dgx-1", most=90)
    schedule, network = found.best[0].schedule, machine_of("dgx-1").network("", 8)
    again = from_msccl(to_msccl(schedule))
    verify(again)
    moved = [simulate(each, MIB, network, itemsize=4) for each in (schedule, again)]
    assert moved[0].messages == moved[1].messages
    assert moved[0].nbytes == moved[1].nbytes
    assert np.array_equal(moved[0].link_busy_ps, moved[1].link_busy_ps)


def test_the_limit_of_time_counts_among_the_shipped_algorithms():
    net, seen = machine_of("switch"), []
    problem = Problem("all_reduce", 16, 1, -1, MIB, net, net.network("", 16))
    found = search(
        problem, SearchLimits(9, 0.0, 0), lambda name: 1, lambda *told: seen.append(told)
    )
    assert found.ended == "seconds"
    assert [each.plan for each in found.best] == [found.shipped.plan]
    assert seen[0][:2] == (1, len(available("all_reduce", 16)))


def test_a_wrong_builder_is_no_refusal_of_the_network(monkeypatch):
    def wrong(self, problem):
        raise InvalidArgumentError("wrong builder")

    monkeypatch.setattr(Levels, "schedule", wrong)
    with pytest.raises(InvalidArgumentError, match="wrong builder"):
        find("all_reduce", 4, MIB, most=3)


@pytest.mark.parametrize(
    ("stem", "name"), [("best", "best"), ("np", "synthesized"), ("STEPS", "synthesized")]
)
def test_the_name_of_a_file_is_that_of_its_function(stem, name):
    assert written.name_of(stem) == name


@pytest.mark.parametrize("op", ["all_gather", "all_to_all", "reduce", "gather", "all_reduce"])
def test_the_bound_counts_the_bytes_that_are_moved(op):
    """It also counts the direction: on ndv2-2 the way to rank 1 is not the way from it."""
    for net, p in (("switch", 6), ("ndv2-2", 16)):
        machine = machine_of(net)
        network, root = machine.network("", p), 1 if op in ("reduce", "gather") else -1
        for nbytes in (1, 3, 5, 50, 512, 100_001):
            bound_us = least_us(op, nbytes, network, machine.costs(""), root=root, itemsize=4)
            for name in ("linear", "ring"):
                if name in available(op, p):
                    schedule = registry.build(op, name, p, root)
                    done = simulate(schedule, nbytes, network, machine.costs(""), itemsize=4)
                    assert bound_us <= done.last_us + 1e-9


def test_a_limit_of_time_is_said(capsys):
    out = run(capsys, "all_reduce", "-p", 8, "--seconds", 0)
    assert "the limit of 0 s ended the search" in out
    assert "the best shipped" not in out


def test_a_file_is_for_its_ranks_only(tmp_path, capsys):
    file = tmp_path / "for.py"
    run(capsys, "broadcast", "-p", 4, "--candidates", 5, "-r", 1, "-o", file)
    assert named("broadcast", f"{file}:synthesized") == "synthesized"
    words = ("simulate", "broadcast", "-p", "8", "--algorithm", f"{file}:synthesized")
    assert main(list(words)) == 1
    assert "this schedule is for 4 ranks with root 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-o", "x.svg"], "-o x.svg: expected .py or .xml"),
        (["-o", "/no/such/x.py"], "cannot write /no/such/x.py"),
        (["--net", "nowhere"], "no network 'nowhere'"),
        (
            ["-p", "513"],
            "synthesize: 513 ranks, expected at most 512, because each candidate is proved",
        ),
        (["-p", "9", "--hosts", "4"], "-n 9 does not fill 4 hosts"),
        (["-p", "4", "--net", "dgx-1"], "the links of the network join 8 ranks"),
    ],
)
def test_bad_words_are_refused(capsys, monkeypatch, tmp_path, words, expected):
    monkeypatch.chdir(tmp_path)
    assert main(["synthesize", "all_reduce", *words]) == 1
    assert expected in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_roots_models_and_networks_that_do_not_fit(capsys, tmp_path):
    assert main(["synthesize", "broadcast", "-p", "4", "-r", "4"]) == 1
    assert "-r 4: expected a rank below 4" in capsys.readouterr().err
    net = tmp_path / "lg.toml"
    net.write_text('model = "loggops"')
    assert main(["synthesize", "all_reduce", "--net", str(net)]) == 1
    assert "is for the model loggops, without links" in capsys.readouterr().err
    dgx = machine_of("dgx-h100")
    problem = Problem("all_reduce", 8, 3, -1, MIB, dgx, dgx.network("", 8))
    with pytest.raises(InvalidArgumentError, match=r"^no algorithm of all_reduce runs on net dgx-"):
        search(problem, SearchLimits(0, 9.0, 0), lambda name: 1)


def test_a_file_has_a_limit(monkeypatch):
    monkeypatch.setattr(written, "_MOST_ROWS", 10)
    ring = registry.build("all_reduce", "ring", 4)
    with pytest.raises(InvalidArgumentError, match=" rows, and a file at most 10"):
        written.to_python(ring, "ring", "")
