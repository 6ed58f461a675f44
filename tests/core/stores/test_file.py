"""FileStore: what only a store in a file can do, and suffer."""

import contextlib
import errno
import fcntl
import itertools
import os
import signal
import socket
import stat
import subprocess
import sys
import threading

import pytest

from tests.support.together import on_threads
from unisono.core.base import process_identity
from unisono.core.base.process_identity import Life, describe, life_of, new_user
from unisono.core.platform import processes
from unisono.core.stores import FileStore
from unisono.core.stores.files import log
from unisono.errors import (
    ClosedError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
)

ADD = """
import sys
from unisono.core.stores import FileStore
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


def test_missing_directory_raises_at_once(tmp_path):
    with pytest.raises(StoreError, match=r"cannot open the store file.*No such file"):
        FileStore(str(tmp_path / "nowhere" / "store"))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data + b"xx", r"is damaged at byte \d+ of"),
        (lambda data: data[:-1], "shrank from"),
        (lambda data: b"", "shrank from"),
        (lambda data: data + bytes(100), "is damaged at byte"),
        (lambda data: data + data[-20:], "is damaged at byte"),
    ],
)
def test_damaged_file_raises_at_once(path, damage, text):
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "v")
        other.get("k")
        with open(path, "rb") as file:
            data = file.read()
        with open(path, "r+b") as file:
            file.truncate(0)
            file.write(damage(data))
        for each in (store, other):
            with pytest.raises(StoreError, match=text):
                each.wait(["never"], 20)
            with pytest.raises(StoreError, match=text):
                each.set("k", "w")


def test_foreign_file_is_left_alone(path):
    with open(path, "wb") as file:
        file.write(b"precious notes, not a store")
    with pytest.raises(StoreError, match="is not a unisono store: it begins with b'precious"):
        FileStore(path)
    with open(path, "rb") as file:
        assert file.read() == b"precious notes, not a store"


def test_first_rank_may_leave_before_the_second_comes(path):
    with FileStore(path, 2) as first:
        first.set("k", "v")
    assert os.path.exists(path)
    with FileStore(path, 2) as second:
        assert second.get("k", 20) == b"v"
    assert not os.path.exists(path)


def test_without_world_size_the_keys_stay(path):
    with FileStore(path) as store:
        store.set("k", "v")
    with FileStore(path) as store:
        assert store.get("k") == b"v"


KILLED = """
import os, sys, signal
from unisono.core.stores import FileStore
store = FileStore(sys.argv[1], 2, run_id=sys.argv[2])
store.set("stale", "1")
os.kill(os.getpid(), signal.SIGKILL)
"""


def leave_behind(path, run_id=""):
    assert run(KILLED, path, run_id).wait(30) == -signal.SIGKILL
    assert os.path.exists(path)


def test_file_of_a_killed_run_is_not_trusted(path):
    leave_behind(path)
    with FileStore(path, 2) as store, FileStore(path, 2) as other:
        assert store.list_keys() == other.list_keys() == []
    assert os.listdir(os.path.dirname(path)) == []


def test_survivor_of_a_killed_run_is_told_that_its_file_is_another_one_now(path):
    with FileStore(path, 3) as survivor:
        leave_behind(path)
        with FileStore(path, 3) as store:
            assert store.list_keys() == []
            with pytest.raises(StoreConnectionError, match="was taken over by another run"):
                survivor.get("stale", 20)
            store.set("k", "v")
        # Its good-bye is not counted in the new run.
        survivor.close()
        with FileStore(path, 3) as store:
            assert store.get("k", 20) == b"v"


@contextlib.contextmanager
def on_another_host(monkeypatch):
    """Whoever opens a file in here looks to others like a process of another machine."""
    with monkeypatch.context() as patch:
        patch.setattr(process_identity, "_machine", lambda: "elsewhere")
        yield


def test_run_on_other_hosts_that_never_ends_is_a_timeout_that_names_them(path, monkeypatch):
    with on_another_host(monkeypatch):
        others = [FileStore(path, 2) for _ in range(2)]
    with pytest.raises(StoreTimeoutError, match=r"run of 2 ranks.*process \d+ on host.* never"):
        FileStore(path, 2, timeout=0.05)
    # It joins once they have left.
    timer = threading.Timer(0.02, lambda: [other.close() for other in others])
    timer.start()
    with FileStore(path, 2, timeout=20) as store:
        assert store.list_keys() == []
    timer.join()


def test_run_ids_tell_runs_on_other_hosts_apart(path, monkeypatch):
    with on_another_host(monkeypatch):
        old = FileStore(path, 2, run_id="job 1")
    old.set("stale", "1")
    with FileStore(path, 2, run_id="job 2") as store:
        assert store.list_keys() == []
        with on_another_host(monkeypatch):
            other = FileStore(path, 2, run_id="job 2")
        store.set("k", "v")
        assert other.get("k", 20) == b"v"
        other.close()
    assert not os.path.exists(path)
    old.close()


def test_living_run_with_another_id_keeps_its_file(path):
    with FileStore(path, 2, run_id="one") as store:
        with pytest.raises(StoreError, match=r"run 'one' of process \d+.*this is run 'two'"):
            FileStore(path, 2, run_id="two")
        store.set("k", "v")
        assert store.get("k") == b"v"


def test_who_is_dead(monkeypatch):
    me = new_user()
    assert life_of(me) is Life.ALIVE
    host, machine, name, started, _ = me.split("~")
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert life_of(f"{host}~{machine}~{name}~{started}~{process.pid}") is Life.DEAD
    assert life_of(f"{host}~{machine}~{name}~0~{os.getpid()}") is Life.DEAD
    assert life_of(f"{host}~elsewhere~{name}~0~{process.pid}") is Life.UNKNOWN
    assert describe(me) == f"process {os.getpid()} on host {host}"


def test_an_invented_line_about_oneself_makes_no_process_dead(monkeypatch):
    """Under qemu-user a process reads in /proc/PID/stat of itself what no other process reads."""
    own, real = f"/proc/{os.getpid()}/stat", processes.read_text
    invented = "1 (python) 0 1" + " 0" * 50
    process_identity._own_start.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(processes, "read_text", lambda at: invented if at == own else real(at))
        me = new_user()
    assert life_of(me) is Life.ALIVE


def test_deleted_file_is_noticed_by_a_waiter(path):
    store = FileStore(path)
    timer = threading.Timer(0.02, os.unlink, [path])
    timer.start()
    with pytest.raises(StoreConnectionError, match="was removed while in use"):
        store.get("never", 60)
    timer.join()
    store.close()


HOLDS = """
import os, sys, signal
from unisono.core.stores import FileStore
from unisono.core.stores.files import log
store = FileStore(sys.argv[1])
real = log.pwrite
def half(fd, data, place):
    log.pwrite = real
    real(fd, data[: len(data) // 2], place)
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    return real(fd, data, place)
log.pwrite = half
store.set("k", "x" * 1000)
store.close()
"""


def test_lock_of_a_stopped_process_is_a_timeout_that_names_it(path):
    with FileStore(path) as store, run(HOLDS, path, "SIGSTOP") as process:
        os.waitpid(process.pid, os.WUNTRACED)
        store.set_timeout(0.05)
        for call in (lambda: store.set("k", "v"), lambda: store.get("k")):
            with pytest.raises(StoreTimeoutError, match=rf"locked for .* process {process.pid} on"):
                call()
        store.set_timeout(20)
        os.kill(process.pid, signal.SIGCONT)
        assert store.get("k", 20) == b"x" * 1000
        assert process.wait(20) == 0


def test_killed_in_the_middle_of_a_write(path):
    with FileStore(path) as store:
        store.set("k", "before")
        assert run(HOLDS, path, "SIGKILL").wait(30) == -signal.SIGKILL
        assert store.get("k", 20) == b"before"
        store.set("j", "after")
        with FileStore(path) as other:
            assert other.multi_get(["k", "j"]) == [b"before", b"after"]


def test_a_record_whose_bytes_have_not_all_come_is_not_read(path):
    """NFS may show the length of a record before its content."""
    with FileStore(path) as store:
        store.set("k", "before")
        with open(path, "r+b") as file:
            begin = file.seek(0, os.SEEK_END)
            store.set("k", "after")
            file.seek(begin)
            record = file.read()
            file.seek(begin)
            file.write(record[:-5] + bytes(5))
            file.flush()
            with pytest.raises(StoreError, match="is damaged at byte"):
                FileStore(path)
            file.seek(begin)
            file.write(record)
        with FileStore(path) as other:
            assert other.get("k") == b"after"


def test_writers_lose_nothing_while_others_are_killed_in_the_middle_of_a_write(path):
    writers = [run(ADD, path) for _ in range(2)]
    with FileStore(path) as store:
        store.barrier("start", 3, timeout=60)
        for _ in range(3):
            assert run(HOLDS, path, "SIGKILL").wait(30) == -signal.SIGKILL
        assert [writer.wait(60) for writer in writers] == [0, 0]
        assert store.get("n") == b"200"
        assert store.get("log") == b"x" * 200
        assert not store.check(["k"])


def test_empty_file_made_beforehand_is_one_store_for_all(path):
    for _ in range(10):
        with open(path, "wb"):
            pass
        stores = on_threads(*[lambda: FileStore(path, 8)] * 8)
        assert stores[0].add("n", 1) == 1
        assert [store.add("n", 1) for store in stores[1:]] == list(range(2, 9))
        for store in stores:
            store.close()
        assert os.listdir(os.path.dirname(path)) == []


def test_failed_write_leaves_file_and_table_as_before(path, monkeypatch):
    with FileStore(path) as store:
        store.set("k", "old")

        def no_space(*args):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(log, "pwrite", no_space)
            with pytest.raises(StoreError, match="No space left"):
                store.set("k", "new")
        assert store.get("k") == b"old"
        store.set("k", "newer")
        with FileStore(path) as other:
            assert other.get("k") == b"newer"


def test_child_of_a_fork_can_use_it_and_does_not_sign_off_for_its_parent(path):
    script = (
        "import os, sys; from unisono.core.stores import FileStore\n"
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
    script = "import sys; from unisono.core.stores import FileStore; s = FileStore(sys.argv[1], 1)"
    assert run(script, path).wait(30) == 0
    assert not os.path.exists(path)


def test_closed_store(path):
    store = FileStore(path)
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        store.set("k", "v")


def test_file_system_without_flock(path, monkeypatch):
    """Some NFS, Lustre and FUSE mounts have none; only an empty file made beforehand needs it."""

    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with FileStore(path, 2) as first, FileStore(path, 2) as second:
        first.add("n", 1)
        assert second.add("n", 1) == 2
    with open(path, "wb"):
        pass
    with pytest.raises(StoreError, match=r"No locks available(.|\n)*delete the empty file"):
        FileStore(path, 2)


@contextlib.contextmanager
def special(kind, path):
    """Put a directory entry that is no regular file at a path."""
    with contextlib.ExitStack() as stack:
        if kind == "named pipe":
            os.mkfifo(path)
        elif kind == "directory":
            os.mkdir(path)
        elif kind == "socket":
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(path)
        else:
            try:
                os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
            except PermissionError:
                pytest.skip("a device node needs root")
        yield


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("kind", ["named pipe", "directory", "socket", "character device"])
def test_special_file_is_named_and_stays(tmp_path, monkeypatch, kind, link):
    monkeypatch.chdir(tmp_path)  # the name of a socket has a limit
    (tmp_path / "link").symlink_to("there")
    opened = []
    with special(kind, "there"):
        before, names = os.lstat("there"), sorted(os.listdir())
        with monkeypatch.context() as patch:
            real = os.open
            patch.setattr(os, "open", lambda path, *args: opened.append(path) or real(path, *args))
            with pytest.raises(StoreError, match=f"there' is a {kind}, expected a regular file"):
                FileStore("link" if link else "there", 2, timeout=0)
        after = os.lstat("there")
        # Its times, too: to open it already may have an effect.
        assert (after.st_ino, after.st_mode, after.st_rdev) == (
            before.st_ino,
            before.st_mode,
            before.st_rdev,
        )
        assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
        assert (sorted(os.listdir()), opened) == (names, [])


def test_file_that_becomes_a_pipe_in_use_is_named(path):
    store = FileStore(path)
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(StoreError, match="is a named pipe, expected a regular file"):
        store.set("k", "v")
    store.close()
    assert stat.S_ISFIFO(os.lstat(path).st_mode)


@pytest.mark.parametrize("there", ["nothing", "empty", "store"])
def test_symbolic_link_is_another_name_of_the_file(tmp_path, there):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    path, link = tmp_path / "far" / "store", tmp_path / "near" / "link"
    link.symlink_to(path)
    if there == "empty":
        path.touch()
    elif there == "store":
        FileStore(str(path)).close()
    with FileStore(str(link), 2, timeout=9) as first, FileStore(str(path), 2, timeout=9) as other:
        first.add("n", 1)
        assert other.add("n", 1) == 2
    assert link.is_symlink()
    assert list((tmp_path / "far").iterdir()) == []
    assert list((tmp_path / "near").iterdir()) == [link]


def test_entry_that_can_be_neither_opened_nor_made_is_a_timeout(path, monkeypatch):
    real = os.stat

    def hidden(name, *args, **options):
        if name == path:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return real(name, *args, **options)

    with open(path, "wb"):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", hidden)
        with pytest.raises(StoreTimeoutError, match=r"could not be opened for 0\.05 s"):
            FileStore(path, timeout=0.05)
    assert os.listdir(os.path.dirname(path)) == ["store"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS])
def test_file_system_without_hard_links(path, monkeypatch, number):
    def no_links(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_links)
    for _ in range(5):
        stores = on_threads(*[lambda: FileStore(path, 8, timeout=20)] * 8)
        assert sorted(store.add("n", 1) for store in stores) == list(range(1, 9))
        for store in stores:
            store.close()
        assert os.listdir(os.path.dirname(path)) == []
    monkeypatch.setattr(fcntl, "flock", no_links)
    with pytest.raises(StoreError, match=r"no hard links either, choose a path on another"):
        FileStore(path, 2, timeout=20)


def test_two_hard_links_to_an_empty_file_are_refused(path):
    with open(path, "wb"):
        pass
    os.link(path, path + "2")
    for name in (path, path + "2"):
        with pytest.raises(StoreError, match=r"has 2 names \(hard links\)(.|\n)*one name"):
            FileStore(name, 2, timeout=20)
    assert os.path.samefile(path, path + "2")


def test_hard_link_in_another_directory_is_a_timeout_with_a_hint(path, tmp_path):
    (tmp_path / "other").mkdir()
    with FileStore(path, 2):
        os.link(path, tmp_path / "other" / "store")
        with pytest.raises(
            StoreTimeoutError, match=r"could not be locked(.|\n)*several hard links"
        ):
            FileStore(str(tmp_path / "other" / "store"), 2, timeout=0.05)


def test_a_file_that_many_writers_use_for_long_stays_small(path, monkeypatch):
    monkeypatch.setattr("unisono.core.stores.files.store._COMPACT_BYTES", 2_000)
    stores = [FileStore(path, 3) for _ in range(3)]
    stores[0].set("kept", "value")
    stores[1].queue_push("queue", "first")
    stores[2].queue_push("queue", "second")
    sizes = []
    for number in range(1, 301):
        assert stores[number % 3].add("beat", 1) == number
        sizes.append(os.stat(path).st_size)
        assert stores[(number + 1) % 3].get("beat") == str(number).encode()
    assert max(sizes) < 3_000
    assert sum(later < earlier for earlier, later in itertools.pairwise(sizes)) > 2
    stores.append(FileStore(path, 3))
    assert [store.get("kept") for store in stores] == [b"value"] * 4
    assert [store.queue_pop("queue") for store in stores[:2]] == [b"first", b"second"]
    for store in stores[:3]:
        store.close()
        assert os.path.exists(path)
    stores[3].close()
    assert not os.path.exists(path)
    assert os.listdir(os.path.dirname(path)) == []


def test_a_wait_and_a_barrier_outlive_a_new_file(path, monkeypatch):
    monkeypatch.setattr("unisono.core.stores.files.store._COMPACT_BYTES", 1_000)
    first, second, third = (FileStore(path) for _ in range(3))

    def write():
        for number in range(200):
            third.set("number", str(number))
        third.set("ready", "yes")
        third.barrier("all", 3, 60.0)

    def wait(store):
        store.wait(["ready"], 60.0)
        store.barrier("all", 3, 60.0)
        return store.get("number")

    found = on_threads(write, lambda: wait(first), lambda: wait(second))
    assert found[1:] == [b"199", b"199"]
    for store in (first, second, third):
        store.close()


def test_a_file_with_two_names_or_on_a_full_disk_is_not_made_anew(path, monkeypatch):
    monkeypatch.setattr("unisono.core.stores.files.store._COMPACT_BYTES", 1_000)
    with FileStore(path) as store, FileStore(path) as other:
        store.set("number", "0")
        os.link(path, path + "2")
        for number in range(100):
            store.set("number", str(number))
        assert os.stat(path).st_size > 2_000
        os.unlink(path + "2")

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            for number in range(1_000):
                store.set("number", str(number))
        assert other.get("number") == b"999"
        for number in range(2_000):
            store.set("number", str(number))
        assert other.get("number") == b"1999"
        assert os.stat(path).st_size < 100_000


def test_a_file_that_another_host_replaces_during_a_read_is_read_again(path, monkeypatch):
    """As NFS says it, of a file that was opened before."""
    monkeypatch.setattr("unisono.core.stores.files.store._COMPACT_BYTES", 1_000)
    reads, real = itertools.count(), os.pread

    def pread(fd, *rest):
        if next(reads) in (1, 2):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd, *rest)

    with FileStore(path) as store, FileStore(path) as other:
        store.multi_set(["kept", "number"], ["value", "0"])
        assert other.get("kept") == b"value"
        for number in range(200):
            store.set("number", str(number))
        monkeypatch.setattr(log, "pread", pread)
        assert other.multi_get(["kept", "number"]) == [b"value", b"199"]
        assert next(reads) > 3


DIES_WITH_A_DRAFT = """
import os, signal, sys
from unisono.core.stores import FileStore
from unisono.core.stores.files import store
store._COMPACT_BYTES = 1_000
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
own = FileStore(sys.argv[1])
while True:
    own.set("number", "1")
"""


def test_a_process_killed_while_it_makes_the_file_anew_leaves_nothing(path, monkeypatch):
    monkeypatch.setattr("unisono.core.stores.files.store._COMPACT_BYTES", 1_000)
    with FileStore(path, 2) as store:
        store.set("kept", "value")
        assert run(DIES_WITH_A_DRAFT, path).wait(60) == -signal.SIGKILL
        assert len(os.listdir(os.path.dirname(path))) == 3
        for number in range(200):
            store.set("number", str(number))
        assert store.get("kept") == b"value"
        left = os.listdir(os.path.dirname(path))
        assert [name for name in left if not name.endswith(".free")] == ["store"]
