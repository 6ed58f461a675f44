"""send, recv, isend, irecv, P2POp, batch_isend_irecv."""

import pytest

from tests.support import several
from tests.worlds import p2p_bodies
from unisono.testing import run

BODIES = [
    (p2p_bodies.pairs, 4),
    (p2p_bodies.batches, 4),
    (p2p_bodies.in_group, 4),
    (p2p_bodies.order, 2),
    (p2p_bodies.failed_batch, 2),
    (p2p_bodies.layouts_and_sizes, 2),
    (p2p_bodies.bad_arguments, 2),
    (p2p_bodies.both_send_first, 2),
    (p2p_bodies.far_ahead, 2),
    (p2p_bodies.without_waiting, 2),
    (p2p_bodies.asked_in_other_ways, 2),
]


@pytest.mark.parametrize(("body", "size"), BODIES, ids=lambda v: getattr(v, "__name__", v))
def test_on_threads(body, size):
    run(body, size)


@pytest.mark.parametrize("size", [2, 4])
def test_on_processes(size):
    bodies = [body for body, wanted in BODIES if wanted == size]
    run(several.run_all, size, ranks="processes", args=(bodies,))


def test_mistakes(world):
    told = world(p2p_bodies.mistakes, 2)[1]
    on = "in group 'default' does not match on rank 1 of 2: rank 0 sent"
    late = "in group 'default' timed out after 50 ms on rank 1 of 2:"
    assert told == [
        f"recv(float64[3], src=0, tag=0) {on} float64[4]",
        f"recv(int32[2], src=0, tag=0) {on} float32[2]",
        f"recv(float64[1], src=0, tag=0) {on} float32[2]",
        f"recv(float64[2], src=0, tag=0) {late} rank 0 did not match it",
        f"recv(float64[2], src=any, tag=0) {late} no rank sent a message that fits",
        f"recv(float64[2], src=0, tag=9) {late} rank 0 did not match it",
    ]


def test_plain_mistakes(world):
    told = world(p2p_bodies.plain_mistakes, 2)[1]
    on = "in group 'default' does not match on rank 1 of 2: rank 0 sent"
    late = "in group 'default' timed out after 50 ms on rank 1 of 2:"
    assert told == [
        f"recv(float64[3], src=0, tag=0) {on} float64[4]",
        f"recv(float64[1], src=0, tag=0) {on} float32[2]",
        f"recv(float64[2], src=0, tag=0) {late} rank 0 did not match it",
        f"recv(float64[2], src=any, tag=0) {late} no rank sent a message that fits",
    ]


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_a_destroyed_group_ends_its_receives(transport):
    told, _ = run(p2p_bodies.destroyed_under_a_receive, 2, transport=transport)
    for name, (kind, text) in zip("12", told, strict=True):
        assert kind == "ClosedError"
        assert text == (
            f"recv(float64[1], src=1, tag=0) in group '{name}' ended on rank 0 of 2: the group was "
            "destroyed here"
        )
