"""Find a learning rate in Ray actors; the best actor hands its weights to the others.

    pip install '.[ray]'
    python examples/ray_tuning.py

Each actor trains the network of train_digits.py with a learning rate of its own. After each round
the actors compare their accuracies. All actors go on from the weights of the best actor, with
learning rates around its rate (population-based training). The weights move from actor to actor:
no object store and no driver is in between.
"""

from __future__ import annotations

import sys

import numpy as np
import ray
from perceptron import LEARNING_RATE, Perceptron, load_images

import unisono as dist
import unisono.ray

RATES = (0.003, 0.03, 0.3)
SPREAD = (1.0, 0.5, 2.0)
ROUNDS, BATCH = 4, 50


@ray.remote
class Trainer:
    """A network and its learning rate."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.model = Perceptron(np.random.default_rng(0))
        self.images, self.tests = load_images()

    def train(self) -> float:
        """Train for an epoch; return the accuracy."""
        for start in range(0, len(self.images), BATCH):
            batch = self.images[start : start + BATCH]
            factor = self.rate / LEARNING_RATE / len(batch)
            self.model.step([factor * gradient for gradient in self.model.backward(batch)])
        return float(self.model.test(self.tests)[1] / len(self.tests))


def play_round(trainer: Trainer) -> tuple[list[float], list[float], float]:
    """Train, and take the weights of the best actor; return rates, accuracies and a check sum."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = np.array([trainer.rate, trainer.train()])
    table = np.empty((size, 2))
    dist.all_gather_into_tensor(table, mine)
    rates, accuracies = table.T
    best = int(accuracies.argmax())
    for weight in trainer.model.weights:
        dist.broadcast(weight, src=best)
    # The best actor keeps its rate, the others try rates around it.
    trainer.rate = rates[best] * SPREAD[(rank - best) % size]
    return rates.tolist(), accuracies.tolist(), float(trainer.model.flat().sum())


def main() -> None:
    """Run 4 rounds on 3 actors."""
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 * 2**20)
    actors = [Trainer.remote(rate) for rate in RATES]
    best = 0.0
    with unisono.ray.init_group(actors) as group:
        for number in range(ROUNDS):
            results = group.run(play_round)
            rates, accuracies, _ = results[0]
            best = max(accuracies)
            pairs = zip(rates, accuracies, strict=True)
            text = ", ".join(f"rate {rate:.4f} reads {part:.1%}" for rate, part in pairs)
            print(f"round {number}: {text}")
            if len({checksum for _, _, checksum in results}) != 1:
                sys.exit("WRONG: the actors have different weights")
    ray.shutdown()
    if best < 0.9:
        sys.exit(f"WRONG: the best network reads only {best:.1%}")


if __name__ == "__main__":
    main()
