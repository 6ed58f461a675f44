"""Fit a logistic regression in the tasks of a Spark barrier stage.

    pip install '.[spark]'
    python examples/spark_logistic.py

Each rank reads its share of the rows. One all_reduce per step adds up the gradients of all ranks.
Spark plans one stage for the whole training, not one for each step. At the end the driver fits the
same model alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from pyspark.sql import SparkSession

import unisono as dist
import unisono.spark

RANKS, STEPS, RATE = 2, 100, 0.5
DIGITS = Path(__file__).with_name("digits.csv.gz")


def read(path: str, first: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return every step-th row: its pixels and a 1, and whether its digit is odd."""
    table = np.loadtxt(path, delimiter=",")[first::step]
    return np.hstack([table[:, :-1] / 16, np.ones((len(table), 1))]), table[:, -1] % 2


def gradient(weights: np.ndarray, rows: np.ndarray, odd: np.ndarray) -> np.ndarray:
    """Return the sum over the rows of the gradient of the loss, and their number."""
    error = 1 / (1 + np.exp(-rows @ weights)) - odd
    return np.append(rows.T @ error, len(rows))


def fit(path: str) -> np.ndarray:
    """Return the weights for the rows of all ranks."""
    rows, odd = read(path, dist.get_rank(), dist.get_world_size())
    weights = np.zeros(rows.shape[1])
    for _ in range(STEPS):
        total = gradient(weights, rows, odd)
        dist.all_reduce(total)
        weights -= RATE * total[:-1] / total[-1]
    return weights


def main() -> None:
    """Fit the images of digits in 2 tasks."""
    # Spark's default is another Python, if there is one.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master(f"local[{RANKS}]")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    try:
        results = unisono.spark.run(spark, fit, RANKS, str(DIGITS))
    finally:
        spark.stop()
    rows, odd = read(str(DIGITS), 0, 1)
    alone = np.zeros(rows.shape[1])
    for _ in range(STEPS):
        total = gradient(alone, rows, odd)
        alone -= RATE * total[:-1] / total[-1]
    right = np.mean((rows @ alone > 0) == odd)
    for rank, weights in enumerate(results):
        difference = np.abs(weights - alone).max()
        print(f"rank {rank}: {right:.1%} right, largest difference to one process {difference:.0e}")
        if difference > 1e-9:
            sys.exit("WRONG: the weights differ")


if __name__ == "__main__":
    main()
