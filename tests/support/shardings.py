"""Random shardings of arrays, and what their boxes hold, with NumPy only."""

import numpy as np

from unisono.beyond.boxes import IndexBox, whole


def random_shape(random, most=9):
    return tuple(
        int(n) for n in random.integers(0 if random.random() < 0.1 else 1, most, _dims(random))
    )


def _dims(random):
    return int(random.choice([0, 1, 2, 2, 3, 4]))


def random_tiles(random, box, most=8):
    """Return random boxes that cover a box without overlap."""
    tiles = [box]
    for _ in range(int(random.integers(0, most))):
        at = int(random.integers(len(tiles)))
        tile = tiles[at]
        wide = [dim for dim, n in enumerate(tile.shape) if n > 1]
        if not wide:
            continue
        dim = int(random.choice(wide))
        cut = int(random.integers(tile.begins[dim] + 1, tile.ends[dim]))
        low = IndexBox(tile.begins, (*tile.ends[:dim], cut, *tile.ends[dim + 1 :]))
        high = IndexBox((*tile.begins[:dim], cut, *tile.begins[dim + 1 :]), tile.ends)
        tiles[at : at + 1] = [low, high]
    return tiles


def random_layout(random, shape, ranks, *, complete):
    """Return boxes for each of some ranks; `complete`: together they have every element.

    Some elements are on several ranks; those of one rank do not overlap.
    """
    layout = [[] for _ in ranks]
    for copy in range(int(random.integers(1, 4))):
        for tile in random_tiles(random, whole(shape)):
            if (complete and copy == 0) or random.random() < 0.5:
                boxes = layout[int(random.integers(len(ranks)))]
                if all(tile.common(box) is None for box in boxes):
                    boxes.append(tile)
                elif complete and copy == 0:
                    raise AssertionError("tiles of one copy overlap")
    return layout


def spread(layout, ranks, size):
    """Return a layout of `size` ranks, of which `ranks` have the given boxes."""
    rows = dict(zip(ranks, layout, strict=True))
    return [rows.get(rank, []) for rank in range(size)]


def numbered(shape, dtype=np.int64):
    """Return an array in which each element is its own number."""
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(dtype)


def part_of(array, box):
    return array[box.within(whole(array.shape))]


def random_view(random, box, dtype=np.int64):
    """Return memory of a box's shape in a random layout: strides, order, holes."""
    how, shape = int(random.integers(4)), box.shape
    if how == 0 or not shape:
        return np.full(shape, -1, dtype)
    if how == 1:
        return np.full(shape, -1, dtype, order="F")
    if how == 2:
        return np.full((*shape[:-1], 2 * shape[-1]), -1, dtype)[..., ::2]
    return np.full(shape, -1, dtype)[::-1]
