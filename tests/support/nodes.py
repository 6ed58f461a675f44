"""Agents of several nodes on this host, or in network namespaces, with real workers."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import unisono.launcher

SRC = str(Path(unisono.launcher.__file__).parents[2])
LIMIT_S = 200.0

# Nobody waits long for more nodes, but a minute for a heartbeat: on a busy machine one that lives
# stands still for seconds.
CONF = "keep_alive_interval=0.3,keep_alive_max_attempt=200,last_call_timeout=0.5"

# For tests in which a node is lost, and has to be noticed.
LOSING = "keep_alive_max_attempt=30"

# A world of fewer nodes, made before the last came, would be another one than the test expects.
PATIENT = f"{CONF},last_call_timeout=60"

WORKER = """
import os, sys, time
import numpy as np
import unisono as dist
dist.init_process_group(timeout=120)
x = np.ones(1)
dist.all_reduce(x)
env = os.environ
print("up", env["RANK"], env["WORLD_SIZE"], env["GROUP_RANK"], env["TORCHELASTIC_RESTART_COUNT"],
      os.getpid(), int(x[0]), flush=True)
stop = np.zeros(1)
while not stop[0]:
    stop[0] = os.path.exists(os.path.join(os.path.dirname(__file__), "stop"))
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    time.sleep(0.005)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Up:
    """What a worker prints when its world has done its first all_reduce."""

    rank: int
    world_size: int
    node: int
    restart: int
    pid: int
    total: int


def free_port():
    """Return a port that nobody has now; only the agents of one test will want it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**extra):
    """The environment of a user who is not inside a launch."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in names and k[:4] != "PET_"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [SRC, env.get("PYTHONPATH")]))
    return env | extra


class Agent:
    """One `unisono run`."""

    def __init__(self, arguments, cwd, variables, inside=lambda *words: list(words)):
        self.popen = subprocess.Popen(
            inside(sys.executable, "-m", "unisono", "run", *map(str, arguments)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=environment(**variables),
            # pytest may run as a shell's background job, which ignores SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.out = self.err = ""
        self._taken = 0
        for stream in (self.popen.stdout, self.popen.stderr):
            os.set_blocking(stream.fileno(), False)

    def _pump(self, limit_s):
        streams = [s for s in (self.popen.stdout, self.popen.stderr) if not s.closed]
        for stream in select.select(streams, [], [], limit_s)[0]:
            data = os.read(stream.fileno(), 65536)
            if not data:
                stream.close()
            elif stream is self.popen.stdout:
                self.out += data.decode()
            else:
                self.err += data.decode()

    def until(self, condition, what):
        """Read what the agent prints until a condition holds; return its value."""
        deadline = time.monotonic() + LIMIT_S
        while not (value := condition()):
            left = deadline - time.monotonic()
            ended = self.popen.stdout.closed and self.popen.stderr.closed
            seen = f"no {what}\nout: {self.out}\nerr: {self.err}"
            assert left > 0, seen
            assert not ended, seen
            self._pump(min(left, 1.0))
        return value

    def next_ups(self, count):
        """Wait for `count` workers to come up; each is returned once."""

        def found():
            complete = self.out[: self.out.rfind("\n") + 1]
            lines = [ln for ln in complete.splitlines() if ln.startswith("up ")]
            new = lines[self._taken : self._taken + count]
            return new if len(new) == count else []

        lines = self.until(found, f"{count} workers")
        self._taken += count
        return sorted((Up(*map(int, ln.split()[1:])) for ln in lines), key=lambda up: up.rank)

    def told(self, text):
        """Wait until the launcher's own messages contain a text."""
        self.until(lambda: text in self.err, repr(text))

    def finish(self):
        """Wait for the end; return the exit code."""
        deadline = time.monotonic() + LIMIT_S
        while not (self.popen.stdout.closed and self.popen.stderr.closed):
            assert time.monotonic() < deadline, f"still runs\nout: {self.out}\nerr: {self.err}"
            self._pump(1.0)
        return self.popen.wait(LIMIT_S)

    def close(self):
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        self.popen.stdout.close()
        self.popen.stderr.close()


class Job:
    """The agents of one job, and the file that ends its workers."""

    def __init__(self, folder, script=WORKER, hosts=(), variables=None):
        self.folder = folder
        self._variables = variables or {}
        self.port = free_port()
        # The first agent is on the first host.
        self._hosts = list(hosts)
        self.endpoint = f"{hosts[0].name if hosts else 'localhost'}:{self.port}"
        (folder / "worker.py").write_text(script)
        self.agents = []

    def node(self, *flags, nnodes="2", nproc=1, conf=CONF, endpoint=None):
        """Start one more agent, on the next host."""
        options = [
            f"--nnodes={nnodes}",
            f"--nproc-per-node={nproc}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint or self.endpoint}",
            f"--rdzv-conf={conf}",
        ]
        return self.start(*options, *flags)

    def start(self, *flags):
        """Start an agent with these flags only, on the next host."""
        extra = {"inside": self._hosts.pop(0).inside} if self._hosts else {}
        words = [*flags, self.folder / "worker.py"]
        agent = Agent(words, self.folder, variables=self._variables, **extra)
        self.agents.append(agent)
        return agent

    def stop(self):
        """Let the workers end well."""
        (self.folder / "stop").touch()

    def close(self):
        for agent in self.agents:
            agent.close()


def kill(pid, signum=signal.SIGKILL):
    """Send a signal to a worker."""
    os.kill(pid, signum)


def gone(pids, limit_s=LIMIT_S):
    """Wait until processes have ended (or are zombies of somebody else)."""
    deadline = time.monotonic() + limit_s
    handles = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    waiting = set(handles)
    while waiting and (left := deadline - time.monotonic()) > 0:
        waiting -= set(select.select(list(waiting), [], [], left)[0])
    for handle in handles:
        os.close(handle)
    return not waiting
