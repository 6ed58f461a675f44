"""Two encrypted ranks whose connections all pass through somebody who changes them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import reserved_port
from unisono.core.base.net.tls import why_no_tls
from unisono.core.engines import is_native_built

pytestmark = pytest.mark.skipif(bool(why_no_tls()), reason=str(why_no_tls()))

LIMIT_S = 60
ROOT = Path(__file__).parents[3]
NATIVE = "native" if is_native_built() else "reference"

# Each rank publishes the port of a relay in place of its own.
JOB = """
import json, os, sys, threading
import numpy as np, unisono as dist
from tests.support.relay import Relay
from unisono.core.transports.tcp.address import TCPAddress

how, pack, relays = sys.argv[1], TCPAddress.pack, []
armed, kept = threading.Event(), []

def change(data, to_server):
    kept.append(data)
    if not armed.is_set() or len(data) < 4000:
        return data
    half = len(data) // 2
    return {
        "nothing": data,
        "changed": data[:-1] + bytes([data[-1] ^ 1]),
        "repeated": data + data,
        "reordered": data[half:] + data[:half],
        "lost": data[:half] + data[half + 1:],
        "spliced": kept[0] + data,
    }[how]

def publish(self):
    if not relays and os.getpid() == me:
        relays.append(Relay(self.port, change))
        return pack(self._replace(port=relays[0].port))
    return pack(self)

me, TCPAddress.pack = os.getpid(), publish
dist.init_process_group(timeout=20)
x, told = np.zeros(1 << 16), ""
try:
    for call in range(6):
        x[:] = dist.get_rank() + 1
        dist.all_reduce(x)
        assert (x == 3).all(), x
        armed.set()
except dist.errors.UnisonoError as error:
    told = f"{type(error).__name__}: {error}"
print(json.dumps([told, sum(map(len, kept))]), flush=True)
sys.stdin.read()  # the other rank may still need what this rank's relay has
os._exit(0)
"""


def run_job(how, engine):
    """Return what each rank was told."""
    with reserved_port() as port:
        return run_job_at(port, how, engine)


def run_job_at(port, how, engine):
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world |= {"UNISONO_TLS": "on", "UNISONO_TOKEN": "of the job", "UNISONO_ENGINE": engine}
    world |= {"UNISONO_SHARED_MEMORY": "0", "UNISONO_HOST": "127.0.0.1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, how],
            cwd=ROOT,
            env=os.environ | world | {"RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        lines = [rank.stdout.readline() for rank in ranks]
        ends = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    told, nbytes = zip(*map(json.loads, lines), strict=True)
    assert sum(nbytes) > 1 << 18  # one of the ranks has called the other
    return told


@pytest.mark.sweep(2)
@pytest.mark.parametrize("engine", sorted({NATIVE, "reference"}))
@pytest.mark.parametrize("how", ["changed", "repeated", "reordered", "lost", "spliced"])
def test_a_changed_connection_ends_calls_with_an_error_that_says_so(how, engine):
    told = run_job(how, engine)
    assert all("PeerLostError: all_reduce" in each for each in told), told
    assert any("a TLS record was changed, lost" in each for each in told), told


def test_a_relay_that_changes_nothing_is_not_noticed():
    assert run_job("nothing", NATIVE) == ("", "")
