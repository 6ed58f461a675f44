"""The sampler of an elastic job against an oracle in plain Python."""

import random
from collections import Counter

import numpy as np
import pytest

from unisono.errors import ArgumentTypeError, InvalidArgumentError
from unisono.parallel import ElasticSampler
from unisono.testing import run

SIZES = (1, 2, 3, 5)


def shares(rank, steps, arguments):
    sampler = ElasticSampler(**arguments)
    return [sampler.share(step) for step in range(steps)]


@pytest.mark.parametrize(
    ("length", "batch_size"), [(1, 1), (40, 8), (41, 8), (7, 3), (13, 100), (9, 2)]
)
def test_committed_steps_of_an_epoch_use_each_sample_once(length, batch_size):
    per_epoch = -(-length // batch_size)
    epochs, arguments = 3, {"length": length, "batch_size": batch_size, "seed": 7}
    parts = {size: run(shares, size, args=(epochs * per_epoch, arguments)) for size in SIZES}
    draw = random.Random(length)
    values = np.random.default_rng(1).normal(size=length)
    orders = []
    for epoch in range(epochs):
        used, order = Counter(), []
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            # Some ranks begin the step and do not commit; then others repeat it.
            for size in draw.choices(SIZES, k=draw.randint(1, 3)):
                members = [share[step] for share in parts[size]]
            counted = [i for each in members if each.weight for i in each.indices]
            used.update(counted)
            order += sorted(counted)
            assert all(len(each.indices) for each in members)
            mean = np.mean([each.weight * values[each.indices].mean() for each in members])
            assert mean == pytest.approx(values[counted].mean(), rel=1e-12, abs=1e-15)
            assert length // per_epoch <= len(counted) <= batch_size
        assert used == Counter(range(length))
        orders.append(order)
    assert length < 10 or orders[0] != orders[1] != orders[2] or batch_size > length


def test_orders_differ_by_epoch_and_seed_only():
    one, other = ElasticSampler(50, 25, seed=1), ElasticSampler(50, 25, seed=2)
    first = one.batch(0).tolist()
    assert one.batch(2).tolist() != first != other.batch(0).tolist()
    # A newcomer begins anywhere.
    assert ElasticSampler(50, 25, seed=1).batch(0).tolist() == first == one.batch(0).tolist()
    plain = ElasticSampler(50, 25, shuffle=False)
    assert [plain.batch(step).tolist() for step in (1, 2)] == [[*range(25, 50)], [*range(25)]]


@pytest.mark.parametrize("arguments", [(0, 1), (5, 0)])
def test_lengths_must_be_positive(arguments):
    with pytest.raises(InvalidArgumentError, match="expected length and batch_size of at least 1"):
        ElasticSampler(*arguments)
    with pytest.raises(InvalidArgumentError, match="ElasticSampler: step=-1, expected at least 0"):
        ElasticSampler(5, 2).batch(-1)


def test_a_seed_is_an_integer_of_at_least_0():
    with pytest.raises(InvalidArgumentError, match="ElasticSampler: seed=-1, expected at least 0"):
        ElasticSampler(5, 2, seed=-1)
    with pytest.raises(ArgumentTypeError, match=r"seed must be an integer, got 0\.5"):
        ElasticSampler(5, 2, seed=0.5)
    orders = [ElasticSampler(50, 50, seed=of(2**40)).batch(0).tolist() for of in (int, np.int64)]
    assert orders[0] == orders[1]
