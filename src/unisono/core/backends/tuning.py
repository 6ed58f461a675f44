"""Files of tuning tables: find those of this machine, agree on them, write them.

A rank reads its tables when the world is made, and publishes their digests beside its address. So
each rank knows which tables the others have, for the world and for every group made from it. A
group uses a table if all its ranks have published the same digest for its shape.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from unisono.core.base import config
from unisono.core.base.host import reason_of
from unisono.core.base.log import get_logger, log_once
from unisono.core.engines import Communicator, Engine
from unisono.core.platform.machine import cpu_model
from unisono.core.schedules.choice.tables import VIRTUAL, ChoiceTable, GroupShape
from unisono.errors import InvalidArgumentError

_log = get_logger("tuning")

_VIRTUAL_PREFIX = "tuning-virtual-"

NONE = "-"
"""What a rank without tables publishes."""


def machine() -> str:
    """Return the properties of this machine on which measured choices depend.

    The cores are those of the machine, because the launcher may bind a rank to some of them.
    """
    words = [cpu_model(), f"{os.cpu_count()} cores", f"{platform.system()} {platform.machine()}"]
    # Such a world is no measure for a world on several hosts, although it has the same shape.
    tricks = ("UNISONO_SHARED_MEMORY", "UNISONO_RANKS_PER_HOST")
    words += [f"{name}={config.get(name)}" for name in tricks if config.is_set(name)]
    return ", ".join(words)


def folder() -> Path:
    """Return the folder of the tables, which may not exist."""
    cache = config.environ().get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "unisono"


def file_of(table: ChoiceTable) -> Path:
    """Return the file of a table; one of virtual time has its own, for every machine."""
    named = config.get("UNISONO_TUNING")
    if named not in ("", "0"):
        return Path(named)
    prefix = _VIRTUAL_PREFIX if table.machine == VIRTUAL else f"{_prefix()}-"
    return folder() / f"{prefix}{table.shape}.json"


def _prefix() -> str:
    return f"tuning-{blake2b(machine().encode(), digest_size=4).hexdigest()}"


def save(table: ChoiceTable) -> Path:
    """Write a table to its file, in one step; return the file.

    Raises:
        InvalidArgumentError: The file cannot be written.
    """
    file = file_of(table)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # A rank that starts now reads the whole old table or the whole new table. The name of the
        # part is new, because another user of the folder could have put a link there.
        handle, part = tempfile.mkstemp(prefix=f"{file.name}.", dir=file.parent)
        try:
            with open(handle, "w", encoding="utf-8") as stream:
                os.chmod(handle if os.chmod in os.supports_fd else part, 0o644)
                stream.write(table.to_json())
            os.replace(part, file)
        except BaseException:
            os.unlink(part)
            raise
    except OSError as error:
        raise InvalidArgumentError(f"cannot write {file}: {reason_of(error)}") from None
    return file


def files() -> list[Path]:
    """Return the files from which this machine's ranks read tables, the measured ones first."""
    named = config.get("UNISONO_TUNING")
    if named == "0":
        return []
    if named:
        return [Path(named)]
    try:
        names = os.listdir(folder())
    except OSError:
        return []
    if not any(name.startswith("tuning-") for name in names):
        # Most users have no table, and the properties of the machine take a file to read.
        return []
    return [
        folder() / name
        for prefix in (f"{_prefix()}-", _VIRTUAL_PREFIX)
        for name in sorted(names)
        if name.startswith(prefix) and name.endswith(".json")
    ]


def read_tables(size: int | None = None) -> dict[GroupShape, ChoiceTable]:
    """Return the tables of this machine, for groups of at most `size` ranks.

    A measured table takes precedence over one of virtual time.

    Tables of other machines and versions, and broken files of the cache, are left out and logged.

    Raises:
        InvalidArgumentError: The file that UNISONO_TUNING names is broken or cannot be read.
    """
    from unisono import __version__

    tables: dict[GroupShape, ChoiceTable] = {}
    for file in files():
        try:
            if file.exists() and not file.is_file():
                raise InvalidArgumentError("no regular file")  # a pipe would block
            table = ChoiceTable.from_json(str(file), file.read_text(encoding="utf-8"))
        except (InvalidArgumentError, OSError, UnicodeDecodeError) as error:
            why = error.what if isinstance(error, InvalidArgumentError) else reason_of(error)
            if config.get("UNISONO_TUNING"):
                raise InvalidArgumentError(f"UNISONO_TUNING={file}: {why}") from None
            log_once(_log, logging.WARNING, "table left out: %s", f"{file}: {why}")
            continue
        if table.machine not in (machine(), VIRTUAL) or table.version != __version__:
            found = f"{table.machine}, unisono {table.version}"
            log_once(_log, logging.WARNING, "table left out: %s was measured on %s", file, found)
        elif size is None or table.shape.ranks <= size:
            tables.setdefault(table.shape, table)
    return tables


def published(tables: dict[GroupShape, ChoiceTable]) -> str:
    """Return the digests of tables as a word, for the other ranks."""
    return ",".join(f"{shape}={table.digest}" for shape, table in tables.items()) or NONE


def shape_of(engine: Engine) -> GroupShape:
    """Return the shape of a group's table."""
    over = "shared-memory" if engine.shares_memory else engine.comm.transport.name
    comm = engine.comm
    return GroupShape(engine.name, over, comm.size, engine.local, comm.round_trip_us)


def agreed(
    tables: dict[GroupShape, ChoiceTable], shape: GroupShape, comm: Communicator
) -> ChoiceTable | None:
    """Return the table for a group, or None if its ranks have none or different tables.

    Rank 0 of the group logs a warning if only some ranks have a table, or tables differ.
    """
    if not comm.transport.words:
        # The ranks did not meet through `connect`, so they know nothing of each other's tables.
        return None
    digests = [_digest(comm.transport.words[rank], shape) for rank in comm.ranks]
    if len(set(digests)) == 1:
        return tables.get(shape)
    if comm.rank == 0:
        _warn(digests, comm.ranks, shape)
    return None


def _digest(word: str, shape: GroupShape) -> str:
    for part in word.split(","):
        name, _, digest = part.partition("=")
        if name == str(shape):
            return digest
    return ""


def _warn(digests: Sequence[str], ranks: Sequence[int], shape: GroupShape) -> None:
    """Log which ranks have which table."""
    groups = {
        digest: [rank for rank, other in zip(ranks, digests, strict=True) if other == digest]
        for digest in sorted(set(digests))
    }
    parts = [
        f"ranks {', '.join(map(str, some))} have " + (f"table {digest}" if digest else "none")
        for digest, some in groups.items()
    ]
    text = f"no table is used for {shape}: {'; '.join(parts)}"
    log_once(_log, logging.WARNING, "%s", text)


def clear() -> list[Path]:
    """Delete the tables of the cache; return their files."""
    found = sorted(folder().glob("tuning-*.json"))
    for file in found:
        with contextlib.suppress(FileNotFoundError):
            file.unlink()
    return found
