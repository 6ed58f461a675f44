"""torch.distributed's collective functions, over the default group or a given one.

They take torch's arguments in torch's order, with `timeout` and `algorithm` added as keywords.
`src` and `dst` are global ranks, `group_src` and `group_dst` ranks in the group. A synchronous
call returns None, an asynchronous call a `Work`. On a rank that is not a member of the group a
call warns and returns None. All functions raise the errors of `all_reduce`.

In the examples `rank` is `dist.get_rank()`. A test runs them on 2 ranks.

`scan` and `exscan` are not in torch.distributed but in MPI.

Source: torch.distributed.distributed_c10d (2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

from unisono.core.base.deadline import Timeout
from unisono.core.base.types import Array, Arrays, Function, ReduceOp
from unisono.core.c10d.arguments import reporting_bad_arguments, root_of
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import Group, member_group
from unisono.core.operations.c10d_methods import rows_of
from unisono.core.operations.keywords import SHARED, AlgorithmKeywords, CallKeywords, check_keywords
from unisono.core.operations.methods import in_cpp
from unisono.core.operations.work import Future, Work


def _group(group: Group, call: str, how: Mapping[str, object]) -> ProcessGroup | None:
    """Return the group as `member_group` does; refuse keywords that only the method has."""
    pg = member_group(group, call, stacklevel=4)
    # A block checks the call that it makes in the end.
    if pg is not None and not how.keys() <= SHARED and pg._block_here() is None:
        with reporting_bad_arguments(pg, call):
            check_keywords(call, call, how)
    return pg


@in_cpp
def broadcast(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Copy the tensor of rank `src` into the tensors of all ranks.

    Args:
        tensor: [...] same number of elements and dtype on all ranks.
        src: Global rank of the root.
        group: The default group if None.
        async_op: Return a `Work` at once.
        group_src: The root's rank in the group, instead of `src`.
        **how: timeout, algorithm.

    Raises:
        CollectiveMismatchError: Ranks disagree about dtype, count or root.
        CollectiveTimeoutError, PeerLostError: See `unisono.errors`.

    Cost: at least ceil(log2 p) rounds; large tensors about 2(p-1)/p of their size per rank.

    Examples: On rank 1 of 2
        >>> x = np.array([7 - rank])
        >>> dist.broadcast(x, src=0)
        >>> x
        array([7])
    """
    if (pg := _group(group, "broadcast", how)) is None:
        return None
    root = root_of(pg, "broadcast", src, group_src)
    work = pg.broadcast(tensor, root, async_op=async_op, **how)
    return work if async_op else None


@in_cpp
def all_reduce(
    tensor: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    accumulate: str | None = None,
    reproducible: bool = False,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Replace every rank's tensor by the reduction over all ranks.

    For every rank r:  tensor_r = tensor_0 (op) tensor_1 (op) ... (op) tensor_{p-1}

    The result has the same bits on every rank.

    Args:
        tensor: [...] same number of elements and dtype on all ranks; any layout.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM(factor). Or a NumPy ufunc,
            `minloc`, or another associative function of two arrays, applied in the order of ranks.
            It gets NumPy arrays, or tensors, and gathers all arrays on each rank first. It is
            tried on the rank's own array before that, so a side effect happens then, too.
        group: The default group if None.
        async_op: Return a `Work` at once; the tensor must stay untouched until it is done.
        accumulate: "float32" sums float16 and bfloat16 in float32, and rounds once.
        reproducible: Round the exact sum once (SUM; AVG divides it), so that the bits depend on
            the contributions only: not on their order, algorithm or hosts. See also
            `functional.reproducible_sum`.
        compress: "int8", "fp8" or "bf16": send that, and sum in float32 (SUM and AVG of floats).
            Each contribution and the result then have an error. That of int8 is at most 1/252 of
            the largest magnitude in a block of 128, of fp8 1/16 of an element, of bf16 1/256.
        **how: timeout (seconds or timedelta), algorithm, deterministic (reductions).

    Raises:
        UnsupportedError: `op` is not defined on the dtype. The group stays usable.
        CollectiveMismatchError: Ranks disagree about op, dtype or count. No tensor was changed.
        CollectiveTimeoutError, PeerLostError: See `unisono.errors`. The group is broken then.

    Cost: small: ceil(log2 p) rounds; large: 2(p-1)/p of the tensor's bytes sent per rank.

    Examples: On rank 1 of 2
        >>> x = np.array([10, rank])
        >>> dist.all_reduce(x)
        >>> x
        array([20,  1])
    """
    if (pg := _group(group, "all_reduce", how)) is None:
        return None
    work = pg.all_reduce(
        tensor,
        op,
        async_op=async_op,
        accumulate=accumulate,
        reproducible=reproducible,
        compress=compress,
        **how,
    )
    return work if async_op else None


def all_reduce_coalesced(
    tensors: Arrays,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    **how: Unpack[CallKeywords],
) -> Future | None:
    """all_reduce of several tensors of one dtype, as one message.

    As in torch, an asynchronous call returns a `Future` of the tensors.

    Examples: On rank 1 of 2
        >>> x, y = np.array([rank]), np.array([10, 20])
        >>> dist.all_reduce_coalesced([x, y])
        >>> x, y
        (array([1]), array([20, 40]))
    """
    if (pg := _group(group, "all_reduce_coalesced", how)) is None:
        return None
    work = pg.all_reduce_coalesced(tensors, op, async_op=async_op, **how)
    return work.get_future() if async_op else None


@in_cpp
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    accumulate: str | None = None,
    reproducible: bool = False,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Replace the tensor of rank `dst` by the reduction over all ranks.

    The other ranks' tensors keep their values (torch leaves them unspecified).

    Examples: On rank 0 of 2
        >>> x = np.array([rank + 2])
        >>> dist.reduce(x, dst=0, op=dist.ReduceOp.PRODUCT)
        >>> x
        array([6])
    """
    if (pg := _group(group, "reduce", how)) is None:
        return None
    root = root_of(pg, "reduce", dst, group_dst)
    work = pg.reduce(
        tensor,
        root,
        op,
        async_op=async_op,
        accumulate=accumulate,
        reproducible=reproducible,
        **how,
    )
    return work if async_op else None


@in_cpp
def all_gather(
    tensor_list: Arrays,
    tensor: Array,
    group: Group = None,
    async_op: bool = False,
    *,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Copy the tensor of rank i into tensor_list[i] on all ranks.

    Args:
        tensor_list: One output per rank, in group order, each as large as `tensor`.
        tensor: [...] same number of elements and dtype on all ranks.
        group: The default group if None.
        async_op: Return a `Work` at once.
        compress: As for all_reduce.
        **how: timeout, algorithm.

    Examples: On rank 1 of 2
        >>> parts = [np.zeros(2), np.zeros(2)]
        >>> dist.all_gather(parts, np.array([rank, 5.0]))
        >>> parts
        [array([0., 5.]), array([1., 5.])]
    """
    if (pg := _group(group, "all_gather", how)) is None:
        return None
    work = pg.all_gather(tensor_list, tensor, async_op=async_op, compress=compress, **how)
    return work if async_op else None


@in_cpp
def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: Group = None,
    async_op: bool = False,
    *,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Concatenate the tensors of all ranks in the output of each rank.

    For every rank r: `output_r[i*n : (i+1)*n] = input_i`, `n = input.count`

    Args:
        output_tensor: [p*n] elements in C order; concatenation or stack along dimension 0.
        input_tensor: [n] elements; may be a part of the output.
        group: The default group if None.
        async_op: Return a `Work` at once.
        compress: As for all_reduce.
        **how: timeout, algorithm.

    Examples: On rank 1 of 2
        >>> x = np.zeros(4)
        >>> dist.all_gather_into_tensor(x, np.array([rank, 5.0]))
        >>> x
        array([0., 5., 1., 5.])
    """
    if (pg := _group(group, "all_gather_into_tensor", how)) is None:
        return None
    work = pg.all_gather_into_tensor(
        output_tensor, input_tensor, async_op=async_op, compress=compress, **how
    )
    return work if async_op else None


def all_gather_coalesced(
    output_tensor_lists: Sequence[Arrays],
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: bool = False,
    **how: Unpack[CallKeywords],
) -> Future | None:
    """all_gather of several tensors of one dtype, as one message.

    `output_tensor_lists[i][j]` becomes the j-th tensor of rank i. As in torch, an asynchronous
    call returns a `Future`.

    Examples: On rank 1 of 2
        >>> parts = [[np.zeros(1), np.zeros(2)] for _ in range(2)]
        >>> dist.all_gather_coalesced(parts, [np.full(1, 7.0), np.array([rank, 5.0])])
        >>> parts
        [[array([7.]), array([0., 5.])], [array([7.]), array([1., 5.])]]
    """
    if (pg := _group(group, "all_gather_coalesced", how)) is None:
        return None
    lists = output_tensor_lists, input_tensor_list
    work = pg.all_gather_coalesced(*lists, async_op=async_op, **how)
    return work.get_future() if async_op else None


@in_cpp
def gather(
    tensor: Array,
    gather_list: Arrays | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Copy the tensor of rank i into gather_list[i] on rank `dst` (global rank 0 by default).

    `gather_list` is required on `dst` and must be empty or None elsewhere.

    Examples: On rank 0 of 2
        >>> parts = [np.zeros(1), np.zeros(1)] if rank == 0 else None
        >>> dist.gather(np.array([rank + 5.0]), parts, dst=0)
        >>> parts
        [array([5.]), array([6.])]
    """
    if (pg := _group(group, "gather", how)) is None:
        return None
    root = root_of(pg, "gather", dst, group_dst, default=0)
    work = pg.gather(tensor, gather_list, root, async_op=async_op, **how)
    return work if async_op else None


def gather_into_tensor(
    output_tensor: Array | None,
    input_tensor: Array,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Concatenate the tensors of all ranks on rank `dst` (global rank 0 by default).

    Args:
        output_tensor: [p*rows, ...] on `dst`, an array with rows, such as a NumPy array; None
            elsewhere.
        input_tensor: [rows, ...] same number of elements and dtype on all ranks.
        dst: Global rank of the root.
        group: The default group if None.
        async_op: Return a `Work` at once.
        group_dst: The root's rank in the group, instead of `dst`.
        **how: timeout, algorithm.

    Examples: On rank 0 of 2
        >>> x = np.zeros(4) if rank == 0 else None
        >>> dist.gather_into_tensor(x, np.array([rank, 5.0]), dst=0)
        >>> x
        array([0., 5., 1., 5.])
    """
    if (pg := _group(group, "gather_into_tensor", how)) is None:
        return None
    root = root_of(pg, "gather_into_tensor", dst, group_dst, default=0)
    with reporting_bad_arguments(pg, "gather_into_tensor"):
        parts = None if output_tensor is None else rows_of(output_tensor, pg.size())
    how["_label"] = "gather_into_tensor"  # type: ignore[typeddict-unknown-key]
    work = pg.gather(input_tensor, parts, root, async_op=async_op, **how)
    return work if async_op else None


gather_single = gather_into_tensor
"""Another name of `gather_into_tensor`, and the newer one."""


@in_cpp
def scatter(
    tensor: Array,
    scatter_list: Arrays | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Copy scatter_list[i] of rank `src` (global rank 0 by default) into rank i's tensor.

    `scatter_list` is required on `src` and must be empty or None elsewhere.

    Examples: On rank 1 of 2
        >>> x, parts = np.zeros(1), [np.array([5.0]), np.array([6.0])]
        >>> dist.scatter(x, parts if rank == 0 else None, src=0)
        >>> x
        array([6.])
    """
    if (pg := _group(group, "scatter", how)) is None:
        return None
    root = root_of(pg, "scatter", src, group_src, default=0)
    work = pg.scatter(tensor, scatter_list, root, async_op=async_op, **how)
    return work if async_op else None


@in_cpp
def reduce_scatter(
    output: Array,
    input_list: Arrays,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Fill the output of rank i with the reduction of input_list[i] over all ranks.

    Examples: On rank 1 of 2
        >>> x = np.zeros(1)
        >>> dist.reduce_scatter(x, [np.array([rank + 1.0]), np.array([rank + 5.0])])
        >>> x
        array([11.])
    """
    if (pg := _group(group, "reduce_scatter", how)) is None:
        return None
    work = pg.reduce_scatter(output, input_list, op, async_op=async_op, compress=compress, **how)
    return work if async_op else None


@in_cpp
def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    reproducible: bool = False,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Reduce equal parts of `input` over all ranks; each rank keeps its own part.

    For every rank r: `output_r = reduction over q of input_q[r*n : (r+1)*n]`, `n = output.count`

    Args:
        output: [n] elements; may be a part of the input.
        input: [p*n] elements in C order.
        op: As for all_reduce.
        group: The default group if None.
        async_op: Return a `Work` at once.
        reproducible: As for all_reduce.
        compress: As for all_reduce.
        **how: timeout, algorithm.

    Examples: On rank 1 of 2
        >>> x = np.zeros(1)
        >>> dist.reduce_scatter_tensor(x, np.array([rank + 1.0, rank + 5.0]))
        >>> x
        array([11.])
    """
    if (pg := _group(group, "reduce_scatter_tensor", how)) is None:
        return None
    work = pg.reduce_scatter_tensor(
        output,
        input,
        op,
        async_op=async_op,
        reproducible=reproducible,
        compress=compress,
        **how,
    )
    return work if async_op else None


@in_cpp
def all_to_all(
    output_tensor_list: Arrays,
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: bool = False,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Copy input_tensor_list[j] of rank i into output_tensor_list[i] of rank j.

    Sizes may differ from pair to pair; both ranks of a pair must give the same size.

    Examples: On rank 1 of 2
        >>> parts = [np.zeros(1), np.zeros(1)]
        >>> dist.all_to_all(parts, [np.array([rank + 10.0]), np.array([rank + 20.0])])
        >>> parts
        [array([20.]), array([21.])]
    """
    if (pg := _group(group, "all_to_all", how)) is None:
        return None
    work = pg.all_to_all(output_tensor_list, input_tensor_list, async_op=async_op, **how)
    return work if async_op else None


@in_cpp
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Copy the j-th part of rank i's input into the i-th part of rank j's output.

    Args:
        output: [rows, ...] as many rows as this rank receives.
        input: [rows, ...] as many rows as this rank sends.
        output_split_sizes: Rows from each rank, as a list, array, tensor or iterator of integers;
            equal parts if None or empty.
        input_split_sizes: Rows to each rank, likewise.
        group: The default group if None.
        async_op: Return a `Work` at once.
        **how: timeout, algorithm.

    Raises:
        ArgumentTypeError: Split sizes that are not integers.
        InvalidArgumentError: Splits that do not add up, or rows that do not divide.
        CollectiveMismatchError: A rank sends another size than the receiver expects; names the
            pairs.

    Examples: On rank 1 of 2
        >>> x = np.zeros(2 + 2 * rank)
        >>> dist.all_to_all_single(x, np.arange(3.0) + 10 * rank, [1 + rank, 1 + rank], [1, 2])
        >>> x
        array([ 1.,  2., 11., 12.])
    """
    if (pg := _group(group, "all_to_all_single", how)) is None:
        return None
    rows = output_split_sizes, input_split_sizes
    work = pg.all_to_all_single(output, input, *rows, async_op=async_op, **how)
    return work if async_op else None


@in_cpp
def scan(
    tensor: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Replace rank r's tensor by the reduction over ranks 0..r.

    For every rank r:  tensor_r = tensor_0 (op) tensor_1 (op) ... (op) tensor_r

    Args:
        tensor: [...] same number of elements and dtype on all ranks; any layout.
        op: As for all_reduce; AVG divides by r + 1.
        group: The default group if None.
        async_op: Return a `Work` at once; the tensor must stay untouched until it is done.
        **how: timeout (seconds or timedelta), algorithm, deterministic.

    Raises:
        UnsupportedError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError: As
            `all_reduce` does.

    Cost: small: ceil(log2 p) rounds; large: a chain, in which every rank sends its tensor once.
    Source: MPI_Scan.

    Examples: On rank 1 of 2
        >>> x = np.array([rank + 2])
        >>> dist.scan(x)
        >>> x
        array([5])
    """
    if (pg := _group(group, "scan", how)) is None:
        return None
    work = pg.scan(tensor, op, async_op=async_op, **how)
    return work if async_op else None


@in_cpp
def exscan(
    tensor: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    **how: Unpack[CallKeywords],
) -> Work | None:
    """Replace rank r's tensor by the reduction over ranks 0..r-1; rank 0 keeps its own.

    For every rank r > 0:  tensor_r = tensor_0 (op) tensor_1 (op) ... (op) tensor_{r-1}

    Arguments and errors are those of `scan`; AVG divides by r.

    Cost: small: one round more than scan; large: the same as scan.
    Source: MPI_Exscan, which leaves rank 0's result undefined.

    Examples: On rank 1 of 2
        >>> x = np.array([rank + 2])
        >>> dist.exscan(x)
        >>> x
        array([2])
    """
    if (pg := _group(group, "exscan", how)) is None:
        return None
    work = pg.exscan(tensor, op, async_op=async_op, **how)
    return work if async_op else None


@in_cpp
def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    **how: Unpack[AlgorithmKeywords],
) -> Work | None:
    """Return on no rank before every rank has called it.

    `device_ids` is accepted for torch's sake; a barrier of CPU ranks touches no device.

    Examples: On rank 1 of 2
        >>> work = dist.barrier(async_op=True)
        >>> work.wait()
        True
    """
    if (pg := _group(group, "barrier", how)) is None:
        return None
    work = pg.barrier(async_op=async_op, timeout=timeout, **how)
    return work if async_op else None


all_gather_single = _all_gather_base = all_gather_into_tensor
"""Another name of `all_gather_into_tensor`."""
reduce_scatter_single = _reduce_scatter_base = reduce_scatter_tensor
"""Another name of `reduce_scatter_tensor`."""
