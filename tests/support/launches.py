"""`unisono run` as a fork of a server that has unisono loaded, or as a new interpreter."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pkgutil
import select
import signal
import subprocess
import sys
import termios
import time
import warnings
from multiprocessing import reduction
from pathlib import Path

from unisono.workbench.cli.main import main

LIMIT_S = 200.0
RUN = [sys.executable, "-W", "error", "-m", "unisono", "run"]
_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
_FORKS = multiprocessing.get_context("forkserver")


def environment(**variables):
    """Return the environment of a user who is not inside a launch."""
    env = {k: v for k, v in os.environ.items() if k not in _OWN and k[:4] != "PET_"}
    return env | variables


class Launch:
    """One `unisono run`, and what it has written until now.

    Args:
        words: Arguments of `unisono run`.
        cwd: Its folder.
        command: The command of `unisono`, which takes the words.
        program: Command line of a new interpreter, such as RUN, which takes the words. A new
            interpreter needs 0.2 s of CPU time. None: a fork that has loaded unisono.
        patches: Values to set in a fork, by dotted name.
        host: Network namespace of a fork.
        terminal: Whether the standard streams are a terminal, of which `screen` is the other end.
        stdout: Descriptor for the standard output, instead of a pipe.
        variables: Changes of the environment.
    """

    def __init__(
        self,
        *words,
        cwd,
        command="run",
        program=None,
        patches=None,
        host=None,
        terminal=False,
        stdout=None,
        **variables,
    ):
        self.handles, self._taken = [], 0
        self._data = {"out": bytearray(), "err": bytearray()}
        if terminal:
            self.screen, end = os.openpty()
            termios.tcsetwinsize(end, (30, 100))
            self._ours, theirs = {"out": self.screen}, [end] * 3
        else:
            ends = {name: os.pipe() for name in ("in", "out", "err")}
            theirs = [ends["in"][0], ends["out"][1], ends["err"][1]]
            self._ours = {"in": ends["in"][1], "out": ends["out"][0], "err": ends["err"][0]}
        inside = [theirs[0], theirs[1] if stdout is None else stdout, theirs[2]]
        env = environment(**variables)
        words = [str(word) for word in words]
        if program is None:
            words = [command, *words]
        try:
            if program is not None:
                self._process = _started([*program, *words], cwd, env, inside)
            else:
                settings = (words, str(cwd), env, host and host.pid, terminal, patches or {})
                fds = [Inherited(fd) for fd in inside]
                self._process = _FORKS.Process(target=_forked, args=(fds, *settings))
                self._process.start()
        finally:
            for fd in set(theirs):
                os.close(fd)
        self.pid = self._process.pid
        # A fork is reaped by the server, and the number could then be that of another process.
        self._handle = None
        with contextlib.suppress(ProcessLookupError, AttributeError):  # ended; not Linux
            self._handle = os.pidfd_open(self.pid)

    @property
    def out(self):
        """The standard output, or what a terminal shows."""
        return self._data["out"].decode(errors="replace")

    @property
    def err(self):
        """The standard error."""
        return self._data["err"].decode()

    def send_signal(self, signum):
        """Send a signal to the process; do nothing if it has ended."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signum)

    def is_running(self):
        """Whether the process has not ended."""
        return self._handle is not None and not select.select([self._handle], [], [], 0)[0]

    def inner(self):
        """Return the number of the process that has the workers."""
        [pid] = children(self.pid)
        return pid

    def close_output(self):
        """Read no more of the standard output."""
        os.close(self._ours.pop("out"))

    def until(self, condition, what, names=("out", "err")):
        """Read until a condition holds; return its value."""
        deadline = time.monotonic() + LIMIT_S
        while not (value := condition()):
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {what}\n{self._seen()}"
            assert self._ours.keys() & set(names), f"ended without {what}\n{self._seen()}"
            self._pump(min(left_s, 1.0), names)
        return value

    def lines(self, count, start=""):
        """Wait for `count` more lines of output that begin with a text; return them."""

        def found():
            complete = self.out[: self.out.rfind("\n") + 1].splitlines()
            new = [line for line in complete if line.startswith(start)][self._taken :]
            return new[:count] if len(new) >= count else None

        new = self.until(found, f"{count} lines {start}") if count else []
        self._taken += count
        return new

    def told(self, text):
        """Read the standard error until it contains a text, and not the standard output."""
        self.until(lambda: text in self.err, repr(text), ("err",))

    def follow(self, count):
        """Wait until the workers have printed `count` process numbers; see `survivors`."""
        self.handles = [os.pidfd_open(int(line)) for line in self.lines(count)]

    def survivors(self, limit_s):
        """Return how many of the followed processes are left after `limit_s`."""
        return len(_running(self.handles, limit_s))

    def wait(self, limit_s=LIMIT_S):
        """Return the exit code, without reading what the process writes."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.wait(limit_s)
        self._process.join(limit_s)
        assert self._process.exitcode is not None, f"runs after {limit_s} s\n{self._seen()}"
        return self._process.exitcode

    def finish(self):
        """Close the standard input and wait for the end; return exit code, stdout and stderr."""
        if "in" in self._ours:
            os.close(self._ours.pop("in"))
        deadline = time.monotonic() + LIMIT_S
        while self._ours:
            assert time.monotonic() < deadline, f"still runs\n{self._seen()}"
            self._pump(1.0)
        return self.wait(), self.out, self.err

    def close(self):
        """Kill the process and all that are followed."""
        self.send_signal(signal.SIGKILL)
        for handle in self.handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        self.wait()
        for fd in (*self.handles, *self._ours.values(), self._handle):
            if fd is not None:
                os.close(fd)
        if not isinstance(self._process, subprocess.Popen):
            self._process.close()

    def _seen(self):
        return f"out: {self.out}\nerr: {self.err}"

    def _pump(self, limit_s, names=("out", "err")):
        names = {self._ours[name]: name for name in names if name in self._ours}
        for fd in select.select(list(names), [], [], limit_s)[0]:
            try:
                data = os.read(fd, 65536)
            except OSError:  # Linux reports the last close of the other end of a terminal so
                data = b""
            self._data[names[fd]] += data
            if not data:
                os.close(self._ours.pop(names[fd]))


class Launches:
    """Launches in one folder; `close` ends them."""

    def __init__(self, folder):
        self.folder = folder
        self._all = []

    def start(self, *words, script=None, args=(), **options):
        """Start a launch; see Launch. `script`: text of a script, which gets `args`."""
        if script is not None:
            (self.folder / "script.py").write_text(script)
            words = (*words, "script.py", *args)
        self._all.append(Launch(*words, **{"cwd": self.folder} | options))
        return self._all[-1]

    def run(self, *words, **options):
        """Run a launch to its end; return exit code, stdout and stderr."""
        return self.start(*words, **options).finish()

    def close(self):
        """End all launches."""
        for launch in self._all:
            launch.close()


def logs(folder):
    """Return the logs of the only launch, by their path below its folder."""
    [launch] = folder.iterdir()
    paths = [path for path in launch.rglob("*") if path.is_file()]
    return {path.relative_to(launch).as_posix(): path.read_bytes() for path in paths}


def children(pid):
    """Return the children of a process's main thread."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pids, limit_s=LIMIT_S):
    """Wait until processes have ended (or are zombies of another process)."""
    handles = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    left = _running(handles, limit_s)
    for handle in handles:
        os.close(handle)
    return not left


def _running(handles, limit_s):
    deadline = time.monotonic() + limit_s
    waiting = set(handles)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        waiting -= set(select.select(list(waiting), [], [], left_s)[0])
    return waiting


class Inherited:
    """A descriptor of this process that becomes a number in a fork of the server."""

    def __init__(self, fd):
        self._fd = fd

    def __reduce__(self):
        return _detached, (reduction.DupFd(self._fd),)


def _detached(duplicate):
    return duplicate.detach()


def _started(command, cwd, env, fds):
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=fds[0],
        stdout=fds[1],
        stderr=fds[2],
        start_new_session=True,
        # pytest may run as a shell's background job, which ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _forked(fds, words, cwd, env, host, terminal, patches):
    """Become the process that `RUN` would be."""
    gc.freeze()  # a collection would copy the pages of all that the server has loaded
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if terminal:
        # As the first terminal that the leader of a session opens, it controls the session.
        os.close(os.open(os.ttyname(0), os.O_RDWR))
    if host is not None:
        _enter(host)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.simplefilter("error")
    for name, value in patches.items():
        module, _, attribute = name.rpartition(".")
        setattr(pkgutil.resolve_name(module), attribute, value)
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    sys.stdout.flush()
    os._exit(code)


def _enter(pid):
    """Move this process to the network, name and mounts of another one."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    for kind in ("net", "uts", "mnt"):
        with open(f"/proc/{pid}/ns/{kind}", "rb") as namespace:
            if setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
