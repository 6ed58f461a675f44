"""No loop over a store outlives its deadline, whatever other clients or a server do."""

import contextlib
import itertools
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from unisono.core.base.deadline import Deadline
from unisono.core.groups.membership_store import Document
from unisono.core.rendezvous.agents import dynamic
from unisono.core.rendezvous.agents.dynamic import DynamicRendezvous
from unisono.core.rendezvous.agents.member import Timing
from unisono.core.rendezvous.agents.state import AgentsState, JobLimits, Node, dumps
from unisono.core.rendezvous.agents.state import Join as NodeJoin
from unisono.core.rendezvous.membership import JoinRequest, Member, WaitingMember
from unisono.core.stores import FileStore, HashStore, PrefixStore
from unisono.core.stores.files.log import RecordLog
from unisono.core.stores.services.store import ServiceStore, VersionedValue
from unisono.core.stores.table import ChangeKind
from unisono.core.stores.tcp.link import StoreLink, open_link
from unisono.core.stores.tcp.wire import RequestOp, encode_reply
from unisono.core.transports.connect import connect
from unisono.errors import StoreError, StoreTimeoutError

LIMIT_S = 0.05


class TableService(ServiceStore):
    """A service whose entries are in a table of this process."""

    def __init__(self, timeout=20):
        super().__init__("p", timeout, -1)
        self.table, self._versions = {}, itertools.count(1)

    def _fetch(self, names):
        return [self.table.get(name, VersionedValue(None, 0)) for name in names]

    def _swap(self, swaps):
        for name, before, _ in swaps:
            if before is not None and self.table.get(name, VersionedValue(None, 0)) != before:
                return None
        version = next(self._versions)
        for name, _, after in swaps:
            self.table[name] = VersionedValue(after, version if after is not None else 0)
        return version

    def _names(self, start):
        return [name for name, entry in self.table.items() if name.startswith(start)]

    def _clear(self):
        self.table.clear()

    def _hang_up(self):
        pass

    def __repr__(self):
        return "<TableService>"


def always_late(store, monkeypatch):
    """Let another client take each value of a queue just before the store does."""
    if isinstance(store, ServiceStore):
        real = store._update
        late = lambda name, change: None if name.startswith("q/") else real(name, change)  # noqa: E731
        monkeypatch.setattr(store, "_update", late)
    else:
        do = store._do
        late = lambda kind, *args: None if kind is ChangeKind.POP else do(kind, *args)  # noqa: E731
        monkeypatch.setattr(store, "_do", late)


@pytest.mark.parametrize("kind", ["hash", "file", "service"])
def test_queue_whose_values_others_take(kind, tmp_path, monkeypatch):
    makers = {
        "hash": HashStore,
        "file": lambda: FileStore(tmp_path / "store"),
        "service": TableService,
    }
    with makers[kind]() as store:
        store.queue_push("q", b"v")
        assert store.queue_pop("q", timeout=LIMIT_S) == b"v"
        store.queue_push("q", b"v")
        always_late(store, monkeypatch)
        with pytest.raises(StoreTimeoutError, match=r"queue_pop on .* timed out after 0\.05 s"):
            store.queue_pop("q", timeout=LIMIT_S)


def test_change_of_a_service_that_another_thread_holds_up():
    with TableService(timeout=LIMIT_S) as store, ThreadPoolExecutor(1) as other:
        other.submit(store._change_lock.acquire).result()
        with pytest.raises(StoreTimeoutError, match=r"in use by other threads .* for 0\.05 s"):
            store.set("k", "v")
        other.submit(store._change_lock.release).result()
        store.set("k", "v")


@pytest.mark.parametrize("make_link", [open_link, StoreLink])
def test_reply_that_comes_byte_by_byte(make_link):
    client, server = socket.socketpair()
    reply = encode_reply(RequestOp.GET, bytes(1 << 22))

    def trickle():
        with contextlib.suppress(OSError):
            for place in range(len(reply)):
                server.sendall(reply[place : place + 1])

    with client, server:
        link = make_link(client)
        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with pytest.raises(TimeoutError):
                link.exchange(LIMIT_S, ((RequestOp.GET, "k"),))
        finally:
            client.shutdown(socket.SHUT_RDWR)
            thread.join()


class FickleStore(HashStore):
    """A store in which others act just before each compare_set, while `acts` is set."""

    acts = None

    def compare_set(self, key, expected, desired):
        if self.acts is not None and expected:
            self.acts(key)
        return super().compare_set(key, expected, desired)


def agents_rendezvous(store):
    node = Node(id="n", host="h", address="", nprocs=1)
    made = DynamicRendezvous.__new__(DynamicRendezvous)
    made.__dict__.update(state=AgentsState(), _member=SimpleNamespace(node=node, timing=Timing()))
    return lambda: made._apply(
        PrefixStore("job", store),
        NodeJoin(node, JobLimits(min_nodes=1, max_nodes=1, max_restarts=0)),
    )


def claim(store):
    connect(store, 0, 1, Deadline(LIMIT_S), "inproc").close()


def join_document(store):
    return Document(store).change(JoinRequest(WaitingMember(member=Member(id="x"))))


def test_deleted_key_is_made_anew_by_a_rank_that_claims_it():
    with FickleStore() as store:
        store.set("rank/0", "7")
        store.acts = store.delete_key
        claim(store)
        assert store.get("rank/0") == b"1"


def test_deleted_document_is_made_anew():
    with FickleStore() as store:
        join_document(store)
        store.acts = store.delete_key
        state = Document(store).change(JoinRequest(WaitingMember(member=Member(id="y"))))
        assert [each.id for each in state.waiting] == ["y"]


def test_deleted_state_of_agents_is_an_error():
    with FickleStore() as store:
        PrefixStore("job", store).set(dynamic._STATE, dumps(AgentsState()))
        store.acts = store.delete_key
        with pytest.raises(StoreError, match="the state of the job was deleted"):
            agents_rendezvous(store)()


def test_rank_whose_claim_others_change_all_the_time():
    counter = itertools.count(2)
    with FickleStore() as store:
        store.set("rank/0", "1")
        store.acts = lambda key: store.set(key, f"{next(counter)}")
        with pytest.raises(
            StoreTimeoutError, match=r"was changed by others all the time, for 0\.05"
        ):
            claim(store)


def test_a_name_that_never_leads_to_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(RecordLog, "_read_or_create", lambda *_: None)
    line = (
        r"could not be opened for 0\.05 s: there is an entry of that name, but it leads to no file"
    )
    with pytest.raises(StoreTimeoutError, match=line):
        FileStore(str(tmp_path / "store"), 1, timeout=LIMIT_S)
