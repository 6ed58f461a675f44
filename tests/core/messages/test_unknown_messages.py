"""probe, recv_array, any tag, sendrecv, and tags of object messages."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import fails
from unisono.core.backends import p2p
from unisono.core.base.threads.completion import Completion
from unisono.core.transports import transfers
from unisono.errors import (
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    PeerLostError,
)
from unisono.testing import run

ANY = dist.ANY_TAG
SIZES = (0, 1, 50, 70_000)
# Above the tags that ANY_TAG takes.
GO, DONE = 2**62 + 7, 2**62 + 8


# ---- order, against a model of MPI's rules --------------------------------------------------


def script_of(seed, ranks, steps):
    """Return random sends of all ranks, and receives and probes of rank 0."""
    draw = random.Random(seed)
    tags = range(len(SIZES))
    script = []
    for number in range(steps):
        wanted = draw.choice([None, *range(ranks)]), draw.choice([ANY, *tags])
        if draw.random() < 0.5:
            script.append(("send", draw.randrange(ranks), draw.choice(tags), number))
        else:
            script.append((draw.choice(["receive", "receive", "probe"]), *wanted, number))
    return script


class Model:
    """MPI's matching: the oldest message for a receive, the oldest receive for a message."""

    def __init__(self):
        self.posted, self.waiting, self.matched = [], [], {}

    @staticmethod
    def fits(wanted, message):
        return all(want in (None, ANY, has) for want, has in zip(wanted, message, strict=False))

    def oldest(self, wanted):
        return next((each for each in self.waiting if self.fits(wanted, each)), None)

    def send(self, message):
        for receive in self.posted:
            if self.fits(receive[:2], message):
                self.posted.remove(receive)
                self.matched[receive[2]] = message
                return
        self.waiting.append(message)

    def receive(self, *receive):
        found = self.oldest(receive[:2])
        if found is None:
            self.posted.append(receive)
        else:
            self.waiting.remove(found)
            self.matched[receive[2]] = found


def data_of(tag, number):
    return np.arange(SIZES[tag]) + number


def send_in_turn(rank, source, tag, number):
    """Send a message of `source` to rank 0, which has it before this returns there."""
    if source == 0:
        if rank == 0:
            dist.isend(data_of(tag, number), 0, tag=tag).wait()
    elif rank == 0:
        dist.send(np.zeros(0), source, tag=GO)
        dist.recv(np.zeros(0), source, tag=DONE)
    elif rank == source:
        dist.recv(np.zeros(0), 0, tag=GO)
        dist.send(data_of(tag, number), 0, tag=tag)
        dist.send(np.zeros(0), 0, tag=DONE)


def receive(source, tag, number):
    """Post a receive: of a known size if there is one, by either way."""
    if tag == ANY or number % 2:
        return dist.group.WORLD.recv_array(source, tag, async_op=True), None
    into = np.empty(SIZES[tag], np.int64)
    return dist.irecv(into, source, tag=tag), into


def follow(rank, seed, steps=60):
    model, works = Model(), {}
    for kind, source, tag, number in script_of(seed, dist.get_world_size(), steps):
        if kind == "send":
            model.send((source, tag, number))
            send_in_turn(rank, source, tag, number)
        elif rank != 0:
            continue
        elif kind == "receive":
            model.receive(source, tag, number)
            works[number] = receive(source, tag, number)
        else:
            found, expected = dist.probe(source, tag=tag, wait=False), model.oldest((source, tag))
            got = None if found is None else (found.source, found.tag, found.count)
            assert got == (expected and (*expected[:2], SIZES[expected[1]])), (seed, number)
    for number, (work, into) in works.items():
        if number not in model.matched:
            assert not work.is_completed(), (seed, number)
            work.cancel()
            continue
        source, tag, sent = model.matched[number]
        assert work.wait(), (seed, number)
        assert (work.source_rank(), work.tag()) == (source, tag), (seed, number)
        array = work.result()[0] if into is None else into
        assert (array == data_of(tag, sent)).all(), (seed, number)
    if rank == 0:
        for source, tag, sent in model.waiting:
            got = dist.recv_array(tag=ANY)
            assert (got.source, got.tag) == (source, tag), (seed, sent)
            assert (got.array == data_of(tag, sent)).all(), (seed, sent)
        assert dist.probe(wait=False) is None
    dist.barrier()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("kind", ["threads", "processes", "wires"])
def test_messages_match_as_in_mpi(kind, engine, seed, monkeypatch):
    if kind == "wires":
        monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    ranks = "threads" if kind == "threads" else "processes"
    run(follow, 3, ranks=ranks, engine=engine, args=(seed,))


# ---- recv_array and probe -------------------------------------------------------------------


def every_kind_of_array():
    record = np.zeros(3, [("a", "i4"), ("b", "f8")])
    record["b"] = 1, 2, 3
    grid = np.arange(24.0).reshape(4, 6)
    return [
        *((np.arange(7) % 2).astype(letter) for letter in "?bBhHiIlLefdFD"),
        np.empty(0, np.float32), np.array(5.0), grid, grid[::-1, ::2], record,
        np.arange(400_000, dtype=np.int32), np.arange(3_000_000.0),
    ]  # fmt: skip


def of_unknown_size(rank):
    for number, sent in enumerate(every_kind_of_array()):
        # Records come as bytes.
        expected = sent.ravel().view(np.uint8) if sent.dtype.names else sent.ravel()
        if rank == 0:
            dist.isend(sent, 1, tag=number).wait()
            continue
        if number % 2:
            found = dist.probe(0)
            assert (found.source, found.tag, found.nbytes) == (0, number, expected.nbytes)
            assert found.count == expected.size
            assert found.dtype == (None if sent.dtype.names else expected.dtype.name)
        array, source, tag = dist.recv_array(0, tag=ANY if number % 3 else number)
        assert (source, tag) == (0, number)
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        assert (array == expected).all()
        array[:1] = 1
    dist.barrier()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("kind", ["threads", "processes", "wires"])
def test_an_array_of_unknown_size_arrives_as_it_was_sent(kind, engine, monkeypatch):
    if kind == "wires":
        monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    run(of_unknown_size, 2, ranks="threads" if kind == "threads" else "processes", engine=engine)


@pytest.mark.ranks(2)
def test_bfloat16_arrives_as_its_bits(rank):
    import torch

    x = torch.arange(6).to(torch.bfloat16)
    if rank == 0:
        dist.send(x, 1)
    else:
        assert (dist.probe(0).dtype, dist.probe(0).count) == ("bfloat16", 6)
        array = dist.recv_array(0).array
        # With ml_dtypes, which another test may have imported, the dtype is bfloat16.
        bits = x.view(torch.int16).numpy()
        assert array.dtype.name in ("uint16", "bfloat16")
        assert (array.view(np.int16) == bits).all()
    dist.barrier()


@pytest.mark.ranks(2, kind="both", engine="both")
def test_calls_that_wait_for_their_message(rank):
    """Receives and probes that are posted before the message."""
    x = np.arange(200_000.0)
    group = dist.new_group([1, 0], sort_ranks=False)
    if rank == 0:
        for _ in range(4):
            dist.recv(np.zeros(0), 1)
        for tag in (3, 4):
            dist.send(x + tag, 1, tag=tag)
        dist.send(x, 1, group)
    else:
        pool = ThreadPoolExecutor(3)
        # Threads of one process have no default group if their ranks are threads.
        world = dist.group.WORLD
        probes = [pool.submit(dist.probe, 0, world, tag) for tag in (3, ANY)]
        whole = world.recv_array(None, 4, async_op=True)
        for _ in range(4):
            dist.send(np.zeros(0), 0)
        assert [probe.result(60).tag for probe in probes] == [3, 3]
        assert whole.wait()
        assert (whole.result()[0] == x + 4).all()
        assert (dist.recv_array(tag=ANY).array == x + 3).all()
        found = dist.probe(group=group, group_src=1)
        assert (found.source, found.tag, found.dtype, found.count) == (0, 0, "float64", x.size)
        assert dist.probe(wait=False) is None
        assert dist.recv_array(group=group).source == 0
        pool.shutdown()
    dist.barrier()


@pytest.mark.ranks(2, kind="both", engine="both")
def test_threads_that_receive_at_once_get_each_message_once(rank):
    """Each message comes once, and whole."""
    sizes = [(i * 37) % 5000 for i in range(120)]
    if rank == 0:
        for number, size in enumerate(sizes):
            dist.send(np.full(size, number), 1, tag=number % 5)
    else:
        world = dist.group.WORLD
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda _: dist.recv_array(None, world, ANY).array, sizes))
        assert sorted(len(array) for array in got) == sorted(sizes)
        assert all(len(array) == sizes[array[0]] for array in got if len(array))
        assert all((array == array[0]).all() for array in got if len(array))
    dist.barrier()


@pytest.mark.ranks(2, kind="both", engine="both")
def test_errors_of_probe_and_recv_array(rank):
    for bad in ({"src": 7}, {"src": 0, "group_src": 0}, {"tag": -2}, {"tag": 2**63}):
        for call in (dist.probe, dist.recv_array):
            with pytest.raises(InvalidArgumentError):
                call(**bad)
    with pytest.raises(InvalidArgumentError, match="tag=-1 is outside"):
        dist.isend(np.ones(1), 0, tag=ANY)
    if rank == 1:
        for call, text in [
            (lambda: dist.probe(0, timeout=0.05), "probe(src=0, tag=any)"),
            (lambda: dist.probe(tag=3, timeout=0.05), "probe(src=any, tag=3)"),
            (lambda: dist.recv_array(0, timeout=0.05), "recv_array(src=0, tag=0)"),
            (lambda: dist.recv(np.ones(2), tag=ANY, timeout=0.05),
             "recv(float64[2], src=any, tag=any)"),
        ]:  # fmt: skip
            with fails(CollectiveTimeoutError, text, "timed out after 50 ms on rank 1 of 2"):
                call()
    dist.barrier()
    if rank == 0:
        dist.send(np.arange(3), 1, tag=6)
    else:
        with fails(CollectiveMismatchError, "recv(float64[3], src=any, tag=any)", "int64[3]"):
            dist.recv(np.zeros(3), tag=ANY)
        assert dist.probe(wait=False) is None
    group = dist.new_group()
    probe = group.probe(0, async_op=True)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(probe.wait_on_host)
        for _ in range(5):
            # As long as this takes, the other thread should be in its wait.
            dist.barrier()
        dist.destroy_process_group(group)
        with fails(ClosedError, "probe(src=0, tag=any) in group '1' ended", "destroyed here"):
            ended.result(60)
    dist.barrier()


def test_a_message_without_memory_is_dropped(monkeypatch):
    def no_memory(*_):
        raise MemoryError

    def body(rank):
        if rank == 0:
            dist.send(np.ones(3), 1, tag=1)
            dist.send(np.ones(3), 1)
        else:
            dist.probe(0, tag=0)
            with monkeypatch.context() as patch:
                patch.setattr(transfers, "np", SimpleNamespace(empty=no_memory, uint8=np.uint8))
                with pytest.raises(MemoryError) as caught:
                    dist.recv_array(0, tag=1)
            assert str(caught.value) == (
                "recv_array(src=0, tag=1) in group 'default' has no memory on rank 1 of 2: "
                "rank 0 sent float64[3], which was dropped"
            )
            assert dist.recv_array(0).array.sum() == 3
        dist.barrier()

    run(body, 2, engine="reference")


def receives_again_after_timeouts(rank):
    """Large messages and receives whose time ends in the middle of them."""
    size, rounds = 4_000_000, 4
    for number in range(rounds):
        into, came = np.empty(size), None
        if rank == 0:
            dist.send(np.arange(float(size)) + number, 1, tag=3)
        while rank == 1 and came is None:
            with contextlib.suppress(CollectiveTimeoutError):
                if number % 2:
                    dist.recv(into, 0, tag=3, timeout=0.003)
                    came = into
                else:
                    came = dist.recv_array(tag=ANY, timeout=0.003).array
        assert rank == 0 or (came == np.arange(float(size)) + number).all()
        dist.barrier(timeout=30)


@pytest.mark.parametrize("engine", ["native", "wires", "reference"])
def test_a_receive_that_timed_out_leaves_the_message_to_the_next(engine, monkeypatch):
    if engine == "wires":
        monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
        engine = "native"
    run(receives_again_after_timeouts, 2, ranks="processes", engine=engine, timeout=60)


def test_a_receive_that_ends_as_it_is_cancelled_has_its_message(monkeypatch):
    """The thread that ends the transfer has not come to the end of the call yet."""
    ending, goes_on, held = threading.Event(), threading.Event(), []
    receive, wait = p2p.Message._take_unknown, Completion.wait_until

    def held_up(message):
        held.append(message)
        ending.set()
        assert goes_on.wait(60)
        receive(message)

    def waits(completion, deadline):
        if completion in held:
            goes_on.set()
        return wait(completion, deadline)

    def body(rank):
        pg = dist.group.WORLD
        if rank == 1:
            work = pg.recv_array(0, 1, async_op=True)
            dist.barrier()
            assert ending.wait(60)
            work.cancel()
            done = work._pending._done
            goes_on.set()
            assert done
            assert work.result()[0].tolist() == [0, 1, 2]
        else:
            dist.barrier()
            dist.send(np.arange(3.0), 1, tag=1)
        dist.barrier()

    monkeypatch.setattr(p2p.Message, "_take_unknown", held_up)
    monkeypatch.setattr(Completion, "wait_until", waits)
    run(body, 2, engine="reference", transport="tcp")


@pytest.mark.parametrize("engine", [pytest.param("native", marks=pytest.mark.native), "reference"])
def test_one_thread_ends_a_message(monkeypatch, engine):
    """A second end would write to an array that its owner has changed since."""
    ending, goes_on, ends = threading.Event(), threading.Event(), []
    conclude = p2p.Message._conclude

    def held_up(message, error):
        if message._words[0] == "recv":
            ends.append(error)
            if len(ends) == 1:
                ending.set()
                assert goes_on.wait(60)
        return conclude(message, error)

    def body(rank):
        memory = np.zeros(4)
        if rank == 1:
            work = dist.irecv(memory[::2], 0)
            with ThreadPoolExecutor(1) as pool:
                waits = pool.submit(work.wait)
                dist.barrier()
                assert ending.wait(60)
                try:
                    assert not work.is_completed()
                    with pytest.raises(CollectiveTimeoutError, match="it goes on"):
                        work.wait(0.05)
                finally:
                    goes_on.set()
                assert waits.result(60)
            assert work.wait()
            assert memory.tolist() == [1, 0, 1, 0]
            assert ends == [None]
        else:
            dist.barrier()
            dist.send(np.ones(2), 1)
        dist.barrier()

    monkeypatch.setattr(p2p.Message, "_conclude", held_up)
    run(body, 2, engine=engine)


def probe_of_the_dead(rank, how):
    dist.barrier()
    if rank == 1:
        os._exit(1)
    with fails(PeerLostError, "probe(src=", "rank 1 was lost") as caught:
        if how == "polls":
            while dist.probe(1, wait=False) is None:
                pass
        elif how == "from any":
            dist.probe()
        else:
            dist.probe(1)
    assert caught.value.context.peers == (1,)
    return True


@pytest.mark.sweep(2)
@pytest.mark.parametrize("how", ["waits", "from any", "polls"])
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_a_probe_names_a_rank_that_died(engine, how):
    results = run(probe_of_the_dead, 3, ranks="processes", engine=engine, args=(how,), dead=(1,))
    assert results == [True, None, True]


@pytest.mark.ranks(2)
def test_a_stream_waits_for_an_array_of_unknown_size(rank):
    side = dist.Stream("side")
    with dist.stream(side):
        if rank == 0:
            dist.send(np.arange(4.0), 1, tag=2)
        else:
            assert dist.probe(0).tag == 2
            array, source, tag = dist.recv_array(tag=ANY)
            assert (array.tolist(), source, tag) == ([0, 1, 2, 3], 0, 2)
    side.synchronize(60)
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["probe", "recv_array"])
def test_a_stream_gets_what_comes_after_its_call_began(rank, op):
    group = dist.group.WORLD
    if rank == 1:
        with dist.stream(dist.Stream("side")):
            call = getattr(group, op)(0, 2, async_op=True)
    # Queues behind the call, so the message is sent when the call has begun.
    dist.barrier()
    if rank == 0:
        dist.send(np.arange(4.0), 1, tag=2)
        return
    assert call.wait_on_host()
    if op == "probe":
        assert call.result() == [dist.MessageInfo(0, 2, "float64", 4, 32)]
        dist.recv(np.zeros(4), 0, tag=2)
    else:
        assert [array.tolist() for array in call.result()] == [[0, 1, 2, 3]]


# ---- sendrecv, and objects ------------------------------------------------------------------


@pytest.mark.ranks(3, kind="both", engine="both")
def test_sendrecv_round_a_ring(rank):
    p = dist.get_world_size()
    right, left = (rank + 1) % p, (rank - 1) % p
    for size in (1, 1_500_000):
        x, y = np.full(size, float(rank)), np.zeros(size)
        assert dist.sendrecv(x, right, y, left, send_tag=5, recv_tag=5) == left
        assert (y == left).all()
        assert (x == rank).all()
        # In place, as MPI_Sendrecv_replace, with an overlap, and to this rank itself.
        assert dist.sendrecv(x, right, x, recv_tag=ANY) == left
        assert (x == left).all()
        z = np.arange(float(size + 1)) + rank
        assert dist.sendrecv(z[:-1], right, z[1:], left) == left
        assert z[0] == rank
        assert (z[1:] == np.arange(size) + left).all()
        assert dist.sendrecv(x, rank, y, rank) == rank
        assert (y == left).all()
    dist.barrier()
    # What failed leaves no receive behind.
    x = np.zeros(2)
    with pytest.raises(CollectiveTimeoutError):
        dist.sendrecv(np.ones(1), rank, x, left, send_tag=8, recv_tag=9, timeout=0.05)
    with fails(InvalidArgumentError, "sendrecv: global rank 9 is not in group"):
        dist.sendrecv(np.ones(1), 9, x, left)
    with pytest.raises(InvalidArgumentError):
        dist.sendrecv(np.ones(1), right, x, left, send_tag=-1, recv_tag=9)
    dist.barrier()
    dist.send(np.full(2, 3.0), right, tag=9)
    assert (dist.recv_array(left, tag=9).array == 3).all()
    assert (x == 0).all()
    assert dist.recv_array(rank, tag=8).array.tolist() == [1]


@pytest.mark.ranks(2)
def test_sendrecv_in_place_keeps_the_dtype(rank):
    import ml_dtypes

    record = np.dtype([("a", "<i4"), ("b", "<f8")])
    for dtype in ("M8[s]", "<U2", "S3", "g", ">i4", "?", "c8", ml_dtypes.bfloat16, record):
        for shape in ((), (3,), (2, 3)):
            mine, other = (np.full(shape, each).astype(dtype) for each in (rank, 1 - rank))
            # Not contiguous, in Fortran's order, and with one element.
            for x in (mine.T, np.stack([mine, mine], -1)[..., 0]):
                assert dist.sendrecv(x, 1 - rank, x, 1 - rank) == 1 - rank
                assert (x == other.T.reshape(x.shape)).all()
    text = bytearray(b"of %d" % rank)
    dist.sendrecv(text, 1 - rank, text)
    assert text == b"of %d" % (1 - rank)
    dist.barrier()


@pytest.mark.ranks(2, kind="both", engine="both")
def test_object_lists_have_tags(rank):
    big = np.arange(100_000)
    if rank == 0:
        for tag, obj in [(1, "one"), (2, big), (0, "none"), (7, "x" * 5000)]:
            dist.send_object_list([obj, tag], 1, tag=tag)
    else:
        got = [None, None]
        assert dist.recv_object_list(got, 0, tag=7) == 0
        assert got == ["x" * 5000, 7]
        assert dist.recv_object_list(got) == 0
        assert got == ["none", 0]
        dist.recv_object_list(got, tag=ANY)
        assert got == ["one", 1]
        # The parts of a large object have inner tags, which no other receive takes.
        assert dist.probe().tag == 2
        dist.recv_object_list(got, tag=ANY)
        assert (got[0] == big).all()
        assert dist.probe(wait=False) is None
    dist.barrier()
