"""The table, the summary and the JSON document of `unisono bench`."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from statistics import geometric_mean
from typing import Any

from unisono.core.platform.machine import busy_text, cpu_model, load_average, usable_cores
from unisono.core.platform.posix import require_posix
from unisono.launcher.output.colours import has_colours
from unisono.workbench.bench.algorithms import label
from unisono.workbench.bench.plan import OPS, BenchPlan

ReportRow = dict[str, Any]


def bandwidths(row: ReportRow, library: str) -> tuple[float, float]:
    """Return algbw and busbw in GB/s (1e9 bytes) of one library in one row.

    algbw = size / time;  busbw = algbw * factor of the operation.
    """
    time_s = row["results"][library]["time_us"] * 1e-6
    algbw = row["size_bytes"] / time_s / 1e9 if time_s else 0.0
    return algbw, algbw * OPS[row["op"]].bus_factor(row["ranks"])


def ratio(row: ReportRow, peer: str, of: str = "time_us") -> float | None:
    """Return unisono's time divided by a peer's; None if the peer was not measured.

    With several sets of ranks it is unisono's time in the peer's processes.

    Args:
        row: One line of the table.
        peer: The other library.
        of: "time_us", the median over rounds, or "best_us", the fastest round.
    """
    own, other = row["results"]["unisono"], row["results"][peer]
    return float(other.get(f"unisono_{of}", own[of]) / other[of]) if other else None


def summary(rows: Sequence[ReportRow], peers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return per operation and peer the geometric mean of the ratios and the sizes above 1."""
    found: dict[str, dict[str, Any]] = {}
    for op in dict.fromkeys(row["op"] for row in rows):
        of_op = [row for row in rows if row["op"] == op]
        found[op] = {
            "wrong": sum(row["results"]["unisono"]["wrong"] or 0 for row in of_op),
            "avg_busbw": sum(bandwidths(row, "unisono")[1] for row in of_op) / len(of_op),
        }
        for peer in peers:
            ratios = [(r, row["size_bytes"]) for row in of_op if (r := ratio(row, peer))]
            if ratios:
                best = [r for row in of_op if (r := ratio(row, peer, "best_us"))]
                worst, where = max(ratios)
                found[op][peer] = {
                    "geometric_mean": geometric_mean([r for r, _ in ratios]),
                    "geometric_mean_best": geometric_mean(best),
                    "cells": len(ratios),
                    "above_1": sorted(nbytes for r, nbytes in ratios if r > 1),
                    "worst": worst,
                    "worst_bytes": where,
                }
    return found


def document(plan: BenchPlan, table: ReportTable, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the document of `--json`."""
    return {
        "command": ["unisono", *arguments],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {**table.machine, "load_after": round(load_average(), 2)},
        "group": table.group,
        "plan": plan.fields(),
        "notes": table.notes,
        "summary": summary(table.rows, plan.peers),
        "rows": table.rows,
    }


def machine() -> dict[str, Any]:
    """Return the properties of the machine that figures depend on."""
    require_posix("unisono bench")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "load_before": round(load_average(), 2),
    }


def fixed(number: float, width: int = 7) -> str:
    """Return a number with 2, 1 or 0 decimals, or an exponent: the first text that fits."""
    for decimals in (2, 1, 0):
        if len(text := f"{number:.{decimals}f}") <= width:
            return text
    return f"{number:.1e}"


class ReportTable:
    """nccl-tests' table with two further columns per peer; rich colours it on a terminal.

    Peers are libraries and further algorithms.

    Args:
        plan: The settings of the benchmark.
    """

    def __init__(self, plan: BenchPlan) -> None:
        self._plan = plan
        self._console = _console()
        self._widths = list(_WIDTHS)
        for peer in plan.peers:
            self._widths += [max(8, len(label(peer))), max(6, len(label(peer)) + 1)]
        self.machine = machine()
        self.group = ""
        self.rows: list[ReportRow] = []
        self.notes: list[str] = []

    def take(self, message: dict[str, Any]) -> None:
        """Print and store one message of the ranks."""
        kind = message.pop("kind")
        if kind == "start":
            self.group = message["group"]
            self.machine |= message["versions"]
            self._preamble(message["versions"])
        elif kind == "note":
            self.notes.append(message["text"])
            self._comment(f"note: {message['text']}")
        else:
            if not self.rows or self.rows[-1]["op"] != message["op"]:
                self._footer()
                self._header(message["op"])
            self.rows.append(message)
            self._row(message)

    def end(self) -> None:
        """Print the lines after the last row."""
        self._footer()

    def _preamble(self, named: dict[str, str]) -> None:
        plan, host = self._plan, self.machine
        rounds, iters = plan.loop.rounds, plan.loop.iters
        versions = ", ".join(f"{name} {version}" for name, version in named.items())
        loop = f"{iters} calls" if iters else "calls for about 5 ms"
        hosts = f" on {plan.hosts} hosts" if plan.hosts else ""
        self._comment(f"unisono bench: {plan.nprocs} ranks{hosts}; {self.group}")
        self._comment(
            f"{host['cpu']}, {host['cores']} cores, {host['memory_gib']} GiB, {host['system']}; "
            f"load {host['load_before']}"
        )
        if busy := busy_text():
            self._comment(f"{busy}: times are upper limits")
        self._comment(f"python {host['python']}, {versions}")
        self._comment(
            f"time: median of {rounds} rounds of {loop}, mean per call on the slowest rank"
            + ("; the columns take turns" if plan.peers else "")
        )
        if plan.algorithm:
            self._comment(f"time, algbw, busbw: {label(plan.algorithm)}")
        if plan.loop.load:
            self._comment(f"{plan.loop.load} busy processes beside the ranks")
        if plan.loop.bind:
            self._comment("each rank is bound to a core")

    def _header(self, op: str) -> None:
        names = ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]
        units = ["(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", ""]
        for peer in self._plan.peers:
            names += [label(peer), f"/{label(peer)}"]
            units += ["(us)", "ratio"]
        self._comment("")
        self._comment(f"Collective test starting: {op}")
        if op == "sendrecv":
            self._comment("ping-pong; time is half of the round trip")
            pairs = " ".join(f"{low}-{high}" for low, high in self._plan.pairs())
            self._comment(f"pairs of ranks: {pairs}")
        for cells in (names, units):
            self._print("#" + self._aligned(cells)[1:], "bold")

    def _row(self, row: ReportRow) -> None:
        own = row["results"]["unisono"]
        algbw, busbw = bandwidths(row, "unisono")
        wrong = "N/A" if own["wrong"] is None else str(own["wrong"])
        cells = [str(row[k]) for k in ("size_bytes", "count", "dtype", "redop", "root")]
        cells += [fixed(own["time_us"]), fixed(algbw), fixed(busbw), wrong]
        styles = [""] * 8 + ["bold red" if own["wrong"] else ""]
        for peer in self._plan.peers:
            value, other = ratio(row, peer), row["results"][peer]
            cells += [fixed(other["time_us"]) if other else "-", _ratio_text(value)]
            styles += ["", "" if value is None else "red" if value > 1 else "green"]
        self._print(self._aligned(cells), *styles)

    def _footer(self) -> None:
        """Print the summary of the last operation."""
        if not self.rows:
            return
        op = self.rows[-1]["op"]
        figures = summary(self.rows, self._plan.peers)[op]
        wrong = figures["wrong"]
        if self._plan.loop.check:
            self._comment(f"Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
        if op != "barrier":
            self._comment(f"Avg bus bandwidth    : {figures['avg_busbw']:.4g}")
        for peer in self._plan.peers:
            if peer in figures:
                name = label(self._plan.algorithm or "unisono")
                self._comment(_peer_line(name, label(peer), figures[peer]))
        self._comment(f"Collective test concluded: {op}")

    def _comment(self, text: str) -> None:
        self._print(f"# {text}".rstrip(), "dim")

    def _print(self, text: str, *styles: str) -> None:
        """Print a line, in one style or in one per column."""
        if self._console is None:
            print(text.rstrip(), flush=True)
            return
        from rich.text import Text

        line = Text(text, style=styles[0] if len(styles) == 1 else "")
        if len(styles) > 1:
            for (start, end), style in zip(self._spans(), styles, strict=True):
                line.stylize(style, start, end)
        self._console.print(line, soft_wrap=True)

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield the begin and the end of each column in a line."""
        start = 0
        for width in self._widths:
            yield start, start + 2 + width
            start += 2 + width

    def _aligned(self, cells: Sequence[str]) -> str:
        pairs = zip(cells, self._spans(), strict=True)
        return "".join(cell.rjust(end - start) for cell, (start, end) in pairs)


def _console() -> Any:
    """Return rich's console if rich is installed and standard output shows colours."""
    if not has_colours(sys.stdout) or importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console

    # Otherwise TERM, which FORCE_COLOR overrules, would decide again.
    return Console(highlight=False, force_terminal=True, color_system="standard")


_WIDTHS = (12, 12, 8, 6, 4, 7, 7, 7, 6)


def _ratio_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _peer_line(own: str, peer: str, figures: dict[str, Any]) -> str:
    above = len(figures["above_1"])
    return (
        f"{own} / {peer:<10} : geometric mean {_ratio_text(figures['geometric_mean'])} "
        f"(best rounds {_ratio_text(figures['geometric_mean_best'])}), "
        f"worst {_ratio_text(figures['worst'])} at {figures['worst_bytes']} B, "
        f"{above} of {figures['cells']} above 1"
    )
