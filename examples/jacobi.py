"""Solve Laplace's equation on a grid of ranks, and keep its state in one file.

    unisono run --nproc-per-node 4 examples/jacobi.py

The square [0, 1] x [0, 1] has 1 on its left side and 0 on the other sides. In each sweep a point
becomes the mean of its 4 neighbours. Each rank has a block of the points with a border around it,
which it exchanges with the ranks beside it before a sweep. Half-way all ranks write the state to
one file, and read it again. In the end rank 0 repeats the work alone, and compares.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import unisono as dist

POINTS = 60
SWEEPS = 200


def with_boundary(points: int) -> np.ndarray:
    """Return [points + 2, points + 2] the square with its sides."""
    square = np.zeros((points + 2, points + 2))
    square[:, 0] = 1
    return square


def sweep(block: np.ndarray) -> None:
    """Replace each inner point by the mean of its neighbours."""
    block[1:-1, 1:-1] = (
        block[:-2, 1:-1] + block[2:, 1:-1] + block[1:-1, :-2] + block[1:-1, 2:]
    ) / 4


def exchange(block: np.ndarray, mesh: dist.DeviceMesh) -> None:
    """Send the outer points to the neighbours, and receive theirs into the border."""
    inputs = [block[1, 1:-1], block[-2, 1:-1], block[1:-1, 1], block[1:-1, -2]]
    outputs = [block[0, 1:-1], block[-1, 1:-1], block[1:-1, 0], block[1:-1, -1]]
    # At the sides of the square there is no neighbour, and the border keeps its values.
    dist.neighbor_all_to_all(outputs, inputs, mesh, periodic=False)


def shape_of_grid(size: int) -> tuple[int, int]:
    """Return two factors of the number of ranks, as equal as possible."""
    rows = max(n for n in range(1, int(size**0.5) + 1) if size % n == 0)
    return rows, size // rows


def main() -> None:
    """Solve, write, read, go on, and compare."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", shape_of_grid(size))
    at = mesh.get_coordinate()
    edges = [np.linspace(0, POINTS, n + 1).astype(int) for n in mesh.shape]
    starts = [int(edge[i]) for edge, i in zip(edges, at, strict=True)]
    stops = [int(edge[i + 1]) for edge, i in zip(edges, at, strict=True)]
    whole = with_boundary(POINTS)
    block = whole[starts[0] : stops[0] + 2, starts[1] : stops[1] + 2].copy()
    inner = block[1:-1, 1:-1]

    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    state = Path(folder[0], "state.f64")
    for number in range(SWEEPS):
        if number == SWEEPS // 2:
            with dist.open_file(state, "w") as file:
                file.write_block(inner, (POINTS, POINTS), starts)
            inner[...] = 0
            with dist.open_file(state) as file:
                file.read_block(inner, (POINTS, POINTS), starts)
        exchange(block, mesh)
        sweep(block)

    with dist.open_file(state, "w") as file:
        file.write_block(inner, (POINTS, POINTS), starts)
    if rank == 0:
        for _ in range(SWEEPS):
            sweep(whole)
        found = np.fromfile(state).reshape(POINTS, POINTS)
        right = np.array_equal(found, whole[1:-1, 1:-1])
        print(f"{size} ranks as a grid {mesh.shape}: mean {found.mean():.6f}, right: {right}")
        state.unlink()
        state.parent.rmdir()
        if not right:
            sys.exit("WRONG: the blocks differ from the whole")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
