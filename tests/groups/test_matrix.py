"""Operation x dtype x reduce op x layout x world size, against NumPy."""

import matrix_bodies
import pytest

from unisono.testing import run


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_numpy_arrays_on_threads(size):
    results = run(matrix_bodies.matrix, size, args=("numpy", size <= 4))
    assert len({str(result) for result in results}) == 1, "ranks differ"


@pytest.mark.parametrize("library", ["torch", "mixed"])
def test_torch_tensors_and_both_kinds_together(library):
    pytest.importorskip("torch")
    digests = {str(result) for result in run(matrix_bodies.matrix, 3, args=(library, False))}
    assert len(digests) == 1, "ranks differ"


@pytest.mark.parametrize("size", [2, 3])
def test_numpy_arrays_with_the_reference_engine(monkeypatch, size):
    monkeypatch.setenv("UNISONO_ENGINE", "reference")
    results = run(matrix_bodies.matrix, size, args=("numpy", False))
    assert len({str(result) for result in results}) == 1, "ranks differ"


def test_on_processes():
    results = run(matrix_bodies.matrix, 3, ranks="processes", args=("numpy", False))
    assert len({str(result) for result in results}) == 1, "ranks differ"


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_all_reduce_has_the_same_bits_everywhere_for_awkward_floats(monkeypatch, size, engine):
    monkeypatch.setenv("UNISONO_ENGINE", engine)
    results = run(matrix_bodies.awkward_floats, size)
    for case in results[0]:
        assert len({result[case] for result in results}) == 1, f"{case}: ranks differ"
