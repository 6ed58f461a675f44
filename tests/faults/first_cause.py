"""Random rounds in which one rank ends first and the other ranks follow: the first must be named.

`python -m tests.faults.first_cause 2000 --seed 1` runs so many rounds and prints each wrong one.

A round: one rank raises, is killed, leaves or aborts. The error of each other rank must name that
rank, and give the exception if the rank raised. The other ranks end as soon as they have their
error, in a random way. Sleeps in the threads that receive put the reports into random orders.
"""

import argparse
import atexit
import json
import os
import random
import select
import signal
import sys
import threading
import time
import traceback

import numpy as np

import unisono as dist
from unisono.core.stores import PrefixStore, TCPStore
from unisono.core.transports.tcp.io_loop import IOLoop
from unisono.errors import UnisonoError
from unisono.lowlevel import CPUOptions

MEDIA = {
    "tcp": ({"UNISONO_SHARED_MEMORY": "0"}, None),
    "frames": ({}, "reference"),
    "memory": ({}, None),
}
"""How messages travel: variables and the engine."""

WAYS = ("raise", "_exit", "kill", "leave", "abort")
"""How the first rank ends."""

FOLLOWERS = ("_exit", "_exit", "raise", "leave", "stay")
"""What another rank does after its error."""

LIMIT_S = 90.0
"""A round that takes longer hangs."""

REASONS = {
    "raise": r"ValueError: spoilt",
    "abort": r"enough on rank",
}


class Plan:
    """What the ranks of a round do; equal on all ranks."""

    def __init__(self, seed, medium=None):
        chance = random.Random(seed)
        self.seed = seed
        self.size = chance.randint(3, 5)
        self.medium = medium or chance.choice(list(MEDIA))
        self.way = chance.choice(WAYS)
        self.first = chance.randrange(self.size)
        self.step = chance.randint(0, 5)
        self.from_thread = chance.random() < 0.3 and self.way in ("_exit", "kill", "abort")
        self.groups = [
            sorted(chance.sample(range(self.size), chance.randint(2, self.size))) for _ in range(3)
        ]
        kinds = ["all_reduce", "large", "barrier", "ring", "async", "group", "chain"]
        self.kinds = chance.choices(kinds, k=12)
        self.slow = [chance.random() < 0.4 for _ in range(self.size)]
        self.follow = [chance.choice(FOLLOWERS) for _ in range(self.size)]

    def __str__(self):
        return (
            f"seed {self.seed}: {self.size} ranks, {self.medium}, rank {self.first} {self.way} in "
            f"step {self.step} of {self.kinds[: self.step + 2]}, groups {self.groups}, then "
            f"{self.follow}"
        )


def _slow_down(chance):
    turn = IOLoop.turn

    def slow(loop):
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.03)
        turn(loop)

    IOLoop.turn = slow


def _end(way, rank):
    if way == "raise":
        raise ValueError("spoilt")
    if way == "_exit":
        os._exit(3)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "abort":
        dist.group.WORLD.abort("enough")
        if threading.current_thread() is threading.main_thread():
            dist.barrier()


def _one_call(plan, rank, kind, k, groups):
    p = plan.size
    right, left = (rank + 1) % p, (rank - 1) % p
    if kind == "all_reduce":
        dist.all_reduce(np.ones(4))
    elif kind == "large":
        dist.all_reduce(np.ones(300_000))
    elif kind == "barrier":
        dist.barrier()
    elif kind == "ring":
        box = np.zeros(10)
        work = dist.isend(np.ones(10), right, tag=k)
        dist.recv(box, left, tag=k)
        work.wait()
    elif kind == "chain":
        box = np.zeros(10)
        if rank:
            dist.recv(box, rank - 1, tag=k)
        if rank + 1 < p:
            dist.send(box, rank + 1, tag=k)
    elif kind == "async":
        works = [dist.all_reduce(np.ones(8), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
    else:
        group = groups[k % len(groups)]
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(np.ones(4), group=group)


def _run_rank(plan, rank, store, out):
    chance = random.Random(plan.seed * 100 + rank)
    variables, engine = MEDIA[plan.medium]
    os.environ.update(variables)
    dist.init_process_group(
        store=store,
        rank=rank,
        world_size=plan.size,
        timeout=LIMIT_S / 2,
        pg_options=CPUOptions(transport="tcp", engine=engine),
    )
    groups = [dist.new_group(members) for members in plan.groups]
    for k, kind in enumerate(["all_reduce", "ring"]):
        _one_call(plan, rank, kind, 1000 + k, groups)
    for k in range(len(groups)):
        _one_call(plan, rank, "group", k, groups)
    dist.barrier()
    if plan.slow[rank]:
        _slow_down(chance)
    if rank == plan.first and plan.from_thread:
        threading.Timer(chance.random() * 0.01, _end, (plan.way, rank)).start()
    try:
        k = 0
        while True:
            if rank == plan.first and not plan.from_thread and k == plan.step:
                if plan.way == "leave":
                    return
                _end(plan.way, rank)
            if chance.random() < 0.2:
                time.sleep(chance.random() * 0.01)
            _one_call(plan, rank, plan.kinds[k % len(plan.kinds)], k, groups)
            k += 1
    except UnisonoError as error:
        found = [rank, type(error).__name__, list(error.context.peers), str(error)]
        os.write(out, json.dumps(found).encode() + b"\n")
        if rank == plan.first:
            return
        follow = plan.follow[rank]
        if follow == "_exit":
            os._exit(0)
        if follow == "raise":
            raise
        if follow == "stay":
            time.sleep(chance.random() * 0.3)


def _child(plan, rank, port, out):
    """Run a rank as the interpreter runs a script, and end the process."""
    code = 0
    atexit._clear()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        _run_rank(plan, rank, PrefixStore(f"{plan.seed}/{os.getppid()}", store), out)
    except BaseException as error:
        if not isinstance(error, (UnisonoError, ValueError)):
            text = "".join(traceback.format_exception(error))
            os.write(out, json.dumps([rank, "?", [], text]).encode() + b"\n")
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def _gather(pids, source):
    """Return the lines of all ranks; kill ranks that hang."""
    text, end_s = b"", time.monotonic() + LIMIT_S
    while True:
        ready, _, _ = select.select([source], [], [], max(0.0, end_s - time.monotonic()))
        chunk = os.read(source, 65536) if ready else b""
        text += chunk
        if not chunk:
            break
    hung = []
    for rank, pid in enumerate(pids):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > end_s:
                hung.append(rank)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.001)
    return [json.loads(line) for line in text.splitlines()], hung


def one_round(plan, port):
    """Run a round; return what is wrong with it."""
    source, out = os.pipe()
    pids = []
    for rank in range(plan.size):
        pid = os.fork()
        if not pid:
            os.close(source)
            _child(plan, rank, port, out)
        pids.append(pid)
    os.close(out)
    found, hung = _gather(pids, source)
    os.close(source)
    wrong = [f"rank {rank} hangs" for rank in hung]
    survivors = set(range(plan.size)) - {plan.first}
    if missing := survivors - {rank for rank, *_ in found}:
        wrong.append(f"no error on {sorted(missing)}")
    for rank, kind, peers, text in found:
        if rank == plan.first:
            continue
        reason = REASONS.get(plan.way, "")
        if peers != [plan.first] or reason not in text or kind == "?":
            wrong.append(f"rank {rank}: {peers} {text if kind == '?' else text.splitlines()[0]}")
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--medium", choices=list(MEDIA))
    args = parser.parse_args()
    source, out = os.pipe()
    life, lives = os.pipe()
    server = os.fork()
    if not server:
        os.close(lives)
        served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(out, str(served.port).encode())
        os.read(life, 1)  # until the parent and its ranks have ended
        os._exit(0)
    os.close(life)
    os.close(out)
    port = int(os.read(source, 20))
    os.close(source)
    bad = 0
    try:
        for number in range(args.rounds):
            plan = Plan(args.seed + number, args.medium)
            if wrong := one_round(plan, port):
                bad += 1
                print(plan, *wrong, sep="\n    ", flush=True)
    finally:
        os.close(lives)
        os.waitpid(server, 0)
    print(f"{bad} of {args.rounds} rounds are wrong")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
