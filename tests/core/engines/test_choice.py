"""Which engine a group gets; all its ranks must come to the same choice."""

import errno
import os
from contextlib import closing

import pytest

import unisono
from unisono.core.base import log, seam
from unisono.core.engines import (
    Communicator,
    host_id,
    is_native_built,
    make_engine,
    register_engine,
)
from unisono.core.transports import InprocTransport
from unisono.errors import InvalidArgumentError, UnsupportedError

needs_native = pytest.mark.skipif(not is_native_built(), reason="no native engine")


@pytest.fixture(autouse=True)
def no_wish(monkeypatch):
    monkeypatch.delenv("UNISONO_ENGINE", raising=False)


@pytest.fixture
def choose():
    """Return a function: what the ranks said about their hosts, a wish -> name of the engine."""

    def name(hosts, kind=None):
        with closing(InprocTransport(0, len(hosts), lambda peer: "")) as transport:
            transport.hosts = hosts
            engine = make_engine(Communicator(transport, tuple(range(len(hosts))), "g"), kind)
            engine.close()
            return engine.name

    return name


@needs_native
def test_ranks_of_one_host_share_memory(choose):
    word = host_id()
    assert word
    assert choose((word, word)) == "native"
    assert choose((word, word), "reference") == "reference"
    assert choose((word, "9/elsewhere")) == "native"


@needs_native
def test_ranks_that_do_not_want_it_use_the_reference_engine(choose):
    assert choose(("", "")) == "reference"
    with pytest.raises(UnsupportedError, match="cannot use the native engine: its "):
        choose(("", ""), "native")


@needs_native
def test_waiting_threads_move_unless_the_environment_forbids_it(monkeypatch, choose):
    word, seen = host_id(), []
    monkeypatch.setattr(seam.cpp, "let_threads_move", seen.append)
    choose((word, word))
    monkeypatch.setenv("UNISONO_MOVE", "0")
    choose((word, word))
    assert seen == [True, False]
    monkeypatch.setenv("UNISONO_MOVE", "no")
    with pytest.raises(InvalidArgumentError, match="UNISONO_MOVE='no' is neither 0 nor 1"):
        choose((word, word))


def test_one_rank_that_wants_the_reference_engine_decides_for_all(monkeypatch):
    monkeypatch.setenv("UNISONO_ENGINE", "reference")
    assert host_id() == ""


@needs_native
def test_the_engine_of_the_options_takes_precedence(monkeypatch, choose, caplog):
    word = host_id()
    monkeypatch.setenv("UNISONO_ENGINE", "reference")
    assert host_id("native") == word
    monkeypatch.setenv("UNISONO_ENGINE", "steam")
    monkeypatch.setattr(log, "_logged", set())
    with caplog.at_level("INFO", "unisono"):
        assert choose((word, word), "native") == "native"
    assert "collectives run on the native engine (it is built); shared memory: " in caplog.text
    info = unisono.engine_info()
    assert info.engine == "?"
    assert info.why.startswith("unknown engine 'steam' (known: auto, native, reference")


@pytest.mark.parametrize("name", ["auto", "native", "reference"])
def test_names_of_built_in_engines_are_taken(name):
    with pytest.raises(InvalidArgumentError, match=f"engine '{name}' is registered already"):
        register_engine(name, None)


@needs_native
def test_engine_info(monkeypatch):
    info = unisono.engine_info()
    assert (info.engine, info.shared_memory) == ("native", "memfd")
    assert info.isa in info.isas
    assert info.build
    assert str(info).startswith(
        f"native engine (it is built); shared memory: memfd; instruction set {info.isa}"
    )
    monkeypatch.setenv("UNISONO_ENGINE", "reference")
    assert unisono.engine_info()[:2] == ("reference", "UNISONO_ENGINE=reference")


def test_engine_info_without_the_extension_module(monkeypatch):
    monkeypatch.setattr("unisono.core.engines.choice.cpp", seam._Python())
    monkeypatch.setattr("unisono.core.engines.choice.why_absent", "it is not built")
    info = unisono.engine_info()
    assert info.engine == "reference"
    assert "is not built" in str(info)
    assert (info.isa, info.isas, info.build) == ("", (), "")


def test_engine_info_without_memory_to_share(monkeypatch):
    def fail(name):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", fail)
    info = unisono.engine_info()
    assert info.engine == "reference"
    assert info.shared_memory == "Function not implemented: memfd_create"
