"""Reductions and gathers that send fewer bytes: codes in blocks, or bfloat16.

Each rank owns a part of the result. It gets that part of all ranks as codes, and adds their values
and its own exact one in float32, in the order of ranks. It sends the codes of the sum to all ranks.
All ranks decode the same codes, the owner too, so that all have the same bits.

    encode parts -> all_to_all -> decode, sum, encode -> all_gather -> decode

Large data goes in pieces: while one is on the way, the CPU works on others. All exchanges of a call
are made on all ranks, whatever fails between them: what a rank cannot make it refuses.

Source: the two compressed phases, and what each lost, as in Tang et al., "DoubleSqueeze" (2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from unisono.core.backends import CallOptions, Pending
from unisono.core.base.buffers import Array, BufferView, device_of, view
from unisono.core.base.types import ReduceOp, as_reduce_op
from unisono.core.engines.block_codes import (
    BLOCK,
    BLOCK_CODES,
    COMPRESSIONS,
    codec_of,
    coded_nbytes,
)
from unisono.core.engines.kernels import narrow, widen
from unisono.core.operations.dispatch import dispatcher
from unisono.core.operations.work import Work
from unisono.errors import InvalidArgumentError, UnsupportedError

_DTYPES = ("float16", "bfloat16", "float32", "float64")
# Elements of all ranks together in a piece; fewer take longer for the agreement than on the way. On
# all ranks the same, whether their codes are made in C++ or in NumPy.
_PIECE = 1 << 22
_MOST_PIECES = 8
# Elements at once, so that all that is between stays in the cache.
_CHUNK = 1 << 16


class _Codes:
    """The codes of n elements in memory, and the scales of their blocks before them.

    Args:
        compress: Kind of code.
        memory: uint8 [coded_nbytes(compress, n)], aligned.
        n: Number of elements.
    """

    def __init__(self, compress: str, memory: Array, n: int) -> None:
        self._codec = codec_of(compress)
        blocks = -(-n // BLOCK) if compress in BLOCK_CODES else 0
        self._scales = memory[: 4 * blocks].view(np.float32)
        storage = np.dtype(self._codec.storage)
        self._codes = memory[4 * blocks : 4 * blocks + n * storage.itemsize].view(storage)

    def encode(self, at: int, values: Array) -> None:
        """Write the codes of float32 values from element `at` on, a multiple of a block."""
        self._codec.encode(values, *self._from(at, values))

    def decode(self, at: int, values: Array) -> Array:
        """Fill float32 values with those of the codes from element `at` on, and return them."""
        self._codec.decode(*self._from(at, values), values)
        return values

    def add(self, at: int, values: Array) -> None:
        """Add the values of the codes from element `at` on."""
        self._codec.add(*self._from(at, values), values)

    def _from(self, at: int, values: Array) -> tuple[Array, Array]:
        return self._scales[at // BLOCK :], self._codes[at : at + len(values)]


class _CodedCall(NamedTuple):
    """A call whose arguments are right.

    Attributes:
        group: The group.
        compress: Kind of code.
        label: The call as the ranks must agree on it.
        ins: What this rank contributes: one array for all ranks, or one for each; if it gathers,
            its own.
        outs: What it gets, likewise.
        reduces: Whether it sums, or only gathers.
        spreads: Whether all ranks get all parts, or each its own.
        divisor: Divides the sum.
        lost: [n] float32 for what this rank has not sent, or None; see `reduce_compressed`.
    """

    group: Any
    compress: str
    label: str
    ins: list[BufferView]
    outs: list[BufferView]
    reduces: bool
    spreads: bool
    divisor: int = 1
    lost: Array | None = None


def reduce_compressed(
    group: Any,
    name: str,
    compress: Any,
    op: Any,
    outputs: Any,
    inputs: Any,
    how: Any,
    lost: Array | None = None,
) -> Work:
    """Sum or average over all ranks by codes; see `unisono.all_reduce`.

    Args:
        group: The group.
        name: Name of the method.
        compress: "int8", "fp8" or "bf16".
        op: SUM or AVG.
        outputs: What is written.
        inputs: This rank's contribution: an array, or a list of one for each rank.
        how: The other keywords of the call.
        lost: [n] float32; gets what the codes lack, 0 where that is not finite. The result (of AVG
            times p) and the sum of all ranks' `lost` are the sum, up to float32's rounding.

    Raises:
        InvalidArgumentError: `compress` is no kind of code, or sizes or dtypes do not fit.
        UnsupportedError: Another op or dtype, or a keyword that such a call does not take.
    """
    code = _checked(name, compress, how)
    listed = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    spreads, size = name == "all_reduce", group.size()
    ins = [view(each, write=spreads, pack=False) for each in listed]
    outs = ins if spreads else [view(outputs, write=True, pack=False)]
    if (kind := as_reduce_op(op)) not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UnsupportedError(f"{name} with compress of {kind.name}: only SUM and AVG")
    dtype = _one_dtype(name, [*ins, *outs])
    total, given = outs[0].count * (1 if spreads else size), sum(each.count for each in ins)
    if total != given or len({each.count for each in ins}) > 1:
        raise InvalidArgumentError(
            f"{name}: the output has {outs[0].count} elements, expected 1/{size} of the input's "
            f"{given}"
        )
    label = f"{name}, compress {code} {kind.name} of {dtype}[{given}]"
    divisor = size if kind == ReduceOp.AVG else 1
    call = _CodedCall(group, code, label, ins, outs, True, spreads, divisor, lost)
    return _made(call, name, listed[0], [outputs], how)


def gather_compressed(
    group: Any, name: str, compress: Any, outputs: Any, tensor: Any, how: Any
) -> Work:
    """Gather by codes; see `unisono.all_gather`.

    Args:
        group: The group.
        name: Name of the method.
        compress: "int8", "fp8" or "bf16".
        outputs: An array of all parts, or a list of one for each rank.
        tensor: This rank's part.
        how: The other keywords of the call.

    Raises:
        InvalidArgumentError: `compress` is no kind of code, or sizes or dtypes do not fit.
        UnsupportedError: Another dtype, or a keyword that such a call does not take.
    """
    code, size = _checked(name, compress, how), group.size()
    listed = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    outs = [view(each, write=True, pack=False) for each in listed]
    own = view(tensor, write=False, pack=False)
    dtype, share = _one_dtype(name, [own, *outs]), size // len(outs)
    for out in outs:
        if out.count != own.count * share:
            raise InvalidArgumentError(
                f"{name}: an output has {out.count} elements, expected {own.count * share}: the "
                f"input's {own.count} of {share} ranks"
            )
    label = f"{name}, compress {code} of {dtype}[{own.count}]"
    call = _CodedCall(group, code, label, [own], outs, False, True)
    return _made(call, name, tensor, listed, how)


def _checked(name: str, compress: Any, how: Any) -> str:
    if compress not in COMPRESSIONS:
        raise InvalidArgumentError(
            f"{name}: compress={compress!r}, expected one of {', '.join(COMPRESSIONS)}"
        )
    for taken in (
        "algorithm", "accumulate", "reproducible", "input_split_sizes", "output_split_sizes"
    ):  # fmt: skip
        if how.get(taken) not in (None, False):
            raise UnsupportedError(f"{name} with compress takes no {taken}")
    return str(compress)


def _one_dtype(name: str, views: Sequence[BufferView]) -> str:
    found = {each.dtype.name: None for each in views}
    if len(found) > 1 or not found.keys() <= {*_DTYPES}:
        raise UnsupportedError(
            f"{name} with compress of {', '.join(found)}: only one of {', '.join(_DTYPES)}"
        )
    return next(iter(found))


def _made(call: _CodedCall, name: str, first: Any, outputs: list[Any], how: Any) -> Work:
    """Make the call on this thread, or on that of the group's stream queue."""
    group, device = call.group, device_of(first)
    given = {k: each for k, each in how.items() if k in ("async_op", "deterministic", "timeout")}
    options = group._options(given)

    def run(options: CallOptions) -> Pending:
        with np.errstate(all="ignore"):
            _CodedExchanges(call, device, options).run()
        return Pending(outputs, done=True)

    # Its exchanges follow from one another, so a thread must make them. The queue's is the one
    # behind which all later calls of the group wait.
    if options.async_op or group._follows_stream():
        return Work(group._queue(name, device, run, options), name, group)
    return Work(run(options), name, group)


def piece_of(n: int, size: int) -> int:
    """Return how many elements of a rank's part of n are exchanged at once: whole blocks."""
    most = max(_PIECE // size, -(-n // _MOST_PIECES), 1)
    return -(-most // BLOCK) * BLOCK


class _CodedExchanges:
    """The exchanges of one call, and the work on the CPU between them."""

    def __init__(self, call: _CodedCall, device: str, options: CallOptions) -> None:
        self.call, self.device, self.options = call, device, options
        self.rank, self.size = call.group.rank(), call.group.size()
        for each in dict.fromkeys([*call.ins, *call.outs]):
            each.pack()
        self.dtype = call.outs[0].dtype.name
        # A part for each rank. Of a whole array it has whole blocks, but the last.
        self.ins = self._parts(call.ins) if call.reduces else []
        self.outs = self._parts(call.outs) if call.spreads else []
        if not call.spreads and np.may_share_memory(call.outs[0].array, self.ins[self.rank]):
            self.ins = [*self.ins]
            self.ins[self.rank] = self.ins[self.rank].copy()
        self.left = 0

    def _parts(self, views: list[BufferView], array: Array | None = None) -> list[Array]:
        arrays = [each.array for each in views] if array is None else [array]
        if len(arrays) == self.size:
            return arrays
        (flat,), n, p = arrays, arrays[0].size, self.size
        unit = BLOCK if self.call.reduces and self.call.spreads else n // p or 1
        starts = [min(n, -(-n // unit) * r // p * unit) for r in range(p + 1)]
        return [flat[begin:end] for begin, end in pairwise(starts)]

    def run(self) -> None:
        """Make the call.

        Raises:
            CollectiveMismatchError: The ranks disagree. No array was changed.
            CommunicationError: As of the exchanges; see `unisono.errors`.
        """
        call, lost = self.call, self.call.lost
        if lost is not None:
            lost[:] = 0
        if self.size == 1:
            for out, given in zip(call.outs, call.ins, strict=True):
                out.array[:] = given.array
        else:
            # First, so that wrong arguments end the call before its exchanges.
            self._wait(self._begin("agree", call.label))
            self._exchange(self._parts([], lost) if lost is not None else [])
        for out in call.outs:
            out.unpack()

    def _exchange(self, lost: list[Array]) -> None:
        call, p, parts = self.call, self.size, self.ins or self.outs
        most = max(len(part) for part in parts)
        step = piece_of(most, p)
        pieces = [slice(at, at + step) for at in range(0, most, step)]
        self.left = len(pieces) * (call.reduces + call.spreads)
        try:
            sent = [self._send(piece, lost) for piece in pieces] if call.reduces else []
            spread = []
            for piece in pieces:
                arrived = sent.pop(0) if sent else None
                spread.append(self._own(piece, arrived, lost))
            for piece in pieces if call.spreads else ():
                self._finish(piece, spread.pop(0))
        except BaseException as error:
            # The other ranks make all exchanges.
            while self.left and not any(each.broken() for each in call.group.backends.values()):
                self.left -= 1
                call.group.refuse(call.label, error, async_op=self.options.async_op)
            raise

    def _begin(self, op: str, *arguments: Any, splits: list[int] | None = None) -> Pending:
        options = self.options._replace(
            async_op=True, label=self.call.label, split_sizes=splits, prepare=False
        )
        kernel = partial(dispatcher.kernel(op, self.device), self.call.group, self.device)
        pending: Pending = kernel(*arguments, options)
        self.left -= op != "agree"
        return pending

    def _wait(self, pending: Pending) -> None:
        pending.wait_or_expire(None)
        if pending.error is not None:
            raise pending.error

    def _codes_of(self, parts: list[Array], piece: slice) -> tuple[Array, list[_Codes], list[int]]:
        """Return memory for codes of a piece of arrays, the codes, and their sizes in bytes."""
        compress, counts = self.call.compress, [len(part[piece]) for part in parts]
        sizes = [coded_nbytes(compress, n) for n in counts]
        memory, codes, at = np.empty(sum(sizes), np.uint8), [], 0
        for n, nbytes in zip(counts, sizes, strict=True):
            codes.append(_Codes(compress, memory[at : at + nbytes], n))
            at += nbytes
        return memory, codes, sizes

    def _load(self, part: Array, at: int) -> Array:
        values = part[at : at + _CHUNK]
        if self.dtype == "bfloat16":
            return widen(values)
        return values.astype(np.float32, copy=False)

    def _store(self, part: Array, at: int, values: Array) -> None:
        part[at : at + len(values)] = narrow(values) if self.dtype == "bfloat16" else values

    def _send(self, piece: slice, lost: list[Array]) -> tuple[Pending, list[_Codes]]:
        """Begin to send the codes of a piece of all parts but the own; return those to come."""
        parts, me = self.ins, self.rank
        others = [r for r in range(self.size) if r != me]
        memory, codes, sizes = self._codes_of([parts[r] for r in others], piece)
        for r, code in zip(others, codes, strict=True):
            part = parts[r][piece]
            for at in range(0, len(part), _CHUNK):
                values = self._load(part, at)
                code.encode(at, values)
                if lost:
                    left = lost[r][piece][at : at + _CHUNK]
                    _set_lost(left, values, code.decode(at, np.empty_like(values)))
        into, arriving, counts = self._codes_of([parts[me]] * len(others), piece)
        sizes.insert(me, 0)
        counts.insert(me, 0)
        return self._begin("all_to_all_single", into, memory, counts, sizes), arriving

    def _own(
        self, piece: slice, arrived: tuple[Pending, list[_Codes]] | None, lost: list[Array]
    ) -> tuple[Pending, list[_Codes]] | None:
        """Make a piece of this rank's part of the result; begin to send its codes to all ranks."""
        call, me = self.call, self.rank
        outs, codes = call.outs[0].array[piece], list[_Codes]()
        own = (self.ins[me] if call.reduces else call.ins[0].array)[piece]
        if call.spreads:
            memory, codes, sizes = self._codes_of(self.outs, piece)
            begin = sum(sizes[:me])
        if arrived is not None:
            self._wait(arrived[0])
        for at in range(0, len(own), _CHUNK):
            values = self._load(own, at)
            if arrived is not None:
                values = self._sum(values, at, arrived[1])
            if not call.spreads:
                self._store(outs, at, values)
                continue
            codes[me].encode(at, values)
            if lost:
                left = lost[me][piece][at : at + _CHUNK]
                _set_lost(left, values, codes[me].decode(at, np.empty_like(values)))
                left *= np.float32(call.divisor)
        if not call.spreads:
            return None
        mine = memory[begin : begin + sizes[me]]
        pending = self._begin("all_gather_into_tensor", memory, mine, splits=sizes)
        if call.reduces:
            self._decode(codes[me], self.outs[me][piece])
        return pending, codes

    def _sum(self, own: Array, at: int, arrived: list[_Codes]) -> Array:
        """Return the sum of a chunk in the order of ranks, divided."""
        others, total = iter(arrived), np.empty_like(own)
        for r in range(self.size):
            if r == self.rank:
                np.copyto(total, own) if r == 0 else np.add(total, own, out=total)
            else:
                code = next(others)
                code.decode(at, total) if r == 0 else code.add(at, total)
        if self.call.divisor != 1:
            total /= np.float32(self.call.divisor)
        return total

    def _decode(self, code: _Codes, part: Array) -> None:
        """Set a piece of a part of the result."""
        for at in range(0, len(part), _CHUNK):
            into = part[at : at + _CHUNK]
            if self.dtype == "float32":
                code.decode(at, into)
            else:
                self._store(part, at, code.decode(at, np.empty(len(into), np.float32)))

    def _finish(self, piece: slice, spread: tuple[Pending, list[_Codes]] | None) -> None:
        """Decode a piece of the parts that are not decoded yet."""
        assert spread is not None
        self._wait(spread[0])
        for r, code in enumerate(spread[1]):
            # A sum's own part is. A gather may still read there.
            if r != self.rank or not self.call.reduces:
                self._decode(code, self.outs[r][piece])


def _set_lost(lost: Array, values: Array, sent: Array) -> None:
    """Set what codes lack; an infinity or NaN would stay for ever where it is fed back."""
    np.subtract(values, sent, out=lost)
    if not np.isfinite(lost).all():
        lost[~np.isfinite(lost)] = 0
