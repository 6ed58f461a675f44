"""The world of the workers of one node, and the store in which the workers meet."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from urllib.parse import quote

from unisono.core.rendezvous.agents.state import AgentsState, Node
from unisono.core.rendezvous.endpoint import ANY, address_here
from unisono.core.stores import PrefixStore, Store, TCPStore
from unisono.errors import RendezvousError, StoreError

_PREFIX = "unisono/rendezvous/"


@dataclass(frozen=True, kw_only=True)
class WorkerWorld:
    """The order to start the workers of a world.

    Attributes:
        epoch: The number of the world.
        members: The nodes of the world by group rank, with nodes that have left it.
        group_rank: The group rank of this node.
        restarts: Number of worlds that failed before.
        master_addr: Address of the workers' store.
        master_port: Port of the workers' store.
        store_url: URL of the workers' store in a service, or "".
    """

    epoch: int = 1
    members: tuple[Node, ...]
    group_rank: int = 0
    restarts: int = 0
    master_addr: str
    master_port: int
    store_url: str = ""


def job_prefix(run_id: str) -> str:
    """Return the prefix of a job's keys in the store of its nodes."""
    return f"{_PREFIX}{run_id}"


def attempt_keys(restarts: int | str) -> str:
    """Return the prefix of the keys of one world's workers in their store."""
    return f"worker/attempt_{restarts}"


def workers_url(service: str, run_id: str) -> str:
    """Return the URL of all worlds of a job in a service, among the keys that the agents delete."""
    joint = "&" if "?" in service else "?"
    return f"{service}{joint}run_id={quote(f'{job_prefix(run_id)}/workers', safe='/')}"


class WorkerStore:
    """The store of the workers, which is empty at the start of every world.

    Args:
        port: Port of the store; 0 for any.
        token: Token of the store.
        shared: Whether the workers use the server of the rendezvous store (`--master-port`). If
            not, every world has a new server.
        service: URL, without an epoch, of the service in which the workers meet; "": at the server.

    Attributes:
        served: The store of the present world, if this process serves it.
    """

    def __init__(
        self, *, port: int = 0, token: str = "", shared: bool = False, service: str = ""
    ) -> None:
        self._port = port
        self._token = token
        self._shared = shared
        self._service = service
        self._server: TCPStore | None = None
        self.served: TCPStore | None = None

    def open(self, rendezvous_store: Store, address: str) -> tuple[str, int]:
        """Close the server of the last world; return host and port of a store without keys.

        Raises:
            RendezvousError: The server cannot be started.
        """
        self.close()
        if self._shared and isinstance(rendezvous_store, TCPStore):
            for key in rendezvous_store.list_keys():
                if not key.startswith(_PREFIX):
                    rendezvous_store.delete_key(key)
            host = rendezvous_store.host
            self.served = rendezvous_store
            return address if host in ANY else host, rendezvous_store.port
        try:
            self._server = TCPStore(
                address, self._port, is_master=True, wait_for_workers=False, token=self._token
            )
        except StoreError as error:
            raise RendezvousError(f"cannot open the workers' store: {error.what}") from error
        self.served = self._server
        return address, self._server.port

    def report_gone(self, rendezvous_store: Store, state: AgentsState) -> None:
        """Write which ranks and hosts have left the running world, where its workers look.

        Workers that lost their links to these need not wait for them in `reconfigure`. Nothing
        happens if another process serves the store.
        """
        if self._service:
            keys = PrefixStore(f"workers/{state.epoch}", rendezvous_store)
        elif self.served is not None:
            keys = PrefixStore(attempt_keys(state.restarts), self.served)
        else:
            return
        ranks: list[int] = []
        count = 0
        for node in (node for node in state.order if not node.joined):
            ranks += range(count, count + node.nprocs) if node in state.gone else ()
            count += node.nprocs
        hosts = {node.host for node in state.order} - {node.host for node in state.members}
        with contextlib.suppress(StoreError):
            keys.set("unisono/membership/gone", json.dumps([ranks, sorted(hosts)]))

    def seen_here(self, address: str) -> str:
        """Return the address of the store for the workers of this node.

        The node that serves the store need not resolve its own name, nor reach its address.
        """
        is_here = self.served is not None and self.served.is_master
        return address_here(address) if is_here else address

    def url(self, epoch: int) -> str:
        """Return the URL of the workers' store in the service; "" without a service."""
        return self._service and f"{self._service}/{epoch}"

    def close(self) -> None:
        """Close the server, if there is one."""
        self.served = None
        if self._server is not None:
            self._server.close()
            self._server = None
