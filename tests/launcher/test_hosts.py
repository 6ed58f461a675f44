"""Agents on several hosts, each a network namespace."""

import os
import re
import signal

import pytest

from tests.support import netns
from tests.support.launches import gone
from tests.support.nodes import LOSING, PATIENT, REDUCING, Job

pytestmark = pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))


@pytest.mark.parametrize("tls", ["auto", "on"])
def test_nodes_meet_by_name_restart_and_do_without_a_host_that_is_cut_off(tmp_path, tls):
    variables = {"UNISONO_TLS": tls}
    with netns.Network(2) as network, Job(tmp_path, REDUCING, network.hosts, **variables) as job:
        # The first host is the endpoint, by name alone.
        options = {"nnodes": "1:2", "endpoint": "host1", "conf": LOSING}
        first, second = (job.node("--max-restarts=1", **options) for _ in range(2))
        ups = first.next_ups(1) + second.next_ups(1)
        assert sorted((up.rank, up.world_size, up.total) for up in ups) == [(0, 2, 2), (1, 2, 2)]
        # Network namespaces do not hide process numbers.
        os.kill(ups[0].pid, signal.SIGKILL)
        again = first.next_ups(1) + second.next_ups(1)
        assert {(up.restart, up.total) for up in again} == {(1, 2)}
        network.cut(network.hosts[1])
        [up] = first.next_ups(1)
        assert (up.rank, up.world_size, up.restart) == (0, 1, 1)
        # The other side cannot reach the store any more, ends its workers and says why.
        assert second.ended() == 1
        assert "the rendezvous store is gone" in second.err
        assert gone([up.pid for up in ups + again])
        job.stop()
        assert first.ended() == 0


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_first_node_may_call_its_own_host_localhost(tmp_path, backend):
    """What the operators of PyTorchJob write into the pods, as PET_MASTER_ADDR or endpoint."""
    with netns.Network(2) as network, Job(tmp_path, REDUCING, network.hosts) as job:
        agents = []
        for rank, host in enumerate(["localhost", "host1"]):
            if backend == "static":
                flags = ["--nnodes=2", f"--node-rank={rank}", f"--master-port={job.port}"]
                agents.append(job.start(*flags, PET_MASTER_ADDR=host))
            else:
                agents.append(job.node(endpoint=f"{host}:{job.port}", conf=PATIENT))
        ups = [agent.next_ups(1)[0] for agent in agents]
        assert {(up.world_size, up.total) for up in ups} == {(2, 2)}
        job.stop()
        assert [agent.ended() for agent in agents] == [0, 0]


def test_agents_that_wait_in_vain_say_which_host_was_refused_and_why(tmp_path):
    with netns.Network(2) as network, Job(tmp_path, REDUCING, network.hosts) as job:
        first = job.node(conf=f"{PATIENT},join_timeout=8")
        second = job.node(conf=f"{PATIENT},join_timeout=8", UNISONO_TLS="off")
        assert [second.ended(), first.ended()] == [1, 1]
        here, there = (re.escape(host.v4) for host in network.hosts)
        named = rf"refused {there}:\d+: it does not encrypt; give it the UNISONO_TLS of this server"
        assert re.search(rf"1 of at least 2 nodes came .*; the store at .*:\d+ {named}", first.err)
        assert f"at host1:{job.port}" in second.err or here in second.err
        assert "it encrypts its connections, and this client does not" in second.err
