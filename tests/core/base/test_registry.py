"""Names from entry points of installed packages."""

import threading
from importlib import import_module
from importlib.metadata import EntryPoint

import pytest

from tests.support.together import on_threads
from unisono.core.base import log
from unisono.core.base.registry import Registry
from unisono.errors import InvalidArgumentError

GROUP = "unisono.test_registry"


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(log, "_logged", set())
    return Registry("thing", GROUP, {"own": 0})


@pytest.fixture
def install(tmp_path, monkeypatch, registry):
    """Install packages: each has the entry `name`, and a module whose body may use `registry`."""
    monkeypatch.syspath_prepend(tmp_path)

    def installed(package, name, body):
        info = tmp_path / f"{package}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {package}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {package}:register\n")
        (tmp_path / f"{package}.py").write_text(f"from {__name__} import shared\n{body}\n")

    monkeypatch.setitem(shared, "registry", registry)
    return installed


shared = {}

REGISTER = "def register(): shared['registry'].add({!r}, 1)"


def test_entry_that_fails(install, registry, caplog):
    install("reg_broken", "broken", "raise ImportError('libfabric.so is missing')")
    install("reg_good", "good", REGISTER.format("good"))
    assert registry.get("good") == 1
    assert not caplog.messages
    for _ in range(2):
        assert registry.known() == ("good", "own")
        with pytest.raises(InvalidArgumentError) as caught:
            registry.get("broken")
        assert caught.value.what == (
            "unknown thing 'broken' (known: good, own; broken failed: "
            "ImportError('libfabric.so is missing'))"
        )
    assert caplog.messages == ["thing 'broken' failed: ImportError('libfabric.so is missing')"]


def test_two_packages_with_an_entry_of_the_same_name(install, registry):
    install("reg_one", "same", REGISTER.format("one"))
    install("reg_two", "same", REGISTER.format("two"))
    assert registry.known() == ("one", "own", "two")


def test_entries_of_the_library_win_and_without_any_there_is_a_hint(registry, monkeypatch):
    own, other = (EntryPoint("same", f"{each}:add", GROUP) for each in ("unisono.x", "unisono_x"))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [other, own])
    monkeypatch.setattr(EntryPoint, "load", lambda each: lambda: registry.add("same", each.value))
    assert registry.get("same") == own.value
    for found, hint in ([own], None), ([other], "unisono is not installed here: pip install -e ."):
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group, found=found: found)
        with pytest.raises(InvalidArgumentError, match="unknown thing 'none'") as caught:
            registry.get("none")
        assert caught.value.hint == hint


def test_entry_is_called_once_and_may_ask_for_names(install, registry):
    body = "def register():\n    shared['registry'].known()\n    shared['registry'].add('new', 1)"
    install("reg_asks", "new", body)
    assert on_threads(*[lambda: registry.get("new")] * 8) == [1] * 8


def test_a_package_may_be_imported_while_another_thread_asks(install, registry, monkeypatch):
    """Its body asks, too, when the other thread waits for the end of the import."""
    body = """
shared["began"].set()
shared["asked"].wait(30)
shared["registry"].known()
"""
    install("reg_body", "body", body + REGISTER.format("body"))
    shared["began"], shared["asked"] = threading.Event(), threading.Event()

    real = EntryPoint.load

    def load(point):
        shared["asked"].set()
        return real(point)

    def ask():
        assert shared["began"].wait(30)
        return registry.known()

    monkeypatch.setattr(EntryPoint, "load", load)
    asked, _ = on_threads(ask, lambda: import_module("reg_body"))
    assert asked == registry.known() == ("body", "own")


def test_the_wait_for_another_thread_has_a_limit(install, registry, monkeypatch):
    body = """
def register():
    shared["began"].set()
    shared["asked"].wait(30)
"""
    install("reg_slow", "slow", body)
    shared["began"], shared["asked"] = threading.Event(), threading.Event()
    monkeypatch.setattr("unisono.core.base.registry._ADD_S", 0.01)

    def ask():
        assert shared["began"].wait(30)
        text = r"slow failed: TimeoutError\('another thread has not finished it'\)"
        with pytest.raises(InvalidArgumentError, match=text):
            registry.get("slow")
        shared["asked"].set()

    on_threads(registry.known, ask)
    assert registry.known() == ("own",)
    assert not registry._errors
