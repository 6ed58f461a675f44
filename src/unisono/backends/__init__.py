"""Collectives for one kind of device each: cpu (built in), and what others register.

May import `engines`, `transports`, `stores`, `schedules`, `base` and `errors`.
"""

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
