"""Names of backends, and which device type each serves.

A backend from another package registers by `register_backend`, or is found by the entry-point
group "unisono.backends", whose entries are callables without arguments that register. The adapters
"mpi" and "nccl" of this library are found so, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from unisono.core.backends.api import DeviceBackend, GroupSpec
from unisono.core.backends.cpu import CPUBackend
from unisono.core.base.registry import Registry
from unisono.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError

Factory = Callable[[GroupSpec, str], DeviceBackend]


class _BackendEntry(NamedTuple):
    factory: Factory
    devices: tuple[str, ...]


def _cpu(spec: GroupSpec, device: str) -> DeviceBackend:
    if device != "cpu":
        raise UnsupportedError(f"backend 'unisono' serves device 'cpu' only, not {device!r}")
    return CPUBackend(spec)


DEFAULT = "unisono"

# "gloo" uses the same engine, so that a script needs no change but its import line.
_backends: Registry[_BackendEntry] = Registry(
    "backend",
    "unisono.backends",
    {
        "unisono": _BackendEntry(_cpu, ("cpu",)),
        "gloo": _BackendEntry(_cpu, ("cpu",)),
    },
)


def register_backend(name: str, factory: Factory, devices: Iterable[str] = ("cpu",)) -> None:
    """Make a backend known.

    Args:
        name: Lower-case name, as users write it in `init_process_group`.
        factory: Called as factory(spec, device) on every member of a new group.
        devices: Device types it serves when named without one.

    Raises:
        InvalidArgumentError: The name is taken, or `devices` is a plain string.
    """
    if isinstance(devices, str):
        raise InvalidArgumentError(f"devices must be a list of names, got the string {devices!r}")
    _backends.add(name, _BackendEntry(factory, tuple(devices)))


def known_backends() -> tuple[str, ...]:
    """Return the names that can be used, those of entry points included."""
    return _backends.known()


def registered() -> tuple[str, ...]:
    """Return the names in the order in which they were registered, entry points last."""
    _backends.known()
    return _backends.added()


def devices_of(name: str) -> tuple[str, ...]:
    """Return the device types that a registered backend serves."""
    return _backends.get(name).devices


class BackendConfig:
    """The backend of each device type: "unisono", or "cpu:unisono,cuda:nccl".

    Raises:
        InvalidArgumentError: An unknown name, a bad pair, or a device named twice.
    """

    def __init__(self, backend: str | None = None) -> None:
        self.device_backend_map: dict[str, str] = {}
        if backend is not None and not isinstance(backend, str):
            raise ArgumentTypeError(f"backend must be a string, got {backend!r}")
        text = (backend or DEFAULT).lower()
        for part in text.split(","):
            device, colon, name = part.strip().rpartition(":")
            if colon and (not device or ":" in device):
                raise InvalidArgumentError(
                    f"backend {text!r}: expected device:backend, got {part!r}"
                )
            devices = devices_of(name)
            for served in [device] if device else devices:
                if served in self.device_backend_map:
                    raise InvalidArgumentError(f"backend {text!r} names device {served!r} twice")
                self.device_backend_map[served] = name

    def get_device_backend_map(self) -> dict[str, str]:
        """Return the names of the backends by device type."""
        return self.device_backend_map

    def __repr__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.device_backend_map.items())


def make_backend(name: str, device: str, spec: GroupSpec) -> DeviceBackend:
    """Return a new backend of that name for one group and device type."""
    return _backends.get(name).factory(spec, device)
