"""Texts that errors, verdicts and reports share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn, ParamSpec, TypeVar

from unisono.core.base.grouping import grouped
from unisono.errors import ArgumentTypeError

_P = ParamSpec("_P")
_R = TypeVar("_R")


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


OTHER_WORDS = {
    **{"comm": "group", "root": "rank", "peer": "rank", "dest": "rank", "source": "rank"},
    **dict.fromkeys(("n", "n_jobs", "num_workers", "processes", "ranks", "workers"), "nprocs"),
}
"""Keywords of other libraries: the word of ours."""


def takes_own_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function without shared keywords raise ArgumentTypeError for an unknown keyword."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    known = [name for name in names if name != "self"]
    same = {"rank": "src" if "src" in known else "dst"}
    if "max_workers" in known:
        same["nprocs"] = "max_workers"

    @functools.wraps(function)
    def call(*arguments: _P.args, **how: _P.kwargs) -> _R:
        for unknown in how:
            if unknown not in known:
                meant = OTHER_WORDS.get(unknown, "")
                name = function.__qualname__.removesuffix(".__init__")
                listed = f"here: {', '.join(known)}"
                raise unknown_keyword(name, unknown, same.get(meant, meant), known, listed)
        return function(*arguments, **how)

    return call


def unknown_keyword(
    call: str, unknown: str, meant: str, known: Iterable[str], listed: str
) -> ArgumentTypeError:
    """Return the error of a keyword that a function does not take.

    Args:
        call: Name of the function.
        unknown: The keyword.
        meant: What it means here; "" if that is unknown.
        known: The keywords that the function takes.
        listed: Which are known, for the error.
    """
    from difflib import get_close_matches  # slow to import, and needed for this error only

    like = [meant] if meant in known else get_close_matches(unknown, known, 1)
    error = ArgumentTypeError(
        f"{call}() got an unexpected keyword argument {unknown!r} (known {listed})",
        hint=f"did you mean {like[0]!r}?" if like else None,
    )
    error.name_call(call)
    return error


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
