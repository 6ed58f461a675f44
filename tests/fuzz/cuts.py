"""Random cuts of hosts and of links between hosts, for 1 to 60 seconds, with and without launcher.

usage: cuts.py [SEED] [ROUNDS] [--keep]

Round k uses SEED + k. The hosts are network namespaces, so this needs root. Each process writes a
line before and after whatever it waits for. No wait may last longer than LIMIT_S, no sum may be
wrong, and a cut of at most SHORT_S without a launcher may only delay the ranks.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from unisono.testing.hosts import Host, Network, why_no_hosts

LIMIT_S = 20.0
BUSY_S = 10.0
"""What a busy machine may add."""

SHORT_S = 5.0
WATCH_S = 25.0
"""How long a round goes on after the cut."""

NOWHERE = "lladdr 02:00:00:00:00:01 dev eth0 nud permanent"
"""An address of no interface: what is sent there is lost."""

MODES = {
    "direct": (False, "plain"),
    "alone": (False, "elastic"),
    "restart": (True, "plain"),
    "elastic": (True, "elastic"),
}
"""Whether there is a launcher, and the kind of the program."""

SCRIPT = """
import json, os, sys, time
import numpy as np
import unisono as dist
from unisono.errors import UnisonoError
from unisono.parallel import ElasticJob

folder, is_elastic, count = sys.argv[1], sys.argv[2] == "elastic", int(sys.argv[3])
log = os.open(f"{folder}/{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def tell(kind, **fields):
    line = {"kind": kind, "s": time.monotonic(), "rank": os.environ["RANK"], **fields}
    os.write(log, (json.dumps(line) + "\\n").encode())

def add():
    size, rank = dist.get_world_size(), dist.get_rank()
    x = np.full(count, rank + 1.0)
    x[0] = os.path.exists(f"{folder}/over")
    dist.all_reduce(x)
    if not (x[1:] == size * (size + 1) / 2).all():
        tell("wrong", sum=x[1:].tolist()[:8], size=size)
    return x[0] > 0

tell("began")
try:
    dist.init_process_group()
    tell("met", size=dist.get_world_size())
    job = ElasticJob({"w": np.zeros(4)}) if is_elastic else None
    is_over = False
    while not is_over:
        if job is None:
            is_over = add()
        else:
            with job.step() as step:
                is_over = add()
                step.commit()
        tell("step", size=dist.get_world_size())
        time.sleep(0.05)
except UnisonoError as error:
    tell("error", error=type(error).__name__, text=str(error)[:300])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise
    os._exit(1)
tell("end")
os._exit(0)
"""


class Round:
    """One job, and one cut."""

    def __init__(self, seed: int, folder: str) -> None:
        self.random = random.Random(seed)
        self.folder = Path(folder)
        self.count = self.random.randint(2, 4)
        self.per_host = self.random.choice([1, 1, 2])
        self.mode = self.random.choice(list(MODES))
        self.engine = self.random.choice(["native", "native", "reference"])
        self.elements = self.random.choice([2, 1000, 300_000])
        self.span_s = self.random.uniform(
            *self.random.choice([(1.0, 5.0), (5.0, 15.0), (15.0, 60.0)])
        )
        self.what = "link" if self.count > 2 and self.random.random() < 0.3 else "host"
        self.victims = self.random.sample(range(self.count), 2 if self.what == "link" else 1)
        self.processes: list[subprocess.Popen[bytes]] = []

    def __str__(self) -> str:
        return (
            f"{self.mode} on {self.count} x {self.per_host}, {self.engine}, {self.elements} "
            f"elements: {self.what} {[each + 1 for each in self.victims]} for {self.span_s:.1f} s"
        )

    def run(self) -> collections.Counter[str]:
        """Run the job, and return what happened."""
        with contextlib.ExitStack() as stack:
            network = stack.enter_context(Network(self.count))
            stack.callback(self.end)
            script = self.folder / "script.py"
            script.write_text(SCRIPT)
            for index, host in enumerate(network.hosts):
                self.start(index, host, network.hosts[0], str(script))
            self.wait(lambda: len(self.stepping(0.0)) == self.count * self.per_host, 60.0)
            time.sleep(self.random.random())
            cut_s = time.monotonic()
            self.cut(network)
            time.sleep(min(self.span_s, WATCH_S))
            self.heal(network)
            time.sleep(max(0.0, WATCH_S - self.span_s))
            (self.folder / "over").touch()
            with contextlib.suppress(TimeoutError):
                self.wait(lambda: not self.living(), LIMIT_S + BUSY_S)
            return self.check(cut_s, time.monotonic())

    def start(self, index: int, host: Host, first: Host, script: str) -> None:
        environment = os.environ | {"UNISONO_TOKEN": "cuts", "UNISONO_ENGINE": self.engine}
        has_launcher, kind = MODES[self.mode]
        program = [script, str(self.folder), kind, str(self.elements)]
        commands = [[sys.executable, *program]] * self.per_host
        if has_launcher:
            options = (
                f"--nnodes 1:{self.count} --rdzv-backend c10d --rdzv-endpoint {first.v4}:29400"
            )
            options += f" --rdzv-conf last_call_timeout=2 --max-restarts 8 -n {self.per_host}"
            options += " --restart worker" if kind == "elastic" else ""
            commands = [[sys.executable, "-m", "unisono", "run", *options.split(), *program]]
        for local, command in enumerate(commands):
            if not has_launcher:
                ranks = {"RANK": index * self.per_host + local}
                ranks |= {"WORLD_SIZE": self.count * self.per_host}
                environment |= {name: str(value) for name, value in ranks.items()}
                environment |= {"MASTER_ADDR": first.v4, "MASTER_PORT": "29500"}
            with open(self.folder / f"{index}.{local}.out", "wb") as out:
                self.processes.append(
                    subprocess.Popen(host.inside(*command), env=environment, stdout=out, stderr=out)
                )

    def cut(self, network: Network) -> None:
        first = network.hosts[self.victims[0]]
        if self.what == "host":
            network.cut(first)
            return
        second = network.hosts[self.victims[1]]
        for one, far in ((first, second), (second, first)):
            one.ip(*(f"neigh replace {to} {NOWHERE}" for to in (far.v4, far.v6)))

    def heal(self, network: Network) -> None:
        first = network.hosts[self.victims[0]]
        if self.what == "host":
            network.restore(first)
            return
        second = network.hosts[self.victims[1]]
        for one, far in ((first, second), (second, first)):
            one.ip(*(f"neigh del {to} dev eth0" for to in (far.v4, far.v6)))

    def lines(self) -> dict[int, list[dict[str, Any]]]:
        """Return the lines of each process that has written some."""
        found = {}
        for path in self.folder.glob("*.log"):
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1].splitlines()
            if whole:
                found[int(path.stem)] = [json.loads(line) for line in whole]
        return found

    def stepping(self, since_s: float) -> list[int]:
        """Return the processes that have made a step since a time."""
        lines = self.lines().items()
        return [
            pid
            for pid, each in lines
            if any(line["kind"] == "step" and line["s"] > since_s for line in each)
        ]

    def living(self) -> list[int]:
        """Return the processes that run, agents and ranks."""
        agents = [process.pid for process in self.processes if process.poll() is None]
        return [*agents, *(pid for pid in self.lines() if os.path.exists(f"/proc/{pid}"))]

    def wait(self, condition: Any, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end_s:
                raise TimeoutError(f"not within {limit_s:g} s")
            time.sleep(0.1)

    def check(self, cut_s: float, end_s: float) -> collections.Counter[str]:
        """Compare the lines with what may happen."""
        seen: collections.Counter[str] = collections.Counter([self.mode, self.what])
        living, after = self.living(), []
        for pid, lines in self.lines().items():
            times = [line["s"] for line in lines] + ([end_s] if pid in living else [])
            waits = [later - former for former, later in itertools.pairwise(times)]
            longest_s = max(waits, default=0.0)
            assert longest_s < self.limit_s() + BUSY_S, f"process {pid} waited {longest_s:.1f} s"
            wrong = [line for line in lines if line["kind"] == "wrong"]
            assert not wrong, wrong
            ends = [line for line in lines if line["kind"] in ("error", "end")]
            for line in ends:
                seen[line.get("error", "end")] += 1
            if self.mode == "direct" and self.span_s < SHORT_S:
                assert [line["kind"] for line in ends] == ["end"], f"process {pid}: {ends}"
            after += [line["s"] - cut_s for line in lines if line["kind"] == "step"]
        # The first host has the store, so it can go on alone if the agents allow that.
        if self.mode == "restart" and self.what == "host":
            pauses = sorted(after)
            gaps = [b - a for a, b in itertools.pairwise(pauses)]
            assert max(gaps) < LIMIT_S + BUSY_S, f"no step for {max(gaps):.1f} s"
            seen["longest pause in s"] = max(seen["longest pause in s"], round(max(gaps)))
        return seen

    def limit_s(self) -> float:
        """Return how long a wait may last. docs/explanation/membership.md has the exception."""
        if MODES[self.mode][1] == "elastic" and self.what == "link":
            # The generations are formed in the store, and connected when the link is back.
            return LIMIT_S + min(self.span_s, WATCH_S)
        return LIMIT_S

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        with contextlib.suppress(TimeoutError):
            self.wait(lambda: not self.living(), 10.0)
        for process in self.processes:
            process.kill()
            process.wait()
        for pid in self.lines():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def main() -> int:
    """Run the rounds; print each failure with its seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", nargs="?", type=int, default=1)
    parser.add_argument("rounds", nargs="?", type=int, default=20)
    parser.add_argument("--keep", action="store_true", help="keep the lines of the processes")
    options = parser.parse_args()
    if (why_not := why_no_hosts()) is not None:
        print(f"skipped: {why_not}")
        return 0
    total: collections.Counter[str] = collections.Counter()
    failed = []
    for seed in range(options.seed, options.seed + options.rounds):
        folder = tempfile.mkdtemp(prefix="cuts-")
        one = Round(seed, folder)
        try:
            seen = one.run()
            total += seen
            print(f"seed {seed}: {one}: {dict(seen)}", flush=True)
        except (AssertionError, TimeoutError) as error:
            failed.append(seed)
            print(f"seed {seed}: {one}: FAILED: {error}\n    {folder}", flush=True)
            continue
        if not options.keep:
            shutil.rmtree(folder)
    print(f"{options.rounds} rounds from seed {options.seed}, failed {failed}:", dict(total))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
