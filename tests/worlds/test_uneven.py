"""all_gather, gather, scatter and reduce_scatter of blocks of different size."""

import pytest

from tests.support import several
from tests.worlds import uneven_bodies
from unisono.testing import run


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_against_numpy(size, engine):
    run(uneven_bodies.everything, size, engine=engine)


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("size", [2, 3])
def test_what_does_not_fit(size, engine):
    run(uneven_bodies.mistakes, size, engine=engine)


def test_on_processes():
    run(several.run_all, 3, ranks="processes", args=(uneven_bodies.BODIES,))


def test_in_a_world_of_one():
    run(uneven_bodies.alone, 1)


@pytest.mark.parametrize("size", [2, 3])
def test_by_turns(size):
    run(uneven_bodies.by_turns, size)
