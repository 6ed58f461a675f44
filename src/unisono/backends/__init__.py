"""Operations for one kind of device each: cpu and nccl, and what others register."""

from unisono.backends.api import CallOptions, CPUOptions, DeviceBackend, GroupSpec, Pending
from unisono.backends.cpu import CPUBackend
from unisono.backends.registry import (
    BackendConfig,
    known_backends,
    make_backend,
    register_backend,
)

__all__ = [
    "BackendConfig",
    "CPUBackend",
    "CPUOptions",
    "CallOptions",
    "DeviceBackend",
    "GroupSpec",
    "Pending",
    "known_backends",
    "make_backend",
    "register_backend",
]
