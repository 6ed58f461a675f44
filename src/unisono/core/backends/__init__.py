"""Operations for one kind of device each: the CPU, and what others register."""

from unisono.core.backends.api import CallOptions, CPUOptions, DeviceBackend, GroupSpec, Pending
from unisono.core.backends.cpu import CPUBackend
from unisono.core.backends.registry import (
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
