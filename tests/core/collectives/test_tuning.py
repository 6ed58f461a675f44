"""Tuning tables in groups: agreed on by all ranks, or left out with a warning."""

import logging
import os

import pytest

import unisono as dist
from tests.support.programs import python
from unisono.core.backends import tuning
from unisono.core.schedules import build, select
from unisono.core.schedules.choice.tables import VIRTUAL, ChoiceTable, GroupShape, Rule
from unisono.core.schedules.choice.tuning import topology_of
from unisono.errors import InvalidArgumentError
from unisono.workbench.cli.main import main
from unisono.workbench.simulate import Hosts, LinkSpec, simulate

MINE = GroupShape("native", "shared-memory", 2, 2)


def table(shape=MINE, algorithm="ring", machine=None, version=dist.__version__):
    rules = (Rule("all_reduce", 0, 1 << 20, algorithm),)
    return ChoiceTable(shape, machine or tuning.machine(), version, rules)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, which groups use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("UNISONO_TUNING", "")
    return tmp_path / "unisono"


def test_a_table_is_found_again(cache):
    file = tuning.save(table())
    assert file.parent == cache
    tuning.save(table(MINE._replace(ranks=4, local=4), "tree"))
    assert tuning.read_tables() == {t.shape: t for t in (table(), table(
        MINE._replace(ranks=4, local=4), "tree"))}  # fmt: skip
    # A world of 2 ranks has no groups of 4.
    assert tuning.read_tables(2) == {MINE: table()}
    assert sorted(tuning.clear()) == sorted([file, file.with_name(file.name.replace("2-2", "4-4"))])
    assert tuning.read_tables() == {}
    assert list(cache.iterdir()) == []


@pytest.mark.native
def test_a_table_of_virtual_time_serves_every_machine(cache, monkeypatch, tmp_path, capsys):
    """It has the fastest of the simulated algorithms where the built-in choice loses."""
    net = tmp_path / "mine.toml"
    net.write_text("ranks_per_host = 4\nlatency_us = 90\ngbps = 1\ninside_us = 1\n")
    words = ["tune", "all_gather", "--net", str(net), "-p", "16", "-b", "4K", "-e", "4K"]
    assert main(words) == 0
    shape = GroupShape("native", "tcp", 16, 4, 250)
    monkeypatch.setattr(tuning, "machine", lambda: "another machine")
    file = next(cache.iterdir())
    monkeypatch.setenv("UNISONO_TUNING", str(file))
    found = tuning.read_tables()[shape]
    times = {name: us[0] for name, us in found.measured["all_gather", 4096].items()}
    best = min(times, key=times.get)
    spec = LinkSpec(90_000_000, 1)
    hosts = Hosts(16, 4, LinkSpec(1_000_000), spec)
    expected = simulate(build("all_gather", best, 16, local=4), 4096, hosts, itemsize=4)
    assert times[best] == pytest.approx(expected.last_us)
    assert [rule.algorithm for rule in found.rules] == [best]
    assert select("all_gather", 4096, topology_of(shape), table=found).algorithm == best
    capsys.readouterr()
    assert main(["tune", "--net", str(net)]) == 1
    assert "tune: --net needs -n, the number of ranks" in capsys.readouterr().err


def test_a_table_is_written_beside_links_and_leaves_no_part(cache, monkeypatch):
    file = tuning.save(table())
    victim = cache / "victim"
    victim.write_text("precious")
    file.with_name(f"{file.name}.{os.getpid()}").symlink_to(victim)
    tuning.save(table(algorithm="tree"))
    assert victim.read_text() == "precious"
    assert file.stat().st_mode & 0o777 == 0o644
    before = sorted(cache.iterdir())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InvalidArgumentError, match=r"cannot write .*: No space left on device"):
        tuning.save(table())
    assert sorted(cache.iterdir()) == before


def test_a_pipe_is_no_table(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("UNISONO_TUNING", str(tmp_path / "pipe"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgumentError, match=r"UNISONO_TUNING=.*pipe: no regular file"):
        tuning.read_tables()


@pytest.mark.parametrize("fault", ["broken", "other machine", "other version", "folder"])
def test_a_table_of_the_cache_that_cannot_be_used_is_left_out(cache, caplog, fault):
    file = tuning.save(table())
    if fault == "broken":
        file.write_text(file.read_text()[:100])
    elif fault == "folder":
        file.unlink()
        file.mkdir()
    else:
        other = {"machine": "another, 1 core"} if "machine" in fault else {"version": "0.0.1"}
        file.write_text(table(**other).to_json())
    with caplog.at_level(logging.WARNING, "unisono"):
        assert tuning.read_tables() == {}
    ((_, _, text),) = caplog.record_tuples
    assert text.startswith("table left out: ")
    assert str(file) in text


def test_a_named_file_is_used_alone(cache, monkeypatch, tmp_path):
    tuning.save(table())
    named = tmp_path / "named.json"
    monkeypatch.setenv("UNISONO_TUNING", str(named))
    with pytest.raises(InvalidArgumentError, match=r"UNISONO_TUNING=.*named.json: No such file"):
        tuning.read_tables()
    assert tuning.save(table(algorithm="tree")) == named
    assert tuning.read_tables() == {MINE: table(algorithm="tree")}
    named.write_text("{}")
    with pytest.raises(InvalidArgumentError, match="is no tuning table of format 2: no key"):
        tuning.read_tables()
    monkeypatch.setenv("UNISONO_TUNING", "0")
    assert tuning.read_tables() == {}


def test_a_file_that_cannot_be_written_is_an_error(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNISONO_TUNING", str(tmp_path / "file" / "table.json"))
    with pytest.raises(InvalidArgumentError, match=r"cannot write .*table.json"):
        tuning.save(table())


PROGRAM = """
import os, sys
import numpy as np
import unisono as dist

rank = int(os.environ["RANK"])
os.environ["UNISONO_TUNING"] = sys.argv[1:][rank]
dist.init_process_group()

def used(group):
    x = np.full(5, dist.get_rank(group) + 1.0)
    dist.all_reduce(x, group=group)
    size = dist.get_world_size(group)
    assert (x == size * (size + 1) / 2).all()
    (call,) = group.backends["cpu"]._prepared_calls._prepared.values()
    return repr(group).partition("tuning=")[2].strip(">") or "-", call.algorithm

found = used(dist.group.WORLD)
pair = dist.new_group([0, 1])
print(rank, *found, *(used(pair) if rank < 2 else ()), flush=True)
dist.destroy_process_group()
"""


def launched(folder, *settings):
    """Run 3 ranks with these values of UNISONO_TUNING; return their lines and the warnings."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    words = ("-m", "unisono", "run", "--nproc-per-node", 3, script, *settings)
    done = python(*words, env=os.environ | {"XDG_CACHE_HOME": str(folder)})
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "no table is used" in line]
    return sorted(line.split() for line in done.stdout.splitlines()), warnings


@pytest.mark.native
@pytest.mark.parametrize(
    ("files", "warning"),
    [
        ("aaa", ""),
        ("aab", "ranks 0, 1 have table A; ranks 2 have table B"),
        ("a0a", "ranks 1 have none; ranks 0, 2 have table A"),
        ("000", ""),
    ],
    ids=["equal", "different", "one has none", "no tables"],
)
def test_all_ranks_use_a_table_or_none_does(tmp_path, files, warning):
    """With a table the group uses ring; the built-in choice is one_shot."""
    shape = GroupShape("native", "shared-memory", 3, 3)
    digests = {}
    for name, algorithm in (("a", "ring"), ("b", "tree")):
        content = table(shape, algorithm)
        digests[name] = content.digest
        (tmp_path / name).write_text(content.to_json())
    settings = [name if name == "0" else str(tmp_path / name) for name in files]
    rows, warned = launched(tmp_path, *settings)
    used = [digests["a"], "ring"] if files == "aaa" else ["-", "one_shot"]
    # The group of 2 ranks has no table.
    pair = ["-", "one_shot"]
    assert rows == [["0", *used, *pair], ["1", *used, *pair], ["2", *used]]
    assert len(warned) == bool(warning)
    for part in filter(None, warning.split("; ")):
        for name, digest in digests.items():
            part = part.replace(f"table {name.upper()}", f"table {digest}")
        assert part in warned[0]


@pytest.mark.native
def test_a_group_uses_the_table_of_its_own_shape(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("UNISONO_TUNING", "")
    tuning.save(table())
    world, pair = ["-", "one_shot"], [table().digest, "ring"]
    rows, warned = launched(tmp_path, "", "", "")
    assert rows == [["0", *world, *pair], ["1", *world, *pair], ["2", *world]]
    assert warned == []


def test_the_machine_of_a_world_that_is_none_differs(monkeypatch):
    """A world on one host that avoids shared memory has the shape of a world on several."""
    before = tuning.machine()
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    assert tuning.machine() == f"{before}, UNISONO_SHARED_MEMORY=0"


def test_a_virtual_table_stands_behind_a_measured_one(cache, monkeypatch):
    """It does not overwrite it, and is read on another machine, too."""
    virtual = table(algorithm="tree", machine=VIRTUAL)
    tuning.save(table())
    file = tuning.save(virtual)
    assert file.name == f"tuning-virtual-{MINE}.json"
    assert tuning.read_tables() == {MINE: table()}
    monkeypatch.setattr(tuning, "machine", lambda: "another machine")
    assert tuning.read_tables() == {MINE: virtual}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--net", "p5", "-p", "7"],
            "tune: -n 7 is not 2 or more full hosts of net p5, which have ",
        ),
        (["--net", "p5", "-p", "8"], "tune: -n 8 is not 2 or more full hosts"),
        (["--net", "p5", "-p", "12"], "tune: -n 12 is not 2 or more full hosts"),
    ],
)
def test_a_tune_that_would_ignore_words_is_refused(cache, capsys, words, expected):
    assert main(["tune", *words]) == 1
    assert expected in capsys.readouterr().err
    assert not cache.exists()


def test_a_virtual_table_has_the_round_trip_of_its_net(cache, tmp_path, capsys):
    """And it names what the network cannot run; `explain` says that its times are simulated."""
    net = tmp_path / "far.toml"
    net.write_text("ranks_per_host = 2\nchannels = 2\nlatency_us = 2000.0\ngbps = 1\n")
    words = ["all_gather", "-b", "4K", "-e", "4K", "--net", str(net)]
    assert main(["tune", *words, "-p", "4"]) == 0
    out, err = capsys.readouterr()
    assert "unisono tune: left out: all_gather (one_shot): 2 channels of all_gather" in err
    assert "1 cells were simulated" in out
    assert [*tuning.read_tables()] == [GroupShape("native", "tcp", 4, 2, 4000)]
    asked = ["explain", "all_gather", "4K", "-p", "4", "--hosts", "2", "--net", str(net)]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "# table for native-tcp-4-2-4000us: " in out
    assert ", simulated 20" in out
    assert "simulated us\n" in out
    assert "measured us" not in out
