"""Communicators of grids and graphs of ranks, and inter-communicators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from unisono.adapters.mpi4py.collectives import counted
from unisono.adapters.mpi4py.comm import (
    ARRAY_COLLECTIVES,
    OBJECT_COLLECTIVES,
    Comm,
    Intracomm,
    _split,
    collective_calls,
    object_calls,
)
from unisono.adapters.mpi4py.errors import NUMBERS, PROC_NULL, require, translated
from unisono.adapters.mpi4py.handles import Group, WorldRanks
from unisono.adapters.mpi4py.messages import CommState
from unisono.adapters.mpi4py.objects import allgather, bcast, sendrecv
from unisono.adapters.mpi4py.requests import Ongoing, add_calls
from unisono.beyond.neighbors import _graph_table
from unisono.core.backends.neighbors import NeighborMessages
from unisono.core.c10d.new_groups import new_group
from unisono.core.c10d.objects.functions import all_gather_object


class Weights(int):
    """UNWEIGHTED or WEIGHTS_EMPTY."""


UNWEIGHTED, WEIGHTS_EMPTY = Weights(10), Weights(11)


class Neighborhood:
    """Neighbours of the ranks.

    Attributes:
        kind: CART, GRAPH or DIST_GRAPH.
        shape, periods: Of a grid.
        table: Of a graph: (sources, destinations) of each rank.
        weights: Of the edges of this rank, or None.
        links: The messages of an exchange.
    """

    def __init__(self, kind: str, table: Sequence[Any], **words: Any) -> None:
        self.kind = NUMBERS[kind]
        self.shape: list[int] = words.get("shape", [])
        self.periods: list[bool] = words.get("periods", [])
        self.index: list[int] = words.get("index", [])
        self.weights: Any = words.get("weights")
        self.table = [(list(a), list(b)) for a, b in table]

    def edges(self, state: CommState) -> tuple[list[int], list[int]]:
        """Return the ranks that this rank receives from, and sends to; PROC_NULL at an edge."""
        return self.table[state.rank]

    def connect(self, rank: int) -> None:
        """Make the links."""
        used = [tuple([r for r in side if r != PROC_NULL] for side in row) for row in self.table]
        if self.kind == NUMBERS["CART"]:
            rows = self._grid_rows()
        else:
            rows, _ = _graph_table(used)
        mine = self.table[rank]
        linked = tuple([k for k, r in enumerate(side) if r != PROC_NULL] for side in mine)
        text = f"MPI topology of {len(rows)} links"
        self.links = NeighborMessages(rows, text, (linked[1], linked[0]))

    def _grid_rows(self) -> Any:
        """Return the links of a grid: a message to the lower neighbour is its upper one's."""
        rows = []
        for rank, (_, targets) in enumerate(self.table):
            for place, target in enumerate(targets):
                if target == PROC_NULL:
                    continue
                theirs = place ^ 1
                mine_used = sum(t != PROC_NULL for t in targets[:place])
                other_used = sum(t != PROC_NULL for t in self.table[target][0][:theirs])
                rows.append((rank, mine_used, target, other_used, 0))
        return np.array(rows, np.int64).reshape(-1, 5)


def Compute_dims(nnodes: int, dims: Any) -> list[int]:
    """Return a balanced grid of so many ranks; given dimensions that are not 0 stay."""
    given = [0] * dims if isinstance(dims, int) else list(dims)
    fixed = math.prod(d for d in given if d)
    require(nnodes > 0 and all(d >= 0 for d in given), "ERR_ARG")
    require(nnodes % fixed == 0, "ERR_DIMS", f"{nnodes} ranks on {given}")
    free = [k for k, d in enumerate(given) if not d]
    left = nnodes // fixed
    require(free or left == 1, "ERR_DIMS", f"{nnodes} ranks on {given}")
    parts = [1] * len(free)
    factors, number, factor = [], left, 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1 if factor * factor <= number or number == 1 else number - factor
    for factor in reversed(factors):
        at = parts.index(min(parts))
        parts[at] *= factor
    for k, part in zip(free, sorted(parts, reverse=True), strict=True):
        given[k] = part
    return given


class Topocomm(Intracomm):
    """A communicator whose ranks have neighbours."""

    kinds: tuple[str, ...] = ("CART", "GRAPH", "DIST_GRAPH")

    def __new__(cls, comm: Comm | None = None) -> Self:
        self = super().__new__(cls, comm)
        if self.ob is not None:
            kind = None if self.ob.topology is None else self.ob.topology.kind
            if kind not in [NUMBERS[each] for each in cls.kinds]:
                raise TypeError(f"expecting a {cls.__name__}")
        return self

    @property
    def inoutedges(self) -> tuple[list[int], list[int]]:
        """The ranks that this rank receives from, and sends to."""
        sources, targets = self.live.topology.edges(self.live)
        return list(sources), list(targets)

    inedges = property(lambda self: self.inoutedges[0])
    outedges = property(lambda self: self.inoutedges[1])
    indegree = property(lambda self: len(self.inedges))
    outdegree = property(lambda self: len(self.outedges))
    degrees = property(lambda self: (self.indegree, self.outdegree))


add_calls(
    Topocomm,
    collective_calls(
        "Neighbor_allgather Neighbor_allgatherv Neighbor_alltoall Neighbor_alltoallv "
        "Neighbor_alltoallw"
    ),
    "now start plan",
)
add_calls(Topocomm, object_calls("neighbor_allgather neighbor_alltoall"), "now")


class Cartcomm(Topocomm):
    """A grid of ranks."""

    kinds = ("CART",)

    def Get_dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.live.topology.shape)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        """Return dimensions, periods and this rank's coordinates."""
        topology = self.live.topology
        return list(topology.shape), list(topology.periods), self.Get_coords(self.live.rank)

    dim = ndim = property(Get_dim)
    topo = property(Get_topo)
    dims = property(lambda self: self.Get_topo()[0])
    periods = property(lambda self: self.Get_topo()[1])
    coords = property(lambda self: self.Get_topo()[2])

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """Return the rank at coordinates."""
        topology, rank = self.live.topology, 0
        for at, size, wraps in zip(coords, topology.shape, topology.periods, strict=False):
            require(wraps or 0 <= at < size, "ERR_ARG", f"coordinate {at} of {size}")
            rank = rank * size + at % size
        return rank

    def Get_coords(self, rank: int) -> list[int]:
        """Return the coordinates of a rank."""
        require(0 <= rank < self.live.size, "ERR_RANK", str(rank))
        coords: list[int] = []
        for size in reversed(self.live.topology.shape):
            rank, at = divmod(rank, size)
            coords.insert(0, at)
        return coords

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Return the ranks `disp` places before and behind in a dimension."""
        topology, here = self.live.topology, self.Get_coords(self.live.rank)
        require(0 <= direction < len(here), "ERR_ARG", f"direction {direction}")
        found = []
        for place in (here[direction] - disp, here[direction] + disp):
            inside = topology.periods[direction] or 0 <= place < topology.shape[direction]
            coords = [*here[:direction], place, *here[direction + 1 :]]
            found.append(self.Get_cart_rank(coords) if inside else PROC_NULL)
        return found[0], found[1]

    def Sub(self, remain_dims: Sequence[bool]) -> Cartcomm:
        """Return the sub-grid of some dimensions that this rank is in."""
        dims, periods, coords = self.Get_topo()
        color = key = 0
        for at, size, keeps in zip(coords, dims, remain_dims, strict=True):
            if keeps:
                key = key * size + at
            else:
                color = color * size + at
        with translated():
            state = CommState(_split(self.live.group, color, key))
        shape = [d for d, keeps in zip(dims, remain_dims, strict=True) if keeps]
        wraps = [p for p, keeps in zip(periods, remain_dims, strict=True) if keeps]
        return Cartcomm.of(_on_grid(state, shape, wraps))


def _on_grid(state: CommState, shape: Sequence[int], periods: Sequence[Any]) -> CommState:
    shape, wraps = list(shape), [bool(p) for p in periods]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    table = []
    for rank in range(math.prod(shape)):
        row = []
        for stride, size, wrap in zip(strides, shape, wraps, strict=True):
            place = rank // stride % size
            for to in (place - 1, place + 1):
                inside = wrap or 0 <= to < size
                row.append(rank + (to % size - place) * stride if inside else PROC_NULL)
        table.append((row, row))
    state.topology = Neighborhood("CART", table, shape=shape, periods=wraps)
    state.topology.connect(state.rank)
    return state


class Graphcomm(Topocomm):
    """A graph of ranks that all ranks know."""

    kinds = ("GRAPH",)

    def Get_dims(self) -> tuple[int, int]:
        """Return the numbers of ranks and edges."""
        index, edges = self.Get_topo()
        return len(index), len(edges)

    def Get_topo(self) -> tuple[list[int], list[int]]:
        """Return the ends of the ranks' edges, and the edges."""
        topology = self.live.topology
        return list(topology.index), [rank for _, row in topology.table for rank in row]

    def Get_neighbors(self, rank: int) -> list[int]:
        """Return the neighbours of a rank."""
        return list(self.live.topology.table[rank][1])

    def Get_neighbors_count(self, rank: int) -> int:
        """Return how many neighbours a rank has."""
        return len(self.Get_neighbors(rank))

    dims, topo = property(Get_dims), property(Get_topo)
    nnodes = property(lambda self: self.Get_dims()[0])
    nedges = property(lambda self: self.Get_dims()[1])
    index = property(lambda self: self.Get_topo()[0])
    edges = property(lambda self: self.Get_topo()[1])
    neighbors = property(lambda self: self.Get_neighbors(self.rank))
    nneighbors = property(lambda self: len(self.neighbors))


class Distgraphcomm(Topocomm):
    """A graph of ranks of which each rank knows a part."""

    kinds = ("DIST_GRAPH",)

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        """Return how many ranks send to this one, and receive, and whether there are weights."""
        return self.indegree, self.outdegree, self.live.topology.weights is not None

    def Get_dist_neighbors(self) -> tuple[list[int], list[int], Any]:
        """Return sources, destinations and weights."""
        weights = self.live.topology.weights
        return *self.inoutedges, None if weights is None else tuple(map(list, weights))


def _weights(given: Any, ranks: Sequence[int]) -> list[int] | None:
    if given is None or given is UNWEIGHTED:
        return None
    if given is WEIGHTS_EMPTY:
        if ranks:
            raise ValueError("WEIGHTS_EMPTY for edges")
        return []
    return [int(w) for w in given]


def create_cart(
    self: Intracomm, dims: Sequence[int], periods: Any = None, reorder: bool = False
) -> Cartcomm:
    """Return a grid of ranks; ranks outside get the null communicator."""
    shape = [int(d) for d in dims]
    if periods is None or isinstance(periods, (bool, int)):
        wraps = [bool(periods)] * len(shape)
    else:
        wraps = [bool(p) for p in periods]
    if len(wraps) != len(shape):
        raise ValueError(f"expecting {len(shape)} items, got {len(wraps)}")
    state = self.live
    count = math.prod(shape)
    require(all(d > 0 for d in shape), "ERR_DIMS", str(shape))
    require(count <= state.size, "ERR_TOPOLOGY", f"{count} places for {state.size} ranks")
    with translated():
        group = _split(state.group, 0 if state.rank < count else -1, state.rank)
    return Cartcomm.of(None if group is None else _on_grid(CommState(group), shape, wraps))


def create_graph(
    self: Intracomm, index: Sequence[int], edges: Sequence[int], reorder: bool = False
) -> Graphcomm:
    """Return a graph of ranks."""
    ends = [int(i) for i in index]
    # Some programs put a 0 first.
    if ends and ends[0] == 0 and len(ends) > 1 and len(ends) > self.live.size:
        ends = ends[1:]
    state = self.live
    with translated():
        group = _split(state.group, 0 if state.rank < len(ends) else -1, state.rank)
    if group is None:
        return Graphcomm.of(None)
    rows = [list(edges[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    made = CommState(group)
    made.topology = Neighborhood("GRAPH", [(row, row) for row in rows], index=ends)
    made.topology.connect(made.rank)
    return Graphcomm.of(made)


def _dist_graph(self: Intracomm, row: tuple[list[int], list[int]], weights: Any) -> Distgraphcomm:
    with translated():
        made = CommState(_split(self.live.group, 0, self.live.rank))
        rows: list[Any] = [None] * made.size
        all_gather_object(rows, row, made.group)
    made.topology = Neighborhood("DIST_GRAPH", rows, weights=weights)
    made.topology.connect(made.rank)
    return Distgraphcomm.of(made)


def create_dist_graph_adjacent(
    self: Intracomm,
    sources: Any,
    destinations: Any,
    sourceweights: Any = None,
    destweights: Any = None,
    info: Any = None,
    reorder: bool = False,
) -> Distgraphcomm:
    """Return a graph of which each rank knows its own edges."""
    row = list(sources or []), list(destinations or [])
    incoming, outgoing = _weights(sourceweights, row[0]), _weights(destweights, row[1])
    weights = None if incoming is None and outgoing is None else (incoming or [], outgoing or [])
    return _dist_graph(self, row, weights)


def create_dist_graph(
    self: Intracomm,
    sources: Sequence[int],
    degrees: Sequence[int],
    destinations: Sequence[int],
    weights: Any = None,
    info: Any = None,
    reorder: bool = False,
) -> Distgraphcomm:
    """Return a graph whose edges any ranks give."""
    state = self.live
    if isinstance(degrees, int):
        degrees = [degrees] * len(sources)
    given = _weights(weights, list(destinations))
    edges, at = [], 0
    for source, degree in zip(sources, degrees, strict=True):
        for k in range(at, at + degree):
            edges.append((source, destinations[k], None if given is None else given[k]))
        at += degree
    everything: list[Any] = [None] * state.size
    with translated():
        all_gather_object(everything, (edges, given is not None), state.group)
    flat = [edge for each, _ in everything for edge in each]
    mine_in = [e for e in flat if e[1] == state.rank]
    mine_out = [e for e in flat if e[0] == state.rank]
    row = [e[0] for e in mine_in], [e[1] for e in mine_out]
    has = any(flag for _, flag in everything)
    pair = ([e[2] for e in mine_in], [e[2] for e in mine_out]) if has else None
    return _dist_graph(self, row, pair)


def cart_map(self: Intracomm, dims: Sequence[int], periods: Any = None) -> int:
    """Return this rank's place in a grid."""
    inside = self.live.rank < math.prod(dims)
    return int(self.live.rank) if inside else NUMBERS["UNDEFINED"]


def graph_map(self: Intracomm, index: Sequence[int], edges: Sequence[int]) -> int:
    """Return this rank's place in a graph."""
    count = len(index) - (len(index) > 1 and index[0] == 0)
    return int(self.live.rank) if self.live.rank < count else NUMBERS["UNDEFINED"]


# ---- inter-communicators ----------------------------------------------------------------------


class InterState(CommState):
    """The object of an inter-communicator.

    Attributes:
        inner: Carries the messages of collective calls.
        is_first: Whether this side comes first in its groups.
        calls: Number of collective calls, also of those that were refused; `now` shares it.
    """

    def __init__(self, group: Any, remote: Sequence[int]) -> None:
        mine = tuple(group.ranks)
        first, second = (mine, tuple(remote)) if min(mine) < min(remote) else (tuple(remote), mine)
        both = [*first, *second]
        made = [new_group(both, use_local_synchronization=True, sort_ranks=False) for _ in "ab"]
        super().__init__(group, made[0], [both.index(r) for r in remote])
        self.inner, self.is_first, self.calls = made[1], mine == first, [0]

    def duplicate(self) -> InterState:
        """Return another one of the same ranks."""
        return InterState(_split(self.group, 0, self.rank), self.remote)

    def close(self) -> None:
        """End the groups."""
        from unisono.adapters.mpi4py.messages import destroy

        super().close()
        if self.inner.backends:
            destroy(self.inner)


class Intercomm(Comm):
    """A communicator whose messages go to another group."""

    def __new__(cls, comm: Comm | None = None) -> Self:
        self = super().__new__(cls, comm)
        if self.ob is not None and not self.ob.is_inter:
            raise TypeError("expecting an inter-communicator")
        return self

    def Get_remote_group(self) -> Group:
        """Return the other group."""
        return Group.of(WorldRanks(self.live.remote))

    def Get_remote_size(self) -> int:
        """Return the number of ranks of the other group."""
        return len(self.live.peers)

    remote_group, remote_size = property(Get_remote_group), property(Get_remote_size)

    def Merge(self, high: bool = False) -> Intracomm:
        """Return a communicator of both groups; the one with `high` comes last."""
        state = self.live
        with translated():
            flags: list[Any] = [None] * state.channel.size()
            all_gather_object(flags, (bool(high), state.is_first), state.channel)
            first = {is_first: flag for flag, is_first in flags}
            # With equal flags the group of the lowest rank comes first.
            mine = bool(high) if first[True] != first[False] else not state.is_first
            key = (state.channel.size() if mine else 0) + state.rank
            made = CommState(_split(state.channel, 0, key))
        return Intracomm.of(made)

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        """Return an inter-communicator of the ranks of one color on both sides."""
        state = self.live
        color = -1 if color == NUMBERS["UNDEFINED"] else color
        theirs = allgather(state, (color, key, state.group.ranks[state.rank])).value
        others = [r for c, _, r in sorted(theirs, key=lambda e: e[1]) if c == color]
        return self._between(color, key, others)

    def Create(self, group: Group) -> Comm:
        """Return an inter-communicator of a group on each side."""
        state, ranks = self.live, tuple(group.live)
        me = state.group.ranks[state.rank]
        others = max(allgather(state, ranks).value, key=len, default=())
        return self._between(*((0, ranks.index(me)) if me in ranks else (-1, 0)), others)

    def _between(self, color: int, key: int, others: Sequence[int]) -> Intercomm:
        """Return an inter-communicator of the ranks of a color here, and of others."""
        with translated():
            made = _split(self.live.group, color, key)
            return Intercomm.of(None if made is None or not others else InterState(made, others))

    def _plain(self, state: Any) -> Comm:
        return Intercomm.of(state)


def create_intercomm(
    self: Intracomm, local_leader: int, peer_comm: Intracomm, remote_leader: int, tag: int = 0
) -> Intercomm:
    """Return an inter-communicator of this group and the one of the other leader."""
    state = self.live
    require(0 <= local_leader < state.size, "ERR_RANK")
    call = Ongoing()
    if state.rank == local_leader:
        mine = tuple(state.group.ranks)
        call = sendrecv(peer_comm.live, mine, remote_leader, tag, None, remote_leader, tag)
        call.wait()
    ranks = bcast(state, call.value, local_leader).value
    with translated():
        return Intercomm.of(InterState(_split(state.group, 0, state.rank), ranks))


@classmethod  # type: ignore[misc]
def _create_from_groups(
    cls: Any,
    local_group: Group,
    local_leader: int,
    remote_group: Group,
    remote_leader: int,
    stringtag: str = "",
    info: Any = None,
    errhandler: Any = None,
) -> Intercomm:
    """Return an inter-communicator of two groups."""
    local = Intracomm.Create_from_group(local_group)
    with translated():
        return Intercomm.of(InterState(local.live.group, remote_group.live))


Intercomm.Create_from_groups = _create_from_groups  # type: ignore[attr-defined]
for _name, _function in {
    "Create_cart": create_cart,
    "Create_graph": create_graph,
    "Create_dist_graph_adjacent": create_dist_graph_adjacent,
    "Create_dist_graph": create_dist_graph,
    "Create_intercomm": create_intercomm,
    "Cart_map": cart_map,
    "Graph_map": graph_map,
}.items():
    _function.__name__ = _name
    setattr(Intracomm, _name, _function)


add_calls(Intercomm, {k: counted(f) for k, f in ARRAY_COLLECTIVES.items()}, "now start plan")
add_calls(Intercomm, {k: counted(f) for k, f in OBJECT_COLLECTIVES.items()}, "now")
