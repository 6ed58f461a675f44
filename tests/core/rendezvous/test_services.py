"""redis:// and etcd://, and a launch whose nodes meet there."""

import multiprocessing
import os
import shutil
import signal

import numpy as np
import pytest

import unisono as dist
from tests.support import services
from tests.support.nodes import CONF, Job
from tests.support.services import KINDS
from unisono.core.groups.membership_store import Document
from unisono.core.groups.world import current
from unisono.core.rendezvous import rendezvous
from unisono.core.rendezvous.agents.state import AgentsState, Node, Phase
from unisono.core.rendezvous.agents.worker_world import WorkerStore, job_prefix, workers_url
from unisono.core.rendezvous.services import open_launched, open_service
from unisono.core.stores import PrefixStore
from unisono.errors import StoreError, StoreTimeoutError
from unisono.lowlevel import EtcdStore, RedisStore
from unisono.testing import run


def two_worlds(rank, url, how):
    """Make two worlds one after another at a place, and reduce in each."""
    for turn in range(2):
        if how == "store":
            store, _, _ = next(rendezvous(url, rank, 2, timeout=30))
            dist.init_process_group(store=store, rank=rank, world_size=2, timeout=30)
        else:
            dist.init_process_group(init_method=url, rank=rank, world_size=2, timeout=30)
        x = np.full(3, rank + 1.0 + turn)
        dist.all_reduce(x)
        np.testing.assert_array_equal(x, 3 + 2 * turn)
        dist.destroy_process_group()
        if how == "store":
            store.close()


def go_on(rank, url):
    """Make a second generation of ranks 0 and 1 of 3, whose document is at a place."""
    with next(rendezvous(url, rank, 3, timeout=30))[0] as store:
        current().membership.document = Document(store)
        store.barrier("all are there", 3, 30.0)
        if rank == 2:
            dist.destroy_process_group()
            return None
        dist.reconfigure(timeout=30)
        x = np.array([rank + 1.0])
        dist.all_reduce(x)
        return dist.group.WORLD.name, float(x[0])


@pytest.fixture(scope="module", params=KINDS)
def place(request, tmp_path_factory):
    """Return the start of the URL of a server, which all tests share."""
    with services.server_of(request.param, tmp_path_factory.mktemp(request.param)) as server:
        # Of etcd nobody is at the first place: the second answers.
        others = "127.0.0.1:1," if request.param == "etcd" else ""
        yield f"{request.param}://{others}127.0.0.1:{server.port}"


def test_workers_in_a_service_are_told_which_nodes_the_launcher_gave_up(place):
    """Where agents of `--restart worker` meet in a service, their workers do so, too."""
    nodes = tuple(Node(id=n, host=n, address="", nprocs=2) for n in ("a", "b"))
    state = AgentsState(epoch=3, phase=Phase.RUNNING, order=nodes, members=nodes[:1])
    store = WorkerStore(service=workers_url(f"{place}/gone", "a job"))
    agents = open_service(f"{place}/gone", "", timeout=30)
    with agents, open_launched(store.url(3), 30) as workers:
        assert Document(workers).gone(30) == ([], [])
        store.report_gone(PrefixStore(job_prefix("a job"), agents), state)
        assert Document(workers).gone(30) == ([2, 3], ["b"])


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


def test_survivors_go_on(place):
    found = run(go_on, 3, args=(f"{place}/survivors",))
    assert found == [("default:generation-2", 3.0)] * 2 + [None]


def test_ranks_meet(place):
    url = f"{place}/meet?run_id=one"
    met = [next(rendezvous(url, rank, 2, timeout=20)) for rank in range(2)]
    first, second = (store for store, _, _ in met)
    assert [(rank, world_size) for _, rank, world_size in met] == [(0, 2), (1, 2)]
    assert isinstance(first, RedisStore | EtcdStore)
    assert first.prefix == "meet/one"
    first.set("k", "v")
    assert second.get("k") == b"v"
    first.close()
    second.close()


def test_prefix_without_words_is_ours_with_the_name_of_the_job(place, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    store, _, _ = next(rendezvous(place, 0, 1, timeout=20))
    assert store.prefix == "unisono/job/3"
    store.close()


def test_keys_of_a_dead_run_are_not_trusted(place):
    dead = [next(rendezvous(f"{place}/dead", rank, 2, timeout=20))[0] for rank in range(2)]
    dead[0].set("address/0", "stale")
    with pytest.raises(StoreTimeoutError, match="still belongs to another run of 2 ranks"):
        next(rendezvous(f"{place}/dead", 0, 2, timeout=0.05))
    store, _, _ = next(rendezvous(f"{place}/dead?run_id=new", 0, 2, timeout=20))
    assert not store.check(["address/0"])
    for each in (store, *dead):
        each.close()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("how", ["store", "init_method"])
def test_worlds_one_after_another(place, how):
    forks = multiprocessing.get_context("forkserver")
    ranks = [
        forks.Process(target=two_worlds, args=(rank, f"{place}/{how}", how)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
        rank.close()
    assert codes == [0, 0]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
@pytest.mark.parametrize("kind", KINDS)
def test_secured(kind, tmp_path, monkeypatch):
    # The certificate that is given counts, not the environment's.
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nowhere")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    cert, key = f"{tmp_path}/cert.pem", f"{tmp_path}/key.pem"
    with services.server_of(kind, tmp_path, secured=True) as server:
        place = f"localhost:{server.port}"
        if kind == "redis":
            good = f"rediss://:p%40ss@{place}?db=2&ssl_ca_certs={cert}"
            bad = f"rediss://{place}?ssl_ca_certs={cert}", f"redis://{place}"
        else:
            good = f"etcds://{place}?ca_cert={cert}&cert_cert={cert}&cert_key={key}"
            bad = f"etcds://{place}?ca_cert={cert}", f"etcd://{place}"
        store, _, _ = next(rendezvous(good, 0, 1, timeout=20))
        with store, store.clone() as clone:
            store.set("k", "v")
            assert clone.get("k") == b"v"
        for url in bad:
            with pytest.raises(StoreError, match=place if kind == "redis" else "local"):
                next(rendezvous(url, 0, 1, timeout=0.2))


@pytest.mark.sweep(1)
def test_nodes_of_a_launch_meet_and_restart_and_the_name_is_free_again(place, tmp_path):
    backend, _, places = place.partition("://")
    flags = [
        "--nnodes=2",
        f"--rdzv-backend={backend}",
        f"--rdzv-endpoint={places}",
        f"--rdzv-conf={CONF}",
        "--max-restarts=1",
        "--rdzv-id=same",
    ]
    with Job(tmp_path) as job:
        for turn in range(2):
            agents = [job.start(*flags) for _ in range(2)]
            ups = [up for agent in agents for up in agent.next_ups(1)]
            assert sorted(up.rank for up in ups) == [0, 1]
            if turn == 0:
                os.kill(ups[0].pid, signal.SIGKILL)
                again = [up for agent in agents for up in agent.next_ups(1)]
                assert {(up.restart, up.total) for up in again} == {(1, 2)}
            job.stop()
            assert [agent.ended() for agent in agents] == [0, 0], agents[0].err
            job.restart()
