"""Object collectives and reductions, over pickle and over other serializers."""

import ast
import functools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable, fails
from unisono.core.c10d.objects.packet import FIRST_BYTES, Packet
from unisono.errors import (
    ArgumentTypeError,
    CollectiveError,
    CollectiveMismatchError,
    InvalidArgumentError,
    UsageError,
)

pytestmark = pytest.mark.sweep(1)

SIZES = [0, 1, 16 * 1024, 16 * 1024 + 1, 300_000]  # none, in the head, in a message of its own


def thing(rank, salt=0):
    """Return an object with arrays of all sizes, some twice, in several layouts."""
    table = np.arange(12.0).reshape(3, 4) + rank
    return {
        "rank": rank,
        "salt": salt,
        "text": "é" * (rank * 700),
        "arrays": [np.full(n, rank + 1, np.uint8) for n in SIZES],
        "fortran": np.asfortranarray(np.full((200, 300), rank + 0.5)),
        "strided": np.arange(40_000.0)[::2] * rank,
        "views": (table[:, 1], table.T),
        "bytes": bytes(50_000),
    }


def same(a, b):
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return a == b


@pytest.mark.sweep(3)
@pytest.mark.ranks(1, 2, 3, 4, kind="both", engine="both")
def test_every_call_delivers_whole_objects(rank):
    p = dist.get_world_size()
    for salt in range(3):
        got = [None] * p
        dist.all_gather_object(got, thing(rank, salt))
        assert same(got, [thing(r, salt) for r in range(p)])
        root = salt % p
        got = [None] * p
        dist.gather_object(thing(rank, salt), got if rank == root else None, dst=root)
        assert got == [None] * p or same(got, [thing(r, salt) for r in range(p)])
        assert (got[0] is None) == (rank != root)
        got = [thing(rank, salt), "x", None]
        dist.broadcast_object_list(got, src=root)
        assert same(got, [thing(root, salt), "x", None])
        got = ["old", "kept"]
        inputs = [thing(r, salt) for r in range(p)] if rank == root else [None] * p
        dist.scatter_object_list(got, inputs, src=root)
        assert same(got, [thing(rank, salt), "kept"])
    # The root is global rank 0 by default.
    got = [rank]
    dist.broadcast_object_list(got)
    assert got == [0]
    dist.scatter_object_list(got, list(range(p)) if rank == 0 else None)
    assert got == [rank]
    gathered = [None] * p if rank == 0 else None
    dist.gather_object(rank, gathered)
    assert rank or gathered == list(range(p))


@pytest.mark.ranks(3, kind="both", engine="both")
def test_a_rank_gets_a_copy_of_its_own_object(rank):
    mine = np.full(100_000, rank)
    got = [None] * dist.get_world_size()
    dist.all_gather_object(got, mine)
    for array in got:
        array += 1
    assert (mine == rank).all()
    received = [mine]
    dist.broadcast_object_list(received, 0)
    if rank:
        received[0][:] = 7  # arrays that arrive can be written
        assert (mine == rank).all()


@pytest.mark.ranks(3, kind="both", engine="both")
def test_lists_are_sent_to_a_rank_and_received_from_any(rank):
    p = dist.get_world_size()
    after, before = (rank + 1) % p, (rank - 1) % p
    for use_batch in (False, True):
        got = [None, None]
        if rank % 2:
            assert dist.recv_object_list(got, before, use_batch=use_batch) == before
        dist.send_object_list([thing(rank), rank], after, use_batch=use_batch)
        if not rank % 2:
            assert dist.recv_object_list(got, before, use_batch=use_batch) == before
        assert same(got, [thing(before), before])
    if rank:
        dist.send_object_list([thing(rank)], 0)
    else:
        seen = {}
        for _ in range(1, p):
            got = [None]
            source = dist.recv_object_list(got)
            seen[source] = got[0]
        assert same(seen, {r: thing(r) for r in seen})
        assert sorted(seen) == list(range(1, p))
    for call in (dist.send_object_list, dist.recv_object_list):
        with pytest.raises(InvalidArgumentError, match="this rank itself"):
            call([1], rank)


@pytest.mark.ranks(3, kind="both", engine="both")
def test_a_group_of_two_in_another_order(rank):
    group = dist.new_group([2, 0], sort_ranks=False)
    if rank == 1:
        with pytest.warns(UserWarning, match="all_gather_object on a rank that does not belong"):
            assert dist.all_gather_object([], 1, group) is None
        with pytest.warns(UserWarning, match="recv_object_list"):
            assert dist.recv_object_list([], 0, group) == -1
        return
    got = [None, None]
    dist.all_gather_object(got, rank, group=group)
    assert got == [2, 0]
    got = [rank]
    dist.broadcast_object_list(got, group=group)  # global rank 0, which is 1 in the group
    assert got == [0]
    got = [rank]
    dist.broadcast_object_list(got, group=group, group_src=0)
    assert got == [2]
    if rank == 2:
        dist.send_object_list(["hello"], group=group, group_dst=1)
    else:
        assert dist.recv_object_list(got, group=group, group_src=0) == 2
        assert got == ["hello"]


@pytest.mark.ranks(3, kind="both", engine="both")
def test_a_mistake_of_one_rank_is_an_error_on_every_rank_that_depends_on_it(rank):
    p = dist.get_world_size()
    bad = threading.Lock()  # cannot be pickled
    lists = {"object_list": [None] * p}
    for call, blamed in (
        (lambda o: dist.all_gather_object(lists["object_list"], o), range(p)),
        (lambda o: dist.broadcast_object_list([o], 1), range(p)),
        (lambda o: dist.gather_object(o, [None] * p if rank == 0 else None), [0]),
        (lambda o: dist.scatter_object_list([None], [o] * p, 1), range(p)),
    ):
        if rank == 1:
            with pytest.raises(TypeError, match="cannot pickle"):
                call(bad)
        elif rank in blamed:
            with pytest.raises(CollectiveError, match=r"rank 1 had nothing to send: TypeError: c"):
                call(1)
        else:
            call(1)
        check_usable()


@pytest.mark.ranks(3, kind="both", engine="both")
def test_lists_that_do_not_fit_are_an_error_on_every_rank(rank):
    p = dist.get_world_size()
    kept = ["kept"] * (p + (rank == 1))
    own_error = InvalidArgumentError if rank == 1 else CollectiveMismatchError
    with fails(own_error, f"object_list has {p + 1} entries"):
        dist.all_gather_object(kept, 0)
    assert set(kept) == {"kept"}
    with pytest.raises(CollectiveMismatchError, match=r"broadcast_object_list\[2\]"):
        dist.broadcast_object_list([0] * (2 if rank else 1), 0)
    for call, arguments, told in (
        (dist.broadcast_object_list, ([0], 9), "global rank 9 is not in group"),
        (dist.broadcast_object_list, ((0,), 0), "object_list must be a list, got tuple"),
        (dist.gather_object, (0, None, 9), "global rank 9"),
        (dist.scatter_object_list, ([0], None, 9), "global rank 9"),
    ):
        good = {
            dist.broadcast_object_list: ([0], 0),
            dist.gather_object: (0, [None] * p if rank == 2 else None, 2),
        }
        with pytest.raises(UsageError if rank == 1 else CollectiveMismatchError, match=told):
            call(*(arguments if rank == 1 else good.get(call, ([0], None, 1))))
        check_usable()
    with pytest.raises(CollectiveMismatchError, match="all_gather_object"):
        dist.all_gather_object([0] * p, 0) if rank else dist.barrier()
    with pytest.raises(own_error):
        dist.scatter_object_list([] if rank == 1 else [0], list(range(p)) if rank == 0 else None)
    check_usable()
    own_error = InvalidArgumentError if rank == 0 else CollectiveMismatchError
    with fails(own_error, f"scatter_object_input_list has {p + 1} entries"):
        dist.scatter_object_list([0], [1] * (p + 1) if rank == 0 else None)
    check_usable()


class Unreadable:
    def __reduce__(self):
        return int, ("x",)


@pytest.mark.ranks(3, kind="both", engine="both")
def test_an_object_that_cannot_be_read_is_blamed_on_its_rank(rank):
    with pytest.raises(CollectiveError) if rank != 1 else nullcontext() as caught:
        dist.broadcast_object_list([Unreadable()], 1)
    if rank != 1:
        assert caught.value.what == (
            f"broadcast_object_list in group 'default' failed on rank {rank}: the object of rank 1 "
            "cannot be read here: ValueError: invalid literal for int() with base 10: 'x'"
        )
        assert caught.value.context.peers == (1,)
        assert isinstance(caught.value.__cause__, ValueError)
    check_usable()


@pytest.mark.ranks(3, kind="both", engine="both")
def test_messages_that_do_not_fit_are_errors_of_the_receiver(rank):
    if rank == 0:
        dist.send_object_list([1, 2], 1)
        dist.send(np.ones(3), 1)
        dist.send(np.full(FIRST_BYTES, 0x55, np.uint8), 1)
        dist.send_object_list([1], 1)
        dist.send_object_list([3], 1)
    elif rank == 1:
        for text, how in (
            ("rank 0 sent 2 objects, expected 1", {}),
            ("rank 0 sent float64[3]", {}),
            ("rank 0 sent an array, expected objects", {}),
            ("rank 0 used another serializer, expe", {"serializer": Text()}),
        ):
            with fails(CollectiveMismatchError, text):
                dist.recv_object_list([None], 0, **how)
        got = [None]
        assert dist.recv_object_list(got, 0) == 0
        assert got == [3]
    check_usable()
    if rank == 0:
        with pytest.raises(TimeoutError):
            dist.recv_object_list([None], 1, timeout=0.05)
    check_usable()


@pytest.mark.ranks(3, kind="both", engine="both")
def test_lists_that_several_threads_send_arrive_whole(rank):
    calls, threads = 5, 3
    got = []

    def send(thread):
        for call in range(calls):
            dist.send_object_list([thread, call, np.full(50_000, thread * calls + call)], 0)

    def recv(_):
        for _ in range(calls):
            box = [None] * 3
            dist.recv_object_list(box, 1)
            got.append(box)

    if rank < 2:
        with ThreadPoolExecutor(threads) as pool:
            # A thread of a pool has an empty context, hence no default group.
            works = [
                pool.submit(copy_context().run, send if rank else recv, i) for i in range(threads)
            ]
            for work in works:
                work.result()
    for thread, call, array in got:
        assert (array == thread * calls + call).all()
    assert sorted((t, c) for t, c, _ in got) == [
        (t, c) for t in range(threads) for c in range(calls) if rank == 0
    ]
    check_usable()


class Text:
    """Objects as their repr; literals only, so nothing can be made to run."""

    name = "text"

    def dumps(self, obj):
        return repr(obj).encode(), []

    def loads(self, header, buffers):
        assert not buffers
        return ast.literal_eval(header.decode())


class Split:
    """Cuts a text in two: even letters in the header, odd ones in a buffer."""

    name = "split"

    def dumps(self, obj):
        return obj[::2].encode(), [memoryview(obj[1::2].encode())]

    def loads(self, header, buffers):
        (odd,) = buffers
        letters = [""] * (len(header) + len(odd))
        letters[::2], letters[1::2] = header.decode(), bytes(odd).decode()
        return "".join(letters)


@pytest.mark.ranks(3, kind="both", engine="both")
def test_ranks_use_the_serializer_of_the_call(rank):
    p = dist.get_world_size()
    got = [None] * p
    dist.all_gather_object(got, {"a": [rank]}, serializer=Text())
    assert got == [{"a": [r]} for r in range(p)]
    for length in (3, 3000, 90_000):
        text = "".join(chr(65 + (rank + i) % 26) for i in range(length))
        got = [None] * p
        dist.all_gather_object(got, text, serializer=Split())
        assert got[rank] == text
        assert [t[0] for t in got] == [chr(65 + r % 26) for r in range(p)]
    with pytest.raises(CollectiveMismatchError, match="another serializer"):
        dist.all_gather_object(got, "x", serializer=Text() if rank else Split())
    check_usable()


@pytest.mark.ranks(3, engine="both")
def test_tensors_arrive_as_they_are(rank):
    torch = pytest.importorskip("torch")

    big = torch.arange(40_000.0).reshape(200, 200) + rank
    mine = {
        "big": big,
        "column": big[:, 3],
        "half": torch.full((30_000,), rank, dtype=torch.bfloat16),
        "grad": torch.ones(3, requires_grad=True),
        "empty": torch.empty(0, 4),
        "conj": (torch.ones(20_000, dtype=torch.complex64) * 1j).conj(),
    }
    got = [None] * dist.get_world_size()
    dist.all_gather_object(got, mine)
    for r, other in enumerate(got):
        assert torch.equal(other["big"], big - rank + r)
        assert torch.equal(other["column"], (big - rank + r)[:, 3])
        assert torch.equal(other["half"], torch.full((30_000,), r, dtype=torch.bfloat16))
        assert other["grad"].requires_grad
        assert other["empty"].shape == (0, 4)
        assert torch.equal(other["conj"], mine["conj"])
        other["big"] += 1
    assert torch.equal(big, torch.arange(40_000.0).reshape(200, 200) + rank)


def test_arrays_are_not_copied():
    array = np.arange(100_000.0)
    packet = Packet.of({"a": array}, dist.PickleSerializer())
    assert packet.rest.size == 0
    assert len(pickle.dumps(array)) > 100 * packet.first.size
    (part,) = packet.large
    assert np.shares_memory(part, array)
    arrived = Packet.arriving(packet.first)
    arrived.open_rest()
    arrived.large[0][:] = part
    (got,) = arrived.loads(dist.PickleSerializer()).values()
    assert np.shares_memory(got, arrived.large[0])
    assert (got == array).all()
    assert got.flags.writeable


@pytest.mark.ranks(3)
def test_the_error_of_a_group_names_the_global_rank(rank):
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    with pytest.raises(CollectiveError if rank == 1 else TypeError) as caught:
        dist.all_gather_object([None] * 2, rank if rank == 1 else memoryview(b""), group)
    if rank == 1:
        assert ": rank 2 had nothing to send: TypeError: cannot pickle" in caught.value.what
        assert caught.value.context.peers == (2,)


# ---- reductions, against functools.reduce ----------------------------------------------------


def joined(a, b):
    """Neither commutative nor associative."""
    return f"({a}{b})"


def merged(a, b):
    """Change the left operand and return it."""
    a["names"] += b["names"]
    a["sum"] = a["sum"] + b["sum"]
    return a


@pytest.mark.sweep(3)
@pytest.mark.ranks(1, 2, 3, 5, kind="both", engine="both")
def test_objects_are_reduced_in_the_order_of_ranks(rank):
    p = dist.get_world_size()
    expected = functools.reduce(joined, map(str, range(p)))
    assert dist.all_reduce_object(str(rank), joined) == expected
    for root in {0, p - 1}:
        got = dist.reduce_object(str(rank), joined, dst=root)
        assert got == (expected if rank == root else None)
    mine = {"names": [f"r{rank}"], "sum": np.full(20_000, float(rank))}
    got = dist.all_reduce_object(mine, merged)
    assert got["names"] == [f"r{r}" for r in range(p)]
    assert (got["sum"] == sum(range(p))).all()
    assert mine["names"] == [f"r{rank}"], "one's own object stays as it is"
    assert dist.all_reduce_object(rank, max, timeout=30) == p - 1
    # Only one rank needs the function, which so need not be picklable.
    got = dist.all_reduce_object([rank], (lambda a, b: a + b) if rank == 0 else None)
    assert got == list(range(p))


@pytest.mark.sweep(2)
@pytest.mark.ranks(3, kind="both", engine="both")
def test_a_group_reduces_in_its_own_order(rank):
    group = dist.new_group([2, 0], sort_ranks=False)
    if rank in (0, 2):
        assert dist.all_reduce_object(rank, joined, group) == "(20)"
        got = dist.reduce_object(rank, joined, group=group, group_dst=1)
        assert got == ("(20)" if rank == 0 else None)
    else:
        with pytest.warns(UserWarning, match="all_reduce_object on a rank that does not"):
            assert dist.all_reduce_object(rank, joined, group) is None


def failing(a, b):
    raise KeyError("no such thing")


@pytest.mark.sweep(2)
@pytest.mark.ranks(3, kind="both", engine="both")
def test_an_error_of_one_rank_reaches_all(rank):
    with pytest.raises(KeyError if rank == 0 else CollectiveError, match="no such thing"):
        dist.all_reduce_object(rank, failing)
    if rank == 1:
        with pytest.raises(Exception, match=r"(?i)pickle"):
            dist.all_reduce_object(lambda: 0, joined)
    else:
        with fails(CollectiveError, "rank 1 had nothing to send"):
            dist.all_reduce_object(rank, joined)
    with pytest.raises((ArgumentTypeError, CollectiveError, TypeError)):
        dist.all_reduce_object(rank, "no function")
    assert dist.all_reduce_object(rank, joined) == "((01)2)"
