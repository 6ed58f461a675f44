"""What stands for POSIX's calls on Windows does what they do."""

import os
import socket
import threading

import pytest

from tests.support.posix_of_windows import posix_of_windows
from unisono.core.platform import posix
from unisono.errors import UnsupportedError

both = pytest.mark.parametrize("calls", [posix, posix_of_windows()], ids=["posix", "windows"])


@both
def test_reads_and_writes_have_a_place(calls, tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | calls.BINARY)
    try:
        assert calls.pwrite(fd, memoryview(b"0123\n"), 0) == 5
        assert calls.pwrite(fd, b"xy", 2) == 2
        assert calls.pread(fd, 3, 1) == b"1xy"
        assert calls.pread(fd, 9, 4) == b"\n"
        assert calls.pread(fd, 9, 5) == b""
        part = memoryview(bytearray(6))
        assert calls.read_into(fd, part, 3) == 2
        assert bytes(part) == b"y\n\0\0\0\0"
    finally:
        os.close(fd)


@both
def test_reads_of_several_threads_do_not_move_each_other(calls, tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)))
    wrong = []

    def read():
        for at in range(256):
            if calls.pread(fd, 1, at) != bytes([at]):
                wrong.append(at)

    fd = os.open(tmp_path / "file", os.O_RDONLY | calls.BINARY)
    threads = [threading.Thread(target=read) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        os.close(fd)
    assert not wrong


@both
@pytest.mark.parametrize("parts", [(b"head", b"data"), (b"", b"data"), (b"head", b""), (b"", b"")])
def test_parts_are_sent_in_order(calls, parts):
    near, far = socket.socketpair()
    with near, far:
        left = [memoryview(part) for part in parts]
        while any(map(len, left)):
            sent = calls.sendmsg(near, left)
            assert sent > 0
            left = [left[0][sent:], left[1][max(0, sent - len(left[0])) :]]
        assert calls.sendmsg(near, left) == 0
        near.close()
        assert far.recv(100) == b"".join(parts)


def test_what_windows_lacks_is_an_error_with_its_name():
    windows = posix_of_windows()
    with pytest.raises(UnsupportedError, match=r"^unisono run needs a POSIX system"):
        windows.require_posix("unisono run")
    with pytest.raises(UnsupportedError, match="a pipe"):
        windows.set_blocking(0, False)
    windows.after_fork(print)
    with windows.blocked({2}):
        windows.unblock({2})
    assert posix.require_posix("unisono run") is None
