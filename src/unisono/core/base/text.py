"""Texts that errors, verdicts and reports share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

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


def did_you_mean(name: str, known: Iterable[str], other_words: Mapping[str, str]) -> str:
    """Return "; did you mean 'all_reduce'?", or "" if no known name resembles a name.

    Args:
        name: The name that does not exist.
        known: The names that exist.
        other_words: Names in small letters that other libraries use -> the known name.
    """
    from difflib import get_close_matches  # slow to import, and needed for errors only

    wanted, names = name.lower(), {each.lower(): each for each in known}
    near = [names[each] for each in get_close_matches(wanted, names, 1)]
    meant = [other_words[wanted]] if wanted in other_words else near
    return f"; did you mean {meant[0]!r}?" if meant else ""


class AbsentName(NamedTuple):
    """A class's attribute that does not exist: its error names what to use instead.

    `__getattr__` would make each other attribute of the class slower.
    """

    name: str
    instead: str

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no attribute {self.name!r}; {self.instead}")


def shown(error: BaseException, how: Callable[[object], str] = repr) -> str:
    """Return the text of a user's exception; the name of its type if it has no text."""
    try:
        return how(error)
    except Exception:
        return f"{type(error).__name__}, which cannot be shown"
