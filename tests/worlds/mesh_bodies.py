"""The same meshes with torch.distributed and with unisono; what is compared is plain data."""

import contextlib

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


def same_made_twice(root):
    return root["dp", "tp"]._flatten("rest") is root["dp", "tp"]._flatten("rest")
