"""A transport from outside the library, by its name: that of examples/unix_transport.py."""

import ast
import os
import signal
import tempfile
from functools import partial

import numpy as np
import pytest

import unisono as dist
from tests.support.operations import COLLECTIVES, Operations
from tests.support.together import on_threads
from tests.support.tools import ROOT, tool
from tests.support.transport_worlds import UnixTransport
from unisono.core.base.deadline import Deadline
from unisono.core.engines import is_native_built
from unisono.core.stores import HashStore
from unisono.core.transports import connect, registry
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    InvalidArgumentError,
    PeerLostError,
    RendezvousError,
    UnsupportedError,
)
from unisono.lowlevel import CPUOptions, InprocTransport, register_transport
from unisono.testing import run

NAME = UnixTransport.__name__


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(registry._transports, "_values", dict(registry._transports._values))
    register_transport("unix", UnixTransport)


@pytest.mark.parametrize("mode", ["on", "cert"])
def test_a_transport_that_does_not_encrypt_is_refused_between_hosts(monkeypatch, mode):
    monkeypatch.setenv("UNISONO_TLS", mode)
    store = HashStore()

    def rank_thread(rank):
        with pytest.raises(UnsupportedError) as caught:
            connect(store, rank, 2, Deadline(60), "unix", lambda: f"host{rank}")
        return caught.value.what

    assert (
        on_threads(*(partial(rank_thread, rank) for rank in range(2)))
        == [
            "what the transport 'unix' sends between hosts is not encrypted by unisono, which "
            f"UNISONO_TLS={mode} forbids"
        ]
        * 2
    )


def every_call(rank):
    shown = repr(dist.group.WORLD)
    assert "transport=unix" in shown
    # Not in memory that these ranks could share.
    assert "engine=reference" in shown
    for count in (11, 100_000):
        calls = Operations(rank, 3, count, root=1)
        for name in COLLECTIVES:
            getattr(calls, name)()
        calls.check(count)
    after, before = (rank + 1) % 3, (rank - 1) % 3
    room = np.zeros(4)
    sent = dist.isend(np.full(4, rank + 1.0), after, tag=7)
    assert dist.recv(room, tag=7) == before
    sent.wait()
    assert room.tolist() == [before + 1.0] * 4
    names = [None] * 3
    part = dist.new_group([0, 2])
    if rank != 1:
        pair = np.array([rank + 1])
        dist.all_reduce(pair, group=part)
        assert pair.tolist() == [4]
    dist.all_gather_object(names, f"rank {rank}")
    assert names == ["rank 0", "rank 1", "rank 2"]
    with pytest.raises(CollectiveMismatchError):
        dist.all_reduce(np.zeros(3 if rank else 4))
    total = np.array([rank])
    dist.all_reduce(total)
    assert total.tolist() == [3]


def test_all_calls_run_over_a_registered_transport(monkeypatch):
    monkeypatch.setenv("UNISONO_TRANSPORT", "unix")
    run(every_call, 3)


def outlive_rank_1(rank, folder):
    register_transport("unix", UnixTransport)
    # What a killed rank leaves.
    tempfile.tempdir = folder
    dist.destroy_process_group()
    dist.init_process_group(
        init_method=f"file://{folder}/store?rank={rank}&world_size=3",
        timeout=60,
        pg_options=CPUOptions(transport="unix"),
    )
    total = np.array([rank])
    dist.all_reduce(total)
    assert total.tolist() == [3]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        dist.all_reduce(total)
    return caught.value.context.peers


def test_a_killed_rank_is_named(tmp_path):
    lost = run(outlive_rank_1, 3, ranks="processes", args=(str(tmp_path),), dead=(1,))
    assert lost == [(1,), None, (1,)]


@pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built")
def test_cpp_engine_over_a_transport_that_does_not_allow_it():
    with pytest.raises(UnsupportedError, match="the transport 'unix' does not let C\\+\\+ carry"):
        run(lambda rank: None, 2, transport="unix", engine="native")


def test_names():
    with pytest.raises(InvalidArgumentError, match="transport 'unix' is registered already"):
        register_transport("unix", UnixTransport)
    for name in ("auto", "tcp"):
        with pytest.raises(InvalidArgumentError, match=f"transport '{name}' is registered already"):
            register_transport(name, UnixTransport)
    with pytest.raises(InvalidArgumentError, match="name 'U X' must be a lower-case identifier"):
        register_transport("U X", UnixTransport)
    text = r"unknown transport 'udp' \(known: auto, inproc, tcp, unix\)"
    with pytest.raises(InvalidArgumentError, match=text):
        run(lambda rank: None, 1, transport="udp")


def test_installed_package_registers_a_transport(tmp_path, monkeypatch):
    (tmp_path / "plug-1.dist-info").mkdir()
    (tmp_path / "plug-1.dist-info/METADATA").write_text("Name: plug\nVersion: 1\n")
    points = "[unisono.transports]\nplugged = transport_plug:register\n"
    (tmp_path / "plug-1.dist-info/entry_points.txt").write_text(points)
    (tmp_path / "transport_plug.py").write_text(
        "from unisono.lowlevel import InprocTransport, register_transport\n"
        "def register():\n"
        "    register_transport('plugged', lambda store, *ranks: InprocTransport(*ranks))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("UNISONO_TRANSPORT", "plugged")
    assert run(lambda rank: dist.get_rank(), 2) == [0, 1]


def broken(store, rank, world_size, find):
    raise OSError(f"no card in rank {rank}")


class NoAddress(InprocTransport):
    def __init__(self, store, *ranks):
        super().__init__(*ranks)
        del self.address


@pytest.mark.parametrize(
    ("factory", "error", "text"),
    [
        (broken, OSError, "OSError('no card in rank 1')"),
        (lambda *_: None, ArgumentTypeError, "transport 'broken': the factory returned None"),
        (
            NoAddress,
            ArgumentTypeError,
            "transport 'broken' has set no address, which must be a string",
        ),
    ],
)
def test_other_ranks_learn_that_a_transport_cannot_be_made(factory, error, text):
    register_transport("broken", factory)
    with HashStore() as store:

        def join(rank):
            kind, mine = [("unix", RendezvousError), ("broken", error)][rank]
            with pytest.raises(mine) as caught:
                connect(store, rank, 2, Deadline(20), kind)
            return caught.value

        told, _ = on_threads(*(lambda rank=rank: join(rank) for rank in range(2)))
    assert told.what == f"rank 0 of 2 cannot meet rank 1: {text}"


def test_example_has_under_100_lines(tmp_path):
    source = (ROOT / "examples/unix_transport.py").read_text(encoding="utf-8")
    found = [node for node in ast.parse(source).body if getattr(node, "name", "") == NAME]
    (tmp_path / "class.py").write_text(ast.get_source_segment(source, found[0]) + "\n")
    assert tool("size").code_lines(tmp_path / "class.py") < 100
