"""`launch`: call a function in N processes and return all results, also from a notebook."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, TypeVarTuple, overload

from unisono.core.base.deadline import Timeout
from unisono.core.base.text import takes_own_keywords
from unisono.errors import InvalidArgumentError, UsageError, WorkerFailedError
from unisono.launcher.payload import CallArguments, Payload, dumps_of, loads_result
from unisono.launcher.spawn import SpawnContext, Untyped, check_arguments, check_start

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


# Type checkers compare a tuple of arguments, but not a list, with the parameters of `fn`.
@overload
def launch(fn: Callable[[int], R], nprocs: int, *, start_method: str = ...) -> list[R]: ...


@overload
def launch(
    fn: Callable[[int, *Ts], R] | Untyped[R],
    nprocs: int,
    args: tuple[*Ts] | list[Any],
    *,
    start_method: str = ...,
) -> list[R]: ...


@takes_own_keywords
def launch(
    fn: Callable[..., R],
    nprocs: int,
    args: Sequence[object] = (),
    *,
    start_method: str = "spawn",
) -> list[R]:
    """Call `fn(rank, *args)` in `nprocs` new processes and return the results, by rank.

    `init_process_group()` needs no arguments inside `fn`, as with `spawn`. With cloudpickle
    installed, `fn` may be a lambda or be defined in a notebook; without it, it must be
    importable. In a script the call belongs under `if __name__ == "__main__":`.

    The ranks share the pages of large arrays in `args`. A rank that writes to an array copies the
    pages that it writes to, so no other rank sees the change.

    Args:
        fn: The function.
        nprocs: Number of processes.
        args: Further arguments, the same for every rank.
        start_method: "spawn", "fork" or "forkserver". With "fork" the processes inherit `fn` and
            `args`, which need not be picklable.

    Returns:
        [nprocs] results.

    Raises:
        ArgumentTypeError: `fn`, `args` or `nprocs` has the wrong type.
        InvalidArgumentError: `nprocs` or `start_method` is invalid, or the function, an argument
            or a result cannot be pickled.
        WorkerFailedError: A process died without an exception.
        Exception: The exception of the rank that failed first. Its cause is a WorkerFailedError
            that names the rank and ends with its traceback. The other ranks have been stopped.
    """
    return launched(fn, nprocs, args, start_method)


def launched(
    fn: Callable[..., R],
    nprocs: int,
    args: Sequence[object],
    start_method: str,
    grace_period: Timeout | None = None,
) -> list[R]:
    """As `launch`; `grace_period` as in `SpawnContext.join`."""
    nprocs = check_start("launch(fn, nprocs, args), args=(x,)", fn, args, nprocs, start_method)
    check_arguments("launch", fn, args)
    call = fn, tuple(args)
    payload: CallArguments | Payload = CallArguments(*call)
    if start_method != "fork":  # A forked child inherits the call, so that nothing is copied.
        with pickling(call, "the function or its arguments") as dumps:
            payload = Payload(call, dumps)
    context = SpawnContext(
        _call,
        (payload,),
        nprocs,
        start_method=start_method,
        returns="result",
    )
    del payload  # The children have opened it.
    try:
        context.join(grace_period=grace_period)
    except WorkerFailedError as failure:
        rank = failure.context.rank
        original = None if rank is None else context.error_of(rank)
        if original is None:
            raise
        original.add_note(f"raised on rank {rank} of {nprocs}")
        raise original from failure
    finally:
        context.close_ended()
    if missing := [rank for rank in range(nprocs) if rank not in context.results]:
        raise WorkerFailedError(f"ranks {missing} exited with code 0 before `fn` returned")
    return [loads_result(context.results[rank]) for rank in range(nprocs)]


def _call(rank: int, payload: CallArguments | Payload) -> bytes:
    fn, args = payload.load() if isinstance(payload, CallArguments) else payload.load_once()
    result = fn(rank, *args)
    # cloudpickle makes copies of the classes of a script, and the parent of a forked child does not
    # know the copies.
    with contextlib.suppress(Exception):
        return pickle.dumps(result)
    with pickling(result, f"the result of rank {rank}") as dumps:
        return bytes(dumps(result))


@contextlib.contextmanager
def pickling(
    value: object, what: str, dumps_of: Callable[[Any], Callable[..., Any]] = dumps_of
) -> Iterator[Callable[..., Any]]:
    """Yield a function like `pickle.dumps` for a value; an error of it names the value.

    Args:
        value: The value.
        what: Its name in the error.
        dumps_of: Gives the function for cloudpickle, or for pickle if that is not installed.
            Functions keep the lines of their source by default.
    """
    pickler = _cloudpickle()
    if pickler is None and _is_not_importable(value):
        raise InvalidArgumentError(
            f"{what} cannot be sent to other processes: it is defined in a session without a file",
            hint="pip install cloudpickle, or define it in a module and import it",
        )
    try:
        yield dumps_of(pickler or pickle)
    except UsageError:
        raise
    except Exception as error:
        hint = None if pickler else "pip install cloudpickle: it pickles lambdas and closures too"
        raise InvalidArgumentError(
            f"{what} cannot be sent to other processes: {type(error).__name__}: {error}", hint=hint
        ) from error


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError:
        return None
    return cloudpickle


def _is_not_importable(value: object) -> bool:
    """Whether a child could not import an object that plain pickle would refer to by name."""
    in_main = any(getattr(part, "__module__", None) == "__main__" for part in _parts_of(value))
    path = getattr(sys.modules["__main__"], "__file__", None)
    return in_main and (path is None or not os.path.exists(path))


def _parts_of(value: object) -> Iterator[object]:
    """Yield what tuples in tuples hold; `pool.map` has a function among arguments."""
    for part in value if isinstance(value, tuple) else (value,):
        if isinstance(part, tuple):
            yield from _parts_of(part)
        else:
            yield part
