"""Softmax and L2 norm of a vector whose parts lie on different ranks.

    unisono run --nproc-per-node 4 examples/softmax_norm.py

Both need two all_reduces of one number each, however long the vector is: a MAX, which keeps
exponentials and squares from overflowing, and a SUM. Shares may differ in size.
"""

import sys

import numpy as np

import unisono as dist

COUNT = 100_003


def over_all(value: float, op: dist.ReduceOp) -> float:
    """Return the reduction of the values of all ranks."""
    array = np.array([value])
    dist.all_reduce(array, op)
    return float(array[0])


def softmax(share: np.ndarray) -> np.ndarray:
    """Return this rank's share of exp(x_i) / sum_j exp(x_j)."""
    largest = over_all(share.max(initial=-np.inf), dist.ReduceOp.MAX)
    powers = np.exp(share - largest)
    return powers / over_all(powers.sum(), dist.ReduceOp.SUM)


def norm(share: np.ndarray) -> float:
    """Return sqrt(sum_i x_i^2) of the whole vector."""
    largest = over_all(np.abs(share).max(initial=0), dist.ReduceOp.MAX)
    if largest == 0:
        return 0.0
    return largest * np.sqrt(over_all(np.sum((share / largest) ** 2), dist.ReduceOp.SUM))


def main() -> None:
    """Compute both on shares and compare with NumPy on the whole."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    # exp of most of these overflows. Every rank makes the whole, but only to check itself.
    whole = np.random.default_rng(0).normal(1000, 50, COUNT)
    share = np.array_split(whole, size)[rank]
    probabilities = softmax(share)
    # The squares of these numbers overflow.
    length = norm(share * 1e200)

    powers = np.exp(whole - whole.max())
    expected = np.array_split(powers / powers.sum(), size)[rank]
    expected_length = np.linalg.norm(whole) * 1e200
    total = over_all(probabilities.sum(), dist.ReduceOp.SUM)
    print(f"rank {rank}: {len(share)} elements, all probabilities {total:.12f}, norm {length:.9e}")
    # The two ways differ in the order of adding positive numbers: at most COUNT * eps.
    tolerance = COUNT * np.finfo(float).eps
    if not (
        np.allclose(probabilities, expected, rtol=tolerance, atol=0)
        and np.isclose(length, expected_length, rtol=tolerance, atol=0)
    ):
        sys.exit(f"WRONG: NumPy alone finds the norm {expected_length:.9e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
