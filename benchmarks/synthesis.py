"""Compare `unisono synthesize` with published results of SCCL, TACCL, TE-CCL and ForestColl.

Run `python benchmarks/synthesis.py [SECONDS]`; each row may search for SECONDS (60). All rows are
all_gather. "of bound" is the time over the least time of any algorithm on the same links.

Sources, as public repositories:
  SCCL        microsoft/msccl-tools 030a750f, SYNTHESIS.md.
  TE-CCL      microsoft/TE-CCL c128bf24, output_provided/NDv2_output/2_chassis/AllGather/Fast.
  TACCL       The same, TACCL_NDv2_2_chassis_AllGather.csv, on slower links between hosts.
  ForestColl  liangyuRain/ForestColl 3c13aee8, README.md and topologies.py: a formula.
"""

from __future__ import annotations

import sys

from unisono.core.schedules import select
from unisono.workbench.cli.simulate import local_of, machine_of, topology_on
from unisono.workbench.simulate import Machine, machine
from unisono.workbench.simulate.bounds import least_us
from unisono.workbench.synthesize.plans import Problem
from unisono.workbench.synthesize.search import SearchLimits, search

A100 = """ranks_per_host = 8
interfaces = 8
inside_gbps = 300
gbps = 25
"""
# Between hosts 8 of 16 blocks pass one link of 105 us/MB.
TACCL = {4_000_000: 216.5, 256_000: 25.26}
TE_CCL = {16_000_000: 700.0, 1_000_000: 48.75, 64_000: 6.08, 1_000: 4.137}


def row(net: Machine, p: int, nbytes: int, published: str, seconds: float) -> None:
    """Search, and print a row."""
    network, topology = net.network("", p), topology_on(net, p)
    problem = Problem("all_gather", p, local_of(net, p), -1, nbytes, net, network)
    found = search(
        problem,
        SearchLimits(100_000, seconds, 0),
        lambda name: select("all_gather", nbytes, topology, name).pipeline,
    )
    best, bound_us = found.best[0], least_us("all_gather", nbytes, network, net.costs(""))
    assert found.shipped is not None
    print(
        f"{net.name:<10}{nbytes:>14,}{published:>34}{bound_us:>11,.2f}{best.us:>11,.2f}"
        f"{best.us / bound_us:>7.3f}{found.shipped.us / best.us:>9.2f}{best.schedule.rounds:>5}"
        f"  {best.plan}", flush=True,
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    print(
        f"{'net':<10}{'bytes':>14}{'published':>34}{'bound us':>11}{'found us':>11}"
        f"{'of it':>7}{'shipped':>9}{'steps':>5}  plan"
    )
    dgx, ndv2 = machine_of("dgx-1"), machine_of("ndv2-2")
    row(dgx, 8, 256, "SCCL: 2 steps", seconds)
    row(dgx, 8, 64 << 20, "SCCL: 3 steps, 7/6 rounds", seconds)
    for nbytes, us in TE_CCL.items():
        row(ndv2, 16, nbytes, f"TE-CCL: {us:,.2f} us", seconds)
    for nbytes, us in TACCL.items():
        bound_us = nbytes / 2e6 * 105 + 1.3
        row(ndv2, 16, nbytes, f"TACCL: {us / bound_us:.2f} of its bound", seconds)
    row(machine("2 A100", A100), 16, 1 << 30, "ForestColl: 346.67 GB/s = the bound", seconds)


if __name__ == "__main__":
    main()
