"""A wrong argument on one rank is a typed error on all, at once, and the group stays usable."""

import pytest
import refusal_bodies

from tests.lateness import best_s
from unisono.testing import run


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize(("size", "odd"), [(2, 0), (2, 1), (3, 1), (5, 4)])
def test_one_rank_refuses(size, odd, engine, monkeypatch):
    monkeypatch.setenv("UNISONO_ENGINE", engine)
    for async_op in (False, True):
        waited_s = run(refusal_bodies.every_case, size, args=(odd, async_op))
        # A bound that shows that nobody sat out the time-out of 60 s.
        assert max(waited_s) < 20


@pytest.mark.parametrize("engine", [None, "reference"])
def test_on_processes_within_a_second(engine):
    where = {"ranks": "processes", "engine": engine}
    assert (
        best_s(lambda: max(run(refusal_bodies.every_case, 3, args=(2, False), **where)), 1.0) < 1.0
    )


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_refuse(size):
    assert run(refusal_bodies.all_refuse, size) == [[size] * 3] * size


def test_the_reason_arrives_before_the_news_of_the_end(world):
    reason = "tensor_list has 0 entries, expected one for each of 3 ranks"
    told = world(refusal_bodies.then_gone, 3)
    assert told[1] == reason
    for text in (told[0], told[2]):
        assert text.endswith(f"rank 1 called all_gather, but refused it: {reason}")


def test_float8_is_refused_by_all_ranks():
    pytest.importorskip("torch")
    assert run(refusal_bodies.fp8, 2) == [True] * 2


def test_in_a_stream():
    assert all(run(refusal_bodies.in_a_stream, 2))
