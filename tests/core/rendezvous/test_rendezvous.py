"""env://, tcp:// and file://, and the registry of schemes."""

import logging
import socket
from datetime import timedelta
from functools import partial

import pytest

from tests.support.together import on_threads
from unisono.core.base.net.interfaces import reachable_hosts
from unisono.core.rendezvous import register_rendezvous_handler, registry, rendezvous
from unisono.core.rendezvous.joining import open_for_newcomer
from unisono.core.stores import FileStore, HashStore, PrefixStore, TCPStore
from unisono.errors import RendezvousError, StoreError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Return a function that sets exactly these rendezvous variables."""

    def change(**variables: str) -> None:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, text in variables.items():
            monkeypatch.setenv(name, text)

    change()
    return change


def meet(url, *args, **options):
    return next(rendezvous(url, *args, **options))


def all_ranks(make, world_size):
    """Call make(rank) in a thread for each rank and return the results in order of ranks."""
    return on_threads(*(partial(make, rank) for rank in range(world_size)))


@pytest.mark.parametrize("scheme", ["env", "tcp", "file"])
def test_ranks_meet(scheme, environment, tmp_path, port):
    environment(WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    urls = {
        "env": "env://?rank={}",
        "tcp": f"tcp://127.0.0.1:{port}?world_size=3&rank={{}}",
        "file": f"file://{tmp_path}/store?world_size=3&rank={{}}",
    }
    met = all_ranks(lambda rank: meet(urls[scheme].format(rank), timeout=20), 3)
    assert [rank for _, rank, _ in met] == [0, 1, 2]
    assert {world_size for _, _, world_size in met} == {3}
    for store, rank, _ in met:
        store.set(f"rank{rank}", str(rank))
    for store, _, _ in met:
        assert store.multi_get(["rank0", "rank1", "rank2"]) == [b"0", b"1", b"2"]
        assert store.timeout == timedelta(seconds=20)
        assert isinstance(store, FileStore if scheme == "file" else TCPStore)
    assert met[0][0].is_master if scheme != "file" else True
    for store, rank, _ in reversed(met):
        assert scheme == "file" or store.is_master == (rank == 0)
        store.close()


def test_agent_store_has_only_clients(environment, monkeypatch):
    with TCPStore("127.0.0.1", 0, is_master=True) as agent:
        environment(
            RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(agent.port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        store, _, _ = meet("env://")
        assert not store.underlying_store.is_master
        store.set("k", "v")
        assert agent.get("worker/attempt_0/k") == b"v"
        store.close()
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        store, _, _ = meet("env://")
        assert not store.check(["k"])
        store.close()


def test_url_of_another_port_than_the_launchers_is_served_by_rank_0(environment, port):
    """Old scripts have an address of their own."""
    with TCPStore("127.0.0.1", 0, is_master=True) as agent:
        environment(
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(agent.port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        url = f"tcp://127.0.0.1:{port}?world_size=2&rank={{}}"
        met = all_ranks(lambda rank: meet(url.format(rank), timeout=20)[0], 2)
        assert [store.is_master for store in met] == [True, False]
        met[1].set("k", "v")
        assert met[0].get("k") == b"v"
        # The launcher's own address has the launcher's store.
        url = f"tcp://127.0.0.1:{agent.port}?world_size=2&rank=0"
        with meet(url, timeout=20)[0] as store:
            store.set("k", "w")
        assert agent.get("worker/attempt_0/k") == b"w"
        assert met[0].get("k") == b"v"
        for store in reversed(met):
            store.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
@pytest.mark.parametrize(
    ("sizes", "token", "serves"),
    [
        (("2", "1"), "", True),
        (("2", "2"), "secret", False),
        (("2", ""), "secret", True),
        (("2", ""), "", False),
    ],
)
def test_localhost_is_for_this_host_unless_the_job_spans_hosts(
    environment, monkeypatch, host, sizes, token, serves
):
    environment(WORLD_SIZE=sizes[0], RANK="0", MASTER_ADDR=host, MASTER_PORT="0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", sizes[1])
    monkeypatch.setenv("UNISONO_TOKEN", token)
    with meet("env://", timeout=20)[0] as store:
        for other in reachable_hosts():
            family = socket.AF_INET6 if ":" in other else socket.AF_INET
            with socket.socket(family) as sock:
                answer = sock.connect_ex((other, store.port))
            assert (answer == 0) is serves, (other, answer)


def test_two_worlds_on_one_port_of_one_process():
    first, _, _ = meet("tcp://127.0.0.1:0?rank=0&world_size=1")
    second, _, _ = meet(f"tcp://127.0.0.1:{first.port}?rank=0&world_size=1")
    PrefixStore("one", first).set("k", "1")
    assert second.get("one/k") == b"1"
    first.close()
    second.close()


@pytest.mark.parametrize("missing", VARIABLES[:4])
def test_missing_variable_is_named_and_the_others_listed(environment, missing):
    present = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    del present[missing]
    environment(**present)
    with pytest.raises(RendezvousError) as caught:
        meet("env://")
    first_line = str(caught.value).partition("\n")[0]
    assert f"environment variable {missing} expected, but not set" in first_line
    assert all(f"{name}={text}" in first_line for name, text in present.items())
    assert f"not set: {missing})" in first_line


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"MASTER_PORT": "abc"}, "MASTER_PORT must be an integer, got 'abc'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be 0 to 65535, got 65536"),
        ({"MASTER_PORT": ""}, "MASTER_PORT expected, but not set"),
        ({"RANK": "1"}, r"\(RANK, WORLD_SIZE\): rank must be 0 to 0, got 1"),
        ({"RANK": "-1"}, "rank must be 0 to 0, got -1"),
        ({"RANK": "zero"}, "RANK must be an integer, got 'zero'"),
        ({"WORLD_SIZE": "0"}, r"\(RANK, WORLD_SIZE\): world_size must be at least 1, got 0"),
    ],
)
def test_bad_variable_is_named(environment, change, text):
    good = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment(**{**good, **change})
    with pytest.raises(RendezvousError, match=text):
        meet("env://")


@pytest.mark.parametrize("role", ["founder", "newcomer"])
def test_a_service_must_have_a_known_scheme(environment, monkeypatch, role):
    environment(RANK="0", WORLD_SIZE="1")
    monkeypatch.setenv("UNISONO_STORE", "tcp://h:1")
    text = "UNISONO_STORE expected redis, rediss, etcd, etcds as scheme, got 'tcp://h:1'"
    with pytest.raises(RendezvousError, match=text):
        meet("env://") if role == "founder" else open_for_newcomer("env://", 1.0)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("tcp://h:70000?rank=0&world_size=1", "Port out of range"),
        ("tcp://h:x?rank=0&world_size=1", "bad host or port"),
        ("tcp://h:1?rank=0", "tcp:// rendezvous: world_size is missing"),
        ("tcp://h:1?rank=a&world_size=1", "rank must be an integer, got 'a'"),
        ("tcp://h:1?rank=2&world_size=2", "rank must be 0 to 1, got 2"),
        ("file:///x?world_size=1", "file:// rendezvous: rank is missing"),
        (
            "foo://x",
            "no rendezvous handler for foo://.*env://, etcd://, .*file://, redis://, .*tcp://",
        ),
        ("nothing", "no rendezvous handler for ://"),
        ("redis://h/p?world_size=1", "redis:// rendezvous: rank is missing"),
        ("etcd://h/p?rank=0", "etcd:// rendezvous: world_size is missing"),
        ("redis://h:x/p?rank=0&world_size=1", "bad host or port in the URL 'redis://h:x"),
        ("redis://h,i/p?rank=0&world_size=1", "names several hosts, redis:// takes one"),
        ("redis://h/p?rank=0&world_size=1&db=x", "db in the URL .* must be an integer, got 'x'"),
        (
            "redis://h/p?rank=0&world_size=1&bd=1",
            r"unknown bd in the URL .*known: db, rank, run_id",
        ),
        ("etcd://me:pw@h/p?rank=0&world_size=1", "has a user, which etcd:// does not support"),
    ],
)
def test_bad_url(url, text):
    with pytest.raises(RendezvousError, match=text):
        meet(url)


def test_unknown_parameters_are_told(tmp_path, caplog):
    query = "rank=0&world_size=1&use_libuv=0&run_idd=7&x=1"
    with caplog.at_level(logging.WARNING, "unisono"):
        store, *place = meet(f"file://{tmp_path}/f?{query}")
        store.close()
        assert place == [0, 1]
        meet("tcp://127.0.0.1:0?rank=0&world_size=1&use_libuv=1")[0].close()
    (record,) = caplog.records
    assert "run_idd and x has no meaning" in record.getMessage()
    assert "(known: rank, run_id, world_size)" in record.getMessage()


def test_run_id_tells_the_file_of_another_run(environment, tmp_path, monkeypatch):
    url = f"file://{tmp_path}/store"
    old = FileStore(f"{tmp_path}/store", 2, run_id="old")
    old.set("stale", "1")
    with pytest.raises(StoreError, match=r"belongs to run 'old' .*this is run 'new'"):
        meet(f"{url}?run_id=new", 0, 2)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with pytest.raises(StoreError, match="this is run '17/3/'"):
        meet(url, 0, 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with pytest.raises(StoreError, match="this is run 'job/2'"):
        meet(url, 0, 2)
    old.close()


def test_store_of_the_world_before_is_not_used_again():
    """Rank 0 is still in it, and says so by not coming."""
    with meet("tcp://127.0.0.1:0?rank=0&world_size=2")[0] as old:
        url = f"tcp://127.0.0.1:{old.port}"
        meet(url, 1, 2)[0].close()
        with pytest.raises(RendezvousError, match=r"rank 1 waited .* did not leave the world bef"):
            meet(url, 1, 2, timeout=0.1)
        # Another rank of the same process is there for the first time.
        with meet(url, 2, 3)[0] as other:
            assert other.timeout == old.timeout
        old.close()
        with meet(url, 0, 2)[0] as new, meet(url, 1, 2)[0] as store:
            new.set("k", "v")
            assert store.get("k") == b"v"


def test_own_handler_gets_url_and_options(monkeypatch):
    monkeypatch.setattr(registry, "_HANDLERS", dict(registry._HANDLERS))
    seen = []

    def handler(url, **options):
        seen.append((url, options))
        yield HashStore(), 0, 1

    register_rendezvous_handler("mine", handler)
    store, rank, world_size = meet("mine://place", 0, 1, timeout=3, color="blue")
    assert (type(store), rank, world_size) == (HashStore, 0, 1)
    assert seen == [("mine://place?rank=0&world_size=1", {"timeout": 3, "color": "blue"})]
