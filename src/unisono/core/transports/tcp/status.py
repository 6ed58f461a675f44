"""Answers of a rank to a client that looks at the job: `unisono top`, `stacks` and `trace`.

The client connects to the socket on which the rank listens for ranks. The thread that receives
answers, so the rank may be in any call. The answer has the tokens of all ranks, so that the client
can ask the ranks of other hosts. A client gets an answer if it proves that it has a key. A local
process of the same user needs none, because it could read the memory of this process anyway.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.core.base.log import get_logger
from unisono.core.base.net.tls import has_unsent
from unisono.core.base.source.where import place_of_thread, stack_of
from unisono.core.platform.peer_user import user_of_peer
from unisono.core.platform.posix import effective_user
from unisono.core.platform.processes import name_thread, resident_bytes
from unisono.core.recorder.flight_recorder import encode_short
from unisono.core.recorder.snapshot import live_records
from unisono.core.transports.tcp.io_loop import WRITE, IOLoop
from unisono.core.transports.tcp.viewer import NO_KEY, sealed
from unisono.core.transports.tcp.wire import CLOCK, CLOCK_TIME, RECORDS, REFUSE, Hello

if TYPE_CHECKING:
    from unisono.core.transports.api import Transport

_log = get_logger("transports.tcp")

THREAD = "unisono:"
"""The name of the thread that receives, before the port on which the rank listens.

Clients of the same user find the port in /proc. A name has at most 15 bytes.
"""

# How long a client may take to read the answer. A client that reads nothing would keep a socket.
_READ_S = 5.0


def show_port(port: int) -> None:
    """Give the calling thread the name by which clients find the port."""
    name_thread(f"{THREAD}{port}")


class Client(NamedTuple):
    """A connection of a client.

    Attributes:
        sock: The connection.
        hello: The question; its channel is INSPECT, RECORDS or CLOCK.
        key: The key of which the client has shown a proof, or NO_KEY.
    """

    sock: socket.socket
    hello: Hello
    key: bytes


def answer_client(
    transport: Transport, loop: IOLoop, client: Client, addresses: Callable[[], list[str]]
) -> None:
    """Send what a client asks for, if it may have it, and hang up; on the I/O thread."""
    answer = REFUSE
    try:
        if client.key != NO_KEY or user_of_peer(client.sock) == effective_user():
            data = _answer(transport, client.hello.channel, addresses)
            answer = sealed(client.hello, client.key, data)
    except Exception as error:
        # For example, the addresses are not known before the ranks have met. An exception would end
        # the I/O thread, and with it the job.
        _log.info("rank %d cannot answer a client: %r", transport.rank, error)
    _Reply(loop, client.sock, answer)


def _answer(transport: Transport, channel: int, addresses: Callable[[], list[str]]) -> bytes:
    if channel == CLOCK:
        return CLOCK_TIME.pack(time.monotonic_ns())
    if channel == RECORDS:
        return encode_short(live_records(transport.rank))
    state = state_of(transport) | {"addresses": addresses()}
    state["job"] = blake2b(repr(state["addresses"]).encode(), digest_size=4).hexdigest()
    return json.dumps(state).encode()


def state_of(transport: Transport) -> dict[str, Any]:
    """Return the state of a rank: its groups, its place, its stacks and its memory, for JSON."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    main = transport.calls.thread
    return {
        "rank": transport.rank,
        "world_size": transport.world_size,
        "host": platform.node(),
        "pid": os.getpid(),
        "program": os.path.basename(sys.argv[0]),
        "pids": {rank: pid for rank, (pid, *_) in enumerate(transport.messages.addresses) if pid},
        "at_s": time.time(),
        "rss_bytes": resident_bytes(os.getpid()),
        "place": place_of_thread(main),
        "between_hosts": transport.protection,
        "groups": transport.calls.groups(),
        "stacks": [
            {"thread": threads.get(thread, "?"), "calls": thread == main, "frames": stack_of(frame)}
            for thread, frame in sys._current_frames().items()
            if not threads.get(thread, "").startswith("unisono-")
        ],
    }


class _Reply:
    """An answer under way; the socket is closed at its end."""

    def __init__(self, loop: IOLoop, sock: socket.socket, data: bytes) -> None:
        self._loop = loop
        self._sock = sock
        self._left = memoryview(data)
        loop.watch(sock, WRITE, self._write)
        loop.start_timer(self._end, _READ_S)

    def _write(self, events: int) -> None:
        try:
            self._left = self._left[self._sock.send(self._left) :]
        except BlockingIOError:
            return
        except OSError:
            self._end()
            return
        if not self._left and not has_unsent(self._sock):
            self._end()

    def _end(self) -> None:
        self._loop.stop_timer(self._end)
        self._loop.unwatch(self._sock)
        self._sock.close()
