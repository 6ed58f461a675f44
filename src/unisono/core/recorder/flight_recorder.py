"""The file format of torch's flight recorder, for torch's analyser; `decoding` reads files.

Source: torch.distributed.flight_recorder and _dump_fr_trace of torch 2.13 (format 2.10).
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from unisono.core.base import document
from unisono.core.recorder.records import TraceRecord

_VERSION = "2.10"

# torch's analyser knows only some names of backends and operations, and rejects a file with
# others. Operations that it lacks get the name of one with equal sizes on all ranks.
_BACKEND = "gloo"
_NAMES = {
    "all_gather_into_tensor": "_all_gather_base",
    "all_gather_coalesced": "ALLGATHER_coalesced",
    "all_reduce_coalesced": "allreduce_coalesced",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "scan": "all_reduce",
    "exscan": "all_reduce",
}
_KNOWN = {
    *("broadcast", "reduce", "all_gather", "all_reduce", "all_gather_into_tensor_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "gather", "scatter", "all_to_all"),
    *("all_to_all_single", "barrier"),
}
# How much larger than `count` input and output are: 0: one block, 1: a block of each rank.
_BLOCKS = {
    **dict.fromkeys(("all_gather", "_all_gather_base", "ALLGATHER_coalesced"), (0, 1)),
    **dict.fromkeys(("all_gather_into_tensor_coalesced", "gather"), (0, 1)),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "scatter"), (1, 0)),
    "reduce_scatter_tensor_coalesced": (1, 0),
    **dict.fromkeys(("all_to_all", "all_to_all_single"), (1, 1)),
}
TORCH_DTYPES = {
    **{"bool": "Bool", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long"},
    **{"uint8": "Byte", "uint16": "UInt16", "uint32": "UInt32", "uint64": "UInt64"},
    **{"float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "float64": "Double"},
    **{"complex64": "ComplexFloat", "complex128": "ComplexDouble"},
}
_STATES = {"queued": "scheduled", "completed": "completed"}

# A ring that has lost records begins at a number of the call that differs by rank. So the first
# entry is the first whose number is a multiple of this, which is mostly the same on all ranks.
_BEGIN = 256


@dataclass(frozen=True)
class GroupRecords:
    """The records of one group on one rank.

    Attributes:
        key: Name of the group that no other group of the world has.
        name: Name of the group.
        ranks: Global ranks of the members, in group order; empty if the file does not have them.
        records: Oldest first.
    """

    key: str
    name: str
    ranks: tuple[int, ...]
    records: list[TraceRecord] = field(default_factory=list)

    @property
    def has_lost(self) -> bool:
        """Whether older records have been overwritten."""
        return bool(self.records) and self.records[0].number > 1


@dataclass(frozen=True)
class Origin:
    """The process that recorded, and its clocks when its records were read.

    Attributes:
        host: Name of its host.
        pid: Its process id.
        clock: Name of its monotonic clock; equal for two ranks that read the same clock.
        monotonic_ns: Time of the monotonic clock.
        wall_ns: Time of the wall clock at the same moment.
        runs: Whether it was asked while its job ran, so that it may make further calls.
    """

    host: str
    pid: int
    clock: str
    monotonic_ns: int
    wall_ns: int
    runs: bool = False


@dataclass(frozen=True)
class RankRecords:
    """The records of one rank.

    Attributes:
        rank: Global rank; None if only the name of the file has it.
        groups: The rank's groups.
        origin: None if another library wrote the file.
    """

    rank: int | None
    groups: list[GroupRecords]
    origin: Origin | None = None


def encode(mine: RankRecords) -> bytes:
    """Return the content of the file of one rank.

    The file also has all records as they are, which torch's analyser ignores.
    """
    assert mine.rank is not None
    # Groups that have lost records last: the analyser drops entries with numbers below the first.
    ordered = sorted(mine.groups, key=lambda group: group.has_lost)
    config = {each.key: _config(each.key, each.name, each.ranks) for each in mine.groups}
    entries = []
    for group in ordered:
        entries += [_collective(group, record) for record in _collectives(group)]
        for messages, ranks, record, number in _messages(mine.rank, group):
            config[messages] = _config(messages, messages, ranks)
            entries.append(_message(messages, mine.rank, record, number, group.name))
    content = {
        "version": _VERSION,
        "pg_config": config,
        "pg_status": {each.key: _status(each) for each in mine.groups},
        "comm_lib_version": "",
        "entries": entries,
        "unisono": document.plain(mine),
    }
    return pickle.dumps(content, protocol=2)


def encode_short(mine: RankRecords) -> bytes:
    """Return the records of one rank without torch's part, as JSON for `decode`."""
    return document.dumps({"unisono": mine}).encode()


def _config(key: str, name: str, ranks: Iterable[int]) -> dict[str, str]:
    return {"name": key, "desc": name, "ranks": str(list(ranks))}


def _status(group: GroupRecords) -> dict[str, int]:
    calls = [record for record in group.records if not record.is_message]
    last = {
        "enqueued": [record.seq for record in calls],
        "started": [record.seq for record in calls if record.started_ns is not None],
        "completed": [record.seq for record in calls if record.outcome == "completed"],
    }
    return {f"last_{what}_collective": max(seqs, default=-1) for what, seqs in last.items()}


def _collectives(group: GroupRecords) -> list[TraceRecord]:
    calls = [record for record in group.records if not record.is_message]
    if not calls or not group.has_lost:
        return calls
    first = math.ceil(calls[0].seq / _BEGIN) * _BEGIN
    return [record for record in calls if record.seq >= first] or calls


def _entry(record: TraceRecord, group: tuple[str, str], name: str) -> dict[str, Any]:
    place = {"name": record.function, "filename": record.file, "line": record.line}
    dtypes = [TORCH_DTYPES.get(record.dtype, record.dtype)] if record.dtype else []
    return {
        "frames": [place] if record.file else [],
        "record_id": record.seq,
        "pg_id": 0,
        "process_group": group,
        "thread_name": "",
        "thread_id": "",
        "op_id": record.number,
        "profiling_name": f"{_BACKEND}:{name}",
        "time_created_ns": record.enqueued_ns,
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,
        "state": _STATES.get(record.outcome, "started"),
        "time_discovered_started_ns": record.started_ns,
        "time_discovered_completed_ns": record.ended_ns,
        "retired": record.ended_ns is not None,
        "timeout_ms": 0,
    }


def _collective(group: GroupRecords, record: TraceRecord) -> dict[str, Any]:
    name = _NAMES.get(record.op, record.op)
    name = name if name in _KNOWN or name in _BLOCKS or record.op in _NAMES else "barrier"
    given, result = _BLOCKS.get(name, (0, 0))
    size = len(group.ranks)
    return {
        **_entry(record, (group.key, group.name), name),
        "collective_seq_id": record.seq,
        "p2p_seq_id": 0,
        "input_sizes": [[record.count * (size if given else 1)]],
        "output_sizes": [[record.count * (size if result else 1)]],
        "is_p2p": False,
    }


def _messages(
    rank: int, group: GroupRecords
) -> Iterable[tuple[str, tuple[int, ...], TraceRecord, int]]:
    """Yield (name, ranks, record, number) of messages; nothing if the ring has lost records.

    torch's analyser compares all members of a group. So the messages from one rank to another with
    one tag are a group of two ranks, and the analyser pairs them by their number.
    """
    counts: Counter[str] = Counter()
    for record in () if group.has_lost else group.records:
        if record.op not in ("send", "recv") or record.peer in (None, rank):
            continue
        assert record.peer is not None
        assert record.tag is not None
        if record.tag < 0:  # any tag
            continue
        ends = (rank, record.peer) if record.op == "send" else (record.peer, rank)
        name = f"{group.key}: messages {ends[0]}->{ends[1]} tag {record.tag}"
        counts[name] += 1
        yield name, ends, record, counts[name]


def _message(name: str, rank: int, record: TraceRecord, number: int, group: str) -> dict[str, Any]:
    assert record.peer is not None
    me, peer = (0, 1) if rank < record.peer else (1, 0)
    arrow = "->" if record.op == "send" else "<-"
    return {
        **_entry(record, (name, name), f"{record.op} {me}{arrow}{peer}"),
        "record_id": number,
        "collective_seq_id": number,
        "p2p_seq_id": number,
        "input_sizes": [[record.count]],
        "output_sizes": [[record.count]],
        "is_p2p": True,
    }
