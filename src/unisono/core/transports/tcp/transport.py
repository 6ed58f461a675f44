"""Links over TCP: one listening socket and one I/O thread per rank, connections made lazily.

Each of two ranks may connect to the other. If both dial at once, the connection of the lower rank
stays. One connection per pair carries both directions, so that its end (EOF) cannot overtake data.
If C++ moves the messages, there are further connections for them, called wires. They are made the
same way and then handed to C++. The link carries questions, failures and the end of a rank alone.

The I/O thread receives all arriving data and finishes sends that the kernel did not accept at once.
It waits for nothing but the selector.

A rank leaves in two steps, so that no data is lost. First it sends everything and a good-bye, and
closes its sockets for writing. Then it reads until the peers have done the same. If a socket is
closed with unread data in it, the kernel resets the connection, and the peer loses unread data.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unisono.core.base import config
from unisono.core.base.host import reason_of
from unisono.core.base.log import get_logger
from unisono.core.base.net.silence import silence_on
from unisono.core.base.net.tls import (
    Secrets,
    TlsPolicy,
    TlsRule,
    has_unread,
    key_shown_by,
    protection_of,
    rule_for,
    secret_of,
    uses_certificates,
)
from unisono.core.stores import Store
from unisono.core.stores.prefix import innermost
from unisono.core.transports.api import Transport, on_one_host
from unisono.core.transports.messages import Key, LinkDown
from unisono.core.transports.tcp.address import TCPAddress, listen
from unisono.core.transports.tcp.dials import LINK, Dials
from unisono.core.transports.tcp.handshake import Greetings
from unisono.core.transports.tcp.host_watch import HostWatch
from unisono.core.transports.tcp.io_loop import READ, WRITE
from unisono.core.transports.tcp.link import Link
from unisono.core.transports.tcp.status import Client, answer_client, show_port
from unisono.core.transports.tcp.viewer import VIEWERS, key_of, key_shown, secret_by
from unisono.core.transports.tcp.wire import ACCEPT, CLOCK, INSPECT, RECORDS, REFUSE, Hello
from unisono.core.transports.tcp.wire_maker import WireMaker
from unisono.core.transports.transfers import Transfer
from unisono.errors import StoreError

_log = get_logger("transports.tcp")

# How long close() goes on sending queued frames, and waits for its peers to close as well. A
# shorter time loses data that a slow peer was about to receive. A longer time makes the exit of a
# job wait for a stopped peer.
_LINGER_S = 2.0

# How long the end of a rank is kept back, in which the other ranks report what they know of it. A
# rank that waits for a stopped rank waits for all of it. On a busy machine a shorter time blames a
# rank that ended because of another rank.
_EXPLAIN_S = 0.5

# How many linked ranks are asked. All of them would send n**3 messages if n ranks ended.
_MOST_ASKED = 64

# Pause of accept() after an error. Without a pause the loop would spin: the client still waits.
_ACCEPT_PAUSE_S = 0.1

_transports: weakref.WeakSet[TCPTransport] = weakref.WeakSet()

# By thread, because two may fork at the same time.
_held: dict[int, list[TCPTransport]] = {}


@dataclass
class _Leave:
    """The end of a transport: its deadline, and the links that have sent a good-bye."""

    until: float
    told: set[Link] = field(default_factory=set)


class TCPTransport(Transport):
    """Links between processes.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        find: Returns the `address` that another rank published.
        hosts: Addresses to publish; see `unisono.core.transports.tcp.address.listen`.
    """

    wires: WireMaker
    allows_cpp = True

    def __init__(
        self,
        rank: int,
        world_size: int,
        find: Callable[[int], str],
        hosts: tuple[str, ...] = ("127.0.0.1",),
    ) -> None:
        super().__init__(rank, world_size)
        rule = rule_for(config.get("UNISONO_TOKEN"))
        self._listeners, port = listen(hosts)
        mine = TCPAddress(hosts, port, os.urandom(16))
        self.address = mine.pack()
        self._links: dict[int, Link] = {}
        self._links_lock = threading.RLock()
        self._released = False
        self._leave: _Leave | None = None
        self._loop = HostWatch()
        self._dials = Dials(rank, world_size, find, self._loop, self._policy)
        self.wires = WireMaker(self._loop, self._dials, self.down, self._link, self._declare_lost)
        policy = TlsPolicy(rule, self._policy_secrets(mine))
        policy.secrets.extend(map(secret_by, self._viewer_keys()))
        self._greetings = Greetings(self._loop, policy, self._greeted)
        for listener in self._listeners:
            self._accept_from(listener)
        self._thread = threading.Thread(target=self._run, name=f"unisono-tcp-{rank}", daemon=True)
        _transports.add(self)
        self._thread.start()

    @property
    def name(self) -> str:
        return "tcp"

    @property
    def protection(self) -> str:
        """What the ranks of a world must agree on about encryption; "" for none."""
        if self._greetings.tls.rule is TlsRule.NONE:
            return ""
        if uses_certificates():
            return "TLS-by-certificate"
        is_all = self._greetings.tls.rule is TlsRule.ALL
        return "TLS-by-token-everywhere" if is_all else "TLS-by-token"

    def protections(self) -> dict[int, str]:
        with self._links_lock:
            socks = {peer: link.sock for peer, link in self._links.items() if link.ready}
        return {peer: protection_of(sock) for peer, sock in socks.items() if sock is not None}

    def _policy(self, address: TCPAddress) -> TlsPolicy:
        """Return how connections to an address are encrypted."""
        return TlsPolicy(self._greetings.tls.rule, self._policy_secrets(address))

    def _policy_secrets(self, address: TCPAddress) -> Secrets:
        job_token = config.get("UNISONO_TOKEN").encode()
        return [secret_of(job_token, "rank", address.token)] if job_token else []

    def may_wait(self) -> bool:
        return threading.current_thread() is not self._thread and super().may_wait()

    # ---- called from any thread -----------------------------------------------------------

    def transmit(self, peer: int, key: Key, transfer: Transfer) -> None:
        link = self._link(peer)
        try:
            if link.submit(key, transfer) and link.ready:
                self._loop.later(lambda: self._want_write(link))
        except OSError as error:
            reason = reason_of(error)
            self._loop.later(lambda: self._broken(link, reason))

    def watch(self, peer: int) -> None:
        self._link(peer)

    def linked(self) -> list[int]:
        with self._links_lock:
            return [peer for peer, link in list(self._links.items()) if link.ready]

    def _show(self, store: Store, addresses: Sequence[str]) -> None:
        job_token, server = config.get("UNISONO_TOKEN"), innermost(store)
        is_auto = config.get("UNISONO_TLS") == "auto"
        is_far = not on_one_host(self.hosts, self.trips_us)
        if is_far and is_auto and not job_token and getattr(server, "has_token", False):
            _log.warning(
                "connections between ranks are not encrypted: the store has a token, but "
                "UNISONO_TOKEN is not set"
            )
        # Other hosts can only read a store with a server, and only a job's token opens a rank.
        if job_token and hasattr(server, "host"):
            shown = [TCPAddress.unpack(text).without_token().pack() for text in addresses]
            # The host of the store may have closed it already.
            with contextlib.suppress(StoreError):
                store.set(VIEWERS, "\n".join(shown))

    def unreached(self) -> dict[int, list[str]]:
        return self._dials.unreached()

    def silence_of(self, peer: int) -> str:
        link = self._links.get(peer)
        sock = None if link is None else link.sock
        return "" if sock is None else silence_on(sock)

    def cancel_frames(self, unwanted: Callable[[Transfer], bool], error: BaseException) -> None:
        with self._links_lock:
            links = list(self._links.values())
        for link in links:
            link.cancel(unwanted, error)

    def shut(self) -> None:
        self._loop.later(self._begin_to_leave)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _link(self, peer: int) -> Link:
        with self._links_lock:
            link, is_new = self._links.get(peer), False
            if link is None:
                link, is_new = self._new_link(peer)
            if is_new and self._released:
                link.close(_own_end(peer))
            elif is_new:
                self._loop.later(lambda: self._dial(link))
            return link

    def _new_link(self, peer: int) -> tuple[Link, bool]:
        """Return the link to a rank, and whether it is new; under the lock."""
        new = Link(peer, self.messages, self.on_control, self._loop.chunk)
        # A signal handler may have made the link meanwhile.
        link = self._links.setdefault(peer, new)
        return link, link is new

    # ---- the I/O thread -------------------------------------------------------------------

    def _run(self) -> None:
        show_port(TCPAddress.unpack(self.address).port)
        try:
            while not self._has_left():
                self._loop.turn()
        except Exception as error:
            _log.exception("the I/O thread of rank %d failed", self.rank)
            for peer in range(self.world_size):
                self.mark_down(LinkDown(peer, f"this rank's I/O thread failed: {error!r}"))
        finally:
            self._release()

    def _begin_to_leave(self) -> None:
        self._leave = _Leave(time.monotonic() + _LINGER_S)
        # Ends the last wait of the loop.
        self._loop.start_timer(lambda: None, _LINGER_S)

    def _has_left(self) -> bool:
        """Continue to leave, if that has begun; return whether nothing is left to do."""
        if self._leave is None:
            return False
        links = list(self._links.values())
        for link in links:
            if link not in self._leave.told and (link.ready or link.pending()):
                self._leave.told.add(link)
                self.good_bye(link.peer)
            if link.ready and not link.pending():
                link.end_writing()
        # A peer that has our hello may have a link already, and must not take its end for a crash.
        open_links = any(link.ready or link.pending() for link in links)
        done = not (self.wires.are_ending() or self._dials.are_unanswered() or open_links)
        return done or time.monotonic() >= self._leave.until

    def _release(self) -> None:
        with self._links_lock:
            self._released = True
            links = list(self._links.values())
        for link in links:
            link.close(_own_end(link.peer))
        self._dials.cancel_all()
        self._close_listeners()
        self._greetings.end()
        self._loop.close()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _accept_from(self, listener: socket.socket) -> None:
        self._loop.watch(listener, READ, lambda events: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        while self._greetings.has_room():
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # Probably out of file descriptors. The client waits in the backlog.
                self._greetings.warn(f"rank {self.rank} cannot accept a connection: {error}")
                break
            sock.setblocking(False)
            with contextlib.suppress(OSError):  # the client may be gone already
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greetings.add(sock)
        self._loop.unwatch(listener)
        self._loop.start_timer(lambda: self._accept_from(listener), _ACCEPT_PAUSE_S)

    def _greeted(self, sock: socket.socket, hello: Hello) -> None:
        """Answer a hello; the connection becomes a link or wire to its rank, is parked, or ends."""
        peer, channel = hello.rank, hello.channel
        tls, is_viewer = self._greetings.tls, channel in (INSPECT, RECORDS, CLOCK)
        if is_viewer and not tls.forbids(sock, is_stranger=True):
            client = Client(sock, hello, key_shown(hello, self._viewer_keys()))
            answer_client(self, self._loop, client, self._dials.addresses)
            return
        # The key of a viewer is made of what this rank publishes; it opens no link.
        is_rank = key_shown_by(sock) in ("", "rank") and not tls.forbids(sock)
        known = is_rank and self._knows(hello)
        if not known or self._has(peer, channel) or self.down(peer) is not None:
            # Two ranks that dial each other are normal, so that is no warning.
            text = f"rank {self.rank} refused a connection that claims rank {peer}"
            if known:
                _log.debug("%s", text)
            else:
                self._greetings.warn(text)
            with contextlib.suppress(OSError):
                sock.send(REFUSE)
            sock.close()
            return
        dial = self._dials.find(peer, channel)
        if dial is not None and self.rank < peer:
            dial.park(sock)
            return
        if dial is not None:
            dial.cancel()
        self._take(peer, channel, sock)

    def _has(self, peer: int, channel: int) -> bool:
        """Whether such a connection exists, or is not wanted."""
        if channel != LINK:
            return self.wires.has(peer, channel)
        link = self._links.get(peer)
        return link is not None and (
            link.ready or link.closed or peer in self._questions.about_ends
        )

    def _knows(self, hello: Hello) -> bool:
        return (
            (hello.world_size, hello.peer) == (self.world_size, self.rank)
            and hello.rank != self.rank
            and hello.rank < self.world_size
            and self._has_token(hello)
        )

    def _has_token(self, hello: Hello) -> bool:
        return hmac.compare_digest(hello.token, TCPAddress.unpack(self.address).token)

    def _viewer_keys(self) -> list[bytes]:
        """Return the keys that open this rank for a viewer."""
        job_token, mine = config.get("UNISONO_TOKEN"), TCPAddress.unpack(self.address)
        return [mine.token, *([key_of(job_token, mine.without_token())] if job_token else [])]

    def _take(self, peer: int, channel: int, sock: socket.socket) -> None:
        """Accept the connection of a rank."""
        if channel != LINK:
            self.wires.accept(peer, channel, sock)
            return
        with contextlib.suppress(OSError):  # the link will detect it
            sock.send(ACCEPT)
        with self._links_lock:
            link = self._links.get(peer) or self._new_link(peer)[0]
        self._establish(link, sock)

    def _dial(self, link: Link) -> None:
        peer = link.peer
        if link.ready or link.closed or peer in self._questions.about_ends:
            return

        def done(sock: socket.socket | None, reason: str) -> None:
            if sock is None:
                self._dials.remove(peer, LINK, failed=not self.messages.has_left(peer))
                # This rank never had a connection to the peer, which may have left normally.
                self._drop(link, reason, left=True)
            elif reason:
                self._take(peer, LINK, sock)
            else:
                self._establish(link, sock)

        try:
            dial = self._dials.make(peer, LINK, done)
        except Exception as error:
            self._drop(link, f"its address is of no use: {reason_of(error)}")
            return
        dial.start()

    def _declare_lost(self, peer: int, reason: str) -> None:
        if self.down(peer) is None:
            self._drop(self._link(peer), reason)

    def _establish(self, link: Link, sock: socket.socket) -> None:
        """Make a connected socket the link to its peer and send the waiting frames."""
        self._dials.remove(link.peer, LINK)
        link.attach(sock)
        self._loop.watch(sock, READ, lambda events: self._serve(link, events))
        self._loop.watch_host(sock, lambda reason: self._host_lost(link.peer, reason))
        self._serve(link, READ | WRITE if has_unread(sock) else WRITE)

    def _serve(self, link: Link, events: int) -> None:
        if events & READ and link.sock is not None:
            self._read(link)
            if link.sock is not None and has_unread(link.sock):
                self._loop.later(lambda: self._serve(link, READ))
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
        self._dials.remove(link.peer, LINK)
        self._dials.cancel(link.peer)
        if link.closed or link.peer in self._questions.about_ends:
            return
        established = link.sock is not None
        if link.sock is not None:
            self._loop.unwatch(link.sock)
        link.disconnect()
        self._ask_for_cause(link, lambda: self._end(link, reason, left, established))

    def _host_lost(self, peer: int, reason: str) -> None:
        """End all ranks that share the host of a rank, unless their own links show a living host.

        The other ranks are not asked for a cause, because no failure of a rank ends a host.
        """
        lost = [each for each in self._dials.beside(peer) if each == peer or not self._hears(each)]
        for each in lost:
            link = self._links.get(each)
            if link is not None and link.sock is not None:
                self._loop.unwatch(link.sock)
                link.disconnect()
        for each in lost:
            self._dials.cancel(each)
            error = LinkDown(each, reason, peers=lost)
            if self._leave is None:
                self.spread(error)
            else:
                self.mark_down(error)
            if (link := self._links.get(each)) is not None:
                link.close(error)

    def _hears(self, peer: int) -> bool:
        """Whether a rank has ended, or its link shows that its host lives."""
        link = self._links.get(peer)
        sock = None if link is None else link.sock
        return self.down(peer) is not None or (sock is not None and self._loop.hears(sock))

    def _ask_for_cause(self, link: Link, end: Callable[[], None]) -> None:
        """Call `end` when the linked ranks have sent what they know of the end of a rank.

        The rank may have ended because of another rank, whose end has not been detected here. The
        ranks answer after they have sent everything else.
        """
        for other in self._questions.about_ends.values():
            other.drop(link.peer)
        # At the normal end of a world every link ends. That needs no question.
        needless = self._leave is not None or self.down(link.peer) is not None
        linked = [] if needless else self.linked()[:_MOST_ASKED]
        question = self._questions.about_ends[link.peer] = self.inquire(0, 0, linked)

        def end_once() -> None:
            if self._questions.about_ends.pop(link.peer, None) is not None:
                self._loop.stop_timer(end_once)
                self.close_question(question)
                end()

        if question.done():
            end_once()
            return
        self._loop.start_timer(end_once, _EXPLAIN_S)
        question.add_callback(lambda _: self._loop.later(end_once))

    def _end(self, link: Link, reason: str, left: bool, established: bool) -> None:
        """Record the end of the rank of a link, and end its transfers."""
        # While this rank leaves, its peers answer its good-bye: they close their links, too.
        spreads = established and self._leave is None
        link.close(self.ended(link.peer, reason, left=left, spreads=spreads))

    def _after_all_arrivals(self, job: Callable[[], object]) -> None:
        # The second turn looks at all sockets again before it runs the job.
        self._loop.later(lambda: self._loop.later(job))

    def hold(self) -> bool:
        """Stop the I/O thread between two handlers, when every socket has an owner."""
        if not self._loop.hold():
            return False
        self.messages.before_fork()
        return True

    def release(self) -> None:
        """Let the I/O thread continue; called by the thread that called `hold`."""
        self.messages.after_fork()
        self._loop.release()

    def close_in_child(self) -> None:
        """Close a forked child's copies of the sockets.

        Otherwise peers would not see the end of a killed parent while its child lives on.
        """
        self.closed = True
        self.messages.close_in_child()
        self._dials.close_spares()
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
