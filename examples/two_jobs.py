"""Reduce across two jobs that were launched separately.

    python examples/two_jobs.py

The script launches itself twice, as two jobs of two ranks, and serves the store in which they meet.
Each job has a default group of its own. In addition, all four processes make a `ProcessGroup` over
the common store. A prefix separates its keys from other keys.
"""

import os
import secrets
import subprocess
import sys

import numpy as np

import unisono as dist

JOBS = ("left", "right")
RANKS = 2


def main() -> int:
    """Launch both jobs; return the worse of their exit codes."""
    # One secret for both jobs and their common store. Without it each launch makes its own.
    os.environ.setdefault("UNISONO_TOKEN", secrets.token_hex())
    with dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        launcher = [sys.executable, "-m", "unisono", "run", "--nproc-per-node", str(RANKS)]
        jobs = [
            subprocess.Popen([*launcher, __file__, job, store.host, str(store.port)])
            for job in JOBS
        ]
        return max(job.wait() for job in jobs)


def work(job: str, host: str, port: int) -> None:
    """Run one rank of one job."""
    dist.init_process_group()
    rank = dist.get_rank()
    here = JOBS.index(job) * RANKS + rank

    meeting = dist.PrefixStore("both jobs", dist.TCPStore(host, port))
    bridge = dist.ProcessGroup(meeting, here, len(JOBS) * RANKS, timeout=60, name="bridge")

    own, both = np.array([10.0**here]), np.array([10.0**here])
    dist.all_reduce(own)
    bridge.allreduce(both).wait()

    # c10d's form of the methods, as in a script for torch.distributed.
    gathered = [np.zeros(1) for _ in range(bridge.size())]
    bridge.allgather([gathered], [own]).wait()
    bridge.barrier().wait()

    sums = " ".join(f"{x[0]:.0f}" for x in gathered)
    print(f"{job} {rank}: own {own[0]:.0f}, both {both[0]:.0f}, gathered {sums}", flush=True)
    if sums != "11 11 1100 1100" or both[0] != 1111:
        sys.exit("WRONG: the ranks of the two jobs have 1 and 10, 100 and 1000")
    bridge.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
