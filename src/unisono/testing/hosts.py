"""Hosts on one machine: network namespaces joined by a switch.

Every host is a process that holds the namespaces (network, mounts, host name) and waits for the
end of its input. So no namespace outlives the program that made it: no name is left in /run/netns,
and the kernel removes a device with its namespace. This needs root, or permission to make
namespaces.

The links are as fast as the machine, or shaped:

    with Network(2, ShapedLink(gbps=1, delay_s=2.5e-3, buffer_bytes=1 << 20)) as network: ...
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import NamedTuple, Self

from unisono.launcher.workers.worker import opened

__all__ = ["Host", "Network", "ShapedLink", "why_no_hosts"]

_LIMIT_S = 10.0
_KINDS = ("--net", "--mount", "--uts")
_CLONE_NEWNET = 0x40000000


class ShapedLink(NamedTuple):
    """A host's link to the switch, which is a process of Python: it passes up to about 2 Gb/s.

    Attributes:
        gbps: Rate of a host in each direction.
        delay_s: From any host to any other: half a round trip.
        buffer_bytes: How much may wait before a link; what comes then is dropped.
    """

    gbps: float = 1.0
    delay_s: float = 0.0
    buffer_bytes: int = 1 << 20


@functools.cache
def why_no_hosts(link: ShapedLink | None = None) -> str | None:
    """Return why no hosts can be made here, with shaped links if they are given, or None."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if missing := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)} (iproute2 and util-linux have them)"
    try:
        with Network(2, link):
            return None
    except (OSError, subprocess.SubprocessError) as error:
        text = getattr(error, "stderr", None) or str(error)
        return f"network namespaces are not allowed here: {text.strip()}"


class _Talker(subprocess.Popen[str]):
    """A process that answers lines."""

    def __init__(self, *words: str) -> None:
        super().__init__(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str, answer: str) -> None:
        """Send a line, and wait for the answer to it.

        Raises:
            OSError: The process has ended; the text is its standard error.
        """
        with contextlib.suppress(BrokenPipeError):
            opened(self.stdin).write(line + "\n")
            opened(self.stdin).flush()
        self.expect(answer)

    def expect(self, word: str) -> None:
        """Wait for a line."""
        if opened(self.stdout).readline() != word + "\n":
            raise OSError(opened(self.stderr).read())


class Host:
    """A host: a process that holds new namespaces.

    Args:
        index: 1, 2, ...; also the last part of its addresses.
        kinds: The kinds of namespaces, as flags of unshare(1).

    Attributes:
        name: Its host name, "host1", ...
        v4: Its IPv4 address.
        v6: Its IPv6 address.
        pid: The process that holds its namespaces.

    Raises:
        OSError: Namespaces are not permitted here.
    """

    def __init__(self, index: int, kinds: tuple[str, ...] = _KINDS) -> None:
        self.index = index
        self.name = f"host{index}"
        self.v4, self.v6 = f"10.77.0.{index}", f"fd77::{index}"
        self._holder = _Talker("unshare", *kinds, "cat")
        self.pid = self._holder.pid
        # The namespaces exist when cat returns the line.
        try:
            self._holder.tell("ready", "ready")
        except OSError:
            self.close()
            raise

    def inside(self, *words: str) -> list[str]:
        """Return the command that runs `words` on this host."""
        return ["nsenter", "-t", str(self.pid), *_KINDS, "--", *words]

    def enter(self) -> None:
        """Move the calling thread, and all processes that it starts, to this host's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{self.pid}/ns/net", "rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def run(self, *words: str, text: str = "") -> None:
        """Run a command on this host.

        Raises:
            CalledProcessError: The command failed.
        """
        subprocess.run(
            self.inside(*words),
            input=text,
            check=True,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )

    def ip(self, *lines: str) -> None:
        """Run several `ip` commands on this host."""
        self.run("ip", "-batch", "-", text="\n".join(lines) + "\n")

    def put(self, text: str, path: str) -> None:
        """Replace the contents of a file on this host."""
        script = f'f=$(mktemp) && cat > "$f" && mount --bind "$f" {path} && rm "$f"'
        self.run("sh", "-c", script, text=text)

    def close(self) -> None:
        """End the holder; the kernel removes the namespaces after the last process in them."""
        with self._holder as holder:
            with contextlib.suppress(BrokenPipeError):
                opened(holder.stdin).close()
            try:
                holder.wait(_LIMIT_S)
            finally:
                holder.kill()


class Network:
    """`count` hosts on one switch, 10.77.0.0/24 and fd77::/64; a context manager.

    As on Debian, each host resolves its own name to 127.0.1.1, and other names to their addresses.

    Args:
        count: Number of hosts.
        link: The links of the hosts; None: as fast as the machine.
    """

    make_host: type[Host] = Host

    def __init__(self, count: int, link: ShapedLink | None = None) -> None:
        self._stack = contextlib.ExitStack()
        self.hosts: list[Host] = []
        with contextlib.ExitStack() as stack:
            for index in range(1, count + 1):
                host = self.make_host(index)
                stack.callback(host.close)
                self.hosts.append(host)
            self._switch = _Bridge(self.hosts) if link is None else _Shaper(link, self.hosts)
            stack.callback(self._switch.close)
            for host in self.hosts:
                self._set_up(host)
            self._stack = stack.pop_all()

    def _set_up(self, host: Host) -> None:
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
        # Processes with the same boot id would share memory, even if they are on different hosts.
        host.put(f"{uuid.uuid4()}\n", "/proc/sys/kernel/random/boot_id")

    def cut(self, host: Host) -> None:
        """Disconnect a host from the switch."""
        self._switch.cut(host)

    def restore(self, host: Host) -> None:
        """Connect a host again that was cut off."""
        self._switch.restore(host)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()


class _Bridge:
    """The kernel's own switch, in a namespace of its own."""

    def __init__(self, hosts: list[Host]) -> None:
        self._host = Host(0)
        try:
            self._host.ip("link add sw type bridge mcast_snooping 0", "link set sw up")
            for host in hosts:
                port = f"port{host.index}"
                self._host.ip(
                    f"link add {port} type veth peer name eth0 netns {host.pid}",
                    f"link set {port} master sw up",
                )
        except BaseException:
            self.close()
            raise

    def cut(self, host: Host) -> None:
        self._host.ip(f"link set port{host.index} down")

    def restore(self, host: Host) -> None:
        self._host.ip(f"link set port{host.index} up")

    def close(self) -> None:
        self._host.close()


class _Shaper:
    """A process that runs switch.py."""

    def __init__(self, link: ShapedLink, hosts: list[Host]) -> None:
        words = [*map(str, link), *(str(host.pid) for host in hosts)]
        script = str(Path(__file__).with_name("switch.py"))
        self._process = _Talker(sys.executable, "-I", "-S", script, *words)
        try:
            self._process.expect("ready")
            for host in hosts:
                # The switch finds a host by its address.
                host.ip(f"link set eth0 address 02:00:00:00:00:{host.index:02x}")
        except BaseException:
            self.close()
            raise

    def cut(self, host: Host) -> None:
        self._process.tell(f"cut {host.index}", "done")

    def restore(self, host: Host) -> None:
        self._process.tell(f"restore {host.index}", "done")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
