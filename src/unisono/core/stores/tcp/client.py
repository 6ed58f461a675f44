"""TCPStore: a store on a server, in torch's TCPStore protocol."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from unisono.core.base import config
from unisono.core.base.deadline import Deadline, Timeout, to_seconds
from unisono.core.base.log import get_logger
from unisono.core.base.net.sockets import format_address, listen, listen_on_fd, listening_host
from unisono.core.stores.api import (
    DEFAULT_TIMEOUT,
    Store,
    Value,
    barrier_timeout,
    check_host,
    check_integer,
    check_key,
    check_keys,
    check_value,
    check_world_size,
    keys_timeout,
)
from unisono.core.stores.table import checked_sum
from unisono.core.stores.tcp.connection import ConnectionPool
from unisono.core.stores.tcp.handshake import TOKEN_HINT
from unisono.core.stores.tcp.native_server import start_server
from unisono.core.stores.tcp.server import ServerOptions, StoreServer
from unisono.core.stores.tcp.token import REFUSAL_KEY, REFUSED_KEY
from unisono.core.stores.tcp.wire import MAX_VALUE_BYTES, READY, RequestOp
from unisono.errors import (
    InvalidArgumentError,
    QueueEmptyError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
)

# torch puts these before user keys, so a torch program on the same server finds our keys.
_KEY_PREFIX = "/"
_INIT_KEY = "init/"
_FORGOTTEN = b"-"
_POLL_S = 0.01
# How long ranks are waited for after a host was refused: it may be of another job.
_REFUSAL_GRACE_S = 10.0
_LOG = get_logger("stores.tcp")
_MAX_PORT = 65535


class RefusalGrace:
    """The time that ranks still have to come after the server has refused a host."""

    def __init__(self) -> None:
        self._limit: Deadline | None = None

    def over(self, refused_client: Callable[[], str]) -> str:
        """Return the address of the host if the time is over, which begins at its refusal."""
        client = refused_client()
        if client and self._limit is None:
            self._limit = Deadline(_REFUSAL_GRACE_S)
        return client if self._limit is not None and self._limit.expired() else ""


class TCPStore(Store):
    """A store on a TCP server, which rank 0 (or the launcher) runs in its process.

    Every call, also a write, returns after the server has executed it. Threads do not block each
    other: each request in flight has its own connection, taken from a small pool. After a fork
    the child opens connections of its own.

    Args:
        host_name: Name or address of the server; IPv4 and IPv6. "::" serves both.
        port: Its port; 0 lets the server choose, of UNISONO_PORTS (see `port` afterwards).
        world_size: Number of clients; None or -1 if unknown.
        is_master: Whether to run the server here. If the port is MASTER_PORT, and the launcher
            serves it (TORCHELASTIC_USE_AGENT_STORE), the store is a client of that server.
        timeout: Default for every blocking call, the constructor included; seconds or timedelta.
        wait_for_workers: Whether the master waits until `world_size` clients have connected.
        multi_tenant: Share one server per port among the stores of this process.
        master_listen_fd: Listening socket for the server, taken over; it avoids the race
            between choosing a free port and listening on it.
        use_libuv: Accepted for torch's sake; there is one server.
        token: Secret that server and clients must share; UNISONO_TOKEN if None. Without one
            (empty) the server serves clients of its own machine only, unless UNISONO_INSECURE=1.

    Raises:
        StoreConnectionError: No server answers at host_name:port, or the port is in use.
        HandshakeError: Something else listens there, or the token is missing or wrong.
        StoreTimeoutError: Not all workers connected.

    Source: torch.distributed.TCPStore, torch 2.13.
    """

    def __init__(
        self,
        host_name: str,
        port: int = 29500,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        token: str | None = None,
    ) -> None:
        super().__init__(timeout)
        deadline = Deadline(timeout)
        port = check_integer(port, "port")
        if not 0 <= port <= _MAX_PORT:
            raise InvalidArgumentError(f"port must be 0 to {_MAX_PORT}, got {port}")
        world_size = None if world_size is None else check_integer(world_size, "world_size")
        if world_size is not None and (world_size == 0 or world_size < -1):
            raise InvalidArgumentError(f"world_size of a TCPStore cannot be {world_size}")
        self.host = host_name = check_host(host_name)
        self._use_libuv = use_libuv
        self._token = (config.get("UNISONO_TOKEN") if token is None else token).encode()
        self._server = (
            _serve(host_name, port, multi_tenant, master_listen_fd, self._token)
            if is_master
            else None
        )
        self.port = self._server.port if self._server else port
        self._pool = self._new_pool()
        self._finalizer = weakref.finalize(self, _release, self._pool, self._server)
        try:
            self._pool.open_first(deadline)
            if wait_for_workers and world_size is not None and world_size > 0:
                self._wait_for_workers(world_size, deadline)
        except BaseException:
            self.close()
            raise

    @property
    def is_master(self) -> bool:
        """Whether the server runs in this process."""
        return self._server is not None

    @property
    def libuvBackend(self) -> bool:
        """The argument `use_libuv`."""
        return self._use_libuv

    @property
    def round_trip_us(self) -> int | None:
        """The round trip to the server in microseconds, 0 on its host; None: unknown."""
        return self._pool.round_trip_us

    def set(self, key: str, value: Value) -> None:
        """Store `value` under `key`."""
        self._call(RequestOp.SET, _wire_key(key), check_value(value))

    def append(self, key: str, value: Value) -> None:
        """Append `value` to what `key` holds."""
        more = check_value(value)
        try:
            self._call(RequestOp.APPEND, _wire_key(key), more)
        except StoreConnectionError:
            # As for add: a server closes the connection if a value becomes too long.
            self._explain_append(key, len(more))
            raise

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Return the value of `key`, waiting until there is one."""
        wire_key = _wire_key(key)
        if timeout is None:
            # The key mostly exists already. An empty reply may mean an empty value, or no value.
            value: bytes = self._call(RequestOp.GET, wire_key)
            if value:
                return value
        value = self._fetch("get", (RequestOp.GET, wire_key), [wire_key], timeout)
        return value

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Return the values of all keys, waiting until each has one."""
        wire_keys = _wire_keys(keys)
        if not wire_keys:
            self._check_open()
            return []
        values: list[bytes] = self._fetch(
            "multi_get", (RequestOp.MULTI_GET, wire_keys), wire_keys, timeout
        )
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store each value under the key at the same position, all at once."""
        pairs = self._pairs(keys, values)
        self._call(RequestOp.MULTI_SET, [(_wire_key(key), value) for key, value in pairs])

    def add(self, key: str, amount: int) -> int:
        """Add to the number stored under `key` and return the sum."""
        check_integer(amount, "amount")
        try:
            return int(self._call(RequestOp.ADD, _wire_key(key), amount))
        except StoreConnectionError:
            # The protocol has no error reply: a server closes the connection of a client that adds
            # to a value that is not a number.
            self._explain_add(key, amount)
            raise

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store `desired` if `key` holds `expected`; see Store.compare_set."""
        return bytes(
            self._call(
                RequestOp.COMPARE_SET, _wire_key(key), check_value(expected), check_value(desired)
            )
        )

    def check(self, keys: Sequence[str], timeout: Timeout | None = None) -> bool:
        """Return whether every key has a value; see Store.check."""
        return bool(self._call(RequestOp.CHECK, _wire_keys(keys), timeout=timeout) == READY)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Block until every key has a value."""
        self._wait("wait", _wire_keys(keys), self._deadline(timeout))

    def delete_key(self, key: str) -> bool:
        """Remove the value of `key`; return whether there was one."""
        return bool(self._call(RequestOp.DELETE_KEY, _wire_key(key)))

    def num_keys(self) -> int:
        """Return the number of keys on the server, torch's internal keys included."""
        return int(self._call(RequestOp.NUM_KEYS))

    def list_keys(self) -> list[str]:
        """Return all keys with a value, sorted."""
        found = self._call(RequestOp.LIST_KEYS)
        return sorted(key.removeprefix(_KEY_PREFIX) for key in found if key[:1] == _KEY_PREFIX)

    def queue_push(self, key: str, value: Value) -> None:
        """Append `value` to the queue `key`."""
        self._call(RequestOp.QUEUE_PUSH, _wire_key(key), check_value(value))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Remove and return the oldest value of the queue `key`."""
        wire_key = _wire_key(key)
        deadline = self._deadline(timeout)
        while True:
            # On the connection that waited: the server keeps the value for that connection.
            with self._pool.lease(_patience(deadline.remaining())) as connection:
                if block and not connection.wait(deadline.remaining(), RequestOp.WAIT, [wire_key]):
                    break
                before, value = connection.ask(
                    _patience(deadline.remaining()), ((RequestOp.QUEUE_POP, wire_key),)
                )[0]
            if before:
                return bytes(value)
            if not block:
                raise QueueEmptyError(f"queue {key!r} on {self!r} is empty")
            if deadline.expired():
                break
            # Another client was faster, or a plain value of that name ended the wait.
            time.sleep(min(_POLL_S, deadline.remaining()))
        raise keys_timeout(self, "queue_pop", [key], [key], deadline.timeout_s)

    def queue_len(self, key: str) -> int:
        """Return the number of values in the queue `key`."""
        return int(self._call(RequestOp.QUEUE_LEN, _wire_key(key)))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Block until `world_size` callers are inside `barrier(key)`."""
        world_size = check_world_size(world_size)
        deadline = self._deadline(timeout)
        wire_key = _wire_key(key)
        with self._pool.lease(_patience(deadline.remaining())) as connection:
            passed = connection.wait(deadline.remaining(), RequestOp.BARRIER, wire_key, world_size)
        if not passed:
            came = f"at most {world_size - 1}"
            raise barrier_timeout(self, key, came, world_size, deadline.timeout_s)

    def clone(self) -> TCPStore:
        """Return another handle to the same server, which lives until both are closed."""
        self._check_open()
        other = TCPStore.__new__(TCPStore)
        Store.__init__(other, self._timeout_s)
        other.host, other.port, other._token = self.host, self.port, self._token
        other._use_libuv = self._use_libuv
        other._server = self._server.share() if self._server else None
        other._pool = other._new_pool()
        other._finalizer = weakref.finalize(other, _release, other._pool, other._server)
        return other

    def has_extended_api(self) -> bool:
        """Return True."""
        return True

    @property
    def has_token(self) -> bool:
        """Whether this process has a token for the server."""
        return bool(self._token)

    def refused_client(self) -> str:
        """Return the address of a client on another machine that the server has refused.

        It is the first that was refused because the server has no token; "" if there is none.
        """
        return self._note(REFUSED_KEY)

    def refusal(self) -> str:
        """Return the first client that the server has refused, and why; "" if there is none."""
        return self._note(REFUSAL_KEY)

    def _note(self, key: str) -> str:
        # One of torch's servers closes the connection if the key of GET is missing.
        if self._call(RequestOp.CHECK, [key]) != READY:
            return ""
        text: bytes = self._call(RequestOp.GET, key)
        return "" if text == _FORGOTTEN else text.decode()

    def forget_refused(self) -> None:
        """Let `refused_client` and `refusal` return "" from now on: all clients have come."""
        if self._server is not None:
            self._call(RequestOp.DELETE_KEY, REFUSAL_KEY)
        if self.has_token:
            return
        # Torch's server refuses no client, and its users count its keys.
        if self._server is not None or self.refused_client():
            self._call(RequestOp.SET, REFUSED_KEY, _FORGOTTEN)

    def close(self) -> None:
        """Close the connections, and the server if it runs here; blocked threads wake up."""
        super().close()
        self._finalizer()

    def _new_pool(self) -> ConnectionPool:
        # A host that serves need not resolve its own name, nor reach its address behind NAT.
        host = self._server.host if self._server else self.host
        return ConnectionPool(host, self.port, self._token)

    def _call(self, op: RequestOp, *args: Any, timeout: Timeout | None = None) -> Any:
        """Make one request that the server answers at once."""
        self._check_open()
        timeout_s = self._timeout_s if timeout is None else to_seconds(timeout)
        return self._pool.ask(_patience(timeout_s), (op, *args))[0]

    def _fetch(
        self,
        operation: str,
        request: tuple[RequestOp, Any],
        keys: list[str],
        timeout: Timeout | None,
    ) -> Any:
        deadline = self._deadline(timeout)
        while True:
            # Both in one round trip, so that no other client can delete the key in between.
            answers = self._pool.ask(
                _patience(deadline.remaining()), (RequestOp.CHECK, keys), request
            )
            if answers[0] == READY:
                return answers[1]
            self._wait(operation, keys, deadline)

    def _wait(self, operation: str, keys: list[str], deadline: Deadline) -> None:
        with self._pool.lease(_patience(deadline.remaining())) as connection:
            if connection.wait(deadline.remaining(), RequestOp.WAIT, keys):
                return
            flags = connection.ask(1.0, tuple((RequestOp.CHECK, [key]) for key in keys[:1024]))
        missing = [key for key, flag in zip(keys, flags, strict=False) if flag != READY]
        if missing:
            names = [key.removeprefix(_KEY_PREFIX) for key in missing]
            raise keys_timeout(self, operation, keys, names, deadline.timeout_s)

    def _wait_for_workers(self, world_size: int, deadline: Deadline) -> None:
        joined = int(self._call(RequestOp.ADD, _INIT_KEY, 1))
        grace = RefusalGrace()
        while self._server is not None and joined < world_size:
            if client := grace.over(self.refused_client):
                raise StoreConnectionError(
                    f"{self!r} waits no longer for clients ({joined} of {world_size} joined): it "
                    f"refused {client}, which is on another machine, because there is no token",
                    hint=TOKEN_HINT,
                )
            if deadline.expired():
                refused = f"; it refused {text}" if (text := self.refusal()) else ""
                raise StoreTimeoutError(
                    f"{self!r} timed out after {deadline.timeout_s:g} s waiting for clients: "
                    f"{joined} of {world_size} joined{refused}",
                    hint="were all ranks started, with the same address and port?",
                )
            time.sleep(min(_POLL_S, deadline.remaining()))
            joined = int(self._call(RequestOp.GET, _INIT_KEY))

    def _explain_add(self, key: str, amount: int) -> None:
        """Raise StoreKeyError if the stored value is why the server ended the connection."""
        value = self._present(key)
        if value is not None:
            checked_sum(key, value, amount)

    def _explain_append(self, key: str, nbytes: int) -> None:
        """Raise InvalidArgumentError if the sum of sizes is why the server ended the connection."""
        present = len(self._present(key) or b"")
        if present + nbytes > MAX_VALUE_BYTES:
            raise InvalidArgumentError(
                f"append of {nbytes} bytes to the {present} bytes of {key!r}: a value has at most "
                f"{MAX_VALUE_BYTES} bytes"
            )

    def _present(self, key: str) -> bytes | None:
        """Return the value of a key; None if there is none, or no server to ask."""
        self._check_open()
        try:
            value: bytes = self._call(RequestOp.GET, _wire_key(key))
            return value if self._call(RequestOp.CHECK, [_wire_key(key)]) == READY else None
        except StoreError:
            return None

    def __repr__(self) -> str:
        role = ", master" if self._server else ""
        return f"<TCPStore {format_address(self.host, self.port)}{role}>"


class _SharedServer:
    """A server and the number of stores that keep it alive."""

    _by_port: dict[int, _SharedServer] = {}  # noqa: RUF012 - one table for the process on purpose
    _lock = threading.RLock()

    def __init__(self, server: StoreServer, host: str) -> None:
        self.host, self.port = host, server.port
        self._server = server
        self._users = 1
        self._pid = os.getpid()

    @classmethod
    def start(
        cls, host: str, port: int, multi_tenant: bool, listen_fd: int | None, token: bytes
    ) -> _SharedServer:
        """Return the server of that port, if it may be shared and exists; else a new one."""
        with cls._lock:
            known = cls._by_port.get(port) if multi_tenant else None
            if known is not None and known._pid == os.getpid():
                known._users += 1
                return known
            sockets = listen(host, port) if listen_fd is None else listen_on_fd(listen_fd, port)
            host = listening_host(sockets)
            shared = cls(start_server(sockets, ServerOptions(token=token)), host)
            if multi_tenant:
                cls._by_port[shared.port] = shared
            return shared

    def share(self) -> _SharedServer:
        """Add a user."""
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        """Remove a user; the last user closes the server."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if self._by_port.get(self.port) is self:
                del self._by_port[self.port]
        self._server.close()


def _serve(
    host: str, port: int, multi_tenant: bool, listen_fd: int | None, token: bytes
) -> _SharedServer | None:
    """Start the server; return None if the launcher serves this port already."""
    try:
        return _SharedServer.start(host, port, multi_tenant, listen_fd, token)
    except StoreConnectionError as error:
        by_launcher = config.is_true("TORCHELASTIC_USE_AGENT_STORE")
        if not by_launcher or config.environ().get("MASTER_PORT") != str(port):
            raise
        _LOG.info("the launcher serves port %d, so this store is a client: %s", port, error.what)
        return None


def _release(pool: ConnectionPool, server: _SharedServer | None) -> None:
    """Close pool and server; a function because the finalizer must not keep the store alive."""
    pool.close()
    if server is not None:
        server.release()


def _patience(timeout_s: float) -> float:
    """Return the seconds for a request: at least 1 s if the caller wants no wait."""
    return timeout_s if timeout_s >= _POLL_S else 1.0


def _wire_key(key: str) -> str:
    return _KEY_PREFIX + check_key(key)


def _wire_keys(keys: Sequence[str]) -> list[str]:
    return [_wire_key(key) for key in check_keys(keys)]
