"""A wrong argument on one rank is a typed error on all, at once, and the group stays usable."""

import pickle

import numpy as np
import pytest

import unisono as dist
from tests.support.lateness import best_s
from tests.worlds import refusal_bodies
from unisono.errors import UsageError
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
    assert told[1] == f"all_gather: {reason}"
    for text in (told[0], told[2]):
        assert text.endswith(f"rank 1 called all_gather, but refused it: {reason}")


def test_float8_is_refused_by_all_ranks():
    pytest.importorskip("torch")
    assert run(refusal_bodies.fp8, 2) == [True] * 2


def test_in_a_stream():
    assert all(run(refusal_bodies.in_a_stream, 2))


WRONG = [
    ("broadcast", lambda x: dist.broadcast(x, 7), "global rank 7 is not in group 'default'"),
    ("broadcast", lambda x: dist.broadcast(x, 0, group_src=0), "can't specify both"),
    ("gather", lambda x: dist.group.WORLD.gather(x, [x], 9), "root=9 is not a rank of group"),
    ("gather", lambda x: dist.gather(x, [x, x]), "gather_list has 2 entries, expected one"),
    ("reduce", lambda x: dist.reduce(x, 0, "sum"), "op must be a ReduceOp"),
    ("all_reduce", lambda x: dist.all_reduce([1, 2]), "tensor must be an array"),
    ("all_reduce", lambda x: dist.all_reduce(x, timeout=-1), "timeout must not be negative"),
    ("scan", lambda x: dist.scan(x * 1j, dist.ReduceOp.MAX), "reduce op MAX is not defined on"),
    ("scatter_object_list", lambda x: dist.scatter_object_list([0], [x], 7), "global rank 7 is"),
    ("send", lambda x: dist.send(x, 7), "global rank 7 is not in group"),
    ("irecv", lambda x: dist.irecv(x, 7), "global rank 7 is not in group"),
    ("P2POp", lambda x: dist.P2POp(dist.isend, x, 7), "global rank 7 is not in group"),
    ("isend", lambda x: dist.isend(x, 0, tag=-1), "tag=-1 is outside"),
    ("new_group", lambda x: dist.new_group([7]), "ranks [7] are outside the world"),
]


def test_the_text_begins_with_what_was_called():
    def body(rank):
        for call, wrong, text in WRONG:
            with pytest.raises(UsageError) as caught:
                wrong(np.ones(3))
            assert caught.value.what.startswith(f"{call}: {text}"), caught.value.what
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    run(body, 1)
