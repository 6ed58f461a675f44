"""Compute the figures of docs/lab/0011-simulator.md: how far off the models are.

Run from the repository root: `python benchmarks/scale.py [--cases N]`. It needs no second process
and no measurement; the times of Summit are published. Nothing here is a test.

1. Summit, 64 MiB, in parts with other constants (`PARTS`). In each part one constant is fitted on
   some points. The other points are predictions.
2. Measurements of other machines that people published, in `MACHINES`.
3. Stages against events, on random schedules, networks and sizes where ranks share links.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from unisono.core.schedules import available, build
from unisono.core.schedules.ir import COLLECTIVES, ROOTED
from unisono.workbench.cli.simulate import local_of, machine_of
from unisono.workbench.simulate import Hosts, LinkSpec, Machine, Network, Pods, machine, simulate

SUMMIT = Path("src/unisono/workbench/simulate/shipped/summit.toml")
GPUS = (96, 192, 384, 768, 1536, 3072, 6144, 12288, 24576)
# Milliseconds of all_reduce of 64 MiB, from the bus bandwidths of NVIDIA's figure (+- 75 MB/s).
# Source: Massively Scale Your Deep Learning Training with NCCL 2.4, 2019.
PUBLISHED_MS = {
    "ring": (6.97, 7.50, 10.28, 18.2, 19.3, 22.1, 32.6, 45.7, 77.3),
    "node_tree": (6.68, 8.18, 8.70, 8.83, 9.42, 9.81, 11.3, 10.7, 10.55),
}


class Part(NamedTuple):
    """Constants for some numbers of GPUs.

    Attributes:
        name: In words.
        first: The least number of GPUs.
        values: Constants that differ from those of 8 bytes, in microseconds.
        fitted: The constant that is fitted: "gbps", of all links, or "latency_us".
        on: The numbers of GPUs on which it is fitted.
    """

    name: str
    first: int
    values: dict[str, float]
    fitted: str
    on: tuple[int, ...]


# Simple: NCCL's latencies (2.30, tuning.cc). LL: those of 8 bytes. A rack of Summit has 18 hosts.
PARTS = {
    "ring": (
        Part(
            "Simple", 96, {"inside_us": 3.4, "latency_us": 14.0, "start_us": 8.4},
            "gbps", (96, 192, 384),
        ),
        Part(
            "LL", 768, {"inside_us": 0.6, "latency_us": 2.216, "start_us": 6.6}, "gbps", (768,)
        ),
        Part("LL, farther hosts", 6144, {}, "latency_us", (6144,)),
    ),
    "node_tree": (
        Part("one rack", 96, {}, "gbps", (96,)),
        Part("several racks", 192, {}, "gbps", (192, 384)),
    ),
}  # fmt: skip


class Figure(NamedTuple):
    """A published time of an all_reduce, in microseconds, or busbw of nccl-tests, in GB/s.

    Attributes:
        source: Where it was published.
        net: A shipped machine.
        ranks: Number of GPUs.
        nbytes: Size of the vector.
        algorithm: Of NCCL.
        published: The number.
        busbw: Whether it is a bandwidth.
        values: Values of the machine that differ.
        slow: Whether it takes more than seconds.
        missed: Whether it is off by more than 10 %, and not explained.
    """

    source: str
    net: str
    ranks: int
    nbytes: int
    algorithm: str
    published: float
    busbw: bool = True
    values: dict[str, int] | None = None
    slow: bool = False
    missed: bool = False


GIB = 1 << 30


def formula(ranks: int, nbytes: int) -> float:
    """Return busbw of nvls_tree on DGX H100 by the formula of NCCL 2.30.7 (tuning.cc).

    Latencies and bandwidths of the machine are the same constants, so this is no measurement.
    """
    gbps = 8 * 45.5 * ranks / (2 * (ranks - 1))
    us = 25 + 2 * math.log2(ranks / 8) * 20.9 + nbytes / gbps / 1000
    return nbytes / us / 1000 * 2 * (ranks - 1) / ranks


MACHINES = [
    Figure("nccl-tests 175", "dgx-a100", 8, 4 * GIB, "ring", 232.5),
    Figure("nccl-tests 212", "dgx-h100", 8, 4 * GIB, "ring", 370),
    Figure("nccl-tests 212", "dgx-h100", 8, 4 * GIB, "nvls", 480),
    *(
        Figure("nccl 1455", "dgx-h100", ranks, 4 * GIB, "nvls", busbw, slow=True)
        for ranks, busbw in ((4, 370), (5, 420), (6, 440), (7, 460))
    ),
    Figure("nccl 812", "dgx-a100", 32, 4 * GIB, "ring", 192),
    Figure("nccl-tests 319", "dgx-h100", 16, 4 * GIB, "ring", 44.4, values={"interfaces": 1}),
    Figure(
        "nccl-tests 252", "dgx-a100", 8, GIB // 2, "ring", 93.5,
        values={"ranks_per_host": 4, "interfaces": 4},
    ),
    Figure("nccl-tests 119", "dgx-a100", 24, 23_000_000, "ring", 518, False, {"interfaces": 4}),
    Figure("nccl-tests 119", "dgx-a100", 24, 1 << 25, "ring", 733, False, {"interfaces": 4}),
    Figure(
        "formula of NCCL 2.30.7", "dgx-h100", 32, GIB // 2, "nvls_tree", formula(32, GIB // 2),
        slow=True,
    ),
    Figure("nccl-tests 283", "dgx-h100", 248 * 8, GIB // 2, "nvls_tree", 350, slow=True),
    Figure("nccl 1221", "dgx-h100", 16, 4 * GIB, "nvls_tree", 430, slow=True, missed=True),
    Figure("coreweave 43", "gb200-nvl72", 72, 8 * GIB, "nvls", 835, slow=True, missed=True),
]  # fmt: skip


def predicted(figure: Figure) -> float:
    """Return what the simulator says in place of a published number."""
    net, p, name = machine_of(figure.net), figure.ranks, figure.algorithm
    net.values.update(figure.values or {})
    local = local_of(net, p)
    if name == "ring":
        schedule, network = net.in_channels(build("all_reduce", name, p, local=local), local)
    else:
        schedule, network, _ = net.in_switches(name, p, figure.nbytes)
    us = simulate(schedule, figure.nbytes, network, net.costs(name), itemsize=4).last_us
    return figure.nbytes / us / 1000 * 2 * (p - 1) / p if figure.busbw else us


def machines() -> None:
    """Print published numbers and those of the simulator."""
    for figure in MACHINES:
        found = predicted(figure)
        off = 100 * found / figure.published - 100
        print(
            f"{figure.source:24}{figure.net:10}{figure.ranks:5}{figure.nbytes:12} "
            f"{figure.algorithm:10}{figure.published:8g} {found:8.1f} {off:+.1f} %", flush=True,
        )  # fmt: skip


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=400, help="random cases (400)")
    parser.add_argument("--most", type=int, default=24576, help="GPUs of the last point (24576)")
    flags = parser.parse_args()
    summit(flags.most)
    machines()
    stages(flags.cases)


def summit(most: int) -> None:
    """Print published and simulated times of 64 MiB."""
    net = machine("summit", SUMMIT.read_text(encoding="utf-8"))
    for algorithm, published in PUBLISHED_MS.items():
        points = dict(zip(GPUS, published, strict=True))
        values = net.of(algorithm)
        ends = [part.first for part in PARTS[algorithm][1:]] + [most + 1]
        for part, end in zip(PARTS[algorithm], ends, strict=True):
            if part.first > most:
                continue
            values |= part.values
            values |= fit(values, algorithm, part, points)
            print(f"{algorithm}, {part.name}: {part.fitted} {values[part.fitted]:.2f}")
            for gpus in (gpus for gpus in GPUS if part.first <= gpus < end):
                ms = time_ms(values, algorithm, gpus)
                off = 100 * (ms / points[gpus] - 1)
                how = "fitted" if gpus in part.on else "predicted"
                print(
                    f"  {gpus:6}: {ms:6.2f} ms, {points[gpus]:6.2f} published, {off:+.0f} % {how}"
                )


def fit(
    values: dict[str, Any], algorithm: str, part: Part, points: dict[int, float]
) -> dict[str, float]:
    """Return the constant for which the geometric mean of the fitted points is right."""
    low, high = (1.0, 100.0)
    for _ in range(12):
        middle = math.sqrt(low * high)
        trial = values | constant(part, middle)
        ratio = math.prod(time_ms(trial, algorithm, gpus) / points[gpus] for gpus in part.on)
        slow = ratio > 1
        low, high = (middle, high) if slow == (part.fitted == "gbps") else (low, middle)
    return constant(part, math.sqrt(low * high))


def constant(part: Part, value: float) -> dict[str, float]:
    """Return the values of a part's constant; links inside and between hosts are equally fast."""
    keys = ("gbps", "inside_gbps") if part.fitted == "gbps" else (part.fitted,)
    return dict.fromkeys(keys, value)


def time_ms(values: dict[str, Any], algorithm: str, gpus: int) -> float:
    """Return the time of all_reduce of 64 MiB; trees have pieces of 2 MiB, as NCCL's chunks."""
    net = Machine("summit", values, {}, {})
    depth = 32 if algorithm == "node_tree" else 1
    schedule = build("all_reduce", algorithm, gpus, pipeline=depth, local=6)
    network, costs = net.network(algorithm, gpus), net.costs(algorithm)
    result = simulate(schedule, 64 << 20, network, costs, itemsize=4, padded=True, contended=False)
    return result.last_us / 1000


def stages(count: int) -> None:
    """Print how far the times of stages are off those of events, where ranks share links."""
    errors = sorted(differences(count))
    exact = sum(error == 0 for error, _ in errors)
    near = sum(error < 0.05 for error, _ in errors)
    worst, where = errors[-1]
    print(f"stages against events: {count} cases, {100 * exact / count:.0f} % equal, ")
    print(f"  {100 * near / count:.1f} % within 5 %, worst {100 * worst:.0f} %: {where}")


def differences(count: int) -> Iterator[tuple[float, str]]:
    """Yield relative differences of random cases, each with its description."""
    choose = random.Random(1)
    while count:
        ranks = choose.choice((4, 6, 8, 12, 16, 24, 32))
        local = choose.choice([n for n in (2, 3, 4, 8) if ranks % n == 0 and n < ranks])
        collective = choose.choice([name for name in COLLECTIVES if name != "barrier"])
        algorithm = choose.choice(available(collective, ranks, local=local))
        nbytes = ranks * 4 << choose.randrange(0, 17)  # each block has an element at least
        root = choose.randrange(ranks) if collective in ROOTED else -1
        schedule = build(collective, algorithm, ranks, root, local=local)
        network = hosts(choose, ranks, local)
        times: dict[str, Any] = {
            method: simulate(schedule, nbytes, network, itemsize=4, method=method).last_ps
            for method in ("events", "stages")
        }
        error = abs(times["stages"] / times["events"] - 1)
        yield error, f"{collective} {algorithm}, {ranks} ranks, {local} per host, {nbytes} bytes"
        count -= 1


def hosts(choose: random.Random, ranks: int, local: int) -> Network:
    """Return random hosts with one or several interfaces, some in pods."""
    number = ranks // local
    pods = None
    if number % 2 == 0 and choose.random() < 0.4:
        pods = Pods(2, choose.choice((1.0, 2.0, 4.0)), 300_000, choose.random() < 0.5)
    inside, between = LinkSpec(600_000, 100), LinkSpec(2_200_000, choose.choice((3.0, 12.5)))
    interfaces = choose.choice([n for n in (1, 2) if local % n == 0])
    return Hosts(ranks, local, inside, between, interfaces=interfaces, pods=pods)


if __name__ == "__main__":
    main()
