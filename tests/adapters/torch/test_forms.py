"""Every form of a process group's methods, and the tensors of which Gloo takes more: as Gloo."""

import re
import warnings
from datetime import timedelta

import pytest

from unisono.errors import CollectiveMismatchError

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from torch.distributed.fsdp import fully_shard  # noqa: E402  needs torch
from torch.distributed.tensor import (  # noqa: E402
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402

from tests.adapters.torch.torch_world import torch_world  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_with_torch")

c10d = torch._C._distributed_c10d
SUM, MAX, LIMIT = dist.ReduceOp.SUM, dist.ReduceOp.MAX, timedelta(seconds=30)


def options(kind, **fields):
    made = getattr(c10d, f"{kind}Options")()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def plain(value):
    if isinstance(value, torch.Tensor):
        return (value.to_dense() if value.is_sparse else value).tolist()
    if isinstance(value, int):
        return value
    return [plain(each) for each in value]


class Caller:
    """Makes calls of a group's methods, and notes what each leaves."""

    def __init__(self, group):
        self.group, self.rank, self.notes = group, group.rank(), {}

    def x(self, n=2, shift=0.0, dtype=torch.float32):
        return (torch.arange(float(n)) + 10 * self.rank + shift).to(dtype)

    def form(self, method, *arguments, shown=None, **keywords):
        """Call a method; note the tensors of its arguments afterwards, or an error."""
        names = "".join(f" {name}" for name in keywords)
        kinds = " ".join(type(each).__name__ for each in arguments)
        name = f"{method} {kinds}{names} #{len(self.notes)}"
        try:
            getattr(self.group, method)(*arguments, **keywords).wait()
        except (RuntimeError, ValueError, TypeError):
            self.notes[name] = "refused"
            return
        given = (*arguments, *keywords.values()) if shown is None else shown
        self.notes[name] = [plain(v) for v in given if isinstance(v, (list, torch.Tensor))]

    def value(self, name, call):
        """Note the value of the future of a call."""
        try:
            self.notes[name] = plain(call().get_future().wait())
        except (RuntimeError, ValueError, TypeError):
            self.notes[name] = "refused"


def keyword_forms(c):
    """Data by keyword, alone and with options; settings and time-outs by position."""
    zeros = torch.zeros
    c.form("allreduce", tensor=c.x(), op=MAX)
    c.form("allreduce", [c.x()], SUM, LIMIT)
    c.form("allreduce", c.x(), MAX, LIMIT)
    c.form("allreduce", tensors=[c.x()], op=SUM, timeout=LIMIT)
    c.form("allreduce", tensors=[c.x()], opts=options("Allreduce", reduceOp=MAX))
    c.form("allreduce", [c.x()], opts=options("Allreduce", reduceOp=MAX))
    c.form("allreduce_coalesced", tensors=[c.x(), c.x(3)], opts=options("AllreduceCoalesced"))
    c.form("broadcast", tensors=[c.x()], opts=options("Broadcast", rootRank=1))
    c.form("broadcast", tensor=c.x(), root=1, timeout=LIMIT)
    root = options("Reduce", rootRank=1, reduceOp=MAX)
    for arguments, keywords in (
        ((), {"tensors": [t := c.x()], "opts": root}),
        (([t1 := c.x()], root), {}),
    ):
        shown = [t if keywords else t1] if c.rank == 1 else []
        c.form("reduce", *arguments, shown=shown, **keywords)
    outs = [zeros(2), zeros(2)]
    c.form("allgather", output_tensors=[outs], input_tensors=[c.x()], opts=options("Allgather"))
    whole = {"output": zeros(4), "input": c.x()}
    c.form("_allgather_base", **whole, opts=options("Allgather"))
    c.form("all_gather_single", **whole, opts=options("Allgather"))
    pair = {"outputs": [zeros(4), zeros(6)], "inputs": [c.x(), c.x(3)]}
    c.form("allgather_into_tensor_coalesced", **pair, opts=options("Allgather"))
    rows = [[zeros(2), zeros(3)], [zeros(2), zeros(3)]]
    c.form("allgather_coalesced", output_lists=rows, input_list=[c.x(), c.x(3)])
    at_root = [[zeros(2), zeros(2)]] if c.rank == 1 else []
    root = options("Gather", rootRank=1)
    c.form("gather", output_tensors=at_root, input_tensors=[c.x()], opts=root)
    blocks = [[c.x(), c.x(2, 5)]] if c.rank == 1 else []
    root = options("Scatter", rootRank=1)
    c.form("scatter", output_tensors=[zeros(2)], input_tensors=blocks, opts=root)
    blocks = [[c.x(), c.x(2, 5)]]
    most = options("ReduceScatter", reduceOp=MAX)
    c.form("reduce_scatter", output_tensors=[zeros(2)], input_tensors=blocks, opts=most)
    c.form("reduce_scatter", zeros(2), blocks[0], op=MAX, timeout=LIMIT)
    for name in ("_reduce_scatter_base", "reduce_scatter_single"):
        c.form(name, outputTensor=zeros(2), inputTensor=c.x(4), opts=most)
    pair = {"outputs": [zeros(2), zeros(1)], "inputs": [c.x(4), c.x(2)]}
    c.form("reduce_scatter_tensor_coalesced", **pair, opts=most)
    pair = {"output_tensors": [zeros(1), zeros(1)], "input_tensors": [c.x(1), c.x(1, 3)]}
    c.form("alltoall", **pair, opts=options("AllToAll"))
    sizes = {"output_split_sizes": [1, 1], "input_split_sizes": [1, 1]}
    for name in ("alltoall_base", "all_to_all_single"):
        c.form(name, output=zeros(2), input=c.x(), **sizes, opts=options("AllToAll"))
    c.form("barrier", opts=options("Barrier"))


def several_tensors(c):
    """Lists with several tensors per rank, as for ranks with several devices."""
    zeros = torch.zeros
    for op in ("SUM", "MAX", "PRODUCT", "MIN"):
        named = options("Allreduce", reduceOp=getattr(dist.ReduceOp, op))
        c.form("allreduce", [c.x(), c.x(2, 5), c.x(2, 1)], named)
        c.form("allreduce", [c.x(dtype=torch.int64), c.x(2, 5, torch.int64)], named)
    band = options("Allreduce", reduceOp=dist.ReduceOp.BAND)
    c.form("allreduce", [c.x(dtype=torch.int32), c.x(2, 5, torch.int32)], band)
    c.form("allreduce", [c.x(), c.x(3)])
    c.form("allreduce", [])
    for root in (0, 1):
        for number in (0, 1, 2, -1):
            chosen = options("Broadcast", rootRank=root, rootTensor=number)
            c.form("broadcast", [c.x(), c.x(2, 5)], chosen)
            c.form("broadcast", [c.x()], chosen)
        c.form("reduce", [c.x()], options("Reduce", rootTensor=root), shown=[])
    outs = [[zeros(2) for _ in range(4)] for _ in range(2)]
    c.form("allgather", outs, [c.x(), c.x(2, 5)])
    c.form("allgather", outs[:1], [c.x(), c.x(2, 5)])
    for name in ("reduce", "send"):
        more = [1 - c.rank, 7] if name == "send" else []
        c.form(name, [c.x(), c.x()], *more)
    c.form("gather", [[zeros(2)] * 2] * 2 if c.rank == 0 else [], [c.x(), c.x()])
    t = c.x()
    c.form("allreduce_coalesced", [t, c.x(3), t])


def sparse(c):
    """A sparse tensor in each form, and float16, whose futures are typed."""

    def made():
        return torch.sparse_coo_tensor([[c.rank, 2]], [1.0 + c.rank, 1.0], (4,))

    group = c.group
    c.value("list", lambda: group.allreduce([made()]))
    c.value("tensor", lambda: group.allreduce(made()))
    c.value("op", lambda: group.allreduce([made()], op=SUM))
    c.value("options", lambda: group.allreduce([made()], options("Allreduce")))
    c.value("MAX", lambda: group.allreduce([made()], op=MAX))
    c.value("several", lambda: group.allreduce([c.x(dtype=torch.float16)]))
    c.value("float16", lambda: group.allreduce(c.x(dtype=torch.float16)))
    net = torch.nn.EmbeddingBag(6, 3, mode="sum", sparse=True)
    torch.nn.init.ones_(net.weight)
    ddp = torch.nn.parallel.DistributedDataParallel(net)

    def hook(_, bucket):
        return group.allreduce([bucket.buffer()]).get_future().then(lambda f: f.value()[0] / 2)

    ddp.register_comm_hook(None, hook)
    ddp(torch.tensor([[c.rank, 1]])).sum().backward()
    c.notes["hook"] = plain(net.weight.grad)


def parts(tensor):
    tensor = getattr(tensor, "_local_tensor", tensor)
    return plain([tensor.a, tensor.b] if isinstance(tensor, TwoTensor) else tensor)


def sharded():
    """Return the parts of a module's weights after fully_shard, which broadcasts them."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    net.weight = torch.nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
    return [parts(each) for each in fully_shard(net).parameters()]


@pytest.mark.ranks(2, kind="processes")
def test_forms_and_lists_as_in_gloo(rank, tmp_path):
    warnings.simplefilter("ignore")
    found = []
    for backend in ("gloo", "unisono"):
        with torch_world(backend, tmp_path):
            made = []
            for calls in (keyword_forms, several_tensors, sparse):
                caller = Caller(dist.group.WORLD)
                calls(caller)
                made.append(caller.notes)
            made.append(sharded())
            found.append(made)
            dist.barrier()
    for theirs, ours in zip(*found, strict=True):
        assert ours == theirs
    forms = found[0][0]
    assert "refused" not in forms.values()
    assert len(forms) > 25


@pytest.mark.ranks(2, kind="processes")
def test_wrapper_tensors_move_with_all_their_parts(rank, tmp_path):
    """The oracle is a formula: Gloo waits for the first part only, and loses the others."""

    def two(value, factor=10.0):
        return TwoTensor(torch.full((2,), value), torch.full((2,), value * factor))

    with torch_world("unisono", tmp_path):
        mine = two(rank + 1.0)
        dist.broadcast(mine, 1)
        assert parts(mine) == [[2.0, 2.0], [20.0, 20.0]]
        for async_op in (False, True):
            nested = TwoTensor(two(rank + 1.0), two(rank + 3.0))
            work = dist.all_reduce(nested, async_op=async_op)
            assert not async_op or work.wait()
            assert [parts(nested.a), parts(nested.b)] == [
                [[3.0, 3.0], [30.0, 30.0]],
                [[7.0, 7.0], [70.0, 70.0]],
            ]
        outs = [two(0.0), two(0.0)]
        dist.all_gather(outs, two(rank + 1.0))
        assert [parts(out) for out in outs] == [[[r] * 2, [10 * r] * 2] for r in (1.0, 2.0)]
        out = two(0.0)
        dist.scatter(out, [two(5.0), two(6.0)] if rank == 0 else None)
        assert parts(out) == [[5.0 + rank] * 2, [50.0 + 10 * rank] * 2]
        mesh = init_device_mesh("cpu", (2,))
        both = TwoTensor(torch.arange(4.0), torch.arange(4.0) * 10)
        placed = [distribute_tensor(both, mesh, [each])._local_tensor for each in PLACES]
        assert parts(placed[0]) == [[2.0 * rank, 2.0 * rank + 1], [20.0 * rank, 20.0 * rank + 10]]
        assert parts(placed[1]) == [both.a.tolist(), both.b.tolist()]
        with pytest.raises(CollectiveMismatchError, match=r"of TwoTensor\(a, b\)") as caught:
            dist.all_reduce(two(1.0) if rank == 0 else torch.ones(2))
        assert "called all_reduce(float32[2], SUM)" in str(caught.value)
        with pytest.raises((ValueError, CollectiveMismatchError), match="expected one class"):
            dist.all_gather(outs if rank == 0 else [two(0.0), torch.ones(2)], two(1.0))
        dist.all_reduce(mine)
        assert parts(mine) == [[4.0, 4.0], [40.0, 40.0]]


PLACES = (Shard(0), Replicate())


@pytest.mark.ranks(2, kind="processes")
def test_a_wrong_form_on_one_rank_is_an_error_on_both(rank, tmp_path):
    x, y, small = torch.ones(2), torch.ones(2), torch.ones(2).to(torch.float8_e5m2)
    sparse = torch.sparse_coo_tensor([[1]], [1.0], (3,))
    wrong = {
        "got a list of 2": lambda g: g.reduce([x, x], options("Reduce")),
        "rootTensor=3 is not the number of a tensor (0..0)":
            lambda g: g.broadcast([x], options("Broadcast", rootTensor=3)),
        "rootTensor=3 is not the number of a tensor (0..1)":
            lambda g: g.broadcast([x, y], options("Broadcast", rootTensor=3)),
        "all_gather of 2 tensors per rank needs 2 lists of 4 outputs, got [1]":
            lambda g: g.allgather([[x]], [x, y]),
        "all_reduce of several torch.float8_e5m2 tensors: ": lambda g: g.allreduce([small, small]),
        "SUM only": lambda g: g.allreduce([sparse], op=MAX),
        "2 dtypes or shapes": lambda g: g.allreduce([x, torch.ones(3)]),
        "takes 3 arguments": lambda g: g.allreduce(x, SUM, LIMIT, 1, 2),
        "have no reduceOp": lambda g: g.allreduce([x], options("Allgather")),
        "no DTensor": lambda g: g.allreduce([placed]),
    }  # fmt: skip
    with torch_world("unisono", tmp_path):
        group, mesh = dist.group.WORLD, init_device_mesh("cpu", (2,))
        placed = distribute_tensor(x, mesh, [Replicate()])
        for text, call in wrong.items():
            for odd in range(2):
                with pytest.raises(
                    (RuntimeError, ValueError, TypeError), match=re.escape(text)
                ) as caught:
                    call(group) if rank == odd else group.barrier().wait()
                assert rank == odd or isinstance(caught.value, CollectiveMismatchError)
        with pytest.raises(CollectiveMismatchError) as caught:
            dist.all_reduce(sparse if rank == 0 else torch.ones(3))
        assert "all_reduce(sparse float32[3]" in str(caught.value)
        assert "gather" not in str(caught.value)
        dist.barrier()
