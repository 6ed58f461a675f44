"""The dispatcher: an operation and a device type lead to a kernel.

As in c10d, where `c10d::allreduce_` has one kernel per dispatch key. The kernel of every device
is by default "call that operation of the group's backend for the device"; a package may register
its own for a device type, and wrappers (tracing, checks) compose around whatever is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from unisono.backends import Pending
from unisono.engines import repeat
from unisono.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from unisono.groups.process_group import ProcessGroup

__all__ = ["OPS", "Dispatcher", "Kernel", "OpSchema", "dispatcher", "schema_of"]

Kernel = Callable[..., Pending]
"""Called as kernel(group, device, *arguments, options)."""

Wrapper = Callable[["OpSchema", str, Kernel], Kernel]


class OpSchema(NamedTuple):
    """One operation: its names here and in c10d, and the forms in which c10d's methods take it.

    Attributes:
        name: Of the method of `ProcessGroup` and `DeviceBackend`.
        c10d_op: Of the schema in c10d's dispatcher; "" if c10d has no such operation.
        c10d_methods: Of the methods of c10d's ProcessGroup.
        data: Parameters of our method that hold arrays, in c10d's order. c10d takes those in
            brackets in a list of one as well: [tensor], and [outputs], itself a list already.
        settings: Parameters that c10d has in an options object, or after the data.
    """

    name: str
    c10d_op: str = ""
    c10d_methods: tuple[str, ...] = ()
    data: str = ""
    settings: str = ""


OPS: dict[str, OpSchema] = {
    schema.name: schema
    for schema in (
        OpSchema("broadcast", "broadcast_", ("broadcast",), "[tensor]", "root"),
        OpSchema("all_reduce", "allreduce_", ("allreduce",), "[tensor]", "op"),
        OpSchema(
            "all_reduce_coalesced", "allreduce_coalesced_", ("allreduce_coalesced",),
            "tensors", "op",
        ),
        OpSchema("reduce", "reduce_", ("reduce",), "[tensor]", "root op"),
        OpSchema("all_gather", "allgather_", ("allgather",), "[outputs] [tensor]"),
        OpSchema(
            "all_gather_into_tensor", "_allgather_base_", ("_allgather_base", "all_gather_single"),
            "output tensor",
        ),
        OpSchema(
            "all_gather_coalesced", "allgather_coalesced_", ("allgather_coalesced",),
            "outputs tensors",
        ),
        OpSchema(
            "all_gather_into_tensor_coalesced", "allgather_into_tensor_coalesced_",
            ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
            "outputs tensors",
        ),
        OpSchema("gather", "gather_", ("gather",), "[outputs] [tensor]", "root"),
        OpSchema("scatter", "scatter_", ("scatter",), "[output] [inputs]", "root"),
        OpSchema(
            "reduce_scatter", "reduce_scatter_", ("reduce_scatter",), "[output] [inputs]", "op"
        ),
        OpSchema(
            "reduce_scatter_tensor", "_reduce_scatter_base_",
            ("_reduce_scatter_base", "reduce_scatter_single"), "output tensor", "op",
        ),
        OpSchema(
            "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_coalesced_",
            ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
            "outputs tensors", "op",
        ),
        OpSchema("all_to_all", "alltoall_", ("alltoall",), "outputs inputs"),
        OpSchema(
            "all_to_all_single", "alltoall_base_", ("alltoall_base", "all_to_all_single"),
            "output tensor output_split_sizes input_split_sizes",
        ),
        OpSchema("barrier", "barrier", ("barrier",)),
        OpSchema("send", "send", ("send",), "[tensor] peer tag"),
        OpSchema("recv", "recv_", ("recv",), "[tensor] peer tag"),
        OpSchema("recv_any_source", "recv_any_source_", ("recv_anysource",), "[tensor] tag"),
        OpSchema("scan"),
        OpSchema("exscan"),
        OpSchema("agree"),
    )
}  # fmt: skip
"""Every operation by its name."""

_BY_C10D_OP = {schema.c10d_op: schema for schema in OPS.values() if schema.c10d_op}


def schema_of(op: str) -> OpSchema:
    """Return the schema of an operation, given its name here or in c10d's dispatcher.

    Raises:
        InvalidArgumentError: No such operation; lists those there are.
    """
    found = OPS.get(op) or _BY_C10D_OP.get(op.removeprefix("c10d::"))
    if found is None:
        raise InvalidArgumentError(f"unknown operation {op!r} (known: {', '.join(OPS)})")
    return found


class Dispatcher:
    """The table of kernels and wrappers."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._wrappers: list[Wrapper] = []
        self._composed: dict[tuple[str, str], Kernel] = {}

    def register_kernel(self, op: str, device: str, kernel: Kernel) -> None:
        """Use `kernel` for an operation on a device type, whatever backend the group has.

        Args:
            op: "all_reduce", or c10d's name: "allreduce_", "c10d::allreduce_".
            device: Device type.
            kernel: Called as kernel(group, device, *arguments, options).

        Raises:
            InvalidArgumentError: No such operation, or the place is taken.
        """
        name = schema_of(op).name
        if (name, device) in self._kernels:
            raise InvalidArgumentError(f"{name} has a kernel for device {device!r} already")
        self._kernels[name, device] = kernel
        self._changed(suspended=True)

    def unregister_kernel(self, op: str, device: str) -> None:
        """Go back to the group's backend for this operation and device type."""
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
        # A repeated call knows nothing of wrappers and other kernels.
        if suspended:
            repeat.suspend()
        else:
            repeat.resume()

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
