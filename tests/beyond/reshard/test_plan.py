"""Plans of random layouts against NumPy, without ranks; and faults that the proof detects."""

import re

import numpy as np
import pytest

from tests.support.shardings import (
    numbered,
    part_of,
    random_layout,
    random_shape,
    random_tiles,
    spread,
)
from unisono.beyond.boxes import IndexBox, flat_boxes, placed_boxes, whole
from unisono.beyond.reshard.plan import (
    BoxPacket,
    BoxTransfer,
    Gap,
    check,
    cover,
    first_overlap,
    packet_bytes,
    packets,
    schedule,
)
from unisono.beyond.reshard.run import _slots_of
from unisono.core.schedules.cost import cost
from unisono.errors import ArgumentTypeError, InvalidArgumentError, ScheduleError
from unisono.workbench.simulate import FullyConnected, LinkSpec, simulate
from unisono.workbench.simulate.pictures.diagrams import diagram
from unisono.workbench.simulate.pictures.timeline import in_rounds


def random_case(seed):
    """Return (shape, sources, targets, hosts) of up to 7 ranks on up to 3 hosts."""
    random = np.random.default_rng(seed)
    shape, size = random_shape(random), int(random.integers(1, 8))
    some = [
        sorted(random.choice(size, int(random.integers(1, size + 1)), replace=False).tolist())
        for _ in range(2)
    ]
    sources = spread(random_layout(random, shape, some[0], complete=True), some[0], size)
    targets = spread(random_layout(random, shape, some[1], complete=False), some[1], size)
    return shape, sources, targets, [int(h) for h in random.integers(0, 3, size)]


def nbytes_of(array, box, relayed):
    return 8 * box.size


def applied(shape, targets, transfers, most):
    """Run the packets in memory; return the array of each target box, -1 where none wrote."""
    data = numbered(shape)
    made = {
        (rank, box): np.full(box.shape, -1) for rank, boxes in enumerate(targets) for box in boxes
    }

    def memory_of(rank, box):
        outer = next(b for r, b in made if r == rank and box.common(b) == box)
        return made[rank, outer][box.within(outer)]

    def write(rank, box, values):
        assert (memory_of(rank, box) == -1).all(), "written twice"
        memory_of(rank, box)[...] = values

    for each in transfers:
        if each.source == each.target:
            write(each.target, each.box, part_of(data, each.box))
    for packet in packets([(0, each) for each in transfers], nbytes_of, most):
        assert packet.nbytes <= most
        assert packet.source != packet.target
        ends = [0]
        for piece in packet.pieces:
            assert piece.offset >= ends[-1]
            assert piece.offset % 64 == 0
            ends.append(piece.offset + 8 * piece.box.size)
            values = part_of(data, piece.box)
            if packet.relayed:
                values = memory_of(packet.source, piece.box)
                np.testing.assert_array_equal(values, part_of(data, piece.box))
            write(packet.target, piece.box, values)
        assert ends[-1] == packet.nbytes
    return made


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_random_plans_against_numpy(first):
    for seed in range(first, first + 50):
        shape, sources, targets, hosts = random_case(seed)
        transfers = cover(sources, targets, hosts, [0] * len(hosts), 8, share_bytes=16)
        assert not isinstance(transfers, Gap), seed
        check(sources, targets, transfers)
        for (_, box), got in applied(shape, targets, transfers, 64 * (1 + seed % 5)).items():
            np.testing.assert_array_equal(got, part_of(numbered(shape), box), f"seed {seed}")
        # A byte comes to a host once, and to no host that has it.
        for host in set(hosts):
            came = [t.box for t in transfers if hosts[t.target] == host != hosts[t.source]]
            assert first_overlap(came) is None, seed
            near = [box for r, boxes in enumerate(sources) if hosts[r] == host for box in boxes]
            assert not any(a.common(b) for a in came for b in near), seed


@pytest.mark.parametrize("seed", range(100))
def test_a_gap_is_found(seed):
    _, sources, targets, hosts = random_case(seed)
    lost = next((box for boxes in sources for box in boxes), None)
    if lost is None:
        return
    left = [[part for box in boxes for part in _minus(box, lost)] for boxes in sources]
    found = cover(left, targets, hosts, [0] * len(hosts), 8)
    wanted = [(r, box) for r, boxes in enumerate(targets) for box in boxes if box.common(lost)]
    if not wanted or not lost.size:
        assert not isinstance(found, Gap)
    else:
        assert isinstance(found, Gap)
        assert found.rank == wanted[0][0]
        assert found.box.common(lost) == found.box


def _minus(box, lost):
    part = box.common(lost)
    return [box] if part is None else box.without(part)


ROWS = [[IndexBox((0, 0), (4, 8))], [IndexBox((4, 0), (8, 8))], [], []]
COLUMNS = [[], [], [IndexBox((0, 0), (8, 4))], [IndexBox((0, 4), (8, 8))]]


def test_the_proof_detects_faults():
    good = cover(ROWS, COLUMNS, [0] * 4, [0] * 4)
    check(ROWS, COLUMNS, good)
    faults = {
        "reshard: rank 2 gets 16 of 32 elements": good[1:],
        "reshard: rank 2 gets [0:4, 0:4] and [0:4, 0:4], which overlap": [good[0], *good],
        "reshard: rank 1 sends [0:4, 0:4] to rank 2, but does not have it": [
            good[0]._replace(source=1),
            *good[1:],
        ],
        "reshard: rank 3 sends [0:4, 0:4] to rank 2, but does not have it": [
            good[0]._replace(source=3, relayed=True),
            *good[1:],
        ],
        "reshard: rank 3 gets 48 of 32 elements": [
            *good,
            BoxTransfer(1, 3, IndexBox((4, 0), (8, 4))),
        ],
    }
    for text, transfers in faults.items():
        with pytest.raises(ScheduleError, match=re.escape(text)):
            check(ROWS, COLUMNS, transfers)


def test_replicas_share_the_sending():
    both = [[whole((8, 8))], [whole((8, 8))], [], []]
    wants = [[], [], [whole((8, 8))], [whole((8, 8))]]
    load = [0] * 4
    transfers = cover(both, wants, [0] * 4, load, 1, share_bytes=1)
    assert load == [64, 64, 0, 0]
    assert {(t.source, t.target): t.box.size for t in transfers} == {
        (0, 2): 32, (1, 2): 32, (0, 3): 32, (1, 3): 32,
    }  # fmt: skip


def test_near_sources_come_first_and_hosts_relay():
    both = [[whole((8,))], [whole((8,))], [], [], []]
    wants = [[], [], [whole((8,))], [whole((8,))], [whole((8,))]]
    load = [0] * 5
    transfers = cover(both, wants, "abbcc", load, 1, share_bytes=4)
    assert [t[:2] for t in transfers if t.target == 2] == [(1, 2)]
    assert load == [8, 8, 0, 8, 0]
    assert {(t.source, t.relayed) for t in transfers if t.target == 4} == {(3, True)}


def test_packets_are_small_beside_the_arrays():
    sent = [(BoxTransfer(a, b, whole((1,))), 1 << 28) for a in range(4) for b in (4, 5)]
    size = packet_bytes(sent, 1 << 16, 2 << 20)
    assert size == 2 << 20
    assert 2 * 4 * size < 0.04 * (4 << 28)
    assert packet_bytes([(sent[0][0], 100)], 1 << 16, 2 << 20) == 1 << 16
    assert packet_bytes([], 64, 128) == 128


def test_a_plan_is_counted_simulated_and_drawn():
    made, nbytes = schedule([(0, 2, 96), (1, 3, 96), (0, 3, 64), (1, 2, 64)], 4)
    counted = cost(made, nbytes)
    assert (counted.rounds, counted.bytes_sent, counted.bytes_received) == (2, 160, 160)
    assert counted.critical_bytes == 160
    result = simulate(made, nbytes, FullyConnected(4, LinkSpec(gbps=1e-6)))
    # Sends do not wait, and each pair has a link: the larger of its messages at 1 byte per ms.
    assert result.last_us == 96_000
    assert "reshard, direct" in diagram(in_rounds(made)).svg()
    assert schedule([], 3)[0].rounds == 0


def chunks(n, size):
    """As torch.chunk: pieces of ceil(n / size), and empty ones at the end."""
    step = -(-n // size) or 1
    return [list(range(n))[k * step : (k + 1) * step] for k in range(size)]


@pytest.mark.parametrize("n", [0, 1, 5, 8, 13])
def test_placements_cut_as_torch_cuts(n):
    mesh = np.arange(6).reshape(2, 3)
    for rank in range(6):
        i, j = divmod(rank, 3)
        rows = chunks(n, 2)[i]
        inner = [rows[k] for k in chunks(len(rows), 3)[j]]
        for placements, wanted in {
            (0, None): (rows, range(7)),
            (None, 0): (chunks(n, 3)[j], range(7)),
            (0, 1): (rows, chunks(7, 3)[j]),
            (0, 0): (inner, range(7)),
            (-2, -1): (rows, chunks(7, 3)[j]),
        }.items():
            got = placed_boxes((n, 7), mesh, placements, rank)
            data, local = numbered((n, 7)), np.full((len(wanted[0]), len(wanted[1])), -1)
            for box, inside in got:
                local[inside.within(whole(local.shape))] = part_of(data, box)
            np.testing.assert_array_equal(local, data[np.ix_(list(wanted[0]), list(wanted[1]))])
    assert placed_boxes((n,), mesh, [0, None], 9) is None


def test_placements_of_torch():
    tensor = pytest.importorskip("torch.distributed.tensor")
    import torch
    from torch.distributed.tensor.placement_types import _StridedShard

    for n, factor, size in [(16, 2, 2), (24, 3, 2), (13, 2, 3), (7, 2, 4), (5, 3, 2)]:
        placement = _StridedShard(0, split_factor=factor)
        shards, _ = placement._split_tensor(torch.arange(n), size, with_padding=False)
        for number in range(size):
            boxes = placed_boxes((n,), np.arange(size), [placement], number)
            got = [i for box, _ in boxes for i in range(box.begins[0], box.ends[0])]
            assert got == shards[number].tolist(), (n, factor, size, number)
    assert placed_boxes((4, 4), np.arange(2), [tensor.Shard(1)], 1)[0][0] == IndexBox(
        (0, 2), (4, 4)
    )
    assert placed_boxes((4,), np.arange(2), [tensor.Replicate()], 1)[0][0] == whole((4,))
    with pytest.raises(InvalidArgumentError) as caught:
        placed_boxes((4,), np.arange(2), [tensor.Partial()], 1)
    assert caught.value.what == "placement Partial(sum): the ranks have parts of a sum"


@pytest.mark.parametrize(
    ("placements", "error", "text"),
    [
        ([0, 1], InvalidArgumentError, "2 placements for a mesh of 1 dimensions"),
        ([2], InvalidArgumentError, "placement 2 of an array of 2 dimensions"),
        ([-3], InvalidArgumentError, "placement -3 of an array of 2 dimensions"),
        (
            ["row"],
            ArgumentTypeError,
            "placement 'row': expected None, a dimension, or a placement of torch",
        ),
        (
            [True],
            ArgumentTypeError,
            "placement True: expected None, a dimension, or a placement of torch",
        ),
    ],
)
def test_wrong_placements(placements, error, text):
    with pytest.raises(error, match=text):
        placed_boxes((4, 4), np.arange(2), placements, 0)


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (1, 4, 1, 3), (0, 3)])
def test_ranges_of_the_flattened_array(shape):
    data = numbered(shape)
    for start in range(data.size + 1):
        for count in range(data.size - start + 1):
            boxes = flat_boxes(shape, start, count)
            got = [part_of(data, box).ravel() for box, _ in boxes]
            assert [n for part in got for n in part.tolist()] == list(range(start, start + count))
            assert [at for _, at in boxes] == np.cumsum([0, *map(len, got)])[:-1].tolist()
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
    with pytest.raises(InvalidArgumentError, match=r"elements 0:\d+ of an array"):
        flat_boxes(shape, 0, data.size + 1)


@pytest.mark.parametrize("seed", range(30))
def test_boxes(seed):
    random = np.random.default_rng(seed)
    shape = random_shape(random, 7)
    data = numbered(shape)
    tiles = random_tiles(random, whole(shape))
    assert sorted(n for t in tiles for n in part_of(data, t).ravel()) == data.ravel().tolist()
    assert first_overlap([tile for tile in tiles if tile.size]) is None
    for tile in tiles:
        parts = list(tile.cut(3))
        got = [n for part in parts for n in part_of(data, part).ravel().tolist()]
        assert sorted(got) == part_of(data, tile).ravel().tolist()
        assert all(part.size <= 3 for part in parts)
        rest = [n for part in whole(shape).without(tile) for n in part_of(data, part).ravel()]
        assert sorted(rest) == sorted(set(data.ravel()) - set(got))
        if tile.size:
            assert first_overlap([tile, whole(shape)]) == (
                (tile, tile) if tile == whole(shape) else (tile, whole(shape))
            )


def test_slots_of_one_source_and_of_several():
    """Of several sources on its host a target takes one packet each at a time."""
    pairs = [(0, 3), (1, 3), (2, 3), (0, 4), (2, 4), (1, 3)]
    order = [BoxPacket(source, target, False, [], 1) for source, target in pairs]
    hosts = ["a", "a", "b", "a", "a"]
    assert _slots_of(order, hosts) == {3: {0: 1, 1: 1, 2: 2}, 4: {0: 2, 2: 2}}
