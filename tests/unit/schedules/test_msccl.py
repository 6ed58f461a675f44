"""MSCCL-XML: programs written by hand, schedules read back, and errors by name."""

import numpy as np
import pytest

import unisono as dist
from unisono.errors import InvalidArgumentError, ScheduleError
from unisono.schedules import build, registry
from unisono.schedules.cost import cost
from unisono.schedules.layout import layout_for
from unisono.schedules.msccl import from_msccl, to_msccl
from unisono.schedules.registry import available, entry, register_schedule
from unisono.schedules.verify import verify

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
        if found.serves(p, 2):
            depth, local = (2 if found.pipelined else 1), (2 if found.two_level else 1)
            schedule = build(collective, algorithm, p, pipeline=depth, local=local)
            back = from_msccl(to_msccl(schedule))
            verify(back)
            ours, theirs = cost(schedule), cost(back)
            assert theirs.rounds <= ours.rounds
            for name in ("messages", "bytes_sent", "bytes_received", "bytes_reduced"):
                assert getattr(ours, name) == getattr(theirs, name), (name, p)


def program(blocks, coll="allreduce", chunks=3, inplace=1, sizes="3 0 3"):
    """Return a program; `blocks(rank)` gives (send, recv, steps), a step is a line of fields."""
    names = ["type", "srcbuf", "srcoff", "dstbuf", "dstoff", "cnt", "depid", "deps"]
    i, o, s = sizes.split()
    lines = [
        f'<algo name="mine" proto="LL" nchannels="1" nchunksperloop="{chunks}" ngpus="3" '
        f'coll="{coll}" inplace="{inplace}">'
    ]
    for rank in range(3):
        lines.append(f'<gpu id="{rank}" i_chunks="{i}" o_chunks="{o}" s_chunks="{s}">')
        for number, (to, source, steps) in enumerate(blocks(rank)):
            lines.append(f'<tb id="{number}" send="{to}" recv="{source}" chan="0">')
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<algo", "the text is no program: ParseError"),
        ("<algo/>", "the text is no program: KeyError"),
        (program(ring, "allscan"), "the text is no program: KeyError"),
        (program(ring).replace("rrs", "rrx"), "^MSCCL: unknown type 'rrx' "),
        (program(ring).replace('type="r"', 'type="nop"'), "a message has no receiver"),
        (program(waits_in_a_circle), "deadlock: steps of rank"),
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


def test_scratch_is_read_after_it_is_written():
    def early(rank):
        yield (rank + 1) % 3, (rank - 1) % 3, ["s s 0 s 0 1", "r s 0 s 0 1"]

    with pytest.raises(InvalidArgumentError, match="reads scratch chunk 0 before"):
        from_msccl(program(early))


def test_collectives_that_msccl_lacks():
    with pytest.raises(InvalidArgumentError, match="no broadcast"):
        to_msccl(build("broadcast", "ring", 4, 0))
