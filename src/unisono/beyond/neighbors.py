"""Exchanges with neighbours in a grid or graph of ranks, as MPI's neighbourhood collectives.

    mesh = dist.init_device_mesh("cpu", (2, 4))
    dist.neighbor_all_to_all(halos, borders, mesh, periodic=False)

All ranks of the group call. The ranks agree on the call before an array is written.

Source: MPI 4.1, chapter 8 (MPI_Cart_create, MPI_Dist_graph_create_adjacent) and 8.6
(MPI_Neighbor_alltoallw, MPI_Neighbor_allgatherv).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np

from unisono.core.backends.neighbors import NeighborMessages
from unisono.core.base.deadline import Timeout
from unisono.core.base.integers import as_integers
from unisono.core.base.types import Array
from unisono.core.c10d.arguments import group_rank_of, reporting_bad_arguments
from unisono.core.c10d.device_mesh import DeviceMesh
from unisono.core.c10d.objects.call import ObjectCall
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import Group, current, member_group, require_group, resolve
from unisono.core.operations.keywords import CallKeywords
from unisono.core.operations.work import Work
from unisono.core.schedules.ir import IntArray
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    InvalidArgumentError,
    UsageError,
)

Periodic = bool | Sequence[bool]


class Neighbors:
    """A graph of ranks: the sources and the destinations of this rank's messages.

    A collective call: the ranks compare their lists. A rank may occur several times in a list, and
    may be this rank. The k-th message from one rank to another goes to the k-th of its places.

    Args:
        sources: Global ranks, in the order of the outputs.
        destinations: Global ranks, in the order of the inputs.
        group: The ranks of the graph; the default group if None.
        timeout: Of the call; the group's if None.

    Attributes:
        sources: As given.
        destinations: As given.
        group: The group of the graph.

    Raises:
        InvalidArgumentError: A rank that is not in the group.
        CollectiveMismatchError: A rank sends to a rank that does not receive from it.

    Examples: On rank 1 of 2
        >>> ring = dist.Neighbors(sources=[1 - rank], destinations=[1 - rank])
        >>> outputs = [np.zeros(2)]
        >>> dist.neighbor_all_to_all(outputs, [np.full(2, rank + 5.0)], ring)
        >>> outputs
        [array([5., 5.])]
    """

    def __init__(
        self,
        sources: Sequence[int],
        destinations: Sequence[int],
        group: Group = None,
        *,
        timeout: Timeout | None = None,
    ) -> None:
        self.group = pg = require_group(group)
        with ObjectCall(pg, "Neighbors", timeout, None) as call:
            lists: list[list[int]] = []

            def convert() -> None:
                for name, ranks in (("sources", sources), ("destinations", destinations)):
                    numbers = as_integers(ranks, name)
                    lists.append([group_rank_of(pg, "Neighbors", rank, None) for rank in numbers])

            call.check(convert)
            graph = call.loads_all(call.all_gather(call.pack(lambda: lists)))
            table, unmatched = _graph_table(graph)
            if unmatched:
                kind, a, b = unmatched[0]
                other = "sources" if kind == "destinations" else "destinations"
                raise CollectiveMismatchError(
                    f"{call}: rank {pg.ranks[a]} has rank {pg.ranks[b]} among its {kind}, but "
                    f"rank {pg.ranks[b]} does not have rank {pg.ranks[a]} as often among its "
                    f"{other}",
                    context=call.context(a),
                )
        self.sources, self.destinations = (
            tuple(pg.ranks[rank] for rank in ranks) for ranks in lists
        )
        linked = range(len(self.destinations)), range(len(self.sources))
        self._links = NeighborMessages(table, f"graph of {len(table)} links", linked)

    def __repr__(self) -> str:
        return f"Neighbors(sources={self.sources}, destinations={self.destinations})"


class _NeighborTopology(NamedTuple):
    """Links of a group, and the lengths of this rank's lists.

    Attributes:
        links: The messages.
        places: Entries in each of this rank's lists: inputs, outputs.
    """

    links: NeighborMessages
    places: tuple[int, int]


def neighbor_all_to_all(
    outputs: Sequence[Array | None],
    inputs: Sequence[Array | None],
    neighbors: DeviceMesh | Neighbors,
    *,
    periodic: Periodic = True,
    group: Group = None,
    async_op: bool = False,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Send an array to each neighbour, and receive an array from each.

    In a mesh of d dimensions a rank has 2*d neighbours. Number 2*k is the lower neighbour along
    dimension k. Number 2*k + 1 is the upper one. inputs[i] goes to neighbour i. outputs[i] gets the
    array that neighbour i has for this rank. An entry without a neighbour may be None. It keeps its
    values.

    Args:
        outputs: An array [...] for each neighbour, any layout.
        inputs: Likewise. Sizes may differ. A message must fit the neighbour's output.
        neighbors: A mesh of all ranks of the group, or a graph.
        periodic: Whether the ends of a mesh's dimension are neighbours; one flag, or one for each
            dimension.
        group: The group of a mesh; by default that of a mesh of 1 dimension, else the default
            group. A graph has its own.
        async_op: Return a `Work` at once.
        **how: timeout.

    Raises:
        InvalidArgumentError: A list has a wrong number of arrays, or the mesh does not have the
            ranks of the group.
        CollectiveMismatchError: A rank sends another size or dtype than its neighbour expects.
            The group stays usable, and no array is changed.

    Examples: On rank 1 of 2
        >>> mesh = dist.init_device_mesh("cpu", (2,))
        >>> outputs = [np.zeros(1), np.zeros(1)]
        >>> inputs = [np.array([rank * 10.0]), np.array([rank * 10.0 + 1])]
        >>> dist.neighbor_all_to_all(outputs, inputs, mesh, periodic=False)
        >>> outputs
        [array([1.]), array([0.])]
    """
    name = "neighbor_all_to_all"
    return _exchange(name, outputs, inputs, (neighbors, periodic, group), async_op, how)


def neighbor_all_gather(
    outputs: Sequence[Array | None],
    tensor: Array,
    neighbors: DeviceMesh | Neighbors,
    *,
    periodic: Periodic = True,
    group: Group = None,
    async_op: bool = False,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Send one array to all neighbours, and receive an array from each.

    Args:
        outputs: An array [...] for each neighbour, in the order of `neighbor_all_to_all`.
        tensor: [...] the array to send.
        neighbors: A mesh of all ranks of the group, or a graph.
        periodic: As there.
        group: As there.
        async_op: Return a `Work` at once.
        **how: timeout.

    Raises:
        InvalidArgumentError, CollectiveMismatchError: As there.

    Examples: On rank 1 of 2
        >>> mesh = dist.init_device_mesh("cpu", (2,))
        >>> outputs = [np.zeros(1), np.zeros(1)]
        >>> dist.neighbor_all_gather(outputs, np.array([rank + 7.0]), mesh)
        >>> outputs
        [array([7.]), array([7.])]
    """
    name = "neighbor_all_gather"
    return _exchange(name, outputs, tensor, (neighbors, periodic, group), async_op, how)


def _exchange(
    name: str,
    outputs: Any,
    given: Any,
    where: tuple[DeviceMesh | Neighbors, Periodic, Group],
    async_op: bool,
    how: CallKeywords,
) -> Work | None:
    """Exchange arrays; `given` is a list of inputs, or one array for all neighbours."""
    neighbors, periodic, group = where
    try:
        group = _group_of(neighbors, group)
    except UsageError as error:
        # The other ranks are most likely in a call of this group.
        likely = neighbors.group if isinstance(neighbors, Neighbors) else resolve(group)
        if likely is not None:
            likely.refuse(name, error)
        raise
    if (pg := member_group(group, name, stacklevel=4)) is None:
        return None
    with reporting_bad_arguments(pg, name):
        topology = _topology(neighbors, periodic, pg)
        inputs = given if name == "neighbor_all_to_all" else [given] * topology.places[0]
        lists = (("inputs", inputs), ("outputs", outputs))
        for (label, arrays), number, linked in zip(
            lists, topology.places, topology.links.linked, strict=True
        ):
            if not isinstance(arrays, (list, tuple)):
                raise ArgumentTypeError(f"{label} must be a list, got {type(arrays).__name__}")
            if len(arrays) != number:
                raise InvalidArgumentError(
                    f"{label} has {len(arrays)} entries, expected {number}: one for each neighbour"
                )
            missing = [place for place in linked if arrays[place] is None]
            if missing:
                raise InvalidArgumentError(f"{label} has no array for neighbour {missing[0]}")
    sent, received = topology.links.linked
    work = pg.neighbor_all_to_all(
        [outputs[place] for place in received],
        [inputs[place] for place in sent],
        topology.links,
        async_op=async_op,
        _label=name,
        **how,
    )
    return work if async_op else None


def _group_of(neighbors: DeviceMesh | Neighbors, group: Group) -> Group:
    if isinstance(neighbors, Neighbors):
        if group not in (None, neighbors.group):
            raise InvalidArgumentError("group is not the group of the Neighbors")
        return neighbors.group
    if not isinstance(neighbors, DeviceMesh):
        raise ArgumentTypeError(
            f"neighbors must be a DeviceMesh or Neighbors, got {type(neighbors).__name__}"
        )
    if group is None:
        return neighbors.get_group() if neighbors.ndim == 1 else current().default
    return group


def _topology(
    neighbors: DeviceMesh | Neighbors, periodic: Periodic, group: ProcessGroup
) -> _NeighborTopology:
    """Return the links of a mesh or graph."""
    if isinstance(neighbors, Neighbors):
        if periodic is not True:
            raise InvalidArgumentError("periodic is for a mesh, not for Neighbors")
        places = len(neighbors.destinations), len(neighbors.sources)
        return _NeighborTopology(neighbors._links, places)
    flags = _flags(periodic, neighbors.ndim)
    # A mesh never changes, and is asked before each exchange.
    found = neighbors._topologies.get((flags, group))
    if found is None:
        found = neighbors._topologies[flags, group] = _of_mesh(neighbors, flags, group)
    return found


def _flags(periodic: Any, ndim: int) -> tuple[bool, ...]:
    if isinstance(periodic, bool):
        return (periodic,) * ndim
    flags = tuple(periodic) if np.iterable(periodic) else (periodic,) * ndim
    if not all(isinstance(flag, (int, np.bool_)) for flag in flags):
        raise ArgumentTypeError(
            f"periodic must be a bool, or a bool for each dimension, got {periodic!r}"
        )
    return tuple(map(bool, flags))


def _of_mesh(mesh: DeviceMesh, periodic: Sequence[bool], group: ProcessGroup) -> _NeighborTopology:
    """Return the links of a mesh that has the ranks of a group."""
    if len(periodic) != mesh.ndim:
        raise InvalidArgumentError(f"periodic has {len(periodic)} flags for {mesh.ndim} dimensions")
    ranks = mesh.mesh.ravel().tolist()
    if sorted(ranks) != sorted(group.ranks):
        raise InvalidArgumentError(
            f"{mesh!r} has ranks {ranks}, group '{group.name}' has {list(group.ranks)}",
            hint="pass the group of the mesh's ranks as group=",
        )
    numbers = [group.ranks.index(rank) for rank in ranks]
    return _of_grid(numbers, mesh.shape, periodic, group.rank())


def _of_grid(
    numbers: Sequence[int], shape: tuple[int, ...], periodic: Sequence[bool], rank: int
) -> _NeighborTopology:
    """Return the links of a grid of ranks, for one rank."""
    grid = np.array(numbers).reshape(shape)
    rows = []
    for dim, wraps in enumerate(periodic):
        place = np.arange(shape[dim])
        for side, shift in enumerate((1, -1)):
            has_neighbor = bool(wraps) | (place > 0 if side == 0 else place < shape[dim] - 1)
            ends = [
                np.compress(has_neighbor, g, dim).ravel() for g in (grid, np.roll(grid, shift, dim))
            ]
            # A message to the lower neighbour comes to that rank from its upper neighbour.
            lower, upper = 2 * dim + side, 2 * dim + 1 - side
            columns = np.broadcast_arrays(ends[0], lower, ends[1], upper, dim)
            rows.append(np.column_stack(columns))
    table = np.concatenate(rows)
    linked = (
        sorted(table[table[:, 0] == rank, 1].tolist()),
        sorted(table[table[:, 2] == rank, 3].tolist()),
    )
    table[:, 1] = _among_own(table[:, 0], table[:, 1])
    table[:, 3] = _among_own(table[:, 2], table[:, 3])
    text = f"grid {list(shape)}, periodic {list(periodic)}"
    return _NeighborTopology(
        NeighborMessages(table, text, linked), (2 * len(shape), 2 * len(shape))
    )


def _among_own(ranks: IntArray, places: IntArray) -> IntArray:
    """Return the number of each place among the used places of its rank."""
    order = np.lexsort((places, ranks))
    firsts = np.searchsorted(ranks[order], ranks[order])
    numbers = np.empty_like(places)
    numbers[order] = np.arange(len(order)) - firsts
    return numbers


def _graph_table(graph: Sequence[Any]) -> tuple[IntArray, list[tuple[str, int, int]]]:
    """Return the links of a graph, and the entries (list, rank, other rank) without a match."""
    waiting: dict[tuple[int, int], list[int]] = {}
    for rank, (sources, _) in enumerate(graph):
        for place, source in enumerate(sources):
            waiting.setdefault((source, rank), []).append(place)
    rows, unmatched = [], []
    for rank, (_, destinations) in enumerate(graph):
        for place, target in enumerate(destinations):
            places = waiting.get((rank, target))
            if places:
                rows.append((rank, place, target, places.pop(0), 0))
            else:
                unmatched.append(("destinations", rank, target))
    unmatched += [("sources", b, a) for (a, b), left in waiting.items() if left]
    return np.array(rows, np.int64).reshape(-1, 5), unmatched
