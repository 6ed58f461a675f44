"""Pass messages round a ring with isend and irecv until every rank has every message.

    unisono run --nproc-per-node 4 examples/ring.py

In every round each rank sends to its right neighbour the message that came from the left in the
round before. After size - 1 rounds every message has visited every rank: an all_gather by hand.
Any number of ranks works; a single rank sends nothing.
"""

import sys

import numpy as np

import unisono as dist


def message_of(rank: int) -> np.ndarray:
    """Return the message that a rank starts with."""
    return np.arange(5.0) + 100 * rank


def main() -> None:
    """Collect the messages of all ranks."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % size, (rank + 1) % size

    collected = {rank: message_of(rank)}
    for round_number in range(1, size):
        outgoing = collected[(rank - round_number + 1) % size]
        incoming = np.empty_like(outgoing)
        # Both calls have begun before this rank waits for either. If all ranks called a blocking
        # send here, a message too long for the buffers between two ranks would wait forever.
        works = [dist.isend(outgoing, dst=right), dist.irecv(incoming, src=left)]
        for work in works:
            work.wait()
        collected[(rank - round_number) % size] = incoming

    print(f"rank {rank}: came by in the order {list(collected)}")
    for sender in range(size):
        if not np.array_equal(collected[sender], message_of(sender)):
            sys.exit(f"WRONG: rank {rank} has {collected[sender]} for the message of {sender}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
