"""Algorithms of a user: the families of `register_algorithm`, and those of files."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from tests.support.programs import python
from unisono.core.schedules import registry
from unisono.core.schedules.lowering.layout import Layout
from unisono.core.schedules.lowering.program import lower
from unisono.core.schedules.registry import available
from unisono.errors import CollectiveMismatchError, InvalidArgumentError, ScheduleError
from unisono.lowlevel import (
    Buf,
    Schedule,
    build,
    recv,
    recv_reduce,
    register_algorithm,
    register_schedule,
    send,
    to_msccl,
    verify,
)
from unisono.workbench.bench.algorithms import named
from unisono.workbench.cli.main import main

HOWTO = Path("docs/howto/algorithms.md")


@pytest.fixture(autouse=True)
def own_table(monkeypatch):
    table = {op: dict(names) for op, names in registry._TABLE.items()}
    monkeypatch.setattr(registry, "_TABLE", table)
    yield
    build.cache_clear()
    registry.own_digest.cache_clear()


@pytest.fixture
def mine(tmp_path):
    """The file of the how-to."""
    file = tmp_path / "mine.py"
    file.write_text(re.search(r"```python\n(.*?)```", HOWTO.read_text(), re.DOTALL)[1])
    return file


def chain(p, root, pipeline=1):
    """A broadcast along the ranks after the root."""

    def exchange(k, r):
        at = (r - root) % p
        first, n = np.maximum(k - at, 0), 1
        sends = (at <= k) & (k - at < pipeline) & (at < p - 1)
        takes = (at >= 1) & (at - 1 <= k) & (k - at + 1 < pipeline)
        return [
            send(r, (r + 1) % p, Buf.OUTPUT, first, n, sends),
            recv(r, (r - 1) % p, Buf.OUTPUT, np.maximum(k - at + 1, 0), n, takes),
        ]

    return Schedule("broadcast", "x", p, p - 2 + pipeline, exchange, root, output_chunks=pipeline)


def test_a_family_has_each_size_root_and_depth():
    register_algorithm("broadcast", "chain", chain, lambda p: p > 1)
    register_algorithm("broadcast", "chain", chain)  # again
    for p, root, depth in ((2, 0, 1), (5, 3, 4), (8, 7, 2)):
        schedule = build("broadcast", "chain", p, root, depth)
        assert (schedule.algorithm, schedule.root) == ("chain", root)
        verify(schedule)
    assert "chain" in available("broadcast", 4)


def test_a_family_of_others_rounds_each_step():
    shipped = build("all_reduce", "one_shot", 4)
    register_algorithm("all_reduce", "mine", lambda p: build("all_reduce", "one_shot", p))
    own = build("all_reduce", "mine", 4)
    goes_on = [lower(each, 1, Layout(5)).steps[:, 7] for each in (shipped, own)]
    assert goes_on[0].any()
    assert not goes_on[1].any()
    verify(own)


@pytest.mark.parametrize(("p", "local"), [(4, 2), (6, 3), (24, 4), (15, 5), (34, 2), (64, 8)])
def test_several_levels_are_proved(p, local):
    schedule = build("all_reduce", "multi_level", p, -1, 1, local)
    verify(schedule)
    sent = sum(
        int(rows[rows[:, 1] == 0, 7].sum())
        for rows in (schedule.steps(k, np.array([0])) for k in range(schedule.rounds))
    )
    assert sent == 2 * (p - 1)


def test_what_cannot_be_registered():
    with pytest.raises(InvalidArgumentError, match="broadcast needs a parameter `root`"):
        register_algorithm("broadcast", "mine", lambda p: None)
    with pytest.raises(InvalidArgumentError, match="all_reduce needs no parameter `root`"):
        register_algorithm("all_reduce", "mine", chain)
    with pytest.raises(
        InvalidArgumentError, match="'ring': broadcast has another such algorithm"
    ) as shipped:
        register_algorithm("broadcast", "ring", chain)
    assert shipped.value.hint == "'ring' comes with unisono: rename yours"
    register_algorithm("broadcast", "rootless", lambda p, root: replace(chain(p, root), root=-1))
    text = "'rootless': the builder returned a schedule with root -1, expected 2"
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        build("broadcast", "rootless", 4, 2)
    assert caught.value.hint == "give Schedule its root="
    register_algorithm("all_reduce", "other", lambda p: build("all_reduce", "ring", p + 1))
    text = "'other': the builder returned all_reduce on 5 ranks, expected all_reduce on 4"
    with pytest.raises(InvalidArgumentError, match=text):
        build("all_reduce", "other", 4)
    register_algorithm(
        "all_reduce", "lazy", lambda p: Schedule("all_reduce", "lazy", p, 1, lambda k, r: [])
    )
    with pytest.raises(ScheduleError):
        build("all_reduce", "lazy", 4)


def test_a_condition_that_raises_breaks_no_other_call(caplog):
    def odd(p):
        return 8 // (p - 4) > 0

    ring = partial(build, "all_reduce", "ring")
    with pytest.raises(InvalidArgumentError, match=r"'x': `applies` raised ZeroDivisionError.* 4 "):
        register_algorithm("all_reduce", "x", lambda p: ring(p), odd)
    assert "x" not in available("all_reduce", 4)
    register_algorithm("all_reduce", "x", lambda p: ring(p), lambda p: odd(p - 8))
    assert "ring" in available("all_reduce", 12)
    assert "x" not in available("all_reduce", 12)
    ((_, _, text),) = caplog.record_tuples
    assert text.startswith("'x' does not serve 12 ranks: `applies` raised ZeroDivisionError")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return None", "'{name}': the builder returned None, expected a Schedule"),
        (
            "return Schedule('all_reduce', '', p, 2, lambda k, r: [] if k == 0 else None)",
            r"'{name}': round 2 \(k=1\) returned None, expected a list of rows",
        ),
        (
            "return Schedule('all_reduce', '', p, lambda k, r: [], 2)",
            "'{name}': rounds is a function, expected a whole number",
        ),
        (
            "return Schedule('all_reduce', '', p, p / 2, lambda k, r: [])",
            "rounds is a float, expected",
        ),
        ("raise LookupError('mine')", r"'{name}': the builder raised LookupError\('mine'\) for 4 "),
        (
            "return Schedule('all_reduce', '', p, 1, lambda k, r: 1 / 0)",
            r"'{name}': the builder raised ZeroDivisionError\(.*\) for 4 ranks",
        ),
    ],
)
def test_a_builder_that_fails_is_named(body, expected):
    exec(f"def fails(p):\n    {body}", scope := {"Schedule": Schedule})
    register_algorithm("all_reduce", "fails", scope["fails"])
    with pytest.raises(InvalidArgumentError, match=expected.format(name="fails")):
        build("all_reduce", "fails", 4)


def test_an_error_in_a_round_names_the_line_and_the_round(tmp_path):
    (tmp_path / "lines.py").write_text(
        "from unisono.lowlevel import Buf, Schedule, recv_reduce, send\n"
        "def table(p):\n    def exchange(k, r):\n        peer = r ^ [1, 2][k]\n"
        "        return [send(r, peer, Buf.OUTPUT, 0), recv_reduce(r, peer, Buf.OUTPUT, 0)]\n"
        "    return Schedule('all_reduce', 'table', p, 3, exchange)\n"
        "def truth(p):\n    def exchange(k, r):\n        return [] if r % 2 else []\n"
        "    return Schedule('all_reduce', 'truth', p, 1, exchange)\n"
    )
    for name, p, end in (
        ("table", 8, r"4, in exchange, round 3 \(k=2\)"),
        ("truth", 1000, r"9, in exchange, round 1 \(k=0\)"),
    ):
        named("all_reduce", f"{tmp_path / 'lines.py'}:{name}")
        with pytest.raises(InvalidArgumentError, match=f" ranks: lines.py:{end}") as caught:
            build("all_reduce", name, p)
    assert caught.value.hint == "r is an array of ranks: use np.where, or where= of the step"


def ring_with_a_fault(p):
    """A ring above 16 ranks whose second half sends the wrong chunk."""
    if p == 24:
        raise ValueError(p)

    def exchange(k, r):
        collects = k < p - 1
        first = (r - k if collects else r + 1 - (k - p + 1)) % p
        first = first if p <= 16 or collects else (first + 1) % p
        take = recv_reduce if collects else recv
        return [
            send(r, (r + 1) % p, Buf.OUTPUT, first),
            take(r, (r - 1) % p, Buf.OUTPUT, (first - 1) % p),
        ]

    return Schedule("all_reduce", "x", p, 2 * (p - 1), exchange, output_chunks=p)


def test_a_world_that_is_too_large_for_a_proof_is_proved_at_like_sizes():
    """Of 1,000 ranks 24, 56 and 120, of 513 3, 7 and 15, of 1,024 8, 16 and 64."""
    register_algorithm("all_reduce", "fault", ring_with_a_fault)
    with pytest.raises(ScheduleError, match="last written in round 57") as caught:
        build("all_reduce", "fault", 1000)
    assert caught.value.context.world_size == 56
    assert "if 56 ranks are none of 'fault'" in caught.value.hint
    assert registry.proved_sizes("all_reduce", "fault", 513) == (3, 7, 15)
    with pytest.raises(ScheduleError, match="last written in round 65"):
        registry.proved_sizes("all_reduce", "fault", 1024)
    assert registry.proved_sizes("all_reduce", "fault", 16) == (16,)
    assert registry.proved_sizes("all_reduce", "ring", 1024) == (1024,)

    def two_levels(p, local):
        return build("all_reduce", "two_level", p, -1, 1, local)

    register_algorithm("all_reduce", "hosts", two_levels)
    assert registry.proved_sizes("all_reduce", "hosts", 1024, local=4) == (32, 64)
    register_algorithm("broadcast", "chain", chain)
    assert build("broadcast", "chain", 514, 513).root == 513
    assert registry.proved_sizes("broadcast", "chain", 514, 513) == (6, 14, 30)


def rounds_of_16_ranks(p):
    def exchange(k, r):
        peer = r ^ 1 << k
        return [send(r, peer, Buf.OUTPUT, 0), recv_reduce(r, peer, Buf.OUTPUT, 0)]

    return Schedule("all_reduce", "x", p, min(p, 16).bit_length() - 1, exchange)


def raises_at_8(p):
    one = ring_with_a_fault(16)

    def exchange(k, r):
        return one.exchange(k, r) if p > 8 else [][k]

    return Schedule("all_reduce", "x", p, 2, exchange, output_chunks=p)


def test_the_stand_ins_of_a_large_world_find_rounds_that_do_not_grow():
    register_algorithm("all_reduce", "sixteen", rounds_of_16_ranks)
    assert build("all_reduce", "sixteen", 16).rounds == 4
    with pytest.raises(ScheduleError, match="contributions of 0-15, expected 0-63") as caught:
        build("all_reduce", "sixteen", 1024)
    assert "if 64 ranks are none of 'sixteen'" in caught.value.hint
    register_algorithm("all_reduce", "not8", raises_at_8)
    with pytest.raises(InvalidArgumentError, match=r"raised IndexError.* for 8 ranks") as caught:
        build("all_reduce", "not8", 1024)
    assert "if 8 ranks are none of 'not8'" in caught.value.hint


def test_a_function_that_is_defined_again_replaces_the_first():
    """As a cell of a notebook does; another function of this name is still refused."""
    code = "def cell(p):\n    return build('all_reduce', '{}', p)"
    for name in ("ring", "tree"):
        exec(code.format(name), scope := {"__name__": "__main__", "build": build})
        register_algorithm("all_reduce", "cell", scope["cell"])
        rounds = build("all_reduce", name, 8).rounds
        assert build("all_reduce", "cell", 8).rounds == rounds
    with pytest.raises(InvalidArgumentError, match="'cell': all_reduce has another such algor"):
        register_algorithm("all_reduce", "cell", lambda p: build("all_reduce", "ring", p))


def test_a_file_is_a_module(tmp_path):
    """Dataclasses find its names, it imports its neighbours, and partials are algorithms."""
    (tmp_path / "neighbour_of_mine.py").write_text("KIND = 'ring'\n")
    (tmp_path / "bad.py").write_text("import neighbour_that_is_missing\n")
    (tmp_path / "a.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\nfrom functools import partial\n"
        "from neighbour_of_mine import KIND\nfrom unisono.lowlevel import build\n"
        "@dataclass\nclass Maker:\n    kind: str\n"
        "    def __call__(self, p):\n        return build('all_reduce', self.kind, p)\n"
        "def maker(kind, p):\n    return build('all_reduce', kind, p)\n"
        "made, part = Maker(KIND), partial(maker, KIND)\n"
    )
    for _ in range(2):
        for name in ("made", "part"):
            assert named("all_reduce", f"{tmp_path}/a.py:{name}") == name
            assert build("all_reduce", name, 4).algorithm == name
    with pytest.raises(
        InvalidArgumentError, match=r"bad\.py cannot be imported: ModuleNotFoundErr"
    ):
        named("all_reduce", f"{tmp_path}/bad.py:f")
    (tmp_path / "x.xml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgumentError, match=r"x\.xml is no text: 'utf-8' codec"):
        named("all_reduce", f"{tmp_path}/x.xml")


def ring(p, shift):
    """A right all_reduce for each shift; two ranks with different ones exchange wrong chunks."""

    def exchange(k, r):
        take = recv_reduce if k < p - 1 else recv
        sent, taken = (r - k + shift) % p, (r - k - 1 + shift) % p
        return [
            send(r, (r + 1) % p, Buf.OUTPUT, sent, 1),
            take(r, (r - 1) % p, Buf.OUTPUT, taken, 1),
        ]

    return Schedule("all_reduce", "own", p, 2 * (p - 1), exchange, output_chunks=p)


@pytest.mark.parametrize("how", ["family", "schedule"])
@pytest.mark.ranks(3, kind="processes", engine="both")
def test_ranks_with_other_schedules_of_one_name_are_told(rank, how):
    p, shift = dist.get_world_size(), int(rank == 1)
    if how == "family":
        register_algorithm("all_reduce", "own", lambda p: ring(p, shift))
    else:
        register_schedule(ring(p, shift))
    x = np.arange(6.0)
    with pytest.raises(
        CollectiveMismatchError, match=r"algorithm=own, schedule=\w+\) at \S+; rank"
    ):
        dist.all_reduce(x, algorithm="own")
    assert x.tolist() == list(range(6))
    register_algorithm("all_reduce", "one", lambda p: ring(p, 2))
    dist.all_reduce(x, algorithm="one")
    assert x.tolist() == [3.0 * each for each in range(6)]


def test_the_algorithm_of_the_how_to_in_all_commands(mine, tmp_path, capsys):
    algorithm = f"{mine}:my_ring"
    words = ("all_reduce", "-p", "16", "--hosts", "4")
    assert main(["simulate", *words, "-b", "64K", "--algorithm", algorithm + ",ring"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    assert [row[2] for row in rows] == ["my_ring", "ring"]
    assert rows[0][3] == rows[1][3]
    picture = tmp_path / "a.svg"
    assert main(["draw", *words, "--algorithm", algorithm, "-o", str(picture)]) == 0
    assert "all_reduce, my_ring: 30 rounds" in picture.read_text()
    assert main(["explain", words[0], "64K", *words[1:], "--algorithm", algorithm]) == 0
    assert "takes my_ring: the call asks for it" in capsys.readouterr().out
    verify(build("all_reduce", "my_ring", 16))
    # It is right for each size, of which `explain` and `draw` take what the page does not give.
    assert main(["explain", algorithm]) == 0
    out = capsys.readouterr().out
    assert "WRONG" not in out
    for part in ("my_ring, all_reduce: Pass sums", "cost    2(p-1) rounds", "use     Large data"):
        assert part in out
    assert main(["draw", "all_reduce", "--algorithm", algorithm, "-o", str(picture)]) == 0


def test_a_program_of_msccl_in_a_file(tmp_path, capsys):
    file = tmp_path / "ring.xml"
    file.write_text(to_msccl(build("all_gather", "ring", 4)).replace('"ring"', '"theirs"'))
    name = named("all_gather", str(file))
    assert main(["simulate", "all_gather", "-p", "4", "--algorithm", str(file)]) == 0
    assert name in capsys.readouterr().out
    with pytest.raises(
        InvalidArgumentError, match=r"ring\.xml has all_gather, expected all_reduce"
    ):
        named("all_reduce", str(file))


def test_files_without_the_algorithm(mine, tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"cannot read .*none\.py: No such file"):
        named("all_reduce", f"{tmp_path}/none.py:my_ring")
    with pytest.raises(InvalidArgumentError, match=r"mine\.py has no function 'rounds'"):
        named("all_reduce", f"{mine}:rounds")


@pytest.mark.parametrize("op", ["broadcast", "all_gather"])
def test_a_function_of_another_operation_is_named_as_such(tmp_path, capsys, op):
    file = tmp_path / "kinds.py"
    file.write_text(
        "from unisono.lowlevel import Schedule, build\n"
        "def mine(p):\n    return build('all_reduce', 'ring', p)\n"
        "def odd(p):\n    return Schedule('allreduce', 'odd', p, 1, None)\n"
        "def typo(p):\n    return Shedule()\n"
    )
    for name, expected in (
        ("mine", f"kinds.py:mine is an algorithm of all_reduce, not of {op}"),
        ("odd", "unknown collective 'allreduce' (known: all_reduce, "),
    ):
        assert main(["simulate", op, "-n", "4", "--algorithm", f"{file}:{name}"]) == 1
        assert expected in capsys.readouterr().err
    assert main(["explain", f"{file}:typo"]) == 1
    assert 'is not defined"): kinds.py:7, in typo' in capsys.readouterr().err


@pytest.mark.native
def test_bench_measures_it_on_all_ranks(mine, tmp_path):
    words = ["-m", "unisono", "bench", "all_reduce", "--nproc-per-node", "2", "-b", "4K"]
    done = python(*words, "-e", "4K", "-n", "2", "-w", "1", "--algorithm", f"{mine}:my_ring")
    assert done.returncode == 0, done.stderr
    assert "4096" in done.stdout
