"""Arrays of any sharding in files of safetensors' format: save them, load them.

A file has a name only if it is whole (`open_file`), and is never changed then.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from unisono.beyond.boxes import whole
from unisono.beyond.files import open_file
from unisono.beyond.reshard.parts import ArrayParts, converter, dtype_from, named_parts
from unisono.beyond.reshard.planned import planned
from unisono.beyond.reshard.safetensors import (
    INDEX,
    NAMES,
    SCALES,
    FileLayout,
    StoredArray,
    StoredEntry,
    entries_of,
    names_in,
    opened,
)
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.integers import as_integer
from unisono.core.base.threads.streams import on_host
from unisono.core.base.types import DType
from unisono.core.c10d.objects.call import ObjectCall
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import Group, require_group
from unisono.core.platform.files import lock
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    InvalidArgumentError,
    UnsupportedError,
)

# How the names of an index's parts end.
_TOKEN = 8
_PART = rf"-([0-9a-f]{{{_TOKEN}}})-\d{{5,}}-of-\d{{5,}}\.safetensors"
INCOMPLETE = r"\.[0-9a-f]{12}\.incomplete"
"""How the name of a file ends that is not whole yet."""
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
        dtype: Of the floating arrays in the file, such as "bfloat16"; their own if None. "int8":
            in blocks, as by `reshard`, with scales in an array of the name with ".scales".
        part_bytes: Write several files of about this size, and last an index with the name `path`,
            which ends with ".safetensors.index.json". Then parts of earlier calls with this path,
            also of killed ones, are removed if no index in the folder names them and no other call
            writes them.
        timeout: Of each of its calls; the group's if None.

    Raises:
        CollectiveMismatchError: Ranks disagree, or a rank's arguments are wrong.
        CollectiveError: Nobody has a part of an array, or a rank cannot write.
    """
    save(arrays, path, require_group(group), dtype, timeout, part_bytes=part_bytes)


def save(
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
        rows = call.loads_all(call.all_gather(call.pack(lambda: (plain, {}, pg.rank()))))
        targets = {}
        for row in rows:
            for name, each in row[0].items():
                if each.dtype is not None:
                    stored = _stored(each.dtype, wanted)
                    targets[name] = ArrayParts(each.shape, stored, [whole(each.shape)], [])
        rows.append(({}, targets, None))
        way = wanted if wanted is not None and wanted.name == "int8" else None
        plans = planned(call, pg, rows, way)
        arrays_of = [entries_of(plan, targets[plan.name].shape) for plan in plans]
        _check_names(arrays_of)

    def write(path: str | os.PathLike[str], entries: Sequence[StoredEntry]) -> None:
        layout = FileLayout(entries)
        header = layout.header
        with open_file(path, "w", pg, timeout=timeout) as file:
            file.write_in_order(header if pg.rank() == 0 else header[:0], timeout=timeout)
            pieces = layout.pieces(pg.rank(), parts)
            file._write_pieces(pieces, layout.nbytes, "save_arrays", timeout=timeout)
            file._is_new = is_new

    if part_bytes is None:
        write(path, list(itertools.chain.from_iterable(arrays_of)))
        return
    stem = os.fsdecode(path).removesuffix(INDEX)
    try:
        # First of all, because it says as long as it is locked that its parts are not dead.
        with open_file(path, "w", pg, timeout=timeout) as file:
            if pg.rank() == 0:
                with contextlib.suppress(OSError):
                    lock(file._fd)
            # Parts of two versions have different names, so an index is always of one version.
            token = file._name[len(file.path) + 1 :][:_TOKEN]
            index = _write_parts(f"{stem}-{token}", _cut(arrays_of, part_bytes), write)
            file.write_in_order(index if pg.rank() == 0 else index[:0], timeout=timeout)
    finally:
        # Rank 0, because it names the index.
        if pg.rank() == 0:
            with contextlib.suppress(OSError, InvalidArgumentError):
                _remove_parts(stem)


def _remove_parts(stem: str) -> None:
    """Remove the parts of indices of one name, but those that are written, or that an index names.

    In this order: an index gets its name before its lock ends.
    """
    folder, base = os.path.split(stem)
    names = os.listdir(folder or os.curdir)
    part = re.compile(f"{re.escape(base)}{_PART}({INCOMPLETE})?")
    found = {name: match[1] for name in names if (match := part.fullmatch(name))}
    dead = {token for token in set(found.values()) if not _is_written(f"{stem}{INDEX}.{token}")}
    kept: set[str] = set()
    for name in os.listdir(folder or os.curdir):
        if name.endswith(INDEX):
            kept |= set(names_in(os.path.join(folder, name))[0].values())
    for name, token in found.items():
        if token in dead and name not in kept:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))


def _is_written(start: str) -> bool:
    """Whether a process writes the index whose incomplete name starts like this; remove a dead one.

    Without locks it is always taken to be written.
    """
    for name in glob.glob(f"{glob.escape(start)}*.incomplete"):
        try:
            with open(name, "r+b") as file:
                lock(file)
                os.unlink(name)
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return False


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
        if not os.fsdecode(path).endswith(INDEX):
            raise InvalidArgumentError(f"path {path!r}: the name of an index ends with {INDEX}")
    elif os.fsdecode(path).endswith(INDEX):
        raise InvalidArgumentError(f"path {path!r}: an index needs part_bytes")
    if "__metadata__" in parts:
        raise InvalidArgumentError("safetensors' format has no array of the name '__metadata__'")
    for name, each in parts.items():
        if each.dtype is None:
            continue
        stored = _stored(each.dtype, wanted)
        if stored.name not in NAMES or converter(each.dtype, stored) is None:
            raise UnsupportedError(f"array {name!r} of {each.dtype} cannot be stored as {stored}")
    return parts, wanted


def _write_parts(
    stem: str,
    cut: Sequence[Sequence[StoredEntry]],
    write: Callable[[str, Sequence[StoredEntry]], None],
) -> np.ndarray[Any, Any]:
    """Write each part; return the text of the index."""
    names: dict[str, str] = {}
    for number, some in enumerate(cut, 1):
        part = f"{stem}-{number:05}-of-{len(cut):05}.safetensors"
        write(part, some)
        names |= {entry.name: os.path.basename(part) for entry in some}
    text = json.dumps({"metadata": {}, "weight_map": names})
    return np.frombuffer(text.encode(), np.uint8)


def _check_names(arrays: Sequence[Sequence[StoredEntry]]) -> None:
    """Check that the scales of one array have not the name of another."""
    names = Counter(entry.name for entries in arrays for entry in entries)
    for name, count in names.items():
        if count > 1:
            raise InvalidArgumentError(
                f"save_arrays: {name!r} is the name of an array, and of the scales of "
                f"{name.removesuffix(SCALES)!r}"
            )


def _cut(arrays: Sequence[Sequence[StoredEntry]], most: int) -> list[list[StoredEntry]]:
    """Return the entries of each part: of at most `most` bytes, or one array."""
    cut: list[list[StoredEntry]] = []
    size = 0
    for entries in arrays:
        nbytes = sum(entry.nbytes for entry in entries)
        if not cut or size + nbytes > most:
            cut.append([])
            size = 0
        cut[-1] += entries
        size += nbytes
    return cut


def _stored(dtype: DType, wanted: DType | None) -> DType:
    is_wanted = wanted is not None and wanted.name != "int8" and dtype.kind == "f"
    return wanted if is_wanted and wanted is not None else dtype


def copy_out(path: str, stored: Mapping[str, StoredArray], parts: Mapping[str, ArrayParts]) -> None:
    """Fill the boxes of this rank; nothing is written if an array does not fit."""
    copies = []
    for name, each in parts.items():
        if each.dtype is None:
            continue
        if name not in stored:
            raise InvalidArgumentError(f"{path} has no array {name!r}")
        array = stored[name]
        if isinstance(array.dtype, str):
            raise InvalidArgumentError(
                f"array {name!r} in {path} has the unknown dtype {array.dtype}"
            )
        if array.memory.shape != each.shape or not array.becomes(each.dtype):
            raise InvalidArgumentError(
                f"array {name!r} is {array.dtype}{list(array.memory.shape)} in {path}, which does "
                f"not become {each.dtype}{list(each.shape)}{array.why_not(name)}"
            )
        for box, view in zip(each.boxes, each.views, strict=True):
            copies.append((array, box, view, each.dtype))
    for array, box, view, dtype in copies:
        array.copy(box, view, dtype)


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
            found: list[dict[str, StoredArray]] = []

            def see() -> tuple[str, bool]:
                is_last = deadline.expired()
                stored, version = opened(name)
                found.append(stored)  # noqa: B023
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
        call.on_all(lambda: copy_out(name, found[0], own[0]), failed)
