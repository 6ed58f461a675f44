"""Show the differences from Gloo that the README lists, on torch.distributed. Needs torch."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

TIMEOUT_S = 3


def column() -> None:
    """Reduce the second column of a table; every element must become 3.0."""
    import torch
    import torch.distributed as dist

    table = torch.zeros(3, 3)
    table[:, 1] = dist.get_rank() + 1.0
    dist.all_reduce(table[:, 1])
    print(f"column is {table[:, 1].tolist()}, expected [3.0, 3.0, 3.0]")


def counts() -> None:
    """Call all_reduce with four elements on rank 0 and with eight on rank 1."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(4 * (dist.get_rank() + 1)))


def dtypes() -> None:
    """Call all_reduce with floats on rank 0 and with integers on rank 1."""
    import torch
    import torch.distributed as dist

    ones = torch.ones(4, dtype=(torch.float32, torch.int32)[dist.get_rank()])
    dist.all_reduce(ones)
    print(f"1 + 1 is {ones.tolist()}")


def missing() -> None:
    """Call all_reduce on rank 0 only; rank 1 waits until rank 0 has ended."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(4))
    else:
        sys.stdin.read()


CASES = {case.__name__: case for case in (column, dtypes, counts, missing)}


def be_rank(case: str, rank: str, file: str) -> None:
    """Run one case as one of two ranks."""
    import torch.distributed as dist

    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", f"file://{file}", timeout, rank=int(rank), world_size=2)
    try:
        CASES[case]()
    except RuntimeError as error:
        print(f"{type(error).__name__}: {str(error).partition(']')[2].strip() or error}")
    # Skip the interpreter's shutdown, in which a failed group may abort the process.
    sys.stdout.flush()
    os._exit(0)


def show(case: str) -> None:
    """Run one case on two ranks and print how each ended."""
    print(f"{case}:")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, case, str(rank), str(Path(folder, "store"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for rank, process in enumerate(ranks):
            out, err = process.communicate()
            code = process.returncode
            ended = f"killed by {signal.Signals(-code).name}, " if code < 0 else ""
            lines = (out.strip() or err.strip() or "no error").splitlines()
            print(f"  rank {rank}: {ended}{lines[-1][:160]}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        be_rank(*sys.argv[1:])
    elif importlib.util.find_spec("torch") is None:
        print("torch is not installed: nothing to show")
    else:
        for name in CASES:
            show(name)
