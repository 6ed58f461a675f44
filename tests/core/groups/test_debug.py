"""Names of torch for debugging, and names that mean something else here."""

import io
import logging
import sys

import numpy as np
import pytest

import unisono as dist
from unisono import errors
from unisono.testing import run


@pytest.fixture
def logger():
    found = logging.getLogger("unisono")
    level = found.level
    yield found
    found.setLevel(level)


def test_the_debug_level_is_the_loggers(logger, monkeypatch):
    for name, level in (("DETAIL", logging.DEBUG), ("INFO", logging.INFO), ("OFF", "WARNING")):
        dist.set_debug_level(dist.DebugLevel[name])
        assert logger.level == logging._checkLevel(level)
        assert dist.get_debug_level() is dist.DebugLevel[name]
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", name.lower())
        dist.set_debug_level(dist.DebugLevel.INFO)
        dist.set_debug_level_from_env()
        assert dist.get_debug_level() is dist.DebugLevel[name]
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "LOUD")
    with pytest.raises(errors.InvalidArgumentError, match="'LOUD' is none of OFF, INFO, DETAIL"):
        dist.set_debug_level_from_env()
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG")
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() is dist.DebugLevel.OFF


@pytest.mark.ranks(2)
def test_an_error_carries_the_name_of_its_part(rank):
    with pytest.raises(errors.CollectiveMismatchError) as caught, dist.record_comm("gradients"):
        dist.all_reduce(np.ones(2 + rank))
    assert caught.value.__notes__ == ["in record_comm('gradients')"]
    with dist.record_comm("again"):
        dist.barrier()


def test_breakpoint_stops_one_rank_and_the_others_wait(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("p 6 * 7\nc\n"))

    def body(rank):
        for _ in range(2):
            dist.breakpoint(rank=1, skip=1, timeout_s=99)
        return dist.group.WORLD.timeout_s

    assert run(body, 2) == [99, 99]
    assert "(Pdb) 42\n" in capsys.readouterr().out


def test_errors_have_torchs_names():
    assert issubclass(errors.CollectiveTimeoutError, dist.DistBackendError)
    assert issubclass(errors.PeerLostError, dist.DistBackendError)
    assert issubclass(errors.StoreTimeoutError, dist.DistStoreError)
    assert issubclass(errors.StoreConnectionError, dist.DistNetworkError)
    assert issubclass(errors.TransportError, dist.DistNetworkError)
    assert issubclass(dist.QueueEmptyError, dist.DistStoreError)
    for error in (dist.DistBackendError, dist.DistStoreError, dist.DistNetworkError):
        assert issubclass(error, dist.DistError)
        assert issubclass(error, RuntimeError)
    assert not issubclass(errors.InvalidArgumentError, dist.DistBackendError)


def test_refused_names_say_why():
    with pytest.raises(errors.UnsupportedError, match=r"no torch.distributed.Reducer: a part of"):
        dist.Reducer  # noqa: B018  the access is the test
    assert not hasattr(dist, "rpc")
    assert "rpc" not in dir(dist)
    assert dist.reduce_op.SUM is dist.ReduceOp.SUM
    assert dist.all_gather_single is dist.all_gather_into_tensor is dist._all_gather_base
    assert dist.reduce_scatter_single is dist.reduce_scatter_tensor is dist._reduce_scatter_base
    assert dist.default_pg_timeout.total_seconds() == 1800
