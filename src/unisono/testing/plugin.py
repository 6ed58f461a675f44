"""A pytest plug-in: the fixture `world`, which runs a body on threads and on processes.

Enable it with `pytest_plugins = ["unisono.testing.plugin"]` in a conftest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from unisono.testing.ranks import run

__all__ = ["world"]


@pytest.fixture(params=["threads", "processes"])
def world(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Return `unisono.testing.run` for one kind of ranks; the test runs once for each kind.

    def test_sum(world):
        assert world(body, 4) == [...]
    """
    return partial(run, ranks=request.param)
