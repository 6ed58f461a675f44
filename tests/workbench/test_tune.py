"""`unisono tune`: it measures, stores a table, and groups use the table."""

import os
import re
import secrets
import subprocess
import sys

import numpy as np
import pytest

import unisono as dist
from tests.support.programs import python
from unisono.core.backends import tuning
from unisono.core.schedules import available, select
from unisono.core.schedules.choice.far import NEAR_US
from unisono.core.schedules.choice.tables import ChoiceTable, GroupShape, Rule
from unisono.core.schedules.choice.tuning import rules_of, topology_of
from unisono.testing.hosts import Network, why_no_hosts
from unisono.workbench.bench.tuning import TuningPlan, measure, quartiles
from unisono.workbench.cli.main import main
from unisono.workbench.cli.terminal import progress_bar

SMALL = ("-b", "1K", "-e", "4K", "--seconds", "8")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("UNISONO_TUNING", "")
    return tmp_path / "unisono"


@pytest.mark.native
def test_ranks_that_the_command_starts(cache, capfd):
    assert main(["tune", "all_reduce", "broadcast", "--nproc-per-node", "2", *SMALL]) == 0
    out, err = capfd.readouterr()
    (table,) = tuning.read_tables().values()
    assert table.shape == GroupShape("native", "shared-memory", 2, 2)
    (file,) = cache.iterdir()
    assert f"unisono tune: wrote {file} on " in err
    assert "unisono tune: 0 % all_reduce of 1024 bytes" in err
    assert "unisono tune: 100 %" in err
    assert out.startswith(f"# table {table.digest}: 2 ranks, 2 per host, shared memory\n")
    cells = {(op, nbytes) for op in ("all_reduce", "broadcast") for nbytes in (1024, 4096)}
    assert {("all_reduce", 1024)} <= set(table.measured) <= cells
    topology = topology_of(table.shape)
    for (op, nbytes), times in table.measured.items():
        assert set(times) <= set(available(op, 2, local=2))
        assert len(times[select(op, nbytes, topology).algorithm]) in (1, 2, 3)
        assert all(0.1 < us < 1e6 for passes in times.values() for us in passes)
    assert table.rules == rules_of(table.measured, topology)
    assert len(re.findall(r"x faster than", out)) >= len(table.rules)
    assert table.about["passes"] == 3
    assert ("the machine was busy" in err) == (table.about["load"] > os.cpu_count())
    # The command shows what it stored, and deletes it.
    assert main(["tune", "--show"]) == 0
    assert capfd.readouterr().out == out
    assert main(["tune", "--clear"]) == 0
    assert capfd.readouterr().out == f"deleted {file}\n"
    assert list(cache.iterdir()) == []


@pytest.mark.native
def test_ranks_of_a_launcher(tmp_path):
    """Over TCP; a file that does not exist yet is written, and then used."""
    file = tmp_path / "table.json"
    env = os.environ | {"UNISONO_TUNING": str(file), "UNISONO_SHARED_MEMORY": "0"}
    words = ("-m", "unisono", "run", "--nproc-per-node", 3)
    done = python(*words, "-m", "unisono", "tune", "reduce", *SMALL, env=env)
    assert done.returncode == 0, done.stderr
    table = ChoiceTable.from_json("it", file.read_text())
    assert table.shape == GroupShape("native", "tcp", 3, 1)
    script = "import unisono as d; d.init_process_group(); print(d.group.WORLD)"
    (tmp_path / "show.py").write_text(script)
    done = python(*words, tmp_path / "show.py", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"tuning={table.digest}>") == 3


@pytest.mark.native
@pytest.mark.whole("two hosts, and two launches on them")
@pytest.mark.skipif(bool(why_no_hosts()), reason=str(why_no_hosts()))
def test_two_hosts_write_and_use_the_same_table(tmp_path):
    show = tmp_path / "show.py"
    show.write_text("import unisono as d; d.init_process_group(); print(d.group.WORLD)")
    env = os.environ | {
        "UNISONO_TOKEN": secrets.token_hex(), "XDG_CACHE_HOME": str(tmp_path), "UNISONO_TUNING": ""
    }  # fmt: skip
    launch = [sys.executable, "-m", "unisono", "run", "--nnodes", "2", "--master-addr", "host1"]

    def printed(hosts, *words):
        started = [
            subprocess.Popen(
                host.inside(*launch, "--node-rank", str(index), "--nproc-per-node", "2", *words),
                env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for index, host in enumerate(hosts)
        ]  # fmt: skip
        done = [process.communicate(timeout=100) for process in started]
        assert [process.returncode for process in started] == [0, 0], done
        return done

    with Network(2) as network:
        tuned = printed(network.hosts, "-m", "unisono", "tune", "reduce", *SMALL)
        assert all(f" on host{n}" in errors for n, (_, errors) in enumerate(tuned, 1))
        (file,) = (tmp_path / "unisono").iterdir()
        table = ChoiceTable.from_json("it", file.read_text())
        assert table.shape[:-1] == ("native", "tcp", 4, 2)
        assert table.shape.round_trip_us >= NEAR_US
        assert table.about["hosts"] == 2
        shown = printed(network.hosts, show)
    assert "".join(out for out, _ in shown).count(f"tuning={table.digest}>") == 4


@pytest.mark.ranks(2, kind="processes")
def test_the_measurement_is_equal_on_all_ranks(rank):
    shape = dist.group.WORLD.backends["cpu"].shape
    seen = []
    plan = TuningPlan(("all_gather",), limit_s=0.5)
    rounds = measure(plan, topology_of(shape), lambda *step: seen.append(step))
    everywhere = [None] * 2
    dist.all_gather_object(everywhere, rounds)
    assert everywhere[0] == everywhere[1]
    sizes = [1024 << 2 * k for k in range(8)]
    # On a busy machine the first pass does not reach all; it begins with every other size.
    cells = [("all_gather", nbytes) for nbytes in sizes]
    assert list(rounds) == [cell for cell in cells if cell in rounds]
    assert ("all_gather", 1024) in rounds
    steps = [done for done, _, _ in seen]
    assert steps == sorted(steps)
    assert seen[0] == (0, 24, "all_gather of 1024 bytes")
    assert len(rounds) == 1 or seen[1] == (1, 24, "all_gather of 16384 bytes")
    assert seen[-1] == (24, 24, "")
    for cell, times in quartiles(rounds).items():
        for name, passes in times.items():
            assert passes == tuple(np.quantile(one, 0.25) for one in rounds[cell][name])
            assert all(len(one) >= 2 for one in rounds[cell][name])


def test_the_table_shows_what_rules_gain(cache, capsys):
    shape = GroupShape("native", "tcp", 4, 1)
    times = {"linear": (10.0, 10.0), "one_shot": (20.0, 45.0)}
    rules = (Rule("reduce", 0, 2048, "linear"),)
    measured = {("reduce", 1024): times}
    about = {"load": 1.5, "by": "\x1b[2J"}
    tuning.save(ChoiceTable(shape, tuning.machine(), dist.__version__, rules, measured, about))
    assert main(["tune", "--show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("; load 1.5, by ?[2J")
    words = "reduce 0 .. 2,048 linear 1 KiB: 3.00 x faster than one_shot"
    assert lines[2].split() == words.split()


def test_progress_prints_tenths(capsys):
    with progress_bar("unisono tune: ", shown=True) as progress:
        for done in range(48):
            progress(done, 48, f"cell {done}")
        progress(48, 48, "")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[0] == "unisono tune: 0 % cell 0"
    assert lines[-1] == "unisono tune: 100 %"


@pytest.mark.parametrize(
    ("words", "env", "expected"),
    [
        (["barrier"], {}, "unknown operation 'barrier' (known: all_reduce, "),
        (["--seconds", "x"], {}, "must be a number of seconds"),
        (["--nproc-per-node", "1", "--seconds", "1"], {}, "a world of 1 rank has no algorithms"),
        (
            ["--nproc-per-node", "2"],
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "tune: this process is a rank already, so it starts none",
        ),
    ],
)
def test_bad_words_are_refused(words, env, expected):
    done = python("-m", "unisono", "tune", *words, env=os.environ | env)
    assert done.returncode != 0
    assert expected in done.stderr
