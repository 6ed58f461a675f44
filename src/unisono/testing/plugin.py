"""A pytest plug-in: the marker `ranks` and the fixture `world` run tests on several ranks.

Pytest finds it where unisono is installed. It loads what runs ranks when a test needs it.
"""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, cast

import pytest

from unisono.core.base.source.tracebacks import trimmed
from unisono.errors import LaunchError, UnisonoError, WorkerFailedError

__all__ = ["world"]

_BOTH = {"kind": ("threads", "processes"), "engine": ("native", "reference")}
# Further options; those of `unisono.testing.run`, which loads NumPy.
_OPTIONS = ("timeout", "transport", "dead")

_MARKER = (
    "ranks(*sizes, kind='threads', engine=None, **options): call the test function as "
    "`f(rank, *fixtures)` on every rank of a world of each size. `kind` and `engine` can be "
    "'both'. The options are those of `unisono.testing.run`."
)


class _TestWorld(NamedTuple):
    """One value of the parameter `rank`: the world on whose ranks the test function is called."""

    size: int
    kind: Literal["threads", "processes"]
    engine: str | None

    def __str__(self) -> str:
        return "-".join(str(part) for part in self if part is not None)


class RunOnRanks(Protocol):
    """The type of the fixture `world`."""

    def __call__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *,
        args: Sequence[Any] = (),
        timeout: float = 60.0,
        transport: str | None = None,
        engine: str | None = None,
        dead: Collection[int] = (),
    ) -> list[Any]:
        """Call `unisono.testing.run` for one kind of ranks."""


@pytest.fixture(params=["threads", "processes"])
def world(request: pytest.FixtureRequest) -> RunOnRanks:
    """Return `unisono.testing.run` for one kind of ranks; the test runs once for each kind.

    def test_sum(world):
        assert world(body, 4) == [...]
    """
    from unisono.testing.ranks import run

    return partial(run, ranks=request.param)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each size, kind and engine that the marker asks for."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None and "rank" in metafunc.fixturenames:
        metafunc.parametrize("rank", [None] if _wrong(mark) else list(_worlds(mark)), ids=str)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a test with a wrong marker; an error at collection would stop all other tests."""
    mark = item.get_closest_marker("ranks")
    if mark is None or not isinstance(item, pytest.Function):
        return
    if (wrong := _wrong(mark)) is not None:
        pytest.fail(wrong, pytrace=False)
    if "rank" not in item.fixturenames:
        text = "the marker ranks calls the test with its rank: add the argument rank"
        pytest.fail(text, pytrace=False)


def _wrong(mark: pytest.Mark) -> str | None:
    """Return what is wrong with a marker."""
    if not mark.args:
        return "ranks needs sizes, such as ranks(2)"
    for size in mark.args:
        if type(size) is not int or size < 1:
            return f"ranks({size!r}): a size is a number of ranks, as in ranks(1, 2)"
    known = (*_BOTH, *_OPTIONS)
    for name, value in mark.kwargs.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            mean = f"did you mean {near[0]}=?" if near else f"expected {', '.join(known)}"
            return f"ranks({name}={value!r}): no such option; {mean}"
        expected = ("both", *_BOTH.get(name, ()))
        if name in _BOTH and value not in (expected if name == "kind" else (None, *expected)):
            return f"ranks({name}={value!r}): expected one of {', '.join(map(repr, expected))}"
    return None


def _worlds(mark: pytest.Mark) -> Iterator[_TestWorld]:
    for size in mark.args:
        for kind in _choices(mark, "kind", "threads"):
            for engine in _choices(mark, "engine", None):
                yield _TestWorld(size, kind, engine)


def _choices(mark: pytest.Mark, name: str, default: str | None) -> tuple[Any, ...]:
    value = mark.kwargs.get(name, default)
    return _BOTH[name] if value == "both" else (value,)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test with the marker on every rank of its world."""
    __tracebackhide__ = True
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    world = cast("_TestWorld", pyfuncitem.funcargs["rank"])
    names = pyfuncitem._fixtureinfo.argnames
    args = [pyfuncitem.funcargs[name] for name in names if name != "rank"]
    options = {name: value for name, value in mark.kwargs.items() if name not in _BOTH}
    from unisono.testing.ranks import run

    run(pyfuncitem.obj, world.size, ranks=world.kind, engine=world.engine, args=args, **options)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the traceback of each rank that failed, and nothing of how ranks are run.

    The traceback of an error of unisono ends in the line of the test.
    """
    excinfo = call.excinfo
    error = excinfo and excinfo.value
    if isinstance(error, pytest.FixtureLookupError) and error.argname == "rank":
        error.msg = error.msg or "fixture 'rank' not found: the marker pytest.mark.ranks gives it"
    with trimmed(error):
        if excinfo is not None and isinstance(excinfo.value, UnisonoError):
            call.excinfo = pytest.ExceptionInfo.from_exception(excinfo.value)
        report = yield
    call.excinfo = excinfo
    # The file and line of `pytest.skip` in another process; `unisono.testing.ranks` sets it.
    if (place := getattr(error, "unisono_place", None)) and isinstance(report.longrepr, tuple):
        report.longrepr = (*place, report.longrepr[2])
    if report.failed and call.excinfo is not None and (text := _text(call.excinfo)):
        shown: Any = call.excinfo.getrepr(style="native", chain=False)
        shown.reprtraceback.reprentries[0].lines[:] = f"{text}\n".splitlines(keepends=True)
        if shown.reprcrash is not None:
            # The short summary shows this line.
            error = call.excinfo.value
            cause = error.__cause__ if isinstance(error.__cause__, LaunchError) else error
            shown.reprcrash.message = str(cause).partition("\n")[0]
        report.longrepr = shown
    return report


def _text(raised: pytest.ExceptionInfo[BaseException]) -> str | None:
    """Return the frames above `run` and the text about the ranks; None if `run` is absent."""
    if (ranks_module := sys.modules.get("unisono.testing.ranks")) is None:
        return None
    from unisono.testing.report import frames_of

    frames, code = list(traceback.walk_tb(raised.tb)), ranks_module.run.__code__
    depth = next((i for i, (f, _) in enumerate(frames) if f.f_code is code), None)
    cause = raised.value.__cause__
    own = str(raised.value) if isinstance(raised.value, LaunchError | WorkerFailedError) else ""
    if not own and isinstance(raised.value, UnisonoError) and not isinstance(cause, LaunchError):
        # No rank raised it: `run` refused the call.
        own, cause = f"{type(raised.value).__name__}: {raised.value}", None
    ranks = str(cause or "")
    if depth is None or not (own or isinstance(cause, LaunchError)):
        return None
    above = frames_of(traceback.extract_tb(raised.tb)[:depth])
    parts = [ranks, "" if own in ranks else own]
    return "".join(traceback.format_list(above)) + "\n\n".join(filter(None, parts))
