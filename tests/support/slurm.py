"""A Slurm cluster whose nodes are network namespaces, by Debian's slurmctld and slurmd.

Each node has its ports for itself, and files are in a temporary folder. Slurm runs without systemd,
control groups and authentication. `make servers` installs it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.support import netns

LIMIT_S = 60.0
CONFIGURATION = """
ClusterName=unisono
SlurmctldHost=host1(10.77.0.1)
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
TmpFS={folder}/tmp/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
SlurmdParameters=config_overrides
NodeName=host[1-{count}] CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4
"""

_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def why_not():
    """Return why there can be no cluster here, or None."""
    for name in ("slurmctld", "slurmd", "srun"):
        if shutil.which(name, path=_PATH) is None:
            return f"{name} is not installed; `make servers`"
    return netns.why_not()


class Cluster:
    """Nodes host1, host2, ...; the first one has the controller, and users are there.

    Args:
        folder: Of this cluster alone.
        env: Environment of the daemons.
        count: Number of nodes.
    """

    def __init__(self, folder, env, count=3):
        self._folder, self._env = folder, env | {"PATH": _PATH}
        self._conf = folder / "slurm.conf"
        self._conf.write_text(CONFIGURATION.format(folder=folder, count=count))
        (folder / "state").mkdir()
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self._hosts = stack.enter_context(netns.Network(count)).hosts
            stack.callback(self._kill_rest)
            self._start(stack, "slurmctld", self._hosts[0])
            for host in self._hosts:
                for kind in ("spool", "tmp"):
                    (folder / kind / host.name).mkdir(parents=True)
                self._start(stack, "slurmd", host, "-N", host.name)
            stack.callback(self._end_jobs)
            self.until(lambda: self.ask("sinfo", "-h", "-o", "%T %D") == f"idle {count}")
            self._stack = stack.pop_all()

    def command(self, *words):
        """Return the command that runs `words` on the first node, for a user of the cluster."""
        return self._hosts[0].inside("env", f"SLURM_CONF={self._conf}", *words)

    def ask(self, *words):
        """Return what a command of Slurm prints."""
        done = subprocess.run(
            self.command(*words),
            env=self._env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return done.stdout.strip()

    def until(self, condition):
        """Wait until a condition holds."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def logs(self):
        """Return what the daemons have written."""
        return "\n".join(path.read_text(errors="replace") for path in self._folder.glob("*.log"))

    def _start(self, stack, name, host, *flags):
        words = host.inside("env", f"SLURM_CONF={self._conf}", name, "-D", *flags)
        with open(self._folder / f"{name}.{host.name}.log", "wb") as log:
            process = subprocess.Popen(
                # So that it ends if the process of the tests is killed.
                ["setpriv", "--pdeathsig", "TERM", *words],
                env=self._env,
                stdout=log,
                stderr=log,
            )
        stack.callback(process.wait, LIMIT_S)
        stack.callback(process.terminate)

    def _end_jobs(self):
        self.ask("scancel", "--user=root")
        self.until(lambda: not self.ask("squeue", "-h"))

    def _kill_rest(self):
        """Kill what is left on the nodes, as slurmstepd of a task that did not end."""
        holders = {host.pid for host in self._hosts}
        spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in holders}
        for path in Path("/proc").glob("[0-9]*/ns/net"):
            pid = int(path.parts[2])
            with contextlib.suppress(OSError):
                if pid not in holders and os.readlink(path) in spaces:
                    os.kill(pid, signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._stack.close()
