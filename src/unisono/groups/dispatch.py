"""The dispatcher: an operation and a device type lead to a kernel.

As in c10d, where `c10d::allreduce_` has one kernel per dispatch key. The kernel of every device
is by default "call that operation of the group's backend for the device"; a package may register
its own for a device type, and wrappers (tracing, checks) compose around whatever is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from unisono.backends import Pending
from unisono.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from unisono.groups.process_group import ProcessGroup

__all__ = ["OPS", "Dispatcher", "Kernel", "OpSchema", "dispatcher"]

Kernel = Callable[..., Pending]
"""Called as kernel(group, device, *arguments, options)."""

Wrapper = Callable[["OpSchema", str, Kernel], Kernel]


class OpSchema(NamedTuple):
    """One operation: its name here, in c10d's dispatcher, and as a c10d ProcessGroup's method."""

    name: str
    c10d_op: str
    c10d_method: str


OPS: dict[str, OpSchema] = {
    schema.name: schema
    for schema in (
        OpSchema("broadcast", "broadcast_", "broadcast"),
        OpSchema("all_reduce", "allreduce_", "allreduce"),
        OpSchema("all_reduce_coalesced", "allreduce_coalesced_", "allreduce_coalesced"),
        OpSchema("reduce", "reduce_", "reduce"),
        OpSchema("all_gather", "allgather_", "allgather"),
        OpSchema("all_gather_into_tensor", "_allgather_base_", "_allgather_base"),
        OpSchema("all_gather_coalesced", "allgather_coalesced_", "allgather_coalesced"),
        OpSchema("gather", "gather_", "gather"),
        OpSchema("scatter", "scatter_", "scatter"),
        OpSchema("reduce_scatter", "reduce_scatter_", "reduce_scatter"),
        OpSchema("reduce_scatter_tensor", "_reduce_scatter_base_", "_reduce_scatter_base"),
        OpSchema("all_to_all", "alltoall_", "alltoall"),
        OpSchema("all_to_all_single", "alltoall_base_", "alltoall_base"),
        OpSchema("barrier", "barrier", "barrier"),
        OpSchema("send", "send", "send"),
        OpSchema("recv", "recv_", "recv"),
    )
}


class Dispatcher:
    """The table of kernels and wrappers."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._wrappers: list[Wrapper] = []
        self._composed: dict[tuple[str, str], Kernel] = {}

    def register_kernel(self, op: str, device: str, kernel: Kernel) -> None:
        """Use `kernel` for an operation on a device type, whatever backend the group has.

        Raises:
            InvalidArgumentError: No such operation, or the place is taken.
        """
        if op not in OPS:
            raise InvalidArgumentError(f"unknown operation {op!r} (known: {', '.join(OPS)})")
        if (op, device) in self._kernels:
            raise InvalidArgumentError(f"{op} has a kernel for device {device!r} already")
        self._kernels[op, device] = kernel
        self._composed.clear()

    def unregister_kernel(self, op: str, device: str) -> None:
        """Go back to the group's backend for this operation and device type."""
        self._kernels.pop((op, device), None)
        self._composed.clear()

    def register_wrapper(self, wrapper: Wrapper) -> Callable[[], None]:
        """Compose `wrapper(schema, device, kernel) -> kernel` around every kernel.

        The wrapper registered last is the outermost. Returns a function that removes it again.
        """
        self._wrappers.append(wrapper)
        self._composed.clear()

        def remove() -> None:
            self._wrappers.remove(wrapper)
            self._composed.clear()

        return remove

    def kernel(self, op: str, device: str) -> Kernel:
        """Return what runs `op` on arrays of `device`, wrappers included."""
        kernel = self._composed.get((op, device))
        if kernel is None:
            schema = OPS[op]
            kernel = self._kernels.get((op, device)) or _backend_kernel(schema)
            for wrapper in self._wrappers:
                kernel = wrapper(schema, device, kernel)
            self._composed[op, device] = kernel
        return kernel


def _backend_kernel(schema: OpSchema) -> Kernel:
    def kernel(group: ProcessGroup, device: str, *arguments: object) -> Pending:
        backend = group.backends.get(device)
        if backend is None:
            has = ", ".join(f"{d}: {b.name}" for d, b in group.backends.items())
            raise UnsupportedError(
                f"{schema.name}: group '{group.name}' has no backend for device {device!r} "
                f"(it has {has})"
            )
        method: Kernel = getattr(backend, schema.name)
        return method(*arguments)

    return kernel


dispatcher = Dispatcher()
"""The one dispatcher of the process: kernels are code, not state of a world."""
