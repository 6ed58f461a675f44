"""Hide from this process, and from its children, what macOS does not have.

With this folder on PYTHONPATH, Python imports the module at its start. It removes the attributes
that typeshed does not declare for darwin, makes /proc and /sys unreadable, and hides the C++
engine. `sys.platform` becomes "darwin" when unisono is imported. Modules of the standard library
that are imported here have chosen their code before, for the real system.
"""

import builtins
import errno
import importlib
import importlib.abc
import io
import os
import select
import signal
import socket
import sys
import sysconfig

# It reads a file that is named by the system.
sysconfig.get_config_vars()


GONE = {
    os: "memfd_create pidfd_open sched_getaffinity sched_setaffinity sched_setscheduler waitid "
    "pipe2 eventfd splice posix_fallocate posix_fadvise",
    signal: "pidfd_send_signal SIGRTMAX SIGRTMIN sigtimedwait sigwaitinfo",
    socket: "TCP_INFO TCP_USER_TIMEOUT TCP_KEEPIDLE TCP_QUICKACK AF_NETLINK SO_PEERCRED "
    "SO_PASSCRED",
    select: "epoll",
}
HIDDEN = ("/proc", "/sys", "/dev/kmsg", "/dev/shm")
READERS = {builtins: "open", io: "open", os: "open stat lstat listdir readlink"}


def _hide(module, name):
    real = getattr(module, name)

    def call(*args, **kwargs):
        if args and isinstance(args[0], str) and args[0].startswith(HIDDEN):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), args[0])
        return real(*args, **kwargs)

    # Some test whether a function is in os.supports_fd and the like.
    for functions in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
        if real in functions:
            functions.add(call)
    setattr(module, name, call)


class _System(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "unisono._engine":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name == "unisono" and sys.platform == "linux":
            sys.platform = "darwin"


class _Socket(socket.socket):
    """A socket that refuses the names of Linux that are no path."""

    def bind(self, address):
        return super().bind(_path(address))

    def connect(self, address):
        return super().connect(_path(address))


def _path(address):
    if isinstance(address, (str, bytes)) and address[:1] in ("\0", b"\0"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return address


socket.socket = _Socket
importlib.import_module("multiprocessing.reduction")
for module, names in GONE.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for module, names in READERS.items():
    for name in names.split():
        _hide(module, name)
sys.meta_path.insert(0, _System())
