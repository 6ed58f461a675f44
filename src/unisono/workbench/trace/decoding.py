"""Read files of records: those of this library, and dumps of torch's Gloo and NCCL.

Source: torch.distributed.flight_recorder and _dump_fr_trace of torch 2.13 (format 2.10).
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import zlib
from typing import Any

from unisono.core.base import document
from unisono.core.recorder.flight_recorder import TORCH_DTYPES, GroupRecords, RankRecords
from unisono.core.recorder.records import MESSAGES, TraceRecord
from unisono.errors import InvalidArgumentError

DEFAULT_KEY, DEFAULT_NAME = "0", "default_pg"
"""Key and name of torch's default group, whose members are all ranks."""

_BY_TORCH = {name: dtype for dtype, name in TORCH_DTYPES.items()}
_OUTCOMES = {"scheduled": "queued", "started": "running"}
# Gloo names its sub-groups so, all of them.
_NO_NAMES = ("", "undefined")
# The folder of torch in the name of a file.
_TORCH = re.compile(r"(.*[/\\]torch[/\\])distributed[/\\]|(.*-packages[/\\]torch[/\\])")


class _Plain(pickle.Unpickler):
    """Reads values that consist of numbers, strings, lists and dicts only."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class: a file may come from anywhere, and a class could run code."""
        raise InvalidArgumentError(f"a trace file has no place for {module}.{name}")


def decode(content: bytes) -> RankRecords:
    """Return the records of a file: of this library, of torch's Gloo or of its NCCL.

    Args:
        content: The file, a pickle or JSON.

    Raises:
        InvalidArgumentError: It is no such file.
    """
    try:
        is_json = content[:1] == b"{"
        dump = json.loads(content) if is_json else _Plain(io.BytesIO(content)).load()
        found = dump["unisono"] if "unisono" in dump else document.plain(_foreign(dump))
        return document.parse(RankRecords, found)
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise InvalidArgumentError(f"this is no file of a flight recorder: {error!r}") from error


def _foreign(dump: dict[str, Any]) -> RankRecords:
    groups: dict[str, GroupRecords] = {}
    # torch numbers the records of all groups together, from 0 or 1.
    first = min((entry["record_id"] for entry in dump["entries"]), default=0)
    lost = first if first > 1 else 0
    for key, config in dump.get("pg_config", {}).items():
        name, ranks = config["desc"], tuple(json.loads(config["ranks"] or "[]"))
        if not key:
            # Gloo keeps the ranks of the default group, and no others, under a key without text.
            key, name = DEFAULT_KEY, DEFAULT_NAME
        if ranks:
            groups.setdefault(key, GroupRecords(key, _name_of(key, name), ranks))
    for entry in dump["entries"]:
        key, name = entry["process_group"]
        group = groups.setdefault(key, GroupRecords(key, _name_of(key, name), ()))
        number = lost + len(group.records) + 1
        group.records.append(_record(entry, number, group.ranks))
    return RankRecords(None, list(groups.values()))


def _name_of(key: str, name: str) -> str:
    return key if name in _NO_NAMES else name


def _record(entry: dict[str, Any], number: int, ranks: tuple[int, ...]) -> TraceRecord:
    route, _, call = entry["profiling_name"].partition(":")
    op, _, ends = call.partition(" ")
    sizes, dtypes = entry.get("input_sizes") or [[]], entry.get("input_dtypes") or [""]
    frame = _frame_of_user(entry.get("frames") or [])
    outcome = _OUTCOMES.get(entry["state"], entry["state"])
    if outcome == "queued" and route == "gloo":
        # Gloo never changes the state.
        outcome = "ended" if entry.get("retired", True) else "running"
    is_message = op in MESSAGES or bool(entry.get("is_p2p"))
    peer = None
    if is_message and ends:
        member = int(ends.replace("<-", "->").split("->")[1])
        peer = ranks[member] if member < len(ranks) else member
    dtype = _BY_TORCH.get(dtypes[0], dtypes[0])
    return TraceRecord(
        number=number,
        seq=entry["p2p_seq_id" if is_message else "collective_seq_id"],
        op=op,
        dtype=dtype,
        count=math.prod(sizes[0]) if sizes[0] else 0,
        nbytes=sum(map(math.prod, sizes)) * itemsize_of(dtype) if sizes[0] else 0,
        algorithm="",
        route=route,
        peer=peer,
        tag=0 if is_message else None,
        fingerprint=0 if is_message else _fingerprint(op, entry),
        file=frame.get("filename", ""),
        line=frame.get("line", 0),
        function=frame.get("name", ""),
        enqueued_ns=entry["time_created_ns"],
        # In JSON, 0 is "not yet".
        started_ns=entry.get("time_discovered_started_ns") or None,
        ended_ns=entry.get("time_discovered_completed_ns") or None,
        outcome=outcome,
        waited_ns=0,
        waited_for=None,
    )


def itemsize_of(dtype: str) -> int:
    """Return the bytes of an element, from the name in a record; 1 if it does not say that."""
    bits = re.fullmatch(r"[a-z]+(\d+)", dtype)
    return int(bits[1]) // 8 if bits else 1


def _frame_of_user(frames: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the innermost frame outside torch, or else the innermost one."""
    found = [_TORCH.match(frame.get("filename", "")) for frame in frames]
    folders = tuple({match[1] or match[2] for match in found if match})
    for frame in frames:
        if not frame.get("filename", "").startswith(folders):
            return frame
    return next(iter(frames), {})


def _fingerprint(op: str, entry: dict[str, Any]) -> int:
    """Return a number that is equal on all ranks if the calls match, as torch's analyser has it."""
    given, result = entry.get("input_sizes"), entry.get("output_sizes")
    dtypes = {*(entry.get("input_dtypes") or ()), *(entry.get("output_dtypes") or ())}
    parts = (
        op,
        None if op in ("all_to_all", "scatter") else given,
        None if op in ("all_to_all", "gather") else result,
        sorted(dtypes),
    )
    return zlib.crc32(json.dumps(parts).encode()) or 1
