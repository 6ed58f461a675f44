"""RedisStore: a store on a Redis (or Valkey) server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.core.base.deadline import Timeout
from unisono.core.base.net.sockets import format_address
from unisono.core.stores.api import DEFAULT_TIMEOUT, check_host, check_integer
from unisono.core.stores.services.store import (
    ServiceStore,
    Swap,
    Unreachable,
    VersionedValue,
    import_client,
)
from unisono.errors import StoreError

DEFAULT_PORT = 6379
# Bounds a request whose reply is lost; a server that is alive answers in microseconds.
_REPLY_S = 5.0
# ARGV has four words for each change: the field, the expected value, the new value, two letters.
# First letter: the present value must be equal (c), must be absent (a), may be anything (-). Second
# letter: s sets the new value, anything else deletes the field.
_SWAP = """
for i = 1, #ARGV, 4 do
  local how = string.sub(ARGV[i + 3], 1, 1)
  local present = redis.call('HGET', KEYS[1], ARGV[i])
  if how == 'c' and present ~= ARGV[i + 1] or how == 'a' and present then return 0 end
end
for i = 1, #ARGV, 4 do
  if string.sub(ARGV[i + 3], 2, 2) == 's' then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
  else
    redis.call('HDEL', KEYS[1], ARGV[i])
  end
end
return 1
"""


class RedisStore(ServiceStore):
    """Keys and values in one hash of a Redis server; `HGETALL <prefix>` shows all of them.

    A server that dies loses what it had not written to disk. A replica that takes over lacks
    what it had not received. If the store must survive its host, use EtcdStore.

    Args:
        host: Name or address of the server.
        port: Its port.
        prefix: Name of the hash; different for every run unless `world_size` is given.
        world_size: Number of ranks. The last of them to close the store deletes the hash. A
            hash that another world still uses is a StoreTimeoutError. -1: the hash stays.
        timeout: Default for every blocking call; seconds or timedelta.
        options: For `redis.Redis`: db, username, password, ssl, ssl_ca_certs, ...

    Raises:
        UnsupportedError: The package redis is not installed (`pip install 'unisono[redis]'`), or
            UNISONO_TLS=on or cert forbids a server on another host without `ssl=True`.
        StoreConnectionError: The server does not answer.
        StoreTimeoutError: See `world_size`.
    """

    def __init__(
        self,
        host: str = "localhost",
        port: int = DEFAULT_PORT,
        prefix: str = "unisono",
        *,
        world_size: int = -1,
        timeout: Timeout = DEFAULT_TIMEOUT,
        **options: Any,
    ) -> None:
        super().__init__(prefix, timeout, world_size)
        self.host, self.port = check_host(host), check_integer(port, "port")
        self._options = options
        (redis,) = import_client("RedisStore", "redis", "redis", "redis")
        self._errors = redis.exceptions
        # Its own repetition waits for seconds; `_request` repeats.
        self._redis = redis.Redis(
            host=host,
            port=port,
            retry=None,
            socket_timeout=_REPLY_S,
            socket_connect_timeout=_REPLY_S,
            **options,
        )
        self._open(lambda: self._request(lambda: self._run("PING")), self._plain(redis.connection))

    def _plain(self, kinds: Any) -> list[tuple[str, int]]:
        """Return the server that is called without TLS, as the client's pool has it."""
        pool = self._redis.connection_pool
        if issubclass(
            pool.connection_class, (kinds.SSLConnection, kinds.UnixDomainSocketConnection)
        ):
            return []
        # A pool of the user, of Sentinel for example, may find its server elsewhere.
        known = pool.connection_kwargs
        return [(known.get("host", "?"), known.get("port", self.port))]

    def clone(self) -> RedisStore:
        """Return a handle of its own to the same data."""
        self._check_open()
        return RedisStore(
            self.host, self.port, self.prefix, timeout=self._timeout_s, **self._options
        )

    def _run(self, *words: Any) -> Any:
        try:
            return self._redis.execute_command(*words)
        except (self._errors.ConnectionError, self._errors.TimeoutError) as error:
            raise Unreachable(str(error)) from error
        except self._errors.RedisError as error:
            raise StoreError(f"{words[0]} on {self!r} failed: {error}") from error

    def _fetch(self, names: Sequence[str]) -> list[VersionedValue]:
        values = self._run("HMGET", self.prefix, *names)
        # A value that is the same again is as good as one that did not change.
        return [VersionedValue(value, value) for value in values]

    def _swap(self, swaps: Sequence[Swap]) -> Any:
        words: list[str | bytes] = []
        for name, before, after in swaps:
            compared = "-" if before is None else "a" if before.value is None else "c"
            old = before.value if before is not None else None
            written = "-" if after is None else "s"
            words += [name, old or b"", after or b"", compared + written]
        done = self._run("EVAL", _SWAP, 1, self.prefix, *words)
        return swaps[-1].after or b"" if done else None

    def _names(self, start: str) -> list[str]:
        names = [name.decode() for name in self._run("HKEYS", self.prefix)]
        return [name for name in names if name.startswith(start)]

    def _clear(self) -> None:
        self._run("DEL", self.prefix)

    def _hang_up(self) -> None:
        # A call whose connection is closed fails oddly; `_request` closes it after the call.
        self._redis.connection_pool.disconnect(inuse_connections=False)

    def __repr__(self) -> str:
        return f"<RedisStore {format_address(self.host, self.port)} {self.prefix!r}>"
