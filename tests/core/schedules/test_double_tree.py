import numpy as np
import pytest

from unisono.core.schedules.algorithms.double_tree import double_tree

SIZES = [*range(2, 70), 127, 128, 129, 599, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 24576]

# (parent, child 0, child 1) of NCCL's ncclGetDtree.
SECOND_OF_8 = {
    0: (1, -1, -1),
    1: (3, 2, 0),
    2: (1, -1, -1),
    3: (7, 5, 1),
    4: (5, -1, -1),
    5: (3, 6, 4),
    6: (5, -1, -1),
    7: (-1, -1, 3),
}
FIRST_OF_8 = {
    0: (-1, -1, 4),
    1: (2, -1, -1),
    2: (4, 1, 3),
    3: (2, -1, -1),
    4: (0, 2, 6),
    5: (6, -1, -1),
    6: (4, 5, 7),
    7: (6, -1, -1),
}
SECOND_OF_7 = {
    0: (5, 6, -1),
    1: (-1, -1, 5),
    2: (3, -1, -1),
    3: (5, 2, 4),
    4: (3, -1, -1),
    5: (1, 3, 0),
    6: (0, -1, -1),
}


def table(tree):
    return {
        rank: (int(tree.parent[rank]), *map(int, tree.children[rank]))
        for rank in range(len(tree.parent))
    }


@pytest.mark.parametrize(
    ("p", "which", "golden"), [(8, 0, FIRST_OF_8), (8, 1, SECOND_OF_8), (7, 1, SECOND_OF_7)]
)
def test_trees_are_those_of_nccl(p, which, golden):
    assert table(double_tree(p, 1)[which]) == golden


@pytest.mark.parametrize("p", SIZES)
def test_properties(p):
    trees = double_tree(p, 3)
    inner = [np.flatnonzero((tree.children >= 0).any(axis=1)) for tree in trees]
    for tree in trees:
        assert tree.height == (p - 1).bit_length()
        below = tree.children >= 0
        # Every rank but the root is the child of its parent, exactly once: the tree spans.
        children = np.sort(tree.children[below])
        root = np.flatnonzero(tree.parent < 0)
        assert len(root) == 1
        assert children.tolist() == np.delete(np.arange(p), root).tolist()
        parents = np.broadcast_to(np.arange(p)[:, None], below.shape)[below]
        assert (tree.parent[tree.children[below]] == parents).all()
        assert (tree.depth[tree.children[below]] == tree.depth[parents] + 1).all()
    children_in_both = sum((tree.children >= 0).sum(axis=1) for tree in trees)
    assert children_in_both.max() <= 2
    shared = np.intersect1d(*inner).tolist()
    if p > 2:
        assert shared == ([0] if p % 2 else [])
    assert [tree.chunk for tree in trees] == [0, 3]
