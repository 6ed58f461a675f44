"""Train a neural network on handwritten digits, every batch split over the ranks.

    unisono run --nproc-per-node 4 examples/train_digits.py

Each rank computes the gradient of its share of a batch. One asynchronous all_reduce per layer sums
the gradients of the shares, while the ranks still compute the layers below. At the end rank 0
trains the same network alone and compares the weights. The example uses rich and matplotlib if they
are installed. The source of the images is in digits.txt.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
from display import (
    Epoch,
    charts,
    gallery,
    plot,
    print_epoch,
    print_lines,
    print_table,
    shares,
    with_bar,
)
from perceptron import Images, Perceptron, load_images

import unisono as dist


class Alone:
    """A single rank, which communicates nothing."""

    rank, size = 0, 1

    def start_sum(self, array: np.ndarray) -> None:
        """Leave the array unchanged: it is the sum over one rank."""

    def finish_sums(self) -> None:
        """Return at once."""


class Everyone:
    """All ranks of the world.

    Attributes:
        seconds: Time that this rank has spent on calling and waiting.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.seconds = 0.0
        self._works: list[dist.Work] = []

    def start_sum(self, array: np.ndarray) -> None:
        """Begin to replace the array by its sum over all ranks."""
        with self._timed():
            self._works.append(dist.all_reduce(array, async_op=True))

    def finish_sums(self) -> None:
        """Wait for all sums that have begun."""
        with self._timed():
            for work in self._works:
                work.wait()
        self._works.clear()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


def train(
    net: Perceptron, images: Images, options: argparse.Namespace, ranks: Alone | Everyone
) -> Iterator[int]:
    """Train, and yield the number of each epoch when it is over."""
    for epoch in range(1, options.epochs + 1):
        order = np.random.default_rng(epoch).permutation(len(images))
        for start in range(0, len(images), options.batch):
            batch = order[start : start + options.batch]
            share = images[batch[ranks.rank :: ranks.size]]
            gradients = []
            for gradient in net.backward(share):
                ranks.start_sum(gradient)
                gradients.append(gradient)
            ranks.finish_sums()
            # Shares differ in size if the number of ranks does not divide the batch. A mean of the
            # ranks' means would be wrong then, so the sum is divided by the number of images.
            net.step([gradient / len(batch) for gradient in gradients])
        yield epoch


def evaluate(net: Perceptron, images: Images, ranks: Everyone) -> tuple[float, float]:
    """Return the mean loss and the accuracy; each rank tests its share of the images."""
    sums = net.test(images[ranks.rank :: ranks.size])
    ranks.start_sum(sums)
    ranks.finish_sums()
    loss, accuracy = sums / len(images)
    return loss, accuracy


def same_everywhere(weights: np.ndarray) -> bool:
    """Whether all ranks have the same weights, bit for bit."""
    gathered = [np.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, weights)
    return all(weights.tobytes() == other.tobytes() for other in gathered)


def on_rank_0(number: float) -> list[float]:
    """Return the numbers of all ranks on rank 0, and nothing elsewhere."""
    mine = np.array([number])
    gathered = [np.empty_like(mine) for _ in range(dist.get_world_size() * (dist.get_rank() == 0))]
    dist.gather(mine, gathered or None)
    return [float(array[0]) for array in gathered]


def tolerance(images: Images, options: argparse.Namespace) -> float:
    """Return the largest allowed difference to the weights of a rank that trained alone.

    Both runs add up the same gradients in different orders. (a + b) + (c + d) is not rounded as
    ((a + b) + c) + d is, so the difference is rarely zero. No image's gradient is much larger than
    1. A mean of n such numbers depends on the order of adding by at most n * eps. The learning rate
    gives lr / (1 - momentum) = 1, so a step moves the weights by that much, and the steps add up.
    Training may widen or narrow the difference. Measured, it stays a thousand times below this
    bound. A gradient that is lost or counted twice is visible in the second digit.
    """
    steps = options.epochs * -(-len(images) // options.batch)
    return steps * options.batch * np.finfo(np.float64).eps


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--batch", type=int, default=150, help="images in a batch, all ranks together"
    )
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="fail below this")
    parser.add_argument("--plot", metavar="FILE", help="draw loss and accuracy (with matplotlib)")
    options = parser.parse_args()
    if options.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed")
    return options


def main() -> None:
    """Train on all ranks, then alone, and compare; exit with an error if something is wrong."""
    options = parse_options()
    training, held_out = load_images()
    dist.init_process_group()
    ranks = Everyone()
    # Different weights on every rank, on purpose: the broadcast must make them equal.
    net = Perceptron(np.random.default_rng(ranks.rank))
    for weight in net.weights:
        dist.broadcast(weight, src=0)
    lonely_net = copy.deepcopy(net)

    history = []
    epochs = train(net, training, options, ranks)
    if ranks.rank == 0:
        print(f"{ranks.size} ranks, {dist.engine_info().engine} engine, {len(training)} images")
        epochs = with_bar(epochs, f"training on {ranks.size} ranks", options.epochs)
    steps = -(-len(training) // options.batch)
    began, waited = time.perf_counter(), 0.0
    for epoch in epochs:
        seconds, waiting = time.perf_counter() - began, ranks.seconds - waited
        loss, accuracy = evaluate(net, held_out, ranks)
        history.append(Epoch(loss, accuracy, seconds / steps, waiting / seconds))
        if ranks.rank == 0:
            print_epoch(epoch, history[-1])
        began, waited = time.perf_counter(), ranks.seconds

    equal = same_everywhere(net.flat())
    mean_waiting = on_rank_0(sum(epoch.waiting for epoch in history) / len(history))
    dist.destroy_process_group()
    if ranks.rank != 0:
        return
    seconds = steps * sum(epoch.step_s for epoch in history)
    began = time.perf_counter()
    for _ in train(lonely_net, training, options, Alone()):
        pass
    alone_s = time.perf_counter() - began
    difference = np.abs(net.flat() - lonely_net.flat()).max()
    allowed = tolerance(training, options)
    for lines in (
        charts(history),
        shares(mean_waiting),
        gallery(held_out, net.read(held_out)),
    ):
        print()
        print_lines(lines)
    print()
    print_table(
        {
            "ranks": f"{ranks.size}",
            "test accuracy": f"{accuracy:.2%} (at least {options.min_accuracy:.0%})",
            "training time": f"{seconds:.2f} s, rank 0 alone {alone_s:.2f} s",
            "of it communicating and waiting": f"{mean_waiting[0]:.0%} (rank 0)",
            "weights equal on all ranks": "yes, bit for bit" if equal else "NO",
            "largest difference to rank 0 alone": f"{difference:.1e} (at most {allowed:.1e})",
        }
    )
    if options.plot:
        plot(options.plot, history)
    verdicts = {
        "test accuracy": accuracy >= options.min_accuracy,
        "weights equal on all ranks": equal,
        "difference to rank 0 alone": difference <= allowed,
    }
    if failed := [name for name, right in verdicts.items() if not right]:
        sys.exit(f"FAILED: {', '.join(failed)}")


if __name__ == "__main__":
    main()
