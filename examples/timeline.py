"""The picture of elastic_digits.py: which worker was there when, and the accuracy."""

from __future__ import annotations

from typing import NamedTuple

WIDTH, LEFT, RIGHT = 760, 120, 20
CURVE, ROW = 110, 26
BLUE, GREEN, RED, GREY = "#3b6fb6", "#3a9a5b", "#c0392b", "#888"


class Moment(NamedTuple):
    """A step that counts.

    Attributes:
        time_s: When it was made.
        workers: Names of the workers that made it.
        accuracy: Share of the test images that are read right after it.
    """

    time_s: float
    workers: list[str]
    accuracy: float


def draw(record: list[Moment]) -> str:
    """Return an SVG picture: time to the right, the accuracy above, a bar for each worker below."""
    begin, end = record[0].time_s, record[-1].time_s
    names = list(dict.fromkeys(name for moment in record for name in moment.workers))
    bottom = 30 + CURVE + ROW * (len(names) + 1)
    scale = (WIDTH - LEFT - RIGHT) / max(end - begin, 1e-9)

    def x(step: int) -> float:
        return LEFT + scale * (record[step].time_s - begin)

    def y(share: float) -> float:
        return 20 + CURVE * (1 - share)

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {bottom + 34}' "
        f"width='{WIDTH}' font-family='sans-serif' font-size='12'>",
        "<rect width='100%' height='100%' fill='white'/>",
    ]
    for share in (0, 0.5, 1):
        parts += [
            f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y(share)}' y2='{y(share)}' "
            "stroke='#ddd'/>",
            _text(LEFT - 8, y(share) + 4, f"{share:.0%}", "end"),
        ]
    parts.append(_text(8, y(0.5) + 4, "accuracy"))
    points = " ".join(f"{x(n):.1f},{y(m.accuracy):.1f}" for n, m in enumerate(record))
    parts.append(f"<polyline points='{points}' fill='none' stroke='{BLUE}' stroke-width='2'/>")
    for row, name in enumerate(names):
        middle = 30 + CURVE + ROW * (row + 1)
        parts.append(_text(8, middle + 4, name))
        there = [n for n, moment in enumerate(record) if name in moment.workers]
        first, last = there[0], there[-1]
        color = BLUE if first == 0 else GREEN
        width = max(x(last) - x(first), 2)
        parts.append(
            f"<rect x='{x(first):.1f}' y='{middle - 8}' width='{width:.1f}' height='16' rx='3' "
            f"fill='{color}'/>"
        )
        if first > 0:
            parts.append(_text(x(first) - 6, middle + 4, f"from step {first + 1}", "end"))
        if last + 1 < len(record):
            parts += [
                f"<path d='M{x(last) - 6:.1f},{middle - 10} l12,20 m0,-20 l-12,20' stroke='{RED}' "
                "stroke-width='3'/>",
                _text(x(last) + 12, middle + 4, f"killed after step {last + 1}"),
            ]
    parts.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{bottom}' y2='{bottom}' "
                 f"stroke='{GREY}'/>")  # fmt: skip
    for share in (0, 0.25, 0.5, 0.75, 1):
        due_s = begin + share * (end - begin)
        step = max(n for n, moment in enumerate(record) if moment.time_s <= due_s)
        label = f"{due_s - begin:.1f} s, step {step + 1}"
        anchor = {0: "start", 1: "end"}.get(int(share) if share in (0, 1) else 2, "middle")
        parts.append(_text(LEFT + scale * (due_s - begin), bottom + 18, label, anchor))
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{words}</text>"
