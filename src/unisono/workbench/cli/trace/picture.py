"""The picture of `unisono trace -o FILE.svg`: a row for each rank, a bar for each call."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from unisono.core.recorder.flight_recorder import RankRecords
from unisono.core.recorder.records import TraceRecord
from unisono.workbench.bench.plot import save
from unisono.workbench.trace.joined import JoinedGroup, begin_of, end_of, read_ns

# Okabe and Ito's colours, which colour-blind readers can distinguish. Rarer operations are grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
OTHER = "#888888"
_ABSENT = "#C00000"
PALE = 0.35

_ROW_INCHES = 0.17
_LEAST_INCHES = 4.0

# More bars than these make an SVG that viewers load slowly, so they become pixels.
_MOST_PATHS = 20_000

# Shares of the picture's width: shorter waits get no mark, and shorter bars no number.
_MARKED = 0.02
_NUMBERED = 0.05
_MOST_NUMBERED = 16

_NOT_FAILED = ("completed", "ended", "running", "cancelled")

Part = tuple[float, float]
"""Begin and length, in the unit of the time axis."""


class _Bar(NamedTuple):
    """A call of one rank, which waits for the last rank until `ready_ns`."""

    rank: int
    record: TraceRecord
    begin_ns: int
    ready_ns: int
    end_ns: int

    @property
    def has_failed(self) -> bool:
        return self.record.outcome not in _NOT_FAILED


def draw(
    ranks: Mapping[int, RankRecords], groups: Sequence[JoinedGroup], title: str, path: str
) -> None:
    """Draw the calls of all ranks.

    Args:
        ranks: With times on one axis, at least one.
        groups: Of `join`, with these ranks.
        title: Above the picture.
        path: Picture file; its ending chooses the format.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    # A backend without a display, even if MPLBACKEND names another.
    matplotlib.use("agg")
    # A name with two $ is no formula.
    matplotlib.rcParams["text.parse_math"] = False
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    height = max(_LEAST_INCHES, 2.0 + _ROW_INCHES * len(ranks))
    figure, panel = pyplot.subplots(figsize=(12, height), layout="constrained")
    bars = [bar for group in groups for bar in _bars(group, ranks)]
    canvas = _Canvas(panel, list(ranks), bars)
    canvas.draw_bars(bars)
    for group in groups:
        canvas.draw_marks(group, ranks)
    panel.set_title(title, fontsize=9, loc="left")
    panel.tick_params(labelsize=8)
    panel.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    patch, line = matplotlib.patches.Patch, matplotlib.lines.Line2D
    hatch = {"facecolor": "none", "hatch": "////", "linewidth": 0.6}
    # A legend has no labels that begin with _, as names of NCCL's operations do.
    entries = {op.lstrip("_"): patch(color=colour) for op, colour in canvas.colours.items()}
    entries["paler: waits"] = patch(color=COLOURS[0], alpha=PALE)
    entries["under way"] = patch(edgecolor="black", **hatch)
    entries["failed"] = line([], [], marker="x", color=_ABSENT, linewidth=0)
    entries["has not made the call"] = patch(edgecolor=_ABSENT, **hatch)
    entries["last rank, waited for"] = line([], [], marker="v", color="black", linewidth=0)
    legend = {"loc": "outside lower center", "ncols": 6, "frameon": False, "fontsize": 8}
    figure.legend(entries.values(), entries.keys(), **legend)
    save(figure, path, dpi=130)
    pyplot.close(figure)


def _bars(group: JoinedGroup, ranks: Mapping[int, RankRecords]) -> Iterator[_Bar]:
    late = group.late()
    for rank, member in group.members.items():
        for record in member.records:
            if record.outcome == "queued":
                continue
            begin_ns, end_ns = begin_of(record), end_of(record, ranks[rank])
            bar = _Bar(rank, record, begin_ns, begin_ns, end_ns)
            # A call that has not ended, or has failed, may wait for a rank that has not come.
            ready_ns = end_ns if record.is_open or bar.has_failed else begin_ns
            if (rank, record.number) in late:
                ready_ns = begin_of(late[rank, record.number][1])
            yield bar._replace(ready_ns=min(max(ready_ns, begin_ns), end_ns))


class _Canvas:
    """The panel with its rows and its time axis.

    Attributes:
        colours: By operation; the operation with the largest sum of times is first.
    """

    def __init__(self, panel: Any, ranks: list[int], bars: Sequence[_Bar]) -> None:
        self._panel = panel
        self._rows = {rank: row for row, rank in enumerate(ranks)}
        self._zero_ns = min((bar.begin_ns for bar in bars), default=0)
        self._span_ns = max([1000, *(bar.end_ns - self._zero_ns for bar in bars)])
        units = {"s": 1e9, "ms": 1e6, "us": 1e3}
        unit = next(name for name, scale in units.items() if self._span_ns >= scale)
        self._scale = units[unit]
        times: defaultdict[str, int] = defaultdict(int)
        for bar in bars:
            times[bar.record.op] += bar.end_ns - bar.begin_ns
        ops = sorted(times, key=times.__getitem__, reverse=True)
        self.colours = {op: (*COLOURS, *[OTHER] * len(ops))[at] for at, op in enumerate(ops)}
        panel.set_xlim(0, self._span_ns * 1.005 / self._scale)
        panel.set_ylim(len(ranks) - 0.4, -0.8)
        panel.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
        panel.set_xlabel(f"time ({unit})")

    def draw_bars(self, bars: Sequence[_Bar]) -> None:
        """Draw all calls, the waits paler."""
        parts: defaultdict[tuple[int, str, float, bool], list[Part]] = defaultdict(list)
        for bar in bars:
            for alpha, begin_ns, end_ns in (
                (PALE, bar.begin_ns, bar.ready_ns),
                (1.0, bar.ready_ns, bar.end_ns),
            ):
                part = self._part(begin_ns, end_ns)
                parts[bar.rank, bar.record.op, alpha, bar.record.is_message].append(part)
            if bar.record.is_open:
                self._hatch(bar.rank, self._part(bar.begin_ns, bar.end_ns), "black")
            if bar.has_failed:
                x, _ = self._part(bar.end_ns, 0)
                self._panel.plot(x, self._rows[bar.rank], "x", color=_ABSENT, clip_on=False)
            is_long = bar.end_ns - bar.begin_ns > _NUMBERED * self._span_ns
            if is_long and len(self._rows) <= _MOST_NUMBERED:
                middle, _ = self._part((bar.begin_ns + bar.end_ns) // 2, 0)
                frame = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.6}
                how = {"ha": "center", "va": "center", "fontsize": 7, "bbox": frame}
                self._panel.text(middle, self._rows[bar.rank], f"#{bar.record.seq}", **how)
        for (rank, op, alpha, is_message), places in parts.items():
            half = 0.2 if is_message else 0.38
            how = {"color": self.colours[op], "alpha": alpha, "linewidth": 0}
            how["rasterized"] = len(bars) > _MOST_PATHS
            self._panel.broken_barh(places, (self._rows[rank] - half, 2 * half), **how)

    def draw_marks(self, group: JoinedGroup, ranks: Mapping[int, RankRecords]) -> None:
        """Mark ranks that came late to a call, and ranks that have not made the last call."""
        for each in group.calls:
            times = sorted((at_ns, rank) for rank, at_ns in each.arrivals().items())
            if len(times) < len(group.ranks):
                continue
            at_ns, last = times[-1]
            if at_ns - times[0][0] > _MARKED * self._span_ns:
                x, _ = self._part(at_ns, 0)
                how = {"color": "black", "markersize": 5, "clip_on": False}
                self._panel.plot(x, self._rows[last] - 0.45, "v", **how)
        for rank, seq in group.last_seqs().items():
            call = group.calls[-1] if group.calls else None
            if call is not None and seq < call.seq:
                begin_ns = min(record.enqueued_ns for record in call.records.values())
                if begin_ns < read_ns(ranks[rank]):
                    self._hatch(rank, self._part(begin_ns, read_ns(ranks[rank])), _ABSENT)

    def _part(self, begin_ns: int, end_ns: int) -> Part:
        return (begin_ns - self._zero_ns) / self._scale, (end_ns - begin_ns) / self._scale

    def _hatch(self, rank: int, part: Part, colour: str) -> None:
        how = {"facecolor": "none", "edgecolor": colour, "hatch": "////", "linewidth": 0.6}
        self._panel.broken_barh([part], (self._rows[rank] - 0.38, 0.76), **how)
