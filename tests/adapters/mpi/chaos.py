"""Faults of ranks on the MPI engine: no hang, no wrong number, the right rank named.

`make chaos-mpi ROUNDS=200` runs 200 rounds of each fault, by turns in the agreement and in 16 MiB
of data. It uses the MPI library of this environment, and those of UNISONO_TEST_MPI.

A world begins with 4 ranks. It has a round of each fault in a drawn order. A kill ends the stage:
the other ranks shrink the world, and the next stage has a rank less. So a fault may meet a library
with calls that earlier faults have left. In each second world the ranks agree in shared memory, in
the others by MPI. In worlds 2 and 3 of each 4, a fault in data may also come while MPI makes the
group; MPI can then make no further group, and the world ends. A rank whose call failed writes
nonsense into its arrays, because MPI may still read them: no other rank may get that.
"""

import argparse
import contextlib
import faulthandler
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

import unisono as dist
from tests.core.rendezvous.test_detection import clean_environment
from tests.support.tools import ROOT
from unisono.adapters.mpi import engine as mpi_engine
from unisono.core.stores import TCPStore
from unisono.errors import UnisonoError, UnsupportedError
from unisono.launcher.spawn import SpawnContext
from unisono.lowlevel import CPUOptions
from unisono.testing import ranks

SIZE = 4
# Of arrays, in numbers of 8 bytes.
SMALL, BIG = 2, 1 << 21
# Of calls in rounds in which a rank is late or stopped, and of all others.
SHORT_S, LONG_S = 2.0, 60.0
# How long after a fault, and after the time-out that finds it, a rank may take to raise.
HANG_S = 15.0
# After it each other rank wakes a stopped rank, because the rank that should may have ended.
WAKE_S = 5.0

# By fault: the error of the other ranks, and its text; {} is the rank to blame.
ERRORS = {
    "stop": ("CollectiveTimeoutError", "rank"),
    "late": ("CollectiveTimeoutError", r"ranks? .*\b{}\b.* (never entered|had not entered) it"),
    "abort": ("CollectiveAbortedError", r"abort\(\) was called on rank {}\b"),
    "mismatch": ("CollectiveMismatchError", r"rank {} called all_reduce"),
    "kill": ("PeerLostError", r"rank {} was lost"),
}


@dataclass
class Round:
    """A fault of a rank.

    Attributes:
        number: In its world.
        way: The fault.
        in_data: Whether it comes in 16 MiB of data, else in the agreement.
        alive: The ranks of the world, as they were numbered at first.
        victim: Index of the rank in `alive`.
        moment: Calls before the fault; in data, the delay in milliseconds.
    """

    number: int
    way: str
    in_data: bool
    alive: tuple[int, ...]
    victim: int
    moment: int


def plan(seed, ways):
    """Return the rounds of a world."""
    random = np.random.default_rng(seed)
    alive, found = tuple(range(SIZE)), []
    parts = {
        way: itertools.cycle((i + seed) % 2 == k for k in (0, 1)) for i, way in enumerate(ERRORS)
    }
    while len(alive) > 1:
        stage = [str(way) for way in random.permutation(list(ERRORS)[:-1]) if way in ways]
        for way in [*stage, "kill"] if "kill" in ways else stage:
            victim, moment = int(random.integers(len(alive))), int(random.exponential(10)) + 1
            found.append(Round(len(found), way, next(parts[way]), alive, victim, moment))
        alive = tuple(r for i, r in enumerate(alive) if i != found[-1].victim)
        if "kill" not in ways:
            return found
    return found


# ---- a rank -----------------------------------------------------------------------------------


def life(_, folder, seed, ways):
    """Take part in all rounds of a world, as one of its ranks."""
    me, folder = dist.get_rank(), Path(folder)
    (folder / f"{me}.pid").write_text(str(os.getpid()))
    assert "engine=mpi" in repr(dist.group.WORLD)
    if seed % 2 == 0:
        # The agreement is MPI's then. UNISONO_SHARED_MEMORY=0 would change MPI's network, too.
        mpi_engine.share_memory = lambda *_: None
    for each in plan(seed, ways):
        faulthandler.dump_traceback_later(4 * HANG_S, exit=True)
        rank = Rank(folder, me, each, while_made=seed % 4 > 1)
        rank.run()
        if rank.left_mpi:
            break
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
    (folder / f"{me}.end").touch()


class Rank:
    """One rank in one round."""

    def __init__(self, folder, me, this, while_made):
        self.folder, self.me, self.this, self.while_made = folder, me, this, while_made
        self.is_victim = this.alive[this.victim] == me
        self.random = np.random.default_rng((this.number, this.moment))
        self.left_mpi = False
        self.record = {}

    def run(self):
        """Let the fault happen, record how the call ended, and meet the other ranks again."""
        this = self.this
        short = this.way in ("stop", "late")
        self.group = dist.new_group(timeout=SHORT_S if short else LONG_S)
        record = self.record = {"number": this.number, "kind": "", "text": "", "peers": []}
        try:
            self.calls()
        except UnsupportedError as error:
            # A call of an earlier round has not returned, such as the making of a group.
            if "MPI can make no group any more" not in error.what:
                raise
            self.leave_mpi()
            return
        except UnisonoError as error:
            record |= {"kind": type(error).__name__, "text": error.what}
            record |= {"peers": error.context.peers, "ended_s": time.monotonic()}
        except AssertionError as error:
            record |= {"kind": "WRONG", "text": str(error), "ended_s": time.monotonic()}
        if this.way == "mismatch" and record["kind"] == "CollectiveMismatchError":
            self.call(10_000, SMALL)
        try:
            self.shrink(record) if this.way == "kill" else self.leave()
        except UnisonoError:
            # A stopped rank may find alone that MPI can make no group any more.
            if not any(self.folder.glob(f"{this.number} left MPI *")):
                raise
            self.leave_mpi()
            return
        self.write()

    def write(self):
        """Write the record of this round."""
        with (self.folder / f"{self.me}.jsonl").open("a") as file:
            file.write(json.dumps(self.record) + "\n")

    def shrink(self, record):
        """Go on without the killed rank."""
        began_s = time.monotonic()
        try:
            dist.shrink_group([self.this.victim])
        except UnsupportedError as error:
            # The rank was killed while MPI made the group, or waited in its network.
            if "MPI can make no group any more" not in error.what:
                raise
            dist.shrink_group([self.this.victim], pg_options=CPUOptions(engine="auto"))
            self.leave_mpi()
        record["shrink_s"] = time.monotonic() - began_s
        self.group = dist.group.WORLD
        self.call(10_001, BIG)

    def leave(self):
        """Wake a stopped rank, and meet all ranks in the default group."""
        this = self.this
        self.mark("ended")
        spare = threading.Timer(WAKE_S, self.wake)
        spare.daemon = True
        if this.way == "stop" and this.alive[this.victim - 1] == self.me:
            # The stopped rank goes on while the others still end, or long after that.
            time.sleep(float(self.random.choice([0, 0.5])))
            self.wake()
        elif this.way == "stop" and not self.is_victim:
            spare.start()
        dist.destroy_process_group(self.group)
        self.group = dist.group.WORLD
        self.call(10_002, BIG)
        spare.cancel()

    def wake(self):
        """Let the stopped rank go on."""
        path = self.folder / f"{self.this.alive[self.this.victim]}.pid"
        os.kill(int(path.read_text()), signal.SIGCONT)

    def leave_mpi(self):
        """End the world, because a call of MPI has not returned."""
        self.left_mpi = True
        self.mark("left MPI")
        if self.record["kind"] == "WRONG":
            self.write()

    def mark(self, what):
        (self.folder / f"{self.this.number} {what} {self.me}").write_text(repr(time.monotonic()))

    def calls(self):
        """Make calls until one fails."""
        this = self.this
        is_timed = self.is_victim and this.in_data and this.way in ("kill", "stop", "abort")
        timer = threading.Timer(this.moment / 1e3, self.hurt)
        if is_timed and self.while_made:
            timer.start()
        # The first call makes MPI's communicator.
        self.call(0, SMALL)
        if is_timed and not self.while_made:
            timer.start()
        for k in range(1, 5000):
            n = BIG if this.in_data or (k == this.moment and self.random.integers(2)) else SMALL
            if k == this.moment and self.is_victim:
                if this.way == "mismatch":
                    n += 1
                if not this.in_data or this.way in ("late", "mismatch"):
                    self.hurt()
            kind = 0 if this.way == "mismatch" else int(self.random.integers(6))
            self.call(k, n, kind)

    def hurt(self):
        """Do what the round is about."""
        this = self.this
        self.mark("fault")
        if this.way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif this.way == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif this.way == "abort":
            self.group.abort()
        elif this.way == "late":
            # In user code until the others have ended, as far as they can know.
            others = [self.folder / f"{this.number} ended {r}" for r in this.alive if r != self.me]
            until_s = time.monotonic() + SHORT_S + HANG_S
            while not all(map(Path.exists, others)) and time.monotonic() < until_s:
                time.sleep(0.005)

    def call(self, k, n, kind=0):
        """Make one call, and compare the result."""
        group, this = self.group, self.this
        me, p = group.rank(), group.size()
        n, root = n if kind in (0, 1, 3) else max(n // p, 1) * p, k % p
        x = np.full(n, float(me + k))
        given, out = x.copy(), x
        try:
            if kind == 0:
                group.all_reduce(x)
                expected = sum(range(p)) + p * k
            elif kind == 1:
                group.broadcast(x, root)
                expected = root + k
            elif kind == 2:
                out = np.zeros(n)
                group.all_to_all_single(out, x)
                expected = np.repeat(np.arange(p) + k, n // p)
            elif kind == 3:
                dist.reduce(x, root, group=group)
                expected = sum(range(p)) + p * k if me == root else me + k
            elif kind == 4:
                out = np.zeros(n)
                parts = list(out.reshape(p, -1)) if me == root else None
                dist.gather(x[: n // p], parts, root, group=group)
                expected = np.repeat(np.arange(p) + k, n // p) if me == root else 0
            else:
                out = np.zeros(n // p)
                parts = list(x.reshape(p, -1)) if me == root else None
                dist.scatter(out, parts, root, group=group)
                expected = root + k
        except UnisonoError as error:
            # On a busy machine a call before the fault may time out in its data.
            is_late = this.way == "late" and re.search("(never|had not) entered it", error.what)
            if this.way == "mismatch" or is_late:
                assert np.array_equal(x, given), f"call {k}: the array has changed"
            x[:] = out[:] = -7
            raise
        expected = np.broadcast_to(expected, out.shape)
        if (bad := np.flatnonzero(out != expected)).size:
            raise AssertionError(
                f"call {k} of kind {kind}: {bad.size} of {out.size} numbers are wrong, first at "
                f"{bad[0]}: {out[bad[0]]}, expected {expected[bad[0]]}"
            )


# ---- the driver -------------------------------------------------------------------------------


def one_world(seed, ways, python=sys.executable):
    """Run one world; return the records of its rounds, and what was wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder, rounds = Path(name), plan(seed, ways)
        dead = {each.alive[each.victim] for each in rounds if each.way == "kill"}
        problems = start(folder, seed, ways, dead, python)
        found = list(records(folder, rounds, problems))
        for rank in set(range(SIZE)) - dead:
            if not (folder / f"{rank}.end").exists():
                problems.append(f"rank {rank} did not come to its end")
    return found, [f"seed {seed}: {problem}" for problem in problems]


def start(folder, seed, ways, dead, python):
    """Run the ranks to their end; return what was wrong with that."""
    if python == sys.executable and not needs_launcher():
        made, problems = [], []

        def context(*args, **named):
            made.append(SpawnContext(*args, **named))
            return made[0]

        with mock.patch.object(ranks, "SpawnContext", context):
            try:
                ranks.run(
                    life, SIZE, ranks="processes", engine="mpi", args=(str(folder), seed, ways),
                    timeout=LONG_S * 1.5, dead=dead,
                )  # fmt: skip
            except Exception as error:
                problems.append(f"{error}\n{error.__cause__ or ''}")
        # A rank that is to be killed may end by itself before.
        status = [process.exitcode for each in made for process in each.processes]
        if problems or any(code not in (0, -signal.SIGKILL) for code in status):
            problems.append(f"exit status by rank: {status}")
        return problems
    # Served here, because a launcher's first rank may be killed.
    with contextlib.closing(
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ) as store:
        words = ["--rank", str(folder), str(seed), str(store.port), *ways]
        command = [python, "-m", "tests.adapters.mpi.chaos", *words]
        mpiexec = Path(python).parent / "mpiexec"
        flags = ["--allow-run-as-root", "--oversubscribe", "--enable-recovery", "-n", str(SIZE)]
        done = subprocess.run(
            [mpiexec, *flags, *command], cwd=ROOT, text=True,
            # mpiexec does not tell that a signal ended a rank.
            env=clean_environment(PYTHONFAULTHANDLER="1"),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            timeout=4 * LONG_S, check=False,
        )  # fmt: skip
    return [done.stdout] if re.search("Traceback|Timeout \\(|Fatal", done.stdout) else []


def needs_launcher():
    """Whether the MPI library of this process has no world without its mpiexec."""
    from unisono.adapters.mpi.library import library

    return library().is_openmpi


def under_launcher(folder, seed, port, *ways):
    """Be a rank that mpiexec has started."""
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    store = TCPStore("127.0.0.1", int(port), is_master=False)
    dist.init_process_group(
        store=store, rank=rank, world_size=SIZE, timeout=LONG_S,
        pg_options=CPUOptions(engine="mpi"),
    )  # fmt: skip
    life(rank, folder, int(seed), ways)


def records(folder, rounds, problems):
    """Yield (round, seconds until the last rank raised, seconds to shrink); check each record."""
    by_rank = {
        rank: {row["number"]: row for row in map(json.loads, path.read_text().splitlines())}
        for rank in range(SIZE)
        if (path := folder / f"{rank}.jsonl").exists()
    }
    for this in rounds:
        victim = this.alive[this.victim]
        path = folder / f"{this.number} fault {victim}"
        rows = {r: by_rank.get(r, {}).get(this.number) for r in this.alive}
        problems += [f"{this}: {row}" for row in rows.values() if row and row["kind"] == "WRONG"]
        # A rank that left MPI when it shrank a group has a record.
        without = [r for r, row in rows.items() if row is None]
        if any((folder / f"{this.number} left MPI {r}").exists() for r in without):
            continue
        if any(folder.glob("* left MPI *")) and not path.exists():
            continue
        if not path.exists():
            # On a busy machine the calls before the fault may take longer than their time-out.
            kinds = {by_rank.get(r, {}).get(this.number, {}).get("kind") for r in this.alive}
            if this.way not in ("stop", "late") or kinds != {"CollectiveTimeoutError"}:
                problems.append(f"{this}: there was no fault: {kinds}")
            continue
        fault_s = float(path.read_text())
        rows = {r: by_rank.get(r, {}).get(this.number) for r in this.alive if r != victim}
        for rank, row in rows.items():
            if fault := problem_of(this, row, fault_s):
                problems.append(f"{this}: rank {rank}: {fault}")
        if this.way not in ("kill", "abort", "mismatch"):
            own = by_rank.get(victim, {}).get(this.number)
            if own is None or own["kind"] != ERRORS[this.way][0]:
                problems.append(f"{this}: the rank itself: {own}")
        good = [row for row in rows.values() if row is not None]
        if good:
            yield (
                this,
                max(row.get("ended_s", fault_s) for row in good) - fault_s,
                max(row.get("shrink_s", 0) for row in good),
            )


def problem_of(this, row, fault_s):
    """Return what is wrong with the record of a rank, or ""."""
    if row is None:
        return "it has no record"
    kind, text = ERRORS[this.way]
    limit_s = HANG_S + (SHORT_S if this.way in ("stop", "late") else 0)
    if row["kind"] != kind or not re.search(text.format(this.victim), row["text"]):
        return f"it has another error: {row}"
    if this.victim not in row["peers"]:
        return f"it blames others: {row}"
    if row["ended_s"] - fault_s > limit_s:
        return f"it raised after {row['ended_s'] - fault_s:.1f} s"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int, help="of each fault")
    parser.add_argument("--first", type=int, default=0, help="seed of the first world")
    parser.add_argument("--only", nargs="+", choices=ERRORS, default=list(ERRORS))
    flags = parser.parse_args()
    names = [name for name in os.environ.get("UNISONO_TEST_MPI", "").split(",") if name]
    wrong = sum(campaign(str(Path(name) / "bin/python"), flags) for name in names)
    sys.exit(bool(wrong + campaign(sys.executable, flags)))


def campaign(python, flags):
    """Run the rounds with the library of one environment; return the number of problems."""
    if python != sys.executable:
        # There the ranks start as they can: with or without its mpiexec.
        words = [str(flags.rounds), "--first", str(flags.first), "--only", *flags.only]
        command = [python, "-m", "tests.adapters.mpi.chaos", *words]
        env = {**os.environ, "UNISONO_TEST_MPI": ""}
        return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    from unisono.adapters.mpi.library import library

    print(f"{library().name}, seeds from {flags.first}", flush=True)
    count, problems, found = dict.fromkeys(flags.only, 0), [], []
    seed = flags.first
    while min(count.values()) < flags.rounds:
        rounds, wrong = one_world(seed, flags.only)
        found += rounds
        problems += wrong
        for this, _, _ in rounds:
            count[this.way] += 1
        print("\n".join(wrong) or f"{seed}", end="\n" if wrong else " ", flush=True)
        seed += 1
    print(f"\nseeds {flags.first} to {seed - 1}: {len(problems)} problems")
    for way, in_data in itertools.product(flags.only, (False, True)):
        mine = [row for row in found if (row[0].way, row[0].in_data) == (way, in_data)]
        if mine:
            late_s, shrink_s = ([row[i] for row in mine] for i in (1, 2))
            print(
                f"{way:9} {'data' if in_data else 'agreement':10} {len(mine):4} rounds: raised in "
                f"{statistics.median(late_s):.3f} s, at most {max(late_s):.3f} s; shrunk in "
                f"{statistics.median(shrink_s):.3f} s, at most {max(shrink_s):.3f} s"
            )
    return len(problems)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        under_launcher(*sys.argv[2:])
    else:
        main()
