"""Hosts on one machine: network namespaces joined by a switch, or by a wire that loses packets.

Every host is a process that holds the namespaces (network, mounts, host name) and waits for the
end of its input. So nothing outlives the tests, however they end: no name is left in
/run/netns, and devices go with their namespace.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import uuid
from pathlib import Path

WIRE = str(Path(__file__).parent / "faults" / "wire.py")
LIMIT_S = 10.0
# Without it a store serves its own host only.
TOKEN = "the token of the job on these hosts"


@functools.cache
def why_not():
    """Return why no hosts can be made here, or None."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if missing := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)} (iproute2 and util-linux have them)"
    try:
        with Network(2):
            return None
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        return f"network namespaces are not allowed here: {told.strip()}"


class Host:
    """Namespaces of its own; `index` 1, 2, ... is also the end of its addresses."""

    def __init__(self, index, kinds=("--net", "--mount", "--uts")):
        self.index = index
        self.name = f"host{index}"
        self.v4, self.v6 = f"10.77.0.{index}", f"fd77::{index}"
        self._holder = subprocess.Popen(
            ["unshare", *kinds, "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._holder.pid
        # What cat gives back shows that the namespaces exist.
        try:
            self._holder.stdin.write("ready\n")
            self._holder.stdin.flush()
            answer = self._holder.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer != "ready\n":
            told = self._holder.stderr.read()
            self.close()
            raise OSError(told)

    def inside(self, *words):
        """Return the command that runs `words` on this host, as a process of the one job."""
        enter = ["nsenter", "-t", str(self.pid), "--net", "--mount", "--uts", "--"]
        return [*enter, "env", f"UNISONO_TOKEN={TOKEN}", *words]

    def run(self, *words, text=""):
        """Run a command on this host."""
        subprocess.run(
            self.inside(*words),
            input=text,
            check=True,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    def ip(self, *lines):
        """Run several `ip` commands on this host."""
        self.run("ip", "-batch", "-", text="\n".join(lines) + "\n")

    def put(self, text, path):
        """Make a file hold something else on this host."""
        script = f'f=$(mktemp) && cat > "$f" && mount --bind "$f" {path} && rm "$f"'
        self.run("sh", "-c", script, text=text)

    def close(self):
        """End the holder; the namespaces go when the last process in them has."""
        self._holder.stdin.close()
        try:
            self._holder.wait(LIMIT_S)
        finally:
            self._holder.kill()
            self._holder.wait()
            self._holder.stdout.close()
            self._holder.stderr.close()


class Network:
    """`count` hosts on one switch, 10.77.0.0/24 and fd77::/64; a context manager.

    As on Debian, each host finds its own name at 127.0.1.1 and the others' at their addresses.
    """

    def __init__(self, count):
        self._stack = contextlib.ExitStack()
        self.hosts = []
        with contextlib.ExitStack() as stack:
            self._switch = Host(0)
            stack.callback(self._switch.close)
            self._switch.ip("link add sw type bridge mcast_snooping 0", "link set sw up")
            for index in range(1, count + 1):
                host = Host(index)
                stack.callback(host.close)
                self.hosts.append(host)
            for host in self.hosts:
                self._plug_in(host)
            self._stack = stack.pop_all()

    def _plug_in(self, host):
        port = f"port{host.index}"
        self._switch.ip(
            f"link add {port} type veth peer name eth0 netns {host.pid}",
            f"link set {port} master sw up",
        )
        host.ip(
            "link set lo up",
            f"address add {host.v4}/24 dev eth0",
            f"address add {host.v6}/64 dev eth0 nodad",
            "link set eth0 up",
        )
        host.run("hostname", host.name)
        names = [f"{other.v4} {other.name}" for other in self.hosts if other is not host]
        # A name with an address in each family.
        names += [f"{self.hosts[0].v4} first", f"{self.hosts[0].v6} first"]
        hosts = "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {host.name}", *names])
        host.put(hosts + "\n", "/etc/hosts")
        # Or its processes could tell that they may share memory with those of the other hosts.
        host.put(f"{uuid.uuid4()}\n", "/proc/sys/kernel/random/boot_id")

    def cut(self, host):
        """Take the plug out of the switch."""
        self._switch.ip(f"link set port{host.index} down")

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._stack.close()


@contextlib.contextmanager
def bad_wire(first, second, *, delay_s, loss, seed):
    """Join two hosts by one more wire, 10.78.0.0/24, that delays all packets and loses some."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    processes = []
    with contextlib.ExitStack() as stack:
        for end in ends:
            stack.callback(end.close)
        for host, end in zip((first, second), ends, strict=True):
            fd = end.fileno()
            words = [WIRE, str(fd), f"10.78.0.{host.index}/24", str(delay_s), str(loss), str(seed)]
            process = subprocess.Popen(
                host.inside(sys.executable, *words),
                pass_fds=[fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=dict(os.environ),
            )
            stack.callback(_end, process)
            processes.append(process)
        for process in processes:
            if process.stdout.readline() != "ready\n":
                raise OSError("a wire did not come up; see the standard error")
        yield


def _end(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
