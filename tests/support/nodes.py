"""Agents of several nodes on this host, or in network namespaces, with real workers."""

import contextlib
import os
import time
from dataclasses import dataclass

from tests.support.launches import Launch
from tests.support.netns import TOKEN
from tests.support.ports import reserved_port
from unisono.core.rendezvous.agents.dynamic import DynamicRendezvous

# Agents wait half a second for more nodes, but a minute for a heartbeat: on a busy machine an agent
# can stand still for seconds.
CONF = "keep_alive_interval=0.3,keep_alive_max_attempt=200,last_call_timeout=0.5"

# A world of fewer nodes, made before the last came, would be another one than the test expects.
PATIENT = f"{CONF},last_call_timeout=60"

# For tests in which a node is lost, and has to be noticed. Beside 15 other processes an agent has
# stood still for 4 s.
LOSING = f"{PATIENT},keep_alive_interval=0.2,keep_alive_max_attempt=40"

_UP = """
print("up", env["RANK"], env["WORLD_SIZE"], env["GROUP_RANK"], env["TORCHELASTIC_RESTART_COUNT"],
      os.getpid(), total, flush=True)
"""

# Counts the ranks in the launcher's store, and needs a third of the time of REDUCING.
WORKER = f"""
import os, time
from unisono.core.stores import TCPStore
env = os.environ
key = env["TORCHELASTIC_RESTART_COUNT"]
store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=120)
if store.add("came/" + key, 1) == int(env["WORLD_SIZE"]):
    store.set("all/" + key, "")
store.wait(["all/" + key])
total = store.add("came/" + key, 0)
store.close()
{_UP}
while not os.path.exists(os.path.join(os.path.dirname(__file__), "stop")):
    time.sleep(0.01)
"""

# Calls collectives until the file `stop` appears, so that it fails if a peer is lost.
REDUCING = f"""
import os, time
import numpy as np
import unisono as dist
dist.init_process_group(timeout=120)
env = os.environ
x = np.ones(1)
dist.all_reduce(x)
total = int(x[0])
{_UP}
stop = np.zeros(1)
while not stop[0]:
    stop[0] = os.path.exists(os.path.join(os.path.dirname(__file__), "stop"))
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    time.sleep(0.03)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Up:
    """What a worker prints when its world is complete."""

    rank: int
    world_size: int
    node: int
    restart: int
    pid: int
    total: int


_progress = DynamicRendezvous.progress


def progress_after_joining(rendezvous):
    """Return what an agent waits for, once it has joined; on a busy host that takes a while."""
    while not rendezvous.state.is_member(rendezvous.node_id):
        time.sleep(0.01)
    return _progress(rendezvous)


# Agents say at once, and not after 5 s, for what they wait.
TELLING = {
    "unisono.launcher.agent._PATIENCE_S": 0.1,
    "unisono.core.rendezvous.agents.dynamic.DynamicRendezvous.progress": progress_after_joining,
}


class Agent(Launch):
    """The launch of one node."""

    def next_ups(self, count):
        """Wait for `count` workers to come up; each is returned once."""
        return by_rank(Up(*map(int, line.split()[1:])) for line in self.lines(count, "up "))

    def ended(self):
        """Wait for the end; return the exit code."""
        return self.finish()[0]


def by_rank(ups):
    """Return workers in the order of their ranks."""
    return sorted(ups, key=lambda up: up.rank)


class Job(contextlib.ExitStack):
    """The agents of one job, and the file that ends its workers."""

    def __init__(self, folder, script=WORKER, hosts=(), **variables):
        super().__init__()
        self.folder = folder
        self._variables = variables
        self.port = self.enter_context(reserved_port())
        # The first agent is on the first host.
        self._hosts = list(hosts)
        self.has_hosts = bool(hosts)
        self.endpoint = f"{hosts[0].name if hosts else 'localhost'}:{self.port}"
        folder.mkdir(exist_ok=True)
        (folder / "worker.py").write_text(script)

    def node(self, *flags, nnodes="2", nproc=1, conf=CONF, endpoint=None, **options):
        """Start one more agent, on the next host."""
        words = [
            f"--nnodes={nnodes}",
            f"--nproc-per-node={nproc}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint or self.endpoint}",
            f"--rdzv-conf={conf}",
        ]
        return self.start(*words, *flags, **options)

    def start(self, *flags, **options):
        """Start an agent with these flags only, on the next host."""
        variables = dict(self._variables)
        if self._hosts:
            options["host"] = self._hosts.pop(0)
            variables = {"UNISONO_TOKEN": TOKEN} | variables
        words = [*flags, self.folder / "worker.py"]
        agent = Agent(*words, cwd=self.folder, **options | variables)
        self.callback(agent.close)
        return agent

    def pair(self, *flags, nnodes="2", nproc=1, conf=PATIENT):
        """Start two agents, the first of which has the store; return them and their workers."""
        options = {"nnodes": nnodes, "nproc": nproc}
        first, second = (
            self.node(*flags, conf=f"{conf},is_host={serves}", **options) for serves in (1, 0)
        )
        return first, second, first.next_ups(nproc), second.next_ups(nproc)

    def stop(self):
        """Let the workers end well."""
        (self.folder / "stop").touch()

    def restart(self):
        """Undo `stop`."""
        os.unlink(self.folder / "stop")
