"""The keyword arguments that all operations share, and the error of any other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict

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

    Attributes:
        async_op: See `ProcessGroup`.
        _label: Name of the call in errors.
        _split_sizes: Rows of each rank.
        _partial: Receive shorter messages, too.
    """

    async_op: bool
    _label: str | None
    _split_sizes: Sequence[int]
    _partial: bool


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
    from difflib import get_close_matches  # slow to import, and needed for this error only

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
    like = [meant] if meant in known or meant in own else get_close_matches(unknown, known, 1)
    error = ArgumentTypeError(
        f"{call}() got an unexpected keyword argument {unknown!r} "
        f"(known besides its own: {', '.join(_KEYWORDS)})",
        hint=f"did you mean {like[0]!r}?" if like else None,
    )
    error.name_call(call)
    raise error
