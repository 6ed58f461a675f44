"""Random lives of a job whose ranks are killed, stopped, joined and sent away at random times.

usage: membership.py [SEED] [ROUNDS] [--keep]

Round k uses SEED + k. A job has 2 to 6 ranks on 1 to 3 hosts, which are network namespaces if these
are permitted. Hosts are cut off from each other for some time, and links between them break. Each
process writes a line for each committed step. Afterwards the lines of all processes, also of the
killed ones, must tell one story: a step was committed once, in one generation, with the sum of what
its members contributed and one model, bit for bit.
"""

import argparse
import collections
import contextlib
import ctypes
import faulthandler
import functools
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import unisono as dist
from unisono import errors
from unisono.core.groups import membership, membership_store
from unisono.core.platform.processes import stat_fields
from unisono.core.stores import PrefixStore, TCPStore
from unisono.testing.hosts import Host, Network, why_no_hosts

TIMEOUT_S = 1.5
LIMIT_S = 90.0
"""How long a job may take to end after the last event; then it hangs."""

ENDS = ("came too late", "cannot go on", " waited ")
"""The errors with which a process may end, because the others go on without it or cannot go on."""

NOWHERE = "lladdr 02:00:00:00:00:01 dev eth0 nud permanent"
"""An address of no interface: what is sent there is lost."""

_NO_WORLD = 7
_TOKEN = "the token of the job"
_NAMESPACES = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}
_context = multiprocessing.get_context("forkserver")


# ---- a process of the job -----------------------------------------------------------------------


def work(number: int, folder: str, variables: dict[str, str]) -> None:
    """Run one process until the parent ends the job."""
    os.environ.update(variables)
    if "HOLDER" in variables:
        enter(int(variables["HOLDER"]))
    threading.Thread(target=break_links, daemon=True).start()
    stacks = os.open(f"{folder}/{number}.stack", os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    # Both are shorter than in production, so that more of a life's events fall into a meeting.
    membership._CONNECT_S = 4.0
    log = os.open(f"{folder}/{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(kind: str, **fields: Any) -> None:
        os.write(log, (json.dumps({"kind": kind, "me": number, **fields}) + "\n").encode())

    newcomer = "UNISONO_JOIN" in variables
    if "DOOM" in variables:
        doom(*map(int, variables["DOOM"].split()))
    try:
        dist.init_process_group(timeout=LIMIT_S if newcomer else 30.0)
        dist.group.WORLD.set_timeout(TIMEOUT_S)
        live(number, newcomer, tell)
    except errors.RendezvousError as error:
        tell("out", what=error.what)
        os._exit(_NO_WORLD)
    except errors.StoreError as error:
        tell("cut off", what=error.what)
        os._exit(_NO_WORLD)
    tell("end")
    dist.destroy_process_group()


def enter(holder: int, *kinds: str) -> None:
    """Move this thread into namespaces of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as stack:
        files = {
            kind: stack.enter_context(open(f"/proc/{holder}/ns/{kind}", "rb"))
            for kind in kinds or _NAMESPACES
        }
        for kind, file in files.items():
            if libc.setns(file.fileno(), _NAMESPACES[kind]) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {kind}")


def break_links() -> None:
    """End all connections to ranks on other hosts, whenever SIGUSR2 comes."""
    apart = os.environ.get("UNISONO_RANKS_PER_HOST") == "1"
    while True:
        signal.sigwait([signal.SIGUSR2])
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as link:
                if link.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                there, here = link.getpeername(), link.getsockname()
                is_store = there[1] == int(os.environ["MASTER_PORT"])
                if not is_store and (apart or there[0] != here[0]):
                    link.shutdown(socket.SHUT_RDWR)


def doom(signum: int, count: int) -> None:
    """Make this process kill or stop itself at its `count`-th call of some functions.

    They are the steps of a meeting, of a transfer of the state and of a commit, which an event at a
    random time seldom hits.
    """
    left = [count]

    def doomed(function: Any) -> Any:
        @functools.wraps(function)
        def call(*arguments: Any, **how: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signum)
            return function(*arguments, **how)

        return call

    for owner, names in (
        (membership_store.Document, ("change", "read")),
        (membership.Membership, ("_meet", "_connect", "hold_state")),
        (dist.ProcessGroup, ("all_reduce", "barrier", "send", "recv", "broadcast", "close")),
    ):
        for name in names:
            setattr(owner, name, doomed(getattr(owner, name)))


def live(number: int, newcomer: bool, tell: Any) -> None:
    """Make steps until the job ends or this process is sent away."""
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=20.0)
    state: dict[str, Any] = {"step": 0, "model": np.zeros(20_000), "members": []}
    fresh = newcomer
    if not newcomer:
        shared.set(f"began/{number}", b"")
    while True:
        try:
            if fresh:
                dist.sync_state(state)
                fresh = False
                tell("joined", step=state["step"], generation=dist.group.WORLD.name)
                # The sum of all members, so that two models are equal only by the same history.
                shared.set(f"began/{number}", b"")
            over, changed = one_step(number, state, shared, tell)
        except (errors.CollectiveTimeoutError, errors.CollectiveAbortedError, errors.PeerError):
            changed, over = True, False
        except errors.StepAborted:
            changed, over = True, False
        except errors.StoreTimeoutError as error:
            tell("no answer", what=error.what)
            changed, over = True, False
        if over:
            return
        if not changed and shared.check([f"leave/{number}"]):
            tell("left")
            return
        if changed:
            dist.reconfigure(timeout=20.0)
            tell("generation", number=dist.group.WORLD.name, rank=dist.get_rank())
            fresh = True


def one_step(number: int, state: dict[str, Any], shared: Any, tell: Any) -> tuple[bool, bool]:
    """Make one step; return whether the job is over, and whether the membership has changed."""
    group = dist.group.WORLD
    with dist.step() as s:
        mine = random.Random(f"{number}/{state['step']}").randrange(1 << 30)
        over = shared.check(["over"], 1.0)
        rows = np.zeros((group.size(), 2), np.int64)
        dist.all_gather_into_tensor(rows, np.array([[number, mine]], np.int64))
        total = np.array([mine, over], np.int64)
        dist.all_reduce(total)
        assert total[0] == rows[:, 1].sum(), (total, rows)
        model = state["model"] + np.float64(total[0]) / 3
        s.commit()
    state["step"] += 1
    state["model"] = model
    digest = hashlib.sha256(model.tobytes()).hexdigest()[:16]
    tell(
        "step",
        step=state["step"],
        generation=group.name,
        members=rows[:, 0].tolist(),
        sum=int(total[0]),
        model=digest,
    )
    return bool(total[1]), s.changed


# ---- one life of a job --------------------------------------------------------------------------


class Life:
    """One job and its random events."""

    def __init__(self, seed: int, folder: str, hosts: list[Host]) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.size = self.random.randint(2, 6)
        self.hosts = hosts[: self.random.randint(1, 3)]
        self.address = self.hosts[0].v4 if self.hosts else "127.0.0.1"
        self.server = TCPStore(
            self.address, 0, is_master=True, wait_for_workers=False, token=_TOKEN
        )
        self.cuts: dict[tuple[Host, Host], float] = {}
        self.store = PrefixStore("worker/attempt_0", self.server)
        self.processes: dict[int, Any] = {}
        self.killed: set[int] = set()
        self.doomed: set[int] = set()
        self.stopped: dict[int, float] = {}
        self.events: collections.Counter[str] = collections.Counter()
        apart = len(self.hosts) > 1
        self.per_host = "0" if apart else self.random.choice(["0", "0", "1", "2"])
        self.kinds = ["kill", "kill", "stop", "stop", "join", "join", "leave"]
        if apart:
            self.kinds += ["cut", "cut", "cut off"]
        if apart or self.per_host == "1":
            self.kinds += ["break"]

    def start(self, number: int, **variables: str) -> None:
        common = {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.server.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "UNISONO_TOKEN": _TOKEN,
            "WORLD_SIZE": str(self.size),
            "RANK": str(number),
            "UNISONO_RANKS_PER_HOST": self.per_host,
        }
        if self.random.random() < 0.15:
            signum = self.random.choice([signal.SIGKILL, signal.SIGSTOP])
            common["DOOM"] = f"{int(signum)} {self.random.randint(1, 400)}"
            self.doomed.add(number)
        if self.hosts:
            common["HOLDER"] = str(self.random.choice(self.hosts).pid)
        process = _context.Process(
            target=work, args=(number, self.folder, common | variables), daemon=True
        )
        process.start()
        self.processes[number] = process

    def living(self) -> list[int]:
        return [n for n, process in self.processes.items() if process.is_alive()]

    def run(self) -> None:
        for number in range(self.size):
            self.start(number)
        self.await_start()
        for _ in range(self.random.randint(1, 6)):
            time.sleep(self.random.choice([0.0, 0.02, 0.1, 0.5]) * self.random.random() * 2)
            self.wake()
            self.disturb()
        self.finish()

    def await_start(self) -> None:
        """Wait until the first ranks have met, or one of them has ended."""
        names = [f"began/{number}" for number in range(self.size)]
        while not self.server.check(names) and len(self.living()) == self.size:
            self.wake()
            time.sleep(0.01)

    def disturb(self) -> None:
        running = [n for n in self.living() if n not in self.stopped]
        what = self.random.choice(self.kinds)
        if what in ("cut", "cut off"):
            self.events[what] += 1
            self.cut(*self.random.sample(self.hosts, 2 if what == "cut" else 1))
            return
        if what == "break":
            self.events[what] += 1
            for number in self.living() if self.random.random() < 0.5 else running[:1]:
                self.send(number, signal.SIGUSR2)
            return
        if what == "join":
            if len(self.processes) < self.size + 4 and len(running) < 6:
                self.start(len(self.processes), UNISONO_JOIN="1")
                self.events[what] += 1
            return
        if len(running) < 2:
            return
        victim = self.random.choice(running)
        self.events[what] += 1
        if what == "kill":
            self.killed.add(victim)
            self.send(victim, signal.SIGKILL)
        elif what == "stop":
            self.send(victim, signal.SIGSTOP)
            self.stopped[victim] = time.monotonic() + self.random.choice([0.1, 1.0, 4.0])
        else:
            self.server.set(f"leave/{victim}", b"")

    def cut(self, host: Host, *others: Host) -> None:
        """Lose all that two hosts, or a host and all others, send to each other for some time."""
        until_s = time.monotonic() + self.random.choice([0.3, 2.0, 6.0])
        for other in others or [each for each in self.hosts if each is not host]:
            self.cuts[host, other] = until_s
            for one, far in ((host, other), (other, host)):
                one.ip(*(f"neigh replace {to} {NOWHERE}" for to in (far.v4, far.v6)))

    def heal(self, host: Host, other: Host) -> None:
        """End a cut."""
        del self.cuts[host, other]
        if (other, host) not in self.cuts:
            for one, far in ((host, other), (other, host)):
                one.ip(*(f"neigh del {to} dev eth0" for to in (far.v4, far.v6)))

    def send(self, number: int, signum: int) -> None:
        # The process may have ended by itself.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[number].pid, signum)

    def wake(self) -> None:
        for number in self.doomed - self.stopped.keys():
            # It has stopped itself.
            if self.processes[number].is_alive() and state_of(self.processes[number].pid) == "T":
                self.stopped[number] = time.monotonic() + self.random.choice([0.1, 1.0, 4.0])
                self.events["stop itself"] += 1
        for pair, until_s in list(self.cuts.items()):
            if time.monotonic() >= until_s:
                self.heal(*pair)
        for number, at_s in list(self.stopped.items()):
            if time.monotonic() >= at_s:
                self.send(number, signal.SIGCONT)
                del self.stopped[number]

    def finish(self) -> None:
        """End the job; newcomers that no rank admits any more are killed."""
        time.sleep(0.5 * self.random.random())
        self.server.set("over", b"")
        deadline = time.monotonic() + LIMIT_S
        while self.members():
            self.wake()
            if time.monotonic() > deadline:
                raise AssertionError(f"processes {self.members()} hang\n{self.stacks()}")
            time.sleep(0.02)
        for number in self.living():
            self.killed.add(number)
            self.processes[number].kill()
        for process in self.processes.values():
            process.join()

    def members(self) -> list[int]:
        """Return the living processes that are no waiting newcomers."""
        return [n for n in self.living() if n < self.size or self.server.check([f"began/{n}"])]

    def stacks(self) -> str:
        for number in self.living():
            self.send(number, signal.SIGUSR1)
        time.sleep(1.0)
        texts = [path.read_text() for path in sorted(Path(self.folder).glob("*.stack"))]
        document = self.store.get("unisono/membership/document", 1.0)
        return "\n".join([*texts, document.decode()])

    def close(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join()
        self.server.close()
        for pair in list(self.cuts):
            self.heal(*pair)

    # ---- the story that the lines tell ------------------------------------------------------

    def check(self) -> collections.Counter[str]:
        """Compare the lines of all processes; return what happened."""
        seen: collections.Counter[str] = collections.Counter(self.events)
        steps: dict[int, tuple[Any, ...]] = {}
        worlds: dict[str, list[int]] = {}
        finished = []
        for number, process in self.processes.items():
            path = Path(self.folder, f"{number}.log")
            lines = (
                [json.loads(line) for line in path.read_text().splitlines()]
                if path.exists()
                else []
            )
            last, lacks = None, False
            for line in lines:
                if line["kind"] == "step":
                    fact = line["generation"], line["members"], line["sum"], line["model"]
                    assert steps.setdefault(line["step"], fact) == fact, (steps[line["step"]], line)
                    assert worlds.setdefault(fact[0], fact[1]) == fact[1], (fact, worlds)
                    assert number in fact[1], line
                    assert last is None or line["step"] == last + 1, (last, line)
                    last = line["step"]
                elif line["kind"] == "no answer":
                    seen["no answer"] += 1
                    lacks = True
                elif line["kind"] == "joined":
                    # Without an answer of the store a process may lack the step that counts.
                    assert last in (None, line["step"], line["step"] - lacks), (last, line)
                    last, lacks = line["step"], False
                elif line["kind"] == "out":
                    [why] = [text for text in ENDS if text in line["what"]]
                    seen[why] += 1
                elif line["kind"] == "cut off":
                    assert self.events["cut"] + self.events["cut off"], line
                    seen["no store"] += 1
                elif line["kind"] == "left":
                    break
                elif line["kind"] == "end":
                    finished.append((number, last))
            if number in self.doomed and process.exitcode == -signal.SIGKILL:
                seen["kill itself"] += 1
            elif number not in self.killed:
                assert process.exitcode in (0, _NO_WORLD), (number, process.exitcode)
        assert sorted(steps) == list(range(1, len(steps) + 1)), sorted(steps)
        # The order of the generations is that of the steps.
        order = [
            int(fact[0].rpartition("-")[2] or 1) if "-" in fact[0] else 1
            for _, fact in sorted(steps.items())
        ]
        assert order == sorted(order), order
        # All processes that ended with the job made the same last step.
        assert len({last for _, last in finished}) <= 1, finished
        seen["finished" if finished else "ended without a world"] += 1
        seen["steps"] += len(steps)
        seen["generations"] += len(worlds)
        return seen


def state_of(pid: int) -> str:
    """Return the state of a process: "T" if it is stopped, "" if it has ended."""
    return (stat_fields(pid) or [""])[0]


def main() -> int:
    """Run the rounds; print the first failure with its seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", nargs="?", type=int, default=1)
    parser.add_argument("rounds", nargs="?", type=int, default=100)
    parser.add_argument("--keep", action="store_true", help="keep the lines of the processes")
    options = parser.parse_args()
    # All processes inherit it. `break_links` waits for the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    names = ["unisono.testing", "unisono.beyond.state_sync", "unisono.beyond.steps"]
    _context.set_forkserver_preload(names)
    total: collections.Counter[str] = collections.Counter()
    hosts: list[Host] = []
    with contextlib.ExitStack() as stack:
        if (why_not := why_no_hosts()) is None:
            hosts = stack.enter_context(Network(3)).hosts
            # The first host has the store.
            enter(hosts[0].pid, "net")
        else:
            print(f"one host only: {why_not}", flush=True)
        for seed in range(options.seed, options.seed + options.rounds):
            total += one_life(seed, hosts, keep=options.keep)
    print(f"{options.rounds} lives from seed {options.seed}:", dict(total))
    return 0


def one_life(seed: int, hosts: list[Host], *, keep: bool) -> collections.Counter[str]:
    """Run one life; return what happened."""
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="membership-")
        if not keep:
            stack.callback(shutil.rmtree, folder)
        life = Life(seed, folder, hosts)
        stack.callback(life.close)
        try:
            life.run()
            return life.check()
        except BaseException as error:
            print(f"seed {seed} ({dict(life.events)}, {folder}): {error!r}\n{error}", flush=True)
            for path in sorted(Path(folder).glob("*.log")):
                print(path.name, *path.read_text().splitlines()[-6:], sep="\n  ")
            raise


if __name__ == "__main__":
    sys.exit(main())
