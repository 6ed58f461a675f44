"""EtcdStore: a store on an etcd cluster, which survives the death of its hosts."""

from __future__ import annotations

import base64
import contextlib
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
from unisono.errors import InvalidArgumentError, StoreError

DEFAULT_PORT = 2379
# etcd's default limit for the operations of a transaction.
_OPERATIONS = 128
# A member that is cut off from the others accepts a request and never answers.
_REPLY_S = 2.0

Json = dict[str, Any]


class EtcdStore(ServiceStore):
    """Keys and values in etcd (v3), below "<prefix>/".

    A request that a member does not answer goes to the next member. A majority of the members
    answers each request, so acknowledged data survives while a majority lives.

    Args:
        endpoints: Host and port of one member or several.
        prefix: Start of all keys; different for every run unless `world_size` is given.
        world_size: Number of ranks. The last of them to close the store deletes its keys. A
            prefix that another world still uses is a StoreTimeoutError. -1: keys stay.
        timeout: Default for every blocking call; seconds or timedelta.
        protocol: "http" or "https".
        ca_cert: File with the certificate of the authority that signed the members' certificates.
        cert_cert: File with this client's certificate.
        cert_key: File with its key.

    Raises:
        UnsupportedError: The package etcd3gw is not installed (`pip install 'unisono[etcd]'`), or
            UNISONO_TLS=on or cert forbids "http" to another host.
        StoreConnectionError: No member answers.
        StoreTimeoutError: See `world_size`.
    """

    # Longer than the election of a new leader takes.
    patience_s = 15.0
    _most_swaps = _OPERATIONS

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]] = (("localhost", DEFAULT_PORT),),
        prefix: str = "unisono",
        *,
        world_size: int = -1,
        timeout: Timeout = DEFAULT_TIMEOUT,
        protocol: str = "http",
        ca_cert: str | None = None,
        cert_cert: str | None = None,
        cert_key: str | None = None,
    ) -> None:
        super().__init__(prefix, timeout, world_size)
        if not endpoints:
            raise InvalidArgumentError("EtcdStore needs at least one endpoint")
        self.endpoints = tuple(
            (check_host(host), check_integer(port, "port")) for host, port in endpoints
        )
        self._secrets = {
            "protocol": protocol,
            "ca_cert": ca_cert,
            "cert_cert": cert_cert,
            "cert_key": cert_key,
        }
        self._package, self._errors, self._requests = import_client(
            "EtcdStore", "etcd3gw", "etcd", "etcd3gw", "etcd3gw.exceptions", "requests"
        )
        self._member = 0
        # Unused clients, with the member that each talks to: one serves one thread at a time.
        self._idle: list[tuple[int, Any]] = []
        self._open(lambda: self._entries(["u"]), () if protocol == "https" else self.endpoints)

    def clone(self) -> EtcdStore:
        """Return a handle of its own to the same data."""
        self._check_open()
        return EtcdStore(
            self.endpoints,
            self.prefix,
            timeout=self._timeout_s,
            **self._secrets,  # type: ignore[arg-type]
        )

    def _reset_after_fork(self) -> None:
        super()._reset_after_fork()
        # The parent goes on using these connections.
        self._idle = []

    def _post(self, path: str, question: Json) -> Json:
        member = self._member
        client = self._client_of(member)
        try:
            answer: Json = client.post(client.get_url(path), json=question)
        except (
            self._requests.RequestException,
            self._errors.ConnectionFailedError,
            self._errors.ConnectionTimeoutError,
            self._errors.InternalServerError,
        ) as error:
            client.session.close()
            self._member = (member + 1) % len(self.endpoints)
            reason = getattr(error, "detail_text", None) or str(error)
            # urllib3 puts what it did before the cause.
            reason = reason.rpartition("(Caused by ")[2].removesuffix(")")
            raise Unreachable(f"{format_address(*self.endpoints[member])}: {reason}") from error
        except self._errors.Etcd3Exception as error:
            self._idle.append((member, client))
            raise StoreError(f"{path} on {self!r} failed: {error.detail_text or error}") from error
        except BaseException:
            client.session.close()
            raise
        self._idle.append((member, client))
        return answer

    def _client_of(self, member: int) -> Any:
        while self._idle:
            try:
                at, client = self._idle.pop()
            except IndexError:
                break
            if at == member:
                return client
            client.session.close()
        host, port = self.endpoints[member]
        session = self._requests.Session()
        # Else a proxy or another authority of the environment would have the last word.
        session.trust_env = False
        session.verify = self._secrets["ca_cert"] or True
        if self._secrets["cert_cert"]:
            session.cert = (self._secrets["cert_cert"], self._secrets["cert_key"])
        protocol = self._secrets["protocol"]
        return self._package.Etcd3Client(
            host, port, protocol, timeout=_REPLY_S, api_path="/v3/", session=session
        )

    def _fetch(self, names: Sequence[str]) -> list[VersionedValue]:
        found = []
        for start in range(0, len(names), _OPERATIONS):
            some = names[start : start + _OPERATIONS]
            ranges = [{"request_range": {"key": self._key(name)}} for name in some]
            answer = self._post("kv/txn", {"success": ranges})
            found += [_entry(each["response_range"]) for each in answer["responses"]]
        return found

    def _swap(self, swaps: Sequence[Swap]) -> Any:
        same, changes = [], []
        for name, before, after in swaps:
            key = self._key(name)
            if before is not None:
                version = before.version
                compared = {"target": "MOD", "result": "EQUAL", "mod_revision": version}
                same.append({"key": key, **compared})
            if after is None:
                changes.append({"request_delete_range": {"key": key}})
            else:
                changes.append({"request_put": {"key": key, "value": _encode(after)}})
        answer = self._post("kv/txn", {"compare": same, "success": changes})
        return answer["header"]["revision"] if answer.get("succeeded") else None

    def _names(self, start: str) -> list[str]:
        question = {**self._below(start), "keys_only": True}
        kvs = self._post("kv/range", question).get("kvs", ())
        skipped = len(self.prefix.encode()) + 1
        return [base64.b64decode(each["key"])[skipped:].decode() for each in kvs]

    def _clear(self) -> None:
        self._post("kv/deleterange", self._below(""))

    def _below(self, start: str) -> Json:
        """Return the range of the keys that begin with `start`."""
        first = f"{self.prefix}/{start}".encode()
        # The last byte is a slash or of UTF-8, so it can be increased by one.
        end = first[:-1] + bytes([first[-1] + 1])
        return {"key": _encode(first), "range_end": _encode(end)}

    def _key(self, name: str) -> str:
        return _encode(f"{self.prefix}/{name}".encode())

    def _hang_up(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop()[1].session.close()

    def __repr__(self) -> str:
        places = ",".join(format_address(*each) for each in self.endpoints)
        return f"<EtcdStore {places} {self.prefix!r}>"


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _entry(answer: Json) -> VersionedValue:
    kvs = answer.get("kvs")
    if not kvs:
        return VersionedValue(None, 0)
    return VersionedValue(base64.b64decode(kvs[0].get("value", "")), kvs[0]["mod_revision"])
