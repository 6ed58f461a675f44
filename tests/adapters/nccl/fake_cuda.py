"""A fake GPU for tests: cuda.core, the driver, CuPy and NCCL, over memory of the host.

Streams are threads that run kernels in order, so results appear late, as on a GPU. Kernels of NCCL
meet over a store, also between processes. As with NCCL, a kernel whose peers do not come waits for
an abort of its communicator. So does a kernel whose peers made another call. A send waits for its
receive. The first call of a kind is in progress until all its ranks have made it. A test fails if a
call is on the wrong GPU, or of a communicator that is freed or still busy. A real GPU would crash
there. Memory has other values once it is freed. A C++ compiler stands for NVRTC, and the kernels
that it compiles run with a thread of C++ for each thread of CUDA.

    with fake_cuda.installed():
        x = fake_cuda.array([1.0, 2.0])      # on the current GPU
        ...
        x.get()                              # waits for the current stream, as CuPy does
"""

import contextlib
import ctypes
import functools
import itertools
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from tests.support.oracle import trunc_div
from unisono.adapters.nccl import library
from unisono.core.base.threads.streams import Event as HostEvent
from unisono.core.base.threads.streams import Stream as HostStream
from unisono.core.stores import TCPStore
from unisono.errors import UnisonoError

# ---- streams, events, devices -------------------------------------------------------------------

_numbers = itertools.count(1000)
_streams = {}
_local = threading.local()
_lock = threading.Lock()
misuses = []
"""What would crash a process with a GPU."""
failing = {}
"""Name of a function of NCCL -> what it raises when it is called next, by rank."""


class Stream:
    """A stream of cuda.core, by its handle; equal handles are one queue."""

    def __init__(self, handle=None):
        self.handle = next(_numbers) if handle is None else handle

    @property
    def queue(self):
        # The default stream of each GPU, which in tests is each rank.
        key = self.handle or ("default", current_device())
        with _lock:
            return _streams.setdefault(key, HostStream(f"fake-{key}"))

    @classmethod
    def from_handle(cls, handle):
        return cls(handle)

    def put(self, work, *arguments):
        self.queue.submit(work, *arguments)

    def record(self):
        event = Event()
        event.host.record(self.queue)
        return event

    def wait(self, event):
        self.queue.wait_event(event.host)

    def sync(self):
        self.queue.synchronize(60)


class Event:
    def __init__(self):
        self.host = HostEvent()

    @property
    def is_done(self):
        return self.host.query()

    def sync(self):
        self.host.synchronize(60)


def current_device():
    return getattr(_local, "device", None) or 0


def set_device(index):
    """Make a GPU current in this thread, as torch.cuda.set_device does."""
    _local.device = index


uuids = {}
"""Index of a GPU -> its name, where it is not GPU-<index>."""


class Buffer:
    """Memory that is freed with the object."""


class Device:
    capability = (9, 0)
    properties = SimpleNamespace(multiprocessor_count=132)

    def __init__(self, device_id=None):
        self.device_id = current_device() if device_id is None else device_id
        self.uuid = uuids.get(self.device_id, f"GPU-{self.device_id}")

    @property
    def compute_capability(self):
        return self.capability

    def set_current(self):
        set_device(self.device_id)

    def create_stream(self, options=None):
        return Stream()

    def allocate(self, size, *, stream):
        memory = np.full(size, 0xAB, np.uint8)
        _allocated.append(memory)
        made = Buffer()
        made.handle = memory.ctypes.data
        weakref.finalize(made, memory.fill, 0xDD)
        return made


_allocated = []
"""All memory of `Device.allocate`, alive so that a late kernel reads freed values."""


def get_context():
    return 0, getattr(_local, "device", None)


def set_context(context):
    _local.device = context
    return (0,)


def at(address, nbytes):
    """Return memory at an address as bytes; keeps nothing alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def copy_async(target, source, nbytes, stream):
    Stream(stream).put(lambda: np.copyto(at(target, nbytes), at(source, nbytes)))
    return (0,)


# ---- the driver, for IntraNodeComm -------------------------------------------------------------

_held = {}
"""What the driver has given -> memory; "open": addresses that are mapped."""
links = {}
"""(GPU, GPU) -> False: no NVLink between them."""
refused = {}
"""Name of a function of the driver -> GPUs on which it fails."""


class Handle:
    """CUipcMemHandle."""

    def __init__(self):
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self):
        return ctypes.addressof(self._bytes)


def _driver_call(name, function):
    """Return a function of the driver: (0, value), or a failure that was planned."""

    def call(*arguments):
        if current_device() in refused.get(name, ()):
            return 801, None
        made = function(*arguments)
        return (0,) if made is None else (0, made)

    return call


def _allocated_memory(nbytes, *flags):
    memory = np.zeros(nbytes, np.uint8)
    memory[:4096] = 0xAB
    _held[memory.ctypes.data] = memory
    return memory.ctypes.data


def _free(address):
    memory = _held.pop(address)
    memory.fill(0xDD)
    # Other ranks may have it mapped: the driver keeps it for them.
    _allocated.append(memory)


grids = []
"""The number of blocks of all launched kernels."""
_launches = []
"""Events after all launched kernels."""


def _end_kernels():
    """Wait for what an abort has left: threads that free memory, kernels that end soon."""
    for thread in threading.enumerate():
        if thread.name == "unisono-nccl-abort":
            thread.join(60)
    while _launches:
        _launches.pop().sync()


def _shared(address):
    made = Handle()
    ctypes.memmove(made.getPtr(), address.to_bytes(8, "little"), 8)
    return made


def _mapped(handle, flags):
    address = int.from_bytes(ctypes.string_at(handle.getPtr(), 8), "little")
    _held.setdefault("open", []).append(address)
    return address


def _launched(kernel, *how):
    (blocks, _, _, threads, _, _, _, stream, parameters, _), library = how, kernel.library
    call = ctypes.string_at(ctypes.c_void_p.from_address(parameters).value, library.call_bytes())
    grids.append(blocks)
    # Fewer of both, on all ranks alike.
    grid = min(blocks, 2), min(threads, 8)
    Stream(stream).put(lambda: library.launch(kernel, call, *grid))
    _launches.append(Stream(stream).record())


def _kernel(module, name):
    made = getattr(module, name.decode())
    made.library = module
    return made


_compiling = threading.Lock()


@functools.cache
def compiled_on_cpu(text, options):
    """Return the kernels, compiled by g++; no file of them stays."""
    command = ["g++", "-std=c++20", "-O0", "-Wall", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    source = Path(__file__).with_name("kernels_on_cpu.cpp")
    with tempfile.TemporaryDirectory(prefix="unisono-kernels-") as folder:
        Path(folder, "intra_node.cu").write_bytes(text)
        made = f"{folder}/kernels.so"
        command += [f"-I{folder}", *options, str(source), "-o", made, "-pthread"]
        subprocess.run(command, check=True)
        return ctypes.CDLL(made)


_libraries = {}
"""Code of a module -> the kernels."""


class NVRTC(types.ModuleType):
    """cuda.bindings.nvrtc; a program is its text and, later, its code."""

    def nvrtcCreateProgram(self, text, name, *headers):
        return 0, [text]

    def nvrtcCompileProgram(self, program, count, options):
        ranks = tuple(each.decode() for each in options if each.startswith(b"-DRANKS"))
        with _compiling:
            library = compiled_on_cpu(program[0], ranks)
        program.append(str(id(library)).encode())
        _libraries[program[1]] = library
        return (0,)

    def nvrtcGetCUBINSize(self, program):
        return 0, len(program[1])

    def nvrtcGetCUBIN(self, program, code):
        code[:] = program[1]
        return (0,)

    def nvrtcDestroyProgram(self, program):
        return (0,)


_DRIVER = {
    "cuMemAlloc": _allocated_memory, "cuMemHostAlloc": _allocated_memory,
    "cuMemFree": _free, "cuMemFreeHost": _free,
    "cuMemsetD8Async": lambda address, value, nbytes, stream: Stream(stream).put(
        at(address, nbytes).fill, value
    ),
    "cuStreamSynchronize": lambda stream: Stream(stream).sync(),
    "cuIpcGetMemHandle": _shared, "cuIpcOpenMemHandle": _mapped,
    "cuIpcCloseMemHandle": lambda address: _held["open"].remove(address),
    "cuModuleLoadData": _libraries.__getitem__,
    "cuModuleUnload": lambda module: None, "cuModuleGetFunction": _kernel,
    "cuLaunchKernel": _launched, "cuDeviceGetCount": lambda: 8,
    "cuDeviceGetP2PAttribute": lambda kind, a, b: int(links.get((a, b), True)),
}  # fmt: skip


# ---- CuPy ---------------------------------------------------------------------------------------


def _current_stream():
    return getattr(_local, "stream", None) or Stream(0)


class _Device:
    """cupy.cuda.Device."""

    def __init__(self, index):
        self.id = index

    def __enter__(self):
        self._before = current_device()
        set_device(self.id)

    def __exit__(self, *error):
        set_device(self._before)


class ExternalStream(Stream):
    """cupy.cuda.ExternalStream."""

    def __init__(self, handle, index=-1):
        super().__init__(handle)

    @property
    def ptr(self):
        return self.handle

    def __enter__(self):
        self._before = getattr(_local, "stream", None)
        _local.stream = self

    def __exit__(self, *error):
        _local.stream = self._before


class Array:
    """cupy.ndarray: values that only a stream may read and write."""

    def __init__(self, host, device=None):
        self.host = host
        self.device = _Device(current_device() if device is None else device)

    shape = property(lambda self: self.host.shape)
    strides = property(lambda self: self.host.strides)
    dtype = property(lambda self: self.host.dtype)
    size = property(lambda self: self.host.size)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.host.__array_interface__["data"][0])

    def __dlpack_device__(self):
        return (2, self.device.id)

    def __getitem__(self, key):
        return Array(self.host[key], self.device.id)

    def reshape(self, *shape):
        return Array(self.host.reshape(*shape), self.device.id)

    def __setitem__(self, key, value):
        given = value.host if isinstance(value, Array) else value
        _current_stream().put(lambda: self.host.__setitem__(key, given))

    def get(self):
        """Return a copy on the host, after the work of the current stream."""
        made = []
        stream = _current_stream()
        stream.put(lambda: made.append(self.host.copy()))
        stream.sync()
        return made[0]

    def _later(self, other, function):
        """Return a new array that the stream fills with function(self, other)."""
        given = other.host if isinstance(other, Array) else other
        example = function(np.ones(1, self.dtype), np.ones(1, getattr(given, "dtype", self.dtype)))
        made = Array(np.zeros(self.shape, example.dtype), self.device.id)
        _current_stream().put(lambda: np.copyto(made.host, function(self.host, given)))
        return made

    def __lt__(self, other):
        return self._later(other, np.less)

    def __ne__(self, other):
        return self._later(other, np.not_equal)

    def __and__(self, other):
        return self._later(other, np.bitwise_and)

    def __mod__(self, other):
        return self._later(other, np.remainder)

    __hash__ = None


def array(values, dtype=None, device=None):
    """Return a new array of a GPU, the current one by default."""
    return Array(np.array(values, dtype), device)


def _ufunc(name):
    ufunc = getattr(np, name)

    def call(x, y, out, **how):
        other = y.host if isinstance(y, Array) else y

        def work():
            with np.errstate(all="ignore"):
                np.copyto(out.host, ufunc(x.host, other), casting="unsafe")

        _current_stream().put(work)

    return call


def _asarray(obj):
    facts = obj.__cuda_array_interface__
    dtype = np.dtype(facts["typestr"])
    count = int(np.prod(facts["shape"], dtype=int))
    memory = at(facts["data"][0], count * dtype.itemsize).view(dtype).reshape(facts["shape"])
    return Array(memory)


def _cupy():
    cupy = types.ModuleType("cupy")
    cupy.ndarray = Array
    cupy.empty = lambda count, dtype: array(np.full(count, 0xAB, np.uint8).astype(dtype))
    cupy.asarray = _asarray
    names = ("add", "multiply", "minimum", "maximum", "bitwise_and", "bitwise_or", "bitwise_xor")
    for name in (*names, "divide", "floor_divide"):
        setattr(cupy, name, _ufunc(name))
    cupy.cuda = SimpleNamespace(
        Device=_Device,
        ExternalStream=ExternalStream,
        get_current_stream=lambda index: ExternalStream(_current_stream().handle),
    )
    return cupy


# ---- NCCL ---------------------------------------------------------------------------------------

_NUMPY = {
    **{0: np.int8, 1: np.uint8, 2: np.int32, 3: np.uint32, 4: np.int64, 5: np.uint64},
    **{6: np.float16, 7: np.float32, 8: np.float64, 9: ml_dtypes.bfloat16},
    **{10: ml_dtypes.float8_e4m3fn, 11: ml_dtypes.float8_e5m2},
}
_UFUNCS = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum, 4: np.add}
_servers = {}


_alive = {}


class Communicator:
    """nccl.core.Communicator."""

    @classmethod
    def init(cls, nranks, rank, unique_id, config=None):
        assert config is None or config.blocking is False
        _raise_planned("init", rank)
        made = cls()
        host, port, made.key = bytes(unique_id).rstrip(b"\0").decode().split(" ")
        made.store = TCPStore(host, int(port), wait_for_workers=False, timeout=60)
        made.size, made.rank, made.device = nranks, rank, current_device()
        made.calls, made.messages, made.ops = 0, {}, []
        made.aborted = threading.Event()
        made.status, made.ptr = 0, next(_numbers)
        made.connected, made.awaited, made.ready = set(), [], []
        _alive[made.ptr] = made
        made.blocking = config is None
        made.connect("init", range(nranks))
        made.wait_if_blocking()
        return made

    def wait_if_blocking(self):
        while self.blocking and self.get_async_error():
            time.sleep(0.0005)

    def connect(self, name, ranks):
        """Begin to connect ranks, once for each name; they are when all have begun."""
        if name in self.connected:
            return
        self.connected.add(name)
        self._put(f"connect/{name}/{self.rank}", b"1")
        self.awaited += [f"{self.key}/connect/{name}/{rank}" for rank in ranks]

    def launch(self, names, submit):
        """Enqueue kernels as soon as the ranks are connected."""
        self.require_valid()
        for name, ranks in names:
            self.connect(name, ranks)
        if self.awaited:
            self.ready.append(submit)
            self.wait_if_blocking()
        else:
            submit()

    def require_valid(self):
        if not self.ptr:
            self.misuse("is freed")
        if current_device() != self.device:
            self.misuse(f"is of GPU {self.device}, but GPU {current_device()} is current")
        if self.awaited and not self.ready:
            self.misuse("is busy")

    def misuse(self, why):
        misuses.append(f"the communicator of rank {self.rank} {why}")
        raise RuntimeError(misuses[-1])

    def get_async_error(self):
        if not self.ptr:
            raise ValueError("Cannot get async error: Communicator not initialized")
        if self.status:
            return self.status
        if self.awaited:
            if not self.store.check(self.awaited):
                return library.IN_PROGRESS
            self.awaited = []
            while self.ready:
                self.ready.pop(0)()
        return 0

    def get_last_error(self):
        return "the cable was cut"

    def create_pre_mul_sum(self, scalar, datatype):
        self.require_valid()
        self.ops.append((_NUMPY[int(datatype)], scalar))
        number = 100 + len(self.ops) - 1

        class Op:
            def __int__(self):
                return number

        return Op()

    def abort(self):
        if not self.ptr:
            misuses.append("a communicator is aborted twice")
        self.aborted.set()
        self._free()

    def finalize(self):
        self.require_valid()

    def destroy(self):
        self._free()

    def _free(self):
        if _alive.pop(self.ptr, None) is not None:
            self.ptr = 0
            self.aborted.set()
            self.store.close()
        if not _alive:
            # The last communicator of this process: no kernel needs the servers any more.
            stop_servers()

    # ---- operations on arrays, on the default stream

    def allreduce(self, sendbuf, recvbuf, op):
        _all_reduce(*_facts(sendbuf, recvbuf), op, self, 0)

    def broadcast(self, sendbuf, recvbuf, root):
        _broadcast(*_facts(recvbuf, recvbuf), root, self, 0)

    def reduce(self, sendbuf, recvbuf, op, root):
        _reduce(*_facts(sendbuf, recvbuf), op, root, self, 0)

    def allgather(self, sendbuf, recvbuf):
        _all_gather(*_facts(sendbuf, recvbuf), self, 0)

    def reduce_scatter(self, sendbuf, recvbuf, op):
        source, target, _, dtype = _facts(sendbuf, recvbuf)
        _reduce_scatter(source, target, recvbuf.size, dtype, op, self, 0)

    def alltoall(self, sendbuf, recvbuf):
        def compute(parts):
            return np.concatenate([part.reshape(self.size, -1)[self.rank] for part in parts])

        self.collective(("alltoall",), *_facts(sendbuf, recvbuf), compute, 0)

    def gather(self, sendbuf, recvbuf, root):
        compute = np.concatenate if self.rank == root else lambda parts: None
        self.collective(("gather", root), *_facts(sendbuf, recvbuf), compute, 0)

    def scatter(self, sendbuf, recvbuf, root):
        source, target, _, dtype = _facts(sendbuf, recvbuf)
        self.collective(
            ("scatter", root), source, target, recvbuf.size * self.size, dtype,
            lambda parts: parts[root].reshape(self.size, -1)[self.rank], 0,
            gives=self.rank == root,
        )  # fmt: skip

    def send(self, sendbuf, peer):
        address, _, count, dtype = _facts(sendbuf, sendbuf)
        _message("send", address, count, dtype, peer, self, 0)

    def recv(self, recvbuf, peer):
        address, _, count, dtype = _facts(recvbuf, recvbuf)
        _message("recv", address, count, dtype, peer, self, 0)

    # ---- kernels

    def meet(self, key, value):
        """Publish this rank's part of a kernel; return those of all ranks, None after an abort."""
        self._put(f"{key}/{self.rank}", value)
        return self._get_all([f"{key}/{rank}" for rank in range(self.size)])

    def _put(self, key, value):
        with contextlib.suppress(UnisonoError):
            self.store.set(f"{self.key}/{key}", value)

    def _get_all(self, keys):
        keys = [f"{self.key}/{key}" for key in keys]
        while not self.aborted.is_set():
            try:
                if self.store.check(keys):
                    return self.store.multi_get(keys)
            except UnisonoError:
                # The process that served it has died. A kernel of NCCL would wait on.
                self.aborted.wait(60)
            time.sleep(0.0005)
        return None

    def hang(self):
        self.aborted.wait(60)

    def collective(self, head, source, target, count, dtype, compute, stream, *, gives=True, op=0):
        """Enqueue a kernel; compute(parts) returns what goes to `target`."""
        self.require_valid()
        self.calls += 1
        key, kind = f"coll/{self.calls}", np.dtype(_NUMPY[dtype])
        word = repr((*head, min(op, 100), count, dtype)).encode()

        def kernel():
            mine = at(source, count * kind.itemsize) if gives else np.empty(0, np.uint8)
            if op >= 100:
                # Each rank scales its own contribution.
                mine = mine.view(kind) * self.ops[op - 100][1].view(kind)[0]
            parts = self.meet(key, word + b"\0" + mine.tobytes())
            if parts is None:
                return
            split = [part.partition(b"\0")[::2] for part in parts]
            if any(each != word for each, _ in split):
                self.hang()
                return
            with np.errstate(all="ignore"):
                result = compute([np.frombuffer(data, kind) for _, data in split])
            if result is not None and not self.aborted.is_set():
                at(target, result.nbytes)[:] = result.view(np.uint8)

        def submit():
            self.launch([("collective", range(self.size))], lambda: Stream(stream).put(kernel))

        _in_group(submit)

    def reduced(self, op):
        """Return a function of all parts that returns the reduction."""

        def reduce(parts):
            total = parts[0].copy()
            for part in parts[1:]:
                total = _UFUNCS[min(op, 4) if op < 100 else 0](total, part)
            if op == 4 and total.dtype.kind in "iu":
                total = np.array([trunc_div(int(x), self.size) for x in total], total.dtype)
            elif op == 4:
                total = (total / self.size).astype(total.dtype)
            return total

        return reduce


def _facts(source, target):
    """Return both addresses, the count of `source` and the number of its type."""
    code = next(code for code, kind in _NUMPY.items() if kind == source.dtype)
    return source.data.ptr, target.data.ptr, source.size, code


def _raise_planned(name, rank):
    error = failing.pop((name, rank), None)
    if error is not None:
        raise error


def stop_servers():
    while _servers:
        _servers.popitem()[1].close()


class UniqueId:
    def __init__(self, data):
        self._data = data

    def __bytes__(self):
        return self._data

    from_bytes = classmethod(lambda cls, data: cls(bytes(data)))


def get_unique_id():
    with _lock:
        if "server" not in _servers:
            _servers["server"] = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        server = _servers["server"]
    name = f"127.0.0.1 {server.port} {next(_numbers)}-{time.monotonic_ns()}"
    return UniqueId(name.encode().ljust(128, b"\0"))


def group_start():
    _local.depth = getattr(_local, "depth", 0) + 1
    if _local.depth == 1:
        _local.pending = []


def group_end():
    _local.depth -= 1
    if _local.depth == 0:
        pending, _local.pending = _local.pending, []
        for submit in [each for each in pending if callable(each)]:
            submit()
        _launch([each for each in pending if not callable(each)])


def _in_group(submit):
    """Call a function at the end of the group; nothing is enqueued before."""
    if getattr(_local, "depth", 0):
        _local.pending.append(submit)
    else:
        submit()


def _launch(messages):
    """Run all messages of a launch in one kernel: sends first, so that no order deadlocks."""
    if not messages:
        return
    comm, stream = messages[0][1], messages[0][-1]

    def kernel():
        for kind, comm, address, nbytes, key, _ in messages:
            if kind == "send":
                comm._put(key, at(address, nbytes).tobytes() if nbytes else b"")
        for kind, comm, address, nbytes, key, _ in messages:
            if kind == "recv":
                parts = comm._get_all([key])
                if parts is None:
                    return
                if len(parts[0]) != nbytes:
                    comm.hang()
                    return
                at(address, nbytes)[:] = np.frombuffer(parts[0], np.uint8)
                comm._put(f"{key}/taken", b"1")
        comm._get_all([f"{each[4]}/taken" for each in messages if each[0] == "send"])

    assert all(message[1] is comm and message[-1] == stream for message in messages)
    pairs = {tuple(sorted(map(int, each[4].split("/")[1].split("-")))) for each in messages}
    names = [(f"{low}-{high}", (low, high)) for low, high in sorted(pairs)]
    comm.launch(names, lambda: Stream(stream).put(kernel))


def _message(kind, address, count, dtype, peer, comm, stream):
    _raise_planned(kind, comm.rank)
    comm.require_valid()
    pair = (comm.rank, peer) if kind == "send" else (peer, comm.rank)
    number = comm.messages[kind, pair] = comm.messages.get((kind, pair), 0) + 1
    key = f"p2p/{pair[0]}-{pair[1]}/{number}"
    nbytes = count * np.dtype(_NUMPY[dtype]).itemsize
    message = (kind, comm, address, nbytes, key, stream)
    if getattr(_local, "depth", 0):
        _local.pending.append(message)
    else:
        _launch([message])


def _all_reduce(source, target, count, dtype, op, comm, stream):
    _raise_planned("all_reduce", comm.rank)
    compute = comm.reduced(op)
    comm.collective(("all_reduce",), source, target, count, dtype, compute, stream, op=op)


def _broadcast(source, target, count, dtype, root, comm, stream):
    comm.collective(
        ("broadcast", root), source, target, count, dtype, lambda parts: parts[root], stream,
        gives=comm.rank == root,
    )  # fmt: skip


def _reduce(source, target, count, dtype, op, root, comm, stream):
    compute = comm.reduced(op)
    mine = comm.rank == root
    comm.collective(
        ("reduce", root), source, target, count, dtype,
        lambda parts: compute(parts) if mine else None, stream, op=op,
    )  # fmt: skip


def _all_gather(source, target, count, dtype, comm, stream):
    comm.collective(("all_gather",), source, target, count, dtype, np.concatenate, stream)


def _reduce_scatter(source, target, count, dtype, op, comm, stream):
    compute, p, me = comm.reduced(op), comm.size, comm.rank
    comm.collective(
        ("reduce_scatter",), source, target, count * p, dtype,
        lambda parts: compute([part.reshape(p, -1)[me] for part in parts]), stream, op=op,
    )  # fmt: skip


def _modules():
    nccl, cuda = types.ModuleType("nccl"), types.ModuleType("cuda")
    core = types.ModuleType("nccl.core")
    core.__version__ = "0.6.0"
    core.Communicator, core.UniqueId, core.get_unique_id = Communicator, UniqueId, get_unique_id
    core.NCCLConfig = SimpleNamespace
    core.NcclDataType = int
    core.group_start, core.group_end = group_start, group_end
    calls = types.ModuleType("nccl.bindings.nccl")
    calls.Comm = _alive.__getitem__
    calls.all_reduce, calls.broadcast, calls.reduce = _all_reduce, _broadcast, _reduce
    calls.all_gather, calls.reduce_scatter = _all_gather, _reduce_scatter
    calls.send = lambda *arguments: _message("send", *arguments)
    calls.recv = lambda *arguments: _message("recv", *arguments)
    cuda_core = types.ModuleType("cuda.core")
    cuda_core.Device, cuda_core.Stream = Device, Stream
    cuda_core.StreamOptions = SimpleNamespace
    driver = types.ModuleType("cuda.bindings.driver")
    driver.cuMemcpyDtoDAsync = copy_async
    for name, function in _DRIVER.items():
        setattr(driver, name, _driver_call(name, function))
    driver.CUipcMemHandle = Handle
    driver.CUdevice_P2PAttribute = SimpleNamespace(
        CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED=3
    )
    driver.cuCtxGetCurrent, driver.cuCtxSetCurrent = get_context, set_context
    made = {
        "nccl": nccl, "nccl.core": core, "nccl.bindings": types.ModuleType("nccl.bindings"),
        "nccl.bindings.nccl": calls, "cuda": cuda, "cuda.core": cuda_core,
        "cuda.bindings": types.ModuleType("cuda.bindings"), "cuda.bindings.driver": driver,
        "cuda.bindings.nvrtc": NVRTC("cuda.bindings.nvrtc"),
        "cupy": _cupy(),
    }  # fmt: skip
    for name, module in made.items():
        module.__spec__ = ModuleSpec(name, None)
    return made


@contextlib.contextmanager
def installed():
    """Replace the libraries inside the block."""
    before = {name: sys.modules.get(name) for name in _modules()}
    sys.modules.update(_modules())
    try:
        yield
    finally:
        _end_kernels()
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        failing.clear()
        uuids.clear()
        links.clear()
        refused.clear()
        grids.clear()
        mapped = _held.pop("open", [])
        left = [*mapped, *_held]
        _held.clear()
        _streams.clear()
        _allocated.clear()
        stop_servers()
        found = misuses.copy()
        misuses.clear()
    assert not found
    assert not left, "memory of the driver was not freed"
