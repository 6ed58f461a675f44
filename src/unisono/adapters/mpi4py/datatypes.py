"""Datatypes: which bytes of memory an element has, and in which order they are packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from unisono.adapters.mpi4py.errors import NUMBERS, fail, require
from unisono.adapters.mpi4py.handles import Attributes, Described, Handle, predefined

Ints = npt.NDArray[np.int64]


class TypeMap(Described):
    """The bytes of one element.

    Attributes:
        offsets, lengths: Of the contiguous pieces, in the order of packing; adjacent ones joined.
        size: Bytes of data.
        lb, extent: Where the element begins, and the distance of the next one.
        dtype: NumPy's type of all basic elements; None if they differ.
        elements: Number of basic elements.
        recipe: (combiner, integers, addresses, counts, datatypes), for `Get_contents`.
    """

    def __init__(
        self,
        pieces: tuple[Any, Any],
        bounds: tuple[int, int],
        dtype: np.dtype[Any] | None,
        ends: Sequence[int],
        recipe: tuple[Any, ...],
    ) -> None:
        offsets, lengths = (np.asarray(each, np.int64).reshape(-1) for each in pieces)
        kept = lengths > 0
        offsets, lengths = offsets[kept], lengths[kept]
        if len(offsets) > 1:
            first = np.r_[True, offsets[1:] != offsets[:-1] + lengths[:-1]]
            starts = np.flatnonzero(first)
            offsets, lengths = offsets[starts], np.add.reduceat(lengths, starts)
        self.offsets, self.lengths = offsets, lengths
        self.size = int(lengths.sum())
        self.lb, self.extent = int(bounds[0]), int(bounds[1])
        self.dtype, self.element_ends, self.elements = dtype, ends, len(ends)
        # Handles of its own: the program may free its.
        self.recipe = *recipe[:4], [Datatype(each) for each in recipe[4]]
        self.combiner = recipe[0]
        self.is_plain = (
            self.lb == 0
            and self.size == self.extent
            and (not self.size or (len(offsets) == 1 and offsets[0] == 0))
        )
        super().__init__()

    @property
    def true_bounds(self) -> tuple[int, int]:
        """Where the first byte is, and the distance to the end of the last one."""
        if not self.size:
            return 0, 0
        begin = int(self.offsets.min())
        return begin, int((self.offsets + self.lengths).max()) - begin

    def pieces(self, start: int, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Return pieces (place, bytes) of the elements at `start`: a part of their data."""
        if not nbytes or self.is_plain:
            return [(start + offset, nbytes)] if nbytes else []
        pieces = []
        element, skip = divmod(offset, self.size)
        while nbytes > 0:
            for at, size in zip(self.offsets.tolist(), self.lengths.tolist(), strict=True):
                taken = max(min(size - skip, nbytes), 0)
                if taken:
                    pieces.append((start + element * self.extent + at + skip, taken))
                nbytes -= taken
                skip = max(skip - size, 0)
            element += 1
        return pieces

    def index(self, count: int) -> Ints:
        """Return the places of all bytes of `count` elements."""
        one = np.repeat(self.offsets - np.r_[0, np.cumsum(self.lengths)[:-1]], self.lengths)
        one = one + np.arange(self.size)
        index: Ints = (np.arange(count)[:, None] * self.extent + one).reshape(-1)
        return index


# Name -> (NumPy's code, MPI's name if it is another one).
_C = (
    "BYTE:B PACKED:B AINT:p:l OFFSET:p:l COUNT:p:l CHAR:c:B WCHAR:U:i SIGNED_CHAR:b SHORT:h INT:i "
    "LONG:l LONG_LONG:q UNSIGNED_CHAR:B UNSIGNED_SHORT:H UNSIGNED:I UNSIGNED_LONG:L "
    "UNSIGNED_LONG_LONG:Q FLOAT:f DOUBLE:d LONG_DOUBLE:g C_BOOL:b1:? INT8_T:i1 INT16_T:i2 "
    "INT32_T:i4 INT64_T:i8 UINT8_T:u1 UINT16_T:u2 UINT32_T:u4 UINT64_T:u8 FLOAT16_T:e "
    "C_COMPLEX:F C_DOUBLE_COMPLEX:D C_LONG_DOUBLE_COMPLEX:G CXX_BOOL:? CXX_FLOAT_COMPLEX:F "
    "CXX_DOUBLE_COMPLEX:D CXX_LONG_DOUBLE_COMPLEX:G CHARACTER:c:B LOGICAL:i INTEGER:i REAL:f "
    "DOUBLE_PRECISION:d COMPLEX:F DOUBLE_COMPLEX:D LOGICAL1:i1 LOGICAL2:i2 LOGICAL4:i4 "
    "LOGICAL8:i8 INTEGER1:i1 INTEGER2:i2 INTEGER4:i4 INTEGER8:i8 REAL4:f4 REAL8:f8 COMPLEX8:c8 "
    "COMPLEX16:c16 REAL16:f16:g COMPLEX32:c32:G REAL2:f2 BFLOAT16_T: LOGICAL16: "
    "INTEGER16: COMPLEX4:"
)
_PAIRS = "SHORT_INT:h INT_INT:i LONG_INT:l FLOAT_INT:f DOUBLE_INT:d LONG_DOUBLE_INT:g"
_ALIASES = (
    "FLOAT32_T:FLOAT FLOAT64_T:DOUBLE C_FLOAT_COMPLEX:C_COMPLEX TWOINT:INT_INT "
    "UNSIGNED_INT:UNSIGNED SIGNED_SHORT:SHORT SIGNED_INT:INT SIGNED_LONG:LONG "
    "SIGNED_LONG_LONG:LONG_LONG BOOL:C_BOOL SINT8_T:INT8_T SINT16_T:INT16_T SINT32_T:INT32_T "
    "SINT64_T:INT64_T F_BOOL:LOGICAL F_INT:INTEGER F_FLOAT:REAL F_DOUBLE:DOUBLE_PRECISION "
    "F_COMPLEX:COMPLEX F_FLOAT_COMPLEX:COMPLEX F_DOUBLE_COMPLEX:DOUBLE_COMPLEX"
)
_CODES = (
    "?:C_BOOL b:SIGNED_CHAR h:SHORT i:INT l:LONG q:LONG_LONG B:UNSIGNED_CHAR H:UNSIGNED_SHORT "
    "I:UNSIGNED L:UNSIGNED_LONG Q:UNSIGNED_LONG_LONG e:FLOAT16_T f:FLOAT d:DOUBLE g:LONG_DOUBLE "
    "Zf:C_COMPLEX Zd:C_DOUBLE_COMPLEX F:C_COMPLEX D:C_DOUBLE_COMPLEX Zg:C_LONG_DOUBLE_COMPLEX "
    "G:C_LONG_DOUBLE_COMPLEX i1:INT8_T i2:INT16_T i4:INT32_T i8:INT64_T f4:FLOAT f8:DOUBLE "
    "f16:LONG_DOUBLE c8:C_COMPLEX c16:C_DOUBLE_COMPLEX c32:C_LONG_DOUBLE_COMPLEX b1:C_BOOL "
    "u1:UINT8_T u2:UINT16_T u4:UINT32_T u8:UINT64_T f2:FLOAT16_T n:COUNT N:UNSIGNED_LONG p:AINT "
    "P:UNSIGNED_LONG c:CHAR a:CHAR S:CHAR S1:CHAR s:CHAR 1s:CHAR U:WCHAR U1:WCHAR u:UINT16_T "
    "1u:UINT16_T w:WCHAR 1w:WCHAR M:INT64_T M8:INT64_T m:INT64_T m8:INT64_T"
)
_N = NUMBERS
_combiners = {v: k[9:] for k, v in _N.items() if k.startswith("COMBINER_")}
# The parameters by combiner, in the order of the values that made the datatype; `n-` is a number of
# values, and `*name` a list of as many.
_SHAPES = {
    "DUP": "",
    "CONTIGUOUS": "count",
    "VECTOR": "count blocklength stride",
    "HVECTOR": "count blocklength stride",
    "INDEXED": "n- *blocklengths *displacements",
    "HINDEXED": "n- *blocklengths *displacements",
    "INDEXED_BLOCK": "n- blocklength *displacements",
    "HINDEXED_BLOCK": "n- blocklength *displacements",
    "STRUCT": "n- *blocklengths *displacements datatypes",
    "SUBARRAY": "n- *sizes *subsizes *starts order",
    "DARRAY": "size rank n- *gsizes *distribs *dargs *psizes order",
    "RESIZED": "lb extent",
    "F90_INTEGER": "r",
    "F90_REAL": "p r",
    "F90_COMPLEX": "p r",
}


class Datatype(Attributes, Handle, root=True):
    """A datatype."""

    error = "ERR_TYPE"

    # ---- queries --------------------------------------------------------------------------

    def Get_size(self) -> int:
        """Return the bytes of data."""
        return int(self.live.size)

    def Get_extent(self) -> tuple[int, int]:
        """Return the lower bound and the extent."""
        return self.live.lb, self.live.extent

    def Get_true_extent(self) -> tuple[int, int]:
        """Return the bounds of the data."""
        bounds: tuple[int, int] = self.live.true_bounds
        return bounds

    size = property(Get_size)
    lb = property(lambda self: self.Get_extent()[0])
    extent = property(lambda self: self.Get_extent()[1])
    ub = property(lambda self: sum(self.Get_extent()))
    true_lb = property(lambda self: self.Get_true_extent()[0])
    true_extent = property(lambda self: self.Get_true_extent()[1])
    true_ub = property(lambda self: sum(self.Get_true_extent()))

    def Get_envelope(self) -> tuple[int, int, int, int, int]:
        """Return how many integers, addresses, counts and datatypes made it, and the combiner."""
        _, integers, addresses, counts, types = self.live.recipe
        return len(integers), len(addresses), len(counts), len(types), self.combiner

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        """Return the integers, addresses, counts and datatypes that made it."""
        _, integers, addresses, counts, types = self.live.recipe
        require(self.combiner != _N["COMBINER_NAMED"], "ERR_TYPE", "a named datatype")
        return list(integers), list(addresses), list(counts), [Datatype(each) for each in types]

    envelope, contents = property(Get_envelope), property(Get_contents)
    combiner = property(lambda self: self.live.combiner)
    is_named = property(lambda self: self.combiner == _N["COMBINER_NAMED"])

    @property
    def is_predefined(self) -> bool:
        """Whether MPI has it from the beginning."""
        return self.ob is None or _combiners[self.combiner].startswith(("NAMED", "F90"))

    def decode(self) -> tuple[Datatype, str, dict[str, Any]]:
        """Return the basis, the combiner's name and its arguments."""
        combiner = _combiners[self.combiner]
        if combiner == "NAMED":
            return self, combiner, {}
        integers, addresses, _, types = self.Get_contents()
        basis = types[0] if types and combiner != "STRUCT" else DATATYPE_NULL
        params: dict[str, Any] = {}
        values = [*integers, *addresses]
        shape = _SHAPES[combiner]
        # How many values a list has: the first integer, or of a distributed array the third.
        count = 0 if not integers else integers[2 if combiner == "DARRAY" else 0]
        at = 0
        for word in shape.split():
            name = word.strip("*-")
            if word.endswith("-"):
                at += 1
            elif name == "datatypes":
                params[name] = types
            elif word.startswith("*"):
                params[name], at = values[at : at + count], at + count
            else:
                params[name], at = values[at], at + 1
        return basis, combiner, params

    def tocode(self) -> str:
        """Return the type string of a named datatype."""
        ob = self.ob
        while ob is not None and _combiners[ob.combiner] == "DUP":
            ob = ob.recipe[4][0].ob
        if ob is not None and _combiners[ob.combiner].startswith("F90"):
            return f"{ob.dtype.kind}{ob.size}"
        if id(ob) not in _codes_of:
            raise ValueError("cannot map to type string")
        return _codes_of[id(ob)]

    @classmethod
    def fromcode(cls, code: str) -> Datatype:
        """Return the datatype of a type string."""
        if code not in by_code:
            raise ValueError(f"cannot map code {code!r} to a datatype")
        return Datatype(by_code[code])

    @property
    def typechar(self) -> str:
        """NumPy's character."""
        return "V" if self.ob is None or self.ob.dtype is None else self.ob.dtype.char

    @property
    def typestr(self) -> str:
        """NumPy's type string."""
        if self.ob is None or self.ob.dtype is None:
            return f"V{0 if self.ob is None else self.extent}"
        return f"{self.ob.dtype.kind}{self.ob.dtype.itemsize}"

    # ---- constructors ---------------------------------------------------------------------

    def _made(self, blocks: Any, recipe: tuple[Any, ...], bounds: Any = None) -> Self:
        """Return a datatype of blocks (offset in bytes, number of elements) of this one."""
        old = self.live
        pairs = np.array([b for b in blocks if b[1] > 0], np.int64).reshape(-1, 2)
        if old.is_plain and old.elements == 1 and old.size:
            # Without a row for each element: there may be billions.
            begins, sizes = pairs[:, 0], pairs[:, 1] * old.size
            low = int(begins.min()) if len(begins) else 0
            high = int((begins + sizes).max()) if len(begins) else 0
            ends = range(old.size, int(sizes.sum()) + 1, old.size)
            made = TypeMap((begins, sizes), bounds or (low, high - low), old.dtype, ends, recipe)
            return type(self).of(made)
        firsts = np.repeat(
            pairs[:, 0] - np.r_[0, np.cumsum(pairs[:, 1])[:-1]] * old.extent, pairs[:, 1]
        )
        places = firsts + np.arange(len(firsts)) * old.extent
        return self._joined([(places, old)], recipe, bounds)

    @classmethod
    def _joined(cls, parts: list[tuple[Ints, TypeMap]], recipe: Any, bounds: Any = None) -> Self:
        """Return a datatype of elements of others, each at some places."""
        offsets = [(p[:, None] + old.offsets).reshape(-1) for p, old in parts]
        lengths = [np.tile(old.lengths, len(p)) for p, old in parts]
        ends: list[int] = []
        for p, old in parts:
            base = ends[-1] if ends else 0
            for k in range(len(p)):
                ends += [base + k * old.size + end for end in old.element_ends]
        if bounds is None:
            filled = [(p, old) for p, old in parts if len(p)]
            low = min((int(p.min()) + old.lb for p, old in filled), default=0)
            high = max((int(p.max()) + old.lb + old.extent for p, old in filled), default=0)
            if recipe[0] == _N["COMBINER_STRUCT"]:
                align = max((typealign(old) for _, old in filled), default=1)
                high += -(high - low) % align
            bounds = low, high - low
        dtypes = {old.dtype for p, old in parts if len(p)}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        pieces = (
            np.concatenate([np.zeros(0, np.int64), *offsets]),
            np.concatenate([np.zeros(0, np.int64), *lengths]),
        )
        return cls.of(TypeMap(pieces, bounds, dtype, ends, recipe))

    def _copy(self, bounds: tuple[int, int], recipe: tuple[Any, ...]) -> Self:
        """Return a datatype of the same bytes."""
        old = self.live
        pieces = old.offsets, old.lengths
        return type(self).of(TypeMap(pieces, bounds, old.dtype, old.element_ends, recipe))

    def Dup(self) -> Self:
        """Return an equal datatype."""
        old = self.live
        made = self._copy((old.lb, old.extent), (_N["COMBINER_DUP"], [], [], [], [self]))
        self.copy_attributes(made)
        return made

    Create_dup = Dup

    def Create_contiguous(self, count: int) -> Self:
        """Elements one after another."""
        require(count >= 0, "ERR_COUNT")
        return self._made([(0, count)], (_N["COMBINER_CONTIGUOUS"], [count], [], [], [self]))

    def Create_vector(self, count: int, blocklength: int, stride: int) -> Self:
        """Blocks at a distance of `stride` elements."""
        step = stride * self.live.extent
        return self._strided("VECTOR", [count, blocklength, stride], [], step)

    def Create_hvector(self, count: int, blocklength: int, stride: int) -> Self:
        """Blocks at a distance of `stride` bytes."""
        return self._strided("HVECTOR", [count, blocklength], [stride], stride)

    def _strided(self, name: str, numbers: list[int], addresses: list[int], step: int) -> Self:
        count, length = numbers[:2]
        require(count >= 0 and length >= 0, "ERR_COUNT")
        recipe: Any = (_N[f"COMBINER_{name}"], numbers, addresses, [], [self])
        return self._made([(k * step, length) for k in range(count)], recipe)

    def Create_indexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        """Blocks of different lengths; displacements count elements."""
        lengths, places = _lists(blocklengths, displacements)
        return self._indexed("INDEXED", lengths, places, [len(lengths), *lengths, *places])

    def Create_hindexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        """Blocks of different lengths; displacements count bytes."""
        lengths, places = _lists(blocklengths, displacements)
        return self._indexed("HINDEXED", lengths, places, [len(lengths), *lengths])

    def Create_indexed_block(self, blocklength: int, displacements: Sequence[int]) -> Self:
        """Blocks of one length; displacements count elements."""
        lengths, places = _lists([blocklength] * len(displacements), displacements)
        return self._indexed("INDEXED_BLOCK", lengths, places, [len(places), blocklength, *places])

    def Create_hindexed_block(self, blocklength: int, displacements: Sequence[int]) -> Self:
        """Blocks of one length; displacements count bytes."""
        lengths, places = _lists([blocklength] * len(displacements), displacements)
        return self._indexed("HINDEXED_BLOCK", lengths, places, [len(places), blocklength])

    def _indexed(
        self, name: str, lengths: list[int], places: list[int], numbers: list[int]
    ) -> Self:
        in_bytes = name.startswith("H")
        step = 1 if in_bytes else self.live.extent
        recipe: Any = (_N[f"COMBINER_{name}"], numbers, places if in_bytes else [], [], [self])
        return self._made([(p * step, n) for n, p in zip(lengths, places, strict=True)], recipe)

    @classmethod
    def Create_struct(
        cls,
        blocklengths: Sequence[int],
        displacements: Sequence[int],
        datatypes: Sequence[Datatype],
    ) -> Self:
        """Blocks of several datatypes; displacements count bytes."""
        lengths, places = _lists(blocklengths, displacements)
        types = list(datatypes)
        if len(types) != len(lengths):
            raise ValueError(f"expecting {len(lengths)} items, got {len(types)}")
        parts = [
            (np.arange(n) * t.live.extent + p, t.live)
            for n, p, t in zip(lengths, places, types, strict=True)
        ]
        recipe: Any = (_N["COMBINER_STRUCT"], [len(lengths), *lengths], places, [], types)
        return cls._joined(parts, recipe)

    def Create_subarray(
        self,
        sizes: Sequence[int],
        subsizes: Sequence[int],
        starts: Sequence[int],
        order: int = _N["ORDER_C"],
    ) -> Self:
        """Take a block of an array."""
        axes = [
            np.arange(start, start + extent) for start, extent in zip(starts, subsizes, strict=True)
        ]
        for size, axis in zip(sizes, axes, strict=True):
            require(not len(axis) or (axis[0] >= 0 and axis[-1] < size), "ERR_ARG")
        flat = [len(sizes), *sizes, *subsizes, *starts, order]
        recipe: Any = (_N["COMBINER_SUBARRAY"], [int(x) for x in flat], [], [], [self])
        return self._grid(sizes, axes, order, recipe)

    def _grid(self, sizes: Sequence[int], axes: Any, order: int, recipe: tuple[Any, ...]) -> Self:
        """Return the datatype of the chosen indices of each dimension of an array."""
        shape, axes = list(sizes), list(axes)
        if order == _N["ORDER_F"]:
            shape, axes = shape[::-1], axes[::-1]
        at = np.zeros(1, np.int64)
        for size, axis in zip(shape, axes, strict=True):
            at = (at[:, None] * size + axis).reshape(-1)
        step = self.live.extent
        bounds = 0, math.prod(shape) * step
        return self._joined([(at * step, self.live)], recipe, bounds)

    def Create_darray(
        self,
        size: int,
        rank: int,
        gsizes: Sequence[int],
        distribs: Sequence[int],
        dargs: Sequence[int],
        psizes: Sequence[int],
        order: int = _N["ORDER_C"],
    ) -> Self:
        """Return the part of one rank of a distributed array."""
        flat = [size, rank, len(gsizes), *gsizes, *distribs, *dargs, *psizes, order]
        recipe: Any = (_N["COMBINER_DARRAY"], [int(x) for x in flat], [], [], [self])
        require(math.prod(psizes) == size, "ERR_ARG")
        coords = np.unravel_index(rank, tuple(psizes)) if len(psizes) else ()
        axes = []
        for length, kind, darg, parts, at in zip(
            gsizes, distribs, dargs, psizes, coords, strict=True
        ):
            index = np.arange(length)
            if kind == _N["DISTRIBUTE_NONE"]:
                axes.append(index)
                continue
            is_default = darg == _N["DISTRIBUTE_DFLT_DARG"]
            if kind == _N["DISTRIBUTE_BLOCK"]:
                block = -(-length // parts) if is_default else darg
            else:
                block = 1 if is_default else darg
            axes.append(index[index // block % parts == at])
        return self._grid(gsizes, axes, order, recipe)

    def Create_resized(self, lb: int, extent: int) -> Self:
        """Other bounds."""
        recipe: Any = _N["COMBINER_RESIZED"], [], [lb, extent], [], [self]
        return self._copy((lb, extent), recipe)

    Resized = Create_resized

    @classmethod
    def Get_value_index(cls, value: Datatype, index: Datatype) -> Self:
        """Return the named datatype of pairs, for MINLOC and MAXLOC; the null one if none is."""
        is_int = index.live is named["INT"].live
        for name in _PAIRS.split() if value.live is not None and is_int else ():
            pair = named[name.partition(":")[0]]
            if pair.ob.recipe[4][0] == value:
                return cls(pair)
        return cls()

    @classmethod
    def _f90(cls, combiner: str, numbers: list[int], name: str) -> Self:
        if not name:
            fail("ERR_ARG", f"no {combiner} of {numbers}")
        key = combiner, *numbers
        if key not in _pairs:
            old = named[name]
            _pairs[key] = old._copy((0, old.size), (_N[combiner], numbers, [], [], [])).ob
        return cls.of(_pairs[key])

    @classmethod
    def Create_f90_integer(cls, r: int) -> Self:
        """Return an integer of r decimal digits."""
        sizes = ((2, "INTEGER1"), (4, "INTEGER2"), (9, "INTEGER4"), (18, "INTEGER8"))
        return cls._f90("COMBINER_F90_INTEGER", [r], next((n for d, n in sizes if r <= d), ""))

    @classmethod
    def Create_f90_real(cls, p: int, r: int) -> Self:
        """Return a real number of p digits and exponent range r."""
        name = "REAL4" if p <= 6 and r <= 37 else "REAL8" if p <= 15 and r <= 307 else ""
        return cls._f90("COMBINER_F90_REAL", [p, r], name)

    @classmethod
    def Create_f90_complex(cls, p: int, r: int) -> Self:
        """Return a complex number of p digits and exponent range r."""
        name = "COMPLEX8" if p <= 6 and r <= 37 else "COMPLEX16" if p <= 15 and r <= 307 else ""
        return cls._f90("COMBINER_F90_COMPLEX", [p, r], name)

    @classmethod
    def Match_size(cls, typeclass: int, size: int) -> Datatype:
        """Return the named datatype of a class and size."""
        names = {_N[f"TYPECLASS_{k}"]: k for k in ("REAL", "INTEGER", "COMPLEX", "LOGICAL")}
        require(typeclass in names and f"{names[typeclass]}{size}" in named, "ERR_ARG")
        return Datatype(named[f"{names[typeclass]}{size}"])

    def Commit(self) -> Self:
        """Return the datatype, which needs no preparation."""
        _ = self.live
        return self

    def Free(self) -> None:
        """Forget the datatype."""
        _ = self.live
        require(not self.is_predefined, "ERR_TYPE", "predefined")
        self.delete_attributes()
        self.ob = None

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.ob is None or (Datatype, id(self.ob)) in predefined:
            return Handle.__reduce__(self)
        basis, combiner, params = self.decode()
        return _remade, (basis, combiner, params)


def _remade(basis: Datatype, combiner: str, params: dict[str, Any]) -> Datatype:
    made: Datatype = getattr(basis, f"Create_{combiner.lower()}")(**params)
    return made


def _lists(lengths: Sequence[int], places: Sequence[int]) -> tuple[list[int], list[int]]:
    first, second = [int(n) for n in lengths], [int(p) for p in places]
    if len(first) != len(second):
        raise ValueError(f"expecting {len(first)} items, got {len(second)}")
    require(all(n >= 0 for n in first), "ERR_ARG")
    return first, second


def kind_of(kind: Any) -> TypeMap | None:
    """Return the layout of a datatype or type string; None for the null datatype."""
    if isinstance(kind, Datatype):
        return kind.ob  # type: ignore[no-any-return]
    if isinstance(kind, str):
        return by_code[kind].ob  # type: ignore[no-any-return]
    raise TypeError(f"expecting a datatype or typecode, got {type(kind).__name__}")


def typealign(kind: TypeMap) -> int:
    """Return the alignment of a datatype."""
    if kind.dtype is not None:
        return kind.dtype.alignment
    types = [each.ob for each in kind.recipe[4] if each.ob is not None]
    return max((typealign(each) for each in types), default=1)


def _basic(name: str, dtype: np.dtype[Any]) -> TypeMap:
    size = dtype.itemsize
    made = TypeMap(([0], [size]), (0, size), dtype, [size], (_N["COMBINER_NAMED"], [], [], [], []))
    made.name = f"MPI_{name}"
    return made


def _pair(value: Datatype, index: Datatype, combiner: int, name: str = "") -> TypeMap:
    first, second = value.live, index.live
    dtype = np.dtype([("value", first.dtype), ("index", second.dtype)], align=True)
    assert dtype.fields is not None
    at = dtype.fields["index"][1]
    ends = [first.size, first.size + second.size]
    recipe: Any = (combiner, [], [], [], [value, index])
    made = TypeMap(([0, at], [first.size, second.size]), (0, dtype.itemsize), dtype, ends, recipe)
    made.name = name
    return made


named: dict[str, Datatype] = {}
"""All predefined datatypes, by name."""

_codes_of: dict[int, str] = {}
_pairs: dict[Any, TypeMap] = {}
DATATYPE_NULL = Datatype()

for _each in _C.split():
    _name, _code, *_numpy = _each.split(":")
    if not _code:
        named[_name] = Datatype()
        continue
    _mpi = {"LONG_LONG": "LONG_LONG_INT", "FLOAT16_T": "FLOAT16_T"}.get(_name, _name)
    _letter = (_numpy or [_code])[0]
    named[_name] = Datatype.of(_basic(_mpi, np.dtype(_letter)))
    _codes_of[id(named[_name].ob)] = _code
for _each in _PAIRS.split():
    _name, _code = _each.split(":")
    _value = named[
        {"h": "SHORT", "i": "INT", "l": "LONG", "f": "FLOAT", "d": "DOUBLE"}.get(
            _code, "LONG_DOUBLE"
        )
    ]
    _mpi = "MPI_2INT" if _name == "INT_INT" else f"MPI_{_name}"
    named[_name] = Datatype.of(_pair(_value, named["INT"], _N["COMBINER_NAMED"], _mpi))
for _each in _ALIASES.split():
    _name, _, _old = _each.partition(":")
    named[_name] = named[_old]
by_code = {code: named[name] for code, _, name in (each.partition(":") for each in _CODES.split())}
