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

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from xml.etree import ElementTree
from zlib import crc32

import numpy as np

from unisono.errors import InvalidArgumentError
from unisono.schedules.ir import Buf, IntArray, Op, Schedule, copy

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
# Scratch places that no program names: the input, if the program may write it, and sums that
# are sent on, but not stored.
_KEPT, _PASSED = 1 << 30, 1 << 40
# The largest number of chunks, so that a short text cannot ask for all memory. It is also the
# distance of the places of such sums.
_MOST = 1 << 16

Place = tuple[int, int]  # (buffer, chunk)
Row = tuple[int, ...]


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


class _Step(NamedTuple):
    """A step of a program; `earlier` are the steps that it waits for."""

    rank: int
    kind: str
    src: tuple[str, int]
    dst: tuple[str, int]
    chunks: int
    earlier: list[int]


def from_msccl(text: str) -> Schedule:
    """Return the schedule of an MSCCL program, whose messages are put into rounds.

    The name is that of the program and a checksum of the text, so that ranks with different
    programs do not agree on a call. `register_schedule` proves it and makes it callable.

    Raises:
        InvalidArgumentError: The text is no such program, the collective is not all_reduce,
            all_gather, reduce_scatter or all_to_all, messages do not match, or steps wait for
            each other.
    """
    try:
        algo = ElementTree.fromstring(text)
        p, chunks = int(algo.attrib["ngpus"]), int(algo.attrib["nchunksperloop"])
        scratch = max((int(gpu.get("s_chunks", 0)) for gpu in algo.iter("gpu")), default=0)
        steps, partner = _read_steps(algo, p)
        collective = {name: key for key, name in _COLLECTIVES.items()}[algo.attrib["coll"]]
    except InvalidArgumentError:
        raise
    except (ElementTree.ParseError, KeyError, ValueError) as error:
        raise _error(f"the text is no program: {type(error).__name__} {error}") from None
    if p != (gpus := len(algo.findall("gpu"))):
        raise _error(f"ngpus is {p}, but the program has {gpus} gpu elements")
    named = [n for step in steps for n in (step.chunks, step.src[1], step.dst[1])]
    if chunks < 1 or min(named, default=0) < -1 or max(chunks, scratch, *named) > _MOST:
        raise _error(f"the program has no chunks, or a chunk or count is not 0 to {_MOST:,}")
    in_place = algo.get("inplace", "1") == "1" and collective != "all_to_all"
    placed = _Places(collective, p, chunks, scratch, in_place)
    rounds, sends, takes = _rounds(steps, partner)
    rows = _rows(steps, partner, sends, takes, placed)
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
        scratch_chunks=placed.scratch_chunks, before=before, after=placed.after,
    )  # fmt: skip


def _read_steps(algo: ElementTree.Element, p: int) -> tuple[list[_Step], dict[int, int]]:
    """Return all steps, and for each step that sends the step that receives its message."""
    steps: list[_Step] = []
    sent: dict[tuple[int, ...], list[int]] = defaultdict(list)
    taken: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for gpu in algo.iter("gpu"):
        rank, index = int(gpu.attrib["id"]), dict[tuple[int, int], int]()
        waits: list[tuple[int, tuple[int, int]]] = []
        for block in gpu.iter("tb"):
            keys = ("id", "send", "recv", "chan")
            name, to, source, channel = (int(block.attrib[key]) for key in keys)
            for number, found in enumerate(block.iter("step")):
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
                steps.append(_Step(rank, kind, ends[0], ends[1], count, [i - 1] if number else []))
                if kind in _SENDS:
                    sent[rank, to, channel].append(i)
                if kind in _RECEIVES:
                    taken[source, rank, channel].append(i)
        for i, place in waits:
            steps[i].earlier.append(index[place])
    if {key: len(value) for key, value in sent.items()} != {
        key: len(value) for key, value in taken.items()
    } or any(not 0 <= end < p for key in sent for end in key[:2]):
        raise _error("a message has no receiver, or a receive no message")
    pairs = [pair for key in sent for pair in zip(sent[key], taken[key], strict=True)]
    return steps, dict(pairs)


def _rounds(
    steps: list[_Step], partner: dict[int, int]
) -> tuple[int, dict[int, int], dict[int, int]]:
    """Return the number of rounds, the round of each send, and that of each other step.

    A step that sends does so after the round of what it waits for, except after other sends. A
    message is received in the round in which it is sent, so both ends wait for one another. Rounds
    grow until all these conditions hold.
    """
    later: list[list[int]] = [[] for _ in steps]
    for i, step in enumerate(steps):
        for j in step.earlier:
            later[j].append(i)
    source = {taker: sender for sender, taker in partner.items()}
    sends, takes = dict.fromkeys(partner, 0), dict.fromkeys(range(len(steps)), -1)
    work, waiting = deque(range(len(steps))), [True] * len(steps)
    while work:
        i = work.popleft()
        waiting[i] = False
        step, old = steps[i], (sends.get(i), takes[i])
        begin = max((max(sends.get(j, -1), takes[j]) for j in step.earlier), default=-1)
        if i in source:
            takes[i] = max(begin, sends[source[i]], 0)
        elif i not in partner:
            takes[i] = begin
        if i in partner:
            free = [sends[j] if j in sends else takes[j] + 1 for j in step.earlier]
            sends[i] = max(0, takes[i] + 1, takes[partner[i]], *free)
        if (sends.get(i), takes[i]) == old:
            continue
        if max(sends.get(i, 0), takes[i]) > len(steps):
            raise _error(f"deadlock: steps of rank {step.rank} wait for each other")
        for j in (*later[i], *(end[i] for end in (partner, source) if i in end)):
            if not waiting[j]:
                waiting[j] = True
                work.append(j)
    return max(sends.values(), default=-1) + 1, sends, takes


def _rows(
    steps: list[_Step],
    partner: dict[int, int],
    sends: dict[int, int],
    takes: dict[int, int],
    placed: _Places,
) -> dict[int, list[Row]]:
    """Return the rows of each round; round -1 has the local steps before the first message."""
    position = {i: n for n, i in enumerate(_in_order(steps))}
    source = {taker: sender for sender, taker in partner.items()}
    taking: dict[int, list[int]] = defaultdict(list)
    for i, step in enumerate(steps):
        if i in source or step.kind in ("cpy", "re"):
            taking[takes[i]].append(i)
    rows: dict[int, list[Row]] = {}
    for k in sorted(taking):
        takers = sorted(taking[k], key=position.__getitem__)
        # All ranks send what they hold when the round begins.
        given = {}
        for i in takers:
            if i in source:
                sender = steps[source[i]]
                end = "src" if sender.kind == "s" else "dst"
                given[i] = _held(sender, _place(sender, source[i], placed, end), placed)
        out: list[Row] = []
        back: list[Row] = []
        for i in takers:
            rank, kind = steps[i].rank, steps[i].kind
            own, held = (_place(steps[i], i, placed, end) for end in ("src", "dst"))
            if i not in source:
                op = Op.COPY if kind == "cpy" else Op.REDUCE
                back += _local(op, steps[i], own, held, placed)
                continue
            if "rr" in kind and own != held:
                back += _local(Op.COPY, steps[i], own, held, placed)
            sizes, there = given[i]
            here = placed.written(rank, held, sizes)
            peer, op = steps[source[i]].rank, Op.RECV_REDUCE if "rr" in kind else Op.RECV
            for first, target, n in _runs(there, here):
                out.append((peer, Op.SEND, rank, *first, -1, -1, n))
                back.append((rank, op, peer, -1, -1, *target, n))
        rows[k] = out + back
    return rows


def _in_order(steps: list[_Step]) -> list[int]:
    """Return the steps such that each comes after the steps that it waits for."""
    done, order = [False] * len(steps), list[int]()
    for i in range(len(steps)):
        stack = [i]
        while stack:
            missing = [j for j in steps[stack[-1]].earlier if not done[j]]
            stack += missing
            if not missing and not done[last := stack.pop()]:
                done[last] = True
                order.append(last)
    return order


def _place(step: _Step, index: int, placed: _Places, end: str) -> Place:
    """Return the place of an end of a step; a sum that is only sent on has one of its own."""
    if end == "dst" and step.kind == "rrs":
        return (SCRATCH, _PASSED + index * _MOST)
    return placed.named(step.rank, *(step.dst if end == "dst" else step.src))


def _held(step: _Step, first: Place, placed: _Places) -> tuple[list[int], list[Place]]:
    """Return the sizes and the chunks of the places that a step reads, from `first` on."""
    sizes = [placed.size(step.rank, _next(first, n)) for n in range(step.chunks)]
    return sizes, placed.written(step.rank, first, sizes)


def _local(op: Op, step: _Step, own: Place, held: Place, placed: _Places) -> Iterator[Row]:
    """Yield the rows that copy or reduce the chunks at `own` into the chunks at `held`."""
    sizes, there = _held(step, own, placed)
    here = placed.written(step.rank, held, sizes)
    for first, target, n in _runs(there, here):
        yield (step.rank, op, -1, *first, *target, n)


def _next(place: Place, n: int) -> Place:
    return (place[0], place[1] + n)


def _runs(there: list[Place], here: list[Place]) -> Iterator[tuple[Place, Place, int]]:
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

    def named(self, rank: int, buffer: str, chunk: int) -> Place:
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

    def size(self, rank: int, place: Place) -> int:
        """Return the number of the work chunk that is as large as the chunk in a place."""
        if place[0] != SCRATCH:
            return place[1] % self.blocks
        if _KEPT <= place[1] < _PASSED:
            return (place[1] - _KEPT) % self.blocks
        if (rank, place[1]) not in self.held:
            raise _error(f"rank {rank} reads scratch chunk {place[1]} before it is written")
        return self.held[rank, place[1]]

    def chunk(self, rank: int, place: Place, size: int) -> int:
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

    def written(self, rank: int, first: Place, sizes: list[int]) -> list[Place]:
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
