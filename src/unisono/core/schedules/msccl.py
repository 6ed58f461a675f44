"""MSCCL-XML, the programs of MSCCL and msccl-tools: write schedules, read programs.

    <algo name="pairs" coll="allreduce" ngpus="2" nchunksperloop="2" inplace="1" ...>
      <gpu id="0" i_chunks="2" o_chunks="0" s_chunks="0">
        <tb id="0" send="1" recv="1" chan="0">
          <step s="0" type="s" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1"
                depid="-1" deps="-1" hasdep="0"/>

The steps of a thread block (`tb`) run in turn, and thread blocks run at the same time. A step waits
for step `deps` of thread block `depid`. Types: s send, r receive, cpy copy, re reduce, nop wait. In
rrc, rcs, rrs and rrcs, the first r is receive, a second r reduce, c store, and s send.

Source: microsoft/msccl-tools, msccl/language/ir.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from xml.etree import ElementTree
from zlib import crc32

import numpy as np

from unisono.core.schedules.ir import Buf, IntArray, Op, Schedule, copy
from unisono.errors import ArgumentTypeError, InvalidArgumentError

INPUT, OUTPUT, SCRATCH = Buf.INPUT, Buf.OUTPUT, Buf.SCRATCH
_COLLECTIVES = {
    "all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reduce_scatter",
    "all_to_all": "alltoall",
}  # fmt: skip
_TYPES = {
    Op.SEND: "s", Op.POST: "s", Op.RECV: "r", Op.READ: "r", Op.RECV_REDUCE: "rrc",
    Op.READ_REDUCE: "rrc", Op.COPY: "cpy", Op.REDUCE: "re",
}  # fmt: skip
_RECEIVES = ("r", "rrc", "rcs", "rrs", "rrcs")
_SENDS = ("s", "rcs", "rrs", "rrcs")
_ALL_TYPES = (*_RECEIVES, "s", "cpy", "re", "nop")
# Scratch places that no program names. The first has the input, if the program may write it. The
# others have sums that are sent on, but not stored, and messages that come before their receive.
_KEPT, _PASSED = 1 << 30, 1 << 40
# The largest number of chunks, so that a short text cannot ask for all memory. It is also the
# distance of the places of such sums and messages.
_MOST = 1 << 16
# The largest number of chunks that all steps move together, because each chunk is looked at. More
# take minutes.
_MOST_MOVED = 1 << 22
# Steps of a deadlock that its error names.
_MOST_NAMED = 6

ChunkPlace = tuple[int, int]  # (buffer, chunk)
StepRow = tuple[int, ...]


def to_msccl(schedule: Schedule) -> str:
    """Return the program of a schedule; each peer has a thread block per direction.

    Raises:
        InvalidArgumentError: MSCCL has no such collective.
    """
    if schedule.collective not in _COLLECTIVES:
        raise _error(f"no {schedule.collective} (it has: {', '.join(_COLLECTIVES)})")
    vector = schedule.collective == "all_reduce"
    names = {-1: "i", INPUT: "i", OUTPUT: "i" if vector else "o", SCRATCH: "s"}
    algo = ElementTree.Element("algo", {
        "name": schedule.algorithm, "proto": "Simple", "nchannels": "1",
        "nchunksperloop": str(schedule.work_chunks), "ngpus": str(schedule.world_size),
        "coll": _COLLECTIVES[schedule.collective], "inplace": str(int(vector)),
        "outofplace": str(int(not vector)), "minBytes": "0", "maxBytes": "0",
    })  # fmt: skip
    inputs, outputs = schedule.input_chunks, schedule.output_chunks
    inputs, outputs = (outputs, 0) if vector else (inputs, outputs)
    for rank in range(schedule.world_size):
        sizes = zip("ios", (inputs, outputs, schedule.scratch_chunks), strict=True)
        counts = {f"{name}_chunks": str(size) for name, size in sizes}
        gpu = ElementTree.SubElement(algo, "gpu", {"id": str(rank), **counts})
        _add_steps(gpu, schedule, rank, names)
    ElementTree.indent(algo)
    return ElementTree.tostring(algo, encoding="unicode") + "\n"


def _add_steps(
    gpu: ElementTree.Element, schedule: Schedule, rank: int, names: dict[int, str]
) -> None:
    """Add the thread blocks of a rank; each step waits for the step before it."""
    blocks: dict[tuple[int, int], ElementTree.Element] = {}
    before: tuple[int, int] | None = None
    last: ElementTree.Element | None = None
    p = schedule.world_size
    for k in range(schedule.stages):
        for _, op, peer, src_buf, src, dst_buf, dst, n in schedule.steps(k, np.array([rank])):
            kind = _TYPES[Op(op)]
            everyone = [(rank + d) % p for d in range(1, p)] if kind == "s" and peer < 0 else [peer]
            for other in everyone:
                ends = (other if kind == "s" else -1, other if kind in _RECEIVES else -1)
                if ends not in blocks:
                    keys = {"id": len(blocks), "send": ends[0], "recv": ends[1], "chan": 0}
                    texts = {key: str(value) for key, value in keys.items()}
                    blocks[ends] = ElementTree.SubElement(gpu, "tb", texts)
                block = blocks[ends]
                place = (int(block.attrib["id"]), len(block))
                near = before is None or before[0] == place[0]
                wait = (-1, -1) if near or before is None else before
                source = (src_buf, src) if src_buf >= 0 else (dst_buf, dst)
                target = (dst_buf, dst) if dst_buf >= 0 else source
                step = {
                    "s": place[1], "type": kind, "srcbuf": names[source[0]], "srcoff": source[1],
                    "dstbuf": names[target[0]], "dstoff": target[1], "cnt": n,
                    "depid": wait[0], "deps": wait[1], "hasdep": 0,
                }  # fmt: skip
                if wait != (-1, -1) and last is not None:
                    last.set("hasdep", "1")
                texts = {key: str(value) for key, value in step.items()}
                last, before = ElementTree.SubElement(block, "step", texts), place


class _ProgramStep(NamedTuple):
    """A step of a program.

    Attributes:
        rank: Its rank.
        place: Its thread block, and its number in it.
        kind: Its type.
        src: Buffer and chunk that it reads.
        dst: Buffer and chunk that it writes.
        chunks: Number of chunks.
        earlier: The steps of this rank that it waits for.
    """

    rank: int
    place: tuple[int, int]
    kind: str
    src: tuple[str, int]
    dst: tuple[str, int]
    chunks: int
    earlier: list[int]


def from_msccl(text: str) -> Schedule:
    """Return the schedule of an MSCCL program, whose messages are put into rounds.

    The name is that of the program and a checksum of the text, so that ranks with different
    programs do not agree on a call. `register_schedule` proves it and makes it callable.

    A message may come before its receive: it is kept in scratch memory. MSCCL keeps up to 8
    messages of a connection; here there is no limit.

    Raises:
        ArgumentTypeError: The text is no text.
        InvalidArgumentError: The text is no such program, the collective is not all_reduce,
            all_gather, reduce_scatter or all_to_all, messages do not match, or steps wait for
            each other.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError(f"MSCCL: the program must be a text, got {type(text).__name__}")
    try:
        algo = ElementTree.fromstring(text)
        p, chunks = int(algo.attrib["ngpus"]), int(algo.attrib["nchunksperloop"])
        scratch = max((int(gpu.get("s_chunks", 0)) for gpu in algo.findall("gpu")), default=0)
        steps, partner = _read_steps(algo, p)
        name = algo.attrib["coll"]
    except InvalidArgumentError:
        raise
    except KeyError as error:
        raise _error(f"the text is no program: an element has no attribute {error}") from None
    except (ElementTree.ParseError, ValueError) as error:
        raise _error(f"the text is no program: {type(error).__name__} {error}") from None
    if p != (gpus := len(algo.findall("gpu"))) or p < 1:
        raise _error(f"ngpus is {p}, but the program has {gpus} gpu elements")
    collective = {name: key for key, name in _COLLECTIVES.items()}.get(name)
    if collective is None:
        known = ", ".join(_COLLECTIVES.values())
        raise _error(f"the collective {name!r} is not supported (supported: {known})")
    if collective != "all_reduce" and chunks % p:
        raise _error(f"nchunksperloop of {name} is {chunks}, expected a multiple of ngpus ({p})")
    if {step.rank for step in steps} - set(range(p)):
        raise _error(f"the id of a gpu is not 0 to {p - 1}")
    if other := {end[0] for step in steps for end in (step.src, step.dst)} - set("ios"):
        raise _error(f"unknown buffer {min(other)!r} (known: i, o, s)")
    named = [n for step in steps for n in (step.chunks, step.src[1], step.dst[1])]
    if chunks < 1 or min(named, default=0) < -1 or max(chunks, scratch, *named) > _MOST:
        raise _error(f"the program has no chunks, or a chunk or count is not 0 to {_MOST:,}")
    if (moved := sum(step.chunks for step in steps)) > _MOST_MOVED:
        raise _error(f"the steps move {moved:,} chunks, expected at most {_MOST_MOVED:,}")
    in_place = algo.get("inplace", "1") == "1" and collective != "all_to_all"
    placed = _Places(collective, p, chunks, scratch, in_place)
    order = _order(steps, partner)
    at = _EventOrder(steps, partner).rounds()
    rounds = 1 + max((at[2 * i + 1] for i in partner), default=-1)
    rows = _rows(steps, partner, order, at, placed)
    table = {k: np.array(rows.get(k, []), np.int64).reshape(-1, 8) for k in range(-1, rounds)}

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        yield table[k][np.isin(table[k][:, 0], r)]

    def before(r: IntArray) -> Iterable[IntArray]:
        yield from placed.before(r)
        yield from exchange(-1, r)

    blocks = placed.blocks
    return Schedule(
        collective, f"{algo.get('name', 'msccl')}-{crc32(text.encode()):08x}", p, rounds, exchange,
        input_chunks={"all_reduce": 0, "all_gather": chunks // p}.get(collective, chunks),
        output_chunks=blocks if collective == "reduce_scatter" else chunks,
        scratch_chunks=placed.scratch_chunks, before=before, after=placed.after, accumulates=False,
    )  # fmt: skip


def _read_steps(algo: ElementTree.Element, p: int) -> tuple[list[_ProgramStep], dict[int, int]]:
    """Return all steps, and for each step that sends the step that receives its message."""
    steps: list[_ProgramStep] = []
    sent: dict[tuple[int, ...], list[int]] = defaultdict(list)
    taken: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for gpu in algo.findall("gpu"):
        rank, index = int(gpu.attrib["id"]), dict[tuple[int, int], int]()
        waits: list[tuple[int, tuple[int, int]]] = []
        for block in gpu.findall("tb"):
            keys = ("id", "send", "recv", "chan")
            name, to, source, channel = (int(block.attrib[key]) for key in keys)
            for number, found in enumerate(block.findall("step")):
                get, i = found.attrib, len(steps)
                kind, place = get["type"], (name, int(get.get("s", number)))
                if kind not in _ALL_TYPES:
                    raise _error(f"unknown type {kind!r} (known: {', '.join(_ALL_TYPES)})")
                index[place] = i
                if int(get.get("depid", -1)) >= 0:
                    waits.append((i, (int(get["depid"]), int(get["deps"]))))
                ends = [
                    (get.get(f"{side}buf", "i"), int(get.get(f"{side}off", -1)))
                    for side in ("src", "dst")
                ]
                count = int(get.get("cnt", 0))
                earlier = [i - 1] if number else []
                steps.append(_ProgramStep(rank, place, kind, ends[0], ends[1], count, earlier))
                if kind in _SENDS:
                    sent[rank, to, channel].append(i)
                if kind in _RECEIVES:
                    taken[source, rank, channel].append(i)
        for i, place in waits:
            if place not in index:
                raise _error(
                    f"step {steps[i].place[1]} of thread block {steps[i].place[0]} of rank {rank} "
                    f"waits for step {place[1]} of thread block {place[0]}, which does not exist"
                )
            steps[i].earlier.append(index[place])
    if {key: len(value) for key, value in sent.items()} != {
        key: len(value) for key, value in taken.items()
    } or any(not 0 <= end < p for key in sent for end in key[:2]):
        raise _error("a message has no receiver, or a receive no message")
    pairs = [pair for key in sent for pair in zip(sent[key], taken[key], strict=True)]
    return steps, dict(pairs)


def _order(steps: list[_ProgramStep], partner: dict[int, int]) -> list[int]:
    """Return the steps such that each comes after the steps that it waits for.

    A receive also waits for its send.

    Raises:
        InvalidArgumentError: Steps wait for each other, though sends wait for no receive.
    """
    source = {taker: sender for sender, taker in partner.items()}
    later: list[list[int]] = [[] for _ in steps]
    missing = [0] * len(steps)
    for i, step in enumerate(steps):
        for j in (*step.earlier, *((source[i],) if i in source else ())):
            later[j].append(i)
            missing[i] += 1
    order = [i for i, count in enumerate(missing) if not count]
    for i in order:  # which grows
        for j in later[i]:
            missing[j] -= 1
            if not missing[j]:
                order.append(j)
    if len(order) < len(steps):
        raise _deadlock(steps, source, next(i for i, count in enumerate(missing) if count), order)
    return order


def _deadlock(
    steps: list[_ProgramStep], source: dict[int, int], first: int, order: list[int]
) -> InvalidArgumentError:
    """Return the error that names a circle of steps, one of which `first` waits for."""
    done, path = set(order), {first: 0}
    while True:
        step = steps[first]
        ahead = [j for j in (*step.earlier, source.get(first, -1)) if j >= 0 and j not in done]
        first = ahead[0]
        if first in path:
            break
        path[first] = len(path)
    circle = list(path)[path[first] :]
    names = [
        f"step {s} ({steps[i].kind}) of thread block {block} of rank {steps[i].rank}"
        for i in circle[:_MOST_NAMED]
        for block, s in [steps[i].place]
    ]
    rest = [f"{len(circle) - len(names)} more steps"] if len(circle) > len(names) else []
    return _error(
        f"deadlock: {', which waits for '.join([*names, *rest])}, which waits for the first"
    )


class _EventOrder:
    """The events of a program, and after which other events each must be, in rounds.

    Event 2i is that step i takes its message or works locally, and event 2i + 1 that it sends. A
    step that sends does so after the round of what it waits for, except after other sends.
    """

    def __init__(self, steps: list[_ProgramStep], partner: dict[int, int]) -> None:
        self.steps, self.partner = steps, partner
        self.takers = set(partner.values())
        self.edges: list[list[tuple[int, int]]] = [[] for _ in range(2 * len(steps))]
        for i, step in enumerate(steps):
            sends, first = i in partner, self.first(i)
            if sends and first == 2 * i:
                self.edges[first].append((2 * i + 1, 1))
            for j in step.earlier:
                if j in partner:
                    self.edges[2 * j + 1].append((first, 0))
                else:
                    self.edges[2 * j].append((first, int(first != 2 * i)))
        for sender, taker in partner.items():
            self.edges[2 * sender + 1].append((2 * taker, 0))

    def first(self, i: int) -> int:
        """Return the first event of a step."""
        return 2 * i + 1 if i in self.partner and i not in self.takers else 2 * i

    def rounds(self) -> list[int]:
        """Return the round of each event; -1: before the first round.

        A message is received in the round in which it is sent, unless its receive waits for
        something that comes after the send. The message then has to be kept.
        """
        together = set(self.partner)
        while True:
            both = [list(edges) for edges in self.edges]
            for sender in together:
                both[2 * self.partner[sender]].append((2 * sender + 1, 0))
            parts = _components(both)
            part_of = {event: number for number, part in enumerate(parts) for event in part}
            apart = {
                part_of[event]
                for event, edges in enumerate(both)
                for other, rounds in edges
                if rounds and part_of[event] == part_of[other]
            }
            if not apart:
                break
            together = {each for each in together if part_of[2 * each + 1] not in apart}
        at = [-1 if i % 2 == 0 and i // 2 not in self.takers else 0 for i in range(len(both))]
        for part in parts:
            begin = max(at[event] for event in part)
            for event in part:
                at[event] = begin
            for event in part:
                for other, rounds in both[event]:
                    at[other] = max(at[other], begin + rounds)
        # A send that waits until its receive needs no memory for the message.
        for part in reversed(parts):
            for event in part:
                if event % 2 and event // 2 not in together and event // 2 in self.partner:
                    at[event] = min(at[other] - rounds for other, rounds in both[event])
        return at


def _components(edges: list[list[tuple[int, int]]]) -> list[list[int]]:
    """Return the strongly connected components of a graph.

    A component comes before the components to which its edges lead.

    Source: R. Tarjan, "Depth-first search and linear graph algorithms", 1972.
    """
    done = len(edges) + 1
    number, low, used = ([0] * len(edges) for _ in range(3))
    seen, parts = list[int](), list[list[int]]()
    count = 0
    for root in range(len(edges)):
        path = [] if number[root] else [root]
        while path:
            node = path[-1]
            if not number[node]:
                count += 1
                number[node] = low[node] = count
                seen.append(node)
            if used[node] < len(edges[node]):
                other, _ = edges[node][used[node]]
                used[node] += 1
                if not number[other]:
                    path.append(other)
                elif low[other] != done:
                    low[node] = min(low[node], number[other])
                continue
            path.pop()
            if path:
                low[path[-1]] = min(low[path[-1]], low[node])
            if low[node] == number[node]:
                part = list[int]()
                while not part or part[-1] != node:
                    part.append(seen.pop())
                    low[part[-1]] = done
                parts.append(part)
    return parts[::-1]


def _rows(
    steps: list[_ProgramStep],
    partner: dict[int, int],
    order: list[int],
    at: list[int],
    placed: _Places,
) -> dict[int, list[StepRow]]:
    """Return the rows of each round; round -1 has the local steps before the first message.

    Args:
        steps: Of the program.
        partner: Of each step that sends, the step that receives.
        order: Of `_order`.
        at: The round of each event of `_EventOrder`.
        placed: Where the chunks are.
    """
    source = {taker: sender for sender, taker in partner.items()}
    taking: dict[int, list[int]] = defaultdict(list)
    coming: dict[int, list[int]] = defaultdict(list)
    for i in order:
        if i in source or steps[i].kind in ("cpy", "re"):
            taking[at[2 * i]].append(i)
        if i in source:
            coming[at[2 * source[i] + 1]].append(i)
    rows: dict[int, list[StepRow]] = {}
    boxes: dict[int, list[int]] = {}
    for k in sorted({*taking, *coming}):
        # All ranks send what they hold when the round begins.
        given = {}
        for i in coming[k]:
            sender = steps[source[i]]
            end = "src" if sender.kind == "s" else "dst"
            given[i] = _held(sender, _place(sender, source[i], placed, end), placed)
        out: list[StepRow] = []
        back: list[StepRow] = []

        def receive(i: int, op: Op, target: ChunkPlace) -> None:
            sizes, there = given[i]  # noqa: B023
            rank, peer = steps[i].rank, steps[source[i]].rank
            for first, to, n in _runs(there, placed.written(rank, target, sizes)):
                out.append((peer, Op.SEND, rank, *first, -1, -1, n))  # noqa: B023
                back.append((rank, op, peer, -1, -1, *to, n))  # noqa: B023

        for i in coming[k]:
            if at[2 * i] > k:
                boxes[i] = given[i][0]
                receive(i, Op.RECV, _own(i, 1))
        for i in taking[k]:
            rank, kind = steps[i].rank, steps[i].kind
            own, held = (_place(steps[i], i, placed, end) for end in ("src", "dst"))
            if i not in source:
                op = Op.COPY if kind == "cpy" else Op.REDUCE
                back += _local(op, steps[i], own, held, placed)
                continue
            if "rr" in kind and own != held:
                back += _local(Op.COPY, steps[i], own, held, placed)
            if i not in boxes:
                receive(i, Op.RECV_REDUCE if "rr" in kind else Op.RECV, held)
                continue
            there, here = (placed.written(rank, place, boxes[i]) for place in (_own(i, 1), held))
            op = Op.REDUCE if "rr" in kind else Op.COPY
            back += [(rank, op, -1, *first, *to, n) for first, to, n in _runs(there, here)]
        rows[k] = out + back
    return rows


def _own(index: int, which: int) -> ChunkPlace:
    """Return a place that no program names: the sum (0) or the message (1) of one step."""
    return (SCRATCH, _PASSED + (2 * index + which) * _MOST)


def _place(step: _ProgramStep, index: int, placed: _Places, end: str) -> ChunkPlace:
    """Return the place of an end of a step; a sum that is only sent on has one of its own."""
    if end == "dst" and step.kind == "rrs":
        return _own(index, 0)
    return placed.named(step.rank, *(step.dst if end == "dst" else step.src))


def _held(
    step: _ProgramStep, first: ChunkPlace, placed: _Places
) -> tuple[list[int], list[ChunkPlace]]:
    """Return the sizes and the chunks of the places that a step reads, from `first` on."""
    sizes = [placed.size(step.rank, _next(first, n)) for n in range(step.chunks)]
    return sizes, placed.written(step.rank, first, sizes)


def _local(
    op: Op, step: _ProgramStep, own: ChunkPlace, held: ChunkPlace, placed: _Places
) -> Iterator[StepRow]:
    """Yield the rows that copy or reduce the chunks at `own` into the chunks at `held`."""
    sizes, there = _held(step, own, placed)
    here = placed.written(step.rank, held, sizes)
    for first, target, n in _runs(there, here):
        yield (step.rank, op, -1, *first, *target, n)


def _next(place: ChunkPlace, n: int) -> ChunkPlace:
    return (place[0], place[1] + n)


def _runs(
    there: list[ChunkPlace], here: list[ChunkPlace]
) -> Iterator[tuple[ChunkPlace, ChunkPlace, int]]:
    """Yield the parts of a message whose chunks are contiguous at both ends."""
    begin = 0
    for n in range(1, len(there) + 1):
        if n == len(there) or (there[n], here[n]) != (
            _next(there[n - 1], 1),
            _next(here[n - 1], 1),
        ):
            yield there[begin], here[begin], n - begin
            begin = n


class _Places:
    """Where a program's chunks are in the buffers of a schedule.

    A chunk of SCRATCH is as large as the work chunk of its number; see `layout`. So each place of a
    program gets as many chunks as it holds chunks of different size.

    Attributes:
        blocks: Chunks per block; a vector is one block.
        scratch_chunks: Chunks of SCRATCH in use.
    """

    def __init__(self, collective: str, p: int, chunks: int, scratch: int, in_place: bool) -> None:
        self.collective, self.chunks, self.in_place = collective, chunks, in_place
        self.blocks = chunks if collective == "all_reduce" else chunks // p
        # An input that a program may write is kept in SCRATCH.
        self.keeps = collective == "reduce_scatter" or (collective == "all_reduce" and not in_place)
        self.scratch_chunks = self.first = chunks if self.keeps else 0
        # A place keeps its number if the size is right, else it gets a number after all others.
        self.extra = self.first + -(-scratch // self.blocks) * self.blocks
        self.layers: dict[tuple[int, int], int] = defaultdict(int)
        self.given: dict[tuple[int, int, int], int] = {}
        self.held: dict[tuple[int, int], int] = {}

    def named(self, rank: int, buffer: str, chunk: int) -> ChunkPlace:
        """Return the place that a program calls chunk `chunk` of buffer "i", "o" or "s"."""
        if buffer == "s":
            return (SCRATCH, chunk)
        if self.in_place and self.collective != "all_reduce":
            own = buffer == ("i" if self.collective == "all_gather" else "o")
            chunk += rank * self.blocks if own else 0
            return (OUTPUT, chunk) if self.collective == "all_gather" else (SCRATCH, _KEPT + chunk)
        if buffer == "i" and self.keeps:
            return (SCRATCH, _KEPT + chunk)
        return (INPUT if buffer == "i" and not self.in_place else OUTPUT, chunk)

    def size(self, rank: int, place: ChunkPlace) -> int:
        """Return the number of the work chunk that is as large as the chunk in a place."""
        if place[0] != SCRATCH:
            return place[1] % self.blocks
        if _KEPT <= place[1] < _PASSED:
            return (place[1] - _KEPT) % self.blocks
        if (rank, place[1]) not in self.held:
            raise _error(f"rank {rank} reads scratch chunk {place[1]} before it is written")
        return self.held[rank, place[1]]

    def chunk(self, rank: int, place: ChunkPlace, size: int) -> int:
        """Return the chunk of a place while it holds a chunk of a size."""
        if place[0] != SCRATCH:
            return place[1]
        if _KEPT <= place[1] < _PASSED:
            return place[1] - _KEPT
        self.held[rank, place[1]] = size
        key = (rank, place[1], size)
        if key not in self.given:
            chunk = self.first + place[1]
            if place[1] >= _PASSED or chunk % self.blocks != size:
                layer = self.layers[rank, size]
                self.layers[rank, size] += 1
                chunk = self.extra + layer * self.blocks + size
            self.given[key] = chunk
            self.scratch_chunks = max(self.scratch_chunks, chunk + 1)
        return self.given[key]

    def written(self, rank: int, first: ChunkPlace, sizes: list[int]) -> list[ChunkPlace]:
        """Return the chunks of places, from `first` on, that get chunks of these sizes."""
        places = [_next(first, n) for n in range(len(sizes))]
        chunks = zip(places, sizes, strict=True)
        return [(place[0], self.chunk(rank, place, size)) for place, size in chunks]

    def before(self, r: IntArray) -> Iterable[IntArray]:
        """Return the copies before the first step."""
        own = self.collective == "all_gather" and self.in_place
        if own:
            yield copy(r, (INPUT, 0), (OUTPUT, r * self.blocks), self.blocks)
        if self.keeps:
            source = OUTPUT if self.collective == "all_reduce" else INPUT
            yield copy(r, (source, 0), (SCRATCH, 0), self.chunks)

    def after(self, r: IntArray) -> Iterable[IntArray]:
        """Return the copies after the last step."""
        if self.collective == "reduce_scatter" and self.in_place:
            yield copy(r, (SCRATCH, r * self.blocks), (OUTPUT, 0), self.blocks)


def _error(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"MSCCL: {what}")
