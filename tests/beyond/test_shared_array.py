"""Arrays with one copy per host: their values, their memory, its end, and wrong calls."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import re
import resource
import select
import signal
from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from tests.faults.scripts import outcome, started
from tests.support import netns
from tests.support.cgroups import small_cgroup
from unisono.beyond import shared_arrays
from unisono.core.groups.process_group import ProcessGroup
from unisono.errors import (
    ArgumentTypeError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    PeerLostError,
    UnisonoError,
    UnsupportedError,
)
from unisono.testing import run

NBYTES = 8_000_000
MAPPED = re.compile(r"/memfd:(unisono-array-\w+)")


def engines():
    return [pytest.param("native", marks=pytest.mark.native), "reference"]


def mappings(pid="self"):
    """Return the names of the shared arrays that a process has mapped or open."""
    found = set()
    try:
        found.update(MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()))
        for fd in os.listdir(f"/proc/{pid}/fd"):
            found.update(MAPPED.findall(os.readlink(f"/proc/{pid}/fd/{fd}")))
    except OSError:  # the process, or the descriptor of this listing, has ended
        pass
    return found


def raised(call):
    try:
        call()
    except UnisonoError as error:
        return error
    return None


# ---- values -----------------------------------------------------------------------------------


def values(rank, per_host):
    p = dist.get_world_size()
    table = np.random.default_rng(p).random((3 * p, 5)).astype(np.float32)
    shared = dist.shared_array(table.shape, np.float32)
    assert not shared.array.any()
    assert shared.hosts == [
        list(range(at, min(at + per_host, p))) for at in range(0, p, per_host or p)
    ]
    dist.barrier()
    # Each rank its part; rank 2 none.
    mine = slice(3 * rank, 3 * rank + 3)
    if rank != 2:
        shared.array[mine] = table[mine]
        shared.sync(rows=mine)
    else:
        shared.sync()
    expected = table.copy()
    expected[6:9] = 0
    assert np.array_equal(shared.array, expected)
    # One rank all of it.
    for src in range(p):
        dist.barrier()
        if rank == src:
            shared.array[:] = table + src
        shared.sync(src)
        assert np.array_equal(shared.array, table + np.float32(src))
    # Rows of the same place on all hosts: those of the lowest rank count.
    dist.barrier()
    if rank in (0, p - 1):
        shared.array[2 * (rank > 0) : 4] = rank + 1 if len(shared.hosts) > 1 else 1
    shared.sync(rows=slice(0, 4) if rank == 0 else slice(2, 4))
    assert (shared.array[:4] == 1).all()
    assert np.array_equal(shared.array[4:], table[4:] + np.float32(p - 1))


@pytest.mark.sweep(5)
@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize(("size", "per_host"), [(1, 0), (4, 0), (4, 2), (3, 1)])
def test_values_on_every_rank(monkeypatch, kind, engine, size, per_host):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", str(per_host))
    run(values, size, ranks=kind, engine=engine, args=(per_host or size,))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (7, "f8"),
        ((), "i4"),
        ((0, 3), np.int8),
        ((2, 3), ">c16"),
        (4, "U5"),
        (3, [("id", "<i4"), ("at", "<M8[s]")]),
    ],
)
def test_shapes_and_dtypes(rank, shape, dtype):
    expected = np.random.default_rng(1).integers(1, 9, shape).astype("S1").astype("U5")
    expected = expected.astype(np.dtype(dtype)) if np.dtype(dtype).names is None else None
    shared = dist.shared_array(shape, dtype)
    assert (shared.array.shape, shared.array.dtype) == (np.empty(shape).shape, np.dtype(dtype))
    if rank == 1:
        shared.array[...] = (5, 6) if expected is None else expected
    shared.sync(src=1)
    if expected is None:
        expected = np.full(shape, np.array((5, 6), dtype))
    assert np.array_equal(shared.array, expected)


def in_a_stream(rank):
    shared = dist.shared_array((2, 3))
    with dist.stream(dist.Stream()):
        shared.array[rank] = rank + 1
        shared.sync(rows=slice(rank, rank + 1))
        assert shared.array.tolist() == [[1.0] * 3, [2.0] * 3]


def test_sync_in_a_stream_blocks(monkeypatch):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "1")
    run(in_a_stream, 2)


@pytest.mark.ranks(4)
def test_sub_group(rank):
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        shared = dist.shared_array(2, np.int64, group)
        assert shared.hosts == [[1, 3]]
        if rank == 3:
            shared.array[:] = [5, 6]
        shared.sync(src=3)
        assert shared.array.tolist() == [5, 6]
    else:
        with pytest.raises(InvalidArgumentError, match="does not belong"):
            dist.shared_array(2, np.int64, group)


# ---- memory -----------------------------------------------------------------------------------


def memory(rank):
    shared = dist.shared_array(NBYTES, np.uint8)
    if rank == 1:
        shared.array[:] = 3
    shared.sync(src=1)
    assert int(shared.array.sum()) == 3 * NBYTES
    dist.barrier()
    entry = re.search(
        r"/memfd:unisono-array.*?\nPss: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.S
    )
    dist.barrier()
    assert not [name for name in os.listdir("/dev/shm") if "unisono-array" in name]
    return 1024 * int(entry[1])


def test_the_ranks_together_have_the_memory_once():
    shares = run(memory, 4, ranks="processes")
    assert sum(shares) == pytest.approx(NBYTES, rel=0.01)
    assert max(shares) < NBYTES / 3


def views(rank):
    shared = dist.shared_array((100, 1000))
    view = shared.array[10 * rank : 10 * rank + 2]
    del shared
    view[:] = rank
    dist.destroy_process_group()
    gc.collect()
    assert len(mappings()) == 1
    assert (view == rank).all()
    del view
    return mappings()


def test_memory_is_freed_with_the_last_view():
    assert run(views, 2, ranks="processes") == [set(), set()]


def maker_dies(rank):
    shared = dist.shared_array(1000, np.int32)
    (name,) = mappings()
    if rank == 0:
        shared.array[:] = 7
    shared.sync(src=0)
    if rank != 2:
        os.kill(os.getpid(), signal.SIGKILL)
    while raised(dist.barrier) is None:
        pass
    assert (shared.array == 7).all()
    return name


def test_nothing_is_left_after_sigkill():
    *_, name = run(maker_dies, 3, ranks="processes", dead=[0, 1])
    left = {pid for pid in os.listdir("/proc") if pid.isdecimal() and name in mappings(pid)}
    assert left == set()


def dies_before(rank):
    if rank == 1:
        os._exit(0)
    error = raised(lambda: dist.shared_array(10))
    assert isinstance(error, PeerLostError), error
    assert error.context.peers == (1,)
    return mappings()


def test_a_rank_that_ends_before_the_call():
    assert run(dies_before, 3, ranks="processes", dead=[1]) == [set(), None, set()]


def dies_in_sync(rank):
    shared = dist.shared_array((4, 1000))
    if rank == 2:
        real = ProcessGroup.broadcast
        ProcessGroup.broadcast = lambda group, *arguments, **how: (
            os._exit(0) if group.size() == 2 else real(group, *arguments, **how)
        )
    error = raised(lambda: shared.sync(rows=slice(rank, rank + 1)))
    assert isinstance(error, PeerLostError), error
    assert error.context.peers == (2,)
    assert error.what.startswith("SharedArray.sync(src=None)")


def test_a_rank_that_ends_while_copies_are_sent(monkeypatch):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "2")
    run(dies_in_sync, 4, ranks="processes", dead=[2])


def is_late_in_sync(rank):
    shared = dist.shared_array((4, 1000))
    pids = [0] * 4
    dist.all_gather_object(pids, os.getpid())
    if rank == 2:
        first, real = os.pidfd_open(pids[0]), ProcessGroup.broadcast
        ProcessGroup.broadcast = lambda group, *arguments, **how: (
            real(group, *arguments, **how)
            if group.size() != 2
            else select.select([first], [], [], 60.0) and os._exit(0)
        )
    timeout = 0.5 if rank == 0 else 60.0
    error = raised(lambda: shared.sync(rows=slice(rank, rank + 1), timeout=timeout))
    assert isinstance(error, CollectiveTimeoutError), error
    assert error.context.peers == (2,)


def test_a_rank_that_only_follows_is_not_named_as_the_cause(monkeypatch):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "2")
    # Rank 0 ends at once after its error. Ranks 1 and 3 wait for it in the barrier.
    run(is_late_in_sync, 4, ranks="processes", dead=[2])


class Stop(BaseException):
    pass


def test_signals_are_handled_while_memory_is_made(monkeypatch):
    nbytes, sizes = 100 << 20, []

    def interrupted(fd, *place):
        allocate(fd, *place)
        sizes.append(512 * os.fstat(fd).st_blocks)
        signal.raise_signal(signal.SIGUSR1)

    def stop(*_):
        if len(sizes) == 2:
            raise Stop

    allocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(Stop), shared_arrays.contextlib.ExitStack() as stack:
            shared_arrays.made_memory(nbytes, stack)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert 0 < sizes[0] < sizes[1] < nbytes
    assert mappings() == set()


def test_all_memory_is_made_before_it_is_used():
    for nbytes in (1, (12 << 20) + 1):
        with shared_arrays.contextlib.ExitStack() as stack:
            _, fd, _ = shared_arrays.made_memory(nbytes, stack)
            assert os.fstat(fd).st_size == nbytes
            assert 512 * os.fstat(fd).st_blocks >= nbytes


# ---- ranks that cannot share --------------------------------------------------------------------


def test_a_rank_that_cannot_open_the_memory_has_its_own(monkeypatch, caplog):
    real, pids = shared_arrays.opened_memory, []

    def refused(made, stack):
        pids.append(made)
        if len(pids) == 2:
            raise PermissionError(13, "Permission denied")
        return real(made, stack)

    monkeypatch.setattr(shared_arrays, "opened_memory", refused)

    def body(rank):
        shared = dist.shared_array((3, 2))
        shared.array[rank] = rank + 1
        shared.sync(rows=slice(rank, rank + 1))
        assert shared.array.tolist() == [[1, 1], [2, 2], [3, 3]]
        return shared.hosts

    with caplog.at_level(logging.WARNING):
        hosts = run(body, 3)
    assert sorted(map(len, hosts[0])) == [1, 2]
    assert hosts == [hosts[0]] * 3
    assert "(Permission denied): this rank has its own copy" in caplog.text


def test_another_file_is_not_taken_for_the_memory(tmp_path):
    with shared_arrays.contextlib.ExitStack() as stack:
        pid, fd, name = shared_arrays.made_memory(100, stack)
        assert shared_arrays.opened_memory((pid, fd, name), stack) != fd
        with pytest.raises(OSError, match="it is not the same"):
            shared_arrays.opened_memory((pid, fd, f"{name}0"), stack)


def apart(rank):
    shared = dist.shared_array(2)
    if rank == 1:
        shared.array[:] = 4
    dist.barrier()
    assert shared.array.tolist() == [4.0 * rank] * 2
    shared.sync(src=1)
    assert shared.array.tolist() == [4.0] * 2
    return shared.hosts


@pytest.mark.parametrize("engine", engines())
def test_ranks_that_must_not_share_memory(monkeypatch, engine):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    assert run(apart, 2, ranks="processes", engine=engine) == [[[0], [1]]] * 2


SCRIPT = """
dist.init_process_group(timeout=60)
def check():
    shared = dist.shared_array((world_size, 50_000), np.int64)
    assert shared.hosts == [[0, 2], [1, 3]], shared.hosts
    shared.array[rank] = rank + 1
    shared.sync(rows=slice(rank, rank + 1))
    assert (shared.array == np.arange(1, world_size + 1)[:, None]).all()
    dist.barrier()
    if rank == 3:
        shared.array *= 2
    shared.sync(src=3)
    assert (shared.array == 2 * np.arange(1, world_size + 1)[:, None]).all()
tell(attempt(check))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))
@pytest.mark.sweep(1)
@pytest.mark.parametrize("engine", engines())
def test_two_hosts(engine):
    with netns.Network(2) as network:
        first, second = network.hosts
        variables = {"MASTER_ADDR": first.v4, "MASTER_PORT": "29500", "UNISONO_ENGINE": engine}
        variables["TORCHELASTIC_USE_AGENT_STORE"] = ""
        prefixes = [host.inside() for host in (first, second, first, second)]
        with started(prefixes, SCRIPT, variables) as processes:
            ends = [outcome(process) for process in processes]
    for told, returncode, err in ends:
        assert returncode == 0, err
        assert told["kind"] == "", told


# ---- wrong calls ------------------------------------------------------------------------------


@pytest.mark.ranks(3, kind="both")
def test_ranks_that_disagree(rank):
    odd = rank == 1
    shared = dist.shared_array(3)
    for call, texts in (
        (lambda: dist.shared_array((2, 3 + odd)), ["[2, 3], float64", "[2, 4], float64"]),
        (lambda: dist.shared_array(4, "f4" if odd else "f8"), ["[4], float64", "[4], float32"]),
        (lambda: shared.sync(src=int(odd)), ["sync(src=0)", "sync(src=1)"]),
        (lambda: shared.sync(0) if odd else shared.sync(rows=slice(1)), ["src=None", "src=0"]),
    ):
        error = raised(call)
        assert isinstance(error, CollectiveMismatchError), error
        assert error.context.peers == ((0, 2) if odd else (1,))
        assert all(text in error.what for text in texts), error.what
    # The group stays usable.
    shared.array[rank] = rank
    shared.sync(rows=slice(rank, rank + 1))
    assert shared.array.tolist() == [0, 1, 2]


WRONG = {
    "object": (lambda _: dist.shared_array(3, object), UnsupportedError, "no plain bytes"),
    "dtype": (
        lambda _: dist.shared_array(3, "no dtype"),
        ArgumentTypeError,
        "no array has shape=3",
    ),
    "shape": (lambda _: dist.shared_array("ab"), ArgumentTypeError, "no array has shape='ab'"),
    "fields": (
        lambda _: dist.shared_array(3, [("a", "f8"), ("a", "f4")]),
        ArgumentTypeError,
        "field 'a' occurs more than once",
    ),
    "syntax": (lambda _: dist.shared_array(3, "(2,"), ArgumentTypeError, "dtype='(2,'"),
    "negative": (
        lambda _: dist.shared_array((2, -1)),
        InvalidArgumentError,
        "an array cannot have shape=(2",
    ),
    "too large": (lambda _: dist.shared_array(2**62), InvalidArgumentError, "too big"),
    "both": (
        lambda s: s.sync(0, rows=slice(1)),
        InvalidArgumentError,
        "sync takes src or rows, not both",
    ),
    "source": (lambda s: s.sync(9), InvalidArgumentError, "global rank 9"),
    "rows": (lambda s: s.sync(rows=2), ArgumentTypeError, "rows must be a slice, got int"),
    "bound": (lambda s: s.sync(rows=slice(0.0, 2)), ArgumentTypeError, "slice(0.0, 2, None)"),
    "step 0": (lambda s: s.sync(rows=slice(0, 3, 0)), InvalidArgumentError, "consecutive rows"),
    "step": (lambda s: s.sync(rows=slice(0, 3, 2)), InvalidArgumentError, "consecutive rows"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_raise_on_all_ranks(rank, case):
    call, kind, text = WRONG[case]
    shared = dist.shared_array(3)
    error = raised(lambda: call(shared) if rank == 1 else shared.sync(src=0))
    assert isinstance(error, kind if rank == 1 else CollectiveMismatchError), error
    assert text in error.what
    shared.sync(src=0)


@pytest.mark.ranks(2)
def test_array_cannot_be_replaced(rank):
    shared = dist.shared_array(3)
    with pytest.raises(ArgumentTypeError, match="another array") as caught:
        shared.array = np.ones(3)
    assert caught.value.hint == "write shared.array[...] = values"
    if rank == 0:
        shared.array += 2
    shared.sync(src=0)
    assert shared.array.tolist() == [2, 2, 2]


@pytest.mark.ranks(2)
def test_sync_without_any_rows_is_refused(rank):
    shared = dist.shared_array(3)
    with pytest.raises(InvalidArgumentError, match="no rank passed src or rows"):
        shared.sync()


def too_large(rank):
    before = dist.shared_array(10)
    for nbytes, text in ((2**50, "Cannot allocate memory"), (10**6, "File too large")):
        if rank == 0:
            # The second array: the kernel refuses to make the file.
            resource.setrlimit(resource.RLIMIT_FSIZE, (5 * 10**5, resource.RLIM_INFINITY))
        error = raised(lambda nbytes=nbytes: dist.shared_array(nbytes, np.uint8))
        assert type(error) is CollectiveError, error
        assert error.context.peers == (0,)
        assert f"no {nbytes} bytes of shared memory on rank 0: {text}" in error.what
    assert len(mappings()) == 1
    before.sync(src=1)


@pytest.mark.parametrize("engine", engines())
def test_too_little_memory_is_reported_on_all_ranks(engine):
    run(too_large, 3, ranks="processes", engine=engine)


def above_the_limit(rank, folder):
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    error = raised(lambda: dist.shared_array(400 << 20, np.uint8))
    assert type(error) is CollectiveError, error
    assert "shared memory on rank 0: Cannot allocate memory, " in error.what


def test_limit_of_the_cgroup_is_reported_before_the_kernel_kills():
    with small_cgroup(200 << 20) as folder:
        run(above_the_limit, 2, ranks="processes", args=(str(folder),))


@pytest.mark.ranks(1)
def test_a_shared_array_cannot_be_sent_to_other_processes(rank):
    shared = dist.shared_array((4,), "float32")
    with pytest.raises(ArgumentTypeError, match="SharedArray cannot be pickled or copied: it belo"):
        pickle.dumps(shared)
