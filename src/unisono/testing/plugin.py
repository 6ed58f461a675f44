"""A pytest plug-in: the marker `ranks` and the fixture `world` run tests on several ranks.

Enable it with `pytest_plugins = ["unisono.testing.plugin"]` in a conftest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import pytest

from unisono.testing.ranks import run

__all__ = ["world"]

_BOTH = {"kind": ("threads", "processes"), "engine": ("native", "reference")}

_MARKER = (
    "ranks(*sizes, kind='threads', engine=None, **options): call the test function as "
    "`f(rank, *fixtures)` on every rank of a world of each size. `kind` and `engine` can be "
    "'both'. The options are those of `unisono.testing.run`."
)


class _World(NamedTuple):
    """One value of the parameter `rank`: the world on whose ranks the test function is called."""

    size: int
    kind: Literal["threads", "processes"]
    engine: str | None

    def __str__(self) -> str:
        return "-".join(str(part) for part in self if part is not None)


@pytest.fixture(params=["threads", "processes"])
def world(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Return `unisono.testing.run` for one kind of ranks; the test runs once for each kind.

    def test_sum(world):
        assert world(body, 4) == [...]
    """
    return partial(run, ranks=request.param)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each size, kind and engine that the marker asks for."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None:
        metafunc.parametrize("rank", list(_worlds(mark)), ids=str)


def _worlds(mark: pytest.Mark) -> Iterator[_World]:
    for size in mark.args:
        for kind in _choices(mark, "kind", "threads"):
            for engine in _choices(mark, "engine", None):
                yield _World(size, kind, engine)


def _choices(mark: pytest.Mark, name: str, default: str | None) -> tuple[Any, ...]:
    value = mark.kwargs.get(name, default)
    return _BOTH[name] if value == "both" else (value,)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test with the marker on every rank of its world."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    world = cast("_World", pyfuncitem.funcargs["rank"])
    names = pyfuncitem._fixtureinfo.argnames
    args = [pyfuncitem.funcargs[name] for name in names if name != "rank"]
    options = {name: value for name, value in mark.kwargs.items() if name not in _BOTH}
    run(pyfuncitem.obj, world.size, ranks=world.kind, engine=world.engine, args=args, **options)
    return True
