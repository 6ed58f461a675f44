"""Agents on several hosts, each a network namespace."""

from __future__ import annotations

import pytest

from tests.support import netns
from tests.support.nodes import LOSING, PATIENT, Job, gone, kill

pytestmark = pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))


@pytest.fixture
def network():
    with netns.Network(2) as network:
        yield network


@pytest.fixture
def job(tmp_path, network):
    job = Job(tmp_path, hosts=network.hosts)
    yield job
    job.close()


def on_both(job, *flags, nnodes="2", conf=PATIENT):
    """An agent on each host; the first host is the endpoint, by name alone."""
    nodes = {"nnodes": nnodes, "nproc": 2, "endpoint": "host1", "conf": conf}
    return [job.node(*flags, **nodes) for _ in range(2)]


def test_nodes_meet_by_name_and_restart(job):
    agents = on_both(job, "--max-restarts=1")
    ups = [up for agent in agents for up in agent.next_ups(2)]
    assert sorted((up.rank, up.world_size, up.total) for up in ups) == [
        (rank, 4, 4) for rank in range(4)
    ]
    # Network namespaces do not hide process numbers.
    kill(ups[0].pid)
    again = [up for agent in agents for up in agent.next_ups(2)]
    assert {(up.restart, up.total) for up in again} == {(1, 4)}
    job.stop()
    assert [agent.finish() for agent in agents] == [0, 0]


def test_host_that_is_cut_off_is_done_without(job, network):
    first, second = on_both(job, nnodes="1:2", conf=f"{PATIENT},{LOSING}")
    ups, others = first.next_ups(2), second.next_ups(2)
    network.cut(network.hosts[1])
    alone = first.next_ups(2)
    assert [(up.rank, up.world_size, up.restart) for up in alone] == [(0, 2, 0), (1, 2, 0)]
    # The other side cannot reach the store any more, ends its workers and says why.
    assert second.finish() == 1
    assert "the rendezvous store is gone" in second.err
    assert gone([up.pid for up in ups + others])
    job.stop()
    assert first.finish() == 0
