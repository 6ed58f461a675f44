"""Links over TCP: one listening socket and one I/O thread per rank, connections made lazily.

Any of two ranks may call the other; if both call at once, the call of the lower rank stands.
One connection per pair carries both directions, so that its end (EOF) cannot overtake data.

The I/O thread takes in everything that arrives and finishes sends that the kernel did not take
at once. It never waits for anything but the selector.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from unisono.base.log import get_logger
from unisono.errors import HandshakeError
from unisono.transports.address import TCPAddress, listen
from unisono.transports.api import Failure, Key, Kind, LinkDown, Transfer, Transport
from unisono.transports.tcp_link import Link
from unisono.transports.wire import ACCEPT, CROSSED, HELLO, REFUSE, Hello

__all__ = ["TCPTransport"]

_log = get_logger("transports.tcp")

# How long close() goes on sending what isend left in the outbox. Shorter loses data that a slow
# peer was about to take; longer makes the exit of a job wait for a peer that is stopped.
_LINGER_S = 2.0

_transports: weakref.WeakSet[TCPTransport] = weakref.WeakSet()


class TCPTransport(Transport):
    """Links between processes.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        find: Returns the `address` that another rank published.
        hosts: Addresses to publish; see `unisono.transports.address.listen`.
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
        self._listener, port = listen(hosts)
        self.address = TCPAddress(hosts, port, self._token).pack()
        self._links: dict[int, Link] = {}
        self._calls: dict[int, _Call] = {}
        self._links_lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._todo: deque[Callable[[], None]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._woken)
        self._thread = threading.Thread(
            target=self._run, name=f"unisono-tcp-{rank}", daemon=True
        )
        _transports.add(self)
        self._thread.start()

    @property
    def name(self) -> str:
        return "tcp"

    # ---- called from any thread -----------------------------------------------------------

    def _transmit(self, peer: int, key: Key, transfer: Transfer) -> None:
        link = self._link(peer)
        try:
            if link.submit(key, transfer) and link.ready:
                self._later(lambda: self._want_write(link))
        except OSError as error:
            reason = _reason(error)
            self._later(lambda: self._drop(link, reason))

    def _watch(self, peer: int) -> None:
        self._link(peer)

    def _withdraw(self, unwanted: Callable[[Transfer], bool], error: Failure | None) -> None:
        with self._links_lock:
            links = list(self._links.values())
        for link in links:
            link.withdraw(unwanted, error)

    def _shut(self) -> None:
        with self._links_lock:
            links = [link for link in self._links.values() if link.ready]
        for link in links:
            self._control(link.peer, 0, Kind.GOODBYE, {})
        self._later(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _link(self, peer: int) -> Link:
        with self._links_lock:
            link = self._links.get(peer)
            if link is None:
                link = self._links[peer] = Link(peer, self.mailbox, self.on_control)
                call = self._calls[peer] = _Call(self, link, self._find(peer))
                self._later(call.next_address)
            return link

    def _later(self, job: Callable[[], None]) -> None:
        """Run `job` on the I/O thread."""
        self._todo.append(job)
        # A full pipe wakes as well; a closed one means that the thread has ended.
        with contextlib.suppress(OSError):
            self._wake_out.send(b"!")

    # ---- the I/O thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            linger_until = None
            while True:
                timeout = None
                if self._closed:
                    linger_until = linger_until or time.monotonic() + _LINGER_S
                    timeout = linger_until - time.monotonic()
                    if timeout <= 0 or not any(link.pending() for link in list(self._links.values())):
                        break
                for key, mask in self._selector.select(timeout):
                    key.data(mask)
                while self._todo:
                    self._todo.popleft()()
        except Exception as error:
            _log.exception("the I/O thread of rank %d failed", self.rank)
            for peer in range(self.world_size):
                self.mark_down(LinkDown(peer, f"this rank's I/O thread failed: {error!r}"))
        finally:
            self._release()

    def _release(self) -> None:
        for link in list(self._links.values()):
            link.close(LinkDown(link.peer, "this rank closed its transport"))
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._wake_out.close()
        self._selector.close()

    def _woken(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)

    def _accept(self, mask: int) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of file descriptors, most likely. The caller waits in the backlog.
                _log.warning("rank %d cannot accept a connection: %s", self.rank, error)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(sock, selectors.EVENT_READ, _Greeting(self, sock))

    def greeted(self, sock: socket.socket, hello: Hello) -> None:
        """Answer a caller; the connection becomes the link to its rank, or ends."""
        answer, peer = self._judge(hello)
        self._selector.unregister(sock)
        with contextlib.suppress(OSError):
            sock.send(answer)
        if answer is not ACCEPT:
            sock.close()
            return
        with self._links_lock:
            link = self._links.get(peer)
            if link is None:
                link = self._links[peer] = Link(peer, self.mailbox, self.on_control)
            call = self._calls.pop(peer, None)
        if call is not None:
            call.cancel()
        self.establish(link, sock)

    def _judge(self, hello: Hello) -> tuple[bytes, int]:
        wanted = (self.world_size, self.rank, self._token)
        if (hello.world_size, hello.peer, hello.token) != wanted or hello.rank == self.rank:
            _log.warning("rank %d refused a caller with a wrong hello", self.rank)
            return REFUSE, -1
        peer = hello.rank
        with self._links_lock:
            link = self._links.get(peer)
            calling = peer in self._calls
        if self.mailbox.down(peer) is not None or (link is not None and link.ready):
            return REFUSE, peer
        # Both called: the lower rank's call stands.
        return (CROSSED if calling and self.rank < peer else ACCEPT), peer

    def establish(self, link: Link, sock: socket.socket) -> None:
        """Make a connected socket the link to its peer and send what waits for it."""
        with self._links_lock:
            self._calls.pop(link.peer, None)
        link.attach(sock)
        self._selector.register(sock, selectors.EVENT_READ, lambda mask: self._serve(link, mask))
        self._serve(link, selectors.EVENT_WRITE)

    def unreachable(self, link: Link, reason: str) -> None:
        """Give up a peer that no address leads to."""
        self._drop(link, reason)

    def _serve(self, link: Link, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                link.read()
            if mask & selectors.EVENT_WRITE and link.sock is not None:
                left = link.write()
                self._want(link, selectors.EVENT_READ | (selectors.EVENT_WRITE if left else 0))
        except EOFError:
            self._drop(link, "its connection was closed: the process ended")
        except (OSError, ValueError) as error:
            self._drop(link, _reason(error))

    def _want_write(self, link: Link) -> None:
        self._want(link, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _want(self, link: Link, events: int) -> None:
        if link.sock is not None:
            key = self._selector.get_key(link.sock)
            if key.events != events:
                self._selector.modify(link.sock, events, key.data)

    def _drop(self, link: Link, reason: str) -> None:
        if link.sock is not None:
            self._selector.unregister(link.sock)
        error = self.mailbox.down(link.peer) or LinkDown(link.peer, reason)
        link.close(error)
        self.mark_down(error)


class _Greeting:
    """An accepted connection until its hello is complete."""

    def __init__(self, transport: TCPTransport, sock: socket.socket) -> None:
        self._transport = transport
        self._sock = sock
        self._data = b""

    def __call__(self, mask: int) -> None:
        try:
            received = self._sock.recv(HELLO.size - len(self._data))
            if not received:
                raise ConnectionResetError
            self._data += received
            if len(self._data) < HELLO.size:
                return
            hello = Hello.parse(self._data)
        except BlockingIOError:
            return
        except (OSError, HandshakeError) as error:
            _log.info("a caller went away before its hello: %s", error)
            self._transport._selector.unregister(self._sock)
            self._sock.close()
            return
        self._transport.greeted(self._sock, hello)


class _Call:
    """An outgoing connection until the peer has answered; tries one address after another."""

    def __init__(self, transport: TCPTransport, link: Link, address: str) -> None:
        self._transport = transport
        self._link = link
        self._address = TCPAddress.unpack(address)
        self._hosts = deque(self._address.hosts)
        self._errors: list[str] = []
        self._sock: socket.socket | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Stop calling; the peer's own call was accepted."""
        self._cancelled = True
        self._hang_up()

    def next_address(self) -> None:
        """Call the next address; without one, give the peer up."""
        self._hang_up()
        if self._cancelled:
            return
        if not self._hosts:
            self._transport.unreachable(self._link, "; ".join(self._errors))
            return
        host, port = self._hosts.popleft(), self._address.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._errors.append(f"{host}:{port} did not answer")
        try:
            self._sock = sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(BlockingIOError):
                sock.connect((host, port))
            self._transport._selector.register(sock, selectors.EVENT_WRITE, self._connected)
        except OSError as error:
            self._failed(_reason(error))

    def _connected(self, mask: int) -> None:
        sock, transport = self._sock, self._transport
        assert sock is not None
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._failed(os.strerror(code))
            return
        hello = Hello(transport.world_size, transport.rank, self._link.peer, self._address.token)
        try:
            sock.send(hello.pack())
            transport._selector.modify(sock, selectors.EVENT_READ, self._answered)
        except OSError as error:
            self._failed(_reason(error))

    def _answered(self, mask: int) -> None:
        assert self._sock is not None
        try:
            answer = self._sock.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            self._failed(_reason(error))
            return
        if answer == ACCEPT:
            sock, self._sock = self._sock, None
            self._transport._selector.unregister(sock)
            self._transport.establish(self._link, sock)
        elif answer == CROSSED:
            self._transport._calls.pop(self._link.peer, None)
            self.cancel()
        else:
            self._failed("refused this rank" if answer else "hung up during the handshake")

    def _failed(self, reason: str) -> None:
        host, port = self._address.hosts[len(self._errors) - 1], self._address.port
        self._errors[-1] = f"{host}:{port}: {reason}"
        self.next_address()

    def _hang_up(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._transport._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None


def _reason(error: BaseException) -> str:
    """Return the operating system's words without the error number."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _close_in_child() -> None:
    """Close a forked child's copies of the sockets.

    Otherwise peers would not see the end of a killed parent while its child lives on.
    """
    for transport in _transports:
        transport._closed = True
        links = [link.sock for link in transport._links.values() if link.sock is not None]
        for sock in [transport._listener, transport._wake_in, transport._wake_out, *links]:
            sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
