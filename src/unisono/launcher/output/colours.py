"""Colours of a terminal, for what matters."""

from __future__ import annotations

from typing import TextIO

from unisono.core.base.config import environ

_STYLES = {"bold": 1, "red": 31, "green": 32, "yellow": 33}
# Neither black nor white, nor red, which marks faults.
_RANKS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


def has_colours(stream: TextIO) -> bool:
    """Whether a stream shows colours: it is a terminal, if NO_COLOR and FORCE_COLOR are not set."""
    names = environ()
    if names.get("NO_COLOR"):
        return False
    if names.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return stream.isatty() and names.get("TERM") != "dumb"


def painted(text: str, *styles: str) -> str:
    """Return a text in styles: "bold", "red", "green", "yellow"."""
    return f"\x1b[{';'.join(str(_STYLES[each]) for each in styles)}m{text}\x1b[0m"


def painted_rank(text: str, rank: int) -> str:
    """Return a text in the colour of a rank."""
    return f"\x1b[{_RANKS[rank % len(_RANKS)]}m{text}\x1b[0m"
