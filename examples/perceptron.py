"""The network and the images of train_digits.py: NumPy only, no communication."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

# Its source and licence: digits.txt.
IMAGES = Path(__file__).with_name("digits.csv.gz")
LAYERS = (64, 512, 256, 10)
LEARNING_RATE = 0.1
MOMENTUM = 0.9
TEST_IMAGES = 297


class Images:
    """Pictures of digits.

    Attributes:
        pixels: [images, 64] between 0 and 1.
        digits: [images] the digit that each shows.
    """

    def __init__(self, pixels: np.ndarray, digits: np.ndarray) -> None:
        self.pixels = pixels
        self.digits = digits

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, which: slice | np.ndarray) -> Images:
        return Images(self.pixels[which], self.digits[which])


def load_images() -> tuple[Images, Images]:
    """Return 1,500 images to train with and 297 to test with."""
    table = np.loadtxt(IMAGES, delimiter=",", dtype=int)
    order = np.random.default_rng(0).permutation(len(table))
    images = Images(table[:, :-1] / 16, table[:, -1])[order]
    return images[TEST_IMAGES:], images[:TEST_IMAGES]


class Perceptron:
    """Layers with tanh between them.

    Attributes:
        weights: One matrix [inputs + 1, outputs] per layer; its last row is the bias.
        velocities: The last change of each weight.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.weights = [
            rng.normal(0, inputs**-0.5, (inputs + 1, outputs))
            for inputs, outputs in pairwise(LAYERS)
        ]
        self.velocities = [np.zeros_like(weight) for weight in self.weights]

    def forward(self, pixels: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Return what goes into each layer, and the logarithm of each digit's probability."""
        inputs, outputs = [], pixels
        for weight in self.weights:
            inputs.append(np.hstack([outputs, np.ones((len(pixels), 1))]))
            scores = inputs[-1] @ weight
            outputs = np.tanh(scores)
        return inputs, scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)

    def backward(self, images: Images) -> Iterator[np.ndarray]:
        """Yield each layer's gradient of the loss, last layer first, summed over the images."""
        inputs, logarithms = self.forward(images.pixels)
        delta = np.exp(logarithms)
        delta[np.arange(len(images)), images.digits] -= 1
        for weight, into in zip(reversed(self.weights), reversed(inputs), strict=True):
            yield into.T @ delta
            delta = delta @ weight[:-1].T * (1 - into[:, :-1] ** 2)

    def step(self, gradients: list[np.ndarray]) -> None:
        """Move the weights against the gradients, which come as `backward` yields them."""
        in_order = zip(self.weights, self.velocities, reversed(gradients), strict=True)
        for weight, velocity, gradient in in_order:
            velocity *= MOMENTUM
            velocity -= LEARNING_RATE * gradient
            weight += velocity

    def test(self, images: Images) -> np.ndarray:
        """Return [loss, number of digits read right], both summed over the images."""
        logarithms = self.forward(images.pixels)[1]
        loss = -logarithms[np.arange(len(images)), images.digits].sum()
        return np.array([loss, np.sum(logarithms.argmax(axis=1) == images.digits)])

    def read(self, images: Images) -> np.ndarray:
        """Return the digit that the network reads in each image."""
        return self.forward(images.pixels)[1].argmax(axis=1)

    def flat(self) -> np.ndarray:
        """Return a copy of all weights in one row."""
        return np.concatenate([weight.ravel() for weight in self.weights])
