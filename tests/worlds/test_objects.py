"""Object collectives, over pickle and over other serialisers."""

import importlib.util

import pytest

import unisono as dist
from tests.support import several
from tests.worlds import object_bodies
from unisono.errors import CollectiveError
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


def object_of_a_group_that_cannot_be_sent(rank):
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    with pytest.raises(CollectiveError if rank == 1 else TypeError) as caught:
        dist.all_gather_object([None] * 2, rank if rank == 1 else memoryview(b""), group)
    return (caught.value.what, caught.value.context.peers) if rank == 1 else None


def test_the_error_of_a_group_names_the_global_rank():
    what, peers = run(object_of_a_group_that_cannot_be_sent, 3)[1]
    assert ": rank 2 had nothing to send: TypeError: cannot pickle" in what
    assert peers == (2,)
