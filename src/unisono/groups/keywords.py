"""The keyword arguments that all operations share, and the error of any other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypedDict, TypeVar

from unisono.base.deadline import Timeout
from unisono.errors import ArgumentTypeError
from unisono.groups.operations import OPS


class AlgorithmKeywords(TypedDict, total=False):
    """The shared keywords of a function that names its time-out itself."""

    algorithm: str | None
    deterministic: bool


class CallKeywords(AlgorithmKeywords, total=False):
    """The keywords that all operations share; see `ProcessGroup` for their meaning.

    For type checkers: `def mean(x: Array, **how: Unpack[CallKeywords]) -> None`.
    """

    timeout: Timeout | None


class How(CallKeywords, total=False):
    """The keywords of all methods of `ProcessGroup`; callers outside unisono use `async_op` only.

    A keyword with an underscore is for functions of c10d over one method: errors of `isend`, which
    calls `send`, have the name `isend`. A wrapper in the dispatcher passes it on like the others.

    Attributes:
        async_op: See `ProcessGroup`.
        _label: Name of the call in errors.
        _partial: Receive shorter messages, too.
    """

    async_op: bool
    _label: str | None
    _partial: bool


_P = ParamSpec("_P")
_R = TypeVar("_R")

_KEYWORDS = ("async_op", "timeout", *AlgorithmKeywords.__annotations__)
_OTHER_WORDS = {"comm": "group", "root": "rank", "peer": "rank", "dest": "rank", "source": "rank"}


def check_keywords(op: str, call: str, how: Iterable[str]) -> None:
    """Raise an error if one of the keywords belongs to no call.

    Args:
        op: Name of the operation in `OPS`.
        call: Name of the function that was called.
        how: Keywords that are not parameters of the function.

    Raises:
        ArgumentTypeError: Names the keyword, and in the hint the keyword that resembles it.
    """
    unknown = next((name for name in how if name not in _KEYWORDS), None)
    if unknown is None:
        return
    op = op.removesuffix("_any_source")  # `recv` without a source
    schema = OPS[op]
    own = {*schema.data_names, *schema.settings.split()}
    known = [*_KEYWORDS, "group", *sorted(own & {"op", "tag"})]
    meant = _OTHER_WORDS.get(unknown, "")
    for name in own & {"root", "peer"}:
        rank = "dst" if op in ("reduce", "gather", "send") else "src"
        # A function takes this name itself, so a method was called.
        meant = name if unknown == rank else rank if meant == "rank" else meant
        known.append(rank)
    if meant in own:
        known.append(meant)
    raise _unknown_keyword(call, unknown, meant, known, f"besides its own: {', '.join(_KEYWORDS)}")


def takes_own_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function without shared keywords raise ArgumentTypeError for an unknown keyword."""
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(function)
    def call(*arguments: _P.args, **how: _P.kwargs) -> _R:
        for unknown in how:
            if unknown not in known:
                meant = _OTHER_WORDS.get(unknown, "")
                if meant == "rank":
                    meant = "src" if "src" in known else "dst"
                listed = f"here: {', '.join(known)}"
                raise _unknown_keyword(function.__name__, unknown, meant, known, listed)
        return function(*arguments, **how)

    rename(call, function.__name__)
    return call


def rename(function: Any, name: str) -> None:
    """Give a function another name, which errors about threads and tracebacks show, too."""
    function.__name__ = name
    function.__code__ = function.__code__.replace(co_name=name)


def _unknown_keyword(
    call: str, unknown: str, meant: str, known: Iterable[str], listed: str
) -> ArgumentTypeError:
    from difflib import get_close_matches  # slow to import, and needed for this error only

    like = [meant] if meant in known else get_close_matches(unknown, known, 1)
    error = ArgumentTypeError(
        f"{call}() got an unexpected keyword argument {unknown!r} (known {listed})",
        hint=f"did you mean {like[0]!r}?" if like else None,
    )
    error.name_call(call)
    return error
