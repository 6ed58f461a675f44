"""deterministic=True and UNISONO_DETERMINISTIC."""

import pytest

from tests.worlds import deterministic_bodies
from unisono.errors import InvalidArgumentError
from unisono.testing import run


@pytest.mark.parametrize(
    ("engine", "transport"), [("native", None), ("reference", "inproc"), ("reference", "tcp")]
)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_algorithm_gives_the_bits_of_a_fold(size, engine, transport):
    assert all(
        run(deterministic_bodies.every_ordered_algorithm, size, engine=engine, transport=transport)
    )


@pytest.mark.parametrize("isa", ["plain", "v3", "v4"])
def test_every_instruction_set(isa):
    engine = pytest.importorskip("unisono._engine")
    if isa not in engine.isas():
        pytest.skip(f"this machine has no {isa}")
    before = engine.isa()
    engine.set_isa(isa)
    try:
        assert all(run(deterministic_bodies.every_ordered_algorithm, 3, engine="native"))
    finally:
        engine.set_isa(before)


def test_on_processes():
    assert all(run(deterministic_bodies.every_ordered_algorithm, 4, ranks="processes"))


@pytest.mark.parametrize(
    ("name", "value"), [("UNISONO_SHARED_MEMORY", "0"), ("UNISONO_RANKS_PER_HOST", "2")]
)
def test_between_hosts(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    # Every fifth pair of dtype and op, among them MIN and MAX: of two zeros the order decides.
    where = {"ranks": "processes", "args": ((1000,), 5)}
    assert all(run(deterministic_bodies.every_ordered_algorithm, 3, **where))


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_by_environment(size, engine, monkeypatch):
    monkeypatch.setenv("UNISONO_DETERMINISTIC", "1")
    assert all(run(deterministic_bodies.by_environment, size, engine=engine))


def test_an_environment_that_says_neither_yes_nor_no(monkeypatch):
    monkeypatch.setenv("UNISONO_DETERMINISTIC", "perhaps")
    with pytest.raises(InvalidArgumentError, match="'perhaps' is neither 0 nor 1"):
        run(deterministic_bodies.by_environment, 1)


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_beside_usual_calls(engine):
    # The order matters here: the usual call, on five ranks, gives other bits.
    assert all(run(deterministic_bodies.beside_usual_calls, 5, engine=engine))


def test_mistakes():
    run(deterministic_bodies.mistakes, 3)


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_half_precision(engine):
    pytest.importorskip("torch")
    assert all(run(deterministic_bodies.half_precision_of_torch, 4, engine=engine))
