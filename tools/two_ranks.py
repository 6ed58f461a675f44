"""Try an installed unisono: 2 ranks make calls on the native engine, with known results.

unisono run --nproc-per-node 2 tools/two_ranks.py
"""

import numpy as np

import unisono as dist


def main() -> None:
    """Make the calls, and fail if a result is wrong or the engine is not the native engine."""
    dist.init_process_group()
    rank = dist.get_rank()
    group = repr(dist.group.WORLD)
    assert "engine=native" in group, group
    x = np.arange(1000.0) + rank
    dist.all_reduce(x)
    np.testing.assert_array_equal(x, 2 * np.arange(1000.0) + 1)
    both = [None, None]
    dist.all_gather_object(both, {"rank": rank})
    assert both == [{"rank": 0}, {"rank": 1}], both
    print(f"rank {rank} of {dist.get_world_size()} is right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
