"""Receives of shorter messages, and messages of a rank to itself."""

import numpy as np
import pytest

import unisono as dist
from unisono.errors import CollectiveMismatchError, InvalidArgumentError


@pytest.fixture(params=["shared memory", "wires"])
def way(request, monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0" if request.param == "wires" else "")


@pytest.mark.ranks(2, kind="processes", engine="both")
def test_a_partial_receive_takes_shorter_messages_and_counts_them(rank, way):
    counts = [0, 1, 1000, 3_000_000, 4_000_000]
    for count in counts:
        if rank == 0:
            dist.send(np.arange(count, dtype=np.float32), 1)
            continue
        x = np.full(counts[-1], -1, np.float32)
        assert dist.recv(x, 0, partial=True) == count
        assert (x[:count] == np.arange(count)).all()
        assert (x[count:] == -1).all()
    if rank == 0:
        dist.send(np.arange(5.0), 1, tag=3)
        dist.send(np.arange(5.0), 1, tag=3)
        dist.send(np.arange(9.0), 1, tag=3)
        dist.send(np.arange(3.0), 1, tag=4)
    else:
        # Every second element of an array, and a message that came before its receive.
        x = np.full(16, -1.0)
        dist.recv(y := np.empty(3), 0, tag=4)
        assert dist.recv(x[::2], tag=3, partial=True) == 5
        assert x.tolist() == [0, -1, 1, -1, 2, -1, 3, -1, 4, -1, -1, -1, -1, -1, -1, -1]
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 sent float64\[5\]"):
            dist.recv(np.empty(5, np.int64), 0, tag=3, partial=True)
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 sent float64\[9\]") as caught:
            dist.recv(np.empty(8), 0, tag=3, partial=True)
        assert "the message was dropped" in str(caught.value)
        assert y.tolist() == [0, 1, 2]
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_partial_receive_in_a_stream_counts(rank):
    side = dist.Stream("side")
    with dist.stream(side):
        if rank == 0:
            dist.send(np.ones(2), 1)
        else:
            assert dist.recv(np.zeros(5), 0, partial=True) == 2
    side.synchronize(60)
    dist.barrier()


@pytest.mark.ranks(2, engine="both")
def test_a_send_to_itself_needs_a_posted_receive(rank):
    with pytest.raises(InvalidArgumentError, match="would wait for its own receive"):
        dist.send(np.ones(3), rank)
    x = np.zeros(3)
    work = dist.irecv(x, rank, tag=2)
    with pytest.raises(InvalidArgumentError, match="would wait for its own receive"):
        dist.send(np.ones(3), rank, tag=1)
    dist.send(np.full(3, float(rank)), rank, tag=2)
    assert work.wait()
    assert x.tolist() == [rank] * 3


@pytest.mark.ranks(2, kind="processes", engine="both")
def test_a_raw_receive_takes_a_message_of_another_dtype(rank, way):
    group = dist.group.WORLD
    for count in (0, 5, 300_000):
        if rank == 0:
            dist.send(np.arange(count, dtype=np.int16), 1)
            continue
        x = np.full(600_001, 7, np.uint8)
        work = group.recv(x, 0, 0, async_op=True, _partial="raw")
        assert work.wait()
        assert work._received() == 2 * count
        assert (x[: 2 * count].view(np.int16) == np.arange(count, dtype=np.int16)).all()
        assert (x[2 * count :] == 7).all()
    if rank == 0:
        dist.send(np.arange(9.0), 1)
    else:
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 sent float64\[9\]"):
            group.recv(np.empty(71, np.uint8), 0, 0, _partial="raw")
    dist.barrier()
