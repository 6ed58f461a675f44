"""Files of records, without torch."""

import os
import pickle
import signal

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import wait_until
from unisono.core.recorder.flight_recorder import (
    GroupRecords,
    Origin,
    RankRecords,
    encode,
    encode_short,
)
from unisono.errors import InvalidArgumentError
from unisono.workbench.trace.decoding import decode


@pytest.fixture
def alone():
    """A world of one rank."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def mine(rank=0):
    origin = Origin("host", 7, "boot", 10, 20)
    return RankRecords(rank, [GroupRecords("0", "default", (0,), dist.trace_records())], origin)


def test_a_file_keeps_all_records(alone):
    dist.all_reduce(np.zeros(3))
    dist.broadcast(np.zeros(2, np.int8), 0)
    saved = mine(5)
    found = decode(encode(saved))
    assert found == decode(encode_short(saved)) == saved
    assert [record.op for record in found.groups[0].records] == ["all_reduce", "broadcast"]


def test_a_file_has_torchs_keys(alone):
    dist.all_gather_into_tensor(np.zeros(3), np.zeros(3))
    dump = pickle.loads(encode(mine()))
    [entry] = dump["entries"]
    assert dump["version"] == "2.10"
    assert dump["pg_config"] == {"0": {"name": "0", "desc": "default", "ranks": "[0]"}}
    assert entry["process_group"] == ("0", "default")
    assert (entry["profiling_name"], entry["state"]) == ("gloo:_all_gather_base", "completed")
    assert (entry["input_sizes"], entry["output_sizes"]) == ([[3]], [[3]])
    assert entry["frames"][0]["filename"] == __file__


def test_a_file_cannot_run_code():
    class Evil:
        def __reduce__(self):
            return os.getcwd, ()

    with pytest.raises(InvalidArgumentError, match=r"a trace file has no place for posix\.getcwd"):
        decode(pickle.dumps({"entries": [Evil()]}))
    with pytest.raises(InvalidArgumentError, match="this is no file of a flight recorder"):
        decode(b"nonsense")


def test_a_file_is_written_on_request(alone, tmp_path, monkeypatch):
    monkeypatch.delenv("UNISONO_TRACE_DIR", raising=False)
    with pytest.raises(InvalidArgumentError, match="write_trace: no folder given"):
        dist.write_trace()
    dist.barrier()
    # Groups of other ranks that this process had before may not be collected yet.
    names = dist.write_trace(tmp_path / "new")
    path = tmp_path / "new" / "trace_rank_0"
    assert str(path) in names
    assert sorted(os.listdir(tmp_path / "new")) == sorted(map(os.path.basename, names))
    with open(path, "rb") as file:
        group = next(group for group in decode(file.read()).groups if group.key == "0")
    assert group.records[-1].op == "barrier"


def test_a_file_is_written_at_a_signal(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_TRACE_DIR", str(tmp_path))
    before = signal.getsignal(signal.SIGUSR2)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert wait_until((tmp_path / "trace_rank_0").exists)
    finally:
        signal.signal(signal.SIGUSR2, before)
        dist.destroy_process_group()
