"""Codes of one byte in blocks, against formulas and torch's float8."""

import numpy as np
import pytest

from unisono.core.engines.block_codes import BLOCK, BLOCK_CODES


def through(kind: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return scales, codes and values of float32 numbers."""
    code, y = BLOCK_CODES[kind], np.empty_like(x)
    scales, codes = np.empty(-(-len(x) // BLOCK), "f4"), np.empty(len(x), code.storage)
    with np.errstate(all="ignore"):
        code.encode_blocks(x, scales, codes)
        code.decode_blocks(scales, codes, y)
    return scales, codes, y


def numbers(n: int) -> np.ndarray:
    random = np.random.default_rng(n)
    return (random.normal(size=n) * 10.0 ** random.integers(-30, 30, n)).astype("f4")


@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 1000])
@pytest.mark.parametrize("kind", BLOCK_CODES)
def test_the_error_is_within_its_bound(kind, n):
    x = np.concatenate([numbers(n), numbers(n) * np.float32(1e-38)])
    _, _, y = through(kind, x)
    for at in range(0, len(x), BLOCK):
        given, got = x[at : at + BLOCK].astype(float), y[at : at + BLOCK]
        largest = abs(given).max()
        bound = largest / 252
        if kind == "fp8":
            bound = np.maximum(abs(given) / 16, largest / 240 * 2.0**-10)
        least = 2.0**-127 if kind == "int8" else 2.0**-136
        assert (abs(got - given) <= np.maximum(bound * (1 + 1e-6), least)).all()


def test_int8_by_its_definition():
    x = numbers(BLOCK)
    (scale,), codes, y = through("int8", x)
    assert scale == np.float32(abs(x).max() / np.float32(126))
    assert codes.tolist() == [round(float(v)) for v in x / scale]
    assert (y == codes * scale).all()


def test_fp8_has_the_bits_of_torch_up_to_its_largest_number():
    torch = pytest.importorskip("torch")
    whole = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    grid = np.sort(whole[abs(whole) <= 240])
    between = (grid[1:] + grid[:-1]) / 2
    near = [np.nextafter(between, np.float32(side)) for side in (-999, 999)]
    x = np.concatenate([grid, between, *near, np.linspace(-240, 240, 99_999, dtype="f4")])
    x = np.concatenate([x, np.full(-len(x) % BLOCK, 1, "f4")]).reshape(-1, BLOCK)
    x[:, 0] = 240  # so that the scale is 1
    scales, codes, y = through("fp8", x.reshape(-1))
    expected = torch.from_numpy(x.reshape(-1)).to(torch.float8_e4m3fn)
    assert (scales == 1).all()
    assert codes.tobytes() == expected.view(torch.uint8).numpy().tobytes()
    assert (y == expected.float().numpy()).all()


@pytest.mark.parametrize("kind", BLOCK_CODES)
def test_what_is_not_finite_is_kept_and_spoils_no_other_element(kind):
    x = numbers(3 * BLOCK)
    plain = through(kind, x)[2]
    odd = np.array([np.nan, np.inf, -np.inf, np.nan], "f4")
    at = [3, 70, 200, 383]
    # They count as 0 in the scale of their block.
    zeroed = x.copy()
    zeroed[at] = 0
    expected = through(kind, zeroed)[2]
    expected[at] = odd
    x[at] = odd
    np.testing.assert_array_equal(through(kind, x)[2], expected)
    assert not np.array_equal(plain, expected)


@pytest.mark.parametrize("kind", BLOCK_CODES)
def test_the_ends_of_the_range(kind):
    most = np.finfo("f4").max
    y = through(kind, np.array([most, -most, most / 3], "f4"))[2]
    assert np.isfinite(y).all()
    assert y[0] == -y[1] > most * 0.999
    tiny = through(kind, np.array([1e-45, -3e-39, 0, -0.0], "f4"))[2]
    assert (abs(tiny) <= 2.0**-126).all()
    assert through(kind, np.zeros(5, "f4"))[2].tolist() == [0] * 5
