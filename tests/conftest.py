"""The leak guard: every test must leave the process as it found it."""

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import reserved_port
from unisono.core.base import config as settings
from unisono.core.base.seam import why_absent
from unisono.core.platform.processes import IS_LINUX

pytest_plugins = [
    "unisono.testing.plugin",
    "tests.support.launching",
    "tests.support.selection",
]

# Long enough for a thread to end and for a peer's socket to close; a real leak never goes away.
PATIENCE_S = 15.0

# Imported modules alone take longer to collect; the objects of a test take less.
SLOW_S = 0.02

# The server that ranks are forked from imports what nearly all of them need, once for all of them.
PRELOADED = ["unisono", "unisono.testing", "unisono.workbench.cli.main", "encodings.idna", "pytest"]

_FAILED = pytest.StashKey[bool]()


def pytest_configure(config):
    config.addinivalue_line("markers", "native: needs the C++ engine")
    config.addinivalue_line("markers", "linux(reason): needs what only Linux has")
    multiprocessing.set_forkserver_preload(PRELOADED)
    # It would be as if there were no compiler, and tests of the C++ engine would be skipped.
    if why_absent and "not built" not in why_absent:
        raise pytest.UsageError(why_absent)
    if why_absent:
        # The same engine as without it, but nothing about that on the standard error of children.
        os.environ.setdefault("UNISONO_ENGINE", "reference")
    # Tests compare what commands print.
    os.environ.pop("FORCE_COLOR", None)
    # Tables of this machine would change what tests of the built-in choices find.
    os.environ.setdefault("UNISONO_TUNING", "0")
    # A shell starts what runs in the background with SIGINT ignored, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # nohup does so with SIGHUP. A handler is not inherited, and pytest survives the hang-up still.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_collection_modifyitems(items):
    """Skip what needs Linux elsewhere, and the C++ engine if it is not built or not allowed."""
    refused = settings.get("UNISONO_ENGINE") == "reference"
    why_refused = why_absent or "UNISONO_ENGINE=reference"
    for item in items:
        params = (getattr(item, "callspec", None) and item.callspec.params) or {}
        engines = params.get("engine"), getattr(params.get("rank"), "engine", None)
        if refused and ("native" in engines or item.get_closest_marker("native")):
            item.add_marker(pytest.mark.skip(reason=why_refused))
        if not IS_LINUX and (linux := item.get_closest_marker("linux")):
            item.add_marker(pytest.mark.skip(reason=f"needs Linux: {linux.args[0]}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(scope="session", autouse=True)
def _helpers_of_multiprocessing():
    """Start what multiprocessing starts once and keeps, so that no test is blamed for it."""
    from multiprocessing import forkserver, resource_tracker

    resource_tracker.ensure_running()
    forkserver.ensure_running()


@pytest.fixture
def port() -> Iterator[int]:
    """Return a port for a server of this test."""
    with reserved_port() as number:
        yield number


@pytest.fixture(autouse=True)
def nothing_leaks(request, _helpers_of_multiprocessing) -> Iterator[None]:
    """Fail a test that passes but leaves a thread, a process, a descriptor or shared memory."""
    before = _resources()
    yield
    # A failed test's traceback keeps its frames alive, and with them their sockets.
    if not request.node.stash.get(_FAILED, False) and (left := _left_since(before)):
        pytest.fail("this test leaks:\n  " + "\n  ".join(left), pytrace=False)


def _left_since(before: set[str]) -> list[str]:
    """Return what is new, once it has had time to go away by itself."""
    if not _resources() - before:
        return []
    _collect_garbage()
    if _left_after(1.0, before):
        # A thread that was about to end may have kept objects alive, and they were left out.
        gc.unfreeze()
        gc.collect()
    return sorted(map(_described, _left_after(PATIENCE_S, before)))


def _left_after(wait_s: float, before: set[str]) -> set[str]:
    give_up = time.monotonic() + wait_s
    while (left := _resources() - before) and time.monotonic() < give_up:
        time.sleep(0.01)
    return left


def _collect_garbage() -> None:
    """Collect garbage; if that was slow, leave what is alive out of the next collections.

    After an import of torch a collection takes 0.3 s of CPU, and nearly every test needs one.
    """
    began_s = time.thread_time()
    gc.collect()
    if time.thread_time() - began_s > SLOW_S:
        gc.freeze()


def _resources() -> set[str]:
    """Name everything that a test could leave behind in this process."""
    return {*_threads(), *_children(), *_descriptors(), *_shared_memory()}


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        yield f"thread {thread.name!r} ({thread.ident})"


def _descriptors() -> Iterator[str]:
    for fd in _listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
            if not target.endswith(".ttf"):  # matplotlib keeps the fonts that it has loaded
                yield f"descriptor {fd} -> {target}"
        except FileNotFoundError:  # the listing's own
            continue


def _children() -> Iterator[str]:
    """Name the direct children, among them those that ended but were never waited for."""
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            yield from (f"process {pid}" for pid in path.read_text().split())


def _described(resource: str) -> str:
    """Add a process's command line, which is no part of its name: exec changes it."""
    kind, _, pid = resource.partition(" ")
    if kind != "process":
        return resource
    with contextlib.suppress(FileNotFoundError):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return f"{resource}: {' '.join(words).strip() or 'zombie'}"
    return resource


def _shared_memory() -> Iterator[str]:
    """Name our files only: /dev/shm belongs to every process of the machine."""
    for name in _listdir("/dev/shm"):
        if name.startswith("unisono"):
            yield f"shared memory /dev/shm/{name}"


def _listdir(path: str) -> list[str]:
    """List a folder, or nothing where the system has no such folder (not Linux)."""
    return os.listdir(path) if os.path.isdir(path) else []
