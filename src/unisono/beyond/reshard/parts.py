"""`Sharded`: what a rank has of a global array, as boxes with their memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from unisono.beyond.boxes import IndexBox, flat_boxes, placed_boxes, whole
from unisono.core.base.buffers import BufferView, is_torch, view
from unisono.core.base.integers import as_integer, as_integers
from unisono.core.base.types import DType, dtype_named, dtype_of_numpy, dtype_of_torch
from unisono.core.engines.kernels import narrow, widen
from unisono.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    UnsupportedError,
    UsageError,
)

Memory = np.ndarray[Any, Any]


class Sharded:
    """This rank's part of a global array: an argument of `reshard`, `save` and `load`.

        Sharded(local, (1000, 1000), mesh=[0, 1, 2, 3], placements=[0])     # split by rows
        Sharded(local, (1000, 1000), mesh=[[4, 5], [6, 7]], placements=[1, None])
        Sharded(local, (1000, 1000), flat=250_000)            # elements of the flattened array
        Sharded([a, b], (1000, 1000), starts=[(0, 0), (500, 500)])          # any boxes

    Without mesh, flat and starts the rank has the whole array.

    Args:
        local: This rank's array, or a list of arrays with `starts`; None if it has nothing.
        shape: Of the global array.
        mesh: Global ranks: a `DeviceMesh`, one of torch, an array or nested lists.
        placements: For each dimension of the mesh: None (replicated), the dimension of the array
            that it cuts, or a placement of torch. A dimension is cut as torch cuts it: pieces of
            ceil(n / size) indices, the last ones fewer or none.
        flat: Index of the first element in the flattened array, as FSDP's flat parameters are cut.
        starts: The index of the first element of each array of a list.
    """

    def __init__(
        self,
        local: Any,
        shape: Sequence[int],
        *,
        mesh: Any = None,
        placements: Sequence[Any] | None = None,
        flat: int | None = None,
        starts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.local, self.shape = local, as_integers(shape, "shape")
        self._mesh, self._placements, self._flat, self._starts = mesh, placements, flat, starts
        # Returns `local` as it is later, if that is another object.
        self._get: Callable[[], Any] | None = None
        if sum(given is not None for given in (mesh, flat, starts)) > 1:
            raise InvalidArgumentError("Sharded takes one of mesh, flat and starts")
        if (mesh is None) != (placements is None):
            raise InvalidArgumentError("Sharded takes mesh and placements together")

    def parts(self, rank: int, *, write: bool) -> ArrayParts:
        """Return the boxes of this rank, whose global rank is `rank`, and their memory.

        Raises:
            InvalidArgumentError: The local array does not fit.
        """
        if self._starts is not None:
            return self._listed(self._starts, write)
        if self._flat is not None:
            return self._of_flat(as_integer(self._flat, "flat"), write)
        both = [(whole(self.shape), whole(self.shape))]
        if self._mesh is not None and self._placements is not None:
            grid, number = _grid_of(self._mesh, rank)
            found = placed_boxes(self.shape, grid, self._placements, number)
            if found is None and self.local is not None and math.prod(np.shape(self.local)):
                raise InvalidArgumentError(
                    f"rank {rank} has an array but is not in the mesh {grid.tolist()}"
                )
            both = found or []
        if self.local is None and (self._mesh is None or not sum(box.size for box, _ in both)):
            return ArrayParts.none(self.shape)
        if self.local is None:
            raise InvalidArgumentError(f"rank {rank} is in the mesh but has no array")
        memory, dtype, origin = _memory(self.local, write, self._get)
        sizes = (
            [max(inner.ends[dim] for _, inner in both) for dim in range(len(self.shape))]
            if (both)
            else None
        )
        if sizes is None and not memory.size:
            return ArrayParts(self.shape, dtype, [], [])
        if sizes is None or list(memory.shape) != sizes:
            raise InvalidArgumentError(
                f"rank {rank} has an array {list(memory.shape)}, expected {sizes or 'no element'}: "
                f"its part of {list(self.shape)}"
            )
        views = [memory[inner.within(whole(memory.shape))] for _, inner in both]
        return ArrayParts(self.shape, dtype, [box for box, _ in both], views, origin)

    def _listed(self, starts: Sequence[Sequence[int]], write: bool) -> ArrayParts:
        if not isinstance(self.local, (list, tuple)) or len(self.local) != len(starts):
            raise InvalidArgumentError("Sharded with starts takes a list with an array for each")
        boxes, views, dtypes, origins = [], [], [], []
        for local, start in zip(self.local, starts, strict=True):
            memory, dtype, origin = _memory(local, write)
            origins += origin
            begins = as_integers(start, "starts")
            ends = tuple(map(int.__add__, begins, memory.shape))
            if (
                not len(begins) == memory.ndim == len(self.shape)
                or min(begins, default=0) < 0
                or any(map(int.__gt__, ends, self.shape))
            ):
                raise InvalidArgumentError(
                    f"an array {list(memory.shape)} at {list(begins)} does not fit into "
                    f"{list(self.shape)}"
                )
            boxes.append(IndexBox(begins, ends))
            views.append(memory)
            dtypes.append(dtype)
        if len({dtype.name for dtype in dtypes}) > 1:
            raise InvalidArgumentError(f"the arrays of one Sharded have dtypes {dtypes}")
        none = ArrayParts.none(self.shape)
        return ArrayParts(self.shape, dtypes[0], boxes, views, origins) if dtypes else none

    def _of_flat(self, start: int, write: bool) -> ArrayParts:
        if self.local is None:
            return ArrayParts.none(self.shape)
        memory, dtype, origin = _memory(self.local, write)
        if memory.ndim != 1:
            raise InvalidArgumentError(
                f"Sharded with flat takes an array of 1 dimension, got {memory.ndim}"
            )
        boxes = flat_boxes(self.shape, start, memory.size)
        views = [memory[at : at + box.size].reshape(box.shape) for box, at in boxes]
        return ArrayParts(self.shape, dtype, [box for box, _ in boxes], views, origin)


class _TensorMemory(NamedTuple):
    """A tensor of torch, whose memory may become another one, or that must be packed.

    Attributes:
        get: Returns the tensor.
        place: Where its elements were when the view was made.
        packed: Its copy, of a lazy conjugate; None if the view is its memory.
    """

    get: Callable[[], Any]
    place: tuple[Any, ...]
    packed: BufferView | None

    def renew(self, name: str) -> None:
        """Check that the memory is the same, and copy it again if the view is a copy."""
        if _place_of(self.get()) != self.place:
            raise UsageError(
                f"ReshardPlan.run: array {name!r} has other memory than when the plan was made",
                hint="make a new plan after a tensor got other memory",
            )
        if self.packed is not None:
            self.packed.pack()


def _place_of(tensor: Any) -> tuple[Any, ...]:
    nbytes = tensor.untyped_storage().nbytes()
    return tensor.data_ptr(), nbytes, tuple(tensor.shape), tensor.stride()


def _grid_of(mesh: Any, rank: int) -> tuple[np.ndarray[Any, Any], int]:
    """Return a mesh as an array, and this rank's number in it.

    The ranks of a mesh object are those of its own world, so it is asked for the place.
    """
    grid = getattr(mesh, "mesh", mesh)
    grid = np.asarray(grid.tolist() if is_torch(grid) else grid)
    if not hasattr(mesh, "get_coordinate"):
        if rank < 0:
            raise UsageError(
                "without a group a rank has no place in a mesh of ranks",
                hint="pass a DTensor, a DeviceMesh, starts= or flat=, or make a group",
            )
        return grid, rank
    place = mesh.get_coordinate()
    if place is None:
        return grid, -1
    return grid, int(grid[tuple(place)])


class ArrayParts(NamedTuple):
    """What a rank has of one array.

    Attributes:
        shape: Of the global array.
        dtype: None if the rank has no array.
        boxes: Its boxes.
        views: The memory of each box, of its shape.
        origins: The tensors of torch of the views.
    """

    shape: tuple[int, ...]
    dtype: DType | None
    boxes: list[IndexBox]
    views: list[Memory]
    origins: Sequence[_TensorMemory] = ()

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> ArrayParts:
        """Return the parts of a rank that has nothing."""
        return cls(shape, None, [], [])

    def described(self) -> ArrayParts:
        """Return what the other ranks must know."""
        return self._replace(views=[], origins=())

    def memory_of(self, box: IndexBox) -> Memory:
        """Return the memory of a box that lies in one of the boxes."""
        for outer, memory in zip(self.boxes, self.views, strict=True):
            if box.common(outer) == box:
                inside: Memory = memory[box.within(outer)]
                return inside
        raise LookupError(box)


def named_parts(call: str, given: Any, rank: int, *, write: bool) -> dict[str, ArrayParts]:
    """Return the parts of an array or a dict of arrays by name; one array has the name "".

    Raises:
        UnisonoError: An array is wrong. The text has its name.
    """
    if given is None:
        return {}
    rows: Mapping[Any, Any] = given if isinstance(given, Mapping) else {"": given}
    found = {}
    for name, array in rows.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"{call}: the name of an array must be a str, got {name!r}")
        if array is None:
            continue
        try:
            found[name] = as_sharded(array).parts(rank, write=write)
        except (InvalidArgumentError, ArgumentTypeError, UnsupportedError, UsageError) as error:
            error.name_call(f"{call}: array {name!r}" if name else call)
            raise
    return found


def as_sharded(array: Any) -> Sharded:
    """Return what an argument means: a DTensor has its placements, any other array is whole."""
    if isinstance(array, Sharded):
        return array
    if all(hasattr(array, name) for name in ("to_local", "device_mesh", "placements")):

        def local() -> Any:
            # An asynchronous result of torch, which is no tensor yet.
            made = array.to_local()
            return made.wait() if hasattr(made, "wait") else made

        made = Sharded(
            local(), tuple(array.shape), mesh=array.device_mesh, placements=array.placements
        )
        made._get = local
        return made
    return Sharded(array, np.shape(array) if not is_torch(array) else tuple(array.shape))


def _memory(
    array: Any, write: bool, get: Callable[[], Any] | None = None
) -> tuple[Memory, DType, list[_TensorMemory]]:
    """Return an array's memory in its own layout, as elements of the dtype's storage."""
    tensor = is_torch(array)
    if write and tensor and (array.is_conj() or array.is_neg()):
        raise UnsupportedError(
            "array is a lazy conjugate or negative of torch, which has no memory of its own"
        )
    made = view(array.detach() if tensor else array, write=write, name="array", pack=False)
    memory, origins = made.memory, []
    if tensor:
        packed = made if made.packed and memory is made.array else None
        made.pack() if packed else None
        origins.append(_TensorMemory(get or (lambda: array), _place_of(array), packed))
    if memory.dtype != made.dtype.storage:
        if not memory.dtype.isnative:
            raise UnsupportedError(
                f"array has dtype {memory.dtype}, in the byte order of another machine"
            )
        memory = memory.view(made.dtype.storage)
    if memory.shape != made.shape:
        memory = memory.reshape(made.shape)
    return memory, made.dtype, origins


def dtype_from(dtype: Any) -> DType:
    """Return the element type that an argument means: a dtype of NumPy or torch, or a name."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        return dtype_named(dtype)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return dtype_of_torch(dtype)
    try:
        return dtype_of_numpy(np.dtype(dtype))
    except TypeError:
        raise ArgumentTypeError(f"{dtype!r} is no dtype of NumPy or torch") from None


Convert = Callable[[Memory, Memory], None]


def converter(given: DType, wanted: DType) -> Convert | None:
    """Return a function (into, from) that converts; None if there is no such conversion.

    Floating numbers become each other, rounded to nearest even (float64 becomes bfloat16 by way of
    float32); integers become wider ones.
    """
    if given.name == wanted.name:
        return np.copyto
    if {given.kind, wanted.kind} != {"f"}:
        safe = given.kind in "biu" and wanted.kind in "biuf" and wanted.name != "bfloat16"
        return np.copyto if safe and np.can_cast(given.storage, wanted.storage) else None
    return partial(_convert, given.name == "bfloat16", wanted.name == "bfloat16")


def _convert(widens: bool, narrows: bool, into: Memory, source: Memory) -> None:
    with np.errstate(all="ignore"):  # what is too large becomes infinite, as in torch
        if widens:
            source = widen(source)
        if narrows:
            source = narrow(source.astype(np.float32))
        np.copyto(into, source, casting="same_kind")
