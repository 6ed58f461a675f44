"""FileStore: what only a store in a file can do, and suffer."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading

import pytest

from unisono.errors import (
    ClosedError,
    InvalidArgumentError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
)
from unisono.stores import FileStore
from unisono.stores.users import is_dead, new_user

ADD = """
import sys
from unisono.stores import FileStore
with FileStore(sys.argv[1]) as store:
    store.barrier("start", 3)
    for _ in range(100):
        store.add("n", 1)
        store.append("log", "x")
"""


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "store")


def run(script: str, *args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script, *args])


def test_processes_lose_no_write(path):
    processes = [run(ADD, path) for _ in range(2)]
    with FileStore(path) as store:
        store.barrier("start", 3, timeout=60)
        for process in processes:
            assert process.wait(60) == 0
        assert store.get("n") == b"200"
        assert store.get("log") == b"x" * 200


def test_missing_directory_raises_at_once(tmp_path):
    with pytest.raises(StoreError, match=r"cannot open the store file.*No such file"):
        FileStore(str(tmp_path / "nowhere" / "store"))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data + b"xx", "torn record at byte"),
        (lambda data: data[:-1], "shrank from"),
        (lambda data: data + data[16:-1], "torn record"),
        (lambda data: data + data[16:-1] + b"?", "damaged record"),
    ],
)
def test_damaged_file_raises_at_once(path, damage, text):
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "v")
        with open(path, "rb") as file:
            data = file.read()
        with open(path, "r+b") as file:
            file.truncate(0)
            file.write(damage(data))
        store._state._log._position = max(store._state._log._position, len(data))
        with pytest.raises(StoreError, match=text):
            store.wait(["never"], 20)
        if "shrank" not in text:
            with pytest.raises(StoreError, match=text):
                other.get("never", 20)


def test_foreign_file_is_left_alone(path):
    with open(path, "wb") as file:
        file.write(b"precious notes, not a store")
    with pytest.raises(StoreError, match="is not a unisono store: it begins with b'precious"):
        FileStore(path)
    with open(path, "rb") as file:
        assert file.read() == b"precious notes, not a store"


def test_empty_file_is_a_new_store(path):
    with open(path, "wb"):
        pass
    with FileStore(path) as store:
        store.set("k", "v")
        assert store.get("k") == b"v"


def test_last_rank_deletes_the_file(path):
    first, second = FileStore(path, 2), FileStore(path, 2)
    first.set("k", "v")
    first.close()
    assert os.path.exists(path)
    assert second.get("k") == b"v"
    second.close()
    assert not os.path.exists(path)


def test_first_rank_may_leave_before_the_second_comes(path):
    with FileStore(path, 2) as first:
        first.set("k", "v")
    with FileStore(path, 2) as second:
        assert second.get("k", 20) == b"v"
    assert not os.path.exists(path)


def test_without_world_size_the_keys_stay(path):
    with FileStore(path) as store:
        store.set("k", "v")
    with FileStore(path) as store:
        assert store.get("k") == b"v"


def test_file_of_a_killed_run_is_not_trusted(path):
    script = (
        "import os, sys, signal; from unisono.stores import FileStore\n"
        "store = FileStore(sys.argv[1], 2); store.set('stale', '1')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert run(script, path).wait(30) == -signal.SIGKILL
    assert os.path.exists(path)
    with FileStore(path, 2) as store:
        assert store.list_keys() == []


def test_who_is_dead():
    me = new_user()
    assert not is_dead(me)
    machine, name, started, _ = me.rsplit(" ", 3)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert is_dead(f"{machine} {name} {started} {process.pid}")
    assert is_dead(f"{machine} {name} 0 {os.getpid()}")
    assert not is_dead(f"elsewhere {name} 0 {process.pid}")


def test_deleted_file_is_noticed_by_a_waiter(path):
    store = FileStore(path)
    timer = threading.Timer(0.02, os.unlink, [path])
    timer.start()
    with pytest.raises(StoreConnectionError, match="was removed while in use"):
        store.get("never", 60)
    timer.join()
    store.close()


def test_lock_held_by_another_process_is_a_timeout(path):
    with FileStore(path) as store, open(path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        store.set_timeout(0.05)
        with pytest.raises(StoreTimeoutError, match=r"stayed locked by another process for 0.05 s"):
            store.set("k", "v")
        fcntl.flock(other, fcntl.LOCK_UN)
        store.set("k", "v")


def test_failed_write_leaves_file_and_table_as_before(path, monkeypatch):
    with FileStore(path) as store:
        store.set("k", "old")

        def no_space(*args):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", no_space)
            with pytest.raises(StoreError, match="No space left"):
                store.set("k", "new")
        assert store.get("k") == b"old"
        store.set("k", "newer")
        with FileStore(path) as other:
            assert other.get("k") == b"newer"


def test_child_of_a_fork_can_use_it_and_does_not_sign_off_for_its_parent(path):
    script = (
        "import os, sys; from unisono.stores import FileStore\n"
        "store = FileStore(sys.argv[1], 1)\n"
        "pid = os.fork()\n"
        "for _ in range(50): store.add('n', 1)\n"
        "if pid == 0: store.close(); os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "assert store.get('n') == b'100', store.get('n')\n"
        "store.close()\n"
        "assert not os.path.exists(sys.argv[1])\n"
    )
    assert run(script, path).wait(30) == 0


def test_exit_without_close_signs_off(path):
    script = "import sys; from unisono.stores import FileStore; s = FileStore(sys.argv[1], 1)"
    assert run(script, path).wait(30) == 0
    assert not os.path.exists(path)


def test_closed_store_and_bad_world_size(path):
    store = FileStore(path)
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        store.set("k", "v")
    with pytest.raises(InvalidArgumentError):
        FileStore(path, 0)
