"""deterministic=True and UNISONO_DETERMINISTIC: the bits are those of a left fold in NumPy."""

import functools
import operator

import numpy as np
import pytest

import unisono as dist
from tests.support.operations import COLLECTIVES, Operations
from unisono.core.schedules import available
from unisono.errors import CollectiveMismatchError, InvalidArgumentError
from unisono.testing import run

Op = dist.ReduceOp
COUNTS = (1, 5, 1000, 70_001)
DTYPES = (np.float32, np.float64, np.float16, np.complex64)
OPS = {
    Op.SUM: operator.add, Op.AVG: operator.add, Op.PREMUL_SUM(1.1): operator.add,
    Op.PRODUCT: operator.mul, Op.MIN: np.minimum, Op.MAX: np.maximum,
}  # fmt: skip


def data(rank, count, dtype, block=0):
    """Numbers of very different size, whose sum depends on the order of the terms."""
    rng = np.random.default_rng([rank, count, block])
    numbers = rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)
    if np.dtype(dtype).kind == "c":
        return (numbers + 1j * rng.permutation(numbers)).astype(dtype)
    # Where the order is easily seen: zeros of both signs, infinities, and their sum, a NaN.
    numbers[::11] = rng.choice([0.0, -0.0, np.inf, -np.inf, 1.0], len(numbers[::11]))
    return numbers.astype(dtype)


def product(a, b):
    """A complex product with each of its four products rounded."""
    if a.dtype.kind != "c":
        return a * b
    out = np.empty_like(a)
    out.real = a.real * b.real - a.imag * b.imag
    out.imag = a.real * b.imag + a.imag * b.real
    return out


def folded(parts, op, is_prefix=False):
    """Return what the ranks' parts are reduced to, in the order of ranks.

    A sum of float16 is rounded once; that of a prefix on each rank.
    """
    kind = parts[0].dtype
    scalar = kind.type
    with np.errstate(all="ignore"):
        if op.factor is not None:
            parts = [part * scalar(op.factor) for part in parts]
        function = product if op is Op.PRODUCT else OPS[op]
        if kind == np.float16 and function is operator.add and not is_prefix:
            parts = [part.astype(np.float32) for part in parts]
        total = functools.reduce(function, parts).astype(kind)
        return total / scalar(len(parts)) if op is Op.AVG else total


def same_bits(got, want, what):
    a, b = got.view(np.uint8), want.view(np.uint8)
    if not (a == b).all():
        at = int(np.flatnonzero(a != b)[0]) // got.itemsize
        raise AssertionError(f"{what}: element {at} is {got[at]!r}, expected {want[at]!r}")


def cases():
    for dtype in DTYPES:
        for op in OPS:
            if np.dtype(dtype).kind != "c" or op not in (Op.MIN, Op.MAX):
                yield dtype, op


class Folded(Operations):
    is_prefix = False

    def value(self, rank, part=0, count=None):
        return data(rank, self.count, self.dtype, part)

    def reduced(self, ranks, part=0, count=None):
        parts = [self.value(rank, part) for rank in ranks]
        return folded(parts, self.op, self.is_prefix)


def check(rank, dtype, op, count, names, **how):
    p = dist.get_world_size()
    for name in ("all_reduce", "reduce", "reduce_scatter_tensor", "scan"):
        for algorithm in names(COLLECTIVES[name]):
            for root in {0, p - 1} if name == "reduce" else {0}:
                how["algorithm"] = algorithm
                calls = Folded(rank, p, count, root, op, dtype, how=how)
                calls.is_prefix = name == "scan"
                getattr(calls, name)()
                for got, want in calls.made:
                    same_bits(got, want, (name, algorithm, dtype, op, count))


def every_ordered_algorithm(rank, counts=COUNTS[:3], step=1):
    """All algorithms that may run, by name and as selected."""
    p = dist.get_world_size()

    def names(collective):
        return (None, *available(collective, p, ordered=True))

    for dtype, op in list(cases())[::step]:
        for count in counts:
            check(rank, dtype, op, count, names, deterministic=True)
    check(rank, np.float32, Op.SUM, COUNTS[-1], names, deterministic=True)


def every_call(rank):
    """Every call of a kind, repeated ones too, without the argument."""
    for dtype, op in cases():
        for _ in range(3):
            check(rank, dtype, op, 100, lambda collective: [None])
    check(rank, np.float64, Op.SUM, 300_000, lambda collective: [None])
    part = dist.new_group()
    x = data(rank, 50, np.float32)
    dist.all_reduce(x, group=part)
    want = folded([data(r, 50, np.float32) for r in range(dist.get_world_size())], Op.SUM)
    same_bits(x, want, "in a sub-group")


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("engine", "transport"), [("native", None), ("reference", "inproc"), ("reference", "tcp")]
)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_algorithm_gives_the_bits_of_a_fold(size, engine, transport):
    run(every_ordered_algorithm, size, engine=engine, transport=transport)


@pytest.mark.native
@pytest.mark.sweep(1)
@pytest.mark.parametrize("isa", ["plain", "v3", "v4"])
def test_every_instruction_set(isa):
    engine = pytest.importorskip("unisono._engine")
    if isa not in engine.isas():
        pytest.skip(f"this machine has no {isa}")
    before = engine.isa()
    engine.set_isa(isa)
    try:
        run(every_ordered_algorithm, 3, engine="native")
    finally:
        engine.set_isa(before)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UNISONO_SHARED_MEMORY", "1"),
        ("UNISONO_SHARED_MEMORY", "0"),
        ("UNISONO_RANKS_PER_HOST", "2"),
    ],
)
def test_on_processes_and_between_hosts(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    # Every fifth pair of dtype and op, among them MIN and MAX: of two zeros the order decides.
    run(every_ordered_algorithm, 3, ranks="processes", args=((1000,), 5))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_by_environment(size, engine, monkeypatch):
    monkeypatch.setenv("UNISONO_DETERMINISTIC", "1")
    run(every_call, size, engine=engine)


def test_an_environment_that_says_neither_yes_nor_no(monkeypatch):
    monkeypatch.setenv("UNISONO_DETERMINISTIC", "perhaps")
    with pytest.raises(InvalidArgumentError, match="'perhaps' is neither 0 nor 1"):
        run(every_call, 1)


@pytest.mark.ranks(5, engine="both")
def test_beside_usual_calls(rank):
    """The same call with and without: neither is mistaken for the other, however often."""
    p, count = dist.get_world_size(), 200_000
    parts = [data(r, count, np.float32) for r in range(p)]
    want = folded(parts, Op.SUM)
    results = set()
    for _ in range(4):
        x = parts[rank].copy()
        dist.all_reduce(x)
        results.add(x.tobytes())
        x = parts[rank].copy()
        dist.all_reduce(x, deterministic=True)
        same_bits(x, want, "deterministic")
    assert len(results) == 1
    # The order matters here: the usual call, on five ranks, gives other bits.
    assert results.pop() != want.tobytes()


@pytest.mark.ranks(3)
def test_mistakes(rank):
    x = np.ones(4)
    text = r"'ring' does not serve all_reduce, deterministic, on \d ranks: .*linear, one_shot, rank"
    with pytest.raises(InvalidArgumentError, match=text):
        dist.all_reduce(x, algorithm="ring", deterministic=True)
    with pytest.raises(CollectiveMismatchError, match=r"all_reduce\(float64\[4\], SUM, determin"):
        dist.all_reduce(x, deterministic=rank == 0)
    dist.broadcast(x, 0, deterministic=rank == 0)
    dist.all_gather([np.zeros(4) for _ in range(dist.get_world_size())], x, deterministic=True)
    assert (x == 1).all()


@pytest.mark.ranks(4, engine="both")
def test_half_precision_of_torch(rank):
    """A sum is rounded once, as in float32; a product after each step, as torch does it."""
    torch = pytest.importorskip("torch")
    p = dist.get_world_size()
    for dtype in (torch.bfloat16, torch.float16):
        parts = [torch.from_numpy(data(r, 3001, np.float32)).to(dtype) for r in range(p)]
        for op, function in ((Op.SUM, operator.add), (Op.PRODUCT, operator.mul)):
            for algorithm in available("all_reduce", p, ordered=True):
                x = parts[rank].clone()
                dist.all_reduce(x, op, algorithm=algorithm, deterministic=True)
                terms = [part.float() for part in parts] if op is Op.SUM else parts
                want = functools.reduce(function, terms).to(dtype)
                same = (x == want) | (x.isnan() & want.isnan())
                assert same.all(), (dtype, op, algorithm)
