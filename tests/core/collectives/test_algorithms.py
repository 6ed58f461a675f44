"""The choice of an algorithm with `algorithm=` and UNISONO_ALGO, for every function."""

import numpy as np
import pytest

import unisono as dist
from tests.support.operations import COLLECTIVES, Operations
from unisono.core.schedules import available
from unisono.core.schedules.registry import ALGORITHMS
from unisono.errors import InvalidArgumentError
from unisono.testing import run


def check(rank, algorithm=None, root=0):
    """Call all functions that have an algorithm; return their number."""
    p, how = dist.get_world_size(), {} if algorithm is None else {"algorithm": algorithm}
    calls = Operations(rank, p, root=root, how=how)
    names = [n for n, c in COLLECTIVES.items() if algorithm in (None, *available(c, p))]
    for name in names:
        getattr(calls, name)()
        calls.check(name, p, root, algorithm)
    return len(names)


@pytest.mark.sweep(4)
@pytest.mark.ranks(1, 2, 3, 4, 5, 8, kind="both")
def test_every_algorithm_by_name(rank):
    p = dist.get_world_size()
    made = sum(check(rank, algorithm, root) for algorithm in ALGORITHMS for root in {0, p - 1})
    # Other tests of this process may have registered more.
    known = [len({*available(c, p)} & {*ALGORITHMS}) for c in COLLECTIVES.values()]
    assert made == sum(known) * len({0, p - 1})
    assert min(known) >= (1 if p == 1 else 2)


# The C++ engine puts up to 96 bytes beside a flag, and more into a slot.
@pytest.mark.ranks(2, 3, 4)
def test_posts_of_a_few_bytes(rank):
    p = dist.get_world_size()
    for count in (1, 7, 8, 32, 33, 95, 96, 97, 104, 130):
        each = [(np.arange(count) * (r + 3)).astype(np.uint8) for r in range(p)]
        for name in available("all_reduce", p):
            total = each[rank].copy()
            dist.all_reduce(total, algorithm=name)
            assert total.tolist() == sum(each, np.uint8(0)).tolist(), (name, count)
        for name in available("all_gather", p):
            gathered = np.zeros((p, count), np.uint8)
            dist.all_gather_into_tensor(gathered, each[rank], algorithm=name)
            assert gathered.tolist() == [values.tolist() for values in each], (name, count)
        for name in available("broadcast", p):
            got = each[rank].copy()
            dist.broadcast(got, src=p - 1, algorithm=name)
            assert got.tolist() == each[-1].tolist(), (name, count)


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
        with pytest.raises(InvalidArgumentError) as caught:
            getattr(Operations(rank, 3, how={"algorithm": "rign"}), name)()
        assert f"{collective} has no algorithm 'rign' (it has: " in caught.value.what
        for algorithm in available(collective, 3):
            assert algorithm in caught.value.what
        with pytest.raises(InvalidArgumentError, match="cube_mesh"):
            getattr(Operations(rank, 3, how={"algorithm": "cube_mesh"}), name)()
        check(rank)
