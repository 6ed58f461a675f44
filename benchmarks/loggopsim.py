"""Compare LogGOPS of `unisono.workbench.simulate` with the LogGOPSim program, on random cases.

    python benchmarks/loggopsim.py FOLDER [--cases N] [--seed S] [--first I] [--json FILE]

FOLDER has LogGOPSim and txt2bin, built from the source of spcl/LogGOPSim, 76451de:

    apt-get install g++ make re2c gengetopt libgraphviz-dev
    cd src/LogGOPSim && sed -i 's/p <= 16 /p <= 64 /' LogGOPSim.cpp && make

Without the change the program prints the times of each rank for 16 ranks at most.

The cases take all families, an operation and an algorithm each, by turns. Case I depends on the
seed and on I, so `--seed S --first I --cases 1` repeats it. A case is equal if each rank ends at
the same nanosecond, and the number of events is the same. If operations never end, both programs
must report that. The exit status is 1 if a case differs.

tests/workbench/simulate/golden.json has some of the cases, as `--json` writes them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.core.schedules import available, build
from unisono.core.schedules.ir import COLLECTIVES, ROOTED, VECTOR_COLLECTIVES
from unisono.core.schedules.registry import entry
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate import LogGOPS, Program, Traffic, program_of, to_goal
from unisono.workbench.simulate.evaluators.loggops import run
from unisono.workbench.simulate.evaluators.traffic import SEND, WORK

NS = 1000
MOST_RANKS = 64
MOST_BYTES = 16 << 20

# All algorithms serve 8 ranks on hosts of 2.
FAMILIES = [(name, algorithm) for name in COLLECTIVES for algorithm in available(name, 8, local=2)]


def main() -> int:
    """Print a line per family, and the cases that differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of LogGOPSim and txt2bin")
    parser.add_argument("--cases", type=int, default=7000, help="number of cases (7000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (0)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the cases (1)")
    parser.add_argument("--json", type=Path, help="write the cases and LogGOPSim's results there")
    flags = parser.parse_args()
    numbers = range(flags.first, flags.first + flags.cases)
    rows, differing = [], 0
    counts = {family: [0, 0, 0, 0] for family in FAMILIES}
    for number, case in zip(numbers, cases(flags.seed, numbers), strict=True):
        theirs, mine = loggopsim(flags.folder, case), result(case)
        rows.append(case | theirs)
        tally = counts[case["collective"], case["algorithm"]]
        tally[0] += 1
        tally[1] += theirs == mine
        tally[2] += theirs["finish"] is None
        tally[3] += theirs["events"] or 0
        if theirs != mine:
            differing += 1
            print(f"case {number} differs: {case}\n  LogGOPSim {theirs}\n  unisono {mine}")
    print(f"{'family':36}{'cases':>8}{'equal':>8}{'endless':>9}{'events':>12}")
    for (collective, algorithm), tally in counts.items():
        print("{:36}{:8}{:8}{:9}{:12,}".format(f"{collective} {algorithm}", *tally))
    print(f"{len(rows)} cases of {len(FAMILIES)} families, seed {flags.seed}: {differing} differ")
    if flags.json:
        flags.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", "utf-8")
    return 1 if differing else 0


def cases(seed: int, numbers: range) -> Iterator[dict[str, Any]]:
    """Yield random cases: the arguments of `build`, sizes, and parameters in nanoseconds."""
    for number in numbers:
        choose = random.Random(f"{seed}/{number}")
        yield draw(choose, *FAMILIES[number % len(FAMILIES)])


def draw(choose: random.Random, collective: str, algorithm: str) -> dict[str, Any]:
    """Return a random case of a family.

    Zeros are frequent, because they make events of equal time. The eager size is that of a message
    or 1 less in most cases, so that some messages have a rendezvous.
    """
    found, ranks, local = entry(collective, algorithm), 0, 1
    while not ranks or algorithm not in available(collective, ranks, local=local):
        ranks = round(2 ** choose.uniform(1, 6))
        local = choose.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    size = 1 << choose.randrange(25) if choose.random() < 0.3 else int(2 ** choose.uniform(0, 24))
    case = {
        "collective": collective,
        "algorithm": algorithm,
        "p": ranks,
        "root": choose.randrange(ranks) if collective in ROOTED else -1,
        "pipeline": choose.choice((1, 2, 3, 8, 16)) if found.pipelined else 1,
        "local": local if found.two_level else 1,
        "nbytes": size if collective in VECTOR_COLLECTIVES else max(size, ranks),
        "work": choose.choice((0, 0, 1, 3)),
        "blocking": choose.random() < 0.25,
        "L": choose.choice((0, 1, 500, choose.randrange(5000))),
        "o": choose.choice((0, 1, 200, choose.randrange(3000))),
        "g": choose.choice((0, 5, 1000, choose.randrange(3000))),
        "G": choose.choice((0, 1, 2, 6)),
        "O": choose.choice((0, 0, 1, 7)),
    }
    graph = program(case)
    sizes = [n for n, kind in zip(graph.size, graph.kind, strict=True) if kind != WORK]
    case["S"] = choose.choice((0, 2**31 - 1, *[choose.choice(sizes) - k for k in (0, 0, 1, 1)]))
    return case


def program(case: dict[str, Any]) -> Program:
    """Return the program of a case.

    `work` is the nanoseconds per byte of local copies and reductions; without it they have no rows.
    If `blocking`, a rank goes on when a send is done, otherwise when the send has begun.
    """
    names = ("collective", "algorithm", "p", "root", "pipeline", "local")
    schedule = build(*(case[name] for name in names))
    size, work = case["nbytes"], case["work"]
    rows = Traffic(schedule, size, work=work > 0, message_bytes=size).all_rows()
    graph = program_of(rows, case["p"], ps_per_byte=NS * work)
    if case["blocking"]:
        for i in (i for i, kind in enumerate(graph.kind) if kind == SEND):
            graph.on_done[i], graph.on_start[i] = graph.on_start[i], graph.on_done[i]
    return graph


def model(case: dict[str, Any]) -> LogGOPS:
    """Return the parameters of a case."""
    return LogGOPS(*(NS * case[name] for name in "LogGO"), eager_bytes=case["S"])


def result(case: dict[str, Any]) -> dict[str, Any]:
    """Return the times of all ranks in nanoseconds, and the number of events.

    Both are None if some operations never end.
    """
    try:
        done = run(program(case), model(case))
    except InvalidArgumentError:
        return {"finish": None, "events": None}
    return {"finish": [ps / NS for ps in done.finish_ps], "events": done.events}


def loggopsim(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Return what LogGOPSim prints for a case, in the form of `result`."""
    with tempfile.TemporaryDirectory() as name:
        text, binary = Path(name) / "case.goal", Path(name) / "case.bin"
        text.write_text(to_goal(program(case)), "utf-8")
        subprocess.run([folder / "txt2bin", "-i", text, "-o", binary], check=True)
        options = [f"-{letter}{case[letter]}" for letter in "LogGOS"]
        done = subprocess.run(
            [folder / "LogGOPSim", "-f", binary, *options],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    if "queue on host" in done:
        return {"finish": None, "events": None}
    times = [int(time) for time in re.findall(r"^Host \d+: (\d+)$", done, re.MULTILINE)]
    events = re.search(r"Events: (\d+)", done)
    if len(times) != case["p"] or not events:
        raise SystemExit(f"LogGOPSim printed no time of each rank; is it built as stated? {done}")
    return {"finish": times, "events": int(events[1])}


if __name__ == "__main__":
    sys.exit(main())
