"""What the engines could do differently, and must not."""

import errno
import itertools
import os
from types import SimpleNamespace

import numpy as np
import pytest

import unisono as dist
from tests.support.operations import Operations
from unisono.core.backends import CPUOptions
from unisono.core.base import log, seam
from unisono.core.base.net.tls import why_no_tls
from unisono.core.engines import shared_memory
from unisono.core.engines.reference import ReferenceEngine
from unisono.core.groups.world import World, use
from unisono.core.transports import native_messages
from unisono.errors import CollectiveMismatchError, UnisonoError, UnsupportedError
from unisono.testing import run

BOTH = pytest.mark.parametrize("engine", ["native", "reference"])


@pytest.mark.ranks(3, engine="both")
def test_the_root_of_a_broadcast_may_be_read_only(rank):
    values = np.arange(5.0) if rank == 1 else np.zeros(5)
    values.flags.writeable = rank != 1
    dist.broadcast(values, src=1)
    assert values.tolist() == [0, 1, 2, 3, 4]


def shown(rank):
    return repr(dist.group.WORLD), repr(dist.new_group([1, 0], sort_ranks=False))


@BOTH
def test_a_group_and_its_sub_group_have_the_engine_that_was_asked_for(engine, caplog, monkeypatch):
    monkeypatch.setattr(log, "_logged", set())
    for group, part in run(shown, 2, engine=engine):
        assert f"engine={engine}" in group
        assert f"engine={engine}" in part
    assert "slow" not in caplog.text


def test_native_is_refused_where_it_cannot_be(monkeypatch):
    monkeypatch.setattr("unisono.core.base.seam._extension", None)
    monkeypatch.setattr("unisono.core.engines.choice.why_absent", "it is not built")
    with pytest.raises(UnsupportedError, match="cannot use the native engine: it is not built"):
        run(shown, 2, engine="native")


def survive_a_refused_group(rank):
    for options, error in [(CPUOptions(engine="native"), UnsupportedError), (7, TypeError)]:
        with pytest.raises(error):
            dist.new_group([0, 1, 2], pg_options=options)
    total = np.array([rank])
    dist.all_reduce(total)
    assert total.tolist() == [3]
    return dist.group.WORLD.backends["cpu"].comm.transport


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_a_refused_sub_group_leaves_the_links_of_the_world_open(transport):
    for links in run(survive_a_refused_group, 3, transport=transport, engine="reference"):
        assert links.closed


def meet(rank, path, settings):
    """Leave the world; meet the same ranks again, each with the settings of this test."""
    size = dist.get_world_size()
    dist.destroy_process_group()
    mine = settings[rank]
    if mine == "no descriptors":
        # Here, because a process cannot receive such an object.
        inbox = SimpleNamespace(create=lambda nonce, node: -errno.EMFILE)
        mine = {"messages": SimpleNamespace(Messages=lambda rank, size: inbox)}
    os.environ.update({name: text for name, text in mine.items() if name.isupper()})
    seam._extension = mine.get("extension", seam._extension)
    shared_memory._engine = mine.get("engine", shared_memory._engine)
    native_messages._engine = mine.get("messages", native_messages._engine)
    store = dist.FileStore(path, size)
    with pytest.raises(UnsupportedError) as caught:
        dist.init_process_group(store=store, rank=rank, world_size=size, timeout=30.0)
    assert not dist.is_initialized()
    for name in mine:
        os.environ.pop(name, None)
    return caught.value.what, caught.value.context.peers


REFERENCE, HIDDEN = {"UNISONO_ENGINE": "reference"}, {"extension": None}
OTHER = {"engine": SimpleNamespace(ABI=1)}
MPI = {"UNISONO_ENGINE": "mpi"}


@pytest.mark.native
@pytest.mark.parametrize(
    ("settings", "told", "peers"),
    [
        ([{}, REFERENCE, {}], "on ranks 0 and 2, Python on rank 1", (1,)),
        ([HIDDEN, {}, REFERENCE], "Python on ranks 0 and 2, C++ (version ", (0, 2)),
        ([{}, OTHER], "on rank 0, C++ (version 1) on rank 1", ()),
        ([{}, MPI, {}], "+mpi) on rank 1", ()),
        ([{}, "no descriptors"], "on rank 0, Python (EMFILE) on rank 1", (1,)),
        ([REFERENCE, MPI | HIDDEN], "Python on rank 0, Python (mpi) on rank 1", (0, 1)),
    ],
    ids=["unwanted", "absent", "another", "mpi", "descriptors", "in Python"],
)
def test_a_world_of_two_kinds_of_ranks_is_refused_by_all(tmp_path, settings, told, peers):
    args = (str(tmp_path / "store"), settings)
    (found,) = set(run(meet, len(settings), ranks="processes", args=args))
    line, blamed = found
    assert line.startswith("the ranks of a world must have one engine, but they have ")
    assert told in line
    assert blamed == peers


def test_a_world_of_two_transports_is_refused_by_all(tmp_path):
    args = (str(tmp_path / "store"), [{}, {"UNISONO_TRANSPORT": "inproc"}, {}])
    found = run(meet, 3, ranks="processes", args=args)
    line = "the ranks of a world must have one transport, but they have "
    assert {each for each, _ in found} == {f"{line}tcp on ranks 0 and 2, inproc on rank 1"}


def meet_near(rank, path, settings):
    size = dist.get_world_size()
    dist.destroy_process_group()
    os.environ.update(settings[rank])
    if "/" in path:
        store = dist.FileStore(path, size)
    else:
        store = dist.TCPStore("127.0.0.1", int(path), is_master=False, token="of the store")
    try:
        dist.init_process_group(store=store, rank=rank, world_size=size, timeout=30.0)
        x = np.full(1000, rank + 1.0)
        dist.all_reduce(x)
        dist.barrier()
        return x[0], ""
    except UnsupportedError as error:
        return 0.0, error.what
    finally:
        for name in settings[rank]:
            os.environ.pop(name, None)


@pytest.mark.skipif(bool(why_no_tls()), reason=str(why_no_tls()))
def test_engine_info_says_what_encrypts(monkeypatch):
    def shown(mode, token):
        monkeypatch.setenv("UNISONO_TLS", mode)
        monkeypatch.setenv("UNISONO_TOKEN", token)
        found = dist.engine_info()
        assert f"encryption between hosts: {found.encryption}" in str(found)
        return found.encryption

    assert shown("auto", "of the job") == shown("on", "of the job") == "TLS 1.3 (token)"
    assert (shown("auto", ""), shown("off", "of the job")) == ("none", "none")
    assert shown("on", "").startswith("UNISONO_TLS=on encrypts with keys from the job's token")
    assert shown("cert", "").startswith("UNISONO_TLS=cert needs UNISONO_TLS_CERT")


AUTO = {"UNISONO_TLS": "auto", "UNISONO_TOKEN": "of the job"}
NO_TOKEN, OFF = {"UNISONO_TLS": "auto", "UNISONO_TOKEN": ""}, AUTO | {"UNISONO_TLS": "off"}


@pytest.mark.skipif(bool(why_no_tls()), reason=str(why_no_tls()))
@pytest.mark.parametrize("other", [NO_TOKEN, OFF], ids=["no token", "off"])
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("tcp", "reference"),  # by the round trips to the store
        pytest.param("tcp", "native", marks=pytest.mark.native),
        pytest.param("file", "native", marks=pytest.mark.native),
    ],
)
def test_ranks_of_one_host_need_not_agree_about_other_hosts(tmp_path, kind, engine, other):
    """Between them nothing is encrypted in any case."""
    settings = [each | {"UNISONO_ENGINE": engine} for each in (AUTO, other)]
    with dist.TCPStore("127.0.0.1", 0, is_master=True, token="of the store") as server:
        path = str(tmp_path / "store") if kind == "file" else str(server.port)
        assert run(meet_near, 2, ranks="processes", args=(path, settings)) == [(3.0, "")] * 2


@pytest.mark.skipif(bool(why_no_tls()), reason=str(why_no_tls()))
def test_ranks_of_one_host_agree_about_their_host(tmp_path):
    args = (str(tmp_path / "store"), [AUTO, AUTO | {"UNISONO_TLS": "on"}])
    for _, line in run(meet_near, 2, ranks="processes", args=args):
        assert line.startswith("the ranks of a world must have one transport, but they have ")
        assert line.endswith(" on rank 0, tcp+TLS-by-token-everywhere on rank 1")


def meet_as_threads(rank, store, engines):
    size, mine = len(engines), CPUOptions(engine=engines[rank])
    with use(World()), pytest.raises(UnsupportedError) as caught:
        dist.init_process_group(store=store, rank=rank, world_size=size, pg_options=mine)
    return caught.value.what


@pytest.mark.native
def test_threads_of_two_engines_are_refused(monkeypatch):
    (line,) = set(run(meet_as_threads, 2, args=(dist.HashStore(), ["reference", "native"])))
    assert line.startswith("the ranks of a world must have one engine, but they have Python on ")


def meet_with_unknown(rank, store):
    mine = CPUOptions(engine="steam" if rank == 1 else None)
    with use(World()), pytest.raises(UnisonoError) as caught:
        dist.init_process_group(store=store, rank=rank, world_size=2, pg_options=mine)
    return caught.value.what


def test_an_unknown_engine_is_told_to_all():
    told, mine = run(meet_with_unknown, 2, args=(dist.HashStore(),))
    assert mine == "unknown engine 'steam' (known: auto, native, reference, mpi)"
    assert told == f"rank 0 of 2 cannot meet rank 1: {mine}"


@pytest.mark.ranks(2, kind="processes", engine="reference")
def test_engines_whose_names_end_differently(rank):
    ReferenceEngine.name = "engine_of_a_name" + "ab"[rank]
    group = dist.new_group([0, 1], use_local_synchronization=True)
    with pytest.raises(UnsupportedError, match="must have one engine, but they have engine_of_a"):
        dist.barrier(group=group)


@pytest.mark.native
@pytest.mark.ranks(3, kind="processes")
def test_ranks_that_want_other_engines_make_no_sub_group(rank):
    mine = CPUOptions(engine="reference") if rank == 1 else None
    for make in (
        lambda: dist.new_group([0, 1], pg_options=mine),
        lambda: dist.new_subgroups_by_enumeration([[0, 1], [2]], pg_options=mine),
        lambda: dist.split_group(split_ranks=[[0, 1], [2]], pg_options=mine),
    ):
        with pytest.raises(CollectiveMismatchError, match="engine='reference'"):
            make()
    if rank == 1:
        os.environ["UNISONO_ENGINE"] = "reference"
    x = np.ones(3)
    dist.all_reduce(x, group=dist.new_group())
    os.environ.pop("UNISONO_ENGINE", None)
    assert x.tolist() == [3, 3, 3]


def local(rank, mine):
    return dist.new_group([0, 1, 2], use_local_synchronization=True, pg_options=mine)


def colored(rank, mine):
    return dist.split_group(color=0, key=-rank, pg_options=mine)


def shrunk(rank, mine):
    old = dist.new_group()
    return None if rank == 0 else dist.shrink_group([0], old, pg_options=mine)


def shrunk_world(rank, mine):
    """With links of its own, so that the ranks compare their engines when they connect."""
    if rank == 0:
        return None
    with pytest.raises(UnsupportedError, match="Python on rank 0"):
        dist.shrink_group([0], pg_options=mine)
    return None


@pytest.fixture(params=["1", "0"], ids=["shared", "apart"])
def memory(request, monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", request.param)


@pytest.mark.native
@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("make", [local, colored, shrunk, shrunk_world])
@pytest.mark.ranks(3, kind="processes")
def test_a_group_that_its_ranks_did_not_agree_on_is_refused_by_all(rank, make):
    mine = CPUOptions(engine="reference") if rank == 1 else None
    group = make(rank, mine)
    for number in (1, 2) if group is not None else ():
        with pytest.raises(UnsupportedError) as caught:
            dist.all_reduce(np.ones(3), group=group, timeout=20)
        told = f"all_reduce #{number} in group '{group.name}' cannot run on rank {rank} of 3: "
        assert caught.value.what.startswith(told + "its ranks must have one engine, but they have ")
        assert "reference on rank 1" in caught.value.what
        others = {*dist.get_process_group_ranks(group)} - {1} if rank == 1 else {1}
        assert {*caught.value.context.peers} == others
        assert caught.value.context.usable
    x = np.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [3, 3, 3]


class Exchange(Operations):
    """Calls in which rank i has `numbers[i, j]` elements for rank j."""

    def table(self):
        return self.numbers


@pytest.mark.ranks(2, 3, 5, engine="both")
def test_uneven_exchange(rank):
    """all_to_all of blocks from nothing to several pieces of a slot, as one array and as lists."""
    p = dist.get_world_size()
    random = np.random.default_rng(p)
    sizes = random.choice([0, 1, 7, 1000, 70_000, 300_000], (p, p))
    calls = Exchange(rank, p, dtype=np.float64, uneven=True)
    calls.numbers = sizes
    calls.all_to_all_single()
    calls.all_to_all()
    calls.check(sizes)
    # Lists of neighbours are used in place, also where they are input and output.
    (out, expected), (sent, _) = calls.made[:2]
    out[:] = -1
    ends = np.cumsum([0, *sizes[:, rank]])
    together = [out[a:b] for a, b in itertools.pairwise(ends)]
    dist.all_to_all(together, np.split(sent, np.cumsum(sizes[rank])[:-1]))
    assert (out == expected).all()


@pytest.mark.ranks(3, engine="both")
def test_lists_of_neighbours(rank):
    """Collectives on lists whose arrays are rows of one, some of which are the input as well."""
    p, n = dist.get_world_size(), 5
    grid = np.full((p, n), -1.0)
    grid[rank] = np.arange(n) + 10 * rank
    whole = np.arange(n) + 10.0 * np.arange(p)[:, None]
    dist.all_gather(list(grid), grid[rank])
    assert (grid == whole).all()
    mixed = grid[::-1].copy()
    dist.all_gather(list(mixed), mixed[p - 1 - rank])
    assert (mixed == whole).all()
    mixed = np.zeros((p, n))
    dist.gather(whole[rank], list(mixed) if rank == 0 else None)
    assert (mixed == (whole if rank == 0 else 0)).all()
    part = np.zeros(n)
    dist.scatter(part, list(whole) if rank == 0 else None)
    assert (part == whole[rank]).all()
    rows = whole.copy()
    dist.reduce_scatter(rows[0], list(rows))
    assert (rows[0] == p * whole[rank]).all()
    assert (rows[1:] == whole[1:]).all()
    rows = whole.copy()
    dist.all_to_all(list(rows), list(rows))
    assert (rows == whole[rank]).all()
    rows = whole.copy()
    dist.reduce_scatter(part, list(rows), dist.ReduceOp.PREMUL_SUM(2.0))
    assert (part == 2 * p * whole[rank]).all()
    assert (rows == whole).all()


def sum_and_engine(rank):
    values = np.full(100_000, rank + 1.0)
    dist.all_reduce(values)
    return float(values[0]), float(values[-1]), repr(dist.group.WORLD)


@pytest.mark.native
def test_memory_is_shared_only_where_its_nonce_is_found(monkeypatch, caplog):
    """Hosts may look alike in every word, such as two copies of one virtual machine."""
    real = shared_memory._engine

    class OtherMemory:
        create = real.Segment.create

        @staticmethod
        def attach(pid, fd, nonce):
            return real.Segment.attach(pid, fd, bytes(len(nonce)))

    class Engine:
        Segment = OtherMemory

        def __getattr__(self, name):
            return getattr(real, name)

    monkeypatch.setattr(shared_memory, "_engine", Engine())
    monkeypatch.setattr(log, "_logged", set())
    for first, last, group in run(sum_and_engine, 3, engine="native"):
        assert (first, last) == (6.0, 6.0)
        assert "engine=native over=messages" in group
    (told,) = [r for r in caplog.records if "cannot share memory" in r.message]
    assert "(it is not the same)" in told.message
