"""The file format of torch's flight recorder: for torch's analyser, and to read torch's files.

Source: torch.distributed.flight_recorder and _dump_fr_trace of torch 2.13 (format 2.10).
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from unisono.errors import InvalidArgumentError
from unisono.trace.records import MESSAGES, TraceRecord

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
_DTYPES = {
    **{"bool": "Bool", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long"},
    **{"uint8": "Byte", "uint16": "UInt16", "uint32": "UInt32", "uint64": "UInt64"},
    **{"float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "float64": "Double"},
    **{"complex64": "ComplexFloat", "complex128": "ComplexDouble"},
}
_BY_TORCH = {name: dtype for dtype, name in _DTYPES.items()}
_STATES = {"queued": "scheduled", "completed": "completed"}
_OUTCOMES = {"scheduled": "queued", "started": "running"}

# A ring that has lost records begins at a number of the call that differs by rank. So the first
# entry is the first whose number is a multiple of this, which is mostly the same on all ranks.
_BEGIN = 256


@dataclass(frozen=True)
class GroupRecords:
    """The records of one group on one rank.

    Attributes:
        key: Name of the group that no other group of the world has.
        name: Name of the group.
        ranks: Global ranks of the members, in group order.
        records: Oldest first.
    """

    key: str
    name: str
    ranks: tuple[int, ...]
    records: list[TraceRecord] = field(default_factory=list)


def encode(rank: int, groups: Sequence[GroupRecords]) -> bytes:
    """Return the content of the file of one rank.

    The file also has all records as they are, which torch's analyser ignores.
    """
    # Groups that have lost records last: the analyser drops entries with numbers below the first.
    ordered = sorted(groups, key=_has_lost)
    config = {each.key: _config(each.key, each.name, each.ranks) for each in groups}
    entries = []
    for group in ordered:
        entries += [_collective(group, record) for record in _collectives(group)]
        for messages, ranks, record, number in _messages(rank, group):
            config[messages] = _config(messages, messages, ranks)
            entries.append(_message(messages, rank, record, number, group.name))
    content = {
        "version": _VERSION,
        "pg_config": config,
        "pg_status": {each.key: _status(each) for each in groups},
        "comm_lib_version": "",
        "entries": entries,
        "unisono": {"rank": rank, "groups": [asdict(each) for each in groups]},
    }
    return pickle.dumps(content, protocol=2)


def _has_lost(group: GroupRecords) -> bool:
    return bool(group.records) and group.records[0].number > 1


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
    if not calls or not _has_lost(group):
        return calls
    first = math.ceil(calls[0].seq / _BEGIN) * _BEGIN
    return [record for record in calls if record.seq >= first] or calls


def _entry(record: TraceRecord, group: tuple[str, str], name: str) -> dict[str, Any]:
    place = {"name": record.function, "filename": record.file, "line": record.line}
    dtypes = [_DTYPES.get(record.dtype, record.dtype)] if record.dtype else []
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
    for record in () if _has_lost(group) else group.records:
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


# ---- reading ----------------------------------------------------------------------------------


class _Plain(pickle.Unpickler):
    """Reads values that consist of numbers, strings, lists and dicts only."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class: a file may come from anywhere, and a class could run code."""
        raise InvalidArgumentError(f"a trace file has no place for {module}.{name}")


def decode(content: bytes) -> tuple[int | None, list[GroupRecords]]:
    """Return the rank and the records of a file: of this library, of torch or of NCCL's groups.

    Args:
        content: The file, a pickle or JSON. The rank of a file of torch is in the file's name only,
            so it is None here.

    Raises:
        InvalidArgumentError: It is no such file.
    """
    try:
        is_json = content[:1] == b"{"
        dump = json.loads(content) if is_json else _Plain(io.BytesIO(content)).load()
        if own := dump.get("unisono"):
            return own["rank"], [_own(group) for group in own["groups"]]
        return None, _foreign(dump)
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise InvalidArgumentError(f"this is no file of a flight recorder: {error!r}") from error


def _own(group: dict[str, Any]) -> GroupRecords:
    known = {each.name for each in fields(TraceRecord)}
    records = [
        TraceRecord(**{name: value for name, value in record.items() if name in known})
        for record in group["records"]
    ]
    return GroupRecords(group["key"], group["name"], tuple(group["ranks"]), records)


def _foreign(dump: dict[str, Any]) -> list[GroupRecords]:
    groups: dict[str, GroupRecords] = {}
    for entry in dump["entries"]:
        key, name = entry["process_group"]
        if key not in groups:
            config = dump.get("pg_config", {}).get(key, {})
            groups[key] = GroupRecords(key, name, tuple(json.loads(config.get("ranks") or "[]")))
        groups[key].records.append(_record(entry, groups[key].ranks))
    return list(groups.values())


def _record(entry: dict[str, Any], ranks: tuple[int, ...]) -> TraceRecord:
    op, _, ends = entry["profiling_name"].partition(":")[2].partition(" ")
    sizes, dtypes = entry.get("input_sizes") or [[]], entry.get("input_dtypes") or [""]
    frame: dict[str, Any] = next(iter(entry.get("frames") or []), {})
    is_message = op in MESSAGES
    peer = None
    if is_message and ends:
        member = int(ends.replace("<-", "->").split("->")[1])
        peer = ranks[member] if member < len(ranks) else member
    return TraceRecord(
        number=entry["record_id"],
        seq=entry["p2p_seq_id" if is_message else "collective_seq_id"],
        op=op,
        dtype=_BY_TORCH.get(dtypes[0], dtypes[0]),
        count=math.prod(sizes[0]) if sizes[0] else 0,
        nbytes=0,
        algorithm="",
        route=entry["profiling_name"].partition(":")[0],
        peer=peer,
        tag=0 if is_message else None,
        fingerprint=0,
        file=frame.get("filename", ""),
        line=frame.get("line", 0),
        function=frame.get("name", ""),
        enqueued_ns=entry["time_created_ns"],
        started_ns=entry.get("time_discovered_started_ns"),
        ended_ns=entry.get("time_discovered_completed_ns"),
        outcome=_OUTCOMES.get(entry["state"], entry["state"]),
        waited_ns=0,
        waited_for=None,
    )
