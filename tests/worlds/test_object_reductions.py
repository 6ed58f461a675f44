"""reduce_object and all_reduce_object."""

import pytest

from tests.support import several
from tests.worlds import object_reduction_bodies
from unisono.testing import run


@pytest.mark.parametrize("body", object_reduction_bodies.BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_on_threads(body, engine):
    run(body, 3, engine=engine)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_other_sizes(size):
    run(object_reduction_bodies.in_rank_order, size)


def test_on_processes():
    run(several.run_all, 3, ranks="processes", args=(object_reduction_bodies.BODIES,))
