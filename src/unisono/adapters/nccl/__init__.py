"""The backend for GPUs: NCCL moves the data, a CPU group beside it checks every call.

    backend    the operations: argument checks, agreement, order on the stream
    kernels    one collective as calls of NCCL, by addresses
    flat       arrays of a GPU as flat memory
    arrays     what only an array library can do: torch and CuPy
    link       the communicators: start, error, abort, end
    intra_node IntraNodeComm: all-reduce by kernels of our own (intra_node.cu, compiled by nvrtc)
    calls      the calls under way, and the thread that watches them
    streams    `Stream` and `Event` over streams of a GPU
    gpu        streams, events and memory of one GPU
    library    nccl4py and cuda-core, imported on first use

Only this package imports nccl4py, cuda-core and CuPy. `unisono bench` gets nccl4py from `library`.
The backend has run on a single GPU only.
"""

from __future__ import annotations

from unisono.core.backends import DeviceBackend, GroupSpec, register_backend
from unisono.errors import UnsupportedError


def add_backend() -> None:
    """Register the backend "nccl"; an entry point of unisono."""
    register_backend("nccl", _backend, ("cuda",))


def _backend(spec: GroupSpec, device: str) -> DeviceBackend:
    if device != "cuda":
        raise UnsupportedError(f"backend 'nccl' serves device 'cuda' only, not {device!r}")
    # Imported here, because most programs use no GPU.
    from unisono.adapters.nccl.backend import NCCLBackend

    return NCCLBackend(spec)
