"""Files of safetensors' format: their headers, what is where, arrays mapped into memory.

An array in blocks of int8 (`blocks.py`) is two arrays of a file: its codes have its name, and its
scales have the name with ".scales". The metadata "unisono.blocks" has the borders of its blocks
that are no multiples of 128, as JSON by name. So other readers find codes and scales.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.beyond.boxes import IndexBox, whole
from unisono.beyond.reshard.blocks import BlockedBox, borders_from
from unisono.beyond.reshard.parts import ArrayParts, Convert, converter
from unisono.beyond.reshard.planned import PlannedArray
from unisono.core.base.buffers import as_bytes
from unisono.core.base.types import DType, dtype_named
from unisono.core.engines.block_codes import BLOCK
from unisono.core.schedules.ir import IntArray
from unisono.errors import InvalidArgumentError

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Names of dtypes in files."""

INDEX = ".safetensors.index.json"
"""How the name of an index ends, as that of a model in several files."""

SCALES = ".scales"
"""What is added to the name of an array for its scales."""

_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_BLOCKS = "unisono.blocks"
# As safetensors itself: larger headers are refused before they are read.
_MOST_HEADER = 100_000_000
# What a header that is wrong raises.
_BROKEN = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
# Bytes converted at once: they stay in a cache.
_AT_ONCE = 1 << 20


class StoredEntry(NamedTuple):
    """One array of a file that is written.

    Attributes:
        name: Its name in the file.
        dtype: As it is stored.
        shape: Of the whole array.
        plan: Of the array that it has, or whose scales it has.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    plan: PlannedArray

    @property
    def nbytes(self) -> int:
        """Size of the array in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def entries_of(plan: PlannedArray, shape: tuple[int, ...]) -> list[StoredEntry]:
    """Return the arrays that a file has for one array."""
    if plan.borders is None:
        return [StoredEntry(plan.name, plan.target, shape, plan)]
    scales = (*shape[:-1], len(plan.borders) - 1)
    return [
        StoredEntry(plan.name, dtype_named("int8"), shape, plan),
        StoredEntry(plan.name + SCALES, dtype_named("float32"), scales, plan),
    ]


class FileLayout:
    """What a file has, and where.

    Args:
        entries: All arrays of the file.

    Attributes:
        header: Bytes before the arrays.
        nbytes: Size of all arrays.
    """

    def __init__(self, entries: Sequence[StoredEntry]) -> None:
        # The widest first, so that each array is aligned.
        self._entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
        self._begins: list[int] = []
        header: dict[str, Any] = {}
        at = 0
        for entry in self._entries:
            end = at + entry.nbytes
            header[entry.name] = {
                "dtype": NAMES[entry.dtype.name],
                "shape": list(entry.shape),
                "data_offsets": [at, end],
            }
            self._begins.append(at)
            at = end
        self.nbytes = at
        blocks = {
            entry.name: _sides(entry.plan.borders)
            for entry in self._entries
            if entry.plan.borders is not None and entry.name == entry.plan.name
        }
        if blocks:
            header["__metadata__"] = {_BLOCKS: json.dumps(blocks, separators=(",", ":"))}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)

    def pieces(
        self, rank: int, parts: Mapping[str, ArrayParts]
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield what a rank writes, with its offset behind the header."""
        for entry, begin in zip(self._entries, self._begins, strict=True):
            size = entry.dtype.itemsize
            for each in entry.plan.transfers:
                if each.source != rank:
                    continue
                for box in each.box.cut(_AT_ONCE // size):
                    inside, data = _stored(entry, box, parts[entry.plan.name])
                    raw = as_bytes(data.reshape(-1))
                    offsets, run = inside.runs(entry.shape)
                    for at, offset in enumerate(offsets):
                        yield begin + offset * size, raw[at * run * size : (at + 1) * run * size]


def _sides(borders: IntArray) -> list[int]:
    """Return the borders that are no multiples of a block's length, but the last one."""
    inner = borders[:-1]
    return [int(border) for border in inner[inner % BLOCK != 0]]


def _stored(
    entry: StoredEntry, box: IndexBox, parts: ArrayParts
) -> tuple[IndexBox, np.ndarray[Any, Any]]:
    """Return what is stored for a box of an array, contiguous, and where in the entry it is."""
    plan = entry.plan
    if plan.borders is None:
        data = np.empty(box.shape, plan.target.storage)
        _convert(plan.source, plan.target)(data, parts.memory_of(box))
        return box, data
    blocks = BlockedBox.of(box, plan.borders)
    packed = np.empty(blocks.nbytes, np.uint8)
    blocks.pack(plan.source.name == "bfloat16", packed, parts.memory_of(blocks.wide))
    scales, codes = blocks.split(packed)
    if entry.name == plan.name:
        return box, codes
    first = int(np.searchsorted(plan.borders, blocks.wide.begins[-1]))
    # A block that begins before the box has the scale from the box before.
    later = int(plan.borders[first] < box.begins[-1])
    begins, ends = (*box.begins[:-1], first + later), (*box.ends[:-1], first + len(blocks.starts))
    return IndexBox(begins, ends), np.ascontiguousarray(scales[..., later:])


class StoredArray(NamedTuple):
    """An array in a file.

    Attributes:
        dtype: Or the name of one that unisono has not.
        memory: The file's.
        scales: Of its blocks if it has codes.
        borders: Of these blocks; None of scales if the file does not say them.
    """

    dtype: DType | str
    memory: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any] | None = None
    borders: IntArray | None = None

    def _is_coded_for(self, wanted: DType) -> bool:
        return self.borders is not None and wanted.kind == "f"

    @property
    def _lacks_borders(self) -> bool:
        return self.scales is not None and self.borders is None

    def why_not(self, name: str) -> str:
        """Return what to add to an error of an array of this name that becomes no other."""
        lacks = f"; {name + SCALES!r} has scales, but the file has no metadata {_BLOCKS!r}"
        return lacks if self._lacks_borders else ""

    def becomes(self, wanted: DType) -> bool:
        """Whether the array can be read as this dtype."""
        if isinstance(self.dtype, str):
            return False
        if self._lacks_borders and wanted.kind in "fc":
            # As of a tool that does not copy metadata: codes are no values.
            return False
        given = dtype_named("float32") if self._is_coded_for(wanted) else self.dtype
        return converter(given, wanted) is not None

    def copy(self, box: IndexBox, into: Any, wanted: DType) -> None:
        """Copy a box, as a dtype that the array becomes."""
        assert not isinstance(self.dtype, str)
        if not self._is_coded_for(wanted):
            _convert(self.dtype, wanted)(into, self.memory[box.within(whole(self.memory.shape))])
            return
        assert self.borders is not None
        assert self.scales is not None
        convert = _convert(dtype_named("float32"), wanted)
        for part in box.cut(_AT_ONCE // 4):
            blocks = BlockedBox.of(part, self.borders)
            packed = np.empty(blocks.nbytes, np.uint8)
            scales, codes = blocks.split(packed)
            first = int(np.searchsorted(self.borders, blocks.wide.begins[-1]))
            rows = part.within(whole(self.memory.shape))[1:-1]
            scales[...] = self.scales[(*rows, slice(first, first + len(blocks.starts)))]
            codes[...] = self.memory[part.within(whole(self.memory.shape))]
            blocks.unpack(convert, into[part.within(box)], packed)


def _convert(given: DType, wanted: DType) -> Convert:
    made = converter(given, wanted)
    assert made is not None  # the caller has checked it
    return made


def opened(path: str) -> tuple[dict[str, StoredArray], str]:
    """Return the arrays of a file or index, mapped into memory; the files may be removed then.

    The other result is another one for each version of the files, on all hosts that see them.

    Raises:
        InvalidArgumentError: It is no whole file of safetensors' format.
    """
    if path.endswith(INDEX):
        return _opened_index(path)
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        length = int.from_bytes(file.read(8), "little")
        try:
            if not 2 <= length <= min(_MOST_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes in {size} bytes")
            entries = json.loads(file.read(length))
            metadata = entries.pop("__metadata__", None) or {}
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            found = {}
            for name, entry in entries.items():
                if entry["dtype"] not in _DTYPES:
                    found[name] = StoredArray(str(entry["dtype"]), np.empty(0))
                    continue
                dtype, shape = dtype_named(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
                begin, end = entry["data_offsets"]
                nbytes = math.prod(shape) * dtype.itemsize
                if begin < 0 or end - begin != nbytes or 8 + length + end > size:
                    raise ValueError(f"array {name!r} is at {begin}:{end}")
                data = np.ndarray(shape, dtype.storage, memory, 8 + length + begin)
                found[name] = StoredArray(dtype, data)
            for name, sides in json.loads(metadata.get(_BLOCKS, "{}")).items():
                found[name] = _coded(name, found, sides)
        except _BROKEN as error:
            raise InvalidArgumentError(
                f"{path} is no whole file of safetensors' format: {error}"
            ) from None
    return _with_scales(found), identity_of(status)


def identity_of(status: os.stat_result) -> str:
    """Return a text that is another one for each file, on all hosts that see it."""
    # Not the device, which each host numbers as it likes.
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _with_scales(found: dict[str, StoredArray]) -> dict[str, StoredArray]:
    """Return the arrays; codes have their scales also if no borders are known."""
    for name, array in found.items():
        if str(array.dtype) == "int8" and name + SCALES in found and array.scales is None:
            found[name] = array._replace(scales=found[name + SCALES].memory)
    return found


def _coded(name: str, found: Mapping[str, StoredArray], sides: Sequence[int]) -> StoredArray:
    """Return codes with their scales."""
    codes, scales = found[name], found[name + SCALES]
    *rows, n = codes.memory.shape
    if any(not 0 < side < n for side in sides):
        raise ValueError(f"array {name!r} has blocks at {sides}")
    borders = borders_from(n, sides)
    kinds = [str(each.dtype) for each in (codes, scales)]
    if kinds != ["int8", "float32"] or scales.memory.shape != (*rows, len(borders) - 1):
        raise ValueError(f"array {name!r} has scales {kinds[1]}{list(scales.memory.shape)}")
    return StoredArray(codes.dtype, codes.memory, scales.memory, borders)


def _opened_index(path: str) -> tuple[dict[str, StoredArray], str]:
    """Return the same for an index."""
    while True:
        names, text = names_in(path)
        parts, versions = {}, [text]
        try:
            for part in sorted(set(names.values())):
                parts[part], version = opened(os.path.join(os.path.dirname(path), part))
                versions.append(version.encode())
        except FileNotFoundError:
            # The parts are removed when another index has the name.
            if names_in(path)[1] == text:
                raise
            continue
        found = {name: parts[part][name] for name, part in names.items() if name in parts[part]}
        return _with_scales(found), hashlib.sha256(b" ".join(versions)).hexdigest()


def names_in(path: str) -> tuple[dict[str, str], bytes]:
    """Return the part of each array in an index, and its text.

    Raises:
        InvalidArgumentError: It is no index.
    """
    try:
        with open(path, "rb") as file:
            text = file.read()
        names: dict[str, str] = dict(json.loads(text)["weight_map"])
        for part in names.values():
            if os.path.basename(part) != part or not part.endswith(".safetensors"):
                raise ValueError(f"part {part!r}")
    except _BROKEN as error:
        raise InvalidArgumentError(f"{path} is no index of safetensors' format: {error}") from None
    return names, text
