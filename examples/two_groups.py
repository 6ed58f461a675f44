"""Two groups that work at the same time: the even ranks and the odd ranks.

    unisono run --nproc-per-node 4 examples/two_groups.py

Each group adds up the numbers of its own members only. Then ranks 0 and 1, the first of each group,
exchange the two sums. Each broadcasts the sum of the other group in its own group.
"""

import sys

import numpy as np

import unisono as dist


def main() -> None:
    """Sum within the two groups, then give each group the other group's sum."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 2:
        sys.exit("two groups need at least two ranks: unisono run --nproc-per-node 2 ...")

    # Every rank makes both groups, in the same order, although it is a member of only one.
    even = dist.new_group(range(0, size, 2), group_desc="even")
    odd = dist.new_group(range(1, size, 2), group_desc="odd")
    leader = rank % 2
    mine = even if leader == 0 else odd

    own = np.array([10 * rank])
    dist.all_reduce(own, group=mine)

    other = np.zeros_like(own)
    if rank == leader:
        partner = 1 - leader
        sent = dist.isend(own, dst=partner)
        dist.recv(other, src=partner)
        sent.wait()
    dist.broadcast(other, src=leader, group=mine)

    place = f"rank {rank}, number {dist.get_rank(mine)} of {dist.get_world_size(mine)} in its group"
    print(f"{place}: own sum {own[0]}, the other group's {other[0]}")
    sums = [sum(range(0, 10 * size, 20)), sum(range(10, 10 * size, 20))]
    if [own[0], other[0]] != [sums[leader], sums[1 - leader]]:
        sys.exit(f"WRONG: the sums of the even and the odd ranks are {sums}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
