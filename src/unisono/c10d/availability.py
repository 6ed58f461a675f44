"""Which backends, launchers and reduce ops there are.

Source: torch.distributed.distributed_c10d (2.13).
"""

from __future__ import annotations

from typing import Any

from unisono.backends import BackendConfig, known_backends
from unisono.base import config
from unisono.base.buffers import device_type
from unisono.base.types import ReduceOp, dtype_named, reduce_ops_of
from unisono.c10d.backend_names import Backend
from unisono.errors import ArgumentTypeError, InvalidArgumentError

__all__ = [
    "get_default_backend_for_device",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "supports_complex",
]


def is_available() -> bool:
    """Whether the package can be used: always, once it is imported."""
    return True


def is_backend_available(backend: str) -> bool:
    """Whether a backend can be used; of "cpu:gloo,cuda:nccl", whether all of them can."""
    if not isinstance(backend, str):
        raise ArgumentTypeError(f"backend must be a string, got {backend!r}")
    try:
        BackendConfig(backend)
    except InvalidArgumentError:
        return False
    return True


def is_gloo_available() -> bool:
    """Whether the name "gloo" can be used: always, the CPU engine serves it."""
    return is_backend_available("gloo")


def is_mpi_available() -> bool:
    """Whether a backend of the name "mpi" is registered."""
    return is_backend_available("mpi")


def is_nccl_available() -> bool:
    """Whether a backend of the name "nccl" is registered."""
    return is_backend_available("nccl")


def is_ucc_available() -> bool:
    """Whether a backend of the name "ucc" is registered."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Whether a backend of the name "xccl" is registered."""
    return is_backend_available("xccl")


def is_torchelastic_launched() -> bool:
    """Whether `unisono run` or torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in config.environ()


def get_default_backend_for_device(device: Any) -> str:
    """Return the backend that serves a device when none is named.

    Args:
        device: "cuda", "cuda:1", or a torch.device.

    Raises:
        InvalidArgumentError: No backend serves it; lists the devices that one does.
    """
    known_backends()
    served = Backend.default_device_backend_map
    name = served.get(device_type(device))
    if name is None:
        raise InvalidArgumentError(
            f"no backend is registered for device {device!r} (devices: {', '.join(served)})"
        )
    return name


def supports_complex(reduceOp: ReduceOp) -> bool:
    """Whether a reduce op is defined on complex numbers (torch lacks PRODUCT)."""
    return reduceOp.op in reduce_ops_of(dtype_named("complex64"))
