"""What tests on ranks need often: calls to make later, expected errors, waits."""

import time
from contextlib import contextmanager

import numpy as np
import pytest

import unisono as dist
from unisono.lowlevel import dispatcher


def f32(count=4):
    return np.full(count, 1.5, np.float32)


def frozen():
    """Return an array that no call may write."""
    return np.frombuffer(bytes(16), np.float32)


def blocks(count=4, number=None):
    """Return one array for each rank of the world, or `number` arrays."""
    return [f32(count) for _ in range(number or dist.get_world_size())]


def later(name, *parts, **options):
    """Return a function that calls `dist.name`; parts that are functions make the arguments."""

    def call(**how):
        made = [p() if callable(p) and not _is_value(p) else p for p in parts]
        return getattr(dist, name)(*made, **options, **how)

    return call


def _is_value(part):
    return isinstance(part, (dist.ReduceOp, type(max)))


def finish(work):
    """Wait for the work of an asynchronous call; accept the None of a synchronous call."""
    if work is not None:
        work.wait()


@contextmanager
def fails(error, *texts):
    """Expect an error whose first line contains all texts; yield it as pytest.raises does."""
    with pytest.raises(error) as caught:
        yield caught
    for text in texts:
        assert text in caught.value.what, (text, caught.value.what)


@contextmanager
def operations_of(group=None):
    """Yield a list that gets the name of each operation that a group, or any group, runs."""
    names = []

    def wrapper(schema, device, kernel):
        def run(called, *arguments):
            if group in (None, called):
                names.append(schema.name)
            return kernel(called, *arguments)

        return run

    remove = dispatcher.register_wrapper(wrapper)
    try:
        yield names
    finally:
        remove()


def check_usable(group=None):
    """Reduce something in a group, the default group by default."""
    x = np.ones(3)
    dist.all_reduce(x, group=group)
    assert (x == dist.get_world_size(group)).all()


def wait_until(condition, limit_s=60.0):
    """Wait for a condition that no event announces; return whether it came true."""
    end_s, pause_s = time.monotonic() + limit_s, 0.001
    while not condition() and time.monotonic() < end_s:
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.02)
    return condition()
