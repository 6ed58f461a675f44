"""The fixtures of tests that start `unisono run`."""

import os

import pytest

from tests.support import netns
from tests.support.launches import Launches
from tests.support.nodes import WORKER, Job


@pytest.fixture
def launches(tmp_path):
    """Return the launches in a new folder; all of them end with the test."""
    launches = Launches(tmp_path)
    yield launches
    launches.close()


@pytest.fixture
def clean_environment(monkeypatch):
    """Take away what gives the options of `unisono run` other defaults."""
    for name in list(os.environ):
        if name.startswith(("PET_", "UNISONO_")) or name in ("RANK", "OMP_NUM_THREADS"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def hosts():
    """As many hosts as a test has agents; none where there can be only this one."""
    if netns.why_not() is not None:
        yield []
        return
    with netns.Network(4) as network:
        yield network.hosts


@pytest.fixture
def job_of(tmp_path, hosts):
    """Return a function that makes a job, whose workers run until the file `stop` appears."""
    jobs = []

    def make(script=WORKER, name="job", hosts=hosts, **if_on_hosts):
        jobs.append(Job(tmp_path / name, script, hosts, **if_on_hosts if hosts else {}))
        return jobs[-1]

    yield make
    for each in jobs:
        each.close()
