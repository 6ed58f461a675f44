import array
import ctypes
import mmap

import numpy as np
import pytest

from unisono.core.base.buffers import as_bytes, device_of, view
from unisono.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError


def base(shape=(4, 6), dtype="f4"):
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


LAYOUTS = {
    "C": lambda: base(),
    "F": lambda: np.asfortranarray(base()),
    "transposed": lambda: base((2, 3, 4)).transpose(1, 2, 0),
    "strided": lambda: base()[::2, 1::2],
    "negative": lambda: base()[::-1, ::-2],
    "one column": lambda: base()[:, 2:3],
    "0-d": lambda: np.array(7.0, "f4"),
    "0-d from a view": lambda: base()[1, 2, ...],
    "empty": lambda: np.empty((3, 0, 2), "f4"),
    "empty strided": lambda: base()[::2, 6:],
    "one element": lambda: base((1, 1, 1)),
    "byte-swapped": lambda: base().astype(">f4"),
    "byte-swapped, strided": lambda: base().astype(">f4")[::2, ::-1],
    "byte-swapped 0-d": lambda: np.array(7.0, ">f4"),
    "unaligned": lambda: np.frombuffer(bytearray(33), "f4", 8, offset=1),
    "matrix": lambda: np.asmatrix(base()),
    "field of a record": lambda: np.zeros(5, [("a", "i1"), ("b", "f4")])["b"],
    "window": lambda: np.lib.stride_tricks.as_strided(base(), (3, 2), (32, 8)),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_in_c_order(layout):
    owner = LAYOUTS[layout]()
    seen = view(owner, write=False)
    assert seen.array.flags.c_contiguous
    assert seen.array.dtype.isnative
    assert seen.array.flags.aligned
    assert seen.array.ndim == 1
    assert seen.shape == owner.shape
    assert seen.dtype.name == "float32"
    assert (seen.count, seen.nbytes) == (owner.size, 4 * owner.size)
    assert seen.owner is owner
    np.testing.assert_array_equal(seen.array, np.asarray(owner).ravel())


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_written_in_place(layout):
    owner = LAYOUTS[layout]()
    whole = owner.base if isinstance(owner.base, np.ndarray) else None
    before = None if whole is None or whole.dtype.names else whole.copy()
    seen = view(owner, write=True)
    new = np.arange(100, 100 + owner.size, dtype="f4")
    seen.array[:] = new
    seen.unpack()
    np.testing.assert_array_equal(np.asarray(owner), new.reshape(owner.shape))
    if before is not None and layout in ("strided", "negative", "one column"):
        assert np.count_nonzero(whole != before) <= owner.size  # nothing beside it was touched


@pytest.mark.parametrize("layout", ["strided", "byte-swapped"])
def test_an_input_is_never_written_back(layout):
    owner = LAYOUTS[layout]()
    before = owner.copy()
    seen = view(owner, write=False)
    assert seen.packed
    seen.array[:] = -1
    seen.unpack()
    np.testing.assert_array_equal(owner, before)


def test_contiguous_memory_is_shared():
    owner = base()
    seen = view(owner, write=True)
    assert not seen.packed
    assert np.shares_memory(seen.array, owner)
    assert as_bytes(seen.array).nbytes == owner.nbytes
    as_bytes(seen.array)[0:4] = np.float32(9).tobytes()
    assert owner[0, 0] == 9


def test_stride_zero_is_read_but_not_written():
    owner = np.broadcast_to(np.arange(3.0), (4, 3))
    np.testing.assert_array_equal(view(owner, write=False).array, np.tile(np.arange(3.0), 4))
    writable = np.lib.stride_tricks.as_strided(np.arange(3.0), (4, 3), (0, 8))
    with pytest.raises(InvalidArgumentError) as caught:
        view(writable, write=True, name="output")
    assert caught.value.what == (
        "output overlaps itself (shape [4, 3], strides [0, 8]), so it has no single place for a "
        "result"
    )


def test_read_only():
    owner = base()
    owner.flags.writeable = False
    np.testing.assert_array_equal(view(owner, write=False).array, owner.ravel())
    for obj in (owner, b"bytes", memoryview(b"bytes")):
        with pytest.raises(InvalidArgumentError) as caught:
            view(obj, write=True)
        assert caught.value.what == "tensor is read-only but the operation writes into it"


@pytest.mark.parametrize("code", ["b", "B", "h", "H", "i", "I", "q", "Q", "f", "d"])
def test_buffer_protocol(code):
    owner = array.array(code, [1, 2, 3, 4])
    seen = view(memoryview(owner)[::2], write=True)
    assert seen.array.tolist() == [1, 3]
    assert seen.dtype.storage == np.dtype(code)
    seen.array[:] = [5, 6]
    seen.unpack()
    assert owner.tolist() == [5, 2, 6, 4]


@pytest.mark.parametrize(
    "owner",
    [array.array("d", [1, 2]), (ctypes.c_double * 2)(1, 2), mmap.mmap(-1, 2)],
    ids=["array", "ctypes", "mmap"],
)
def test_buffers_that_are_no_memoryview(owner):
    assert device_of(owner) == "cpu"
    seen = view(owner, write=True)
    assert seen.dtype.name == ("uint8" if isinstance(owner, mmap.mmap) else "float64")
    seen.array[:] = [5, 6]
    assert list(owner) in ([5, 6], [b"\x05", b"\x06"])


def test_bytearray():
    owner = bytearray(b"abc")
    view(owner, write=True).array[1] = ord("X")
    assert owner == b"aXc"
    assert view(bytearray(), write=True).count == 0


class Carrier:
    """An array library of its own: memory is reachable through DLPack only."""

    def __init__(self, owned, device=(1, 0)):
        self.owned, self.where = owned, device

    def __dlpack__(self, **options):
        return self.owned.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.where


def test_dlpack():
    owner = base()
    seen = view(Carrier(owner[:, ::2]), write=True)
    np.testing.assert_array_equal(seen.array, owner[:, ::2].ravel())
    seen.array[:] = -5
    seen.unpack()
    assert (owner[:, ::2] == -5).all()
    assert (owner[:, 1::2] != -5).all()


@pytest.mark.parametrize(("code", "device"), [(2, "cuda"), (10, "rocm"), (99, "dlpack99")])
def test_dlpack_of_another_device(code, device):
    carrier = Carrier(base(), (code, 0))
    assert device_of(carrier) == device
    with pytest.raises(UnsupportedError) as caught:
        view(carrier, write=False, name="x")
    assert caught.value.what == f"x is on device {device!r}; this engine needs CPU memory"


def test_array_interface():
    class Old:
        def __init__(self, owned):
            self.owned = owned
            self.__array_interface__ = owned.__array_interface__

    owner = base()
    view(Old(owner), write=True).array[0] = 77
    assert owner[0, 0] == 77


@pytest.mark.parametrize(
    ("obj", "error", "text"),
    [
        ([1, 2], ArgumentTypeError,
         "x must be an array (NumPy, torch, DLPack, buffer), got list"),
        (3.5, ArgumentTypeError,
         "x must be an array (NumPy, torch, DLPack, buffer), got float"),
        (None, ArgumentTypeError,
         "x must be an array (NumPy, torch, DLPack, buffer), got NoneType"),
        (np.float32(1), ArgumentTypeError,
         "x is a NumPy scalar (float32), which cannot be written in place"),
        (np.ma.masked_array([1.0]), UnsupportedError,
         "x is a masked array; pass its .data and .mask separately"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_refused(obj, error, text):
    with pytest.raises(error) as caught:
        view(obj, write=False, name="x")
    assert caught.value.what == text
    assert ("objects have calls" in (caught.value.hint or "")) == isinstance(obj, list | float)


@pytest.mark.parametrize(
    "dtype", ["U3", "S3", ">M8[s]", "m8[s]", [("a", ">i4")], "longdouble"], ids=str
)
def test_opaque_dtypes(dtype):
    owner = np.zeros(4, dtype)
    seen = view(owner[::2], write=True)
    assert (seen.dtype.kind, seen.dtype.itemsize) == ("x", owner.itemsize)
    native = np.dtype(dtype).newbyteorder("=")
    bits = f" ({np.finfo(np.longdouble).nmant} mantissa bits)" if dtype == "longdouble" else ""
    assert str(seen.dtype) == str(native) + bits
    seen.array.view(native)[:] = np.ones(2, native)
    seen.unpack()
    expected = np.zeros(4, native)
    expected[::2] = np.ones(2, native)
    assert owner.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
def test_ml_dtypes(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    owner = np.arange(12, dtype="f4").reshape(3, 4).astype(getattr(ml_dtypes, name))
    for part in (owner, owner[:, ::2], owner.T, owner[0, 0, ...]):
        seen = view(part, write=True)
        assert seen.dtype.name == name
        bits = seen.array.copy()
        np.testing.assert_array_equal(bits, np.ascontiguousarray(part).ravel().view(bits.dtype))
        seen.array[:] = bits[::-1]
        seen.unpack()
        np.testing.assert_array_equal(
            np.ascontiguousarray(part).ravel().view(bits.dtype), bits[::-1]
        )
