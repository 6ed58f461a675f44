"""DeviceMesh: against torch's, whose fake backend lets one process be any rank; and its groups."""

import contextlib
import copy
import pickle
import re

import numpy as np
import pytest

import unisono as dist
from unisono.errors import InvalidArgumentError, UnknownNameError
from unisono.testing import run

SHAPE, NAMES = (2, 2, 2), ("pp", "dp", "tp")


def described(mesh):
    """Return what can be asked of a mesh, as plain data."""
    with contextlib.suppress(RuntimeError):
        ranks = mesh.mesh.tolist()
    coordinate = mesh.get_coordinate()
    return {
        "names": mesh.mesh_dim_names,
        "shape": tuple(mesh.shape),
        "ndim": mesh.ndim,
        "size": mesh.size(),
        "sizes": [mesh.size(dim) for dim in range(mesh.ndim)],
        "device": mesh.device_type,
        "ranks": ranks,
        "rank": mesh.get_rank(),
        "coordinate": None if coordinate is None else tuple(coordinate),
        "local": [mesh.get_local_rank(dim) for dim in range(mesh.ndim)],
    }


@pytest.mark.ranks(4, kind="both")
def test_a_mesh_is_copied_pickled_and_entered(rank):
    with dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) as mesh:
        flat = mesh._flatten("all")
    copies = [copy.copy(mesh), copy.deepcopy(mesh), pickle.loads(pickle.dumps(mesh))]
    sent = [pickle.dumps(mesh) if rank == 0 else None]
    dist.broadcast_object_list(sent)
    for each in (*copies, pickle.loads(sent[0])):
        assert each == mesh
        assert described(each) == described(mesh)
        assert each.get_all_groups() == mesh.get_all_groups()
        assert each["all"].get_group() is flat.get_group()
        x = np.array([rank])
        dist.all_reduce(x, group=each["tp"].get_group())
        assert x[0] == (1 if rank < 2 else 5)
    assert pickle.loads(pickle.dumps(mesh["tp"])).get_group() is mesh.get_group("tp")
    dist.barrier()


def meshes(init_device_mesh, DeviceMesh):
    """Return many meshes over eight ranks, by the way they are made."""
    root = init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)
    made = {
        "root": root,
        "plain": init_device_mesh("cpu", (4, 2)),
        "line": DeviceMesh("cpu", range(8)),
    }
    made |= {name: root[name] for name in NAMES}
    made |= {f"{a} {b}": root[a, b] for a, b in (("pp", "dp"), ("pp", "tp"), ("dp", "tp"))}
    made["slice of a slice"] = root["dp", "tp"]["tp"]
    made["all"] = root[NAMES]
    made["flat"] = root["dp", "tp"]._flatten("rest")
    made["flat, by itself"] = root["pp", "dp"]._flatten()
    made["flat, all"] = root._flatten("whole")
    made["cut"] = root._unflatten("tp", (1, 2), ("one", "two"))
    made["cut, slice"] = made["cut"]["pp", "two"]
    made["cut, line"] = made["flat"]._unflatten(0, (2, 2), ("a", "b"))
    made["joined"] = DeviceMesh._concatenate([root["pp"], root["tp"]])
    made["joined, flat"] = DeviceMesh._concatenate([root["pp"], made["flat"]])
    made["one of all"] = root._get_all_submeshes("dp")[made["pp tp"].get_coordinate() and 0]
    return made


def of_torch(rank):
    """Return what torch's meshes say on one rank of eight."""
    import torch.distributed as theirs
    from torch.testing._internal.distributed.fake_pg import FakeStore

    theirs.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        made = meshes(theirs.init_device_mesh, theirs.DeviceMesh)
        return {how: describe(mesh, rank) for how, mesh in made.items()}
    finally:
        theirs.destroy_process_group()


def of_unisono(rank):
    made = meshes(dist.init_device_mesh, dist.DeviceMesh)
    for how, mesh in made.items():
        if mesh.get_coordinate() is not None:
            talk(how, mesh)
    return {how: describe(mesh, rank) for how, mesh in made.items()}


def describe(mesh, rank):
    return described(mesh) if mesh.get_coordinate() is not None else None


def talk(how, mesh):
    """Ask the other ranks of each group where they are: the same place but for this dimension."""
    for dim, group in enumerate(mesh.get_all_groups()):
        mine = np.array(mesh.get_coordinate())
        places = np.zeros((group.size(), mesh.ndim), mine.dtype)
        dist.all_gather_into_tensor(places, mine, group)
        expected = np.tile(mine, (group.size(), 1))
        expected[:, dim] = np.arange(group.size())
        np.testing.assert_array_equal(places, expected, how)
        line = mesh.mesh[tuple(slice(None) if d == dim else c for d, c in enumerate(mine))]
        assert dist.get_process_group_ranks(group) == line.tolist(), how


@pytest.mark.filterwarnings("ignore")
def test_every_rank_sees_the_meshes_that_torch_shows_it():
    pytest.importorskip("torch")
    ours = run(of_unisono, 8)
    for rank in range(8):
        theirs = of_torch(rank)
        assert len(theirs) >= 19
        assert ours[rank].keys() == theirs.keys()
        for how, expected in theirs.items():
            assert ours[rank][how] == expected, f"rank {rank}: {how}"


@pytest.mark.ranks(4)
def test_the_order_of_a_group_is_that_of_the_grid(rank):
    """The order of a group is the order of the grid, which torch would sort."""
    mesh = dist.DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("a", "b"))
    talk("permuted", mesh)
    assert mesh.get_coordinate() == {3: (0, 0), 1: (0, 1), 0: (1, 0), 2: (1, 1)}[rank]
    talk("in another order", mesh["b", "a"])
    assert mesh["b", "a"].mesh.tolist() == [[3, 0], [1, 2]]
    line = dist.DeviceMesh("cpu", np.array([1, 0, 2, 3]))
    assert line.get_group() is not dist.group.WORLD
    talk("line", line)
    whole = dist.DeviceMesh("cpu", range(4))
    assert whole.get_group() is dist.group.WORLD


@pytest.mark.ranks(4)
def test_a_mesh_of_a_part_of_the_world(rank):
    mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("only",))
    if rank < 3:
        talk("part", mesh)
        assert mesh.get_local_rank() == rank
    else:
        assert mesh.get_coordinate() is None
        assert mesh.mesh.tolist() == [0, 1, 2]
        with pytest.raises(InvalidArgumentError, match="has no group for this rank: rank 3 is not"):
            mesh.get_group()
    pair = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("x", "y"))
    assert pair["y"].size("y") == 2
    if rank > 1:
        assert pair.get_coordinate() is None
        assert pair.mesh.tolist() == [[0, 1]]
        with pytest.raises(InvalidArgumentError, match="is in none of the grids"):
            pair["x"].mesh  # noqa: B018  the access is the test


def refuses(*cases):
    for text, call in cases:
        with pytest.raises(InvalidArgumentError, match=re.escape(text)):
            call()


@pytest.mark.ranks(4)
def test_a_mesh_over_groups(rank):
    rows = dist.new_subgroups(2)[0]
    columns = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    mesh = dist.DeviceMesh.from_group(
        [columns, rows], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("out", "in")
    )
    talk("over groups", mesh)
    assert mesh.get_group("in") is rows
    line = dist.DeviceMesh.from_group(columns, "cpu")
    assert line.mesh.tolist() == dist.get_process_group_ranks(columns)
    assert line.get_local_rank() == columns.rank()
    of = dist.DeviceMesh.from_group
    refuses(
        ("several groups need", lambda: of([], "cpu")),
        ("several groups need", lambda: of([rows, columns], "cpu")),
        ("the mesh has",
         lambda: of([rows, columns], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))),
        ("the mesh has", lambda: of(rows, "cpu", [3, 2, 1, 0])),
        ("1 groups for a mesh of 2 dimensions", lambda: of(rows, "cpu", [[0, 1]])),
    )  # fmt: skip


@pytest.mark.ranks(4)
def test_other_backends(rank):
    override = {"a": "gloo", 1: dist_options()}
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names="ab", backend_override=override)
    assert dist.get_backend(mesh.get_group("a")) == "gloo"
    assert "engine=reference" in repr(mesh.get_group("b"))
    assert mesh.get_group("a").name == "mesh_a"
    flat = mesh._flatten("ab", backend_override=("gloo", None))
    assert dist.get_backend(flat.get_group()) == "gloo"
    cut = flat._unflatten("ab", (2, 2), ("c", "d"), {"d": "gloo"})
    assert [dist.get_backend(group) for group in cut.get_all_groups()] == ["unisono", "gloo"]


def dist_options():
    from unisono.lowlevel import CPUOptions

    return CPUOptions(engine="reference")


@pytest.mark.ranks(4)
def test_mistakes(rank):
    count = dist.get_pg_count()
    init, mesh = dist.init_device_mesh, dist.init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    bare = dist.init_device_mesh("cpu", (4,))
    assert dist.get_pg_count() == count, "a dimension that is the world has the default group"
    made, cut = dist.DeviceMesh, mesh._unflatten(0, (2, 2), "bc")
    refuses(
        ("a mesh of shape (5,) takes 5 ranks, but the world has 4", lambda: init("cpu", (5,))),
        ("2 different names, one per entry of",
         lambda: init("cpu", (2, 2), mesh_dim_names=("a",))),
        ("2 different names, one per entry of",
         lambda: init("cpu", (2, 2), mesh_dim_names=("a", "a"))),
        ("without an index", lambda: init("cpu:0", (4,))),
        ("names no dimension", lambda: init("cpu", (4,), backend_override={"b": "gloo"})),
        ("names no dimension", lambda: init("cpu", (4,), backend_override={1: "gloo"})),
        ("must have ranks of the world", lambda: made("cpu", [0, 0])),
        ("must be an array of ranks", lambda: made("cpu", [])),
        ("must be an array of ranks", lambda: made("cpu")),
        ("must be an array of ranks", lambda: made("cpu", [0.5])),
        ("backend_override has 0 entries for 1 dim", lambda: made("cpu", [0], backend_override=())),
        ("without mesh_dim_names cannot be sliced", lambda: bare["a"]),
        ("without mesh_dim_names cannot be flattened", lambda: bare._flatten()),
        ("is not 4, the size of dimension", lambda: mesh._unflatten("a", (2, 3), ("b", "c"))),
        ("has no dimension 1", lambda: mesh.get_group(1)),
        ("slices of one mesh", lambda: made._concatenate([mesh, bare])),
        ("overlap", lambda: made._concatenate([mesh, mesh])),
        ("mesh_dim must be given", lambda: cut.get_group()),
        ("has a dimension 'a' already", lambda: cut["b", "c"]._flatten("a")),
    )  # fmt: skip
    with pytest.raises(UnknownNameError, match=r"has no dimension 'b' \(it has: a\)") as caught:
        mesh["b"]
    assert isinstance(caught.value, KeyError)


@pytest.mark.ranks(4)
def test_equal_and_different_meshes(rank):
    a = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    b = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    assert a == b
    assert hash(a) == hash(b)
    assert a["x"] == b["x"] != a["y"]
    assert a != dist.init_device_mesh("cpu", (2, 2))
    assert a != 3
    assert a[("x", "y")] is a
    assert a["x"].get_group() is a.get_group("x") is a.get_group(0) is a.get_group(-2)
    assert a._flatten("f") is a._flatten("f") is a["f"]
    assert a.get_group("f") is a["f"].get_group()
    assert a["f"]._get_root_mesh() is a
    assert repr(a) == "DeviceMesh('cpu', x=2, y=2)"


def test_a_mesh_makes_the_default_group():
    assert not dist.is_initialized()
    try:
        assert dist.init_device_mesh("cpu", (1,)).get_local_rank() == 0
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
