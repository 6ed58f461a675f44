"""Tensors that C++ reads as it reads NumPy's arrays, and those that Python must handle."""

import sys
from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from unisono.core.base.seam import cpp as extension

torch = pytest.importorskip("torch")
torch_dist = pytest.importorskip("torch.distributed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402  needs torch
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tests.adapters.torch.torch_world import torch_world  # noqa: E402

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="an older torch"
    ),
]

NUMPY = [
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16",
    "float32", "float64", "complex64", "complex128",
]  # fmt: skip


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1, 3)])
def test_an_array_over_the_memory_of_a_tensor(dtype, shape):
    x = torch.zeros(shape, dtype=getattr(torch, dtype))
    array = extension.array_of(x)
    array[...] = 1
    assert (array.dtype, array.shape) == (np.dtype(dtype), shape)
    assert x.tolist() == np.ones(shape, dtype).tolist()
    # One row of a matrix has any stride.
    assert extension.array_of(torch.zeros(3, 4)[1:2, :]).shape == (1, 4)


def test_an_array_keeps_the_memory_of_a_tensor_that_gets_other_memory():
    x = torch.ones(3)
    memory = x.untyped_storage()._weak_ref()
    array = extension.array_of(x)
    x.set_(torch.zeros(1))
    assert not torch.UntypedStorage._expired(memory)
    assert array.tolist() == [1.0] * 3
    del array
    assert torch.UntypedStorage._expired(memory)
    torch.UntypedStorage._free_weak_ref(memory)


class Sub(torch.Tensor):
    """A tensor that may mean another thing by its memory."""


def freed():
    x = torch.zeros(4)
    x.untyped_storage().resize_(0)
    return x


def unaligned():
    return torch.frombuffer(bytearray(17), dtype=torch.float32, offset=1, count=4)


def fake():
    with FakeTensorMode():
        return torch.zeros(4)


# The values of these tensors are not the elements at their addresses.
OTHERS = {
    "strided": lambda: torch.zeros(4, 2)[:, 0],
    "transposed": lambda: torch.zeros(2, 2).t(),
    "expanded": lambda: torch.zeros(1).expand(4),
    "negated": lambda: torch._neg_view(torch.zeros(4)),
    "conjugated": lambda: torch.zeros(4, dtype=torch.complex64).conj(),
    "imaginary part of a conjugate": lambda: torch.zeros(1, dtype=torch.complex64).conj().imag,
    "empty": lambda: torch.zeros(0),
    "freed": freed,
    "unaligned": unaligned,
    "fake": fake,
    "meta": lambda: torch.zeros(4, device="meta"),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "sparse rows": lambda: torch.eye(2).to_sparse_csr(),
    "mkldnn": lambda: torch.eye(2).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "zeros without memory": lambda: torch._efficientzerotensor(4),
    "functional": lambda: torch._to_functional_tensor(torch.zeros(4)),
    "sub-class": lambda: torch.zeros(4).as_subclass(Sub),
    "bfloat16": lambda: torch.zeros(4, dtype=torch.bfloat16),
    "complex32": lambda: torch.zeros(4, dtype=torch.complex32),
    "float4": lambda: torch.empty(4, dtype=torch.float4_e2m1fn_x2),
    "array": lambda: np.zeros(4),
    "number": lambda: 7,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OTHERS)
def test_no_array_over_the_memory_of_another_tensor(kind):
    assert extension.array_of(OTHERS[kind]()) is None
    # No error stays behind.
    assert extension.array_of(torch.ones(2)).tolist() == [1.0, 1.0]


def test_no_array_over_the_memory_of_a_tensor_inside_a_transform():
    seen = []

    def look(x):
        seen.append(extension.array_of(x))
        return x.sum()

    torch.func.vmap(look)(torch.zeros(2, 4))
    torch.func.grad(look)(torch.zeros(4))
    torch.func.functionalize(look)(torch.zeros(4))
    assert seen == [None] * 3


def repeats():
    last = dist.group.WORLD.calls.last()
    return 0 if last is None else last[0]


ROOT = str(Path(dist.__file__).parent)


class Python:
    """Counts the calls of Python functions of the files in a folder in a block."""

    def __init__(self, folder=""):
        self.folder = folder

    def __enter__(self):
        self.count = 0
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        self.count -= not self.folder  # this method

    def __call__(self, frame, event, argument):
        self.count += event == "call" and frame.f_code.co_filename.startswith(self.folder)


def made(dtype, rank, n=5):
    """Small values that no sum rounds."""
    return (torch.arange(n) % 3 + rank % 2).to(getattr(torch, dtype))


@pytest.mark.usefixtures("forked_with_torch")
@pytest.mark.ranks(3, kind="processes")
def test_repeated_calls_on_tensors_run_no_python(rank):
    size, counts = dist.get_world_size(), []
    for dtype in ("uint16", "int64", "float16", "float32", "complex64", "bfloat16"):
        kind = torch.nn.Parameter if dtype == "float32" else torch.clone
        for n in (5, 20_000):
            for turn in range(3):
                x, y = kind(made(dtype, rank, n)), made(dtype, rank, n)
                whole, parts = (
                    torch.empty(size * n, dtype=x.dtype),
                    [y.clone() for _ in range(size)],
                )
                mixed = np.full(size, -1)
                with Python() as python:
                    dist.all_reduce(x)
                    dist.broadcast(y, 1)
                    dist.all_gather_into_tensor(whole, y)
                    dist.all_gather(parts, y)
                    dist.all_gather_into_tensor(mixed, torch.tensor([rank]))
                counts += [python.count] * (turn > 0)
                total = sum(made(dtype, r, n).to(torch.complex128) for r in range(size))
                assert torch.equal(x.detach().to(torch.complex128), total), (dtype, n, turn)
                expected = made(dtype, 1, n)
                assert torch.equal(y, expected), (dtype, n)
                assert all(torch.equal(each, expected) for each in parts)
                assert torch.equal(whole, expected.repeat(size))
                assert mixed.tolist() == [0, 1, 2]
    # A few calls take the places of others in C++'s table, by their addresses.
    assert counts.count(0) > len(counts) / 2, counts


VIEWS = {
    "column": lambda base: base[:, 1],
    "transposed": lambda base: base.transpose(0, 2),
    "steps": lambda base: base[::2, ::3, ::2],
}


@pytest.mark.usefixtures("forked_with_torch")
@pytest.mark.ranks(2, kind="processes")
def test_strided_tensors_run_no_python(rank):
    counts = {}
    for dtype in ("uint8", "float16", "bfloat16", "complex64"):
        for name, look in VIEWS.items():

            def full(value, look=look, dtype=dtype):
                base = torch.full((4, 4, 3), 9, dtype=getattr(torch, dtype))
                look(base).fill_(value)
                return base

            for turn in range(3):
                base, outs = full(1 + rank), [full(7), full(7)]
                asynchronous, halved = full(1 + rank), full(2 + 2 * rank)
                with Python(ROOT) as python:
                    dist.all_reduce(look(base))
                    dist.all_gather([look(each) for each in outs], look(base))
                counts[dtype, name, turn] = python.count
                assert torch.equal(base, full(3))
                assert torch.equal(outs[0], full(3)), (dtype, name)
                assert torch.equal(outs[1], full(3)), (dtype, name)
                x = look(asynchronous)
                work = dist.all_reduce(x, async_op=True)
                assert work.result()[0] is x
                if turn == 2:
                    # The call writes to the memory that the tensor had.
                    x.set_(torch.zeros(1, dtype=x.dtype))
                work.wait()
                assert torch.equal(asynchronous, full(3)), (dtype, name)
                if dtype in ("float16", "bfloat16"):
                    dist.all_reduce(look(halved), dist.ReduceOp.PREMUL_SUM(0.5))
                    assert torch.equal(halved, full(3)), (dtype, name)
    # A few calls take the places of others in C++'s table, by their addresses.
    repeated = [count for (_, _, turn), count in counts.items() if turn]
    assert repeated.count(0) > len(repeated) / 2, counts


def values(x):
    """The values of a tensor, by operations that know its kind."""
    return x.resolve_conj().resolve_neg().clone().to_dense().reshape(-1).tolist()


SAME_SHAPE = {
    "float32": ("strided", "transposed", "negated", "unaligned", "sub-class"),
    "complex64": ("conjugated",),
}


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Function(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("forked_with_torch")
@pytest.mark.parametrize("through", ["unisono", "torch.distributed"])
@pytest.mark.ranks(2, kind="processes")
def test_other_tensors_after_plain_ones_of_their_dtype_and_shape(rank, through, tmp_path):
    """A call that C++ has prepared must not take them for plain ones."""
    with torch_world("unisono", tmp_path):
        module, kinds_of = dist, dict(SAME_SHAPE)
        if through == "torch.distributed":
            # torch itself refuses conjugates.
            module, kinds_of = torch_dist, {"float32": SAME_SHAPE["float32"]}
        reduced = module.all_reduce

        def sums(made, expected=(3.0,)):
            x = made()
            with torch.no_grad():
                x.copy_(torch.full(x.shape, 1.0 + rank))
            reduced(x)
            assert set(values(x)) == set(expected), values(x)
            return x

        for dtype, kinds in kinds_of.items():
            for kind in kinds:
                shape = OTHERS[kind]().shape
                for _ in range(3):
                    sums(lambda: torch.zeros(shape, dtype=getattr(torch, dtype)))  # noqa: B023
                for _ in range(2):
                    sums(OTHERS[kind])
        for mode in (Watch, Function, FakeTensorMode, torch.inference_mode):
            x = torch.full((4,), 1.0 + rank)
            for _ in range(2):
                with mode():
                    reduced(x)
            assert x.tolist() == [6.0] * 4
        # Bytes of a type that DLPack does not tell from uint8.
        for _ in range(3):
            reduced(torch.zeros(4, dtype=torch.uint8))
        with pytest.raises(NotImplementedError, match="uint4"):
            reduced(torch.empty(4, dtype=torch.uint4))
        with pytest.raises(ValueError, match="no memory"):
            reduced(freed())
        with pytest.raises(NotImplementedError, match="meta"):
            reduced(torch.zeros(4, device="meta"))
        leaf = torch.ones(4, requires_grad=True)
        for _ in range(3):
            reduced(leaf)
        assert (leaf.tolist(), leaf.is_leaf, leaf._version) == ([8.0] * 4, True, 0)
        sums(lambda: torch.zeros(4))


@pytest.mark.usefixtures("forked_with_torch")
@pytest.mark.ranks(2, kind="processes")
def test_asynchronous_calls_on_tensors(rank):
    works = []
    for turn in range(4):
        x = torch.full((3,), 1.0 + rank)
        work = dist.all_reduce(x, async_op=True)
        works.append(work)
        memory = x.view(3)
        if turn == 3:
            # The call writes to the memory that the tensor had.
            x.set_(torch.zeros(1))
        assert work.result()[0] is x
        work.wait()
        assert memory.tolist() == [3.0] * 3
    outs, total = [torch.zeros(2), torch.zeros(2)], []
    for _ in range(3):
        work = dist.all_gather(outs, torch.full((2,), float(rank)), async_op=True)
        work.get_future().add_done_callback(lambda f: total.append([id(x) for x in f.value()]))
        work.wait()
        assert [out.tolist() for out in outs] == [[0.0] * 2, [1.0] * 2]
    dist.barrier()
    assert total == [[id(out) for out in outs]] * 3


@pytest.mark.usefixtures("forked_with_torch")
@pytest.mark.ranks(2, kind="processes")
def test_a_failed_call_on_tensors_names_the_reason(rank):
    x = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(x)
    for is_async in (False, True):
        before = x.tolist()
        given = x if rank == 0 else x.double()

        def call(given=given, is_async=is_async):
            work = dist.all_reduce(given, async_op=is_async)
            work.wait()

        with pytest.raises(dist.errors.CollectiveMismatchError, match="float64"):
            call()
        assert x.tolist() == before
        dist.all_reduce(torch.ones(4))


@pytest.mark.usefixtures("forked_with_torch")
@pytest.mark.ranks(2, kind="processes")
def test_messages_of_tensors_run_no_python(rank):
    for turn, dtype in enumerate(["bool", *NUMPY]):
        x = made(dtype, 1) if rank == 1 else torch.zeros(5, dtype=getattr(torch, dtype))
        with Python() as python:
            source = dist.recv(x, 1) if rank == 0 else dist.send(x, 0)
        assert python.count == 0 or turn == 0, dtype
        assert source == (1 if rank == 0 else None)
        assert x.tolist() == made(dtype, 1).tolist()
    pairs = torch.zeros(4, 2, dtype=torch.bfloat16)
    column = pairs[:, 1]
    if rank == 0:
        dist.recv(column, 1)
        assert pairs.tolist() == [[0.0, 7.0]] * 4
    else:
        dist.send(torch.full((4,), 7.0, dtype=torch.bfloat16), 0)


@pytest.mark.usefixtures("forked_with_torch")
@pytest.mark.ranks(2, kind="processes")
def test_python_calls_of_the_plugin(rank, tmp_path):
    with torch_world("unisono", tmp_path):
        small, large, counts = torch.zeros(2), torch.zeros(65536), {}
        calls = {
            "all_reduce": (lambda: torch_dist.all_reduce(small), 3),
            "send": (lambda: torch_dist.send(small, 1), 9),
            "send of 256 KiB": (lambda: torch_dist.send(large, 1), 9),
        }
        for name, (call, most) in calls.items():
            for _ in range(4):
                with Python(ROOT) as python:
                    if rank == 0 or name == "all_reduce":
                        call()
                    else:
                        torch_dist.recv(large if "256" in name else small, 0)
                # The ring has no room for more than a few such messages.
                torch_dist.barrier()
            counts[name] = (python.count, most)
    over = {name: count for name, count in counts.items() if count[0] > count[1]}
    assert over == {} or rank == 1, counts
