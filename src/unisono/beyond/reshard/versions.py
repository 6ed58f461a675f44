"""Arrays in files of safetensors' format: checkpoints, and versions of weights for subscribers.

A file has a name only if it is whole (`open_file`), and is never changed then. So a version is seen
whole or not at all, also if its writers die.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import re
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.beyond.boxes import whole
from unisono.beyond.files import open_file
from unisono.beyond.reshard.parts import ArrayParts, converter, dtype_from, named_parts
from unisono.beyond.reshard.planned import PlannedArray, planned
from unisono.core.base.buffers import as_bytes
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.integers import as_integer
from unisono.core.base.threads.streams import on_host
from unisono.core.base.types import DType, dtype_named
from unisono.core.c10d.objects.call import ObjectCall
from unisono.core.c10d.queries import get_rank, is_initialized
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import Group, require_group
from unisono.core.platform.files import lock
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    UnsupportedError,
)

# Names of dtypes in files.
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# As safetensors itself: larger headers are refused before they are read.
_MOST_HEADER = 100_000_000
# Bytes converted at once: they stay in a cache.
_AT_ONCE = 1 << 20
_VERSION = re.compile(r"(\d{10})\.safetensors")
# How the name of an index ends, as that of a model in several files; and those of its parts.
_INDEX = ".safetensors.index.json"
_PART = r"-[0-9a-f]{8}-\d{5,}-of-\d{5,}\.safetensors"
_INCOMPLETE = r"\.[0-9a-f]{12}\.incomplete"
# For how long ranks open a file again if they have opened different ones.
_SETTLE_S, _PAUSE_S = 10.0, 0.005


@on_host
def save_arrays(
    arrays: Mapping[str, Any],
    path: str | os.PathLike[str],
    group: Group = None,
    *,
    dtype: Any = None,
    part_bytes: int | None = None,
    timeout: Timeout | None = None,
) -> None:
    """Write arrays of any sharding into one file of safetensors' format; a collective call.

        dist.save_arrays({"w": dist.Sharded(rows, (1000, 1000), mesh=mesh, placements=[0])}, path)

    Each element is written once. Ranks that have the same elements share the writing. The file has
    the name `path` when it is whole. The ranks must see the same folder; see `open_file`.

    Args:
        arrays: What this rank has by name, as `src` of `reshard`.
        path: Equal on all ranks.
        group: The default group if None.
        dtype: Of the floating arrays in the file, such as "bfloat16"; their own if None.
        part_bytes: Write several files of about this size, and last an index with the name `path`,
            which ends with ".safetensors.index.json". Then parts of earlier calls with this path,
            also of killed ones, are removed if no index in the folder names them.
        timeout: Of each of its calls; the group's if None.

    Raises:
        CollectiveMismatchError: Ranks disagree, or a rank's arguments are wrong.
        CollectiveError: Nobody has a part of an array, or a rank cannot write.
    """
    _save(arrays, path, require_group(group), dtype, timeout, part_bytes=part_bytes)


def _save(
    arrays: Mapping[str, Any],
    path: str | os.PathLike[str],
    pg: ProcessGroup,
    dtype: Any,
    timeout: Timeout | None,
    *,
    is_new: bool = False,
    part_bytes: int | None = None,
) -> None:
    """Write a file, or parts; if `is_new`, there must be none of the name."""
    with ObjectCall(pg, "save_arrays", timeout, None) as call:
        own: list[Any] = []
        call.check(lambda: own.extend(_described(call, pg, arrays, dtype, path, part_bytes)))
        parts, wanted = own
        plain = {name: each.described() for name, each in parts.items()}
        rows = call.loads_all(
            call.all_gather(call.pack(lambda: (plain, {}, pg.rank(), secrets.token_hex(4))))
        )
        targets = {}
        for row in rows:
            for name, each in row[0].items():
                if each.dtype is not None:
                    stored = _stored(each.dtype, wanted)
                    targets[name] = ArrayParts(each.shape, stored, [whole(each.shape)], [])
        rows.append(({}, targets, None, ""))
        # The widest first, so that each array is aligned.
        plans = sorted(planned(call, pg, rows), key=lambda plan: -plan.target.itemsize)

    def write(path: str | os.PathLike[str], plans: Sequence[PlannedArray]) -> None:
        header, begins, nbytes = _header(plans, targets)
        with open_file(path, "w", pg, timeout=timeout) as file:
            file.write_in_order(header if pg.rank() == 0 else header[:0], timeout=timeout)
            pieces = _pieces(pg.rank(), plans, parts, begins)
            file._write_pieces(pieces, nbytes, "save_arrays", timeout=timeout)
            file._is_new = is_new

    if part_bytes is None:
        write(path, plans)
        return
    stem = os.fsdecode(path).removesuffix(_INDEX)
    try:
        # Parts of two versions have different names, so an index is always of one version.
        index = _write_parts(f"{stem}-{rows[0][3]}", _cut(plans, targets, part_bytes), write)
        with open_file(path, "w", pg, timeout=timeout) as file:
            file.write_in_order(index if pg.rank() == 0 else index[:0], timeout=timeout)
    finally:
        # Rank 0, because it names the index.
        if pg.rank() == 0:
            with contextlib.suppress(OSError, InvalidArgumentError):
                _remove_parts(stem)


def _remove_parts(stem: str) -> None:
    """Remove the parts of indices of one name, but those that an index in the folder names."""
    folder, base = os.path.split(stem)
    names = os.listdir(folder or os.curdir)
    kept: set[str] = set()
    for name in names:
        if name.endswith(_INDEX):
            kept |= set(_names_in(os.path.join(folder, name))[0].values())
    for name in names:
        if re.fullmatch(f"{re.escape(base)}{_PART}({_INCOMPLETE})?", name) and name not in kept:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))


def _described(
    call: ObjectCall, pg: ProcessGroup, arrays: Any, dtype: Any, path: Any, part_bytes: Any
) -> tuple[dict[str, ArrayParts], DType | None]:
    """Return what this rank has, and the dtype of the floating arrays in the file; check all."""
    if not isinstance(arrays, Mapping):
        raise ArgumentTypeError(
            f"arrays must be a dict of arrays by name, got {type(arrays).__name__}"
        )
    parts = named_parts("save_arrays", arrays, pg.ranks[pg.rank()], write=False)
    wanted = None if dtype is None else dtype_from(dtype)
    call.label += f"(dtype={wanted})"
    if part_bytes is not None:
        call.label += f"(part_bytes={part_bytes})"
        if as_integer(part_bytes, "part_bytes") < 1:
            raise InvalidArgumentError(f"part_bytes={part_bytes}: expected at least 1")
        if not os.fsdecode(path).endswith(_INDEX):
            raise InvalidArgumentError(f"path {path!r}: the name of an index ends with {_INDEX}")
    elif os.fsdecode(path).endswith(_INDEX):
        raise InvalidArgumentError(f"path {path!r}: an index needs part_bytes")
    if "__metadata__" in parts:
        raise InvalidArgumentError("safetensors' format has no array of the name '__metadata__'")
    for name, each in parts.items():
        if each.dtype is None:
            continue
        stored = _stored(each.dtype, wanted)
        if stored.name not in _NAMES or converter(each.dtype, stored) is None:
            raise UnsupportedError(f"array {name!r} of {each.dtype} cannot be stored as {stored}")
    return parts, wanted


def _write_parts(
    stem: str,
    cut: Sequence[Sequence[PlannedArray]],
    write: Callable[[str, Sequence[PlannedArray]], None],
) -> np.ndarray[Any, Any]:
    """Write each part; return the text of the index."""
    names: dict[str, str] = {}
    for number, some in enumerate(cut, 1):
        part = f"{stem}-{number:05}-of-{len(cut):05}.safetensors"
        write(part, some)
        names |= {plan.name: os.path.basename(part) for plan in some}
    text = json.dumps({"metadata": {}, "weight_map": names})
    return np.frombuffer(text.encode(), np.uint8)


def _cut(
    plans: Sequence[PlannedArray], targets: Mapping[str, ArrayParts], most: int
) -> list[list[PlannedArray]]:
    """Return the arrays of each part: of at most `most` bytes, or one array."""
    cut: list[list[PlannedArray]] = []
    size = 0
    for plan in plans:
        nbytes = math.prod(targets[plan.name].shape) * plan.target.itemsize
        if not cut or size + nbytes > most:
            cut.append([])
            size = 0
        cut[-1].append(plan)
        size += nbytes
    return cut


def _names_in(path: str) -> tuple[dict[str, str], bytes]:
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
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidArgumentError(f"{path} is no index of safetensors' format: {error}") from None
    return names, text


def _stored(dtype: DType, wanted: DType | None) -> DType:
    return wanted if wanted is not None and dtype.kind == "f" else dtype


def _header(
    plans: Sequence[PlannedArray], targets: Mapping[str, ArrayParts]
) -> tuple[np.ndarray[Any, Any], list[int], int]:
    """Return the header of a file, where its arrays begin, and the size of all arrays."""
    entries: dict[str, Any] = {}
    begins, at = [], 0
    for plan in plans:
        shape = targets[plan.name].shape
        end = at + math.prod(shape) * plan.target.itemsize
        kind = _NAMES[plan.target.name]
        entries[plan.name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
        begins.append(at)
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8), begins, at


def _pieces(
    rank: int,
    plans: Sequence[PlannedArray],
    parts: Mapping[str, ArrayParts],
    begins: Sequence[int],
) -> Iterator[tuple[int, memoryview]]:
    """Yield what this rank writes, with its offset behind the header."""
    for plan, begin in zip(plans, begins, strict=True):
        convert = converter(plan.source, plan.target)
        assert convert is not None  # the ranks have checked it
        size = plan.target.itemsize
        for each in plan.transfers:
            if each.source != rank:
                continue
            for box in each.box.cut(_AT_ONCE // size):
                staging = np.empty(box.shape, plan.target.storage)
                convert(staging, parts[plan.name].memory_of(box))
                raw = as_bytes(staging.reshape(-1))
                offsets, run = box.runs(parts[plan.name].shape)
                for at, offset in enumerate(offsets):
                    yield begin + offset * size, raw[at * run * size : (at + 1) * run * size]


class _StoredArray(NamedTuple):
    """An array in a file: its dtype, or the name of one that unisono has not; and its memory."""

    dtype: DType | str
    memory: np.ndarray[Any, Any]


def _opened(path: str) -> tuple[dict[str, _StoredArray], str]:
    """Return the arrays of a file or index, mapped into memory; the files may be removed then.

    The other result is another one for each version of the files, on all hosts that see them.

    Raises:
        InvalidArgumentError: It is no whole file of safetensors' format.
    """
    if path.endswith(_INDEX):
        return _opened_index(path)
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        length = int.from_bytes(file.read(8), "little")
        try:
            if not 2 <= length <= min(_MOST_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes in {size} bytes")
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            found = {}
            for name, entry in entries.items():
                if entry["dtype"] not in _DTYPES:
                    found[name] = _StoredArray(str(entry["dtype"]), np.empty(0))
                    continue
                dtype, shape = dtype_named(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
                begin, end = entry["data_offsets"]
                nbytes = math.prod(shape) * dtype.itemsize
                if begin < 0 or end - begin != nbytes or 8 + length + end > size:
                    raise ValueError(f"array {name!r} is at {begin}:{end}")
                data = np.ndarray(shape, dtype.storage, memory, 8 + length + begin)
                found[name] = _StoredArray(dtype, data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidArgumentError(
                f"{path} is no whole file of safetensors' format: {error}"
            ) from None
    # Not the device, which each host numbers as it likes.
    return found, f"{status.st_ino} {size} {status.st_mtime_ns}"


def _opened_index(path: str) -> tuple[dict[str, _StoredArray], str]:
    """Return the same for an index."""
    while True:
        names, text = _names_in(path)
        opened, versions = {}, [text]
        try:
            for part in sorted(set(names.values())):
                opened[part], version = _opened(os.path.join(os.path.dirname(path), part))
                versions.append(version.encode())
        except FileNotFoundError:
            # The parts are removed when another index has the name.
            if _names_in(path)[1] == text:
                raise
            continue
        found = {name: opened[part][name] for name, part in names.items() if name in opened[part]}
        return found, hashlib.sha256(b" ".join(versions)).hexdigest()


def _copy_out(
    path: str, stored: Mapping[str, _StoredArray], parts: Mapping[str, ArrayParts]
) -> None:
    """Fill the boxes of this rank; nothing is written if an array does not fit."""
    copies = []
    for name, each in parts.items():
        if each.dtype is None:
            continue
        if name not in stored:
            raise InvalidArgumentError(f"{path} has no array {name!r}")
        dtype, memory = stored[name]
        if isinstance(dtype, str):
            raise InvalidArgumentError(f"array {name!r} in {path} has the unknown dtype {dtype}")
        convert = converter(dtype, each.dtype)
        if memory.shape != each.shape or convert is None:
            raise InvalidArgumentError(
                f"array {name!r} is {dtype}{list(memory.shape)} in {path}, which does not become "
                f"{each.dtype}{list(each.shape)}"
            )
        for box, view in zip(each.boxes, each.views, strict=True):
            copies.append((convert, view, memory[box.within(whole(each.shape))]))
    for convert, view, data in copies:
        convert(view, data)


@on_host
def load_arrays(
    arrays: Mapping[str, Any],
    path: str | os.PathLike[str],
    group: Group = None,
    *,
    timeout: Timeout | None = None,
) -> None:
    """Read arrays of any sharding from one file of safetensors' format; a collective call.

    Each rank maps the file, and copies its boxes. dtypes are converted as by `reshard`. If the file
    is replaced meanwhile, all ranks read the same version.

    Args:
        arrays: What this rank wants by name, as `dst` of `reshard`.
        path: Equal on all ranks, which must see the same folder. That of an index
            (".safetensors.index.json") if the arrays are in several files.
        group: The default group if None.
        timeout: Of the call; the group's if None.

    Raises:
        CollectiveError: A rank cannot read the file, or an array does not fit.
        CollectiveMismatchError: A rank's arguments are wrong, or the ranks see different files.
    """
    pg = require_group(group)
    with ObjectCall(pg, "load_arrays", timeout, None) as call:
        own: list[dict[str, ArrayParts]] = []

        def describe() -> None:
            call.label = f"load_arrays({os.fspath(path)!r})"
            own.append(named_parts("load_arrays", arrays, pg.ranks[pg.rank()], write=True))

        call.check(describe)
        name = os.fsdecode(os.fspath(path))
        failed, deadline = f"cannot read {name}", Deadline(min(_SETTLE_S, call.remaining_s))
        while True:
            opened: list[dict[str, _StoredArray]] = []

            def see() -> tuple[str, bool]:
                is_last = deadline.expired()
                stored, version = _opened(name)
                opened.append(stored)  # noqa: B023
                return version, is_last

            seen = call.on_all(see, failed)
            if len({version for version, _ in seen}) == 1:
                break
            # It is replaced between them.
            if any(is_last for _, is_last in seen):
                raise CollectiveMismatchError(
                    f"{call}: the ranks see different files of the name {name}",
                    context=call.context(0),
                    hint="they must see the same folder; replace the file less often",
                )
            time.sleep(_PAUSE_S)
        call.on_all(lambda: _copy_out(name, opened[0], own[0]), failed)


_locking: weakref.WeakSet[Publisher] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In the child of a fork: let go of the locks, which would outlast the parent."""
    for publisher in list(_locking):
        publisher._unlock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


class Publisher:
    """Publishes versions of weights in a folder; it waits for no subscriber.

        publisher = dist.Publisher("/dev/shm/weights", dtype="bfloat16")     # all trainer ranks
        version = publisher.publish({"w": dist.Sharded(...)})                # between two steps

    A version is a file that gets its name when it is whole. If the publisher dies, the last whole
    version stays, and a new publisher of the folder goes on after it. A folder has one publisher at
    a time. The ranks of the publisher and the subscribers must see the folder: /dev/shm on one
    host, a network file system otherwise. There a version that is removed while a rank copies it
    may kill this process by SIGBUS: keep enough of them.

    Args:
        folder: Made if it does not exist.
        group: The ranks that publish; the default group if None.
        dtype: Of floating arrays in the files; their own if None.
        keep: Versions that stay; older ones are removed. A subscriber that reads one goes on.

    Attributes:
        version: The last version; 0 if there is none.

    Raises:
        InvalidArgumentError: `keep` is less than 1.
        CollectiveError: The folder cannot be made, or has another publisher.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        group: Group = None,
        *,
        dtype: Any = None,
        keep: int = 2,
        timeout: Timeout | None = None,
    ) -> None:
        self._group = pg = require_group(group)
        with ObjectCall(pg, "Publisher", timeout, None) as call:

            def check() -> None:
                self._folder, self._dtype = os.fsdecode(os.fspath(folder)), dtype
                self._keep = as_integer(keep, "keep")
                if self._keep < 1:
                    raise InvalidArgumentError(f"keep={keep}: expected at least 1 version")

            call.check(check)
            call.label = f"Publisher({self._folder!r})"
            found = call.on_all(self._prepare, f"cannot use {self._folder}")
        self.version: int = found[0]

    def _prepare(self) -> int:
        if self._group.rank() != 0:
            return 0
        os.makedirs(self._folder, exist_ok=True)
        folder = os.open(self._folder, os.O_RDONLY)
        # The lock lasts as long as the publisher, or its process.
        self._unlock = weakref.finalize(self, os.close, folder)
        _locking.add(self)
        try:
            lock(folder)
        except BlockingIOError:
            raise OSError(None, "it has another publisher") from None
        except OSError:
            # A file system without locks; a version is never replaced there either.
            pass
        for name in os.listdir(self._folder):
            # Of a publisher that died.
            if re.fullmatch(_VERSION.pattern + _INCOMPLETE, name):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._folder, name))
        return self._newest()

    def _newest(self) -> int:
        return max(_versions(self._folder), default=0) if self._group.rank() == 0 else 0

    def publish(self, arrays: Mapping[str, Any], *, timeout: Timeout | None = None) -> int:
        """Write the next version, and return its number; a collective call.

        Args:
            arrays: As of `save_arrays`. They may be changed on return.
            timeout: As there.

        Raises:
            UnisonoError: As of `save_arrays`. There is no such version then, but if only its name
                could not be stored.
        """
        with ObjectCall(self._group, "Publisher.publish", timeout, None) as call:
            # After an error there may be a version that not all ranks know.
            newest: int = call.on_all(self._newest, f"cannot use {self._folder}")[0]
        number = max(self.version, newest) + 1
        path = _path(self._folder, number)
        try:
            _save(arrays, path, self._group, self._dtype, timeout, is_new=True)
        except BaseException:
            self.version = max([self.version, *_versions(self._folder)])
            raise
        self.version = number
        if self._group.rank() == 0:
            for old in _versions(self._folder):
                if old <= number - self._keep:
                    # What stays is removed after the next version.
                    with contextlib.suppress(OSError):
                        os.unlink(_path(self._folder, old))
        return number


class Subscriber:
    """Takes the versions that a `Publisher` publishes, when it can; also after a restart.

        subscriber = dist.Subscriber("/dev/shm/weights")
        while serving:
            subscriber.take({"w": dist.Sharded(...)})      # between two requests

    Args:
        folder: Of the publisher.
        group: Ranks that take the same version at the same time, by a collective `take`; None:
            this process alone.

    Attributes:
        version: The version that was taken last; 0 if there is none.
    """

    def __init__(self, folder: str | os.PathLike[str], *, group: Group = None) -> None:
        self._folder = os.fsdecode(os.fspath(folder))
        self._group: ProcessGroup | None = None if group is None else require_group(group)
        self.version = 0

    @on_host
    def take(self, arrays: Mapping[str, Any], *, timeout: Timeout | None = None) -> int | None:
        """Copy the newest version into arrays if it is another one; return its number, or None.

        It has a smaller number than the one before if the folder was made anew. With a group all
        ranks take it if one of them has not taken it.

        Args:
            arrays: As of `load_arrays`; ranks are those of the group or, without one, of the world.
            timeout: Of the call; the group's if None, 60 s without one.

        Raises:
            InvalidArgumentError: An array does not fit; without a group.
            CollectiveError: An array does not fit on a rank of the group. The arrays are undefined.
            CollectiveTimeoutError: Each version was removed before it could be opened.
        """
        if self._group is None:
            return self._take_alone(arrays, Deadline(60.0 if timeout is None else timeout))
        pg = self._group
        with ObjectCall(pg, "Subscriber.take", timeout, None) as call:
            own: list[dict[str, ArrayParts]] = []
            rank = pg.ranks[pg.rank()]
            call.check(lambda: own.append(named_parts("take", arrays, rank, write=True)))
            failed = f"cannot read {self._folder}"
            while True:
                # The version that all see; the publisher may go on meanwhile.
                seen = call.on_all(
                    lambda: (max(_versions(self._folder), default=0), self.version), failed
                )
                number: int = min(newest for newest, _ in seen)
                if not number or all(number == taken for _, taken in seen):
                    return None
                opened: list[dict[str, _StoredArray]] = []
                done = call.on_all(lambda: self._open(number, opened), failed)  # noqa: B023
                if all(done):
                    break
            path = _path(self._folder, number)
            call.on_all(lambda: _copy_out(path, opened[0], own[0]), f"cannot take {path}")
        self.version = number
        return number

    def _take_alone(self, arrays: Mapping[str, Any], deadline: Deadline) -> int | None:
        rank = get_rank() if is_initialized() else -1
        parts = named_parts("take", arrays, rank, write=True)
        opened: list[dict[str, _StoredArray]] = []
        while True:
            number = max(_versions(self._folder), default=0)
            if number in (0, self.version):
                return None
            if self._open(number, opened):
                break
            if deadline.expired():
                raise CollectiveTimeoutError(
                    f"Subscriber.take timed out after {deadline}: each version of {self._folder} "
                    "was removed before it could be opened",
                    hint="publish less often, or with a larger keep=",
                )
        _copy_out(_path(self._folder, number), opened[0], parts)
        self.version = number
        return number

    def _open(self, number: int, opened: list[dict[str, _StoredArray]]) -> bool:
        """Open a version; return False if it was removed."""
        with contextlib.suppress(FileNotFoundError):
            opened.append(_opened(_path(self._folder, number))[0])
        return bool(opened)


def _path(folder: str, number: int) -> str:
    return os.path.join(folder, f"{number:010}.safetensors")


def _versions(folder: str) -> list[int]:
    """Return the numbers of the versions in a folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [int(match[1]) for name in names if (match := _VERSION.fullmatch(name))]
