"""The libraries that `unisono bench` measures; each returns calls without arguments.

torch.distributed and unisono have the same functions, so they share one class.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import numpy as np

import unisono
from unisono.adapters.nccl import library as nccl_library
from unisono.core.backends import CPUOptions
from unisono.core.base.types import ReduceOp
from unisono.core.operations.methods import OPS
from unisono.core.stores import PrefixStore, Store, TCPStore
from unisono.errors import InvalidArgumentError, LaunchError, UnsupportedError
from unisono.workbench.bench.algorithms import named
from unisono.workbench.bench.data import Data, to_tensor
from unisono.workbench.bench.peers import peer_file
from unisono.workbench.bench.plan import COPY, MPI_PEERS, PEERS, REDOPS, BenchPlan

TimedCall = Callable[[], object]

_COPY_BYTES = 256 << 10


class BenchLibrary(Protocol):
    """A communication library that is connected."""

    name: str

    def call(self, data: Data) -> TimedCall:
        """Return the operation on these arrays as a function that needs no arguments.

        Raises:
            UnsupportedError: The library has no such type or reduce op.
        """

    def versions(self) -> dict[str, str]:
        """Return names and versions for the report."""

    def close(self) -> None:
        """Disconnect; call it once."""


@dataclass
class _C10d:
    """Libraries with c10d's functions: unisono, and torch.distributed with Gloo or NCCL.

    Args:
        name: Name in the table.
        dist: The module with the functions.
        wrap: Function that turns a NumPy array into an argument of the functions without a copy.
        reduce_ops: The module's `ReduceOp`.
        packages: See `BenchLibrary.versions`.
        extra: Further keywords of every collective.
    """

    name: str
    dist: Any
    wrap: Callable[[Any], Any]
    reduce_ops: Any
    packages: dict[str, str]
    extra: dict[str, Any]

    def call(self, data: Data) -> TimedCall:
        case, plan, dist, extra = data.case, data.plan, self.dist, self.extra
        whole_in, whole_out = data.arrays
        given, result = self.wrap(whole_in), self.wrap(whole_out)
        op, root = getattr(self.reduce_ops, REDOPS[plan.redop]), plan.root
        match case.op:
            case "all_reduce":
                return partial(dist.all_reduce, result, op, **extra)
            case "broadcast":
                return partial(dist.broadcast, result, root, **extra)
            case "reduce":
                return partial(dist.reduce, result, root, op, **extra)
            case "all_gather":
                return partial(self._named("all_gather"), result, given, **extra)
            case "reduce_scatter":
                return partial(self._named("reduce_scatter"), result, given, op, **extra)
            case "all_to_all":
                return partial(dist.all_to_all_single, result, given, **extra)
            case "gather":
                return partial(dist.gather, given, self._parts(whole_out, data), root, **extra)
            case "scatter":
                return partial(dist.scatter, result, self._parts(whole_in, data), root, **extra)
            case "barrier":
                return partial(dist.barrier, **extra)
        send, receive = partial(dist.send, given), partial(dist.recv, result)
        return _ping_pong(data, send, receive)

    def _named(self, op: str) -> Any:
        """Return the function on whole tensors.

        torch 2.13 has new names for these functions; the old names cause a warning in each call.
        """
        new = f"{op}_single"
        old = next(name for name, schema in OPS.items() if new in schema.c10d_methods)
        return getattr(self.dist, new, None) or getattr(self.dist, old)

    def _parts(self, whole: Any, data: Data) -> list[Any] | None:
        """Return the list of one array per rank on the root; None on other ranks."""
        if data.rank != data.plan.root:
            return None
        return [self.wrap(part) for part in whole.reshape(data.plan.nprocs, -1)]

    def versions(self) -> dict[str, str]:
        return self.packages

    def close(self) -> None:
        self.dist.destroy_process_group()


class _MPI:
    """An MPI library, through mpi4py's functions for buffers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._mpi = _mpi()
        self._comm = self._mpi.COMM_WORLD

    def call(self, data: Data) -> TimedCall:
        case, plan, comm = data.case, data.plan, self._comm
        names = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX"}
        if plan.redop not in names:
            raise UnsupportedError(f"{self.name} has no reduce op {plan.redop}")
        if plan.dtype in ("float16", "bfloat16"):
            raise UnsupportedError(f"{self.name} has no type {plan.dtype}")
        op, root, here = getattr(self._mpi, names[plan.redop]), plan.root, self._mpi.IN_PLACE
        given, result, is_root = data.input, data.output, data.rank == plan.root
        pair = (here, result) if is_root else (given, None)
        calls: dict[str, TimedCall] = {
            "all_reduce": partial(comm.Allreduce, here, result, op),
            "broadcast": partial(comm.Bcast, result, root),
            "reduce": partial(comm.Reduce, *pair, op, root),
            "all_gather": partial(comm.Allgather, given, result),
            "reduce_scatter": partial(comm.Reduce_scatter_block, given, result, op),
            "all_to_all": partial(comm.Alltoall, given, result),
            "gather": partial(comm.Gather, given, result if is_root else None, root),
            "scatter": partial(comm.Scatter, given if is_root else None, result, root),
            "barrier": comm.Barrier,
        }
        ping_pong = _ping_pong(data, partial(comm.Send, given), partial(comm.Recv, result))
        return calls.get(case.op, ping_pong)

    def versions(self) -> dict[str, str]:
        library = self._mpi.Get_library_version().splitlines()[0].rstrip("\0")
        library = library.partition(", package")[0]
        return {
            "mpi4py": str(importlib.import_module("mpi4py").__version__),
            self.name: " ".join(library.replace("Version:", "").split()),
        }

    def close(self) -> None:
        """Do nothing: mpi4py finalizes MPI when the interpreter ends."""


class _DeepSpeed:
    """DeepSpeed's sum in shared memory, which its inference on CPUs calls in place."""

    name = "deepspeed"

    def __init__(self, rank: int, plan: BenchPlan, store: TCPStore) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(1)
        # It reads from these how to name its memory, and that all ranks are on this host.
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = store.host, str(store.port)
        os.environ["LOCAL_SIZE"] = str(plan.nprocs)
        path = peer_file(self.name)
        spec = importlib.util.spec_from_file_location("deepspeed_shm_comm", path)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.initialize(plan.nprocs, rank)
        # It would leave its file: all ranks have opened all files, so this rank removes its own.
        unisono.barrier()
        for file in glob.glob(f"/dev/shm/deepspeed_*_{store.host}_{store.port}_{rank}"):
            os.unlink(file)
        self._level = module.vector_kernel_level()

    def call(self, data: Data) -> TimedCall:
        plan = data.plan
        # Its instructions: AVX2 for float32, AVX-512 for the short types. Others end the process.
        levels = {"float32": 1, "float16": 2, "bfloat16": 2}
        if data.case.op != "all_reduce" or plan.redop != "sum" or plan.dtype not in levels:
            raise UnsupportedError(f"it has only all_reduce, sum, of {', '.join(levels)}")
        if self._level < levels[plan.dtype]:
            raise UnsupportedError(f"this processor lacks its instructions for {plan.dtype}")
        tensor = to_tensor(self._torch, data.output)
        return partial(self._torch.ops.deepspeed.inference_all_reduce_, tensor)

    def versions(self) -> dict[str, str]:
        with open(os.path.join(os.path.dirname(peer_file(self.name)), "version")) as file:
            version = file.read().strip()
        return {"torch": str(self._torch.__version__), self.name: version}

    def close(self) -> None:
        """Do nothing: it has no end."""


class _Copy:
    """A plain copy of as many bytes as a rank must get, out of memory of the next rank.

    No call over shared memory that copies each byte once can be faster.
    """

    name = COPY

    def call(self, data: Data) -> TimedCall:
        plan = data.plan
        if data.case.nbytes < _COPY_BYTES:
            raise UnsupportedError(f"below {_COPY_BYTES} bytes it would show the time of a call")
        sizes = [plan.copied(data.case, rank) for rank in range(plan.nprocs)]
        shared = unisono.shared_array((plan.nprocs, max(sizes)), np.uint8)
        # Each rank's memory is in its core's cache, as far as it fits.
        shared.array[data.rank] = 1
        nbytes = sizes[data.rank]
        source = shared.array[(data.rank + 1) % plan.nprocs, :nbytes]
        copy = partial(np.copyto, np.full(nbytes, 2, np.uint8), source)
        if data.case.op != "sendrecv":
            return copy

        def both_messages() -> None:
            copy()
            copy()

        return both_messages

    def versions(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        """Do nothing: the memory ends with its views."""


class _NCCL4Py:
    """NCCL through nccl4py alone, on the default stream, where torch's calls are, too."""

    name = "nccl4py"

    def __init__(self, rank: int, plan: BenchPlan, store: Store) -> None:
        self._nccl = nccl = nccl_library.load().nccl
        key = "nccl4py/id"
        if rank == 0:
            store.set(key, bytes(nccl.get_unique_id()))
        uid = nccl.UniqueId.from_bytes(store.get(key))
        self._comm = nccl.Communicator.init(plan.nprocs, rank, uid)

    def call(self, data: Data) -> TimedCall:
        case, plan, comm = data.case, data.plan, self._comm
        given, result = data.arrays
        op, root = getattr(nccl_library, REDOPS[plan.redop]), plan.root
        if case.op == "barrier":
            raise UnsupportedError(f"{self.name} has no barrier")
        if case.op == "sendrecv":
            return _ping_pong(data, partial(comm.send, given), partial(comm.recv, result))
        # By name: a version of nccl4py may lack some.
        calls: dict[str, tuple[Any, ...]] = {
            "all_reduce": ("allreduce", result, result, op),
            "broadcast": ("broadcast", result, result, root),
            "reduce": ("reduce", result, result, op, root),
            "all_gather": ("allgather", given, result),
            "reduce_scatter": ("reduce_scatter", given, result, op),
            "all_to_all": ("alltoall", given, result),
            "gather": ("gather", given, result, root),
            "scatter": ("scatter", given, result, root),
        }
        name, *args = calls[case.op]
        return partial(getattr(comm, name), *args)

    def versions(self) -> dict[str, str]:
        return {"nccl4py": str(self._nccl.__version__)}

    def close(self) -> None:
        self._comm.destroy()


def _ping_pong(
    data: Data, send: Callable[[int], object], receive: Callable[[int], object]
) -> TimedCall:
    """Return a round trip between the ranks of a pair; an unpaired rank does nothing."""
    peer = data.plan.peer_of(data.rank)
    if peer is None:
        return lambda: None
    first, second = (send, receive) if data.rank < peer else (receive, send)

    def round_trip() -> None:
        first(peer)
        second(peer)

    return round_trip


def open_library(name: str, rank: int, plan: BenchPlan, store: TCPStore) -> BenchLibrary:
    """Connect one library.

    Args:
        name: "unisono", one of `PEERS`, or an algorithm of unisono, whose group exists already.
        rank: This rank.
        plan: The settings of the benchmark.
        store: Store of all ranks, which also serves torch's client.
    """
    if name == "unisono":
        return _open_unisono(rank, plan, store)
    if name in MPI_PEERS:
        return _MPI(name)
    if name == "deepspeed":
        return _DeepSpeed(rank, plan, store)
    if name == COPY:
        return _Copy()
    if name == "nccl4py":
        return _NCCL4Py(rank, plan, store)
    if name not in PEERS:
        return _AlgorithmLibrary(plan, name)
    return _open_torch(name, rank, plan, store)


def _open_unisono(rank: int, plan: BenchPlan, store: TCPStore) -> BenchLibrary:
    unisono.init_process_group(
        "cpu:unisono,cuda:nccl" if plan.device == "cuda" else None,
        store=PrefixStore(f"unisono/{plan.loop.turn[0]}", store),
        rank=rank,
        world_size=plan.nprocs,
        timeout=plan.loop.timeout_s,
        pg_options=CPUOptions(engine=plan.engine),
    )
    return unisono_library(_registered(plan, plan.algorithm) if plan.algorithm else None)


def _registered(plan: BenchPlan, text: str) -> str:
    """Return the name of an algorithm; each rank registers what is in a file."""
    names = [named(op, text) for op in plan.ops if op != "sendrecv"]
    return names[0] if names else text


def unisono_library(algorithm: str | None) -> BenchLibrary:
    """Return unisono with its default group, which runs an algorithm or selects one if None."""
    extra = {"algorithm": algorithm} if algorithm else {}
    versions = {"unisono": unisono.__version__, "numpy": np.__version__}
    return _C10d("unisono", unisono, lambda array: array, ReduceOp, versions, extra)


class _AlgorithmLibrary(_C10d):
    """A further algorithm, on the group of the library `unisono`, which closes it."""

    def __init__(self, plan: BenchPlan, text: str) -> None:
        extra = {"algorithm": _registered(plan, text)}
        super().__init__(text, unisono, lambda array: array, ReduceOp, {}, extra)

    def call(self, data: Data) -> TimedCall:
        if data.case.op == "sendrecv":
            raise InvalidArgumentError("messages have no algorithm")
        return super().call(data)

    def close(self) -> None:
        """Leave the group."""


def _open_torch(name: str, rank: int, plan: BenchPlan, store: TCPStore) -> BenchLibrary:
    # Import by name: the package must not depend on torch, which only this peer needs.
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    limit = timedelta(seconds=plan.loop.timeout_s)
    # A rank has at most one core, so further threads would slow it down.
    torch.set_num_threads(1)
    client = dist.TCPStore(store.host, store.port, is_master=False, timeout=limit)
    dist.init_process_group(
        name,
        store=dist.PrefixStore(name, client),
        rank=rank,
        world_size=plan.nprocs,
        timeout=limit,
    )
    versions = {"torch": str(torch.__version__)}
    wrap = partial(to_tensor, torch) if name == "gloo" else lambda tensor: tensor
    return _C10d(name, dist, wrap, dist.ReduceOp, versions, {})


def slowest(values: object) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the largest values over all ranks."""
    array = np.array(values, np.float64)
    unisono.all_reduce(array, unisono.ReduceOp.MAX)
    return array


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage before the block, and none in it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def mpi_rank(plan: BenchPlan) -> int:
    """Return this process's rank in MPI.

    Raises:
        LaunchError: mpiexec and mpi4py belong to different MPI libraries.
    """
    comm = _mpi().COMM_WORLD
    if comm.size != plan.nprocs:
        raise LaunchError(
            f"mpi4py sees {comm.size} ranks, expected {plan.nprocs}: the mpiexec that started "
            "this process belongs to another MPI library",
            hint="install both from wheels: pip install mpi4py mpich",
        )
    return int(comm.rank)


def _mpi() -> Any:
    return importlib.import_module("mpi4py.MPI")
