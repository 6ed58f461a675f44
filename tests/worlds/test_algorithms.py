"""The choice of an algorithm with `algorithm=` and UNISONO_ALGO, for every function."""

from functools import partial

import numpy as np
import pytest

import unisono as dist
from unisono.errors import InvalidArgumentError
from unisono.schedules import available
from unisono.schedules.registry import ALGORITHMS
from unisono.testing import run

COUNT = 11
# Function of unisono -> collective whose algorithms it takes.
COLLECTIVES = {
    "broadcast": "broadcast", "all_reduce": "all_reduce", "all_reduce_coalesced": "all_reduce",
    "reduce": "reduce", "all_gather": "all_gather", "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather", "gather": "gather", "scatter": "scatter",
    "reduce_scatter": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all", "all_to_all_single": "all_to_all", "barrier": "barrier",
}  # fmt: skip


def data(rank, block=0):
    return np.arange(COUNT) * 3 + 100 * rank + 10000 * block


def calls(rank, p, root=0):
    """Return {function: (call, the arrays that it fills, what these hold afterwards)}."""
    at_root, total = rank == root, sum(data(r) for r in range(p))
    everybody = [data(r) for r in range(p)]
    blocks = [data(rank, to) for to in range(p)]
    received = [data(r, rank) for r in range(p)]
    mine, sent, stacked = data(rank), np.concatenate(blocks), np.concatenate(everybody)
    a, b, c, pair = data(rank), data(rank), data(rank), [data(rank), data(rank)[:3] + 1]
    outs, gathered, swapped = ([np.zeros(COUNT, int) for _ in range(p)] for _ in range(3))
    rows = [[np.zeros(COUNT, int), np.zeros(2, int)] for _ in range(p)]
    flat = [entry for row in rows for entry in row]
    parts = [part for one in everybody for part in (one, one[:2])]
    d, e, f = (np.zeros(COUNT, int) for _ in range(3))
    big, turned = np.zeros(p * COUNT, int), np.zeros(p * COUNT, int)
    return {
        "broadcast": (partial(dist.broadcast, a, root), [a], [data(root)]),
        "all_reduce": (partial(dist.all_reduce, b), [b], [total]),
        "all_reduce_coalesced": (
            partial(dist.all_reduce_coalesced, pair), pair, [total, total[:3] + p]),
        "reduce": (partial(dist.reduce, c, root), [c], [total if at_root else mine]),
        "all_gather": (partial(dist.all_gather, outs, mine), outs, everybody),
        "all_gather_into_tensor": (
            partial(dist.all_gather_into_tensor, big, mine), [big], [stacked]),
        "all_gather_coalesced": (
            partial(dist.all_gather_coalesced, rows, [mine, mine[:2]]), flat, parts),
        "gather": (
            partial(dist.gather, mine, gathered if at_root else [], root),
            gathered, everybody if at_root else [0] * p),
        "scatter": (
            partial(dist.scatter, d, blocks if at_root else None, root), [d], [data(root, rank)]),
        "reduce_scatter": (partial(dist.reduce_scatter, e, blocks), [e], [sum(received)]),
        "reduce_scatter_tensor": (
            partial(dist.reduce_scatter_tensor, f, sent), [f], [sum(received)]),
        "all_to_all": (partial(dist.all_to_all, swapped, blocks), swapped, received),
        "all_to_all_single": (
            partial(dist.all_to_all_single, turned, sent), [turned], [np.concatenate(received)]),
        "barrier": (dist.barrier, [], []),
    }  # fmt: skip


def check(rank, algorithm=None, root=0):
    """Call all functions that have an algorithm; return their number."""
    p, made = dist.get_world_size(), 0
    how = {} if algorithm is None else {"algorithm": algorithm}
    for name, (call, got, expected) in calls(rank, p, root).items():
        if algorithm in (None, *available(COLLECTIVES[name], p)):
            call(**how)
            made += 1
            for x, y in zip(got, expected, strict=True):
                assert (x == y).all(), f"{(name, p, root, algorithm)}: got {x}, expected {y}"
    return made


@pytest.mark.sweep(4)
@pytest.mark.ranks(1, 2, 3, 4, 5, 8, kind="both")
def test_every_algorithm_by_name(rank):
    p = dist.get_world_size()
    made = sum(check(rank, algorithm, root) for algorithm in ALGORITHMS for root in {0, p - 1})
    known = [len(available(collective, p)) for collective in COLLECTIVES.values()]
    assert made == sum(known) * len({0, p - 1})
    assert min(known) >= (1 if p == 1 else 2)


@pytest.mark.parametrize("text", ["ring", "linear", "^ring", "tree,ring;broadcast:binomial"])
def test_environment(monkeypatch, text):
    monkeypatch.setenv("UNISONO_ALGO", text)
    run(check, 3)


def test_the_argument_beats_the_environment(monkeypatch):
    monkeypatch.setenv("UNISONO_ALGO", "all_reduce:bruck")
    with pytest.raises(InvalidArgumentError, match="'all_reduce:bruck' does not serve all_reduce"):
        run(check, 2)
    run(test_every_algorithm_by_name, 2)


def test_an_unknown_name_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("UNISONO_ALGO", "rign")
    with pytest.raises(InvalidArgumentError) as caught:
        run(check, 2)
    known = ", ".join(ALGORITHMS)
    unknown = f"algorithm override 'rign': unknown algorithm 'rign' (known: {known})"
    assert caught.value.what == f"broadcast: {unknown}"


@pytest.mark.ranks(3)
def test_unknown_names_list_the_known_ones(rank):
    for name, collective in COLLECTIVES.items():
        call = calls(rank, 3)[name][0]
        with pytest.raises(InvalidArgumentError) as caught:
            call(algorithm="rign")
        assert f"{collective} has no algorithm 'rign' (it has: " in caught.value.what
        for algorithm in available(collective, 3):
            assert algorithm in caught.value.what
        with pytest.raises(InvalidArgumentError, match="cube_mesh"):
            call(algorithm="cube_mesh")
        check(rank)
