"""Messages over wires between processes, and every way in which a wire ends."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from tests.support.transport_worlds import KEY, LARGE, SOON, WAYS, tcp_world, use_native, works
from tests.unit.transports import wire_bodies
from unisono.base import config
from unisono.base.deadline import Deadline
from unisono.engines import is_native_built
from unisono.testing import run
from unisono.transports import LinkDown
from unisono.transports.native_messages import NativeMessages

pytestmark = [
    pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built"),
    pytest.mark.skipif(
        config.get("UNISONO_ENGINE") == "reference", reason="UNISONO_ENGINE forbids it"
    ),
]


@pytest.fixture(params=[1, 4], ids="channels={}".format)
def on_wires(request, monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    monkeypatch.setenv("UNISONO_CHANNELS", str(request.param))

    def start(body, size, *args, **how):
        return run(body, size, ranks="processes", args=args, **how)

    return start


def test_large_messages_both_ways(on_wires):
    assert on_wires(wire_bodies.large_both_ways, 2, 24 << 20) == [True, True]


def test_more_than_sockets_take_before_anybody_asks(on_wires):
    assert on_wires(wire_bodies.unasked, 2, 40, 1 << 20) == [True, True]


def test_last_words_of_a_rank_that_leaves(on_wires):
    assert on_wires(wire_bodies.last_words, 2)[0] == ((1,), True)


def test_any_source(on_wires):
    assert on_wires(wire_bodies.any_source, 3, 20)[0] == [0, 20, 20]


def test_a_blocked_rank_sleeps(on_wires):
    assert on_wires(wire_bodies.blocked, 2, 1.0)[1] < 0.5


def test_killed_in_the_middle_of_a_message(on_wires, tmp_path):
    path = tmp_path / "died_s"
    told = on_wires(wire_bodies.killed_while_it_sends, 2, path, dead={1})[0]
    for peers, late_s in told:
        assert peers == (1,)
        assert late_s < SOON


@pytest.mark.parametrize(("channels", "broken"), [(1, 0), (3, 0), (3, 2)])
def test_a_wire_that_breaks_ends_the_rank_it_led_to(channels, broken):
    """Its link lives on, so nothing else would."""
    with tcp_world(2) as world:
        copies = []
        made = threading.Semaphore(0)
        for transport in world:
            # Before it hands a socket over.
            def dup(peer, channel, sock, transport=transport):
                if channel == broken:
                    copies.append(socket.socket(fileno=os.dup(sock.fileno())))
                made.release()
                return type(transport.messages).add_wire(transport.messages, peer, channel, sock)

            use = transport.use_messages

            def use_watched(messages, use=use, dup=dup):
                use(messages)
                messages.add_wire = dup

            transport.use_messages = use_watched
        use_native(world, WAYS["wires"], [channels] * 2)
        a, b = world
        works(a, b, LARGE)
        for _ in range(2 * channels):
            assert made.acquire(timeout=SOON)
        waiting = [
            each.recv(1 - each.rank, KEY, memoryview(bytearray(8)), 0, None) for each in world
        ]
        for copy in copies:
            copy.shutdown(socket.SHUT_RDWR)
            copy.close()
        for rank, transfer in enumerate(waiting):
            assert transfer.wait_until(Deadline(SOON))
            assert isinstance(transfer.error, LinkDown)
            assert transfer.error.peer == 1 - rank
            assert not transfer.error.left
        assert any("data connection" in transfer.error.reason for transfer in waiting)


def test_who_claims_to_be_on_this_host_has_to_show_its_memory():
    """As two hosts of one name, where process ids and descriptors mean something else."""
    with tcp_world(2) as world:
        everybody = [NativeMessages.make(transport) for transport in world]
        words = [messages.endpoint.split(":") for messages in everybody]
        for rank, messages in enumerate(everybody):
            other = words[1 - rank]
            claimed = [messages.endpoint] * 2
            claimed[1 - rank] = ":".join([*other[:2], "0" * len(other[2]), *other[3:]])
            messages.introduce(claimed, [True, True], crowded=True)
            world[rank].use_messages(messages)
        works(*world)
        assert world[0]._wired == {(1, 1)}


REFERENCE = {"UNISONO_ENGINE": "reference"}
APART = {"UNISONO_SHARED_MEMORY": "0"}


@pytest.mark.parametrize("settings", [[{}, REFERENCE, APART, {}], [APART, APART, REFERENCE]])
def test_ranks_of_all_kinds_in_one_world(tmp_path, settings):
    size = len(settings)
    path = str(tmp_path / "store")
    results = run(wire_bodies.mixed, size, ranks="processes", args=(path, settings))
    for rank, (boxes, least, most) in enumerate(results):
        assert boxes == [peer for peer in range(size) if peer != rank]
        assert least == most == size * (size + 1) / 2
