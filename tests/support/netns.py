"""The hosts of `unisono.testing`, as parts of one job, and a wire that loses packets."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from unisono.testing import hosts
from unisono.testing.hosts import why_no_hosts as why_not

__all__ = ["TOKEN", "Host", "Network", "bad_wire", "why_not"]

WIRE = str(Path(__file__).with_name("wire.py"))
# Without it a store serves its own host only.
TOKEN = "the token of the job on these hosts"


class Host(hosts.Host):
    """A host whose processes know the job's token."""

    def inside(self, *words):
        return super().inside("env", f"UNISONO_TOKEN={TOKEN}", *words)


class Network(hosts.Network):
    """A network of such hosts."""

    make_host = Host


@contextlib.contextmanager
def bad_wire(first, second, *, delay_s=0.0, loss=0.0, seed=1, most_bytes=65535):
    """Join two hosts by one more wire, 10.78.0.0/24, that delays all packets and loses some.

    It loses all packets of more than `most_bytes`, silently.
    """
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    processes = []
    with contextlib.ExitStack() as stack:
        for end in ends:
            stack.callback(end.close)
        for host, end in zip((first, second), ends, strict=True):
            fd = end.fileno()
            settings = map(str, (delay_s, loss, seed, most_bytes))
            words = [WIRE, str(fd), f"10.78.0.{host.index}/24", *settings]
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
