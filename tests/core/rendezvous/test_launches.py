"""Many launches at once without a port, and attempts that share torchrun's store."""

import importlib.util

import pytest

from tests.support.programs import python

# Each worker is counted in its launch's store, and passes a barrier with the other one.
WORKER = """
import os, socket
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
with socket.create_connection(place, timeout=60) as sock:
    sock.sendall(bytes.fromhex(os.environ["REQUESTS"]))
    replies = b""
    while len(replies) < 9:
        more = sock.recv(9)
        assert more, "the store ended"
        replies += more
    assert replies[0] in (1, 2), "a worker of another launch is in this store"
"""

# The launchers are forks of one process, so that Python and unisono are loaded once.
LAUNCHERS = """
import os, sys
from unisono.workbench.cli.main import main
from unisono.launcher import agent
from unisono.core.stores.tcp.wire import MAGIC, RequestOp, encode_request

ops = RequestOp.VALIDATE, RequestOp.ADD, RequestOp.BARRIER
requests = ((ops[0], MAGIC), (ops[1], "/workers", 1), (ops[2], "/all", 2))
os.environ["REQUESTS"] = b"".join(encode_request(*each) for each in requests).hex()
worker = ["--no-python", sys.executable, "-S", "-c", sys.argv[2]]
pids = []
for _ in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        os._exit(main(["run", "--nproc-per-node", "2", *worker]))
    pids.append(pid)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids].count(0))
"""


@pytest.mark.timeout(320)  # three processes for each launch, on however few cores
@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.whole("150 processes"))])
def test_many_launches_at_once(count):
    done = python("-c", LAUNCHERS, count, WORKER, limit_s=300.0)
    assert done.stdout == f"{count}\n", done.stderr


TWO_ATTEMPTS = """
import os
import numpy as np
import unisono as dist

dist.init_process_group(timeout=60)
x = np.ones(1)
dist.all_reduce(x)
store = dist.group.WORLD.store
found = "stale" if store.check(["left"]) else "fresh"
os.write(1, f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {x[0]:g} {found}\\n".encode())
dist.barrier()
store.set("left", "behind")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3)
dist.destroy_process_group()
"""


@pytest.mark.whole("loads torch in five processes")
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_restarted_workers_of_torchrun_find_nothing_of_those_before(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_ATTEMPTS)
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script]
    done = python("-m", "torch.distributed.run", *words, limit_s=120.0)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 fresh"] * 2 + ["1 2 fresh"] * 2
