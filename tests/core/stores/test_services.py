"""Stores on real servers of Redis and etcd."""

import itertools
import os
import re
import shutil
import signal
import sys
import threading

import pytest

from tests.support import services
from tests.support.services import KINDS, needs
from unisono.core.base import log
from unisono.core.base.net import unencrypted
from unisono.core.rendezvous.services import open_service
from unisono.core.stores.services.etcd import EtcdStore
from unisono.core.stores.services.redis import RedisStore
from unisono.core.stores.services.store import Unreachable
from unisono.errors import StoreConnectionError, StoreError, StoreTimeoutError, UnsupportedError
from unisono.testing.store_suite import STORE_CHECKS, check_store

PREFIXES = (f"test{number}" for number in itertools.count())


@pytest.fixture(scope="module", params=KINDS)
def service(request, tmp_path_factory):
    """Return a function that opens a store on one server, which all tests share."""
    with services.server_of(request.param, tmp_path_factory.mktemp(request.param)) as server:
        place = "127.0.0.1", server.port
        if request.param == "redis":
            yield lambda prefix, **options: RedisStore(*place, prefix, **options)
        else:
            yield lambda prefix, **options: EtcdStore([place], prefix, **options)


@pytest.fixture
def open_store(service):
    """Return a function that opens stores with a new prefix, the same within a test."""
    prefix = next(PREFIXES)
    return lambda **options: service(prefix, **options)


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_conforms(service, check, monkeypatch):
    suite = sys.modules["unisono.testing.store_suite"]
    monkeypatch.setattr(suite, "STORE_CHECKS", (check,))
    check_store(lambda: service(next(PREFIXES)))


@pytest.fixture
def elsewhere(monkeypatch):
    """No server counts as one of this host; nothing was logged before."""
    monkeypatch.setattr(unencrypted, "_is_here", lambda host, port: False)
    monkeypatch.setattr(unencrypted, "is_loopback", lambda host: False)
    monkeypatch.setattr(log, "_logged", set())
    monkeypatch.setenv("UNISONO_TOKEN", "of the job")


@pytest.mark.parametrize("mode", ["on", "cert"])
def test_a_plain_service_on_another_host_is_refused(service, elsewhere, monkeypatch, mode):
    monkeypatch.setenv("UNISONO_TLS", mode)
    with pytest.raises(UnsupportedError) as caught:
        service("p")
    assert re.fullmatch(
        r"the connection of <(Etcd|Redis)Store 127\.0\.0\.1:(\d+) 'p'> to 127\.0\.0\.1:\2 is not "
        rf"encrypted by unisono, which UNISONO_TLS={mode} forbids",
        caught.value.what,
    )
    monkeypatch.undo()
    monkeypatch.setenv("UNISONO_TLS", mode)
    with service(next(PREFIXES)) as store:  # on this host
        store.set("k", "v")


def test_a_plain_service_on_another_host_is_logged_once(service, elsewhere, monkeypatch, caplog):
    monkeypatch.setenv("UNISONO_TLS", "off")
    prefix = next(PREFIXES)
    service(prefix).close()
    assert not caplog.messages
    monkeypatch.setenv("UNISONO_TLS", "auto")
    with service(prefix) as store, store.clone() as clone:
        clone.set("k", "v")
        assert store.get("k") == b"v"
    (line,) = caplog.messages
    assert "is not encrypted by unisono; use TLS (rediss://, etcds://" in line
    monkeypatch.setenv("UNISONO_TOKEN", "")
    service(next(PREFIXES)).close()
    assert len(caplog.messages) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_with_tls_is_not_refused(kind, tmp_path, elsewhere, monkeypatch):
    monkeypatch.setenv("UNISONO_TLS", "on")
    cert, key = f"{tmp_path}/cert.pem", f"{tmp_path}/key.pem"
    with services.server_of(kind, tmp_path, secured=True) as server:
        place = f"localhost:{server.port}"
        url = f"etcds://{place}?ca_cert={cert}&cert_cert={cert}&cert_key={key}"
        if kind == "redis":
            url = f"rediss://:p%40ss@{place}?ssl_ca_certs={cert}"
        with open_service(url, "run", timeout=20) as store:
            store.set("k", "v")
            assert store.get("k") == b"v"


@needs("redis")
def test_pools_and_unix_sockets_of_redis(tmp_path, elsewhere, monkeypatch):
    import redis

    monkeypatch.setenv("UNISONO_TLS", "on")
    with pytest.raises(StoreConnectionError, match=r"redis\.sock"):
        RedisStore(unix_socket_path=f"{tmp_path}/redis.sock", timeout=0.1)
    monkeypatch.undo()
    monkeypatch.setenv("UNISONO_TLS", "on")
    # It finds its server by itself.
    pool = redis.ConnectionPool()
    with pytest.raises(UnsupportedError, match=r"to \?:6379 is not encrypted by unisono"):
        RedisStore(connection_pool=pool)


def test_keys_below_other_prefixes_are_not_seen(service):
    prefix = next(PREFIXES)
    with service(prefix) as store, service(f"{prefix}/k") as below, service(f"{prefix}0") as beside:
        for number, each in enumerate((store, below, beside)):
            each.set(f"key{number}", "v")
        assert below.list_keys() == ["key1"]
        assert beside.list_keys() == ["key2"]
        assert "key2" not in store.list_keys()
        assert not store.check(["key1"])


def test_many_keys_at_once(open_store):
    with open_store() as store:
        keys = [f"k{number}" for number in range(300)]
        store.multi_set(keys, keys)
        assert store.multi_get(keys) == [key.encode() for key in keys]
        assert store.check(keys)
        assert store.num_keys() == 300


def test_a_push_and_a_pop_do_not_read_the_values_of_a_queue(open_store):
    """Calls of Python code, for a queue of one value and for a long one."""
    with open_store() as store:

        def count(call):
            seen = []

            def note(frame, event, _):
                if event in ("call", "c_call") and frame.f_globals["__name__"].startswith(
                    "unisono."
                ):
                    seen.append(frame.f_code.co_name)

            sys.setprofile(note)
            try:
                call()
            finally:
                sys.setprofile(None)
            return len(seen)

        calls = []
        for length in (1, 200):
            while store.queue_len("q") < length:
                store.queue_push("q", f"{store.queue_len('q')}")
            push = count(lambda: store.queue_push("q", "last"))
            calls.append((push, count(lambda: store.queue_pop("q"))))
        assert calls[0] == calls[1]
        left = [store.queue_pop("q") for _ in range(store.queue_len("q"))]
        assert left[-2:] == [b"199", b"last"]


def test_last_rank_deletes_the_keys(open_store):
    first, second = open_store(world_size=2), open_store(world_size=2)
    clone = first.clone()
    first.set("k", "v")
    clone.close()
    first.close()
    assert second.get("k") == b"v"
    second.close()
    with open_store() as store:
        assert store.list_keys() == []
        assert store._request(lambda: store._names("")) == []


def test_world_waits_for_the_end_of_the_one_before(open_store):
    old = [open_store(world_size=2) for _ in range(2)]
    old[0].set("stale", "1")
    with pytest.raises(StoreTimeoutError, match=r"still belongs to another run of 2 ranks after"):
        open_store(world_size=2, timeout=0.05)
    old[0].close()
    timer = threading.Timer(0.05, old[1].close)
    timer.start()
    with open_store(world_size=2, timeout=20) as store:
        assert store.list_keys() == []
    timer.join()


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_repeated_request_is_done_once(open_store, monkeypatch, lost):
    with open_store() as store:
        real, broken = store._swap, []

        def swap(swaps):
            if len(broken) < 2:
                broken.append(lost)
                if lost == "reply":
                    real(swaps)
                raise Unreachable("cable pulled")
            return real(swaps)

        calls = [
            (lambda: store.add("n", 1), lambda: store.get("n"), b"1"),
            (lambda: store.append("a", "x"), lambda: store.get("a"), b"x"),
            (lambda: store.queue_push("q", "x"), lambda: store.queue_len("q"), 1),
            (lambda: store.set("s", "x"), lambda: store.get("s"), b"x"),
            (lambda: store.compare_set("s", "x", "y"), lambda: store.get("s"), b"y"),
        ]
        for change, look, expected in calls:
            broken.clear()
            monkeypatch.setattr(store, "_swap", swap)
            change()
            monkeypatch.undo()
            assert len(broken) == 2
            assert look() == expected


def test_request_that_arrives_too_late_does_nothing(open_store):
    with open_store() as store, open_store() as other:
        real = store._swap
        late = []

        def delayed(swaps):
            late.append(swaps)
            store._swap = real
            raise Unreachable("slow network")

        for change, look, last in [
            (lambda: store.set("k", "first"), lambda: store.get("k"), b"second"),
            (lambda: store.add("n", 1), lambda: store.get("n"), b"0"),
        ]:
            store._swap = delayed
            change()
            other.set("k", "second")
            other.add("n", -1)
            assert real(late.pop()) is None
            assert look() == last
            other.set("n", "0")


def test_child_of_a_fork(open_store):
    with open_store(world_size=1) as store:
        store.add("n", 1)
        pid = os.fork()
        if pid == 0:
            try:
                store.add("n", 1)
                store.close()
            finally:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert store.add("n", 1) == 3


def test_nobody_there(monkeypatch):
    pytest.importorskip("redis")
    pytest.importorskip("etcd3gw")
    monkeypatch.setattr(EtcdStore, "patience_s", 0.05)
    monkeypatch.setattr(RedisStore, "patience_s", 0.05)
    with pytest.raises(StoreConnectionError, match=r"RedisStore 127.0.0.1:1 'unisono'.*refused"):
        RedisStore("127.0.0.1", 1)
    with pytest.raises(StoreConnectionError, match=r"EtcdStore .*:1,.*:2 'unisono'.*refused"):
        EtcdStore([("127.0.0.1", 1), ("127.0.0.1", 2)])


@pytest.mark.parametrize(("kind", "package"), [(RedisStore, "redis"), (EtcdStore, "etcd3gw")])
def test_missing_package_says_what_to_install(kind, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedError, match=rf"needs the package {package}(.|\n)*unisono\["):
        kind()


def test_refused_request_is_an_error_that_says_why(open_store):
    with open_store() as store:
        if isinstance(store, EtcdStore):
            with pytest.raises(StoreError, match="request is too large"):
                store.set("k", bytes(2_000_000))
        else:
            store._redis.set(store.prefix, "not a hash")
            with pytest.raises(StoreError, match="WRONGTYPE"):
                store.set("k", "v")
            store._clear()


@needs("redis")
def test_waiting_client_hears_of_the_death_of_the_server(tmp_path):
    with services.redis(tmp_path) as server:
        store = RedisStore("127.0.0.1", server.port)
        threading.Timer(0.05, server.kill).start()
        with pytest.raises(StoreConnectionError, match=f"127.0.0.1:{server.port}"):
            store.wait(["never"], 60)
        store.close()


@needs("etcd")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_etcd_store_survives_a_member(tmp_path, how):
    """Adds from two clients, while one of three members dies: none is lost, none done twice."""
    with services.etcd(tmp_path, members=3) as members:
        endpoints = [("127.0.0.1", member.port) for member in members]
        with EtcdStore(endpoints) as store, EtcdStore(endpoints[::-1]) as other:
            sums, half = [], threading.Event()

            def work(each):
                for number in range(40):
                    if number == 10:
                        half.set()
                    sums.append(each.add("n", 1))

            threads = [threading.Thread(target=work, args=(each,)) for each in (store, other)]
            for thread in threads:
                thread.start()
            half.wait(60)
            os.kill(members[0].pid, how)
            for thread in threads:
                thread.join()
            assert sorted(sums) == list(range(1, 81))
            assert store.get("n") == other.get("n") == b"80"
