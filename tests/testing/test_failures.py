"""unisono.testing.run: the failure that it raises."""

import pytest

import unisono as dist
from unisono.errors import LaunchError


def fail(rank):
    if rank == 1:
        raise KeyError("the cause")
    dist.barrier()


def fail_wrapped(rank):
    try:
        fail(rank)
    except dist.errors.PeerError as error:
        raise RuntimeError("step") from error


@pytest.mark.parametrize("fn", [fail, fail_wrapped])
def test_the_cause_is_raised_not_its_consequences(world, fn):
    with pytest.raises(KeyError, match="the cause") as caught:
        world(fn, 3)
    assert isinstance(caught.value.__cause__, LaunchError)
    assert str(caught.value.__cause__).startswith("rank 1 of 3 ")
