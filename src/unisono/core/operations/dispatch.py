"""The dispatcher: find the kernel of an operation for a device type.

As in c10d, where `c10d::allreduce_` has one kernel per dispatch key. The default kernel calls the
operation's method of the group's backend for the device. A package may register its own kernel for
a device type. Wrappers (tracing, checks) compose around both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.core.backends import DeviceBackend, Pending
from unisono.core.base.buffers import device_of
from unisono.core.base.seam import cpp
from unisono.core.operations.protocols import GroupView
from unisono.core.operations.table import OPS, OpSchema, schema_of
from unisono.errors import InvalidArgumentError, UnsupportedError

Kernel = Callable[..., Pending]
"""Called as kernel(group, device, *arguments, options)."""

Wrapper = Callable[[OpSchema, str, Kernel], Kernel]


class Dispatcher:
    """The table of kernels and wrappers.

    Attributes:
        is_plain: Whether it has none, so that a group calls its CPU backend itself.
    """

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._wrappers: list[Wrapper] = []
        self._composed: dict[tuple[str, str], Kernel] = {}
        self.is_plain = True

    def register_kernel(self, op: str, device: str, kernel: Kernel) -> None:
        """Use `kernel` for an operation on a device type, instead of the group's backend.

        Args:
            op: "all_reduce", or c10d's name: "allreduce_", "c10d::allreduce_".
            device: Device type.
            kernel: Called as kernel(group, device, *arguments, options).

        Raises:
            InvalidArgumentError: No such operation, or it has a kernel for the device type.
        """
        name = schema_of(op).name
        if (name, device) in self._kernels:
            raise InvalidArgumentError(f"{name} has a kernel for device {device!r} already")
        self._kernels[name, device] = kernel
        self._changed(suspended=True)

    def unregister_kernel(self, op: str, device: str) -> None:
        """Use the group's backend again for this operation and device type."""
        if self._kernels.pop((schema_of(op).name, device), None) is not None:
            self._changed(suspended=False)

    def register_wrapper(self, wrapper: Wrapper) -> Callable[[], None]:
        """Compose `wrapper(schema, device, kernel) -> kernel` around every kernel.

        The wrapper registered last is the outermost. Returns a function that removes it again.
        """
        self._wrappers.append(wrapper)
        self._changed(suspended=True)

        def remove() -> None:
            self._wrappers.remove(wrapper)
            self._changed(suspended=False)

        return remove

    def _changed(self, *, suspended: bool) -> None:
        self._composed.clear()
        self.is_plain = not self._kernels and not self._wrappers
        # C++ runs a call without wrappers and registered kernels, so it must not run any.
        (cpp.suspend_calls if suspended else cpp.resume_calls)()

    def kernel(self, op: str, device: str) -> Kernel:
        """Return the kernel that runs `op` on arrays of `device`, with its wrappers."""
        kernel = self._composed.get((op, device))
        if kernel is None:
            schema = OPS[op]
            kernel = self._kernels.get((op, device)) or _backend_kernel(schema)
            for wrapper in self._wrappers:
                kernel = wrapper(schema, device, kernel)
            self._composed[op, device] = kernel
        return kernel


def _backend_kernel(schema: OpSchema) -> Kernel:
    op = schema.name

    def kernel(group: GroupView, device: str, *arguments: object) -> Pending:
        backend = group.backends.get(device)
        if backend is None:
            has = ", ".join(f"{d}: {b.name}" for d, b in group.backends.items())
            raise UnsupportedError(
                f"{op}: group '{group.name}' has no backend for device {device!r} (it has {has})"
            )
        method: Kernel | None = getattr(backend, op, None)
        if method is None:
            raise _lacks(backend, op)
        return method(*arguments)

    return kernel


def _lacks(backend: DeviceBackend, op: str) -> UnsupportedError:
    """Return the error of an operation that a backend lacks; it lists the supported operations."""
    own = [name for name in OPS if not hasattr(DeviceBackend, name) and hasattr(backend, name)]
    return UnsupportedError(
        f"backend {backend.name!r} ({backend.device}) has no {op} "
        f"(it has: {', '.join(own) or 'no operation'})"
    )


def backend_of(group: GroupView, arguments: Sequence[object]) -> DeviceBackend:
    """Return the backend for the first array of a device that the group serves, else the first."""
    devices = [device_of(_leaf(argument)) for argument in arguments]
    known = (group.backends[device] for device in devices if device in group.backends)
    return next(known, next(iter(group.backends.values())))


def _leaf(argument: object) -> object:
    """Return the first array in an argument that may be a list of lists."""
    while isinstance(argument, (list, tuple)) and argument:
        argument = argument[0]
    return argument


dispatcher = Dispatcher()
"""The only dispatcher of the process: kernels are code, not state of a world."""
