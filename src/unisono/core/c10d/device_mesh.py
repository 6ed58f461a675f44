"""DeviceMesh: the ranks of a world as a grid, with a group for every line of the grid.

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    unisono.all_reduce(x, group=mesh["tp"].get_group())

A dimension is kept as its lines: an array [lines, size] of global ranks, in which each rank of the
grid occurs once. A slice takes some dimensions. The grid around a rank is found by following its
line in each dimension. Flattening makes one line of each such grid.

Source: torch.distributed.device_mesh (2.13).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from unisono.core.base.integers import as_integer
from unisono.core.c10d.lifecycle import init_process_group
from unisono.core.c10d.new_groups import new_group
from unisono.core.c10d.queries import (
    get_process_group_ranks,
    get_rank,
    get_world_size,
    is_initialized,
)
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import current
from unisono.core.transports.messages import PROC_NULL
from unisono.errors import ArgumentTypeError, InvalidArgumentError, UnknownNameError

Ranks = np.ndarray[Any, np.dtype[np.int64]]
Override = tuple[str | None, Any]


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    """Return the ranks 0, 1, ... as a grid in C order. All ranks of the world call.

    Args:
        device_type: Device type of the arrays that the groups are used with: "cpu", "cuda", ...
        mesh_shape: Ranks along each dimension; the product is at most the world size.
        mesh_dim_names: A name for each dimension.
        backend_override: Dimension or its name -> backend, pg_options, or both as a pair.

    Raises:
        InvalidArgumentError: Arguments that contradict each other, or more ranks than the world.
    """
    if not isinstance(device_type, str) or not device_type.isalpha():
        raise InvalidArgumentError(
            f"device_type={device_type!r}: expected a type such as 'cpu', without an index"
        )
    if not np.iterable(mesh_shape):
        raise ArgumentTypeError(f"mesh_shape must be a list of integers, got {mesh_shape!r}")
    shape = tuple(as_integer(size, "each of mesh_shape") for size in mesh_shape)
    if min(shape, default=0) < 1:
        raise InvalidArgumentError(f"mesh_shape {shape} must have sizes of at least 1")
    names = _check_names(mesh_dim_names, len(shape), "mesh_shape")
    override = _overrides(backend_override or {}, len(shape), names)
    mesh = np.arange(math.prod(shape)).reshape(shape)
    return DeviceMesh(device_type, mesh, mesh_dim_names=names, backend_override=override)


class DeviceMesh:
    """A grid of ranks. All ranks of the world must make it together.

    The group of a dimension has its ranks in the order of the grid, so that a rank's number in the
    group is its coordinate. (torch sorts the ranks.) A dimension that is the whole world in order
    has the default group.

    Args:
        device_type: "cpu", "cuda", ...
        mesh: [...] global ranks, each once; nested lists, an array or a tensor.
        mesh_dim_names: A name for each dimension.
        backend_override: For each dimension a pair (backend, pg_options), each may be None.

    Raises:
        InvalidArgumentError: A rank twice or outside the world, or not one name per dimension.
    """

    def __init__(
        self,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
        backend_override: tuple[Override, ...] | None = None,
        _init_backend: bool = True,
    ) -> None:
        if not is_initialized():
            init_process_group()
        grid = _check_grid(mesh)
        self._device_type = device_type
        self._names = _check_names(mesh_dim_names, grid.ndim, "mesh")
        self._lines = [_lines_along(grid[None], dim) for dim in range(grid.ndim)]
        self._root: DeviceMesh = self
        self._flattened: dict[str, DeviceMesh] = {}
        # Links to neighbours, kept by `beyond.neighbors`.
        self._topologies: dict[Any, Any] = {}
        self._rank = get_rank()
        none = ((None, None),) * grid.ndim
        overrides = none if backend_override is None else backend_override
        if len(overrides) != grid.ndim:
            raise InvalidArgumentError(
                f"backend_override has {len(overrides)} entries for {grid.ndim} dimensions"
            )
        self._groups: list[ProcessGroup | None] = []
        if _init_backend:
            self._groups = self._make_groups(self._lines, self._labels(), overrides)

    def _derived(
        self,
        lines: list[Ranks],
        names: Sequence[str] | None,
        groups: Sequence[ProcessGroup | None],
    ) -> DeviceMesh:
        """Return a mesh of other dimensions over the same root; makes no group."""
        mesh = copy.copy(self)
        mesh._names = None if names is None else tuple(names)
        mesh._lines = lines
        mesh._flattened = {}
        mesh._topologies = {}
        mesh._groups = list(groups)
        return mesh

    def __enter__(self) -> Self:
        """Return the mesh, as torch does; a with block changes nothing."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the block."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the mesh with the names of its groups, which cannot be pickled or copied."""
        groups = [None if group is None else (group.key, group.name) for group in self._groups]
        return vars(self) | {"_groups": groups, "_topologies": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Find this rank's groups again, by name and ranks; a rank without them has none."""
        vars(self).update(state)
        self._rank = get_rank() if is_initialized() else self._rank
        groups, known = [], current().groups
        for lines, saved in zip(self._lines, state["_groups"], strict=False):
            key, name = saved or ("", "")
            mine = [line for line in lines.tolist() if self._rank in line]
            alike = [each for each in (known.get(key), *known.values()) if each is not None]
            found = (g for g in alike if g.name == name and [list(g.ranks)] == mine)
            groups.append(next(found, None))
        self._groups = groups

    def _make_groups(
        self, lines: list[Ranks], labels: Sequence[str], overrides: Sequence[Override]
    ) -> list[ProcessGroup | None]:
        """Make the groups of some dimensions; all ranks of the world make all of them."""
        world = np.arange(get_world_size())
        groups: list[ProcessGroup | None] = []
        for table, label, (backend, options) in zip(lines, labels, overrides, strict=True):
            if np.array_equal(table, world[None]) and backend is None and options is None:
                groups.append(current().default)
                continue
            mine = None
            for line in table.tolist():
                made = new_group(
                    line,
                    backend=backend,
                    pg_options=options,
                    group_desc=f"mesh_{label}",
                    sort_ranks=False,
                )
                if self._rank in line:
                    mine = made
            groups.append(mine)
        return groups

    # ---- shape and ranks ------------------------------------------------------------------

    @property
    def device_type(self) -> str:
        """Type of the devices: "cpu", "cuda", ..."""
        return self._device_type

    @property
    def mesh(self) -> Ranks:
        """[shape] global ranks of the grid that this rank is in.

        Raises:
            InvalidArgumentError: This rank is in no grid, and there are several grids.
        """
        if self.get_coordinate() is None and len(self._lines[0]) * self.shape[0] != self.size():
            raise InvalidArgumentError(f"rank {self._rank} is in none of the grids of {self!r}")
        inside = self.get_coordinate() is not None
        return self._grid_around(self._rank if inside else int(self._lines[0][0, 0]))

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Names of the dimensions, or None."""
        return self._names

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._lines)

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each dimension."""
        return tuple(table.shape[1] for table in self._lines)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks along a dimension, or of the whole grid."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[self._dim(mesh_dim)]

    def get_rank(self) -> int:
        """Return this process's global rank."""
        return self._rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's coordinates in the grid, None if it is in no grid."""
        places = [np.argwhere(table == self._rank) for table in self._lines]
        if any(len(place) == 0 for place in places):
            return None
        return tuple(int(place[0, 1]) for place in places)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's number in the group of a dimension; None: the only dimension.

        Raises:
            InvalidArgumentError: This rank is not in the mesh, or a dimension must be named.
        """
        return self.get_group(mesh_dim).rank()

    def shift(
        self, mesh_dim: int | str, steps: int = 1, *, periodic: bool = True
    ) -> tuple[int, int]:
        """Return the global ranks `steps` before and after this rank along a dimension.

        As in MPI_Cart_shift, send to the second, receive from the first. Where the dimension
        ends it is `PROC_NULL`, with which messages move nothing.

        Raises:
            InvalidArgumentError: This rank is in no grid.
        """
        table = self._lines[self._dim(mesh_dim)]
        found = np.argwhere(table == self._rank)
        if not len(found):
            raise InvalidArgumentError(f"rank {self._rank} is in none of the grids of {self!r}")
        (line, place), size = found[0].tolist(), table.shape[1]
        steps = as_integer(steps, "steps")

        def rank_at(at: int) -> int:
            return int(table[line, at % size]) if periodic or 0 <= at < size else PROC_NULL

        return rank_at(place - steps), rank_at(place + steps)

    # ---- groups ---------------------------------------------------------------------------

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return this rank's group along a dimension; None: the only dimension.

        Raises:
            InvalidArgumentError: This rank is not in the mesh, or a dimension must be named.
        """
        if mesh_dim is None and self.ndim > 1:
            raise InvalidArgumentError(
                f"which of the {self.ndim} dimensions of {self!r}? mesh_dim must be given"
            )
        if isinstance(mesh_dim, str) and mesh_dim in self._root._flattened:
            return self._root._flattened[mesh_dim].get_group()
        dim = 0 if mesh_dim is None else self._dim(mesh_dim)
        group = self._groups[dim] if self._groups else None
        if group is None:
            why = f"rank {self._rank} is not in it" if self._groups else "it was made without"
            raise InvalidArgumentError(f"{self!r} has no group for this rank: {why}")
        return group

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return this rank's groups, one per dimension."""
        return [self.get_group(dim) for dim in range(self.ndim)]

    @staticmethod
    def from_group(
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
    ) -> DeviceMesh:
        """Return a mesh over existing groups. It makes no group, so not all ranks need to call.

        Args:
            group: One group, or one per dimension.
            device_type: "cpu", "cuda", ...
            mesh: [...] global ranks; needed with several groups.
            mesh_dim_names: A name for each dimension; needed with several groups.

        Raises:
            InvalidArgumentError: The ranks are not those of the groups.
        """
        several = not isinstance(group, ProcessGroup)
        groups = list(group) if isinstance(group, Sequence) else [group]
        if several and (mesh is None or mesh_dim_names is None or not groups):
            raise InvalidArgumentError("several groups need mesh and mesh_dim_names")
        grid = get_process_group_ranks(groups[0]) if mesh is None else mesh
        made = DeviceMesh(device_type, grid, mesh_dim_names=mesh_dim_names, _init_backend=False)
        if made.ndim != len(groups):
            raise InvalidArgumentError(f"{len(groups)} groups for a mesh of {made.ndim} dimensions")
        for table, known in zip(made._lines, groups, strict=True):
            if get_process_group_ranks(known) not in table.tolist():
                raise InvalidArgumentError(
                    f"group '{known.name}' has ranks {get_process_group_ranks(known)}, the mesh "
                    f"has {table.tolist()}"
                )
        made._groups = list(groups)
        return made

    # ---- slices ---------------------------------------------------------------------------

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of some dimensions, which shares their groups. Sends nothing.

        Raises:
            UnknownNameError: No such dimension.
            InvalidArgumentError: The dimensions have no names, or overlap.
        """
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if self._names is None:
            raise InvalidArgumentError("a mesh without mesh_dim_names cannot be sliced")
        if names == self._names:
            return self
        parts = [self._part(name) for name in names]
        return self._joined(parts) if len(parts) != 1 else parts[0]

    def _part(self, name: str) -> DeviceMesh:
        flattened = self._flattened.get(name)
        if flattened is not None:
            return flattened
        dim = self._dim(name)
        return self._derived([self._lines[dim]], (name,), self._groups[dim : dim + 1])

    def _joined(self, parts: Sequence[DeviceMesh]) -> DeviceMesh:
        names = [name for part in parts for name in part._names or ()]
        lines = [table for part in parts for table in part._lines]
        groups = [group for part in parts for group in part._groups]
        made = self._derived(lines, names, groups)
        grids = [made._grid_around(int(rank)) for rank in lines[0].ravel()]
        if len(set(names)) != len(lines) or any(len(np.unique(g)) != made.size() for g in grids):
            raise InvalidArgumentError(f"dimensions {', '.join(names)} overlap")
        return made

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[DeviceMesh]) -> DeviceMesh:
        """Return the mesh with all dimensions of some slices of one mesh."""
        first = device_mesh_list[0]
        if any(mesh._root is not first._root for mesh in device_mesh_list):
            raise InvalidArgumentError("only slices of one mesh can be concatenated")
        return first._joined(device_mesh_list)

    def _flatten(
        self, mesh_dim_name: str | None = None, backend_override: Any = None
    ) -> DeviceMesh:
        """Return a mesh of one dimension that has all ranks of this mesh. All ranks call."""
        if self._names is None:
            raise InvalidArgumentError("a mesh without mesh_dim_names cannot be flattened")
        name = mesh_dim_name or "_".join(self._names)
        if self._names == (name,):
            return self
        lines = np.stack([grid.ravel() for grid in self._grids()])
        known = self._root._flattened.get(name)
        if known is not None and np.array_equal(known._lines[0], lines):
            return known
        if known is not None or name in (self._root._names or ()):
            raise InvalidArgumentError(f"{self._root!r} has a dimension {name!r} already")
        groups = self._make_groups([lines], [name], [_override(backend_override)])
        made = self._root._flattened[name] = self._derived([lines], (name,), groups)
        return made

    def _unflatten(
        self,
        dim: int | str,
        mesh_sizes: tuple[int, ...],
        mesh_dim_names: tuple[str, ...],
        backend_override: Mapping[int | str, Any] | None = None,
    ) -> DeviceMesh:
        """Return the mesh with one dimension split into several. All ranks call."""
        at = self._dim(dim)
        labels = _check_names(mesh_dim_names, len(mesh_sizes), "mesh_sizes") or ()
        if math.prod(mesh_sizes) != self.shape[at]:
            raise InvalidArgumentError(
                f"the product of {tuple(mesh_sizes)} is not {self.shape[at]}, the size of "
                f"dimension {dim!r}"
            )
        grids = self._lines[at].reshape(-1, *mesh_sizes)
        lines = [_lines_along(grids, new) for new in range(len(mesh_sizes))]
        overrides = _overrides(backend_override or {}, len(mesh_sizes), labels)
        groups = self._make_groups(lines, labels, overrides) if self._groups else []
        names = self._labels()
        return self._derived(
            [*self._lines[:at], *lines, *self._lines[at + 1 :]],
            [*names[:at], *labels, *names[at + 1 :]],
            [*self._groups[:at], *groups, *self._groups[at + 1 :]],
        )

    def _get_all_submeshes(self, mesh_dim_name: str) -> list[DeviceMesh]:
        """Return one mesh for each line of a dimension."""
        part = self._part(mesh_dim_name)
        inside = [self._rank in line for line in part._lines[0]]
        return [
            self._derived([line[None]], (mesh_dim_name,), part._groups if mine else [])
            for line, mine in zip(part._lines[0], inside, strict=True)
        ]

    def _get_root_mesh(self) -> DeviceMesh:
        """Return the mesh from which this mesh was made."""
        return self._root

    # ---- the grid -------------------------------------------------------------------------

    def _grid_around(self, rank: int) -> Ranks:
        """Return the grid [shape] that a rank is in."""
        grid = np.array(rank)
        for table in self._lines:
            line_of = np.zeros(int(table.max()) + 1, np.int64)
            line_of[table] = np.arange(len(table))[:, None]
            grid = table[line_of[grid]]
        return grid

    def _grids(self) -> list[Ranks]:
        """Return every grid of this kind, by its first rank."""
        grids: list[Ranks] = []
        seen: set[int] = set()
        for rank in sorted(self._lines[0].ravel().tolist()):
            if rank not in seen:
                grids.append(self._grid_around(rank))
                seen.update(grids[-1].ravel().tolist())
        return grids

    def _dim(self, mesh_dim: int | str) -> int:
        if isinstance(mesh_dim, str):
            if mesh_dim not in (self._names or ()):
                known = ", ".join(self._names or ()) or "none"
                raise UnknownNameError(f"{self!r} has no dimension {mesh_dim!r} (it has: {known})")
            return (self._names or ()).index(mesh_dim)
        dim = as_integer(mesh_dim, "mesh_dim")
        if not -self.ndim <= dim < self.ndim:
            raise InvalidArgumentError(f"{self!r} has no dimension {dim}")
        return dim % self.ndim

    def _labels(self) -> Sequence[str]:
        return self._names or [f"dim_{dim}" for dim in range(self.ndim)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        tables = tuple(str(table.tolist()) for table in self._lines)
        return self._device_type, self._names, tables

    def __repr__(self) -> str:
        sizes = map(str, self.shape)
        if self._names is not None:
            sizes = map("=".join, zip(self._names, sizes, strict=True))
        return f"DeviceMesh({self._device_type!r}, {', '.join(sizes)})"


def _lines_along(grids: Ranks, dim: int) -> Ranks:
    """Return the lines [lines, size] along a dimension of some grids [grids, ...]."""
    moved = np.moveaxis(grids, dim + 1, -1)
    return moved.reshape(-1, moved.shape[-1])


def _check_grid(mesh: Any) -> Ranks:
    grid = np.array(mesh.tolist() if hasattr(mesh, "tolist") else mesh)
    if grid.dtype.kind == "O" and all(hasattr(rank, "__index__") for rank in grid.flat):
        ranks = [as_integer(rank, "each of mesh") for rank in grid.flat]
        grid = np.array(ranks, np.int64).reshape(grid.shape)
    if grid.ndim == 0 or grid.size == 0 or grid.dtype.kind not in "iu":
        raise InvalidArgumentError(f"mesh must be an array of ranks, got {mesh!r}")
    size = get_world_size()
    if grid.size > size:
        raise InvalidArgumentError(
            f"a mesh of shape {grid.shape} takes {grid.size} ranks, but the world has {size}"
        )
    if grid.min() < 0 or grid.max() >= size or len(np.unique(grid)) != grid.size:
        raise InvalidArgumentError(
            f"mesh {grid.tolist()} must have ranks of the world (0..{size - 1}), each once"
        )
    return grid.astype(np.int64)


def _check_names(names: Any, ndim: int, what: str) -> tuple[str, ...] | None:
    if names is None:
        return None
    given = tuple(names)
    if len(given) != ndim or len(set(given)) != ndim:
        raise InvalidArgumentError(
            f"mesh_dim_names {given}: expected {ndim} different names, one per entry of {what}"
        )
    return given


def _overrides(
    given: Mapping[int | str, Any], ndim: int, names: Sequence[str] | None
) -> tuple[Override, ...]:
    """Return a pair for each dimension, of entries by number or by name."""
    labels = list(names or [])
    found: dict[int, Override] = {}
    for key, value in given.items():
        dim = labels.index(key) if key in labels else key
        if isinstance(dim, str) or not 0 <= (dim := as_integer(dim, "dim")) < ndim or dim in found:
            raise InvalidArgumentError(
                f"backend_override[{key!r}] names no dimension, or one that is named twice"
            )
        found[dim] = _override(value)
    return tuple(found.get(dim, (None, None)) for dim in range(ndim))


def _override(value: Any) -> Override:
    """Return (backend, pg_options) from a pair, a backend, or options."""
    if isinstance(value, tuple):
        backend, options = value
        return backend, options
    return (value, None) if isinstance(value, str) else (None, value)
