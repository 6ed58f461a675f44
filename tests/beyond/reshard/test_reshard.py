"""Reshards between real ranks, against NumPy; and wrong descriptions."""

from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable, fails, wait_until
from tests.support.shardings import (
    numbered,
    part_of,
    random_layout,
    random_shape,
    random_view,
    spread,
)
from tests.support.tools import tool
from unisono.beyond.boxes import whole
from unisono.beyond.reshard import planned as planned_module
from unisono.beyond.reshard import run as run_module
from unisono.core.base.deadline import Deadline
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    CollectiveError,
    CollectiveMismatchError,
    InvalidArgumentError,
    PeerLostError,
    UnisonoError,
)
from unisono.testing import run


def sharded(boxes, views, shape):
    return dist.Sharded(list(views), shape, starts=[box.begins for box in boxes])


def random_reshard(rank, seed, dtypes=(np.int64, np.int64)):
    """Move arrays between random layouts in random memory twice, and compare with NumPy."""
    shared, own = np.random.default_rng(seed), np.random.default_rng((seed, rank))
    size = dist.get_world_size()
    src, dst, wanted = {}, {}, []
    for name in "abc"[: int(shared.integers(1, 4))]:
        shape = random_shape(shared)
        both = []
        for complete in (True, False):
            ranks = sorted(shared.choice(size, int(shared.integers(1, size + 1)), False).tolist())
            layout = random_layout(shared, shape, ranks, complete=complete)
            both.append(spread(layout, ranks, size)[rank])
        views = [
            [random_view(own, box, dtype) for box in boxes]
            for boxes, dtype in zip(both, dtypes, strict=True)
        ]
        src[name] = sharded(both[0], views[0], shape)
        dst[name] = sharded(both[1], views[1], shape)
        wanted.append((shape, both, views))
    plan = dist.reshard(src, dst)
    for turn in (1, 2, 3):
        for shape, both, views in wanted:
            for box, view in zip(both[0], views[0], strict=True):
                view[...] = turn * part_of(numbered(shape), box)
        plan.run()
        for shape, both, views in wanted:
            for box, view in zip(both[1], views[1], strict=True):
                np.testing.assert_array_equal(view, turn * part_of(numbered(shape), box))
        dist.barrier()
    plan.close()


@pytest.mark.ranks(1, 3, 5, kind="both")
def test_random_layouts_against_numpy(rank):
    for seed in range(12):
        random_reshard(rank, seed)


@pytest.mark.ranks(4, engine="reference")
def test_random_layouts_on_the_reference_engine(rank):
    for seed in range(4):
        random_reshard(rank, seed)


@pytest.mark.whole("300 plans take a minute")
@pytest.mark.ranks(4, 6, kind="processes")
def test_300_random_layouts(rank):
    for seed in range(1000, 1300):
        random_reshard(rank, seed)


def test_several_hosts(monkeypatch):
    # Ranks of which each two share memory, and messages between them.
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "2")
    run(_several_seeds, 5, ranks="processes", engine="native")
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    run(_several_seeds, 3, ranks="processes", engine="native")


def _several_seeds(rank):
    for seed in range(20, 30):
        # Afterwards many packets, of which some go through slots and some straight into arrays.
        if seed == 24:
            run_module._LEAST_BYTES = run_module._MOST_BYTES = 64
        random_reshard(rank, seed)
    for seed, dtypes in enumerate(((np.int16, np.int64), (np.float64, np.float32))):
        random_reshard(rank, 40 + seed, dtypes)


N = 700


@pytest.mark.ranks(6, kind="both")
def test_rows_to_columns(rank):
    data = numbered((N, N), np.float32)
    src = data[rank * N // 4 : (rank + 1) * N // 4].copy() if rank < 4 else None
    dst = np.zeros((N, N // 2), np.float32) if rank >= 4 else None
    plan = dist.reshard(
        dist.Sharded(src, (N, N), mesh=[0, 1, 2, 3], placements=[0]),
        dist.Sharded(dst, (N, N), mesh=[4, 5], placements=[1]),
    )
    assert plan.moved_bytes == 4 * N * N
    plan.run()
    if rank >= 4:
        half = slice((rank - 4) * N // 2, (rank - 3) * N // 2)
        np.testing.assert_array_equal(dst, data[:, half])
    lines = str(plan).splitlines()
    assert lines[0] == (
        f"<ReshardPlan of 1 arrays in group 'default', {4 * N * N:,} bytes between ranks>:"
    )
    assert lines[1:3] == [
        "rank 0 -> rank 4: [0:175, 0:350], 245,000 bytes",
        "rank 1 -> rank 4: [175:350, 0:350], 245,000 bytes",
    ]
    assert len(lines) == 9
    assert plan.schedule.world_size == 6


@pytest.mark.ranks(4)
def test_meshes_and_flat_parameters(rank):
    data = numbered((10, 6), np.float64)
    mesh = dist.init_device_mesh("cpu", (2, 2))
    i, j = divmod(rank, 2)
    src = data[i * 5 : (i + 1) * 5, j * 3 : (j + 1) * 3].copy()
    cuts = np.linspace(0, 60, 5).astype(int)[[rank, rank + 1]]
    dst = np.zeros(cuts[1] - cuts[0])
    back = np.zeros_like(src)
    blocks = dist.Sharded(src, (10, 6), mesh=mesh, placements=[0, 1])
    flat = dist.Sharded(dst, (10, 6), flat=cuts[0])
    dist.reshard(blocks, flat).run()
    np.testing.assert_array_equal(dst, data.ravel()[slice(*cuts)])
    again = dist.Sharded(back, (10, 6), mesh=mesh.mesh, placements=[0, 1])
    dist.reshard(flat, again).run()
    np.testing.assert_array_equal(back, src)


@pytest.mark.ranks(3)
def test_whole_arrays_go_to_all(rank):
    x = np.arange(5.0) if rank == 1 else np.zeros(5)
    plan = dist.reshard(x if rank == 1 else None, x)
    plan.run()
    np.testing.assert_array_equal(x, np.arange(5.0))
    assert plan.moved_bytes == 2 * 40


@pytest.mark.ranks(2, kind="both")
def test_one_memory_for_source_and_target(rank):
    # Rows become columns in the memory of the rows.
    for _ in range(2):
        x = numbered((4, 4))[2 * rank : 2 * rank + 2].copy()
        plan = dist.reshard(
            dist.Sharded(x, (4, 4), mesh=[0, 1], placements=[0]),
            dist.Sharded(x.reshape(4, 2), (4, 4), mesh=[0, 1], placements=[1]),
        )
        plan.run()
        np.testing.assert_array_equal(x.reshape(4, 2), numbered((4, 4))[:, 2 * rank : 2 * rank + 2])
    # Nothing moves, and nothing is copied.
    plan = dist.reshard(x if rank else None, x if rank else None)
    assert not plan._local
    plan.run()


CONVERSIONS = [
    ("float32", "float64"),
    ("float64", "float32"),
    ("float32", "float16"),
    ("float64", "float16"),
    ("int8", "int64"),
    ("uint8", "float32"),
    ("bool", "int16"),
]


@pytest.mark.ranks(2)
def test_dtypes_are_converted_on_the_way(rank):
    for given, wanted in CONVERSIONS:
        values = np.array([0, 1, 2.4, 100.7, 65519, 65520, 1e300, np.inf, np.nan, -0.0])
        if given[0] != "f":
            values = np.arange(10) % 3
        with np.errstate(all="ignore"):
            x = values.astype(given)
        y = np.zeros(10, wanted)
        plan = dist.reshard(x if rank == 0 else None, y)
        plan.run()
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(y, x.astype(wanted), f"{given} {wanted}")
        assert plan.moved_bytes == 10 * min(x.itemsize, y.itemsize)


@pytest.mark.ranks(2)
def test_bfloat16_on_the_way(rank):
    torch = pytest.importorskip("torch")
    x = torch.randn(1000, generator=torch.Generator().manual_seed(7)) * 1e3
    x[:3] = torch.tensor([float("nan"), float("inf"), 1.00390625])
    y, z = torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(1000)
    plan = dist.reshard(x if rank == 0 else None, y)
    plan.run()
    assert plan.moved_bytes == 2000
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    dist.reshard(y if rank == 0 else None, z).run()
    torch.testing.assert_close(z, y.float(), rtol=0, atol=0, equal_nan=True)


def waits_for_its_receiver(rank, folder):
    """The receiver is late; the sender must have sent nothing when it waits."""
    n, moves, sent = 1 << 18, run_module._PacketMoves, []
    x, y = np.arange(float(n)), np.zeros(n)
    plan = dist.reshard(x if rank == 0 else None, y if rank else None)
    real, flag = (moves._message, moves._wait, moves.run), folder / "waits"

    def message(self, *words):
        sent.append(words)
        return real[0](self, *words)

    def wait(self, *words):
        if not flag.exists():
            (folder / "part").write_text(str(len(sent)))
            (folder / "part").rename(flag)
        real[1](self, *words)

    def run_late(self):
        wait_until(flag.exists, 20)
        real[2](self)

    if rank == 0:
        moves._message, moves._wait = message, wait
    else:
        moves.run = run_late
    plan.run()
    assert flag.read_text() == "0"
    assert rank == 0 or (y == np.arange(n)).all()


def test_a_sender_waits_until_its_messages_are_expected(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "1")
    run(waits_for_its_receiver, 2, ranks="processes", args=(tmp_path,))


def wrong(rank, kind):
    """Return (src, dst) of this rank, of which something is wrong."""
    rows = dist.Sharded(np.zeros((2, 4)), (4, 4), mesh=[0, 1], placements=[0])
    columns = dist.Sharded(np.zeros((4, 2)), (4, 4), mesh=[0, 1], placements=[1])
    if kind == "gap":
        return {"w": None if rank else rows}, {"w": columns}
    if kind == "no name":
        return {"w": rows}, {"w": columns, "v": np.zeros(3) if rank else None}
    if kind == "overlap":
        two = dist.Sharded([np.zeros((2, 2))] * 2, (4, 4), starts=[(0, 0), (1, 1)])
        return {"w": rows}, {"w": two if rank else None}
    if kind == "shape":
        return {"w": rows}, {"w": np.zeros((4, 5)) if rank else columns}
    if kind == "dtype":
        return {"w": np.zeros((4, 4), np.int8) if rank else rows}, {"w": columns}
    assert kind == "conversion"
    return {"w": rows}, {"w": np.zeros((4, 4), np.int32)}


WRONG = {
    "gap": (CollectiveError, "rank 0 wants [2:4, 0:2] of array 'w', which no rank has", (0,)),
    "no name": (CollectiveError, "rank 1 wants [0:3] of array 'v', which no rank has", (1,)),
    "overlap": (
        CollectiveError,
        "rank 1 wants [0:2, 0:2] and [1:3, 1:3] of array 'w', which overlap",
        (1,),
    ),
    "shape": (
        CollectiveMismatchError,
        "array 'w' has shape [4, 4] on rank 0, but [4, 5] on rank 1",
        (0, 1),
    ),
    "dtype": (
        CollectiveMismatchError,
        "array 'w' has dtype float64 on rank 0, but int8 on rank 1",
        (0, 1),
    ),
    "conversion": (
        CollectiveMismatchError,
        "array 'w' has dtype float64 on rank 0, which does not become int32 on rank 0",
        (0, 0),
    ),
}


@pytest.mark.ranks(2)
def test_wrong_descriptions_are_errors_on_all_ranks(rank):
    for kind, (error, text, blamed) in WRONG.items():
        with pytest.raises(error) as caught:
            dist.reshard(*wrong(rank, kind))
        assert caught.value.what == f"reshard in group 'default' failed on rank {rank}: {text}"
        assert caught.value.context.peers == blamed, kind
        check_usable()


ARGUMENTS = [
    (
        lambda: dist.Sharded(np.zeros(3), (4,), mesh=[0, 1], placements=[0]),
        InvalidArgumentError,
        "rank 1 has an array [3], expected [2]: its part of [4]",
    ),
    (
        lambda: dist.Sharded(np.zeros(3), (4,), mesh=[0], placements=[0]),
        InvalidArgumentError,
        "rank 1 has an array but is not in the mesh [0]",
    ),
    (
        lambda: dist.Sharded(None, (4,), mesh=[0, 1], placements=[0]),
        InvalidArgumentError,
        "rank 1 is in the mesh but has no array",
    ),
    (
        lambda: dist.Sharded([np.zeros(3)], (4,), starts=[(2,)]),
        InvalidArgumentError,
        "an array [3] at [2] does not fit into [4]",
    ),
    (
        lambda: dist.Sharded(np.zeros(3), (4,), starts=[(2,)]),
        InvalidArgumentError,
        "Sharded with starts takes a list with an array for each",
    ),
    (
        lambda: dist.Sharded([np.zeros(1), np.zeros(1, int)], (4,), starts=[(2,), (3,)]),
        InvalidArgumentError,
        "the arrays of one Sharded have dtypes",
    ),
    (
        lambda: dist.Sharded(np.zeros((1, 1)), (4,), flat=0),
        InvalidArgumentError,
        "Sharded with flat takes an array of 1 dimension, got 2",
    ),
    (
        lambda: dist.Sharded(np.zeros(3), (4,), flat=2),
        InvalidArgumentError,
        "elements 2:5 of an array [4] of 4 elements",
    ),
    (lambda: "text", ArgumentTypeError, "array must be an array"),
]


@pytest.mark.ranks(2)
def test_a_wrong_array_is_an_error_on_all_ranks(rank):
    for make, error, text in ARGUMENTS:
        if rank == 1:
            with fails(error, "reshard: array 'w': ", text):
                dist.reshard({"w": make()}, None)
        else:
            with fails(CollectiveMismatchError, "rank 1", text):
                dist.reshard(None, None)
        check_usable()
    if rank == 1:
        with fails(ArgumentTypeError, "reshard: the name of an array must be a str, got 3"):
            dist.reshard({3: np.zeros(1)}, None)
    else:
        with fails(CollectiveMismatchError, "the name of an array"):
            dist.reshard(None, None)
    check_usable()


def test_wrong_words_of_sharded():
    with pytest.raises(InvalidArgumentError, match="Sharded takes one of mesh, flat and starts"):
        dist.Sharded(np.zeros(3), (4,), flat=0, starts=[(0,)])
    with pytest.raises(InvalidArgumentError, match="Sharded takes mesh and placements together"):
        dist.Sharded(np.zeros(3), (4,), mesh=[0])


@pytest.mark.ranks(2)
def test_a_closed_plan(rank):
    plan = dist.reshard(np.ones(2) if rank else None, np.zeros(2))
    plan.run()
    dist.barrier()
    plan.close()
    with pytest.raises(ClosedError, match=r"ReshardPlan\.run of a plan that was closed"):
        plan.run()
    check_usable()


@pytest.mark.ranks(2)
def test_a_run_that_meets_another_call(rank):
    x = np.full(2, -1.0)
    plan = dist.reshard(np.ones(2) if rank else None, x)
    with pytest.raises(CollectiveMismatchError):
        plan.run() if rank else dist.barrier()
    np.testing.assert_array_equal(x, -1)
    plan.run()
    np.testing.assert_array_equal(x, 1)


@pytest.mark.ranks(2)
def test_two_plans_of_one_size_are_told_apart(rank):
    plans, got = [], np.zeros((2, 4))
    for number in range(2):
        src = np.full(4, 1.0 + number) if rank == 0 else None
        plans.append(dist.reshard(src, got[number] if rank else None))
    with fails(CollectiveMismatchError, "ReshardPlan.run(plan "):
        plans[rank].run(timeout=20)
    assert not got.any()
    for plan in plans:
        plan.run()
    assert not rank or got[:, 0].tolist() == [1, 2]


@pytest.mark.ranks(2, kind="processes")
def test_a_plan_that_one_rank_cannot_make(rank):
    def fails_here(*arguments):
        raise MemoryError("no copy")

    for place, name in ((run_module, "_apart"), (planned_module, "_converter")):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(place, name, fails_here)
            with fails(CollectiveError, "no plan on rank 1: MemoryError('no copy')"):
                dist.reshard(np.ones(4) if rank else None, np.zeros(4), timeout=20)
    check_usable()


@pytest.mark.ranks(2, kind="processes")
def test_a_rank_that_is_late_is_named(rank, monkeypatch):
    n = 1 << 16
    plan = dist.reshard(np.ones(n) if rank == 0 else None, np.zeros(n) if rank else None)
    plan.run()

    def stays(moves, step):
        moves._deadline = Deadline(30)
        moves._wait(0, 1)

    if rank == 0:
        monkeypatch.setattr(run_module._PacketMoves, "_send", stays)
    with pytest.raises(UnisonoError) as caught:
        plan.run(timeout=0.5)
    texts = ("in group 'default' timed out after ", f" on rank {rank} of 2: rank 0 did not signal")
    assert all(text in caught.value.what for text in texts), caught.value.what


@pytest.mark.ranks(1)
def test_many_arrays_are_planned_fast(rank):
    x, y = np.zeros((2000, 4)), np.zeros((2000, 4))
    both = [{str(at): row for at, row in enumerate(rows)} for rows in (x, y)]
    x += numbered(x.shape)
    plan = dist.reshard(*both)
    assert plan.slot_bytes <= 1
    plan.run()
    np.testing.assert_array_equal(x, y)
    # Views of any stride and order over one memory.
    for seed in range(20):
        random = np.random.default_rng(seed)
        memory = numbered((40,))
        src, dst, wanted = {}, {}, {}
        for at in range(4):
            begin, other = random.integers(0, 30, 2)
            src[str(at)] = memory[begin : begin + 9][:: random.choice([-1, 1])]
            wanted[str(at)] = src[str(at)].copy()
            dst[str(at)] = np.zeros(9, int) if at else memory[other : other + 9]
        dist.reshard(src, dst).run()
        for at in dst:
            np.testing.assert_array_equal(dst[at], wanted[at])


def runs_the_page(rank, folder):
    page = Path(__file__).parents[3] / "docs/howto/reshard.md"
    text = "\n".join(tool("readme").blocks("python", page.read_text(encoding="utf-8")))
    program = text.replace("dist.init_process_group()\n", "").replace("/dev/shm/weights", folder)
    names = {"print": lambda plan: None}
    exec(program, names)
    if rank >= 4:
        wanted = np.repeat(np.arange(4, dtype=np.float32), 250)
        assert (names["columns"] == wanted[:, None]).all()
    assert names["w"].tolist() == [0, 1, 2, 3]
    assert max(names["plan"].slot_bytes, 1) <= (4 * 128 << 10)


def test_program_of_the_page(tmp_path):
    run(runs_the_page, 6, args=(str(tmp_path / "weights"),), ranks="processes")


def dies_in_the_middle(rank):
    n = 4 << 20
    plan = dist.reshard(np.ones(n) if rank == 0 else None, None if rank == 0 else np.zeros(n))
    plan.run()
    if rank == 2:
        steps, taken = plan._packets.steps, 0

        class Dying(list):
            def __iter__(self):
                nonlocal taken
                for step in list.__iter__(self):
                    taken += 1
                    if taken == 3:
                        import os
                        import signal

                        os.kill(os.getpid(), signal.SIGKILL)
                    yield step

        plan._packets = plan._packets._replace(steps=Dying(steps))
    try:
        plan.run(timeout=30)
    except UnisonoError as error:
        return type(error), error.context.peers, error.what
    return None


def test_a_rank_that_dies_in_the_middle_is_named():
    first, second, _ = run(dies_in_the_middle, 3, ranks="processes", dead={2})
    assert first[0] is PeerLostError, first
    assert first[1] == (2,), first
    # The other target may have all of its bytes before it learns of the end.
    assert second is None or 2 in second[1], second


def leaves_with_an_error(rank):
    n = 4 << 20
    plan = dist.reshard(np.ones(n) if rank == 0 else None, None if rank == 0 else np.zeros(n))
    if rank == 2:
        run_module._PacketMoves._receive = None  # not callable
    try:
        plan.run(timeout=30)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_a_rank_that_raises_in_the_middle_is_named():
    first, _, last = run(leaves_with_an_error, 3, ranks="processes")
    assert last[0] == "TypeError"
    assert first[0] == "CollectiveAbortedError"
    assert "TypeError in ReshardPlan.run on rank 2" in first[1]


def test_whole_covers_everything():
    assert whole((2, 3)).size == 6
