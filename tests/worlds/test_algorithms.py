"""The user's word on algorithms: `algorithm=` and UNISONO_ALGO, for every function."""

import pytest

from tests.worlds import algorithm_bodies
from tests.worlds.algorithm_bodies import COLLECTIVES
from unisono.errors import InvalidArgumentError
from unisono.schedules import available
from unisono.schedules.registry import ALGORITHMS
from unisono.testing import run


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_every_algorithm_by_name(size):
    calls = run(algorithm_bodies.every_algorithm, size)
    assert min(calls) >= len(COLLECTIVES) * 2


def test_every_algorithm_on_processes():
    assert min(run(algorithm_bodies.every_algorithm, 4, ranks="processes")) > 80


@pytest.mark.parametrize("text", ["ring", "linear", "^ring", "tree,ring;broadcast:binomial"])
def test_environment(monkeypatch, text):
    monkeypatch.setenv("UNISONO_ALGO", text)
    assert all(run(algorithm_bodies.by_environment, 3))


def test_the_argument_beats_the_environment(monkeypatch):
    monkeypatch.setenv("UNISONO_ALGO", "all_reduce:bruck")
    with pytest.raises(InvalidArgumentError, match="'all_reduce:bruck' does not serve all_reduce"):
        run(algorithm_bodies.by_environment, 2)
    assert run(algorithm_bodies.every_algorithm, 2)


def test_an_unknown_name_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("UNISONO_ALGO", "rign")
    with pytest.raises(InvalidArgumentError) as caught:
        run(algorithm_bodies.by_environment, 2)
    known = ", ".join(ALGORITHMS)
    unknown = f"algorithm override 'rign': unknown algorithm 'rign' (known: {known})"
    assert caught.value.what == f"broadcast: {unknown}"


def test_unknown_names_list_the_known_ones():
    for told in run(algorithm_bodies.bad_names, 3):
        for name, collective in COLLECTIVES.items():
            assert f"{collective} has no algorithm 'rign' (it has: " in told[name, "rign"]
            for algorithm in available(collective, 3):
                assert algorithm in told[name, "rign"]
            assert "cube_mesh" in told[name, "cube_mesh"]
