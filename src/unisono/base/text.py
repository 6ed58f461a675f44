"""Texts that errors, verdicts and reports share."""

from __future__ import annotations

from collections.abc import Sequence


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 3 and 4" or "ranks 3, 4 and 9"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 12:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:8]))}, ...)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
