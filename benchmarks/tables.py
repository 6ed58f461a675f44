"""Print the table of benchmarks/README.md for results of `unisono bench`.

python benchmarks/tables.py benchmarks/results/2-ranks.json
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from typing import Any

PEERS = {"mpi": "MPICH", "gloo": "Gloo"}


def _ratios(rows: list[dict[str, Any]], peer: str, what: str) -> list[tuple[float, int]]:
    """Return (unisono's time over the peer's, size in bytes) of every row that has both."""
    return [
        (row["results"]["unisono"][what] / row["results"][peer][what], row["size_bytes"])
        for row in rows
        if row["results"].get(peer)
    ]


def _mean(ratios: list[tuple[float, int]]) -> str:
    return f"{math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios)):.2g}"


def _cells(rows: list[dict[str, Any]], peer: str) -> list[str]:
    ratios = _ratios(rows, peer, "time_us")
    if not ratios:
        return ["-"] * 4
    worst, nbytes = max(ratios)
    above = sum(ratio > 1 for ratio, _ in ratios)
    best = _mean(_ratios(rows, peer, "best_us"))
    return [_mean(ratios), best, f"{above} of {len(ratios)}", f"{worst:.2g} at {nbytes} B"]


def main() -> None:
    """Read a file of results, print its table."""
    with open(sys.argv[1], encoding="utf-8") as file:
        document = json.load(file)
    by_op = defaultdict(list)
    for row in document["rows"]:
        by_op[row["op"]].append(row)
    peers = [p for p in PEERS if any(p in row["results"] for row in document["rows"])]
    head = ["operation"]
    for peer in peers:
        head += [f"/ {PEERS[peer]}", "best", "above 1", "worst"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for op, rows in [*by_op.items(), ("all", document["rows"])]:
        print("| " + " | ".join([op, *(c for peer in peers for c in _cells(rows, peer))]) + " |")


if __name__ == "__main__":
    main()
