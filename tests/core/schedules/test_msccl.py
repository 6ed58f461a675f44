"""MSCCL-XML: programs written by hand, schedules read back, and errors by name."""

import contextlib
import random
import time
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

import unisono as dist
from unisono.core.schedules import build, registry
from unisono.core.schedules.cost import cost
from unisono.core.schedules.lowering.layout import layout_for
from unisono.core.schedules.msccl import from_msccl, to_msccl
from unisono.core.schedules.registry import available, entry, register_schedule
from unisono.core.schedules.verify import verify
from unisono.errors import ArgumentTypeError, InvalidArgumentError, ScheduleError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
PAIRS = [(c, a) for c in COLLECTIVES for a in available(c, 8, local=2)]


@pytest.fixture(autouse=True)
def own_table(monkeypatch):
    """Forget in the end what a test has registered."""
    table = {collective: dict(entries) for collective, entries in registry._TABLE.items()}
    monkeypatch.setattr(registry, "_TABLE", table)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_a_schedule_is_read_back(collective, algorithm):
    found = entry(collective, algorithm)
    for p in (2, 4, 5, 8):
        if algorithm in available(collective, p, local=2):
            depth, local = (2 if found.pipelined else 1), (2 if found.two_level else 1)
            schedule = build(collective, algorithm, p, pipeline=depth, local=local)
            back = from_msccl(to_msccl(schedule))
            verify(back)
            ours, theirs = cost(schedule), cost(back)
            assert theirs.rounds <= ours.rounds
            for name in ("messages", "bytes_sent", "bytes_received", "bytes_reduced"):
                assert getattr(ours, name) == getattr(theirs, name), (name, p)


def program(blocks, coll="allreduce", chunks=3, inplace=1, sizes="3 0 3", ranks=3):
    """Return a program; `blocks(rank)` gives (send, recv, steps), a step is a line of fields.

    The fields are as in `names`. A channel may follow the steps.
    """
    names = ["type", "srcbuf", "srcoff", "dstbuf", "dstoff", "cnt", "depid", "deps"]
    i, o, s = sizes.split()
    lines = [
        f'<algo name="mine" proto="LL" nchannels="1" nchunksperloop="{chunks}" ngpus="{ranks}" '
        f'coll="{coll}" inplace="{inplace}">'
    ]
    for rank in range(ranks):
        lines.append(f'<gpu id="{rank}" i_chunks="{i}" o_chunks="{o}" s_chunks="{s}">')
        for number, (to, source, steps, *channel) in enumerate(blocks(rank)):
            chan = channel[0] if channel else 0
            lines.append(f'<tb id="{number}" send="{to}" recv="{source}" chan="{chan}">')
            for index, step in enumerate(steps):
                pairs = zip(names, [*step.split(), "-1", "-1"], strict=False)
                fields = " ".join(f'{name}="{value}"' for name, value in pairs)
                lines.append(f'<step s="{index}" {fields} hasdep="0"/>')
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


def pairs(rank):
    """All ranks send all data to all, into scratch; thread block 0 reduces and waits with nop."""
    peers = [(rank + d) % 3 for d in (1, 2)]
    for number, peer in enumerate(peers):
        moved = ["s i 0 s 0 3", f"r i 0 s {3 * number} 3"]
        wait = ["nop i -1 o -1 0 1 1", "nop i -1 o -1 0 1 0"]
        # In the order of ranks: all ranks must get the same bits.
        order = sorted((other, 3 * place) for place, other in enumerate(peers))
        first, second = (at for _, at in order)
        if rank < 2:
            sums = [f"re s {first} i 0 3", f"re s {second} i 0 3"]
        else:
            sums = [f"re s {second} s {first} 3", f"re s {first} i 0 3"]
        yield peer, peer, moved + (wait + sums if number == 0 else [])


def ring(rank):
    """Reduce around the ring without storing the sums, then pass the results around."""
    kinds = ["s", "rrs", "rrcs", "rcs", "r"]
    steps = [f"{kind} i {(rank - k) % 3} o {(rank - k) % 3} 1" for k, kind in enumerate(kinds)]
    yield (rank + 1) % 3, (rank - 1) % 3, steps


@pytest.mark.parametrize(
    ("text", "rounds"),
    [
        (program(ring, sizes="3 3 0"), 4),
        (program(ring, sizes="3 3 0", inplace=0), 4),
    ],
)
@pytest.mark.parametrize("count", [1, 7, 30])
def test_a_program_of_others_is_proved_and_run(text, rounds, count, execute):
    schedule = from_msccl(text)
    verify(schedule)
    assert schedule.rounds == rounds
    given = np.random.default_rng(1).integers(-99, 99, (3, count))
    outputs = list(given.copy())
    execute(schedule, [layout_for(schedule, count)] * 3, [np.empty(0, int)] * 3, outputs)
    assert (np.array(outputs) == given.sum(axis=0)).all()


def test_a_program_with_scratch_and_waits():
    schedule = from_msccl(program(pairs))
    assert schedule.rounds == 1
    # Rank 2 adds 1 to 0, and its own value to the sum: (x0 + x1) + x2, as the others.
    verify(schedule)
    # It adds them in two places, the others in one: there 16-bit sums would be rounded later.
    with pytest.raises(ScheduleError, match=r"rank 2 is reduced in another order than on rank 0"):
        verify(replace(schedule, accumulates=True))


def test_in_place_blocks():
    def gather(rank):
        for d in (1, 2):
            peer, source = (rank + d) % 3, (rank - d) % 3
            yield peer, source, [f"s i 0 o {rank} 1", f"r o {source} o {source} 1"]

    verify(from_msccl(program(gather, "allgather")))

    def scatter(rank):
        last = []
        for d in (1, 2):
            peer, source = (rank + d) % 3, (rank - d) % 3
            wait = last
            last = [str(d - 1), "1"]
            take = f"rrc i {rank} i {rank} 1 " + " ".join(wait)
            yield peer, source, [f"s i {peer} i {peer} 1", take]

    schedule = from_msccl(program(scatter, "reduce_scatter"))
    verify(schedule)
    assert cost(schedule).rounds == 1


def kept(first, answer):
    """Return a program of which a connection has to keep a message.

    Rank 1 reduces chunk 0 only when it has the result of chunk 1. Rank 0 works on chunk 1 only when
    it has sent chunk 0.
    """

    def blocks(rank):
        peer = 1 - rank
        if rank == 0:
            yield peer, peer, ["s i 0 i 0 1", answer], 0
            yield peer, peer, ["rrc i 1 i 1 1 0 0", "s i 1 i 1 1"], 1
        else:
            yield peer, peer, first, 0
            yield peer, peer, ["s i 1 i 1 1", "r i 1 i 1 1"], 1

    return program(blocks, chunks=2, sizes="2 0 1", ranks=2)


KEPT = [
    kept(["rrc i 0 i 0 1 1 1", "s i 0 i 0 1"], "r i 0 i 0 1"),
    kept(["rrcs i 0 i 0 1 1 1"], "r i 0 i 0 1"),
    kept(["rrs i 0 s 0 1 1 1", "r i 0 i 0 1"], "rcs i 0 i 0 1"),
    kept(["r i 0 s 0 1 1 1", "re s 0 i 0 1", "s i 0 i 0 1"], "r i 0 i 0 1"),
]


@pytest.mark.parametrize("text", KEPT)
@pytest.mark.parametrize("count", [1, 7, 30])
def test_a_message_that_comes_before_its_receive_is_kept(text, count, execute):
    schedule = from_msccl(text)
    verify(schedule)
    given = np.random.default_rng(1).integers(-99, 99, (2, count))
    outputs = list(given.copy())
    execute(schedule, [layout_for(schedule, count)] * 2, [np.empty(0, int)] * 2, outputs)
    assert (np.array(outputs) == given.sum(axis=0)).all()


def test_only_messages_that_must_be_kept_take_memory():
    text = KEPT[0].replace('s_chunks="1"', 's_chunks="0"')
    assert from_msccl(text).scratch_chunks == 1
    # Without the wait of rank 0, it sends the message when rank 1 takes it.
    assert from_msccl(text.replace('depid="0"', 'depid="-1"')).scratch_chunks == 0


@pytest.mark.ranks(2, kind="both")
def test_a_program_with_a_kept_message_is_called(rank):
    for text in KEPT:
        schedule = from_msccl(text)
        register_schedule(schedule)
        data = np.arange(10.0) * (rank + 1)
        dist.all_reduce(data, algorithm=schedule.algorithm)
        assert data.tolist() == (np.arange(10.0) * 3).tolist()


def long_program(steps, wrong):
    """Return a program of many steps: rank 0 sends on two channels, of which one is late."""

    def blocks(rank):
        if rank:
            waits = ["r i 0 i 0 1"] * steps
            yield -1, 0, ["nop i -1 i -1 0 1 0" if wrong else "nop i -1 i -1 0", *waits], 0
            waits[0] += f" 0 {steps}"
            yield -1, 0, waits, 1
        else:
            yield 1, -1, ["s i 0 i 0 1"] * steps, 0
            # Sent before the second channel's receives begin, so the first channel's wait.
            yield 1, -1, ["s i 1 i 1 1"] * steps, 1

    return program(blocks, chunks=2, sizes="2 0 0", ranks=2)


@pytest.mark.parametrize("wrong", [False, True])
def test_time_grows_with_the_size_of_a_program(wrong):
    """A program of 440 KB, for which a quadratic search takes a minute or more."""
    text = long_program(1_000, wrong)
    begin_s = time.process_time()
    if wrong:
        with pytest.raises(InvalidArgumentError, match="deadlock: step 0 "):
            from_msccl(text)
    else:
        from_msccl(text)
    assert time.process_time() - begin_s < 20


VALUES = ["", "-1", "0", "1", "3", "x", "1.5", "70000", "9" * 30, "9" * 5000, "i", "s", "rrs"]


@pytest.mark.parametrize("seed", range(5))
def test_damaged_programs_are_refused_or_read(seed):
    """Each error is one of the promised classes; no value takes all memory."""
    draw = random.Random(seed)
    texts = [program(ring, sizes="3 3 0"), program(pairs), *KEPT]
    for _ in range(200):
        algo = ElementTree.fromstring(draw.choice(texts))
        algo.set("coll", draw.choice(["allreduce", "allgather", "reduce_scatter", "alltoall"]))
        for _ in range(draw.randint(1, 3)):
            node = draw.choice(list(algo.iter()))
            name = draw.choice(list(node.attrib))
            if draw.random() < 0.2:
                del node.attrib[name]
            else:
                node.set(name, draw.choice(VALUES))
        with contextlib.suppress(InvalidArgumentError, ScheduleError):
            verify(from_msccl(ElementTree.tostring(algo, encoding="unicode")))


def call(rank):
    text = program(ring, sizes="3 3 0")
    schedule = from_msccl(text)
    register_schedule(schedule)
    data = np.arange(10.0) * (rank + 1)
    dist.all_reduce(data, algorithm=schedule.algorithm)
    assert data.tolist() == (np.arange(10.0) * 6).tolist()
    assert dist.trace_records()[-1].algorithm == schedule.algorithm


@pytest.mark.ranks(3, kind="both")
def test_a_registered_program_is_called_by_its_name(rank):
    call(rank)


@pytest.mark.ranks(3, engine="reference")
def test_a_registered_program_on_the_reference_engine(rank):
    call(rank)


def test_ranks_with_different_programs_have_different_names():
    first, second = (from_msccl(program(ring, sizes=sizes)) for sizes in ("3 3 0", "3 3 1"))
    assert first.algorithm.startswith("mine-")
    assert first.algorithm != second.algorithm


def test_only_right_schedules_are_registered():
    def lost(rank):
        ((to, source, steps),) = ring(rank)
        yield to, source, [step.replace("rrcs", "rcs") for step in steps]

    with pytest.raises(ScheduleError, match="has contributions of"):
        register_schedule(from_msccl(program(lost)))
    with pytest.raises(InvalidArgumentError, match="has another such algorithm"):
        register_schedule(build("all_reduce", "ring", 4))
    with pytest.raises(InvalidArgumentError, match="has a root, expected none"):
        register_schedule(build("broadcast", "ring", 4, 0))


def waits_in_a_circle(rank):
    yield (rank + 1) % 3, -1, ["s i 0 i 0 1 1 0"]
    yield -1, (rank - 1) % 3, ["r i 0 i 0 1"]


def copies(rank):
    yield -1, -1, ["cpy i 0 i 1 1"]


def copies_in_a_circle(rank):
    yield -1, -1, ["cpy i 0 i 1 1 1 0"]
    yield -1, -1, ["cpy i 1 i 0 1 0 0"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<algo", "the text is no program: ParseError"),
        ("<algo/>", "the text is no program: an element has no attribute 'ngpus'"),
        (
            program(pairs)
            .replace('depid="-1"', 'depid="7"', 1)
            .replace('deps="-1"', 'deps="3"', 1),
            "^MSCCL: step 0 of thread block 0 of rank 0 waits for step 3 of thread block 7, which",
        ),
        (
            program(ring, "broadcast"),
            "the collective 'broadcast' is not supported .supported: allr",
        ),
        (
            program(ring, "allgather", chunks=2),
            "of allgather is 2, expected a multiple of ngpus .3",
        ),
        (program(ring, "alltoall", chunks=4), "of alltoall is 4, expected a multiple of ngpus .3"),
        (program(copies).replace('gpu id="2"', 'gpu id="3"'), "the id of a gpu is not 0 to 2"),
        (
            program(ring).replace('srcbuf="i"', 'srcbuf="x"', 1),
            "unknown buffer 'x' .known: i, o, s",
        ),
        ('<algo ngpus="0" nchunksperloop="1" coll="allgather"/>', "ngpus is 0, but"),
        (program(ring).replace("rrs", "rrx"), "^MSCCL: unknown type 'rrx' "),
        (program(ring).replace('type="r"', 'type="nop"'), "a message has no receiver"),
        (
            program(waits_in_a_circle),
            r"deadlock: step 0 \(s\) of thread block 0 of rank 0, which waits for step 0 \(r\) of "
            r"thread block 1 of rank 0, which waits for step 0 \(s\) of thread block 0 of rank 2, "
            r".* of thread block 1 of rank 1, which waits for the first$",
        ),
        (program(copies_in_a_circle), r"deadlock: step 0 \(cpy\) of thread block 0 of rank 0, wh"),
        (program(pairs).replace('type="r"', 'type="s"', 1), "a message has no receiver"),
        # Without limits these take all memory.
        (program(ring).replace('ngpus="3"', 'ngpus="1000000000"'), "ngpus is 1000000000, but"),
        (program(ring).replace('cnt="1"', 'cnt="1000000000"', 1), "is not 0 to 65,536"),
        (program(ring).replace('off="1"', 'off="-5"', 1), "is not 0 to 65,536"),
        (program(ring, chunks=10**12), "is not 0 to 65,536"),
        (program(ring, chunks=0), "the program has no chunks"),
        (program(ring, sizes="3 0 1000000000"), "is not 0 to 65,536"),
        (program(ring, sizes="3 0 x"), "the text is no program: ValueError"),
    ],
)
def test_wrong_programs_are_refused(text, words):
    with pytest.raises(InvalidArgumentError, match=words):
        from_msccl(text)


@pytest.mark.parametrize("text", [None, 7, b"<algo/>", ["<algo/>"]])
def test_a_program_that_is_no_text_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="the program must be a text, got "):
        from_msccl(text)


def test_a_program_that_moves_too_many_chunks_is_refused_at_once():
    def long(rank):
        yield -1, -1, ["cpy i 0 i 1 60000"] * 1_000

    with pytest.raises(
        InvalidArgumentError, match="steps move 180,000,000 chunks, expected at mos"
    ):
        from_msccl(program(long, chunks=60_001))


def test_scratch_is_read_after_it_is_written():
    def early(rank):
        yield (rank + 1) % 3, (rank - 1) % 3, ["s s 0 s 0 1", "r s 0 s 0 1"]

    with pytest.raises(InvalidArgumentError, match="reads scratch chunk 0 before"):
        from_msccl(program(early))


def test_collectives_that_msccl_lacks():
    with pytest.raises(InvalidArgumentError, match="no broadcast"):
        to_msccl(build("broadcast", "ring", 4, 0))
