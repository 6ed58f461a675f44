"""Jobs from Chakra's execution traces, without the package protobuf.

A file is messages, each after its length: the metadata, then the nodes. A rank does the nodes
without communication in the order of their numbers, one at a time. A call begins when the nodes on
which it depends have ended, and what depends on a call waits for it.

Source: mlcommons/chakra, schema/protobuf/et_def.proto.
"""

from __future__ import annotations

import heapq
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.errors import InvalidArgumentError
from unisono.workbench.replay.job import (
    MESSAGE,
    Job,
    JobCall,
    JobGroup,
    JobStep,
    check_ranks,
    find_marks,
)

_SEND, _RECV, _COLLECTIVE = 5, 6, 7
_COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all",
    "reduce_scatter", "reduce_scatter", "barrier",
)  # fmt: skip
_PS_PER_US = 1_000_000
# Wire types of protobuf, and the fields of a value that are numbers or texts.
_VARINT, _I64, _BYTES, _I32 = 0, 1, 2, 5
_DOUBLE, _FLOAT, _SINTS, _STRING = 3, 5, (15, 17), 29
# The wire types of the fields that are read: of a node, and of an attribute.
_OF_NODE = {
    **dict.fromkeys((1, 3, 7), (_VARINT,)), **dict.fromkeys((2, 10), (_BYTES,)),
    **dict.fromkeys((4, 5), (_VARINT, _BYTES)),
}  # fmt: skip
_OF_ATTRIBUTE = {
    **dict.fromkeys((1, _STRING), (_BYTES,)), **dict.fromkeys((_DOUBLE, 21, 25), (_I64,)),
    **dict.fromkeys((_FLOAT, 19, 23), (_I32,)),
    **dict.fromkeys((7, 9, 11, 13, *_SINTS, 27), (_VARINT,)),
}  # fmt: skip
# Collectives whose size in Chakra is that of one rank's input, as in ASTRA-sim.
_OF_A_RANK = ("all_gather", "gather")


@dataclass
class ChakraNode:
    """A node of a trace: its fields, and its attributes by name."""

    id: int = 0
    name: str = ""
    type: int = 0
    deps: list[int] = field(default_factory=list)
    duration_us: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)


def nodes_of(content: bytes) -> list[ChakraNode]:
    """Return the nodes of a trace file.

    Raises:
        InvalidArgumentError: It is no such file.
    """
    try:
        messages, at = [], 0
        while at < len(content):
            size, at = _varint(content, at)
            if at + size > len(content):
                raise ValueError(f"a message of {size} bytes at {at} of {len(content)}")
            messages.append(content[at : at + size])
            at += size
        nodes = [_node(message) for message in messages[1:]]
        number, count = next(iter(Counter(node.id for node in nodes).most_common(1)), (0, 0))
        if count > 1:
            raise ValueError(f"{count} nodes have the number {number}")
    except (IndexError, ValueError, struct.error) as error:
        raise InvalidArgumentError(f"this is no Chakra trace: {error}") from None
    if not nodes:
        raise InvalidArgumentError("this is no Chakra trace: it has no nodes")
    return nodes


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number has more than 64 bits")


def _fields(content: bytes, kinds: Mapping[int, tuple[int, ...]]) -> Iterator[tuple[int, int, Any]]:
    """Yield number, wire type and value of each field of a message; check known wire types."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        number, kind = key >> 3, key & 7
        if kind not in (expected := kinds.get(number, (kind,))):
            raise ValueError(f"field {number} has wire type {kind}, expected {expected[0]}")
        if kind == _VARINT:
            value, at = _varint(content, at)
            yield number, kind, value
            continue
        if kind not in (_I64, _BYTES, _I32):
            raise ValueError(f"a field of wire type {kind}")
        size, at = _varint(content, at) if kind == _BYTES else (8 if kind == _I64 else 4, at)
        if at + size > len(content):
            raise ValueError(f"a field of {size} bytes in {len(content) - at}")
        yield number, kind, content[at : at + size]
        at += size


def _node(content: bytes) -> ChakraNode:
    node = ChakraNode()
    for number, kind, value in _fields(content, _OF_NODE):
        if number in (4, 5):
            at = 0
            while kind == _BYTES and at < len(value):
                dep, at = _varint(value, at)
                node.deps.append(dep)
            if kind == _VARINT:
                node.deps.append(value)
        elif number == 1:
            node.id = value
        elif number == 2:
            node.name = value.decode()
        elif number == 3:
            node.type = value
        elif number == 7:
            node.duration_us = value
        elif number == 10:
            name, found = _attribute(value)
            node.attributes[name] = found
    return node


def _attribute(content: bytes) -> tuple[str, Any]:
    name, found = "", None
    for number, kind, value in _fields(content, _OF_ATTRIBUTE):
        if number == 1:
            name = value.decode()
        elif number == _STRING:
            found = value.decode()
        elif number == _DOUBLE:
            (found,) = struct.unpack("<d", value)
        elif number == _FLOAT:
            (found,) = struct.unpack("<f", value)
        elif number in _SINTS:
            found = (value >> 1) ^ -(value & 1)
        elif number > _FLOAT and kind in (_I64, _I32):
            found = int.from_bytes(value, "little")
        elif number > _FLOAT and kind == _VARINT:
            # Negative numbers have 64 bits.
            found = value - (1 << 64) if value >> 63 else value
    return name, found


def job_of(
    traces: Mapping[int, list[ChakraNode]], groups: Mapping[str, tuple[int, ...]] | None = None
) -> Job:
    """Return the job of the traces of all ranks.

    Args:
        traces: Nodes by rank, of ranks 0 to n-1.
        groups: Ranks by the name in the attribute `pg_name`. Without it, a group is the ranks that
            name it.

    Raises:
        InvalidArgumentError: A rank is missing, ranks differ in the calls of a group, nodes wait
            for each other, or an attribute is no number.
    """
    check_ranks(traces)
    members: defaultdict[str, list[int]] = defaultdict(list)
    for rank, nodes in sorted(traces.items()):
        for name in sorted({_group(node) for node in nodes if node.type == _COLLECTIVE}):
            members[name].append(rank)
    known = {name: (groups or {}).get(name, tuple(ranks)) for name, ranks in members.items()}
    maker = _Maker([JobGroup(name or "all ranks", ranks) for name, ranks in known.items()], known)
    steps = [list(maker.steps(rank, nodes)) for rank, nodes in sorted(traces.items())]
    maker.check()
    keys = [maker.calls[step.call].name.split(" #")[0] for step in steps[0] if step.makes]
    made = [at for at, step in enumerate(steps[0]) if step.makes]
    marks = [made[at] for at in find_marks(keys)]
    return Job(maker.groups, maker.calls, steps, [0] * len(steps), marks, [])


def _group(node: ChakraNode) -> str:
    return str(node.attributes.get("pg_name") or "")


def _number(rank: int, node: ChakraNode, name: str) -> int:
    """Return an attribute that is a number of 0 or more, as is one that is not there."""
    value = node.attributes.get(name) or 0
    try:
        number = int(value)
    except (ValueError, OverflowError):
        number = -1
    if number < 0:
        raise InvalidArgumentError(
            f"replay: rank {rank}: node {node.id} has {name} {value!r}, expected a number of 0 or "
            "more"
        )
    return number


class _Maker:
    """Makes steps of nodes; calls of ranks meet by group and number."""

    def __init__(self, groups: list[JobGroup], known: Mapping[str, tuple[int, ...]]) -> None:
        self.groups = groups or [JobGroup("all ranks", ())]
        self.calls: list[JobCall] = []
        self._numbers = {name: number for number, name in enumerate(known)}
        self._found: dict[tuple[object, ...], int] = {}
        self._makers: defaultdict[int, set[int]] = defaultdict(set)
        self._counts: defaultdict[tuple[object, ...], int] = defaultdict(int)

    def steps(self, rank: int, nodes: list[ChakraNode]) -> Iterator[JobStep]:
        """Yield the steps of a rank."""
        by_id = {node.id: node for node in nodes}
        left = {node.id: {dep for dep in node.deps if dep in by_id} for node in nodes}
        after: defaultdict[int, list[int]] = defaultdict(list)
        for node in nodes:
            for dep in left[node.id]:
                after[dep].append(node.id)
        ready = [node.id for node in nodes if not left[node.id]]
        heapq.heapify(ready)
        open_calls: dict[int, int] = {}
        gap, done = 0, 0
        while ready:
            node = by_id[heapq.heappop(ready)]
            done += 1
            for dep in sorted(set(node.deps) & open_calls.keys()):
                yield JobStep(gap, open_calls.pop(dep), waits=True)
                gap = 0
            if node.type in (_SEND, _RECV, _COLLECTIVE):
                open_calls[node.id] = self._call(rank, node)
                yield JobStep(gap, open_calls[node.id], makes=True)
                gap = 0
            else:
                gap += node.duration_us * _PS_PER_US
            for other in after[node.id]:
                left[other].discard(node.id)
                if not left[other]:
                    heapq.heappush(ready, other)
        if done < len(nodes):
            raise InvalidArgumentError(
                f"replay: rank {rank}: {len(nodes) - done} nodes of the Chakra trace depend on "
                "each other in a circle"
            )
        for call in open_calls.values():
            yield JobStep(gap, call, waits=True)
            gap = 0
        yield JobStep(gap)

    def _call(self, rank: int, node: ChakraNode) -> int:
        has = node.attributes
        size = _number(rank, node, "comm_size")
        if node.type == _COLLECTIVE:
            kind = _number(rank, node, "comm_type")
            if kind >= len(_COLLECTIVES):
                raise InvalidArgumentError(
                    f"replay: rank {rank}: node {node.id} has comm_type {kind}, expected 0 to 9"
                )
            name, op = _group(node), _COLLECTIVES[kind]
            group = self._numbers[name]
            members = self.groups[group].ranks
            nbytes = size * len(members) if op in _OF_A_RANK else size
            where: tuple[object, ...] = ("group", group)
        else:
            src, dst = (_number(rank, node, key) for key in ("comm_src", "comm_dst"))
            src, dst = (rank, dst) if node.type == _SEND else (src, rank)
            op, group, members, nbytes = MESSAGE, 0, (src, dst), size
            where = "message", src, dst, has.get("comm_tag")
        number = self._counts[rank, where]
        self._counts[rank, where] += 1
        call = self._found.setdefault((where, number), len(self.calls))
        if call == len(self.calls):
            self.calls.append(JobCall(f"{op} #{number + 1}", op, group, members, nbytes))
        found = self.calls[call]
        if (found.op, found.nbytes) != (op, nbytes):
            raise InvalidArgumentError(
                f"replay: {found.name} is {found.op} of {found.nbytes} bytes, and {op} of {nbytes} "
                f"bytes on rank {rank}"
            )
        self._makers[call].add(rank)
        return call

    def check(self) -> None:
        """Check that all members make each call."""
        for call, makers in self._makers.items():
            each = self.calls[call]
            if absent := sorted(set(each.members) - makers):
                raise InvalidArgumentError(
                    f"replay: {each.name} of group '{self.groups[each.group].name}' is made by "
                    f"rank {min(makers)}, but not by rank {absent[0]}"
                )
