"""scan and exscan."""

import pytest

from tests.support import several
from tests.worlds import prefix_bodies
from unisono.testing import run


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("body", prefix_bodies.BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_against_numpy(body, size, engine):
    run(body, size, engine=engine)


def test_on_processes():
    run(several.run_all, 3, ranks="processes", args=(prefix_bodies.BODIES,))


def test_mistakes():
    run(prefix_bodies.mistakes, 2)
