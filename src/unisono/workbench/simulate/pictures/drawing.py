"""Pictures as lists of shapes, and as SVG texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

INK, PALE = "#222222", "#d8d8d8"
FONT = "Helvetica, Arial, sans-serif"

Point = tuple[float, float]


class Line(NamedTuple):
    """A line through points."""

    points: tuple[Point, ...]
    colour: str = INK
    width: float = 1.0


class Polygon(NamedTuple):
    """A polygon; `edge` is the colour of its border, "" without one."""

    points: tuple[Point, ...]
    fill: str
    edge: str = ""


class Label(NamedTuple):
    """A line of text; `anchor` is start, middle or end."""

    at: Point
    text: str
    size: float = 11
    anchor: str = "start"
    bold: bool = False
    colour: str = INK


DrawnShape = Line | Polygon | Label


class Picture:
    """Shapes on a white ground; y grows downwards.

    Attributes:
        width: In units of a pixel.
        height: In the same units.
        shapes: In the order of drawing.
    """

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.shapes: list[DrawnShape] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = ""
    ) -> None:
        """Add a rectangle."""
        corners = ((x, y), (x + width, y), (x + width, y + height), (x, y + height))
        self.shapes.append(Polygon(corners, fill, edge))

    def label(
        self, x: float, y: float, text: str, size: float = 11, anchor: str = "start",
        *, bold: bool = False, colour: str = INK,
    ) -> None:  # fmt: skip
        """Add a text whose base line is at y."""
        self.shapes.append(Label((x, y), text, size, anchor, bold, colour))

    def arrow(
        self, begin: Point, end: Point, colour: str, width: float = 1.5, *, full: bool = True
    ) -> None:
        """Add an arrow; its head is filled, or open."""
        (x0, y0), (x1, y1) = begin, end
        length = math.hypot(x1 - x0, y1 - y0) or 1.0
        along, across = (x1 - x0) / length, (y1 - y0) / length
        back_x, back_y = x1 - 7 * along, y1 - 7 * across
        self.shapes.append(Line((begin, (back_x, back_y)), colour, width))
        sides = [(back_x - d * across, back_y + d * along) for d in (3.2, -3.2)]
        head = (end, sides[0], sides[1])
        self.shapes.append(Polygon(head, colour if full else "white", colour))

    def svg(self) -> str:
        """Return the SVG document."""
        width, height = _number(self.width), _number(self.height)
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
            f"viewBox='0 0 {width} {height}' font-family='{FONT}'>"
        )
        ground = "<rect width='100%' height='100%' fill='white'/>"
        return "\n".join([head, ground, *map(_svg, self.shapes), "</svg>"]) + "\n"


def heat(share: float) -> str:
    """Return a colour from nearly white (0) over orange to dark red (1)."""
    stops = ((255, 247, 236), (253, 187, 132), (215, 48, 31), (127, 0, 0))
    at = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    low = min(int(at), len(stops) - 2)
    mixed = [a + (b - a) * (at - low) for a, b in zip(stops[low], stops[low + 1], strict=True)]
    return "#" + "".join(f"{round(value):02x}" for value in mixed)


def _svg(shape: DrawnShape) -> str:
    """Return one element."""
    if isinstance(shape, Line):
        style = f"fill='none' stroke='{shape.colour}' stroke-width='{_number(shape.width)}'"
        return f"<polyline points='{_points(shape.points)}' {style} stroke-linejoin='round'/>"
    if isinstance(shape, Polygon):
        edge = f" stroke='{shape.edge}' stroke-width='1.3'" if shape.edge else ""
        return f"<polygon points='{_points(shape.points)}' fill='{shape.fill}'{edge}/>"
    weight = " font-weight='bold'" if shape.bold else ""
    x, y = map(_number, shape.at)
    text = shape.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return (
        f"<text x='{x}' y='{y}' font-size='{_number(shape.size)}' text-anchor='{shape.anchor}'"
        f"{weight} fill='{shape.colour}'>{text}</text>"
    )


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")
