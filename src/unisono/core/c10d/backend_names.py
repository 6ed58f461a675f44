"""torch's class of backend names, over the registry of this library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from unisono.core.backends import registry
from unisono.core.backends.api import DeviceBackend, GroupSpec
from unisono.errors import ArgumentTypeError


class _NameTables(type):
    """Tables that follow the registry, and torch's constants for what is registered later."""

    @property
    def backend_list(cls) -> list[str]:
        """Names that can be used, and `UNDEFINED`, which torch has too."""
        return [Backend.UNDEFINED, *registry.known_backends()]

    @property
    def backend_capability(cls) -> dict[str, list[str]]:
        """Device types that each backend serves."""
        return {name: list(registry.devices_of(name)) for name in registry.known_backends()}

    @property
    def default_device_backend_map(cls) -> dict[str, str]:
        """Backend of each device type if the caller names none: the first registered."""
        served: dict[str, str] = {}
        for name in registry.registered():
            for device in registry.devices_of(name):
                served.setdefault(device, name)
        return served

    def __getattr__(cls, name: str) -> str:
        if name.isupper() and name.lower() in registry.known_backends():
            return name.lower()
        raise AttributeError(f"no backend is named {name.lower()!r}")


class Backend(str, metaclass=_NameTables):
    """Names of backends: `Backend("GLOO")` is the string "gloo".

    When a backend is registered, its name in capitals becomes an attribute. torch's own names are
    always attributes. (The base class of backends is `unisono.lowlevel.DeviceBackend`.)

    Raises:
        ArgumentTypeError: Not a string.

    Source: torch.distributed.Backend (2.13).
    """

    __slots__ = ()

    UNDEFINED = "undefined"
    UNISONO = "unisono"
    GLOO = "gloo"
    NCCL = "nccl"
    UCC = "ucc"
    MPI = "mpi"
    XCCL = "xccl"
    FAKE = "fake"

    def __new__(cls, name: str) -> Any:
        """Return the name in small letters, as a plain string."""
        if not isinstance(name, str):
            raise ArgumentTypeError(f"the name of a backend must be a string, got {name!r}")
        return str(name).lower()

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[..., DeviceBackend],
        extended_api: bool = False,
        devices: str | Sequence[str] | None = None,
    ) -> None:
        """Make a backend known in torch's way; `unisono.register_backend` is ours.

        Args:
            name: Its name; small letters count.
            func: Called as func(store, rank, size, timeout) or, if extended, as
                func(options, pg_options). Returns a DeviceBackend. `options` has store, group_rank,
                group_size, timeout, group_id, global_ranks_in_group, and `spec`, the argument of
                DeviceBackend.__init__.
            extended_api: See `func`.
            devices: Device types it serves; "cpu" if None.

        Raises:
            InvalidArgumentError: The name is taken or no identifier.
        """

        def factory(spec: GroupSpec, device: str) -> DeviceBackend:
            timeout = timedelta(seconds=spec.timeout_s)
            if extended_api:
                options = SimpleNamespace(
                    store=spec.store,
                    group_rank=spec.rank,
                    group_size=spec.size,
                    timeout=timeout,
                    group_id=spec.key,
                    global_ranks_in_group=list(spec.ranks),
                    spec=spec,
                )
                made = func(options, spec.options)
            else:
                made = func(spec.store, spec.rank, spec.size, timeout)
            if not isinstance(made, DeviceBackend):
                raise ArgumentTypeError(
                    f"what makes backend {name.lower()!r} returned {type(made).__name__}, expected "
                    "a unisono.lowlevel.DeviceBackend"
                )
            return made

        served = [devices] if isinstance(devices, str) else devices or ["cpu"]
        registry.register_backend(name.lower(), factory, served)
