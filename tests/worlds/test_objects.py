"""Object collectives, over pickle and over other serialisers."""

import importlib.util

import pytest

from tests.support import several
from tests.worlds import object_bodies
from unisono.testing import run

BODIES = [
    object_bodies.everything,
    object_bodies.defaults,
    object_bodies.own_copies,
    object_bodies.messages,
    object_bodies.in_a_group,
    object_bodies.mistakes,
    object_bodies.from_several_threads,
    object_bodies.serializers,
]
if importlib.util.find_spec("torch"):
    BODIES.append(object_bodies.torch_tensors)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_on_threads(body, engine):
    run(body, 3, engine=engine)


def test_on_processes():
    run(several.run_all, 3, ranks="processes", args=(BODIES,))


@pytest.mark.parametrize("body", [object_bodies.everything, object_bodies.defaults])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_other_sizes(body, size):
    run(body, size)


def test_arrays_are_not_copied():
    object_bodies.copies(0)
