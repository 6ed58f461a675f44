"""neighbor_all_to_all and neighbor_all_gather, against what coordinates and lists say."""

import itertools

import numpy as np
import pytest

import unisono as dist
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    InvalidArgumentError,
)


def neighbors_of(rank, shape, periodic):
    """Return (rank or None) below and above along each dimension, from coordinates alone."""
    grid = np.arange(np.prod(shape)).reshape(shape)
    at = np.unravel_index(rank, shape)
    found = []
    for dim, step in itertools.product(range(len(shape)), (-1, 1)):
        there = list(at)
        there[dim] += step
        if not periodic[dim] and not 0 <= there[dim] < shape[dim]:
            found.append(None)
        else:
            found.append(int(grid[tuple(np.mod(there, shape))]))
    return found


def block(sender, place, size, dtype=np.float64):
    """Return what `sender` sends to its neighbour `place`."""
    return (np.arange(size) + 100 * sender + 10 * place).astype(dtype)


SHAPES = {1: [(1,), (1, 1)], 2: [(2,), (1, 2)], 3: [(3,), (3, 1)], 4: [(4,), (2, 2), (1, 2, 2)]}


def check_grid(shape, periodic, sizes):
    """Exchange over a grid; `sizes` has the elements along each dimension."""
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", shape)
    known = neighbors_of(rank, shape, periodic)
    for dim in range(len(shape)):
        ends = [dist.PROC_NULL if peer is None else peer for peer in known[2 * dim : 2 * dim + 2]]
        assert mesh.shift(dim, periodic=periodic[dim]) == tuple(ends)
    inputs = [
        None if peer is None else block(rank, i, sizes[i // 2]) for i, peer in enumerate(known)
    ]
    outputs = [np.full(sizes[i // 2], -1.0) for i in range(len(known))]
    dist.neighbor_all_to_all(outputs, inputs, mesh, periodic=periodic)
    for place, (peer, output) in enumerate(zip(known, outputs, strict=True)):
        # What came from below was sent to the neighbour above, and the reverse.
        size = sizes[place // 2]
        expected = np.full(size, -1.0) if peer is None else block(peer, place ^ 1, size)
        np.testing.assert_array_equal(output, expected)
    mine = np.array([rank, rank + 0.5])
    outputs = [np.full(2, -1.0) for _ in known]
    work = dist.neighbor_all_gather(outputs, mine, mesh, periodic=periodic, async_op=True)
    work.wait()
    for peer, output in zip(known, outputs, strict=True):
        np.testing.assert_array_equal(output, [-1, -1] if peer is None else [peer, peer + 0.5])


@pytest.mark.ranks(1, 2, 3, 4, kind="both")
def test_grids(rank):
    size = dist.get_world_size()
    for shape in SHAPES[size]:
        for periodic in itertools.product((True, False), repeat=len(shape)):
            check_grid(shape, periodic, [3] * len(shape))
            check_grid(shape, periodic, [dim + 2 for dim in range(len(shape))])


@pytest.mark.ranks(3, kind="processes", engine="reference")
def test_grid_on_the_reference_engine(rank):
    check_grid((3, 1), (True, False), [4, 5])


@pytest.mark.ranks(4, kind="both")
def test_sizes_may_differ_from_rank_to_rank(rank):
    mesh = dist.init_device_mesh("cpu", (4,))
    peers = neighbors_of(rank, (4,), (True,))
    # The border between two ranks has as many elements as the sum of both ranks.
    inputs = [block(rank, place, rank + peer) for place, peer in enumerate(peers)]
    outputs = [np.zeros((rank + peer, 2))[:, 0] for peer in peers]
    for _ in range(2):
        dist.neighbor_all_to_all(outputs, inputs, mesh)
    for place, peer in enumerate(peers):
        np.testing.assert_array_equal(outputs[place], block(peer, place ^ 1, rank + peer))


@pytest.mark.ranks(4, kind="both")
def test_random_graphs(rank):
    size = dist.get_world_size()
    for seed in range(6):
        rng = np.random.default_rng(seed)
        links = [(int(a), int(b)) for a, b in rng.integers(0, size, (rng.integers(0, 12), 2))]
        sources = [a for a, b in links if b == rank]
        destinations = [b for a, b in links if a == rank]
        graph = dist.Neighbors(sources, destinations)
        sizes = rng.integers(0, 5, len(links)).tolist()
        mine = [i for i, (a, _) in enumerate(links) if a == rank]
        taken = [i for i, (_, b) in enumerate(links) if b == rank]
        outputs = [np.full(sizes[i], -1, np.int32) for i in taken]
        inputs = [block(rank, i, sizes[i], np.int32) for i in mine]
        dist.neighbor_all_to_all(outputs, inputs, graph)
        for output, i in zip(outputs, taken, strict=True):
            np.testing.assert_array_equal(output, block(links[i][0], i, sizes[i], np.int32))


@pytest.mark.ranks(4, kind="threads")
def test_lines_of_a_mesh(rank):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    output = [np.zeros(1), np.zeros(1)]
    dist.neighbor_all_gather(output, np.array([float(rank)]), mesh["x"])
    np.testing.assert_array_equal(output, [[(rank + 2) % 4]] * 2)
    with pytest.raises(InvalidArgumentError, match=r"has ranks .*, group"):
        dist.neighbor_all_gather(output, np.zeros(1), mesh["x"], group=mesh["y"].get_group())


@pytest.mark.ranks(3, kind="both")
def test_a_wrong_size_is_named_on_all_ranks_and_no_array_changes(rank):
    mesh = dist.init_device_mesh("cpu", (3,))
    outputs = [np.full(2 + (rank == 1), -1.0), np.full(2, -1.0)]
    inputs = [np.zeros(2), np.zeros(2)]
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.neighbor_all_to_all(outputs, inputs, mesh)
    text = "rank 0 sends 2 float64 to rank 1, which expects 3 float64"
    assert text in str(caught.value)
    assert caught.value.context.peers == (0, 1)
    assert all((output == -1).all() for output in outputs)
    outputs[0] = np.zeros(2)
    dist.neighbor_all_to_all(outputs, inputs, mesh)
    assert (outputs[0] == 0).all()


@pytest.mark.ranks(2, kind="both")
def test_a_wrong_dtype_is_named(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    kind = (np.float64, np.int64)[rank]
    with pytest.raises(CollectiveMismatchError, match="sends 1 int64 to rank 0, which expects 1 f"):
        dist.neighbor_all_gather([np.zeros(1, kind), np.zeros(1, kind)], np.zeros(1, kind), mesh)


@pytest.mark.ranks(2, kind="both")
def test_wrong_lists_are_reported_to_the_other_rank(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    good = [np.zeros(1), np.zeros(1)]
    cases = [
        (
            [np.zeros(1)],
            InvalidArgumentError,
            "outputs has 1 entries, expected 2: one for each neighbour",
        ),
        ([np.zeros(1), None], InvalidArgumentError, "outputs has no array for neighbour 1"),
        (np.zeros(2), ArgumentTypeError, "outputs must be a list"),
    ]
    for outputs, kind, text in cases:
        kind, text = (kind, text) if rank == 0 else (CollectiveMismatchError, text)
        with pytest.raises(kind, match=text):
            dist.neighbor_all_to_all(outputs if rank == 0 else good, good, mesh)
    graph = dist.Neighbors([], [])
    with pytest.raises(InvalidArgumentError, match="periodic is for a mesh, not for Neighbors"):
        dist.neighbor_all_to_all([], [], graph, periodic=False)
    with pytest.raises(InvalidArgumentError, match="group is not the group of the Neighbors"):
        dist.neighbor_all_to_all([], [], graph, group=dist.new_group())
    with pytest.raises(ArgumentTypeError, match="neighbors must be a DeviceMesh or Neighbors, got"):
        dist.neighbor_all_to_all([], [], [1 - rank])
    with pytest.raises(InvalidArgumentError, match="periodic has 2 flags for 1 dimensions"):
        dist.neighbor_all_to_all(good, good, mesh, periodic=(True, False))


@pytest.mark.ranks(2, kind="both")
def test_flags_of_dimensions(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    for periodic in (False, (False,), np.array([False]), np.False_):
        outputs = [np.full(1, -1.0), np.full(1, -1.0)]
        dist.neighbor_all_gather(outputs, np.array([float(rank)]), mesh, periodic=periodic)
        np.testing.assert_array_equal(outputs, [[-1], [1]] if rank == 0 else [[0], [-1]])
    good = [np.zeros(1), np.zeros(1)]
    kind = ArgumentTypeError if rank == 0 else CollectiveMismatchError
    for wrong in ("no", None, [[True]], 0.5):
        periodic = wrong if rank == 0 else True
        with pytest.raises(kind, match="periodic must be a bool, or a bool for each dimension"):
            dist.neighbor_all_to_all(good, good, mesh, periodic=periodic)
    with pytest.raises(
        CollectiveMismatchError, match=r"rank 0 called \w+\(.*grid \[2\], periodic \[False\]"
    ):
        dist.neighbor_all_to_all(good, good, mesh, periodic=rank != 0)
    with pytest.raises(ArgumentTypeError, match=r"steps must be an integer, got 1\.5"):
        mesh.shift(0, 1.5)


@pytest.mark.ranks(2, kind="both")
def test_a_bad_array_is_named_by_its_neighbour_and_call(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    outputs = [np.zeros(1), np.zeros(1)]
    outputs[1 - rank] = np.zeros(1, np.int32)  # the only one with a neighbour
    with pytest.raises(InvalidArgumentError, match=rf"outputs\[{1 - rank}\] has dtype int32"):
        dist.neighbor_all_gather(outputs, np.zeros(1), mesh, periodic=False)
    if rank == 1:
        outputs = [np.zeros(1), np.zeros(1)]
    kind = InvalidArgumentError if rank == 0 else CollectiveMismatchError
    with pytest.raises(kind, match="neighbor_all_gather") as caught:
        dist.neighbor_all_gather(outputs, np.zeros(1), mesh)
    assert "neighbor_all_to_all" not in str(caught.value)


@pytest.mark.ranks(4, kind="both")
def test_inputs_that_are_outputs(rank):
    mesh = dist.init_device_mesh("cpu", (4,))
    lower, upper = (rank - 1) % 4, (rank + 1) % 4
    for order in (1, -1):
        arrays = [np.full(1000, 10.0 * rank), np.full(1000, 10.0 * rank + 1)]
        outputs = arrays[::order]
        dist.neighbor_all_to_all(outputs, arrays, mesh, async_op=True).wait()
        assert (outputs[0] == 10 * lower + 1).all()
        assert (outputs[1] == 10 * upper).all()
    square = np.arange(16.0).reshape(4, 4) + 100 * rank
    dist.neighbor_all_to_all([square[:, 0], square[::-1, 1]], [square[0], square[1]], mesh)
    np.testing.assert_array_equal(square[:, 0], np.arange(4) + 4 + 100 * lower)
    np.testing.assert_array_equal(square[::-1, 1], np.arange(4) + 100 * upper)


@pytest.mark.ranks(3, kind="both")
def test_a_graph_whose_lists_do_not_fit(rank):
    sources, destinations = ([2], [1]) if rank != 1 else ([0], [])
    if rank == 2:
        sources, destinations = [], [0]
    dist.Neighbors(sources, destinations)
    text = (
        "rank 1 has rank 2 among its destinations, but rank 2 does not have rank 1 as often among "
        "its sources"
    )
    with pytest.raises(CollectiveMismatchError, match=text):
        dist.Neighbors(sources, [2] if rank == 1 else destinations)
    wrong = pytest.raises(InvalidArgumentError if rank == 0 else CollectiveMismatchError, match="7")
    with wrong:
        dist.Neighbors([7] if rank == 0 else sources, destinations)


@pytest.mark.ranks(2, kind="threads")
def test_a_late_neighbour_is_named(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    aside, done = dist.new_group(), np.zeros(1)
    if rank == 0:
        outputs = [np.zeros(1), np.zeros(1)]
        text = r"neighbor_all_gather .*rank 1 (never entered it|.*did not answer)"
        with pytest.raises(TimeoutError, match=text):
            dist.neighbor_all_gather(outputs, np.zeros(1), mesh, timeout=0.2)
        dist.send(done, 1, aside)
    else:
        dist.recv(done, 0, aside)
