"""Links over TCP: one listening socket and one I/O thread per rank, connections made lazily.

Each of two ranks may connect to the other. If both dial at once, the connection of the lower rank
stays. One connection per pair carries both directions, so that its end (EOF) cannot overtake data.
If both ranks have the C++ extension, there are further connections for messages, called wires. They
are made the same way and then handed to C++. The link remains for questions, failures and the end
of a rank.

The I/O thread receives all arriving data and finishes sends that the kernel did not accept at once.
It waits for nothing but the selector.

A rank leaves in two steps, so that no data is lost. First it sends everything and a good-bye, and
closes its sockets for writing. Then it reads until the peers have done the same. If a socket is
closed with unread data in it, the kernel resets the connection, and the peer loses unread data.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable

from unisono.base.host import reason_of
from unisono.base.log import get_logger
from unisono.transports.api import Transport
from unisono.transports.messages import Key, Kind, LinkDown
from unisono.transports.tcp.address import TCPAddress, listen
from unisono.transports.tcp.handshake import Dial, Greeting
from unisono.transports.tcp.io_loop import READ, WRITE, Loop
from unisono.transports.tcp.link import CHUNK_BYTES, Link
from unisono.transports.tcp.wire import ACCEPT, REFUSE, Hello
from unisono.transports.transfers import Transfer

_log = get_logger("transports.tcp")

# How long close() goes on sending queued frames, and waits for its peers to close as well. A
# shorter time loses data that a slow peer was about to receive. A longer time makes the exit of a
# job wait for a stopped peer.
_LINGER_S = 2.0

# How long the link has to show why a wire has ended. A rank that ends or leaves ends both.
_EXPLAIN_S = 1.0

# The channel of the link in a hello; wires have the channels from 1 on.
_LINK = 0

# Pause of accept() after an error. Without a pause the loop would spin: the client still waits.
_ACCEPT_PAUSE_S = 0.1

_transports: weakref.WeakSet[TCPTransport] = weakref.WeakSet()

# By thread, because two may fork at the same time.
_held: dict[int, list[TCPTransport]] = {}


class TCPTransport(Transport):
    """Links between processes.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        find: Returns the `address` that another rank published.
        hosts: Addresses to publish; see `unisono.transports.tcp.address.listen`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        find: Callable[[int], str],
        hosts: tuple[str, ...] = ("127.0.0.1",),
    ) -> None:
        super().__init__(rank, world_size)
        self._find = find
        self._token = os.urandom(16)
        self._listeners, port = listen(hosts)
        self.address = TCPAddress(hosts, port, self._token).pack()
        self._links: dict[int, Link] = {}
        self._links_lock = threading.Lock()
        self._released = False
        # These belong to the I/O thread.
        self._outgoing: dict[tuple[int, int], Dial] = {}
        self._failed_dials: dict[int, Dial] = {}
        self._parting: set[Link] = set()
        self._wired: set[tuple[int, int]] = set()
        self._ending: set[socket.socket] = set()
        self._linger_until: float | None = None
        self._chunk = memoryview(bytearray(CHUNK_BYTES))
        self._loop = Loop()
        for listener in self._listeners:
            self._accept_from(listener)
        self._thread = threading.Thread(target=self._run, name=f"unisono-tcp-{rank}", daemon=True)
        _transports.add(self)
        self._thread.start()

    @property
    def name(self) -> str:
        return "tcp"

    def may_wait(self) -> bool:
        return threading.current_thread() is not self._thread and super().may_wait()

    # ---- called from any thread -----------------------------------------------------------

    def _transmit(self, peer: int, key: Key, transfer: Transfer) -> None:
        link = self._link(peer)
        try:
            if link.submit(key, transfer) and link.ready:
                self._loop.later(lambda: self._want_write(link))
        except OSError as error:
            reason = reason_of(error)
            self._loop.later(lambda: self._broken(link, reason))

    def _watch(self, peer: int) -> None:
        self._link(peer)

    def _linked(self) -> list[int]:
        with self._links_lock:
            return [peer for peer, link in self._links.items() if link.ready]

    def unreached(self) -> dict[int, list[str]]:
        # Copies, because the I/O thread changes them. A rank with a link has been reached.
        dials = self._failed_dials.copy()
        for (peer, channel), dial in self._outgoing.copy().items():
            if channel == _LINK:
                dials[peer] = dial
        return {peer: rows for peer, dial in dials.items() if (rows := dial.unreached())}

    makes_wires = True

    def make_wire(self, peer: int, channel: int) -> None:
        self._link(peer)
        self._loop.later(lambda: self._dial_wire(peer, channel + 1))

    def wire_ended(self, peer: int, reason: str) -> None:
        def declare_lost() -> None:
            self._declare_lost(peer, reason)

        self._loop.later(lambda: self._loop.start_timer(declare_lost, _EXPLAIN_S))

    def read_to_end(self, sock: socket.socket) -> None:
        sock.setblocking(False)

        def begin() -> None:
            self._ending.add(sock)
            self._loop.watch(sock, READ, lambda events: self._read_out(sock))

        self._loop.later(begin)

    def _cancel(self, unwanted: Callable[[Transfer], bool], error: BaseException) -> None:
        with self._links_lock:
            links = list(self._links.values())
        for link in links:
            link.cancel(unwanted, error)

    def _shut(self) -> None:
        self._loop.later(self._leave)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _link(self, peer: int) -> Link:
        with self._links_lock:
            link = self._links.get(peer)
            if link is None:
                link = self._links[peer] = Link(peer, self.mailbox, self.on_control, self._chunk)
                if self._released:
                    link.close(_own_end(peer))
                else:
                    self._loop.later(lambda: self._dial(link))
            return link

    # ---- the I/O thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._has_left():
                self._loop.turn()
        except Exception as error:
            _log.exception("the I/O thread of rank %d failed", self.rank)
            for peer in range(self.world_size):
                self.mark_down(LinkDown(peer, f"this rank's I/O thread failed: {error!r}"))
        finally:
            self._release()

    def _leave(self) -> None:
        self._linger_until = time.monotonic() + _LINGER_S
        # Ends the last wait of the loop.
        self._loop.start_timer(lambda: None, _LINGER_S)

    def _has_left(self) -> bool:
        """Continue to leave, if that has begun; return whether nothing is left to do."""
        if self._linger_until is None:
            return False
        links = list(self._links.values())
        for link in links:
            if link not in self._parting and (link.ready or link.pending()):
                self._parting.add(link)
                self._control(link.peer, 0, Kind.GOODBYE, {})
            if link.ready and not link.pending():
                link.end_writing()
        # A peer that has our hello may have a link already, and must not take its end for a crash.
        unanswered = any(
            channel == _LINK and dial.said_hello for (_, channel), dial in self._outgoing.items()
        )
        open_links = any(link.ready or link.pending() for link in links)
        done = not (self._ending or unanswered or open_links)
        return done or time.monotonic() >= self._linger_until

    def _release(self) -> None:
        with self._links_lock:
            self._released = True
            links = list(self._links.values())
        for link in links:
            link.close(_own_end(link.peer))
        for dial in self._outgoing.values():
            dial.cancel()
        self._close_listeners()
        self._loop.close()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _accept_from(self, listener: socket.socket) -> None:
        self._loop.watch(listener, READ, lambda events: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # Probably out of file descriptors. The client waits in the backlog.
                _log.warning("rank %d cannot accept a connection: %s", self.rank, error)
                self._loop.unwatch(listener)
                self._loop.start_timer(lambda: self._accept_from(listener), _ACCEPT_PAUSE_S)
                return
            sock.setblocking(False)
            with contextlib.suppress(OSError):  # the client may be gone already
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Greeting(self._loop, sock, self._greeted)

    def _greeted(self, sock: socket.socket, hello: Hello) -> None:
        """Answer a hello; the connection becomes a link or wire to its rank, is parked, or ends."""
        peer, channel = hello.rank, hello.channel
        known = self._knows(hello)
        if not known or self._has(peer, channel) or self.mailbox.down(peer) is not None:
            # Two ranks that dial each other are normal, so that is no warning.
            level = logging.DEBUG if known else logging.WARNING
            _log.log(level, "rank %d refused a connection that claims rank %d", self.rank, peer)
            with contextlib.suppress(OSError):
                sock.send(REFUSE)
            sock.close()
            return
        dial = self._outgoing.get((peer, channel))
        if dial is not None and self.rank < peer:
            dial.park(sock)
            return
        if dial is not None:
            dial.cancel()
        self._take(peer, channel, sock)

    def _has(self, peer: int, channel: int) -> bool:
        """Whether such a connection exists, or is not wanted."""
        if channel != _LINK:
            return (peer, channel) in self._wired or self.messages is None
        link = self._links.get(peer)
        return link is not None and (link.ready or link.closed)

    def _knows(self, hello: Hello) -> bool:
        return (
            (hello.world_size, hello.peer) == (self.world_size, self.rank)
            and hello.rank != self.rank
            and hello.rank < self.world_size
            and hmac.compare_digest(hello.token, self._token)
        )

    def _take(self, peer: int, channel: int, sock: socket.socket) -> None:
        """Accept the connection of a rank."""
        with contextlib.suppress(OSError):  # the link or wire will detect it
            sock.send(ACCEPT)
        if channel != _LINK:
            self._link(peer)
            self._hand_over(peer, channel, sock)
            return
        with self._links_lock:
            link = self._links.get(peer)
            if link is None:
                link = self._links[peer] = Link(peer, self.mailbox, self.on_control, self._chunk)
        self._establish(link, sock)

    def _dial(self, link: Link) -> None:
        peer = link.peer
        if link.ready or link.closed:
            return

        def done(sock: socket.socket | None, reason: str) -> None:
            if sock is None:
                if not self.has_left(peer):
                    self._failed_dials[peer] = dial
                # This rank never had a connection to the peer, which may have left normally.
                self._drop(link, reason, left=True)
            elif reason:
                self._take(peer, _LINK, sock)
            else:
                self._establish(link, sock)

        try:
            dial = self._make_dial(peer, _LINK, done)
        except Exception as error:
            self._drop(link, f"its address is of no use: {reason_of(error)}")
            return
        dial.start()

    def _make_dial(
        self, peer: int, channel: int, done: Callable[[socket.socket | None, str], None]
    ) -> Dial:
        address = TCPAddress.unpack(self._find(peer))
        hello = Hello(self.world_size, self.rank, peer, channel, address.token)
        dial = self._outgoing[peer, channel] = Dial(self._loop, hello, address, done)
        return dial

    def _dial_wire(self, peer: int, channel: int) -> None:
        if (peer, channel) in self._wired or self.mailbox.down(peer) is not None:
            return

        def done(sock: socket.socket | None, reason: str) -> None:
            def declare_lost() -> None:
                if (peer, channel) not in self._wired:  # nor has the peer made it
                    self._declare_lost(
                        peer, f"data connection {channel} to it was not made: {reason}"
                    )

            if sock is None:
                del self._outgoing[peer, channel]
                self._loop.start_timer(declare_lost, _EXPLAIN_S)
            elif reason:
                self._take(peer, channel, sock)
            else:
                self._hand_over(peer, channel, sock)

        # The link dials first, so a useless address has been detected.
        with contextlib.suppress(Exception):
            self._make_dial(peer, channel, done).start()

    def _declare_lost(self, peer: int, reason: str) -> None:
        if self.mailbox.down(peer) is None:
            self._drop(self._link(peer), reason)

    def _hand_over(self, peer: int, channel: int, sock: socket.socket) -> None:
        """Give a connected socket to C++ as a wire to a rank."""
        self._outgoing.pop((peer, channel), None)
        self._wired.add((peer, channel))
        assert self.messages is not None
        self.messages.add_wire(peer, channel - 1, sock)

    def _read_out(self, sock: socket.socket) -> None:
        try:
            if sock.recv_into(self._chunk):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._loop.unwatch(sock)
        self._ending.discard(sock)
        sock.close()

    def _establish(self, link: Link, sock: socket.socket) -> None:
        """Make a connected socket the link to its peer and send the waiting frames."""
        self._outgoing.pop((link.peer, _LINK), None)
        link.attach(sock)
        self._loop.watch(sock, READ, lambda events: self._serve(link, events))
        self._serve(link, WRITE)

    def _serve(self, link: Link, events: int) -> None:
        if events & READ:
            self._read(link)
        if events & WRITE and link.sock is not None:
            try:
                left = link.write()
            except OSError as error:
                self._broken(link, reason_of(error))
            else:
                self._loop.want(link.sock, READ | WRITE if left else READ)

    def _read(self, link: Link) -> bool:
        """Receive what has arrived; return whether there may be more."""
        try:
            return link.read()
        except EOFError:
            self._drop(link, "its connection was closed: the process ended")
        except (OSError, ValueError) as error:
            self._drop(link, reason_of(error))
        return False

    def _broken(self, link: Link, reason: str) -> None:
        """End a link that cannot be written to, once everything that arrived has been read."""
        while link.sock is not None and self._read(link):
            pass
        self._drop(link, reason)

    def _want_write(self, link: Link) -> None:
        if link.sock is not None:
            self._loop.want(link.sock, READ | WRITE)

    def _drop(self, link: Link, reason: str, *, left: bool = False) -> None:
        self._outgoing.pop((link.peer, _LINK), None)
        for key in [key for key in self._outgoing if key[0] == link.peer]:
            self._outgoing.pop(key).cancel()
        if link.closed:
            return
        if link.sock is not None:
            self._loop.unwatch(link.sock)
        established = link.sock is not None
        error = self.mailbox.down(link.peer) or self.end_of(link.peer, reason, left)
        link.close(error)
        if established and not error.left:
            self.spread(error)
        else:
            self.mark_down(error)

    def hold(self) -> bool:
        """Stop the I/O thread between two handlers, when every socket has an owner."""
        if not self._loop.hold():
            return False
        if self.messages is not None:
            self.messages.native.hold()
        return True

    def release(self) -> None:
        """Let the I/O thread continue; called by the thread that called `hold`."""
        if self.messages is not None:
            self.messages.native.release()
        self._loop.release()

    def close_in_child(self) -> None:
        """Close a forked child's copies of the sockets.

        Otherwise peers would not see the end of a killed parent while its child lives on.
        """
        self._closed = True
        if self.messages is not None:
            self.messages.native.close_in_child()
        for dial in self._outgoing.values():
            dial.close_spare()
        self._close_listeners()
        self._loop.close()


def _own_end(peer: int) -> LinkDown:
    return LinkDown(peer, "this rank closed its transport")


def _hold_before_fork() -> None:
    # Inside a handler a socket may have no owner yet through which the child would find it.
    _held[threading.get_ident()] = [each for each in list(_transports) if each.hold()]


def _release_after_fork() -> None:
    for transport in _held.pop(threading.get_ident()):
        transport.release()


def _close_in_child() -> None:
    _release_after_fork()
    for transport in list(_transports):
        transport.close_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_hold_before_fork,
        after_in_parent=_release_after_fork,
        after_in_child=_close_in_child,
    )
