"""The choice of an algorithm with `algorithm=` and UNISONO_ALGO, for every function."""

import os

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


def call(name, rank, p, root, **how):
    """Run one function; return (got, expected) as lists of arrays."""
    mine, total = data(rank), sum(data(r) for r in range(p))
    everybody = [data(r) for r in range(p)]
    blocks = [data(rank, to) for to in range(p)]
    received = [data(r, rank) for r in range(p)]
    outs = [np.zeros(COUNT, int) for _ in range(p)]
    out, big = np.zeros(COUNT, int), np.zeros(p * COUNT, int)
    at_root = rank == root
    match name:
        case "broadcast":
            dist.broadcast(mine, root, **how)
            return [mine], [data(root)]
        case "all_reduce":
            dist.all_reduce(mine, **how)
            return [mine], [total]
        case "all_reduce_coalesced":
            pair = [mine, mine[:3] + 1]
            dist.all_reduce_coalesced(pair, **how)
            return pair, [total, total[:3] + p]
        case "reduce":
            dist.reduce(mine, root, **how)
            return [mine], [total if at_root else data(rank)]
        case "all_gather":
            dist.all_gather(outs, mine, **how)
            return outs, everybody
        case "all_gather_into_tensor":
            dist.all_gather_into_tensor(big, mine, **how)
            return [big], [np.concatenate(everybody)]
        case "all_gather_coalesced":
            rows = [[o, np.zeros(2, int)] for o in outs]
            dist.all_gather_coalesced(rows, [mine, mine[:2]], **how)
            return [t for row in rows for t in row], [t for e in everybody for t in (e, e[:2])]
        case "gather":
            dist.gather(mine, outs if at_root else [], root, **how)
            return (outs, everybody) if at_root else ([], [])
        case "scatter":
            dist.scatter(out, blocks if at_root else None, root, **how)
            return [out], [data(root, rank)]
        case "reduce_scatter":
            dist.reduce_scatter(out, blocks, **how)
            return [out], [sum(received)]
        case "reduce_scatter_tensor":
            dist.reduce_scatter_tensor(out, np.concatenate(blocks), **how)
            return [out], [sum(received)]
        case "all_to_all":
            dist.all_to_all(outs, blocks, **how)
            return outs, received
        case "all_to_all_single":
            dist.all_to_all_single(big, np.concatenate(blocks), **how)
            return [big], [np.concatenate(received)]
    dist.barrier(**how)
    return [], []


def check(name, rank, p, root, **how):
    got, expected = call(name, rank, p, root, **how)
    case = (name, p, root, how, os.environ.get("UNISONO_ALGO"))
    for a, b in zip(got, expected, strict=True):
        assert (a == b).all(), f"{case}: got {a}, expected {b}"


@pytest.mark.sweep(4)
@pytest.mark.ranks(1, 2, 3, 4, 5, 8, kind="both")
def test_every_algorithm_by_name(rank):
    p, calls = dist.get_world_size(), 0
    for name, collective in COLLECTIVES.items():
        for algorithm in available(collective, p):
            for root in {0, p - 1}:
                check(name, rank, p, root, algorithm=algorithm)
                calls += 1
    assert calls >= len(COLLECTIVES) * (2 if p < 4 else 6)


def with_defaults(rank):
    for name in COLLECTIVES:
        check(name, rank, dist.get_world_size(), 0)


@pytest.mark.parametrize("text", ["ring", "linear", "^ring", "tree,ring;broadcast:binomial"])
def test_environment(monkeypatch, text):
    monkeypatch.setenv("UNISONO_ALGO", text)
    run(with_defaults, 3)


def test_the_argument_beats_the_environment(monkeypatch):
    monkeypatch.setenv("UNISONO_ALGO", "all_reduce:bruck")
    with pytest.raises(InvalidArgumentError, match="'all_reduce:bruck' does not serve all_reduce"):
        run(with_defaults, 2)
    run(test_every_algorithm_by_name, 2)


def test_an_unknown_name_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("UNISONO_ALGO", "rign")
    with pytest.raises(InvalidArgumentError) as caught:
        run(with_defaults, 2)
    known = ", ".join(ALGORITHMS)
    unknown = f"algorithm override 'rign': unknown algorithm 'rign' (known: {known})"
    assert caught.value.what == f"broadcast: {unknown}"


@pytest.mark.ranks(3)
def test_unknown_names_list_the_known_ones(rank):
    for name, collective in COLLECTIVES.items():
        with pytest.raises(InvalidArgumentError) as caught:
            call(name, rank, 3, 0, algorithm="rign")
        assert f"{collective} has no algorithm 'rign' (it has: " in caught.value.what
        for algorithm in available(collective, 3):
            assert algorithm in caught.value.what
        with pytest.raises(InvalidArgumentError, match="cube_mesh"):
            call(name, rank, 3, 0, algorithm="cube_mesh")
        check(name, rank, 3, 0)
