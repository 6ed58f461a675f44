"""The extension module is used only where it fits the Python sources."""

import os
from types import SimpleNamespace

import pytest

from tests.support.programs import python
from unisono.core.base import extension as native

NAME = "unisono._engine"
NOT_BUILT = "the extension module was not built: there was no C++ compiler, or it failed"


def loaded(monkeypatch, found):
    """Return what is made of a module, or of the exception that importing it raises."""

    def import_module(name):
        assert name == NAME
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(native, "import_module", import_module)
    return native._load()


def test_module_that_knows_its_stub_is_used(monkeypatch):
    with open(native._STUB, "rb") as file:
        stub = file.read()
    module = SimpleNamespace(fits=lambda text: text == stub)
    assert loaded(monkeypatch, module) == (module, "")


@pytest.mark.parametrize("old", [SimpleNamespace(), SimpleNamespace(fits=lambda text: False)])
def test_module_of_other_sources_is_not_used(monkeypatch, old):
    extension, why = loaded(monkeypatch, old)
    assert extension is None
    assert "built from other sources than these: rebuild it with `make native`" in why


def test_module_without_a_stub_beside_it_is_used(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_STUB", str(tmp_path / "absent.pyi"))
    module = SimpleNamespace()
    assert loaded(monkeypatch, module) == (module, "")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ModuleNotFoundError("", name=NAME), NOT_BUILT),
        (ModuleNotFoundError("no x", name="x"), "the extension module cannot be loaded: no x"),
        (ImportError("no GLIBC"), "the extension module cannot be loaded: no GLIBC"),
    ],
)
def test_module_that_cannot_be_loaded(monkeypatch, error, why):
    assert loaded(monkeypatch, error) == (None, why)


@pytest.mark.skipif(native.extension is None, reason="the C++ engine is not built")
def test_built_module_knows_its_stub():
    with open(native._STUB, "rb") as file:
        stub = file.read()
    assert native.extension.fits(stub)
    assert not native.extension.fits(stub + b"\n")
    assert not native.extension.fits(b"")


OLD = """
import sys, types
sys.modules["unisono._engine"] = types.ModuleType("unisono._engine")
import numpy as np
import unisono as dist
print(dist.engine_info())
dist.init_process_group()
x = np.ones(2)
dist.all_reduce(x)
dist.new_group([0])
dist.destroy_process_group()
print(x)
"""


@pytest.mark.parametrize("wish", ["auto", "native"])
def test_stale_module_leaves_the_reference_engine_and_says_so(wish):
    env = {**os.environ, "UNISONO_LOG": "", "UNISONO_ENGINE": wish}
    done = python("-c", OLD, env=env)
    assert done.stdout.startswith(f"reference engine ({native._STALE})")
    if wish == "native":
        assert done.returncode == 1
        assert f"cannot use the native engine: {native._STALE}" in done.stderr
    else:
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[1. 1.]"), done.stderr
        assert done.stderr == (
            "unisono: collectives run on the reference engine, in Python, which is slow: "
            f"{native._STALE}\n"
        )


# An object of `sys.modules` is deleted while the interpreter ends. Meanwhile a thread that waits in
# C++ asks for the interpreter lock every 20 ms. Python ends such a thread.
ENDING = """
import socket, sys, threading, time
from unisono import _engine
class Late:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)
        print("over", flush=True)
ours, theirs = socket.socketpair()
begun = threading.Event()
def queue():
    begun.set()
    _engine.CallQueue().wait(1, 100.0)
def link():
    begun.set()
    _engine.StoreLink(ours.fileno(), 100.0).exchange(100.0, ((3, "key"),))
threading.Thread(target=locals()[sys.argv[1]], daemon=True).start()
begun.wait()
sys.modules["late"] = Late()
"""


@pytest.mark.skipif(native.extension is None, reason="the C++ engine is not built")
@pytest.mark.parametrize("wait", ["queue", "link"])
def test_thread_that_waits_when_the_interpreter_ends_aborts_nothing(wait):
    done = python("-c", ENDING, wait)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
