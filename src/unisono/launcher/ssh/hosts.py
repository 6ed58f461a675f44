"""Start an agent on each of several hosts through ssh, pass on what it writes, and end it.

    HostsLaunch ─┬─ ssh host1 ── unisono.launcher.ssh.remote ── agent ── workers
                 └─ ssh host2 ── unisono.launcher.ssh.remote ── agent ── workers

What a host must know, the token too, goes through the standard input of ssh, so no other user can
read it. If this process ends, or is silent for long, each agent ends its workers.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import re
import select
import shlex
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from unisono.core.base.config import environ, get
from unisono.core.base.deadline import Deadline
from unisono.core.platform.posix import set_blocking
from unisono.errors import LaunchError
from unisono.launcher.environment import new_launch_id
from unisono.launcher.report import WorkerFailure
from unisono.launcher.signals import Signals
from unisono.launcher.spec import LaunchResult
from unisono.launcher.ssh.remote import MARK, own_version
from unisono.launcher.workers.worker import opened

# The first value of an option counts, so that --ssh and not this line decides.
_OPTIONS = (
    "-Tx -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
)
_PASSED = re.compile("(UNISONO_|NCCL_|GLOO_|OMP_|TORCH_|PYTHON)")
# Addresses of this host, the hosts, the place in another launch, and the secret.
_KEPT = {f"UNISONO_{name}" for name in ("HOST", "PUBLISH", "HOSTS", "STORE", "JOIN", "TOKEN")}
_SSH_FAILED = 255
_MEET_S = 60.0
_BEAT_S = 3.0
_END_S = 15.0
_DRAIN_S = 60.0
_LINE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class HostsSpec:
    """A launch on several hosts.

    Attributes:
        hosts: Their names for ssh; the agents meet at the first.
        call: Returns what the agent of a host must call, from the host's number, and the address
            and port at which the agents meet.
        script: The script, which each host must have, or "".
        address: Address of the first host for the others; "": its name.
        port: Port at which the agents meet; 0: any that is free there.
        ssh: The command, with its options.
        python: Path of Python on the hosts.
        signals: Names of the signals that end the launch.
        grace_s: As in LaunchSpec.
    """

    hosts: Sequence[str]
    call: Callable[[int, str, int], Callable[[], int]]
    script: str
    address: str
    port: int
    ssh: Sequence[str]
    python: str
    signals: Sequence[str]
    grace_s: float


class HostsLaunch:
    """Runs one launch on several hosts; use once.

    Args:
        spec: The launch.
        notify: Function that shows a line of text about an event.
    """

    def __init__(self, spec: HostsSpec, notify: Callable[[str], None]) -> None:
        self.notify = notify
        self._spec = spec
        self._signals = Signals(spec.signals)
        self._agents: list[_RemoteAgent] = []
        self._signum: int | None = None
        self._lost = ""
        self._limit = Deadline(float("inf"))
        self._is_stuck = False

    @property
    def may_wait(self) -> bool:
        """Whether the report may wait for a reader: no signal came, and the output is read."""
        return self._signum is None and not self._is_stuck

    def run(self) -> LaunchResult:
        """Start the agents, and wait for their end.

        Raises:
            LaunchError: A host cannot start its part, so that none has started.
        """
        spec, over = self._spec, threading.Event()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._signals)
            locks = threading.Lock(), threading.Lock()
            for host in spec.hosts:
                self._agents.append(_RemoteAgent(spec, host, self._signals.wake, locks))
                stack.callback(self._agents[-1].kill)
            if self._meet():
                threading.Thread(target=self._beat, args=(over,), daemon=True).start()
                stack.callback(over.set)
                self._watch()
                self._drain()
            return self._result()

    def _meet(self) -> bool:
        """Let each host examine itself, then start all agents; return False after a signal."""
        spec, limit = self._spec, Deadline(_MEET_S)
        first = spec.address or spec.hosts[0].rpartition("@")[2].strip("[]")
        variables = {k: v for k, v in environ().items() if _PASSED.match(k) and k not in _KEPT}
        asked = {"folder": os.getcwd(), "script": spec.script, "environment": variables}
        for number, agent in enumerate(self._agents):
            own = {"first": first, "port": -1} if number else {"first": "", "port": spec.port}
            agent.send(asked | own)
        while any(not agent.hello and agent.exit_code is None for agent in self._agents):
            if self._take(limit.remaining()) and self._signum is not None:
                return False
            if limit.expired():
                break
        if faults := [
            f"{a.host}: {fault}" for a in self._agents for fault in a.faults(spec.python)
        ]:
            raise LaunchError(
                f"no worker was started, because of {'; '.join(faults)}",
                hint="`ssh HOST true` must need no question; see --remote-python and --master-addr",
            )
        port = int(self._agents[0].hello["port"])
        token = get("UNISONO_TOKEN") or new_launch_id()
        for number, agent in enumerate(self._agents):
            call = base64.b64encode(pickle.dumps(spec.call(number, first, port))).decode()
            agent.send({"token": token, "call": call})
        return True

    def _take(self, limit_s: float) -> list[int]:
        """Wait for an event, and return the signals that came."""
        select.select([self._signals.fd], [], [], min(limit_s, _MEET_S))
        came = self._signals.read()
        if ending := [signum for signum in came if self._signals.ends(signum)]:
            self._signum = self._signum or ending[0]
            self._limit = self._limit.within(self._spec.grace_s + _END_S)
        return came

    def _pass_on(self, signum: int) -> None:
        for agent in self._agents:
            agent.write(bytes([signum]))

    def _watch(self) -> None:
        running = self._agents
        while running:
            for agent in [agent for agent in running if agent.exit_code is not None]:
                running = [each for each in running if each is not agent]
                self._on_end(agent)
            if running and self._limit.expired():
                self._lost = self._lost or f"{running[0].host} did not end in time"
                for agent in running:
                    agent.kill()
            elif running:
                for signum in self._take(self._limit.remaining()):
                    self._pass_on(signum)

    def _on_end(self, agent: _RemoteAgent) -> None:
        """Let the other hosts end too, unless all is well."""
        agent.wait_for_messages()
        result = agent.result
        if result is None and not self._lost and self._signum is None:
            self._lost = f"the agent on {agent.host} ended with code {agent.exit_code}"
            if agent.exit_code == _SSH_FAILED:
                self._lost = f"lost {agent.host}: the ssh connection to it ended"
            self._pass_on(signal.SIGTERM)
        if result is None or result.exit_code != 0:
            self._limit = self._limit.within(self._spec.grace_s + _END_S)

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(_BEAT_S):
            self._pass_on(0)

    def _drain(self) -> None:
        """Wait until what the hosts wrote is read here, or until a signal."""
        limit = Deadline(_DRAIN_S if self._signum is None else min(self._spec.grace_s, _DRAIN_S))
        while left := [agent for agent in self._agents if not agent.is_read()]:
            came = self._take(min(0.1, limit.remaining()))
            if limit.expired() or any(self._signals.ends(signum) for signum in came):
                break
        self._is_stuck = bool(left)

    def _result(self) -> LaunchResult:
        """Return one result of all hosts; that of the root cause's host first."""
        found = [(agent.host, agent.result) for agent in self._agents if agent.result is not None]
        results = [result for _, result in found]
        # An agent on the root cause's host alone can compare times with it.
        causes = sorted((r for r in results if r.failures), key=lambda r: not r.left_s)
        reasons = [self._lost, *(result.reason for result in results)]
        reasons += [f"{host} was stopped by signal {r.signum}" for host, r in found if r.signum]
        return LaunchResult(
            failures=causes[0].failures if causes and self._signum is None else (),
            stopped=tuple(sorted(rank for result in results for rank in result.stopped)),
            left_s=causes[0].left_s if causes else {},
            places={rank: text for result in results for rank, text in result.places.items()},
            signum=self._signum,
            ended_well=len(results) == len(self._agents) and all(r.ended_well for r in results),
            restarts=max((result.restarts for result in results), default=0),
            reason=next(filter(None, reasons), "") if self._signum is None else "",
        )


class _RemoteAgent:
    """The connection to one host's agent.

    Attributes:
        host: Its name.
        hello: What the host answered; empty before that.
        result: How its part ended, or None.
    """

    def __init__(
        self,
        spec: HostsSpec,
        host: str,
        wake: Callable[[], None],
        locks: Sequence[threading.Lock],
    ) -> None:
        self.host = host
        self.hello: dict[str, Any] = {}
        self.result: LaunchResult | None = None
        self._wake, self._said = wake, deque[str](maxlen=3)
        remote = f"exec {shlex.quote(spec.python)} -P -m unisono.launcher.ssh.remote"
        pipe = subprocess.PIPE
        try:
            self._ssh = subprocess.Popen(
                [*spec.ssh, *_OPTIONS.split(), "--", re.sub(r"[][]", "", host), remote],
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {spec.ssh[0]}: {error.strerror}") from error
        set_blocking(opened(self._ssh.stdin).fileno(), False)
        self._threads = [
            threading.Thread(
                target=self._pump, args=(opened(stream), fd, locks[fd - 1]), daemon=True
            )
            for fd, stream in ((1, self._ssh.stdout), (2, self._ssh.stderr))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def exit_code(self) -> int | None:
        """The exit code of ssh, which is that of the agent, or 255; None while ssh runs."""
        return self._ssh.poll()

    def is_read(self) -> bool:
        """Whether all that came through ssh was written here."""
        return not any(thread.is_alive() for thread in self._threads)

    def wait_for_messages(self) -> None:
        """Wait until the last message of an agent that has ended was read."""
        self._threads[1].join(_END_S)

    def send(self, message: object) -> None:
        """Send a line of JSON."""
        line, fd = json.dumps(message).encode() + b"\n", opened(self._ssh.stdin).fileno()
        while line and select.select([], [fd], [], _END_S)[1]:
            line = line[self.write(line) or len(line) :]

    def write(self, data: bytes) -> int:
        """Send bytes and return how many; 0 if ssh has ended or takes no more."""
        try:
            return os.write(opened(self._ssh.stdin).fileno(), data)
        except (OSError, ValueError):  # ValueError: it was closed
            return 0

    def kill(self) -> None:
        """End ssh, so that the agent loses its input."""
        self._ssh.kill()
        self._ssh.wait()
        opened(self._ssh.stdin).close()

    def faults(self, python: str) -> list[str]:
        """Return why the host cannot start its part."""
        if (code := self.exit_code) is not None:
            self.wait_for_messages()
        if self.hello:
            theirs, ours = self.hello["version"], own_version()
            other = [f"unisono is {theirs} there, {ours} here"] if theirs != ours else []
            return other or list(self.hello["faults"])
        if code is None:
            return [f"no answer within {_MEET_S:g} s"]
        text = ": ".join(self._said) or f"exit code {code}"
        return [
            f"no ssh connection ({text})" if code == _SSH_FAILED else f"{python} fails ({text})"
        ]

    def _pump(self, stream: IO[bytes], fd: int, lock: threading.Lock) -> None:
        """Pass on whole lines; take out the messages."""
        with stream:
            while line := stream.readline(_LINE_BYTES):
                line, mark, message = line.partition(MARK)
                if mark:
                    while not message.endswith(b"\n") and (more := stream.readline()):
                        message += more
                    self._on_message(message)
                elif fd == 2 and not self.hello:
                    # The words of ssh or a shell; the last are the reason for no answer.
                    self._said.append(line.decode(errors="replace").strip())
                elif self.hello:
                    with lock, contextlib.suppress(OSError):
                        while line:
                            line = line[os.write(fd, line) :]
        self._wake()

    def _on_message(self, message: bytes) -> None:
        kind, _, text = message.partition(b" ")
        # A message that was cut off counts as none.
        with contextlib.suppress(ValueError, TypeError, LookupError):
            if kind == b"hello":
                self.hello = json.loads(text)
            else:
                self.result = _result_of(json.loads(text))
        self._wake()


def _result_of(found: dict[str, Any]) -> LaunchResult:
    """Return a result from its JSON, whose keys are texts."""
    failures = tuple(WorkerFailure(**each) for each in found["failures"])
    stopped = tuple(found["stopped"])
    ranks = {name: {int(k): v for k, v in found[name].items()} for name in ("left_s", "places")}
    return LaunchResult(**found | ranks | {"failures": failures, "stopped": stopped})
