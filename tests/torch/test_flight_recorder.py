"""Files of records: torch's analyser reads them, and torch's own files are read."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from unisono.errors import CollectiveMismatchError, CollectiveTimeoutError
from unisono.trace.flight_recorder import decode

pytest.importorskip("torch.distributed.flight_recorder.fr_trace")

ANALYSER = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]

THEIRS = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3, 2, dtype=torch.float64))
with open(sys.argv[1], "wb") as file:
    file.write(torch._C._distributed_c10d._dump_fr_trace())
"""


@contextlib.contextmanager
def common_folder(rank):
    """Make UNISONO_TRACE_DIR one new folder on all ranks."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    os.environ["UNISONO_TRACE_DIR"] = folder[0]
    try:
        yield Path(folder[0])
    finally:
        del os.environ["UNISONO_TRACE_DIR"]
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder[0])


def written(path):
    """Wait for a file."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.ranks(3, kind="processes")
def test_torchs_analyser_finds_the_mismatch_and_the_missing_rank(rank):
    with common_folder(rank) as folder:
        unequal, late = dist.new_group(), dist.new_group(timeout=1)
        x = np.zeros(4, np.float32)
        for group in (unequal, late):
            dist.all_reduce(x, group=group)
        with pytest.raises(CollectiveMismatchError):
            dist.all_reduce(np.zeros(8 if rank == 2 else 4, np.float32), group=unequal)
        (folder / f"trace_rank_{rank}").unlink()
        dist.barrier()
        if rank != 2:
            with pytest.raises(CollectiveTimeoutError):
                dist.broadcast(x, 0, group=late)
        # Rank 2 is in no call, and learns of the failure in the background.
        written(folder / f"trace_rank_{rank}")
        dist.barrier()
        if rank == 0:
            done = subprocess.run(
                [*ANALYSER, str(folder)], capture_output=True, text=True, timeout=200, check=True
            )
            found = done.stdout + done.stderr
            [mismatch] = [line for line in found.splitlines() if "error msg" in line]
            assert "Culprit rank 2" in mismatch
            assert "'[[4]]' does not match found input sizes: '[[8]]'" in mismatch
            # A file that was written late has the next barrier, too, which other files lack.
            assert "collective: gloo:broadcast\nmissing ranks: {2}\n" in found
            assert (
                f"test_torchs_analyser_finds_the_mismatch_and_the_missing_rank at {__file__}:"
                in found
            )


def test_torchs_own_file_is_read(tmp_path):
    env = os.environ | {"TORCH_FR_BUFFER_SIZE": "10"}
    file = tmp_path / "trace_rank_0"
    subprocess.run([sys.executable, "-c", THEIRS, str(file)], env=env, timeout=200, check=True)
    rank, groups = decode(file.read_bytes())
    [record] = [record for group in groups for record in group.records]
    assert rank is None
    assert (record.op, record.dtype, record.count) == ("all_reduce", "float64", 6)
    assert record.route == "gloo"
