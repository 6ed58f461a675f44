"""Handles name MPI's objects. Copies name the same object; `Free` leaves the null handle."""

from __future__ import annotations

import array
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Self

from unisono.adapters.mpi4py.errors import (
    ANY_SOURCE,
    ANY_TAG,
    NUMBERS,
    SUCCESS,
    UNDEFINED,
    fail,
    require,
)
from unisono.adapters.mpi4py.errors import Exception as MPIException
from unisono.core.base.host import GUARD_HINT, is_importing_main
from unisono.core.c10d.lifecycle import init_process_group
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import World, current, resolve
from unisono.errors import NotInitializedError, UsageError

_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

predefined: dict[tuple[type, int], tuple[str, Any]] = {}
"""(family, id of the object) -> name and constant, for pickle."""


class Handle:
    """A handle; `ob` is the object, None for the null handle."""

    family: type = object
    error, frees_predefined = "ERR_ARG", False
    ob: Any

    def __init_subclass__(cls, root: bool = False) -> None:
        if root:
            cls.family = cls

    def __new__(cls, handle: Any = None) -> Self:
        if handle is not None and not isinstance(handle, cls.family):
            raise TypeError(f"expected a {cls.family.__name__}, got {type(handle).__name__}")
        self = object.__new__(cls)
        self.ob = getattr(handle, "ob", None)
        return self

    @classmethod
    def of(cls, ob: Any) -> Self:
        """Return a handle of an object."""
        self = object.__new__(cls)
        self.ob = ob
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, self.family):
            return NotImplemented
        return self.ob is other.ob  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(id(self.ob))

    def __bool__(self) -> bool:
        return self.ob is not None

    def __reduce__(self) -> str | tuple[Any, ...]:
        name, constant = predefined.get((self.family, id(self.ob)), ("", None))
        if not name:
            raise ValueError(f"cannot pickle {type(self).__name__}")
        return name if constant is self else (type(self), (constant,))

    @property
    def live(self) -> Any:
        """The object; raises an error for a null handle."""
        if self.ob is None:
            fail(self.error, "null handle")
        return self.ob

    @property
    def handle(self) -> int:
        """A number of the object in this process, 0 for the null handle."""
        if self.ob is None:
            return 0
        _objects[id(self.ob)] = self.ob
        return id(self.ob)

    @classmethod
    def fromhandle(cls, handle: int) -> Self:
        """Return the handle of a number."""
        return cls.of(_objects[handle] if handle else None)

    def tohandle(self) -> int:
        """Return `handle`."""
        return self.handle

    def toint(self) -> int:
        """Return -1: there is no C handle."""
        return -1

    py2f = toint

    def free(self) -> None:
        """Free the object if it is there, and not predefined."""
        if self.ob is not None and (self.family, id(self.ob)) not in predefined:
            self.Free()

    def Free(self) -> None:
        """Forget the object."""
        _ = self.live
        is_predefined = (self.family, id(self.ob)) in predefined
        require(self.frees_predefined or not is_predefined, self.error, "predefined")
        self.ob = None


class Described:
    """What communicators, datatypes, windows and files have: name, hints, attributes, handler."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.info: dict[str, str] = {}
        self.attributes: dict[Any, Any] = {}
        self.errhandler = RAISES

    @property
    def now(self) -> Self:
        """The object for calls that wait."""
        return self


class Attributes:
    """The attributes and the error handler of communicators, datatypes and windows."""

    ob: Any
    live: Any
    family: type
    Create_errhandler: Any

    def Get_attr(self, keyval: int) -> Any:
        """Return an attribute, or None."""
        attributes = self.live.attributes
        if keyval not in attributes:
            require(keyval in _keyvals or keyval in NUMBERS.values(), "ERR_KEYVAL")
            require(keyval != NUMBERS["KEYVAL_INVALID"], "ERR_KEYVAL")
        return attributes.get(keyval)

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        """Set an attribute."""
        require(keyval in _keyvals, "ERR_KEYVAL")
        if keyval in self.live.attributes:
            self.Delete_attr(keyval)
        self.live.attributes[keyval] = attrval

    def Delete_attr(self, keyval: int) -> None:
        """Delete an attribute."""
        require(keyval in _keyvals and keyval in self.live.attributes, "ERR_KEYVAL")
        delete = _keyvals[keyval][1]
        if delete is not None:
            delete(self, keyval, self.live.attributes[keyval])
        self.live.attributes.pop(keyval, None)

    @classmethod
    def Create_keyval(
        cls, copy_fn: Any = None, delete_fn: Any = None, nopython: bool = False
    ) -> int:
        """Make a key for attributes."""
        keyval = 1 << 20 | len(_keyvals)
        while keyval in _keyvals:
            keyval += 1
        _keyvals[keyval] = (copy_fn, delete_fn)
        return keyval

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Free a key; attributes stay."""
        require(keyval in _keyvals, "ERR_KEYVAL")
        _freed[keyval] = _keyvals.pop(keyval)
        return NUMBERS["KEYVAL_INVALID"]

    def copy_attributes(self, to: Any) -> None:
        """Call the copy functions for a duplicate."""
        for keyval, value in list(self.live.attributes.items()):
            copy = (_keyvals.get(keyval) or _freed.get(keyval, (None, None)))[0]
            if copy is True:
                to.live.attributes[keyval] = value
            elif copy:
                copied = copy(self, keyval, value)
                if copied is not NotImplemented:
                    to.live.attributes[keyval] = copied

    def delete_attributes(self) -> None:
        """Call the delete functions at the end."""
        for keyval in list(self.live.attributes):
            delete = (_keyvals.get(keyval) or _freed.get(keyval, (None, None)))[1]
            value = self.live.attributes.pop(keyval)
            if delete is not None:
                delete(self, keyval, value)

    def Get_errhandler(self) -> Errhandler:
        """Return the error handler."""
        return Errhandler.of(self.live.errhandler)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set the error handler; errors of calls are raised in any case."""
        self.live.errhandler = errhandler.live

    def Call_errhandler(self, errorcode: int) -> None:
        """Call the error handler with a code."""
        self.live.errhandler(self, errorcode)

    def Get_name(self) -> str:
        """Return the name."""
        kind = self.family.__name__.upper()
        return f"MPI_{kind}_NULL" if self.ob is None else str(self.live.name)

    def Set_name(self, name: str) -> None:
        """Set the name."""
        self.live.name = name

    def Get_info(self) -> Info:
        """Return a copy of the hints."""
        return Info.Create(self.live.info)

    def Set_info(self, info: Info) -> None:
        """Replace the hints, which have no effect."""
        self.live.info = dict(info.live) if info else {}

    name = property(Get_name, Set_name)
    info = property(Get_info, Set_info)


_keyvals: dict[int, tuple[Any, Any]] = {}
_freed: dict[int, tuple[Any, Any]] = {}


class ErrorHandler:
    """What an error handler does."""

    def __init__(self, call: Callable[[Any, int], object]) -> None:
        self.call = call

    def __call__(self, of: Any, code: int) -> None:
        """Handle a code."""
        self.call(of, code)


def _raise(of: Any, code: int) -> None:
    if code != SUCCESS:
        raise MPIException(code)


class Errhandler(Handle, root=True):
    """An error handler."""

    error, frees_predefined = "ERR_ERRHANDLER", True


ERRORS_RETURN = Errhandler.of(ErrorHandler(lambda of, code: None))
RAISES = ERRORS_RETURN.ob


class Info(Handle, MutableMapping[str, str], root=True):
    """Hints: texts by key. The null handle is empty."""

    error = "ERR_INFO"
    __eq__, __hash__ = Handle.__eq__, Handle.__hash__

    class Hints(dict[str, str]):
        """The texts; equal only to itself."""

        __slots__ = ("__weakref__",)

    @classmethod
    def Create(cls, items: Any = None) -> Self:
        """Make hints."""
        made = cls.of(cls.Hints())
        made.update(items or ())
        return made

    @classmethod
    def Create_env(cls, args: Sequence[str] | None = None) -> Self:
        """Make the hints of the start of the program."""
        return cls.Create({"command": (args or [""])[0]})

    def Dup(self) -> Self:
        """Return a copy."""
        return type(self).Create(self.live)

    def Get(self, key: str) -> str | None:
        """Return a text, or None."""
        value: str | None = self.live.get(key)
        return value

    def Set(self, key: str, value: str) -> None:
        """Set a text."""
        self.live[key] = str(value)

    def Delete(self, key: str) -> None:
        """Delete a key."""
        require(key in self.live, "ERR_INFO_NOKEY", repr(key))
        del self.ob[key]

    def Get_nkeys(self) -> int:
        """Return the number of keys."""
        return len(self.live)

    def Get_nthkey(self, n: int) -> str:
        """Return the n-th key."""
        require(0 <= n < len(self.live), "ERR_ARG")
        return list(self)[n]

    def __len__(self) -> int:
        return len(self.ob or ())

    def __iter__(self) -> Any:
        return iter(list(self.ob or ()))

    def __getitem__(self, item: str) -> str:
        return str((self.ob or {})[item])

    def __setitem__(self, item: str, value: str) -> None:
        if self.ob is None:
            raise KeyError(item)
        self.Set(item, value)

    def __delitem__(self, item: str) -> None:
        del (self.ob if self.ob is not None else {})[item]

    def popitem(self) -> tuple[str, str]:
        """Remove and return the last key and its text."""
        pair: tuple[str, str] = (self.ob if self.ob is not None else {}).popitem()
        return pair

    def __reduce__(self) -> Any:
        if self.ob is None or (Info, id(self.ob)) in predefined:
            return Handle.__reduce__(self)
        return type(self).Create, (dict(self.ob),)

    def copy(self) -> Self:
        """Return a copy; of the null handle a null handle."""
        return type(self)() if self.ob is None else self.Dup()

    def keys(self) -> Any:
        """Return the keys."""
        return list(self)

    def values(self) -> Any:
        """Return the texts."""
        return [self[key] for key in self]

    def items(self) -> Any:
        """Return keys and texts."""
        return [(key, self[key]) for key in self]


class WorldRanks(tuple[int, ...]):
    """Global ranks in order, the object of a group."""


class Group(Handle, root=True):
    """An ordered set of ranks."""

    error, frees_predefined = "ERR_GROUP", True

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return len(self.live)

    def Get_rank(self) -> int:
        """Return this process's rank, or UNDEFINED."""
        ranks, world = self.live, default_group() if self.live else None
        me = world.ranks[world.rank()] if world is not None else None
        return ranks.index(me) if me in ranks else UNDEFINED

    size, rank = property(Get_size), property(Get_rank)

    def Translate_ranks(
        self, ranks: Sequence[int] | None = None, group: Group | None = None
    ) -> list[int]:
        """Return the ranks in another group."""
        mine = self.live
        if group is None:
            other: Any = default_group().ranks
        else:
            other = group.live
        null = NUMBERS["PROC_NULL"]
        places = {rank: place for place, rank in enumerate(other)}
        chosen = range(len(mine)) if ranks is None else ranks
        return [null if r == null else places.get(mine[r], UNDEFINED) for r in chosen]

    def Compare(self, group: Group) -> int:
        """Return IDENT, SIMILAR or UNEQUAL."""
        mine, other = self.live, group.live
        if mine == other:
            return NUMBERS["IDENT"]
        return NUMBERS["SIMILAR" if sorted(mine) == sorted(other) else "UNEQUAL"]

    def _made(self, ranks: Iterable[int]) -> Self:
        made = WorldRanks(ranks)
        return type(self).of(made if made else EMPTY)

    def Dup(self) -> Self:
        """Return an equal group."""
        return self._made(self.live)

    @classmethod
    def Union(cls, group1: Group, group2: Group) -> Self:
        """Return the ranks of both."""
        return cls()._made(dict.fromkeys([*group1.live, *group2.live]))

    @classmethod
    def Intersection(cls, group1: Group, group2: Group) -> Self:
        """Return the ranks in both, in the order of the first."""
        second = group2.live
        return cls()._made(r for r in group1.live if r in second)

    Intersect = Intersection

    @classmethod
    def Difference(cls, group1: Group, group2: Group) -> Self:
        """Return the ranks of the first that the second lacks."""
        second = group2.live
        return cls()._made(r for r in group1.live if r not in second)

    def _checked(self, ranks: Sequence[int]) -> list[int]:
        chosen = list(ranks)
        require(all(0 <= r < len(self.live) for r in chosen), "ERR_RANK", str(chosen))
        require(len({*chosen}) == len(chosen), "ERR_RANK", f"twice in {chosen}")
        return chosen

    def Incl(self, ranks: Sequence[int]) -> Self:
        """Return a group of these ranks."""
        return self._made(self.live[r] for r in self._checked(ranks))

    def Excl(self, ranks: Sequence[int]) -> Self:
        """Return a group without these ranks."""
        left = {*self._checked(ranks)}
        return self._made(each for r, each in enumerate(self.live) if r not in left)

    def _ranges(self, ranks: Sequence[tuple[int, int, int]]) -> list[int]:
        out: list[int] = []
        for first, last, stride in ranks:
            require(stride != 0, "ERR_ARG")
            out += range(first, last + (1 if stride > 0 else -1), stride)
        return out

    def Range_incl(self, ranks: Sequence[tuple[int, int, int]]) -> Self:
        """Return a group of the ranks in ranges (first, last, stride)."""
        return self.Incl(self._ranges(ranks))

    def Range_excl(self, ranks: Sequence[tuple[int, int, int]]) -> Self:
        """Return a group without the ranks in ranges."""
        return self.Excl(self._ranges(ranks))


EMPTY = WorldRanks()

finalized: weakref.WeakSet[World] = weakref.WeakSet()
"""The worlds in which the program has called Finalize."""


def default_group() -> ProcessGroup:
    """Return the group of COMM_WORLD: the default group of the calling thread's world.

    The first use makes it, as `init_process_group` does, unless there is one.

    Raises:
        UsageError: This process still imports the main module, and has no place in a group yet.
    """
    world = current()
    require(world not in finalized, "ERR_OTHER", "MPI.Finalize was called")
    try:
        if (group := resolve()) is not None:
            return group
    except NotInitializedError:
        if world.hint is not None:
            raise
    if is_importing_main():
        raise UsageError("unisono.MPI is used before this process has a rank", hint=GUARD_HINT)
    with world.kept.setdefault("MPI lock", threading.RLock()):
        if world.default is None:
            init_process_group()
            world.kept["maker"] = "the first use of unisono.MPI"
    assert world.default is not None
    return world.default


class Status:
    """Source, tag and size of a message."""

    def __init__(self, status: Status | None = None) -> None:
        if status is not None and not isinstance(status, Status):
            raise TypeError(f"expected a Status, got {type(status).__name__}")
        # Source, tag, error, bytes, cancelled.
        self._fields: array.array[int] = array.array(
            "q", list(status._fields) if status else (ANY_SOURCE, ANY_TAG, 0, 0, 0)
        )

    def set(self, source: int, tag: int, nbytes: int, cancelled: bool = False) -> None:
        """Set what a call has found."""
        self._fields[:] = array.array("q", (source, tag, SUCCESS, nbytes, cancelled))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Status) and self._fields == other._fields

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> Mapping[str, int]:
        return {"fields": list(self._fields)}  # type: ignore[dict-item]

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._fields = array.array("q", state["fields"])

    def Get_count(self, datatype: Any = None) -> int:
        """Return the number of elements of a datatype, by default of bytes."""
        size = 1 if datatype is None else datatype.live.size
        whole, rest = divmod(self._fields[3], size) if size else (0, 0)
        return UNDEFINED if rest else whole

    def Get_elements(self, datatype: Any) -> int:
        """Return the number of basic elements."""
        kind = datatype.live
        if not kind.size:
            return 0
        whole, rest = divmod(self._fields[3], kind.size)
        return int(whole * kind.elements) + sum(1 for end in kind.element_ends if end <= rest)

    def Set_elements(self, datatype: Any, count: int) -> None:
        """Set the number of basic elements."""
        kind = datatype.live
        self._fields[3] = count * kind.size // max(kind.elements, 1)

    def tomemory(self) -> memoryview:
        """Return the fields as memory."""
        return memoryview(self._fields)


def _add_fields() -> None:
    """Add what reads and sets the fields of a status, as methods and properties."""
    rows = (("source", "Get"), ("tag", "Get"), ("error", "Get"), ("count", ""), ("cancelled", "Is"))
    for at, (name, verb) in enumerate(rows):
        of = bool if verb == "Is" else int

        def read(self: Status, at: int = at, of: Any = of) -> Any:
            return of(self._fields[at])

        def write(self: Status, value: Any, at: int = at, of: Any = of) -> None:
            self._fields[at] = of(value)

        if verb:
            setattr(Status, f"{verb}_{name}", read)
            setattr(Status, f"Set_{name}", write)
        setattr(Status, name, property(read, write))


_add_fields()
