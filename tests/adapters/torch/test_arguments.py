"""Reduce ops, element types and tensors of torch as arguments of this library's own functions."""

import re

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    InvalidArgumentError,
    UnsupportedError,
)

torch = pytest.importorskip("torch")
theirs = torch.distributed.ReduceOp
# torch warns of what the tests make.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}:UserWarning")
    for text in ("The PyTorch API of nested", "torch.quantize_per_tensor", "ComplexHalf support")
]
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
# Types that NumPy lacks: bytes of an element.
OPAQUE = {"complex32": 4, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1}


def premultiplied(factor):
    return torch.distributed._make_nccl_premul_sum(factor)


@pytest.mark.ranks(2, engine="both")
def test_reduce_ops_of_torch(rank):
    for name in OPS:
        for op in (getattr(theirs, name), theirs(getattr(theirs, name))):
            for call in (dist.all_reduce, dist.scan):
                got, expected = (np.array([rank + 1, 6 - rank]) for _ in range(2))
                call(got, op)
                call(expected, getattr(dist.ReduceOp, name))
                assert got.tolist() == expected.tolist(), name
    for factor in (2.5, torch.tensor([2.5])):
        x = np.array([1.0, 2.0])
        dist.all_reduce(x, premultiplied(factor))
        assert x.tolist() == [5.0, 10.0]
    options = dist.AllreduceOptions()
    options.reduceOp = theirs.MAX
    x = torch.tensor([rank + 1.0])
    dist.group.WORLD.allreduce([x], options).wait()
    assert x.tolist() == [2.0]


@pytest.mark.ranks(2)
def test_what_is_no_reduce_op(rank):
    with pytest.raises(InvalidArgumentError, match="PREMUL_SUM needs its factor"):
        dist.all_reduce(np.ones(2), theirs.PREMUL_SUM)
    for op in (0, "SUM", torch.float32):
        with pytest.raises(ArgumentTypeError, match="op must be a ReduceOp"):
            dist.all_reduce(np.ones(2), op)
    dist.all_reduce(x := np.ones(2), dist.ReduceOp.RedOpType.SUM)
    assert x.tolist() == [2.0, 2.0]


def numbers(rank, count):
    return (torch.arange(count) + 100 * rank).to(torch.uint8)


@pytest.mark.ranks(2, engine="both")
@pytest.mark.parametrize("name", OPAQUE)
def test_elements_that_numpy_lacks_move_as_bytes(rank, name):
    size, dtype = OPAQUE[name], getattr(torch, name)

    def some(of, count=6):
        return numbers(of, count * size).view(dtype)

    def bytes_of(tensor):
        return tensor.view(torch.uint8).tolist()

    dist.broadcast(x := some(rank), 1)
    assert bytes_of(x) == bytes_of(some(1))
    dist.broadcast(some(rank, 0), 1)
    blocks = [some(5), some(5)]
    dist.all_gather(blocks, some(rank))
    assert [bytes_of(each) for each in blocks] == [bytes_of(some(of)) for of in range(2)]
    if rank == 0:
        dist.send(some(0), 1)
    else:
        dist.recv(x := some(5), 0)
        assert bytes_of(x) == bytes_of(some(0))
    with pytest.raises(UnsupportedError, match=f"SUM is not defined on {name} .*it only moves"):
        dist.all_reduce(some(rank))
    assert dist.trace_records()[0].nbytes == 6 * size
    assert dist.stats().operations["broadcast"].nbytes == 6 * size
    with pytest.raises(CollectiveMismatchError, match=name):
        dist.broadcast(some(rank) if rank else numbers(rank, 6 * size), 0)
    check_usable()


@pytest.mark.ranks(2)
def test_half_complex_numbers_in_other_layouts(rank):
    given = numbers(0, 24).view(torch.complex32).reshape(2, 3)
    taken = torch.zeros(24, dtype=torch.uint8).view(torch.complex32).reshape(2, 3)
    x = (given if rank == 0 else taken).t()
    dist.broadcast(x, 0)
    assert x.t().contiguous().view(torch.uint8).flatten().tolist() == list(range(24))
    # A lazy conjugate has the memory of its base, but not its values.
    base = torch.tensor([1 + 2j, 3 + 4j], dtype=torch.complex32) * (rank + 1)
    dist.broadcast(base.conj(), 1)
    assert torch.view_as_real(base).tolist() == [[2.0, 4.0], [6.0, 8.0]]


@pytest.mark.ranks(2)
def test_tensors_that_are_not_dense_are_called_what_they_are(rank):
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for tensor, words in (
        (quantized, "tensor is quantized (quint8); only tensors without a scale are supported"),
        (nested, "tensor is a nested tensor; only dense tensors are supported"),
        (torch.eye(3).to_sparse(), "tensor has layout torch.sparse_coo"),
    ):
        if rank == 0:
            with pytest.raises(UnsupportedError, match=re.escape(words)):
                dist.broadcast(tensor, 0)
        else:
            with pytest.raises(
                CollectiveMismatchError, match=f"but refused it: {re.escape(words)}"
            ):
                dist.broadcast(torch.ones(5), 0)
    check_usable()
