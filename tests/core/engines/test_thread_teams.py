"""UNISONO_THREADS: threads that share the loops of large calls change no bit of a result."""

import math
import os
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import wait_until
from tests.support.forks import forked
from tests.support.launches import Launches
from tests.support.oracle import REDUCE_OPS, check, np_dtype, reduce_op, reduced, values
from tests.support.together import on_threads
from unisono.core.transports import threads
from unisono.errors import InvalidArgumentError
from unisono.testing import run

MIB = 1 << 20
# Elements of float32: about 1 MiB, the ends of a piece, parts and cache lines, and odd.
COUNTS = (MIB // 4, MIB // 4 + 1, 3 * MIB // 8 - 1, 5 * MIB // 8 + 17)
KINDS = [(dtype, op) for dtype, ops in REDUCE_OPS.items() for op in ops]


def helpers():
    """Return the number of threads of this process that help others."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    return names.count("unisono-team")


def expected(dtype, op, arrays):
    if op != "AVG" or np_dtype(dtype).kind not in "iu":
        return reduced(dtype, op, arrays)
    total, p = np.add.reduce(arrays, dtype=arrays[0].dtype), len(arrays)
    return (total // p + ((total % p != 0) & (total < 0))).astype(total.dtype), None


def every_reduction(rank, checks):
    """All kinds of sums, each above 1 MiB by an odd count; return a digest of the results."""
    p, digest = dist.get_world_size(), sha256()
    for dtype, op in KINDS:
        count = MIB // np_dtype(dtype).itemsize + 4099
        parts = [values(dtype, each, count) for each in range(p)]
        x = parts[rank].copy()
        dist.all_reduce(x, reduce_op(op))
        digest.update(x)
        if checks:
            check((dtype, op), x, *expected(dtype, op, parts))
    return digest.hexdigest()


def every_size(rank):
    """Sizes about 1 MiB and the ends of pieces, with arrays that begin anywhere in a cache line."""
    p, digest = dist.get_world_size(), sha256()
    for count in COUNTS:
        for offset in (0, 1, 3):
            exact = np.arange(count) % 1000
            x = np.zeros(count + offset, np.float32)[offset:]
            rows = np.zeros(p * count + offset, np.float32)[offset:].reshape(p, count)
            x[:] = exact + rank
            dist.all_reduce(x)
            assert np.array_equal(x, p * exact + p * (p - 1) // 2), (count, offset)
            x[:] = exact + rank
            dist.all_gather_into_tensor(rows, x)
            assert np.array_equal(rows, exact + np.arange(p)[:, None])
            dist.reduce_scatter_tensor(x, rows.copy(), dist.ReduceOp.AVG)
            assert np.array_equal(x, exact + rank)
            dist.all_to_all_single(rows, rows + np.float32(7 * rank))
            assert np.array_equal(rows, exact + rank + 7 * np.arange(p)[:, None])
            dist.broadcast(x, p - 1)
            # Random values, so that the order of additions shows.
            x[:] = np.random.default_rng([rank, count]).normal(size=count)
            dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(0.1))
            digest.update(x)
    return digest.hexdigest()


def every_bit(rank):
    """Floats of any bits, also NaN with different payloads on both ranks."""
    digest = sha256()
    for dtype, op in KINDS:
        if np_dtype(dtype).kind in "fcV":
            x = np.random.default_rng(rank).bytes(MIB + 4112)
            x = np.frombuffer(bytearray(x), np_dtype(dtype))[1:]
            dist.all_reduce(x, reduce_op(op))
            digest.update(x.tobytes())
    return digest.hexdigest()


def every_layout(rank):
    """Arrays that C++ packs: transposed, and every second element."""
    p = dist.get_world_size()
    exact = np.arange(701 * 503, dtype=np.float64).reshape(701, 503)
    x = np.asfortranarray(exact + rank)
    dist.all_reduce(x)
    assert np.array_equal(x, p * exact + p * (p - 1) // 2)
    whole = np.full((701, 1006), -1.0)
    whole[:, ::2] = exact + rank
    dist.all_reduce(whole[:, ::2])
    assert np.array_equal(whole[:, ::2], x)
    assert (whole[:, 1::2] == -1).all()


@pytest.fixture(params=["one host", "two hosts", "wires"])
def way(request, monkeypatch):
    """Shared memory, or messages over memory or sockets; returns the transport."""
    if request.param == "two hosts":
        monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "1")
    if request.param == "wires":
        monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
        return "tcp"
    return None


@pytest.mark.native
@pytest.mark.parametrize(
    ("body", "args"), [(every_reduction, (True,)), (every_size, ()), (every_bit, ())]
)
def test_the_bits_of_one_thread(body, args, way, monkeypatch):
    digests = []
    for number in ("3", "1"):
        monkeypatch.setenv("UNISONO_THREADS", number)
        digests += run(body, 2, engine="native", transport=way, args=args)
        args = (False,) if args else ()
    assert len(set(digests)) == 1
    assert helpers() == 0


@pytest.mark.native
def test_three_ranks_and_every_layout(way, monkeypatch):
    monkeypatch.setenv("UNISONO_THREADS", "2")
    run(every_size, 3, engine="native", transport=way)
    run(every_layout, 3, engine="native", transport=way)


@pytest.mark.native
def test_threads_begin_with_the_first_large_call_and_end_with_the_world(monkeypatch):
    monkeypatch.setenv("UNISONO_THREADS", "3")

    def body(rank):
        dist.all_reduce(np.ones(MIB // 4, np.float32))
        assert helpers() == 0
        dist.barrier()
        dist.all_reduce(np.ones(MIB // 4 + 1, np.float32))
        dist.barrier()
        if rank == 0:
            assert wait_until(lambda: helpers() == 4)  # a thread names itself
        dist.barrier()  # a rank that ends takes its threads along

    run(body, 2, engine="native")
    assert helpers() == 0


@pytest.mark.native
def test_two_groups_in_two_python_threads(monkeypatch):
    monkeypatch.setenv("UNISONO_THREADS", "2")

    def body(rank):
        groups = dist.new_group([0, 1]), dist.new_group([0, 1])
        exact = np.arange(MIB // 2)

        def calls(group, factor):
            for _ in range(10):
                x = (exact + rank) * factor
                dist.all_reduce(x, group=group)
                assert np.array_equal(x, (2 * exact + 1) * factor)

        on_threads(lambda: calls(groups[0], 1), lambda: calls(groups[1], 3))

    run(body, 2, engine="native")


def in_a_child(rank):
    """A child of a rank whose threads run makes a world with threads of its own."""
    every_layout(rank)
    if rank == 0:
        child = forked(run, every_layout, 2)
        assert os.waitpid(child, 0)[1] == 0
    every_layout(rank)
    return helpers()


@pytest.mark.native
def test_after_a_fork(monkeypatch):
    monkeypatch.setenv("UNISONO_THREADS", "3")
    assert run(in_a_child, 2, ranks="processes", engine="native") == [2, 2]


# ---- how many -----------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets the cores of processes, and the limit of the cgroup."""
    monkeypatch.delenv("UNISONO_THREADS", raising=False)

    def make(cpus, quota=math.inf, siblings=1):
        def allowed(pid=0):
            if pid not in cpus:
                raise ProcessLookupError(pid)
            return cpus[pid]

        monkeypatch.setattr(threads, "allowed_cpus", allowed)
        monkeypatch.setattr(threads, "by_core", lambda found: found[::siblings])
        monkeypatch.setattr(threads, "cpu_quota", lambda: quota)

    return make


def threads_on(hosts, pids):
    """Return the threads of rank 0."""
    return threads.threads_of(0, hosts, threads.sharers_of(0, hosts, pids))


HERE, ELSEWHERE = "9/boot/pids", "9/other/pids"


def test_auto_divides_the_cores_among_the_ranks_that_share_them(machine):
    machine({0: range(12), 11: range(12), 12: range(12)})
    assert threads_on([HERE] * 3, [10, 11, 12]) == 4
    assert threads_on([HERE, ELSEWHERE, ELSEWHERE], [10, 11, 12]) == 8
    # Ranks that may not share memory, and of other containers, use the cores of the machine, too.
    others = [HERE, f"{HERE}/alone", "9/boot/container"]
    assert threads_on(others, [10, 11, 99]) == 4
    machine({0: range(12), 11: range(12), 12: range(12)}, siblings=2)
    assert threads_on([HERE] * 3, [10, 11, 12]) == 2


def test_auto_is_one_thread_where_ranks_fill_the_cores(machine):
    machine({0: range(2), 11: range(2)})
    assert threads_on([HERE] * 2, [10, 11]) == 1
    machine({0: range(1), 11: range(1)})
    assert threads_on([HERE] * 2, [10, 11]) == 1


def test_auto_knows_which_ranks_are_bound_elsewhere(machine):
    machine({0: range(4), 11: range(4, 8)})
    assert threads_on([HERE] * 2, [10, 11]) == 4
    assert threads_on([HERE] * 3, [10, 11, 12]) == 2  # 12 is unknown
    machine({0: range(4), 11: range(4, 8)}, quota=4.5)
    assert threads_on([HERE] * 2, [10, 11]) == 2


def test_ranks_that_are_bound_apart_are_no_crowd(machine):
    machine({0: range(1), 11: range(1, 2), 12: range(1)})
    here = [HERE] * 3
    assert [threads.sharers_of(0, here[:count], [10, 11, 12]) for count in (1, 2, 3)] == [1, 1, 2]
    machine({0: range(2), 11: range(2), 12: range(2)})
    assert [threads.sharers_of(0, here[:count], [10, 11, 12]) for count in (1, 2, 3)] == [1, 2, 3]


CROWDED = """
import unisono as dist
dist.init_process_group()
print("crowded", dist.group.WORLD.backends["cpu"].comm.transport.is_crowded)
dist.destroy_process_group()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="needs exactly two cores")
@pytest.mark.parametrize(
    ("ranks", "bind", "crowded"), [(2, "core", False), (2, "none", False), (4, "none", True)]
)
def test_a_rank_knows_whether_it_shares_its_core(tmp_path, ranks, bind, crowded):
    launches = Launches(tmp_path)
    code, out, err = launches.run("-n", ranks, "--bind", bind, script=CROWDED)
    launches.close()
    assert (code, out.count(f"crowded {crowded}\n")) == (0, ranks), err


def test_values_of_the_variable(machine, monkeypatch):
    machine({0: range(16)})
    assert threads.threads_text() == "auto, at most 8"
    assert "threads: auto, at most 8" in str(dist.engine_info())
    monkeypatch.setenv("UNISONO_THREADS", "12")
    assert threads_on([HERE] * 20, [0] * 20) == 12
    assert dist.engine_info().threads == "12"


@pytest.mark.parametrize("text", ["0", "-1", "two", "1025", "1.5"])
def test_other_values_are_refused(text, monkeypatch):
    monkeypatch.setenv("UNISONO_THREADS", text)
    refused = f"UNISONO_THREADS='{text}' is neither auto nor a number from 1 to 1024"
    with pytest.raises(InvalidArgumentError, match=refused):
        run(lambda rank: None, 2)
    assert refused in dist.engine_info().threads
