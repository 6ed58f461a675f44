"""Many launches at once on one machine, none of which was told a port."""

from __future__ import annotations

import subprocess
import sys

LAUNCHES = 50

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
from unisono.cli.main import main
from unisono.elastic import agent
from unisono.stores.wire import MAGIC, Op, encode_request

requests = ((Op.VALIDATE, MAGIC), (Op.ADD, "/workers", 1), (Op.BARRIER, "/all", 2))
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


def test_fifty_launches_at_once():
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHERS, str(LAUNCHES), WORKER],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == f"{LAUNCHES}\n", done.stderr
