"""Space-time diagrams: a line per rank, time to the right, an arrow per message.

Below the diagram of a simulated run are the parts of its critical path, and a heat map. The heat
map has a row per link and a column per slice of time. The colour is the share of the slice in which
the link carries a message.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from unisono.core.schedules.cost import cost
from unisono.core.schedules.ir import Schedule
from unisono.workbench.simulate.pictures.drawing import PALE, Picture, Point, heat
from unisono.workbench.simulate.pictures.timeline import FaultMark, Span, Timeline

# One colour per chunk, from Okabe and Ito's palette for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A6A00", "#444444")
CRITICAL = "#D00000"
_MESSAGE, _WORK = "#7FA8C9", "#9a9a9a"

_LEFT, _TOP = 58.0, 46.0
# Names of links are longer than those of ranks.
_LINK_LEFT = 124.0
# Links of the heat map, and slices of time.
_LINKS, _SLICES = 16, 64
# Height of the legend, and how much of an error is shown.
_LEGEND, _LETTERS = 22.0, 160


def diagram(timeline: Timeline) -> Picture:
    """Return the space-time diagram of a schedule in rounds, or of a simulated run."""
    return _rounds(timeline) if timeline.result is None else _run(timeline)


def _rounds(timeline: Timeline) -> Picture:
    schedule, ranks = timeline.schedule, timeline.schedule.world_size
    stages, high = schedule.stages, _lane(ranks)
    _, wide, *_ = columns(schedule)
    counted = cost(schedule)
    sent = f"{counted.bytes_sent} n".removeprefix("1 ")
    rounds = "1 round" if counted.rounds == 1 else f"{counted.rounds} rounds"
    title = (
        f"{schedule.collective}, {schedule.algorithm}: {rounds}, {sent} sent by the busiest rank"
    )
    # A title takes up to 9 units for each letter, in the widest fonts.
    fault = timeline.fault
    width = max(_LEFT + wide * stages + 16, 24 + 9 * len(title))
    picture = Picture(width, _TOP + high * ranks + _LEGEND + 6)
    if fault is not None:
        picture.width = max(width, 24 + 7.5 * len(_fault_text(fault)))
        picture.height += 20
        picture.label(12, picture.height - 8, _fault_text(fault), 11, bold=True, colour=CRITICAL)
    picture.label(12, 18, title, 13, bold=True)
    # A single rank has a stage, but no round.
    for k in range(schedule.rounds):
        picture.label(_LEFT + wide * (k + 0.5), _TOP - 10, str(k + 1), 10, "middle")
        if k % 2 == 0:
            picture.box(_LEFT + wide * k, _TOP - 4, wide, high * ranks + 2, "#f5f5f5")
    _lanes(picture, ranks, high, (_LEFT, wide * stages))
    if fault is not None:
        _mark(picture, fault, (wide, high, stages))
    for message in timeline.messages:
        begin = _LEFT + wide * message.begin + 5, _middle(message.source, high)
        end = _LEFT + wide * message.end - 5, _middle(message.target, high)
        picture.arrow(begin, end, COLOURS[message.chunk % len(COLOURS)], full=message.reduces)
    x = _legend(picture, timeline, _TOP + high * ranks + 16, COLOURS[0])
    picture.label(x, _TOP + high * ranks + 16, "colour: first chunk", 10)
    return picture


def columns(schedule: Schedule) -> tuple[float, float, float, float]:
    """Return where the rounds of a diagram are: left, width of each, top, height."""
    wide = max(64, min(110, 420 // max(schedule.stages, 1)))
    return _LEFT, wide, _TOP - 4, _lane(schedule.world_size) * schedule.world_size + 2


def _fault_text(fault: FaultMark) -> str:
    text = f"WRONG: {fault.text}"
    return text if len(text) <= _LETTERS else text[: _LETTERS - 3] + "..."


def _mark(picture: Picture, fault: FaultMark, shape: tuple[float, float, int]) -> None:
    """Mark the round of a rank in which the proof fails, or the end of its lane."""
    wide, high, stages = shape
    if fault.rank is None:
        return
    at_end = fault.stage == stages
    x, width = _LEFT + wide * fault.stage - (10 if at_end else 0), 16 if at_end else wide
    picture.box(x, _TOP + high * fault.rank + 1, width, high - 2, "#ffd9d9", CRITICAL)


def _legend(picture: Picture, timeline: Timeline, y: float, colour: str) -> float:
    """Explain the heads of the arrows that occur, and return where the line goes on."""
    x = 12.0
    for reduces, text in ((True, "the receiver reduces"), (False, "the receiver stores")):
        if any(message.reduces == reduces for message in timeline.messages):
            picture.arrow((x, y - 3.5), (x + 26, y - 3.5), colour, full=reduces)
            picture.label(x + 32, y, text, 10)
            x += 32 + 6.2 * len(text)
    return x


def _run(timeline: Timeline) -> Picture:
    """Draw a simulated run: lanes, then the critical path in words, then links."""
    result, schedule = timeline.result, timeline.schedule
    assert result is not None
    ranks, end = schedule.world_size, max(timeline.end, 1)
    high = _lane(ranks)
    links = result.busiest_links(_LINKS)
    # One axis of time for both, so that a wait is above the link that it waits for.
    left, right = _LINK_LEFT if links else _LEFT, _LEFT + 760.0
    wide = right - left
    bottom = _TOP + high * ranks + _LEGEND
    picture = Picture(right + 70, bottom + 66 + (24 + 13 * len(links) if links else 0))
    title = (
        f"{schedule.collective}, {schedule.algorithm}: {result.last_us:,.1f} µs on {ranks} ranks, "
        f"{result.messages:,} messages{'; ' * bool(timeline.about)}{timeline.about}"
    )
    picture.width = max(picture.width, 24 + 7.5 * len(title))
    picture.label(12, 18, title, 13, bold=True)
    step = _round_step(end / 6e6)
    for k in range(int(end / 1e6 / step) + 1):
        x = left + wide * k * step * 1e6 / end
        picture.label(x, _TOP - 10, f"{k * step:,g}" + " µs" * (k == 0), 10, "middle")
        picture.box(x - 0.4, _TOP - 4, 0.8, high * ranks + 2, "#eeeeee")
    _lanes(picture, ranks, high, (left, wide))

    def at(time: float, rank: int) -> Point:
        return left + wide * time / end, _middle(rank, high)

    thick = min(6.0, 0.5 * high)
    for span in timeline.work:
        x, y = at(span.begin, span.place)
        picture.box(x, y - thick / 2, max(0.3, wide * (span.end - span.begin) / end), thick, _WORK)
    # The critical path is drawn last, so that no message hides it.
    for message in sorted(timeline.messages, key=lambda message: message.critical):
        ends = at(message.begin, message.source), at(message.end, message.target)
        colour, width = (CRITICAL, 2.2) if message.critical else (_MESSAGE, 1.0)
        picture.arrow(*ends, colour, width, full=message.reduces)
    _wait_lines(picture, timeline, at)
    y = bottom - _LEGEND + 16
    x = _legend(picture, timeline, y, _MESSAGE)
    for fill, text in ((CRITICAL, "critical path"), (_WORK, "work of a rank")):
        if fill == CRITICAL or timeline.work:
            picture.box(x, y - 7, 22, 6, fill)
            picture.label(x + 28, y, text, 10)
            x += 28 + 6.2 * len(text)
    causes = result.causes_ps.items()
    parts = [f"{cause} {100 * ps / max(result.last_ps, 1):.0f} %" for cause, ps in causes]
    text = f"critical path: {', '.join(parts)}; {result.hops} messages"
    picture.label(12, bottom + 22, text, 12, colour=CRITICAL)
    picture.label(12, bottom + 40, f"over ranks {_path_text(result.path)}", 11)
    if links:
        _heat_map(picture, timeline, links, bottom + 64, wide)
    return picture


def _wait_lines(picture: Picture, timeline: Timeline, at: Callable[[float, int], Point]) -> None:
    """Join the messages of the critical path along the lanes of their ranks."""
    path = [message for message in timeline.messages if message.critical]
    stops: list[tuple[float, int]] = [(0.0, path[0].source)] if path else []
    for message in path:
        stops += [(message.begin, message.source), (message.end, message.target)]
    if path:
        stops.append((timeline.end, path[-1].target))
    for (t0, rank), (t1, other) in zip(stops[::2], stops[1::2], strict=True):
        if rank == other and t1 > t0:
            (x, y), (x1, _) = at(t0, rank), at(t1, rank)
            picture.box(x, y - 1.1, x1 - x, 2.2, CRITICAL)


def _heat_map(
    picture: Picture, timeline: Timeline, links: Sequence[int], top: float, wide: float
) -> None:
    """Draw a row per link: how busy it is in each slice of time, and in the whole run."""
    result = timeline.result
    assert result is not None
    busy = busy_shares(timeline.service, links, timeline.end)
    lanes = [result.network.group(link).lanes for link in links]
    busy = busy / np.array(lanes)[:, None]
    title = f"the {len(links)} busiest links, and their busy share"
    picture.label(12, top, title, 12, bold=True)
    x = 36 + 7.5 * len(title)
    for share in range(0, 101, 25):
        picture.box(x, top - 9, 14, 10, heat(share / 100))
        picture.label(x + 17, top, f"{share} %", 9)
        x += 52
    for row, (link, shares) in enumerate(zip(links, busy, strict=True)):
        y = top + 8 + 13 * row
        # Names are longer than the margin of the lanes.
        picture.label(_LINK_LEFT - 4, y + 9.5, result.network.link_name(link), 9, "end")
        step, first = wide / _SLICES, 0
        # Slices of one colour are one box, because a picture has thousands of slices.
        for colour, same in itertools.groupby(heat(round(share, 1)) for share in shares):
            count = len(list(same))
            picture.box(_LINK_LEFT + step * first, y, step * count + 0.2, 12, colour)
            first += count
        picture.label(_LINK_LEFT + wide + 6, y + 9.5, f"{100 * shares.mean():.0f} %", 9)


def busy_shares(
    service: Sequence[Span], links: Sequence[int], end: float, slices: int = _SLICES
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the share of each slice of time in which a link carries messages [links, slices]."""
    shares = np.zeros((len(links), slices))
    row = {link: k for k, link in enumerate(links)}
    edges = np.linspace(0.0, end, slices + 1)
    for link, begin, stop in service:
        if link in row:
            inside = np.minimum(edges[1:], stop) - np.maximum(edges[:-1], begin)
            shares[row[link]] += np.maximum(inside, 0.0)
    return shares * (slices / max(end, 1e-9))


def _round_step(least: float) -> float:
    """Return the next number of the form 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(least, 1e-9)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _lane(ranks: int) -> float:
    """Return the height of a lane."""
    return max(9.0, min(24.0, 640 / ranks))


def _middle(rank: int, high: float) -> float:
    return _TOP + high * (rank + 0.5)


def _lanes(picture: Picture, ranks: int, high: float, axis: tuple[float, float]) -> None:
    left, wide = axis
    for rank in range(ranks):
        y = _middle(rank, high)
        size = min(11.0, high + 1)
        picture.label(left - 46, y + size / 2.8, f"rank {rank}", size)
        picture.box(left, y - 0.6, wide, 1.2, PALE)


def _path_text(path: Sequence[int]) -> str:
    """Return the ranks of a path, shortened."""
    names = [str(rank) for rank in path]
    if len(names) > 24:
        names = [*names[:12], "...", *names[-11:]]
    return " > ".join(names)
