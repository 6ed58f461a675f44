"""Hosts that a user of the first reaches through ssh: OpenSSH's sshd in network namespaces.

The keys are made for each cluster. `make servers` installs sshd.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.support import netns
from unisono.testing.hosts import Network

LIMIT_S = 60.0
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_SERVER = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
UsePAM no
"""
_CLIENT = """
IdentityFile {folder}/user
IdentitiesOnly yes
IdentityAgent none
UserKnownHostsFile {folder}/known
LogLevel ERROR
"""


def why_not():
    """Return why there can be no such hosts here, or None."""
    for name in ("sshd", "ssh", "ssh-keygen"):
        if shutil.which(name, path=_PATH) is None:
            return f"{name} is not installed; `make servers`"
    return netns.why_not()


class Cluster(contextlib.ExitStack):
    """Hosts host1, host2, ...; `close` ends them.

    Args:
        folder: Of this cluster alone.
        count: Number of hosts.
    """

    def __init__(self, folder, count=2):
        super().__init__()
        folder.mkdir()
        self._folder = folder
        for name in ("host", "user"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True, timeout=LIMIT_S)
        (folder / "server").write_text(_SERVER.format(folder=folder))
        (folder / "client").write_text(_CLIENT.format(folder=folder))
        key = (folder / "host.pub").read_text()
        (folder / "known").write_text("".join(f"host{i} {key}" for i in range(1, count + 1)))
        os.makedirs("/run/sshd", exist_ok=True)
        with contextlib.ExitStack() as stack:
            self.network = stack.enter_context(Network(count))
            self.hosts = self.network.hosts
            stack.callback(self._kill_rest)
            for host in self.hosts:
                self._start(stack, host)
            self.push(stack.pop_all())

    def _start(self, stack, host):
        sshd = shutil.which("sshd", path=_PATH)
        words = [sshd, "-D", "-e", "-f", str(self._folder / "server")]
        process = subprocess.Popen(
            # So that it ends if the process of the tests is killed.
            ["setpriv", "--pdeathsig", "TERM", *host.inside(*words)],
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.callback(process.communicate, timeout=LIMIT_S)
        stack.callback(process.terminate)
        while "Server listening" not in (line := process.stderr.readline()):
            assert line, f"sshd has ended with {process.wait(LIMIT_S)}"

    def _kill_rest(self):
        """Kill what a test has left on the hosts."""
        for host in self.hosts:
            for pid, _ in self.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @property
    def ssh(self):
        """The command with which `unisono run` reaches the hosts."""
        return f"ssh -F {self._folder}/client"

    def left(self, host):
        """Return the processes of a host that Python runs."""
        return [pid for pid, words in self.processes(host) if b"python" in words.split(b"\0")[0]]

    def processes(self, host):
        """Return the number and command line of each process of a host."""
        space = os.readlink(f"/proc/{host.pid}/ns/net")
        found = []
        for path in Path("/proc").glob("[0-9]*/ns/net"):
            with contextlib.suppress(OSError):
                if os.readlink(path) == space and path.parts[2] != str(host.pid):
                    found.append((int(path.parts[2]), (path.parents[1] / "cmdline").read_bytes()))
        return found
