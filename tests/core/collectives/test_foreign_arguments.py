"""Hints for arguments that come from another library: MPI's words, pandas' frames."""

import numpy as np
import pytest

import unisono as dist
from unisono.errors import ArgumentTypeError, InvalidArgumentError


@pytest.fixture
def alone():
    with dist.HashStore() as store:
        dist.init_process_group(store=store, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def x():
    return np.ones(2)


# fmt: off
KEYWORDS = {
    "broadcast root": (lambda: dist.broadcast(x(), root=0), "broadcast", "root", "src"),
    "root besides src": (lambda: dist.broadcast(x(), 0, root=0), "broadcast", "root", "src"),
    "reduce root": (lambda: dist.reduce(x(), root=0), "reduce", "root", "dst"),
    "gather root": (lambda: dist.gather(x(), [x()], root=0), "gather", "root", "dst"),
    "scatter root": (lambda: dist.scatter(x(), [x()], root=0), "scatter", "root", "src"),
    "send dest": (lambda: dist.send(x(), dest=0), "send", "dest", "dst"),
    "isend dest": (lambda: dist.isend(x(), dest=0), "isend", "dest", "dst"),
    "recv source": (lambda: dist.recv(x(), source=0), "recv", "source", "src"),
    "recv peer": (lambda: dist.recv(x(), peer=0), "recv", "peer", "src"),
    "irecv peer": (lambda: dist.irecv(x(), peer=0), "irecv", "peer", "src"),
    "irecv source": (lambda: dist.irecv(x(), source=0), "irecv", "source", "src"),
    "comm": (lambda: dist.all_reduce(x(), comm=None), "all_reduce", "comm", "group"),
    "barrier": (lambda: dist.barrier(tiemout=1), "barrier", "tiemout", "timeout"),
    "near": (lambda: dist.all_reduce(x(), algoritm="r"), "all_reduce", "algoritm", "algorithm"),
    "method": (lambda: dist.group.WORLD.broadcast(x(), src=0), "broadcast", "src", "root"),
    "no root": (lambda: dist.all_reduce(x(), root=0), "all_reduce", "root", None),
    "far": (lambda: dist.scan(x(), zzz=1), "scan", "zzz", None),
    "object root": (
        lambda: dist.broadcast_object_list([1], root=0), "broadcast_object_list", "root", "src",
    ),
    "object dest": (lambda: dist.gather_object(1, [1], dest=0), "gather_object", "dest", "dst"),
    "object near": (
        lambda: dist.all_reduce_object(1, max, tiemout=1), "all_reduce_object", "tiemout",
        "timeout",
    ),
    "object comm": (
        lambda: dist.all_gather_object([1], 1, comm=0), "all_gather_object", "comm", "group"
    ),
    "object far": (lambda: dist.all_gather_object(zzz=1), "all_gather_object", "zzz", None),
    "op": (lambda: dist.scan(x(), opp=1), "scan", "opp", "op"),
}
# fmt: on


@pytest.mark.parametrize("name", KEYWORDS)
def test_unknown_keyword_and_the_one_that_is_meant(alone, name):
    call, op, unknown, meant = KEYWORDS[name]
    with pytest.raises(ArgumentTypeError) as caught:
        call()
    assert caught.value.what.startswith(f"{op}() got an unexpected keyword argument {unknown!r} ")
    assert caught.value.hint == (meant and f"did you mean {meant!r}?")
    dist.all_reduce(x())


class Frame:
    """What pandas.DataFrame has in common with an array: not enough."""

    def to_numpy(self, copy=False):
        return x()


Frame.__module__ = "pandas.core.frame"


@pytest.mark.parametrize("value", [Frame(), np.broadcast_to(1.0, 3)], ids=["frame", "values"])
def test_hint_for_pandas(alone, value):
    with pytest.raises((ArgumentTypeError, InvalidArgumentError)) as caught:
        dist.all_reduce(value)
    assert "df.to_numpy(copy=True)" in caught.value.hint
