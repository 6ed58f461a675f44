"""Hide from this process what Python does not have on Windows, as far as unisono could use it.

With this folder on PYTHONPATH, Python imports the module at its start. `sys.platform` becomes
"win32" when unisono is imported. Modules of the standard library that are imported here have chosen
their code before, for the real system. So this shows no more than that unisono asks for nothing
that Windows lacks.
"""

# ruff: noqa: F401  imported before the system changes
import asyncio
import concurrent.futures
import http.server
import importlib.abc
import logging
import multiprocessing.connection
import multiprocessing.reduction
import multiprocessing.spawn
import multiprocessing.util
import os
import platform
import select
import selectors
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import uuid

import numpy as np

sysconfig.get_config_vars()
platform.uname()

MODULES = {"fcntl", "resource", "termios", "pty", "tty", "pwd", "grp", "unisono._engine"}
GONE = {
    os: "fork forkpty register_at_fork getuid geteuid getgid getegid setsid setpgid getpgid getpgrp"
    " killpg waitid WNOHANG WUNTRACED WNOWAIT WEXITED WIFEXITED WEXITSTATUS P_PID P_PIDFD mkfifo"
    " chown lchown uname sysconf getloadavg sched_getaffinity sched_setaffinity sched_yield"
    " memfd_create pidfd_open posix_spawn posix_fallocate pipe2 eventfd statvfs fchmod fchown"
    " sendfile nice getpriority setpriority wait wait3 wait4 O_CLOEXEC O_NONBLOCK O_DIRECTORY"
    " O_NOFOLLOW pread pwrite preadv pwritev readv writev ttyname ctermid openpty",
    signal: "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGCHLD SIGALRM SIGSTOP SIGCONT SIGQUIT SIGPIPE SIGTSTP"
    " SIGTTIN SIGTTOU SIGBUS SIGRTMIN SIGRTMAX SIG_BLOCK SIG_UNBLOCK SIG_SETMASK ITIMER_REAL alarm"
    " pthread_sigmask sigwait sigtimedwait sigwaitinfo sigpending pthread_kill setitimer getitimer"
    " siginterrupt pause pidfd_send_signal",
    socket: "AF_UNIX AF_NETLINK SO_PEERCRED SO_REUSEPORT TCP_INFO TCP_USER_TIMEOUT TCP_QUICKACK"
    " MSG_DONTWAIT MSG_NOSIGNAL CMSG_SPACE CMSG_LEN SCM_RIGHTS send_fds recv_fds socketpair",
    select: "epoll poll",
}


class _System(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name == "unisono":
            sys.platform = "win32"


def _socketpair(*_):
    """As the standard library has it on Windows."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


class _Socket(socket.socket):
    """Without methods that the class in C has."""

    def __getattribute__(self, name):
        if name in ("sendmsg", "recvmsg", "recvmsg_into"):
            raise AttributeError(name)
        return super().__getattribute__(name)


for name in MODULES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, _System())
for owner, names in GONE.items():
    for name in names.split():
        if hasattr(owner, name):
            delattr(owner, name)
socket.socket, socket.socketpair = _Socket, _socketpair
