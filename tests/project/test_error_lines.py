"""First lines of errors, word for word: a table of calls and the line that each must raise.

`{}` stands for any text. Lines that depend on other ranks are at the end.
"""

# Tables: ruff would use three times the lines.
# fmt: off

import errno
import fcntl
import functools
import importlib
import os
import pickle
import re
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import frozen
from tests.support.ports import reserved_port
from tests.support.posix_of_windows import posix_of_windows
from unisono import errors
from unisono.core.backends import CPUOptions, registry
from unisono.core.base import buffers, log
from unisono.core.base.deadline import Deadline
from unisono.core.engines import native_engine
from unisono.core.rendezvous import handlers, launchers, search
from unisono.core.rendezvous.endpoint import own_address, parse_endpoint
from unisono.core.schedules import Buf, Schedule, build, layout_for, lower
from unisono.core.schedules.ir import copy
from unisono.core.stores import FileStore, HashStore, PrefixStore, TCPStore
from unisono.core.stores.files.lock import FileLock
from unisono.core.stores.services.store import ServiceStore, Unreachable, VersionedValue
from unisono.core.stores.table import checked_sum
from unisono.core.stores.tcp import wire
from unisono.core.stores.tcp.connection import Connection, ConnectionPool
from unisono.core.stores.tcp.server import ServerOptions, StoreServer
from unisono.core.stores.tcp.wire import ReplyDecoder, RequestOp, encode_request
from unisono.core.transports import InprocTransport, Key
from unisono.core.transports.messages import Purpose
from unisono.core.transports.tcp.address import listen
from unisono.core.transports.tcp.wire import HELLO, Hello
from unisono.launcher import guard
from unisono.launcher.output.files import StdChoice, _create
from unisono.launcher.workers.cpu_binding import Binding, HostCPUs
from unisono.testing import run
from unisono.workbench.bench import launch as bench_launch
from unisono.workbench.bench import libraries
from unisono.workbench.bench import peers as bench_peers
from unisono.workbench.cli import flags, nodes

MAX, SUM, PREMUL_SUM = dist.ReduceOp.MAX, dist.ReduceOp.SUM, dist.ReduceOp.PREMUL_SUM
NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER
init = dist.init_process_group
KEY = Key(1, Purpose.P2P, 0)
HERE = "127.0.0.1"
# The package has a function of that name.
LAUNCH = importlib.import_module("unisono.launcher.launch")


def x(count=2):
    return np.ones(count)


def coalesced(**how):
    with dist._coalescing_manager():
        dist.all_reduce(x(), **how)


def receive_later(wait):
    """Wait for a receive before its message is sent."""
    work = dist.irecv(x(), 0)
    try:
        wait(work)
    finally:
        dist.isend(x(), 0)
        work.wait()


KNOWN = "(known besides its own: async_op, timeout, algorithm, deterministic)"

# Class of the error -> first line -> call, in a world of one rank or without a world. Parameters of
# a call are fixtures.
IN_A_WORLD, WITHOUT_A_WORLD = {}, {}

# Other ranks would get the error of a call; this group has none.
NO_GROUP = SimpleNamespace(backends={}, refuse=lambda *_: None)

IN_A_WORLD["AlreadyInitialized"] = {
    "trying to initialize the default process group twice": lambda: dist.init_process_group(),
}
IN_A_WORLD["InvalidArgument"] = {
    "broadcast: can't specify both a group rank and a global rank":
        lambda: dist.broadcast(x(), 0, group_src=0),
    "broadcast: must specify a global rank or a group rank": lambda: dist.broadcast(x()),
    "broadcast: global rank 3 is not in group 'default' (ranks [0])":
        lambda: dist.broadcast(x(), 3),
    "reduce: root=1 is not a rank of group 'default' (0..0)": lambda: dist.reduce(x(), group_dst=1),
    "gather: root=9 is not a rank of group 'default' (0..0)":
        lambda: dist.group.WORLD.gather(x(), [x()], 9),
    "gather: gather_list has 2 entries, expected one for each of 1 ranks":
        lambda: dist.gather(x(), [x(), x()]),
    **{f"{call}: global rank 7 is not in group 'default' (ranks [0])": wrong for call, wrong in {
        "send": lambda: dist.send(x(), 7), "irecv": lambda: dist.irecv(x(), 7),
        "P2POp": lambda: dist.P2POp(dist.isend, x(), 7),
        "scatter_object_list": lambda: dist.scatter_object_list([0], [x()], 7)}.items()},
    "isend: dst=-1 is not a rank of group 'default' (0..0)": lambda: dist.isend(x(), group_dst=-1),
    "isend: tag=-1 is outside 0..2**63-1": lambda: dist.isend(x(), 0, tag=-1),
    "send to this rank itself (0) would wait for its own receive": lambda: dist.send(x(), 0),
    "all_reduce: PREMUL_SUM needs its factor": lambda: dist.all_reduce(x(), PREMUL_SUM),
    "all_reduce: tensor is read-only but the operation writes into it":
        lambda: dist.all_reduce(frozen()),
    "all_gather: tensor_list[0] is read-only but the operation writes into it":
        lambda: dist.all_gather([frozen()], x()),
    "all_reduce: timeout must not be negative, got -1": lambda: dist.all_reduce(x(), timeout=-1),
    "all_gather: tensor_list has 2 entries, expected one for each of 1 ranks":
        lambda: dist.all_gather([x(), x()], x()),
    "all_reduce_coalesced: tensors is empty; expected at least one array":
        lambda: dist.all_reduce_coalesced([]),
    "all_gather_coalesced: output_tensor_lists is empty; expected at least one array":
        lambda: dist.all_gather_coalesced([[]], [x()]),
    "gather: gather_list is required on the root, which is this rank": lambda: dist.gather(x()),
    "reduce_scatter: input_list[0] has 3 elements, this rank's own array 2":
        lambda: dist.reduce_scatter(x(), [x(3)]),
    "all_gather_into_tensor: output_tensor has 3 elements, expected 2: 1 ranks x 2 of "
    "input_tensor": lambda: dist.all_gather_into_tensor(x(3), x()),
    "reduce_scatter_tensor: input has 2 elements, expected 3: 1 ranks x 3 of output":
        lambda: dist.reduce_scatter_tensor(x(3), x()),
    "all_gather_coalesced: output_tensor_lists hold (2, 2) elements, expected (2, 3) for each "
    "of 1 ranks": lambda: dist.all_gather_coalesced([[x(), x()]], [x(), x(3)]),
    "all_gather_into_tensor: output_tensor has dtype float32, the input has float64":
        lambda: dist.all_gather_into_tensor(np.zeros(2, "f4"), x()),
    "all_reduce_coalesced: tensors[1] has dtype int32, expected float64":
        lambda: dist.all_reduce_coalesced([x(), np.zeros(2, "i4")]),
    "all_to_all_single: input: split sizes [3] add up to 3, but dimension 0 has 4 rows":
        lambda: dist.all_to_all_single(x(4), x(4), [4], [3]),
    "all_to_all_single: output: split sizes [1, 3]; expected 1 numbers, none negative":
        lambda: dist.all_to_all_single(x(4), x(4), [1, 3]),
    "all_to_all_single: output: split sizes [-4]; expected 1 numbers, none negative":
        lambda: dist.all_to_all_single(x(4), x(4), [-4]),
    "all_to_all_single: this rank sends 3 elements to itself, which expects 4":
        lambda: dist.all_to_all_single(x(4), x(3)),
    "barrier has no algorithm 'ring' (it has: linear, dissemination, one_shot)":
        lambda: dist.barrier(algorithm="ring"),
    "new_group: ranks [-2, 5] are outside the world (0..0)": lambda: dist.new_group([0, 5, -2]),
    "new_group: ranks [0, 0] must be distinct, and at least one": lambda: dist.new_group([0, 0]),
    "new_group: ranks [] must be distinct, and at least one": lambda: dist.new_group([]),
    "this rank does not belong to the given group": lambda: dist.get_backend(NON_MEMBER),
    "group rank 1 is not in group 'default' (0..0)":
        lambda: dist.get_global_rank(dist.group.WORLD, 1),
    "op must be unisono.isend or unisono.irecv, got <built-in function len>":
        lambda: dist.P2POp(len, x(), 0),
    "P2POp on a rank that does not belong to the given group":
        lambda: dist.P2POp(dist.isend, x(), 0, NON_MEMBER),
    "p2p_op_list must be a list of P2POp, got 5": lambda: dist.batch_isend_irecv(5),
    "new_group: unknown backend 'gluon' (known: gloo, mpi, nccl, unisono)":
        lambda: dist.new_group(backend="gluon"),
    "all operations of a batch must use the same group": lambda: dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x(), 0, group) for group in (None, dist.new_group())]),
    "all_gather_into_tensor_coalesced: outputs has 2 entries and inputs 1; expected as many":
        lambda: dist.group.WORLD.allgather_into_tensor_coalesced([x(), x()], [x()]),
    "all_gather_into_tensor_coalesced: outputs hold [3] elements and inputs [2]; expected 1 times "
    "as many in outputs":
        lambda: dist.group.WORLD.all_gather_into_tensor_coalesced([x(3)], [x(2)]),
    "split_group: backend 'cpu:gloo': the parent group 'default' has 'cpu:unisono'":
        lambda: dist.split_group(dist.group.WORLD, [[0]], backend="cpu:gloo"),
}
IN_A_WORLD["ArgumentType"] = {
    "broadcast: a global rank must be an integer, got '0'": lambda: dist.broadcast(x(), "0"),
    "broadcast: root must be an integer, got 0.0": lambda: dist.broadcast(x(), group_src=0.0),
    "all_reduce: algorithm must be a name, got 3": lambda: dist.all_reduce(x(), algorithm=3),
    "all_reduce: deterministic must be a bool, got ndarray":
        lambda: dist.all_reduce(x(), deterministic=np.zeros(2)),
    "irecv: tag must be an integer, got 'a'": lambda: dist.irecv(x(), 0, tag="a"),
    "all_reduce: tensor must be an array (NumPy, torch, DLPack, buffer), got list":
        lambda: dist.all_reduce([1, 2]),
    "all_reduce: op must be a ReduceOp such as ReduceOp.SUM, got 'sum'; "
    "did you mean 'ReduceOp.SUM'?":
        lambda: dist.all_reduce(x(), "sum"),
    f"all_reduce() got an unexpected keyword argument 'tiemout' {KNOWN}":
        lambda: dist.all_reduce(x(), tiemout=3),
    # A function of ours has this keyword, and the recorder the next one.
    f"all_reduce() got an unexpected keyword argument 'name' {KNOWN}":
        lambda: dist.all_reduce(x(), name="a"),
    f"all_reduce_coalesced() got an unexpected keyword argument 'kind' {KNOWN}":
        lambda: coalesced(kind="a"),
    "barrier: timeout must be seconds (float) or datetime.timedelta, got str":
        lambda: dist.barrier(timeout="3"),
    "all_gather: tensor_list must be a list, got ndarray": lambda: dist.all_gather(x(), x()),
    "all_reduce_coalesced: tensors must be a list, got ndarray":
        lambda: dist.all_reduce_coalesced(x()),
    "all_reduce: group must be a ProcessGroup, got ndarray":
        lambda: dist.all_reduce(x(), group=x()),
    "group must be a ProcessGroup, got int": lambda: dist.get_rank(7),
    "new_group: ranks[0] must be an integer, got '0'": lambda: dist.new_group(["0", 1]),
    "new_group: ranks must be a list of integers, got 0": lambda: dist.new_group(0),
    "pg_options must be unisono.lowlevel.CPUOptions, got []": lambda: dist.new_group(pg_options=[]),
    "pg_options must be unisono.lowlevel.CPUOptions, got 0":
        lambda: dist.new_group(backend="gloo", pg_options=0),
    "all_reduce takes 3 arguments in c10d's form (tensor, op, timeout), got 4":
        lambda: dist.group.WORLD.allreduce([x()], SUM, 1.0, 5),
    "all_gather: outputs must be a list of arrays, or in c10d's form a list of one such; "
    "got a list of 2":
        lambda: dist.group.WORLD.allgather([[x()], [x()]], [x()]),
    "all_reduce: op must be a ReduceOp such as ReduceOp.SUM, got 7":
        lambda: dist.group.WORLD.allreduce(x(), 7),
    "all_reduce: tensor must be an array, or in c10d's form a list of one such; got a list of 2":
        lambda: dist.group.WORLD.allreduce([x(), x()]),
}
IN_A_WORLD["Unsupported"] = {
    "all_reduce: reduce op BAND is not defined on float64 (defined: AVG, MAX, MIN, "
    "PREMUL_SUM, PRODUCT, SUM)": lambda: dist.all_reduce(x(), dist.ReduceOp.BAND),
    "scan: reduce op MAX is not defined on complex128 (defined: AVG, PREMUL_SUM, PRODUCT, SUM)":
        lambda: dist.scan(x() * 1j, MAX),
    "all_reduce: reduce op SUM is not defined on <U1 (defined: none: it only moves)":
        lambda: dist.all_reduce(np.array(["a"])),
    "broadcast: dtype 'object' is not supported: its elements are no plain bytes":
        lambda: dist.broadcast(np.array([None]), 0),
}
IN_A_WORLD["CollectiveTimeout"] = {
    "the future of recv had no value after 0.01 s; it goes on":
        lambda: receive_later(lambda work: work.get_future().wait(0.01)),
    "none of 1 works was done after 0.01 s of waiting; they go on":
        lambda: receive_later(lambda work: dist.wait_any([work], 0.01)),
}


class Service(ServiceStore):
    """A service in a dictionary, which refuses every change, or does not answer."""

    patience_s = 0.02

    def __init__(self, answer=True, world_size=-1):
        super().__init__("test/", 0.02, world_size)
        self._answer = answer

    def _fetch(self, names):
        if not self._answer:
            raise Unreachable("no")
        return [VersionedValue(None, None) for _ in names]

    def _swap(self, swaps):
        return None

    _names = _clear = _hang_up = clone = lambda self, *args: None

    def __repr__(self):
        return "<Service>"


def raising(error):
    """Return a function that raises an error."""

    def fail(*args, **how):
        raise error

    return fail


def patched(target, name, value, call):
    with pytest.MonkeyPatch.context() as patch:
        (patch.setitem if hasattr(target, "keys") else patch.setattr)(target, name, value)
        call()


def met(url, *args):
    return next(iter(dist.rendezvous(url, *args)))


def serving(call, **how):
    """Call with a store server that is closed afterwards."""
    with TCPStore(HERE, 0, is_master=True, **how) as store:
        call(store)


def listening(call):
    """Call with the port of a socket that accepts connections and does not answer."""
    with socket.create_server((HERE, 0)) as server:
        call(server.getsockname()[1])


def refused(call):
    """Call with a port on which nobody listens."""
    with reserved_port() as port:
        call(port)


def large_multi_get():
    """Ask a server for more than it sends at once."""
    listener = socket.create_server((HERE, 0))
    server = StoreServer([listener], ServerOptions(max_reply_bytes=10))
    try:
        server._table.values["k"] = b"0123456789"
        server._multi_get(["k", "k"])
    finally:
        server.close()


def locked(path, call):
    """Call while a file is locked."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        call()


def acquire(path, **how):
    lock = FileLock(str(path), "run", **how)
    if not how:
        lock.acquire(Deadline(0.02), lambda: None)


def below_a_file(folder):
    """Return a path whose folder is a file."""
    (folder / "file").touch()
    return folder / "file" / "below"


def unlistening(tmp_path):
    fd = os.open(tmp_path / "no socket", os.O_CREAT | os.O_RDWR)
    try:
        TCPStore(HERE, 0, is_master=True, master_listen_fd=fd)
    finally:
        os.close(fd)


def closed_pool(store):
    pool = ConnectionPool(HERE, store.port, b"")
    pool.close()
    pool.ask(1.0, (RequestOp.CHECK, (["k"],)))


def closed_while_waiting(make):
    """Close a store while another thread waits on it; raise what that thread got."""
    error = None
    # Before the thread waits, the error is another one.
    while error is None or "waited" not in str(error):
        error = closed_under_a_thread(make())
    raise error


def closed_under_a_thread(store):
    caught, looked = [], threading.Event()

    def wait():
        looked.set()
        try:
            store.get("absent", 30)
        except errors.UnisonoError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    looked.wait(30)
    while thread.is_alive():
        thread.join(0.05)
        store.close()
    return caught[0]


def met_twice():
    meeting = dist.rendezvous(f"tcp://{HERE}:0?rank=0&world_size=1")
    store, _, _ = next(meeting)
    with store:
        next(meeting)


def world_that_stays():
    """Rank 0 is still in the world that this rank has left."""
    place, store = (HERE, 1, 1), HashStore()
    store.set(handlers._WORLD, b"before")
    wait = functools.partial(handlers._store_of_next_world, place, lambda t: store.clone(), 0.01)
    patched(handlers._worlds, place, b"before", wait)


def bad_reply():
    ours, theirs = socket.socketpair()
    connection = Connection(ours, "here:1")
    with theirs:
        try:
            raise connection._failure(ValueError("nonsense"), 1.0, ((RequestOp.PING, 1),))
        finally:
            connection.close()


def with_transport(use):
    transport = InprocTransport(0, 1, lambda rank: "")
    try:
        use(transport)
    finally:
        transport.close()


def send_after_close(transport):
    transport.close()
    raise transport.send(0, KEY, memoryview(b"")).error


def closed_meanwhile(close):
    def use(transport):
        waiting = transport.recv(0, KEY, memoryview(bytearray(1)))
        close(transport)
        raise waiting.error

    with_transport(use)


def hello_of_version(number):
    magic, _, *rest = HELLO.unpack(Hello(1, 0, 0, 0, bytes(16)).pack())
    return HELLO.pack(magic, number, *rest)


def pickled_lock():
    lock = threading.Lock()
    with LAUNCH.pickling(lock, "the function") as dumps:
        dumps(lock)


def mpiexec_failed():
    ranks = bench_launch._Processes({"mpiexec": ["sh", "-c", "exit 3"]})
    assert ranks.wait(60)
    ranks.check()


def mpi(call, **how):
    """Call with a made-up mpi4py."""
    patched(libraries, "_mpi", lambda: SimpleNamespace(**how), call)


def unequal_step():
    def exchange(k, ranks):
        yield copy(ranks, (Buf.OUTPUT, 0), (Buf.OUTPUT, 1))

    schedule = Schedule("all_reduce", "ring", 2, 1, exchange, output_chunks=2)
    lower(schedule, 1, layout_for(schedule, 5))


def exchange_layout(algorithm, *splits):
    layout_for(build("all_to_all", algorithm, 2), 1, *splits)


def with_torch(call):
    """Return a call with torch, the plug-in's process group and its sparse all_reduce."""

    def checked():
        torch = pytest.importorskip("torch")
        from unisono.adapters.torch.process_group import ProcessGroup
        from unisono.adapters.torch.sparse import all_reduce_sparse

        call(torch, ProcessGroup, all_reduce_sparse)

    return checked


def on_unnamed_device(torch, group, sparse):
    made = SimpleNamespace(
        _devices={}, _backend_names=lambda: {"cpu": "unisono"}, unisono=SimpleNamespace(name="0")
    )
    group.on_device(made, "cuda")


def parallel(module, **how):
    """Return a call that makes a data-parallel module of what `module` makes of torch."""

    def call(torch, *_):
        from unisono.parallel import DistributedDataParallel

        init(world_size=1, rank=0)
        try:
            DistributedDataParallel(module(torch), **how)
        finally:
            dist.destroy_process_group()

    return with_torch(call)


def gradient_twice(*_):
    from unisono.beyond.parallel.reducer import Reducer

    state = SimpleNamespace(expecting=True, started=True, ready={0})
    Reducer.arrived(SimpleNamespace(_pass=state, _names=["w"]), 0)


WITHOUT_A_WORLD["NotInitialized"] = {
    "the default process group has not been initialized": lambda: dist.all_reduce(x()),
    "the default process group has not been {}": lambda: dist.destroy_process_group(),
}
WITHOUT_A_WORLD["InvalidArgument"] = {
    # ---- groups and backends
    "cannot specify both init_method and store":
        lambda: init(store=HashStore(), init_method="env://"),
    "with store=, rank and world_size are required, got rank=0 and world_size=-1":
        lambda: init(store=HashStore(), rank=0),
    "rank 2 of 2: expected 0 <= rank < size": lambda: init(store=HashStore(), rank=2, world_size=2),
    "rank -1 of 2: expected 0 <= rank < size": lambda: dist.ProcessGroup(HashStore(), -1, 2),
    "rank 0 of 0: expected 0 <= rank < size": lambda: dist.ProcessGroup(HashStore(), 0, 0),
    "unknown transport 'pigeon' (known: auto, inproc, tcp)":
        lambda: init(pg_options=CPUOptions(transport="pigeon")),
    "unknown engine 'steam' (known: auto, native, reference, mpi)":
        lambda: init(pg_options=CPUOptions(engine="steam")),
    "unknown backend 'gluon' (known: gloo, mpi, nccl, unisono)": lambda: init("gluon"),
    "backend 'unisono,cpu:gloo' names device 'cpu' twice": lambda: init("unisono,cpu:gloo"),
    "backend ':gloo': expected device:backend, got ':gloo'": lambda: init(":gloo"),
    "backend 'cpu:0:gloo': expected device:backend, got 'cpu:0:gloo'": lambda: init("cpu:0:gloo"),
    "devices must be a list of names, got the string 'cpu'":
        lambda: dist.register_backend("mine", print, devices="cpu"),
    "backend name 'My-own' must be a lower-case identifier":
        lambda: dist.register_backend("My-own", print),
    "backend 'gloo' is registered already": lambda: dist.register_backend("gloo", print),
    "UNISONO_LOG='LOUD' is not a level (known: {})":
        lambda: patched(os.environ, "UNISONO_LOG", "loud", log._make_root),
    # ---- stores
    "amount=9223372036854775808 does not fit into 64 bits": lambda: HashStore().add("k", 2**63),
    "a barrier needs world_size >= 1, got 0": lambda: HashStore().barrier("b", 0),
    "multi_set got 2 keys but 1 values; they must pair up":
        lambda: HashStore().multi_set(["a", "b"], [b""]),
    "world_size of a FileStore cannot be 0": lambda: FileStore("never", 0),
    "world_size of a TCPStore cannot be -2":
        lambda: TCPStore(HERE, 0, world_size=-2, is_master=True),
    "world_size of a store cannot be 0": lambda: Service(world_size=0),
    "port must be 0 to 65535, got 65536": lambda: TCPStore(HERE, 65536),
    "port must be 0 to 65535, got -1": lambda: TCPStore(HERE, -1),
    "MULTI_GET without keys has no reply to expect":
        lambda: ReplyDecoder().expect(RequestOp.MULTI_GET, 0),
    "multi_get of 2 keys has 20 bytes; at most 10 are sent": large_multi_get,
    "one request may have 2 keys, got 3":
        lambda: patched(wire, "MAX_KEYS", 2, lambda: encode_request(RequestOp.CHECK, [""] * 3)),
    "one store request may have 10 bytes, got {}": lambda: patched(wire, "MAX_REQUEST_BYTES", 10,
                        lambda: encode_request(RequestOp.CHECK, ["long enough"])),
    # ---- schedules
    "all_reduce (ring): world size is 0, expected 1 or more":
        lambda: build("all_reduce", "ring", 0),
    "all_reduce (ring) has no root, got root 1": lambda: build("all_reduce", "ring", 2, 1),
    "broadcast (linear): root is 2, expected 0..1": lambda: build("broadcast", "linear", 2, 2),
    "broadcast (linear): pipeline depth is 2, expected 1: it has no pipeline":
        lambda: build("broadcast", "linear", 2, 0, 2),
    "all_reduce (ring): count is -1, expected 0 or more elements":
        lambda: layout_for(build("all_reduce", "ring", 2), -1),
    "all_reduce (ring) takes no in_splits":
        lambda: layout_for(build("all_reduce", "ring", 2), 4, [2, 2]),
    "all_to_all (pairwise) needs out_splits as well when splits are given":
        lambda: exchange_layout("pairwise", [1, 1]),
    "all_to_all (pairwise): in_splits has 1 entries, expected one per rank: 2":
        lambda: exchange_layout("pairwise", [1], [1, 1]),
    "all_to_all (pairwise): in_splits holds a negative size: [1, -1]":
        lambda: exchange_layout("pairwise", [1, -1], [1, 1]),
    "all_to_all (bruck) needs blocks of equal size, got in_splits":
        lambda: exchange_layout("bruck", [1, 1], [1, 1]),
    # ---- transports and engines
    "a transport moves flat bytes, got format 'd' of 1 dimensions":
        lambda: with_transport(lambda t: t.send(0, KEY, memoryview(x()))),
    "cannot receive into read-only memory":
        lambda: with_transport(lambda t: t.recv(0, KEY, memoryview(b"abc"))),
    # ---- launcher and command line
    "bind must be one of none, core, numa, auto; got 'socket'": lambda: Binding.make("socket", 1),
    "'4' is neither 0, 1, 2, 3 (none, out, err, both) nor a list of local rank:number such as "
    "0:3,1:0": lambda: StdChoice.parse("4"),
    "cannot write /nonexistent/results.json: no such folder, or no permission":
        lambda: flags.check_writable("/nonexistent/results.json"),
    "--rdzv-conf: close_timeout must be a number of seconds >= 0, got 'x'":
        lambda: nodes._number({"close_timeout": "x"}, "close_timeout", 1.0),
    "the function cannot be sent to other processes: {}":
        pickled_lock,
    "--peer mpi needs {}the program mpiexec, not found beside {}":
        lambda: patched(bench_launch, "mpiexec", lambda: None,
                        lambda: bench_launch.check_installed("mpi")),
    "--peer open-mpi needs /nowhere/open-mpi/lib/libmpi.so.40, which is not there":
        lambda: patched(bench_peers, "FOLDER", "/nowhere",
                        lambda: bench_launch.check_installed("open-mpi")),
    # ---- data-parallel modules
    "bucket_cap_mb=0, expected more than 0":
        parallel(lambda torch: torch.nn.Linear(1, 1), bucket_cap_mb=0),
    "no parameter of the module needs a gradient": parallel(lambda torch: torch.nn.ReLU()),
    # ---- stores and groups
    "a store key must be UTF-8, got b'\\xff': {}": lambda: HashStore().set(b"\xff", b""),
    "ProcessGroup got two time-outs: 0:00:01, 2":
        lambda: dist.ProcessGroup(HashStore(), 0, 1, timedelta(seconds=1), 2),
}
WITHOUT_A_WORLD["ArgumentType"] = {
    "backend must be a string, got 5": lambda: init(5),
    "the name of a backend must be a string, got 5": lambda: dist.Backend(5),
    "PrefixStore needs a Store, got str": lambda: PrefixStore("p", "store"),
    "a store key must be str or bytes, got int: 5": lambda: HashStore().set(5, b""),
    "a store value must be str or bytes, got float": lambda: HashStore().set("k", 1.5),
    "amount must be int, got float": lambda: HashStore().add("k", 1.5),
    "url must be str, got int": lambda: dist.rendezvous(5),
    "rank must be an integer, got '0'": lambda: dist.rendezvous("env://", "0"),
    "world_size must be an integer, got 1.0": lambda: dist.rendezvous("env://", 0, 1.0),
}
WITHOUT_A_WORLD["NotInGroup"] = {
    "DistributedDataParallel on a rank outside its process group":
        parallel(lambda torch: torch.nn.Linear(1, 1), process_group=NON_MEMBER),
}
WITHOUT_A_WORLD["Usage"] = {
    "parameter 'w' got its gradient twice in one backward pass": with_torch(gradient_twice),
}
WITHOUT_A_WORLD["Unsupported"] = {
    "unisono run needs a POSIX system, such as Linux or macOS":
        lambda: posix_of_windows().require_posix("unisono run"),
    "tensor is a buffer of format 'P', which NumPy does not know":
        lambda: buffers.view(memoryview(bytearray(8)).cast("B").cast("P"), write=False),
    "mpi has no reduce op avg": lambda: mpi(
        lambda: libraries._MPI("mpi").call(SimpleNamespace(
            case=None, plan=SimpleNamespace(redop="avg", dtype="int32"))), COMM_WORLD=None),
    "mpi has no type float16": lambda: mpi(
        lambda: libraries._MPI("mpi").call(SimpleNamespace(
            case=None, plan=SimpleNamespace(redop="sum", dtype="float16"))), COMM_WORLD=None),
    "all_reduce of sparse tensors has SUM only, not MAX":
        with_torch(lambda torch, group, sparse: sparse(NO_GROUP, None, MAX)),
    "backend 'unisono' has no merge_remote_group":
        with_torch(lambda torch, group, sparse: group.merge_remote_group(None)),
    "group '0' has no backend for tensors on 'cuda' (it has: cpu:unisono)":
        with_torch(on_unnamed_device),
    "backend 'unisono' does not coalesce calls on the CPU one by one{}":
        with_torch(lambda torch, group, sparse:
                   group._start_coalescing(group.__new__(group), torch.device("cpu"))),
}
WITHOUT_A_WORLD["Closed"] = {
    "the store at 127.0.0.1:{} is closed": lambda: serving(closed_pool),
    "{} was closed while a thread waited on it": lambda: closed_while_waiting(HashStore),
    "the store at {} was closed while a thread waited on it":
        lambda: closed_while_waiting(lambda: TCPStore(HERE, 0, is_master=True)),
    "the transport is closed": lambda: with_transport(send_after_close),
    "the transport was closed": lambda: closed_meanwhile(lambda t: t.close()),
}
WITHOUT_A_WORLD["Store"] = {
    "cannot lock the store file '{}': Not a directory":
        lambda tmp_path: acquire(below_a_file(tmp_path)),
}
WITHOUT_A_WORLD["StoreKey"] = {
    "add('n', 1): the sum 9223372036854775808 does not fit into 64 bits":
        lambda: checked_sum("n", b"%d" % (2**63 - 1), 1),
}
WITHOUT_A_WORLD["StoreTimeout"] = {
    "'k/k' on <Service> was changed by others all the time, for 0.02 s":
        lambda: Service().set("k", b""),
    "the store file '{}' stayed locked for 0.02 s by {}":
        lambda tmp_path: (acquire(tmp_path / "s", held=True), acquire(tmp_path / "s")),
    "the store file '{}' could not be locked for 0.02 s": lambda tmp_path: acquire(tmp_path / "s"),
    "the empty store file '{}' stayed locked by another process for 0.02 s":
        lambda tmp_path: locked(tmp_path / "s", lambda: FileStore(
            str(tmp_path / "s"), 1, timeout=0.02).get("k")),
    "connecting timed out: the store server at 127.0.0.1:{} accepted the connection but did "
    "not answer within {}s": lambda: listening(lambda port: TCPStore(HERE, port, timeout=0.05)),
    "{} timed out after 0.2 s waiting for clients: 1 of 2 joined":
        lambda: TCPStore(HERE, 0, world_size=2, is_master=True, timeout=0.2),
}
WITHOUT_A_WORLD["StoreConnection"] = {
    "no answer from <Service> within 0.02 s: no": lambda: Service(answer=False).check(["k"]),
    "master_listen_fd={} cannot listen: {}": unlistening,
    "the store server cannot listen on 127.0.0.1:{}: {}":
        lambda: listening(lambda port: TCPStore(HERE, port, is_master=True)),
    "cannot connect from {} to the store at 127.0.0.1:{} within 0.05 s ({}refused)":
        lambda: refused(lambda port: TCPStore(HERE, port, timeout=0.05)),
    "PING on the store at here:1: bad reply: nonsense": bad_reply,
}
WITHOUT_A_WORLD["Handshake"] = {
    "the store server at 127.0.0.1:{} does not let this client in: {}token{}": lambda: serving(
        lambda store: TCPStore(HERE, store.port, timeout=1.0, token="b"), token="a"),
    "protocol version 99 called, this is version 4": lambda: Hello.parse(hello_of_version(99)),
    "a stranger called: first bytes b'GET / HT', expected b'unisono{}'":
        lambda: Hello.parse(b"GET / HTTP".ljust(HELLO.size)),
}
WITHOUT_A_WORLD["Rendezvous"] = {
    "rank 1 of 3 waited 0.05 s for ranks that never came: 0, 2":
        lambda: init(store=HashStore(), rank=1, world_size=3, timeout=0.05),
    "rank 1 of 2 on {} cannot join a group: {}file{}": lambda: patched(
        importlib.import_module("unisono.core.c10d.lifecycle"), "ProcessGroup",
        raising(OSError(errno.EMFILE, os.strerror(errno.EMFILE))),
        lambda: init(store=HashStore(), rank=1, world_size=2)),
    "the URL 'tcp://?rank=0&world_size=1' has no host; write tcp://host:port":
        lambda: met("tcp://?rank=0&world_size=1"),
    "the URL 'tcp://here?rank=0&world_size=1' has no port; write tcp://host:port":
        lambda: met("tcp://here?rank=0&world_size=1"),
    "'rank' in the URL 'tcp://here:1?rank' is not name=value": lambda: met("tcp://here:1?rank"),
    "rank occurs twice in the URL 'tcp://here:1?rank=0&rank=1'":
        lambda: met("tcp://here:1?rank=0&rank=1"),
    "the URL 'file://host/path?rank=0&world_size=1' names the host 'host'; write "
    "file:///absolute/path": lambda: met("file://host/path?rank=0&world_size=1"),
    "the URL 'file://?rank=0&world_size=1' has no path; write file:///absolute/path":
        lambda: met("file://?rank=0&world_size=1"),
    "tcp:// rendezvous: rank is missing; write it into the URL (tcp://...?rank=0&world_size=2) "
    "or pass it as an argument": lambda: met("tcp://here:1"),
    "given twice: rank in the URL 'env://?rank=0', and the arguments rank=1, world_size=-1":
        lambda: met("env://?rank=0", 1),
    "the rendezvous endpoint ':1' is not host:port": lambda: parse_endpoint(":1"),
    "SLURM_NTASKS=4 means several processes, but no launcher started this process: this would "
    "make a world of one in each": lambda: launchers.is_alone({"SLURM_NTASKS": "4"}),
    "OMPI_COMM_WORLD_RANK=0 was set by mpiexec (Open MPI), but OMPI_COMM_WORLD_SIZE is not "
    "set: this would make a world of one in each process":
        lambda: launchers.find_place({"OMPI_COMM_WORLD_RANK": "0"}),
    "RANK=0 and WORLD_SIZE=1 are set, but mpiexec (Open MPI) started 2 processes "
    "(OMPI_COMM_WORLD_RANK=1): this would make a world of one in each":
        lambda: launchers._check_really_alone({
            "RANK": "0", "WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2"}),
    "a rendezvous handler for env:// is already registered (registered: {})":
        lambda: dist.register_rendezvous_handler("env", print),
    "rank 0 cannot listen on {}: other programs have the ports {}":
        lambda: listening(lambda port: search.serve_at(HERE, [port], "job", 1.0)),
    "rank 1 did not find rank 0 within 0.05 s":
        lambda: refused(lambda port: search.search([HERE], [port], "job", 1, 0.05)),
    "tcp:// rendezvous yields once; it cannot meet again": met_twice,
    "host 'nowhere.invalid' has no address": lambda: patched(
        socket, "getaddrinfo", lambda *args, **how: [], lambda: own_address("nowhere.invalid")),
    "there is no way to host 'nowhere.invalid': {}No route to host": lambda: patched(
        socket, "getaddrinfo", raising(OSError(errno.EHOSTUNREACH, "No route to host")),
        lambda: own_address("nowhere.invalid")),
    "rank 1 waited 0.01 s at 127.0.0.1:1 for rank 0, which did not leave the world before{}":
        world_that_stays,
    "rank 1 waited 0.01 s for rank 0 at the store at 127.0.0.1:1, which another process serves":
        lambda: handlers._store_of_next_world((HERE, 1, 1), lambda t: HashStore(), 0.01),
}
WITHOUT_A_WORLD["Transport"] = {
    "cannot listen on any address of this rank (192.0.2.1: {})": lambda: listen(("192.0.2.1",)),
}
WITHOUT_A_WORLD["Launch"] = {
    "cannot bind each worker to cores of its own: 4 workers, 1 cores":
        lambda: Binding.make("core", 4, HostCPUs([[[0]]])),
    "cannot start the launcher's second process: {}": lambda: patched(
        guard.os, "fork", raising(BlockingIOError(11, "Resource temporarily unavailable")),
        lambda: guard.fork_launcher(())),
    "cannot write the log '{}': Not a directory":
        lambda tmp_path: _create(str(below_a_file(tmp_path) / "log")),
    "mpiexec ended with exit code 3; see its standard error": mpiexec_failed,
    "mpi4py sees 1 ranks, expected 4: the mpiexec that started this process belongs to another "
    "MPI library": lambda: mpi(
        lambda: libraries.mpi_rank(SimpleNamespace(nprocs=4)),
        COMM_WORLD=SimpleNamespace(size=1)),
}
WITHOUT_A_WORLD["Schedule"] = {
    "all_reduce (ring), rank 1, step 0: source has 2 elements, destination 3: {}": unequal_step,
}


def cases(table):
    rows = [(name, line, call) for name, calls in table.items() for line, call in calls.items()]
    return pytest.mark.parametrize(("name", "line", "call"), rows, ids=[row[1] for row in rows])


def check(name, line, call, *args):
    with pytest.raises(errors.UnisonoError) as caught:
        call(*args)
    assert type(caught.value) is getattr(errors, f"{name}Error")
    pattern = re.escape(line).replace(r"\{\}", ".*")
    assert re.fullmatch(pattern, caught.value.what.partition("\n")[0]), caught.value.what
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.fixture
def alone():
    dist.init_process_group()
    yield
    dist.destroy_process_group()


@cases(IN_A_WORLD)
def test_in_a_world_of_one(alone, name, line, call):
    check(name, line, call)
    dist.all_reduce(x())  # the group is as good as before


@cases(WITHOUT_A_WORLD)
def test_without_a_world(monkeypatch, request, name, line, call):
    monkeypatch.setattr(registry._backends, "_values", dict(registry._backends._values))
    fixtures = call.__code__.co_varnames[: call.__code__.co_argcount]
    check(name, line, call, *map(request.getfixturevalue, fixtures))
    assert not dist.is_initialized()


@pytest.mark.native
def test_unknown_instruction_set():
    line = "UNISONO_CPU='mmx' is no instruction set of this machine (it has: {})"
    check("InvalidArgument", line, native_engine._choose_isa, "mmx")


def test_a_destroyed_group(alone):
    group = dist.new_group(group_desc="mine")
    # The last of these calls is repeated in C++.
    for _ in range(3):
        dist.all_reduce(x(), group=group)
    dist.destroy_process_group(group)
    line = "all_reduce on group 'mine', which was destroyed"
    check("Closed", line, lambda: dist.all_reduce(x(), group=group))
    line = "group <ProcessGroup 'mine' closed> is not a group of this world"
    check("InvalidArgument", line, dist.destroy_process_group, group)


@pytest.mark.ranks(2)
def test_on_two_ranks(rank):
    refused = "gather_list is for the root only, which is rank 0"
    if rank == 1:
        check("InvalidArgument", f"gather: {refused}", dist.gather, x(), [x(), x()], 0)
    else:
        line = (
            "gather #1 in group 'default' does not match on rank 0 of 2: rank 0 called "
            "gather(float64[2], dst=0) at test_error_lines.py:{}; rank 1 called gather at "
            f"test_error_lines.py:{{}}, but refused it: {refused}"
        )
        check("CollectiveMismatch", line, dist.gather, x(), [x(), x()], 0)
    dist.barrier()
    line = "all_to_all_single: input: dimension 0 has 3 rows, which 2 ranks cannot share equally"
    check("InvalidArgument", line, dist.all_to_all_single, x(3), x(3))
    rows = [[1, 2], [2, 1]] if rank == 0 else [[1, 2], [1, 2]]
    line = (
        f"all_to_all_single #4 in group 'default' does not match on rank {rank} of 2: rank 0 sends "
        "2 elements to rank 0, which expects 1; rank 1 sends 1 elements to rank 0, which expects 2"
    )
    check("CollectiveMismatch", line, dist.all_to_all_single, x(3), x(3), *rows)


@pytest.mark.ranks(2)
def test_an_aborted_group(rank):
    group = dist.new_group()
    if rank == 0:
        work = dist.irecv(x(), 1, group)
        group.abort("enough")
        line = "recv in group '1' was aborted on rank 0 of 2: enough on rank 0"
        check("CollectiveAborted", line, work.wait)
        line = "barrier in group '1' cannot run on rank 0 of 2: the group is broken: enough on rank"
        check("CollectiveAborted", line + " 0", dist.barrier, group)
    else:
        line = "all_reduce{} in group '1' {}enough on rank 0{}"
        check("CollectiveAborted", line, lambda: dist.all_reduce(x(), group=group))
    dist.barrier()


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_a_rank_that_left(transport):
    def body(rank):
        if rank == 1:
            dist.send(x(), 0, tag=1)
            return
        # Rank 1 leaves after its message; each later call names it.
        dist.recv(x(), 1, tag=1)
        lost = (
            " in group 'default' failed on rank 0 of 2: rank 1 was lost: it left: the group was "
            "closed"
        )
        check("PeerLost", "recv(float64[2], src=1, tag=0)" + lost, dist.recv, x(), 1)
        check("PeerLost", "send(float64[2], dst=1, tag=0)" + lost, dist.send, x(), 1)
        check("PeerLost", "all_reduce #1" + lost, dist.all_reduce, x())

    run(body, 2, transport=transport)
