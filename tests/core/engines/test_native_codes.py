"""The loops over codes in C++ against those in NumPy, bit for bit."""

import numpy as np
import pytest

from unisono.core.engines.block_codes import BLOCK, COMPRESSIONS, codec_in_numpy, codec_of

_engine = pytest.importorskip("unisono._engine", reason="the C++ engine is not built")

pytestmark = pytest.mark.usefixtures("isa")

LENGTHS = [0, 1, 15, 127, 128, 129, 300, 5000]


def shifted(array: np.ndarray) -> np.ndarray:
    """Return a copy at an odd address."""
    memory = np.empty(array.nbytes + 1, np.uint8)[1:]
    made = memory.view(array.dtype)
    made[:] = array
    return made


def hard(n: int) -> dict[str, np.ndarray]:
    """Return arrays [n] of float32 at the borders of what is coded differently."""
    random = np.random.default_rng(n)
    bits = random.integers(0, 1 << 32, n, np.uint64).astype(np.uint32)
    near = 10.0 ** random.integers(-3, 3, n)
    # Multiples of half a step of int8, if the block's largest is 126 and so its scale 1.
    ties = random.integers(-252, 253, n) / 2
    ties[::BLOCK] = 126
    # Ties of fp8 at all exponents below 240, in blocks of scale 1.
    steps = random.integers(16, 32, n) * 2.0 ** random.integers(-15, 3, n)
    halves = steps * random.choice([-1, 1], n)
    halves[::BLOCK] = 240
    edges = np.array([0, -0.0, 1e-45, -3e-39, 2**-126, 1, 3.4028235e38, -3.4028235e38, 3e38], "f4")
    odd = np.array([np.nan, -np.nan, np.inf, -np.inf, 0, -1, 1e-45, 3.4028235e38], "f4")
    found = {
        "any bits": bits.view(np.float32),
        "numbers": random.normal(size=n) * near,
        "ties of int8": ties,
        "ties of fp8": halves,
        "denormals": (bits & 0x807FFFFF).view(np.float32),
        "zeros": random.choice([0.0, -0.0], n),
        "edges": random.choice(edges, n),
        "not finite": random.choice(odd, n),
        "a few not finite": np.where(random.random(n) < 0.01, np.inf, random.normal(size=n)),
        "huge beside tiny": random.choice([1e38, 1e-38, -1e30, 1e-44], n),
    }
    with np.errstate(invalid="ignore"):
        return {name: each.astype(np.float32) for name, each in found.items()}


def coded(codec, x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    blocks = -(-len(x) // BLOCK) * (kind != "bf16")
    scales, codes = np.full(blocks, 7, "f4"), np.full(len(x), 7, codec.storage)
    with np.errstate(all="ignore"):
        codec.encode(x, scales, codes)
    return scales, codes


@pytest.mark.parametrize("kind", COMPRESSIONS)
@pytest.mark.parametrize("n", LENGTHS)
def test_scales_and_codes_have_the_bits_of_numpy(kind, n):
    oracle, codec = codec_in_numpy(kind), codec_of(kind)
    assert codec.encode is not oracle.encode
    for name, x in hard(n).items():
        scales, codes = coded(codec, shifted(x), kind)
        expected = coded(oracle, x, kind)
        assert scales.tobytes() == expected[0].tobytes(), name
        assert codes.tobytes() == expected[1].tobytes(), name
        values, wanted = shifted(x), np.empty_like(x)
        with np.errstate(all="ignore"):
            codec.decode(scales, shifted(codes), values)
            oracle.decode(*expected, wanted)
        assert values.tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_every_code_has_the_bits_of_numpy(kind):
    oracle, codec = codec_in_numpy(kind), codec_of(kind)
    every = np.arange(1 << 16 if kind == "bf16" else 256)
    codes = np.resize(every, -(-len(every) * 9 // BLOCK) * BLOCK + 5).astype(codec.storage)
    scales = np.array([2**-126, 1, 3e-38, 1e38, 1.4178e36, 0.1, 2.7e36], "f4")
    scales = np.resize(scales, -(-len(codes) // BLOCK))
    one, two = np.empty(len(codes), "f4"), np.empty(len(codes), "f4")
    with np.errstate(all="ignore"):
        codec.decode(scales, codes, one)
        oracle.decode(scales, codes, two)
        assert one.tobytes() == two.tobytes()
        numbers = np.random.default_rng(1).normal(size=len(codes)).astype("f4")
        one[:], two[:] = numbers, numbers
        codec.add(scales, codes, one)
        oracle.add(scales, codes, two)
    assert one.tobytes() == two.tobytes()


def test_the_reference_engine_takes_numpys(monkeypatch):
    monkeypatch.setenv("UNISONO_ENGINE", "reference")
    assert codec_of("int8") is codec_in_numpy("int8")


def test_a_number_without_a_codec_is_an_error():
    for number in (-1, 3):
        with pytest.raises(ValueError, match=f"no codec {number}"):
            _engine.encode(number, 0, 0, 0, 0)
        with pytest.raises(ValueError, match=f"no codec {number}"):
            _engine.decode(number, 0, 0, 0, 0, False)
