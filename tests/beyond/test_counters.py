"""Counters and locks over a group: each value once, each rank in turn, errors that name ranks."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable, fails, wait_until
from tests.support.together import on_threads
from unisono.beyond import counters
from unisono.beyond.windows.part import WindowPart
from unisono.core.base.types import dtype_of_numpy
from unisono.core.groups.world import World, use
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    PeerLostError,
    StoreKeyError,
    UsageError,
)

COUNT = 400


NAMES = pytest.mark.parametrize("name", ["a", None], ids=["store", "memory"])
"""Without a name a lock of ranks of one host is in shared memory."""


def drawn(counter, end):
    """Return the values below `end` that this rank gets."""
    values = []
    while (value := counter.fetch_add()) < end:
        values.append(value)
    return values


def gathered(mine, group=None):
    """Return the lists of all ranks as one sorted list."""
    lists = [None] * dist.get_world_size(group)
    dist.all_gather_object(lists, mine, group)
    return sorted(value for each in lists for value in each)


@pytest.mark.ranks(1, 2, 4, kind="both")
def test_all_values_are_handed_out_once(rank):
    p = dist.get_world_size()
    first, second = dist.Counter(name="a"), dist.Counter(name="b", start=-7)
    mine, other = [], []
    # The two counters are used in turn, so that a mixture of their keys would show.
    while (value := first.fetch_add()) < COUNT:
        mine.append(value)
        other.append(second.fetch_add(3))
    assert gathered(mine) == list(range(COUNT))
    assert gathered(other) == list(range(-7, -7 + 3 * COUNT, 3))
    # Each rank has drawn one value beyond the end.
    assert first.value() == COUNT + p
    assert second.value() == 3 * COUNT - 7
    dist.barrier()
    assert dist.Counter(name="b", start=-7).value() == 3 * COUNT - 7


@pytest.mark.ranks(4, kind="both")
def test_groups_and_unnamed_counters_do_not_share_values(rank):
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    counters = [
        dist.Counter(half, "a"), dist.Counter(None, "a"), dist.Counter(half), dist.Counter(half),
        dist.Counter(), dist.Counter(half, "0"), dist.Counter(half, "a/start"),
    ]  # fmt: skip
    for counter, group in zip(counters, [half, None, half, half, None, half, half], strict=True):
        assert gathered(drawn(counter, 20), group) == list(range(20))
    if rank == 1:
        # Without the other ranks: a name suffices.
        assert dist.Counter(name="mine", start=5).fetch_add(-2) == 5
        assert dist.Counter(name="mine", start=5).value() == 3


def stores_of(kind, tmp_path):
    """Return a store for each of 2 ranks."""
    if kind == "hash":
        return [dist.HashStore()] * 2
    if kind == "file":
        return [dist.FileStore(str(tmp_path / "file"), 2) for _ in range(2)]
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [server, dist.TCPStore("127.0.0.1", server.port)]


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_a_new_world_over_the_same_store_begins_anew(kind, tmp_path):
    stores = stores_of(kind, tmp_path)

    def rank(number):
        with use(World()):
            dist.init_process_group(store=stores[number], rank=number, world_size=2, timeout=30)
            half = dist.split_group(split_ranks=[[0, 1]])
            drawn_by_both = []
            for counter in dist.Counter(name="a"), dist.Counter(half, "a"), dist.Counter():
                drawn_by_both.append(gathered(drawn(counter, 30)))
            with dist.Lock(half, "a"):
                pass
            dist.destroy_process_group()
        return drawn_by_both

    for _ in range(3):
        assert on_threads(partial(rank, 0), partial(rank, 1)) == [[list(range(30))] * 3] * 2
    for store in reversed(stores):
        store.close()


@NAMES
@pytest.mark.ranks(1, 4, kind="both")
def test_one_rank_at_a_time_holds_the_lock(rank, name):
    store, lock = dist.group.WORLD.get_group_store(), dist.Lock(name=name)
    store.compare_set("sum", "", "0")
    for _ in range(25):
        with lock:
            # Loses an addition unless no other rank is here.
            store.set("sum", str(int(store.get("sum")) + 1))
    dist.barrier()
    assert int(store.get("sum")) == 25 * dist.get_world_size()


def asked(lock):
    """Return how many times any rank has asked for a lock."""
    cells = lock._cells
    return lock._store.add("next", 0) if cells is None else cells.read(counters._DRAWN)[0]


@NAMES
@pytest.mark.ranks(4, kind="both")
def test_the_ranks_get_the_lock_in_the_order_in_which_they_ask(rank, name):
    store, lock = dist.group.WORLD.get_group_store(), dist.Lock(name=name)
    for turn in range(3):
        order = [(turn + i) % 4 for i in range(4)]
        place, end = 4 * turn + order.index(rank), 4 * turn + 4
        # The first rank releases the lock after the other ranks have asked, one after another.
        assert wait_until(lambda place=place: asked(lock) == place)
        with lock:
            assert wait_until(lambda end=end: asked(lock) == end)
            store.append(f"order {turn}", f"{rank} ")
        dist.barrier()
        assert store.get(f"order {turn}").split() == [b"%d" % r for r in order]


@NAMES
@pytest.mark.ranks(3, kind="both")
def test_a_rank_that_gives_up_is_passed_over_and_names_the_holder(rank, name):
    lock, pair = dist.Lock(name=name), dist.new_group([0, 1])
    if rank == 0:
        lock.acquire()
    dist.barrier()
    if rank == 1:
        start = f"acquire of {lock!r} timed out after 50 ms on rank 1: rank 0 holds it"
        with fails(CollectiveTimeoutError, start) as caught:
            lock.acquire(timeout=0.05)
        assert caught.value.context.peers == (0,)
        assert caught.value.context.usable
    if rank == 2:
        assert wait_until(lambda: asked(lock) == 2)
        with lock:
            pass
    else:
        dist.barrier(pair)
    if rank == 0:
        assert wait_until(lambda: asked(lock) == 3)
        lock.release()
    dist.barrier()
    # The rank that has given up can ask again.
    with lock:
        pass
    check_usable()


@NAMES
@pytest.mark.ranks(3, kind="both")
def test_a_rank_that_leaves_with_the_lock_is_named(rank, name):
    lock = dist.Lock(name=name)
    if rank == 2:
        lock.acquire()
    dist.barrier()
    if rank == 2:
        dist.destroy_process_group()
        with fails(ClosedError, f"{lock!r}, which was destroyed"):
            lock.release()
        return
    with fails(PeerLostError, f"failed on rank {rank}: rank 2, whose turn it is, was lost") as lost:
        lock.acquire()
    assert lost.value.context.peers == (2,)


@NAMES
@pytest.mark.ranks(2, kind="threads")
def test_a_rank_that_releases_the_lock_and_leaves_is_not_blamed(rank, name):
    store, lock = dist.group.WORLD.get_group_store(), dist.Lock(name=name)
    if rank == 0:
        lock.acquire()
    dist.barrier()
    if rank == 0:
        store.get("holder is read")
        lock.release()
        dist.destroy_process_group()
        return
    backend = dist.group.WORLD.backends["cpu"]
    lost = backend.lost

    def after_it_has_left(other):
        store.set("holder is read", "")
        assert wait_until(lambda: lost(other) is not None)
        return lost(other)

    # Called when rank 1 has read that rank 0 holds the lock.
    backend.lost = after_it_has_left
    with lock:
        assert store.check(["holder is read"])


@pytest.mark.ranks(2, kind="processes")
@pytest.mark.parametrize("shares", ["1", "0"])
def test_without_a_name_it_is_in_memory_that_all_ranks_share(rank, monkeypatch, shares):
    one, two = dist.Counter(), dist.Counter(name="a")
    native = dist.group.WORLD.backends["cpu"].comm.transport.hosts[0]
    assert (one._cells is None) == (not native)
    assert two._cells is None
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", shares)
    lock = dist.Lock()
    assert (lock._cells is None) == (not native or shares == "0")
    with lock:
        mine = one.fetch_add(2)
    assert gathered([mine]) == [0, 2]
    # As in the store, a member that is gone takes nothing along.
    dist.barrier()
    if rank == 0:
        dist.destroy_process_group()
    else:
        lost = dist.group.WORLD.backends["cpu"].lost
        assert wait_until(lambda: lost(0) is not None)
        assert one.fetch_add() == 4


@pytest.mark.ranks(2, kind="threads")
@pytest.mark.parametrize("name", ["a", None])
def test_a_sum_beyond_64_bits_is_an_error_and_changes_nothing(rank, name):
    counter, most = dist.Counter(name=name, start=7), 2**63 - 1
    if rank == 0:
        assert counter.fetch_add(most) == 7
        with fails(StoreKeyError, f"the sum {most + 1} does not fit into 64 bits"):
            counter.fetch_add()
    dist.barrier()
    assert counter.value() == most + 7
    dist.barrier()


def test_an_offer_is_taken_back_from_a_rank_that_has_given_up():
    # Rank 1 gives up after rank 0 has chosen it, and before rank 0 has set the turn.
    memory = np.zeros(5, np.int64)
    part = WindowPart(np.zeros((3, 64), np.uint8), memory, dtype_of_numpy(memory.dtype))
    turns = [counters._MemoryTurn(counters._Cells(me, 3, part, True)) for me in range(3)]
    for turn in turns:
        turn.ask()
    assert turns[0].wait(0)
    signal = part.signal

    def signal_too_late(rank):
        signal(rank)
        if rank == 1:
            memory[counters._ASKS + 1] = 0

    part.signal = signal_too_late
    turns[0].pass_on()
    assert not turns[1].wait(0)
    assert turns[2].wait(0)
    turns[2].pass_on()
    assert memory.tolist() == [3, 0, 0, 0, 0]


class _Cut:
    """An object whose call number `at` raises KeyboardInterrupt, before or after it is made."""

    def __init__(self, inner, at, after):
        self._inner, self.left, self._after = inner, at, after

    def __getattr__(self, name):
        value = getattr(self._inner, name)

        def call(*arguments):
            self.left -= 1
            if self.left == 0 and not self._after:
                raise KeyboardInterrupt
            result = value(*arguments)
            if self.left == 0:
                raise KeyboardInterrupt
            return result

        return call


@NAMES
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("gives_up", [False, True])
@pytest.mark.parametrize("has_gone", [False, True])
@pytest.mark.ranks(1)
def test_an_interrupt_anywhere_in_a_release_loses_no_turn(rank, name, after, gives_up, has_gone):
    at, left = 1, 0
    while left <= 0:
        if name is None:
            memory = np.zeros(5, np.int64)
            part = WindowPart(np.zeros((3, 64), np.uint8), memory, dtype_of_numpy(memory.dtype))
            cut = _Cut(part, -1, after)
            cells = [counters._Cells(me, 3, part if me else cut, True) for me in range(3)]
            turns = [counters._MemoryTurn(each) for each in cells]
        else:
            store = dist.HashStore()
            cut = _Cut(store, -1, after)
            turns = [counters._StoreTurn(store if me else cut, me) for me in range(3)]
        for turn in turns:
            turn.ask()
        assert turns[0].wait(0)
        if has_gone:
            turns[1].give_up()
        lock = dist.Lock(name="a")
        lock._user["turn"], cut.left = turns[0], at
        with contextlib.suppress(KeyboardInterrupt):
            lock._leave(turns[0], turns[0].give_up if gives_up else turns[0].pass_on)
        left, at = cut.left, at + 1
        for me in (2,) if has_gone else (1, 2):
            assert turns[me].wait(0), at
            assert turns[me].holder()[0] == me
            turns[me].pass_on()
    assert at > 5


@NAMES
@pytest.mark.ranks(2)
def test_an_object_serves_one_thread_at_a_time(rank, name):
    lock = dist.Lock(name=name)
    if rank == 0:
        lock.acquire()
    dist.barrier()
    if rank == 1:
        pool = ThreadPoolExecutor(1)
        waiting = pool.submit(lock.acquire, timeout=20)
        assert wait_until(lambda: asked(lock) == 2)
        with fails(UsageError, f"acquire: this rank waits for {lock!r} already"):
            lock.acquire(timeout=0.01)
        with fails(UsageError, "release: this rank does not hold Lock"):
            lock.release()
    dist.barrier()
    if rank == 0:
        lock.release()
    else:
        waiting.result()
        pool.shutdown()
        with fails(UsageError, f"acquire: this rank holds {lock!r} already"):
            lock.acquire(timeout=0.01)
        lock.release()
    dist.barrier()
    with lock:
        pass


@NAMES
@pytest.mark.ranks(2, kind="processes")
def test_a_fork_of_a_rank_cannot_use_its_lock(rank, name):
    lock = dist.Lock(name=name)
    if rank == 0:
        lock.acquire()
        if (child := os.fork()) == 0:
            done = 1
            try:
                for call in lock.acquire, lock.release:
                    with fails(ClosedError, "which belongs to the parent of this fork"):
                        call()
                done = 0
            finally:
                os._exit(done)
        assert os.waitpid(child, 0)[1] == 0
    dist.barrier()
    if rank == 1:
        with fails(CollectiveTimeoutError, "rank 0 holds it"):
            lock.acquire(timeout=0.05)
    dist.barrier()
    if rank == 0:
        lock.release()
    dist.barrier()


@NAMES
@pytest.mark.ranks(2)
def test_a_thread_that_waits_as_the_group_is_destroyed_says_so(rank, name):
    pair = dist.new_group([0, 1])
    lock = dist.Lock(pair, name)
    if rank == 0:
        lock.acquire()
    dist.barrier()
    if rank == 1:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lock.acquire, timeout=5)
            assert wait_until(lambda: asked(lock) == 2)
            dist.destroy_process_group(pair)
            with fails(ClosedError, f"{lock!r}, which was destroyed"):
                waiting.result()
    dist.barrier()


@pytest.mark.ranks(2, kind="both")
def test_ranks_that_disagreed_make_the_same_counter_next(rank, monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    with fails(CollectiveMismatchError):
        dist.Counter() if rank == 0 else dist.barrier()
    for make in partial(dist.Counter, start="a"), partial(dist.Lock, name=3):
        kind = make.func.__name__
        error = ArgumentTypeError if rank == 0 else CollectiveMismatchError
        with fails(error, "must be"):
            make() if rank == 0 else make.func()
    assert gathered([dist.Counter().fetch_add()]) == [0, 1], kind


@pytest.mark.ranks(2, kind="threads")
def test_wrong_use_is_an_error(rank):
    with fails(ArgumentTypeError, "Counter: name must be str, got int"):
        dist.Counter(name=3)
    with fails(ArgumentTypeError, "start must be int, got float"):
        dist.Counter(start=0.5)
    counter = dist.Counter(name="a", start=rank and 4) if rank else None
    dist.barrier()
    if rank == 0:
        with fails(InvalidArgumentError, "'default' starts at 4 on another rank, not at 0"):
            dist.Counter(name="a")
    else:
        with fails(ArgumentTypeError, "n must be int, got str"):
            counter.fetch_add("1")
    with fails(InvalidArgumentError, "this rank does not belong to the given group"):
        dist.Lock(dist.GroupMember.NON_GROUP_MEMBER, "a")
    with fails(CollectiveMismatchError, "start=0", "start=1"):
        dist.Counter(start=rank)
    lock = dist.Lock(name=f"{rank}")
    with fails(UsageError, "release: this rank does not hold Lock"):
        lock.release()
    with lock, fails(UsageError, "acquire: this rank holds Lock"):
        lock.acquire()
    counter = dist.Counter()
    dist.destroy_process_group()
    with fails(ClosedError, "Counter 0 of group 'default', which was destroyed"):
        counter.fetch_add()
