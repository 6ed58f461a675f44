"""Texts that errors, verdicts and reports share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from unisono.core.base.grouping import grouped


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 3 and 4" or "ranks 3, 4 and 9"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 12:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:8]))}, ...)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def by_rank(names: Iterable[tuple[int, str]]) -> str:
    """Return "A on rank 1, B on ranks 0 and 2"; `names` has the name of each rank."""
    ranks = grouped((name, rank) for rank, name in names)
    return ", ".join(f"{name} on {name_ranks(each)}" for name, each in ranks.items())


def shown(error: BaseException, how: Callable[[object], str] = repr) -> str:
    """Return the text of a user's exception; the name of its type if it has no text."""
    try:
        return how(error)
    except Exception:
        return f"{type(error).__name__}, which cannot be shown"
