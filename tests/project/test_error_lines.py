"""First lines of errors that no other test asserts, by the part of the library they come from."""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import re
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import unisono as dist
from unisono import errors
from unisono.backends import CPUOptions
from unisono.base.deadline import Deadline
from unisono.bench import launch as bench_launch
from unisono.bench import libraries
from unisono.cli import bench
from unisono.cli.run import nodes
from unisono.launcher.output.files import StdChoice, _create
from unisono.launcher.workers.cpu_binding import Binding, Machine
from unisono.rendezvous import handlers, launchers
from unisono.rendezvous.endpoint import own_address, parse_endpoint
from unisono.schedules import Buf, Schedule, build, layout_for, lower
from unisono.schedules.ir import copy
from unisono.stores import (
    FileStore,
    HashStore,
    PrefixStore,
    TCPStore,
)
from unisono.stores.files.lock import FileLock
from unisono.stores.services.store import ServiceStore, Unreachable
from unisono.stores.table import Table
from unisono.stores.tcp import client as tcp_client
from unisono.stores.tcp import python_server, wire
from unisono.stores.tcp.connection import Connection, ConnectionPool
from unisono.stores.tcp.python_server import PythonServer, ServerOptions
from unisono.stores.tcp.wire import Op, encode_request
from unisono.testing import run
from unisono.transports import InprocTransport, Key
from unisono.transports.messages import Kind
from unisono.transports.tcp.address import listen
from unisono.transports.tcp.wire import HELLO, Hello


def x(count=2):
    return np.ones(count)


class Service(ServiceStore):
    """A service in a dictionary, which refuses every change, or does not answer."""

    patience_s = 0.02

    def __init__(self, answer=True, refuse=True, world_size=-1):
        super().__init__("test/", 0.02, world_size)
        self._answer, self._refuse, self._values = answer, refuse, {}

    def _fetch(self, names):
        if not self._answer:
            raise Unreachable("no")
        from unisono.stores.services.store import Entry

        return [Entry(self._values.get(name), None) for name in names]

    def _swap(self, swaps):
        if self._refuse:
            return None
        self._values |= {swap.name: swap.after for swap in swaps}
        return 1

    def _names(self, start):
        return [name for name in self._values if name.startswith(start)]

    def _clear(self):
        self._values.clear()

    def _hang_up(self):
        pass

    def clone(self):
        return self

    def __repr__(self):
        return "<Service>"


def table():
    made = Table()
    made.values["n"] = b"9223372036854775807"
    return made


def entered_table():
    made = Table()
    made.arrive("b", 2, "one", lambda: None)
    return made


# text of the first line -> (error, call)
PLAIN = {
    # ---- stores
    "PrefixStore needs a Store, got str": ("ArgumentType", lambda: PrefixStore("p", "store")),
    "a store key must be str, got int: 5": ("ArgumentType", lambda: HashStore().set(5, b"")),
    "a store value must be str or bytes, got float": (
        "ArgumentType", lambda: HashStore().set("k", 1.5),
    ),
    "amount must be int, got float": ("ArgumentType", lambda: HashStore().add("k", 1.5)),
    "amount=9223372036854775808 does not fit into 64 bits": (
        "InvalidArgument", lambda: HashStore().add("k", 2**63),
    ),
    "a barrier needs world_size >= 1, got 0": (
        "InvalidArgument", lambda: HashStore().barrier("b", 0),
    ),
    "multi_set got 2 keys but 1 values; they must pair up": (
        "InvalidArgument", lambda: HashStore().multi_set(["a", "b"], [b""]),
    ),
    "world_size of a FileStore cannot be 0": ("InvalidArgument", lambda: FileStore("never", 0)),
    "world_size of a TCPStore cannot be -2": (
        "InvalidArgument", lambda: TCPStore("127.0.0.1", 0, world_size=-2, is_master=True),
    ),
    "world_size of a store cannot be 0": ("InvalidArgument", lambda: Service(world_size=0)),
    "port must be 0 to 65535, got 65536": (
        "InvalidArgument", lambda: TCPStore("127.0.0.1", 65536),
    ),
    "'k/k' on <Service> was changed by others all the time, for 0.02 s": (
        "StoreTimeout", lambda: Service().set("k", b""),
    ),
    "no answer from <Service> within 0.02 s: no": (
        "StoreConnection", lambda: Service(answer=False).check(["k"]),
    ),
    "barrier 'b' was entered with world_size=2, now with world_size=3": (
        "InvalidArgument", lambda: entered_table().arrive("b", 3, "two", lambda: None),
    ),
    "add('n', 1): the sum 9223372036854775808 does not fit into 64 bits": (
        "StoreKey", lambda: table().add("n", 1),
    ),
    "MULTI_GET without keys has no reply to expect": (
        "InvalidArgument", lambda: replies().expect(Op.MULTI_GET, 0),
    ),
    # ---- rendezvous
    "url must be str, got int": ("ArgumentType", lambda: dist.rendezvous(5)),
    "rank must be int, got str": ("ArgumentType", lambda: dist.rendezvous("env://", "0")),
    "the URL 'tcp://?rank=0&world_size=1' has no host; write tcp://host:port": (
        "Rendezvous", lambda: met("tcp://?rank=0&world_size=1"),
    ),
    "the URL 'tcp://here?rank=0&world_size=1' has no port; write tcp://host:port": (
        "Rendezvous", lambda: met("tcp://here?rank=0&world_size=1"),
    ),
    "'rank' in the URL 'tcp://here:1?rank' is not name=value": (
        "Rendezvous", lambda: met("tcp://here:1?rank"),
    ),
    "rank occurs twice in the URL 'tcp://here:1?rank=0&rank=1'": (
        "Rendezvous", lambda: met("tcp://here:1?rank=0&rank=1"),
    ),
    "the URL 'file://host/path?rank=0&world_size=1' names the host 'host'; "
    "write file:///absolute/path": (
        "Rendezvous", lambda: met("file://host/path?rank=0&world_size=1"),
    ),
    "the URL 'file://?rank=0&world_size=1' has no path; write file:///absolute/path": (
        "Rendezvous", lambda: met("file://?rank=0&world_size=1"),
    ),
    "tcp:// rendezvous: rank is missing; write it into the URL (tcp://...?rank=0&world_size=2) or "
    "pass it as an argument": ("Rendezvous", lambda: met("tcp://here:1")),
    "given twice: rank in the URL 'env://?rank=0', and the arguments rank=1, world_size=-1": (
        "Rendezvous", lambda: met("env://?rank=0", 1),
    ),
    "the rendezvous endpoint ':1' is not host:port": ("Rendezvous", lambda: parse_endpoint(":1")),
    "SLURM_NTASKS=4 means several processes, but no launcher started this process: this "
    "would make a world of one in each": (
        "Rendezvous", lambda: launchers.is_alone({"SLURM_NTASKS": "4"}),
    ),
    "OMPI_COMM_WORLD_RANK=0 was set by mpiexec (Open MPI), but OMPI_COMM_WORLD_SIZE is not set: "
    "this would make a world of one in each process": (
        "Rendezvous", lambda: launchers.find_place({"OMPI_COMM_WORLD_RANK": "0"}),
    ),
    # ---- schedules
    "all_reduce (ring): world size is 0, expected 1 or more": (
        "InvalidArgument", lambda: build("all_reduce", "ring", 0),
    ),
    "all_reduce (ring) has no root, got root 1": (
        "InvalidArgument", lambda: build("all_reduce", "ring", 2, 1),
    ),
    "broadcast (linear): root is 2, expected 0..1": (
        "InvalidArgument", lambda: build("broadcast", "linear", 2, 2),
    ),
    "broadcast (linear): pipeline depth is 2, expected 1: it has no pipeline": (
        "InvalidArgument", lambda: build("broadcast", "linear", 2, 0, 2),
    ),
    "all_reduce (ring): count is -1, expected 0 or more elements": (
        "InvalidArgument", lambda: layout_for(build("all_reduce", "ring", 2), -1),
    ),
    "all_to_all (pairwise) needs out_splits as well when splits are given": (
        "InvalidArgument", lambda: layout_for(build("all_to_all", "pairwise", 2), 1, [1, 1]),
    ),
    "all_to_all (pairwise): in_splits has 1 entries, expected one per rank: 2": (
        "InvalidArgument", lambda: layout_for(build("all_to_all", "pairwise", 2), 1, [1], [1, 1]),
    ),
    "all_to_all (pairwise): in_splits holds a negative size: [1, -1]": (
        "InvalidArgument",
        lambda: layout_for(build("all_to_all", "pairwise", 2), 1, [1, -1], [1, 1]),
    ),
    "all_to_all (bruck) needs blocks of equal size, got in_splits": (
        "InvalidArgument", lambda: layout_for(build("all_to_all", "bruck", 2), 1, [1, 1], [1, 1]),
    ),
    # ---- transports
    "a transport moves flat bytes, got format 'd' of 1 dimensions": (
        "InvalidArgument", lambda: with_transport(lambda t: t.send(0, KEY, memoryview(x()))),
    ),
    "cannot receive into read-only memory": (
        "InvalidArgument", lambda: with_transport(lambda t: t.recv(0, KEY, memoryview(b"abc"))),
    ),
    "protocol version 99 called, this is version 3": (
        "Handshake", lambda: Hello.parse(changed_hello(version=99)),
    ),
    # ---- launcher and command line
    "bind must be one of none, core, numa, auto; got 'socket'": (
        "InvalidArgument", lambda: Binding.make("socket", 1),
    ),
    "cannot bind each worker to cores of its own: 4 workers, 1 cores": (
        "Launch", lambda: Binding.make("core", 4, one_core()),
    ),
    "'4' is neither 0, 1, 2, 3 (none, out, err, both) nor a list of local rank:number such as "
    "0:3,1:0": ("InvalidArgument", lambda: StdChoice.parse("4")),
    "cannot write /nonexistent/results.json: no such folder, or no permission": (
        "InvalidArgument", lambda: bench._check_writable("/nonexistent/results.json"),
    ),
    "--rdzv-conf: close_timeout must be a number of seconds >= 0, got 'x'": (
        "InvalidArgument", lambda: nodes._number({"close_timeout": "x"}, "close_timeout", 1.0),
    ),
    # ---- groups
    "the name of a backend must be a string, got 5": ("ArgumentType", lambda: dist.Backend(5)),
}  # fmt: skip

KEY = Key(1, Kind.P2P, 0)

# The package has a function of that name.
LAUNCH = importlib.import_module("unisono.launcher.launch")


def met(url, *args):
    return next(iter(dist.rendezvous(url, *args)))


def replies():
    from unisono.stores.tcp.wire import ReplyDecoder

    return ReplyDecoder()


def one_core():
    return Machine([[[0]]])


def with_transport(use):
    transport = InprocTransport(0, 1, lambda rank: "")
    try:
        use(transport)
    finally:
        transport.close()


def changed_hello(**changes):
    fields = list(HELLO.unpack(Hello(1, 0, 0, 0, bytes(16)).pack()))
    fields[1] = changes.get("version", fields[1])
    return HELLO.pack(*fields)


def check(text, name, call):
    with pytest.raises(getattr(errors, f"{name}Error")) as caught:
        call()
    assert caught.value.what.partition("\n")[0] == text


def test_append_beyond_the_largest_value(monkeypatch, caplog):
    monkeypatch.setenv("UNISONO_ENGINE", "reference")
    for module in (tcp_client, python_server):
        monkeypatch.setattr(module, "MAX_VALUE_BYTES", 8)
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        store.append("k", "12345678")
        told = "append of 1 bytes to the 8 bytes of 'k': a value has at most 8 bytes"
        with pytest.raises(errors.InvalidArgumentError, match=f"^{told}"):
            store.append("k", "9")
        assert store.get("k") == b"12345678"
    assert "the value becomes too long" in caplog.text


def test_coalescing_on_the_device_of_the_plug_in():
    torch = pytest.importorskip("torch")
    from unisono.torch.process_group import ProcessGroup

    group = ProcessGroup.__new__(ProcessGroup)
    told = "backend 'unisono' does not coalesce calls on the CPU one by one"
    with pytest.raises(errors.UnsupportedError, match=told):
        ProcessGroup._start_coalescing(group, torch.device("cpu"))


@pytest.mark.parametrize("text", PLAIN)
def test_first_line(text):
    check(text, *PLAIN[text])


def large_multi_get():
    """Ask a server for more than it sends at once."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = PythonServer([listener], ServerOptions(max_reply_bytes=10))
    try:
        server._table.values["k"] = b"0123456789"
        server._multi_get(["k", "k"])
    finally:
        server.close()


def lock_that_somebody_has(tmp_path):
    FileLock(str(tmp_path / "store"), "run", held=True)
    FileLock(str(tmp_path / "store"), "run").acquire(Deadline(0.02), lambda: None)


def locked_empty_file(tmp_path):
    path = tmp_path / "store"
    path.touch()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        FileStore(str(path), 1, timeout=0.02).get("k")


def unlistening(tmp_path):
    fd = os.open(tmp_path / "no socket", os.O_CREAT | os.O_RDWR)
    try:
        TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=fd)
    finally:
        os.close(fd)


def port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        TCPStore("127.0.0.1", port, is_master=True)


def silent_server():
    """Connect to what accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        TCPStore("127.0.0.1", silent.getsockname()[1], timeout=0.05)


def lonely_master():
    TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=0.5)


def closed_pool():
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        pool = ConnectionPool("127.0.0.1", store.port, b"")
        pool.close()
        pool.ask(1.0, (Op.CHECK, (["k"],)))


def closed_while_waiting(make):
    """Close a store while another thread waits on it; raise what that thread got."""
    error = None
    # The thread may have been on its way still, which makes it another error.
    while error is None or "waited" not in str(error):
        error = closed_under_a_thread(make())
    raise error


def closed_under_a_thread(store):
    told, looked = [], threading.Event()

    def wait():
        looked.set()
        try:
            store.get("absent", 30)
        except errors.UnisonoError as error:
            told.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    looked.wait(30)
    while thread.is_alive():
        thread.join(0.05)
        store.close()
    return told[0]


def registered_twice():
    dist.register_rendezvous_handler("env", print)


def met_twice():
    meeting = dist.rendezvous(f"tcp://127.0.0.1:{free_port()}?rank=0&world_size=1")
    store, _, _ = next(meeting)
    try:
        next(meeting)
    finally:
        store.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def left_over_world(monkeypatch):
    env = {"RANK": "0", "WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    launchers._check_really_alone(env)


def unknown_level(monkeypatch):
    from unisono.base import log

    monkeypatch.setenv("UNISONO_LOG", "loud")
    log._make_root()


def unknown_isa(monkeypatch):
    from unisono.engines import native_engine as native

    if native._engine is None:
        pytest.skip("the C++ engine is not built")
    native._choose_isa("mmx")


def odd_buffer():
    from unisono.base.buffers import view

    view(memoryview(bytearray(8)).cast("B").cast("P"), write=False)


def alone(call):
    dist.init_process_group(world_size=1, rank=0)
    try:
        call(dist.GroupMember.WORLD)
    finally:
        dist.destroy_process_group()


def two_groups(group):
    other = dist.new_group()
    ops = [dist.P2POp(dist.isend, x(), 0), dist.P2POp(dist.isend, x(), 0, other)]
    dist.batch_isend_irecv(ops)


def never_done(group):
    work = dist.irecv(x(), 0)
    try:
        dist.wait_any([work], 0.01)
    finally:
        dist.isend(x(), 0)
        work.wait()


def no_more_processes(monkeypatch):
    from unisono.launcher import guard

    def fork():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(guard.os, "fork", fork)
    guard.fork_launcher(())


def no_mpi(monkeypatch):
    monkeypatch.setattr(bench_launch, "_mpiexec", lambda: None)
    bench_launch.check_installed("mpi")


def own_address_of_nothing(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **how: [])
    own_address("nowhere.invalid")


def no_way(monkeypatch):
    def fail(*args, **how):
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    own_address("nowhere.invalid")


def unequal_stripes(group):
    group.all_gather_into_tensor_coalesced([x(3)], [x(2)])


def too_many_arguments(group):
    group.allreduce([x()], dist.ReduceOp.SUM, 1.0, 5)


def two_in_a_list(group):
    group.allreduce([x(), x()])


def closed_transport():
    def use(transport):
        transport.close()
        raise transport.send(0, KEY, memoryview(b"")).error

    with_transport(use)


def transport_closed_meanwhile(close):
    transport = InprocTransport(0, 1, lambda rank: "")
    waiting = transport.recv(0, KEY, memoryview(bytearray(1)))
    close(transport)
    transport.close()
    raise waiting.error


def future_of_a_receive(group):
    work = dist.irecv(x(), 0)
    try:
        work.get_future().wait(0.01)
    finally:
        dist.isend(x(), 0)
        work.wait()


def wrong_token():
    with TCPStore("127.0.0.1", 0, is_master=True, token="a") as store:
        TCPStore("127.0.0.1", store.port, timeout=1.0, token="b")


def large_request(monkeypatch):
    monkeypatch.setattr(wire, "MAX_REQUEST_BYTES", 10)
    encode_request(Op.CHECK, ["long enough"])


def bad_reply():
    ours, theirs = socket.socketpair()
    connection = Connection(ours, "here:1")
    try:
        raise connection._failure(ValueError("nonsense"), 1.0, ((Op.PING, 1),))
    finally:
        connection.close()
        theirs.close()


def mpiexec_failed():
    ranks = bench_launch._Processes({"mpiexec": ["sh", "-c", "exit 3"]})
    assert ranks.wait(60)
    ranks.check()


def other_mpi(monkeypatch):
    world = SimpleNamespace(size=1)
    monkeypatch.setattr(libraries, "_mpi", lambda: SimpleNamespace(COMM_WORLD=world))
    libraries.mpi_rank(SimpleNamespace(nprocs=4))


def half_floats(monkeypatch):
    monkeypatch.setattr(libraries, "_mpi", lambda: SimpleNamespace(COMM_WORLD=None))
    plan = SimpleNamespace(redop="sum", dtype="float16")
    libraries._MPI().call(SimpleNamespace(case=None, plan=plan))


def unequal_step():
    def exchange(k, ranks):
        yield copy(ranks, (Buf.OUTPUT, 0), (Buf.OUTPUT, 1))

    schedule = Schedule("all_reduce", "ring", 2, 1, exchange, output_chunks=2)
    lower(schedule, 1, layout_for(schedule, 5))


def sparse_maximum():
    pytest.importorskip("torch")
    from unisono.torch.sparse import all_reduce_sparse

    all_reduce_sparse(None, None, dist.ReduceOp.MAX)


def sparse_shapes(rank):
    import torch

    from unisono.torch.sparse import all_reduce_sparse

    matrix = torch.eye(2 + rank).to_sparse()
    all_reduce_sparse(dist.GroupMember.WORLD, matrix, dist.ReduceOp.SUM)


def sparse_tensors():
    pytest.importorskip("torch")
    run(sparse_shapes, 2)


def merged_groups():
    pytest.importorskip("torch")
    from unisono.torch.process_group import ProcessGroup

    ProcessGroup.merge_remote_group(None)


def unnamed_device():
    pytest.importorskip("torch")
    from unisono.torch.process_group import ProcessGroup

    group = SimpleNamespace(
        _devices={}, _backend_names=lambda: {"cpu": "unisono"}, _group=SimpleNamespace(name="0")
    )
    ProcessGroup.on_device(group, "cuda")


def parallel(module, **how):
    """Make a data-parallel module of what `module` makes of torch, in a world of one."""
    torch = pytest.importorskip("torch")
    from unisono.parallel import DistributedDataParallel

    made = []
    alone(lambda group: made.append(DistributedDataParallel(module(torch), **how)))


def gradient_twice():
    pytest.importorskip("torch")
    from unisono.parallel.reducer import Reducer

    state = SimpleNamespace(expecting=True, started=True, ready={0})
    reducer = SimpleNamespace(_pass=state, _names=["w"])
    Reducer.arrived(reducer, 0)


def world_that_stays(monkeypatch):
    """Rank 0 is still in the world that this rank has left."""
    place = ("127.0.0.1", 1, 1)
    monkeypatch.setitem(handlers._worlds, place, b"before")
    store = HashStore()
    store.set(handlers._WORLD, b"before")
    handlers._store_of_next_world(place, lambda timeout: store.clone(), 0.01)


def store_of_somebody_else(monkeypatch):
    handlers._store_of_next_world(("127.0.0.1", 1, 1), lambda timeout: HashStore(), 0.01)


def join_without_descriptors(monkeypatch):
    def no_descriptor(store, *args, **kwargs):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("unisono.c10d.lifecycle.ProcessGroup", no_descriptor)
    dist.init_process_group(store=HashStore(), rank=1, world_size=2)


# regular expression of the first line -> (error, call), with what the call needs as its argument
MATCHED = {
    r"rank 1 of 2 on \S+ cannot join a group: .*file.*": ("Rendezvous", join_without_descriptors),
    r"multi_get of 2 keys has 20 bytes; at most 10 are sent": ("InvalidArgument", large_multi_get),
    r"the store file '.*' stayed locked for 0\.02 s by .*": (
        "StoreTimeout", lock_that_somebody_has,
    ),
    r"the store file '.*' could not be locked for 0\.02 s": (
        "StoreTimeout",
        lambda tmp_path: FileLock(str(tmp_path / "s"), "r").acquire(Deadline(0.02), lambda: None),
    ),
    r"cannot lock the store file '.*': Not a directory": (
        "Store",
        lambda tmp_path: (
            (tmp_path / "file").touch(),
            FileLock(str(tmp_path / "file" / "s"), "r").acquire(Deadline(0.02), lambda: None),
        ),
    ),
    r"the empty store file '.*' stayed locked by another process for 0\.02 s": (
        "StoreTimeout", locked_empty_file,
    ),
    r"master_listen_fd=\d+ cannot listen: .*": ("StoreConnection", unlistening),
    r"the store server cannot listen on 127\.0\.0\.1:\d+: .*": ("StoreConnection", port_in_use),
    r"the store server cannot listen on nowhere\.invalid:0: .*": (
        "StoreConnection", lambda: TCPStore("nowhere.invalid", 0, is_master=True),
    ),
    r"connecting timed out: the store server at 127\.0\.0\.1:\d+ accepted the connection "
    r"but did not answer within \S+ m?s": ("StoreTimeout", silent_server),
    r"cannot connect from \S+ to the store at 127\.0\.0\.1:\d+ within 0\.05 s \(.*refused\)": (
        "StoreConnection", lambda: TCPStore("127.0.0.1", free_port(), timeout=0.05),
    ),
    r".* timed out after 0\.5 s waiting for clients: 1 of 2 joined": (
        "StoreTimeout", lonely_master,
    ),
    r"the store at 127\.0\.0\.1:\d+ is closed": ("Closed", closed_pool),
    r".* was closed while a thread waited on it": (
        "Closed", lambda: closed_while_waiting(HashStore),
    ),
    r"the store at \S+ was closed while a thread waited on it": (
        "Closed", lambda: closed_while_waiting(lambda: TCPStore("127.0.0.1", 0, is_master=True)),
    ),
    r"one request may have \d+ keys, got \d+": (
        "InvalidArgument", lambda: encode_request(Op.CHECK, [""] * (1 << 21)),
    ),
    r"a rendezvous handler for env:// is already registered \(registered: .*\)": (
        "Rendezvous", registered_twice,
    ),
    r"tcp:// rendezvous yields once; it cannot meet again": ("Rendezvous", met_twice),
    r"RANK=0 and WORLD_SIZE=1 are set, but mpiexec \(Open MPI\) started 2 processes "
    r"\(OMPI_COMM_WORLD_RANK=1\): this would make a world of one in each": (
        "Rendezvous", left_over_world,
    ),
    r"host 'nowhere.invalid' has no address": ("Rendezvous", own_address_of_nothing),
    r"there is no way to host 'nowhere.invalid': .*No route to host": ("Rendezvous", no_way),
    r"a stranger called: first bytes b'GET / HT', expected b'unisono.*'": (
        "Handshake", lambda: Hello.parse(b"GET / HTTP".ljust(HELLO.size)),
    ),
    r"cannot listen on any address of this rank \(192\.0\.2\.1: .*\)": (
        "Transport", lambda: listen(("192.0.2.1",)),
    ),
    r"cannot start the launcher's second process: .*": ("Launch", no_more_processes),
    r"cannot write the log '.*': Not a directory": (
        "Launch",
        lambda tmp_path: ((tmp_path / "file").touch(), _create(str(tmp_path / "file/a/log"))),
    ),
    r"the function cannot be sent to other processes: .*": (
        "InvalidArgument", lambda: LAUNCH._pickled(threading.Lock(), "the function"),
    ),
    r"--peer mpi needs .*the program mpiexec, not found beside .*": ("InvalidArgument", no_mpi),
    r"UNISONO_LOG='LOUD' is not a level \(known: .*\)": ("InvalidArgument", unknown_level),
    r"UNISONO_CPU='mmx' is no instruction set of this machine \(it has: .*\)": (
        "InvalidArgument", unknown_isa,
    ),
    r"unknown engine 'steam' \(known: auto, native, reference\)": (
        "InvalidArgument",
        lambda: dist.init_process_group(
            world_size=1, rank=0, store=HashStore(), pg_options=CPUOptions(engine="steam")
        ),
    ),
    r"tensor is a buffer of format 'P', which NumPy does not know": ("Unsupported", odd_buffer),
    r"the transport is closed": ("Closed", closed_transport),
    r"the transport was closed": (
        "Closed", lambda: transport_closed_meanwhile(lambda transport: transport.close()),
    ),
    r"the transport vanished": (
        "Closed", lambda: transport_closed_meanwhile(lambda transport: transport.vanish("gone")),
    ),
    r"the future of recv had no value after 0\.01 s; it goes on": (
        "CollectiveTimeout", lambda: alone(future_of_a_receive),
    ),
    r"the store server at 127\.0\.0\.1:\d+ does not let this client in: .*token.*": (
        "Handshake", wrong_token,
    ),
    r"one store request may have 10 bytes, got \d+": ("InvalidArgument", large_request),
    r"PING on the store at here:1: bad reply: nonsense": ("StoreConnection", bad_reply),
    r"mpiexec ended with exit code 3; see its standard error": ("Launch", mpiexec_failed),
    r"mpi4py sees 1 ranks, expected 4: the mpiexec that started this process belongs to another "
    r"MPI library": ("Launch", other_mpi),
    r"mpi has no type float16": ("Unsupported", half_floats),
    r"all_reduce \(ring\), rank 1, step 0: source has 2 elements, destination 3: .*": (
        "Schedule", unequal_step,
    ),
    r"all_reduce of sparse tensors has SUM only, not MAX": ("Unsupported", sparse_maximum),
    r"all_reduce of sparse tensors in group 'default': shapes differ: \[2, 2\] on rank 0, "
    r"\[3, 3\] on rank 1": ("CollectiveMismatch", sparse_tensors),
    r"backend 'unisono' has no merge_remote_group": ("Unsupported", merged_groups),
    r"group '0' has no backend for tensors on 'cuda' \(it has: cpu:unisono\)": (
        "Unsupported", unnamed_device,
    ),
    r"bucket_cap_mb=0, expected more than 0": (
        "InvalidArgument",
        lambda: parallel(lambda torch: torch.nn.Linear(1, 1), bucket_cap_mb=0),
    ),
    r"no parameter of the module needs a gradient": (
        "InvalidArgument", lambda: parallel(lambda torch: torch.nn.ReLU()),
    ),
    r"DistributedDataParallel on a rank outside its process group": (
        "NotInGroup",
        lambda: parallel(lambda torch: torch.nn.Linear(1, 1), process_group=-100),
    ),
    r"parameter 'w' got its gradient twice in one backward pass": ("Usage", gradient_twice),
    r"rank 1 waited 0\.01 s at 127\.0\.0\.1:1 for rank 0, which did not leave the world before": (
        "Rendezvous", world_that_stays,
    ),
    r"rank 1 waited 0\.01 s for rank 0 at the store at 127\.0\.0\.1:1, which another process "
    r"serves": (
        "Rendezvous", store_of_somebody_else,
    ),
    r"all operations of a batch must use the same group": (
        "InvalidArgument", lambda: alone(two_groups),
    ),
    r"none of 1 works was done after 0\.01 s of waiting; they go on": (
        "CollectiveTimeout", lambda: alone(never_done),
    ),
    r".*: outputs hold \[3\] elements and inputs \[2\]; expected 1 times as many in outputs": (
        "InvalidArgument", lambda: alone(unequal_stripes),
    ),
    r"all_reduce takes 3 arguments in c10d's form \(.*\), got 4": (
        "ArgumentType", lambda: alone(too_many_arguments),
    ),
    r"tensor must be an array, or in c10d's form a list of one such; got a list of 2": (
        "ArgumentType", lambda: alone(two_in_a_list),
    ),
    r"split_group: backend 'cpu:gloo': the parent group 'default' has 'cpu:unisono'": (
        "InvalidArgument",
        lambda: alone(lambda group: dist.split_group(group, [[0]], backend="cpu:gloo")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("pattern", MATCHED)
def test_first_line_matches(pattern, request):
    name, call = MATCHED[pattern]
    needs = call.__code__.co_varnames[: call.__code__.co_argcount]
    with pytest.raises(getattr(errors, f"{name}Error")) as caught:
        call(*map(request.getfixturevalue, needs))
    line = caught.value.what.partition("\n")[0]
    assert re.fullmatch(pattern, line), line
