import numpy as np
import pytest

from unisono.core.base.buffers import device_of, view
from unisono.errors import InvalidArgumentError, UnsupportedError

torch = pytest.importorskip("torch")

DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
]

LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[::2, 1::2],
    "channels": lambda t: t.reshape(2, 2, 2, 3).permute(0, 3, 1, 2),
    "0-d": lambda t: t[1, 2],
    "empty": lambda t: t[:, 6:],
}


def bits(tensor):
    """Return the bytes of all elements in C order, by torch's own means."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_layout(name, layout):
    whole = (torch.arange(24).reshape(4, 6) % 7).to(getattr(torch, name))
    tensor = LAYOUTS[layout](whole)
    seen = view(tensor, write=True)
    assert seen.dtype.name == name
    assert seen.shape == tuple(tensor.shape)
    assert seen.array.tobytes() == bits(tensor).numpy().tobytes()
    seen.array[:] = seen.array[::-1].copy()
    expected = seen.array.tobytes()
    seen.unpack()
    assert bits(tensor).numpy().tobytes() == expected


@pytest.mark.parametrize(
    "flip", [lambda t: t.conj(), lambda t: t.conj().t(), lambda t: t.conj().imag]
)
def test_lazy_conjugate_and_negative(flip):
    whole = torch.randn(3, 4, dtype=torch.complex64)
    tensor = flip(whole)
    assert tensor.is_conj() or tensor.is_neg()
    seen = view(tensor, write=True)
    np.testing.assert_array_equal(seen.array, tensor.resolve_conj().resolve_neg().numpy().ravel())
    seen.array[:] = np.arange(12)
    seen.unpack()
    np.testing.assert_array_equal(
        tensor.resolve_conj().resolve_neg().numpy().ravel(), np.arange(12).astype(seen.array.dtype)
    )


def test_leaf_that_requires_grad():
    tensor = torch.ones(3, requires_grad=True)
    view(tensor, write=True).array[:] = 2
    assert tensor.tolist() == [2, 2, 2]
    assert tensor.requires_grad
    assert view(torch.nn.Parameter(torch.ones(2)), write=True).count == 2


def test_memory_is_shared():
    tensor = torch.zeros(4)
    seen = view(tensor, write=True)
    assert not seen.packed
    assert seen.array.ctypes.data == tensor.data_ptr()
    assert device_of(tensor) == "cpu"


def test_expanded_is_read_but_not_written():
    tensor = torch.arange(3.0).expand(2, 3)
    assert view(tensor, write=False).array.tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(InvalidArgumentError, match="overlaps itself"):
        view(tensor, write=True)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.empty(2, device="meta"),
         "x is on device 'meta'; this engine needs CPU memory"),
        (lambda: torch.eye(2).to_sparse(),
         "x has layout torch.sparse_coo; only dense tensors are supported"),
    ],
    ids=["meta", "sparse"],
)  # fmt: skip
def test_refused(make, text):
    tensor = make()
    with pytest.raises(UnsupportedError) as caught:
        view(tensor, write=False, name="x")
    assert caught.value.what == text


def test_torch_can_still_resize_the_memory():
    # FSDP frees and allocates it in each step; tensor.numpy() would forbid that for ever.
    x = torch.ones(4)
    view(x, write=True).array[:] = 2
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(16)
    assert x.numel() == 4


def test_a_tensor_without_memory_is_an_error():
    x = torch.ones(4)
    later = x[2:]
    x.untyped_storage().resize_(0)
    for freed in (x, later):
        with pytest.raises(InvalidArgumentError, match="no memory of its own"):
            view(freed, write=False)


def test_the_array_keeps_the_memory():
    # An asynchronous call may hold nothing but the array.
    array = view(torch.full((1000,), 3.0), write=False).array
    others = [torch.full((1000,), 4.0) for _ in range(10)]
    assert (array == 3).all()
    assert len(others) == 10
