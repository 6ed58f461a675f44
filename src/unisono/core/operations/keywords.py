"""The keyword arguments that all operations share, and the error of any other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypedDict

from unisono.core.base.deadline import Timeout
from unisono.core.base.text import OTHER_WORDS, unknown_keyword
from unisono.core.operations.table import OPS


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
        _partial: Receive shorter messages, too; "raw": also of another dtype.
        _learn: C++ gets what `Engine.prepare` returns for the call; see `methods.in_cpp`.
    """

    async_op: bool
    _label: str | None
    _partial: bool | str
    _learn: Callable[[object], object]


SHARED = How.__annotations__.keys()
"""Names of the keywords of all methods."""

_KEYWORDS = ("async_op", "timeout", *AlgorithmKeywords.__annotations__)


def check_keywords(op: str, call: str, how: Iterable[str], *, of_method: bool = False) -> None:
    """Raise an error if one of the keywords belongs to no call.

    Args:
        op: Name of the operation in `OPS`.
        call: Name of the function that was called.
        how: Keywords that were given.
        of_method: Whether the method was called, whose parameters are right as keywords. Without
            it, only the method's parameters without a place are right: split sizes.

    Raises:
        ArgumentTypeError: Names the keyword, and in the hint the keyword that resembles it.
    """
    code = OPS[op].check.__code__
    end = code.co_argcount + code.co_kwonlyargcount
    own = code.co_varnames[0 if of_method else code.co_argcount : end]
    unknown = next((name for name in how if name not in SHARED and name not in own), None)
    if unknown is None:
        return
    op = op.removesuffix("_any_source")  # `recv` without a source
    schema = OPS[op]
    takes = {*schema.data_names, *schema.settings.split()}
    known = [*_KEYWORDS, "group", *sorted(takes & {"op", "tag"})]
    meant = OTHER_WORDS.get(unknown, "")
    for name in takes & {"root", "peer"}:
        rank = "dst" if op in ("reduce", "gather", "send") else "src"
        # A function takes this name itself, so a method was called.
        meant = name if unknown == rank else rank if meant == "rank" else meant
        known.append(rank)
    if meant in takes:
        known.append(meant)
    raise unknown_keyword(call, unknown, meant, known, f"besides its own: {', '.join(_KEYWORDS)}")
