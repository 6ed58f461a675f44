"""ProcessGroup without a default group, and c10d's names of its methods."""

import re
from datetime import timedelta
from functools import partial

import numpy as np
import pytest

from tests.support.programs import python
from tests.support.together import on_threads
from unisono import (
    HashStore,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    TCPStore,
    is_initialized,
    is_nccl_available,
)
from unisono.errors import ClosedError, UnsupportedError


def check_two_groups(rank, size, store, transport):
    pg = ProcessGroup(PrefixStore("mine", store), rank, size, timeout=30, name="mine")
    other = ProcessGroup(PrefixStore("other", store), size - 1 - rank, size, "gloo", 30)
    try:
        x, y = np.ones(2), np.full(1, rank)
        assert pg.allreduce(x).wait() is True
        other.broadcast(y, 0)
        assert x.tolist() == [size] * 2
        assert y == size - 1, "rank 0 of the second group is the last rank of the first"
        assert (pg.rank(), pg.size(), pg.timeout_s) == (rank, size, 30)
        assert pg.ranks == tuple(range(size))
        assert re.fullmatch(
            f"<ProcessGroup 'mine' rank={rank} size={size} cpu=unisono "
            f"engine=(native over=shared-memory|reference over=messages) transport={transport}>",
            repr(pg),
        )
        assert not is_initialized()
    finally:
        pg.close()
        pg.close()
        other.close()
        assert repr(pg) == "<ProcessGroup 'mine' closed>"
        with pytest.raises(ClosedError, match="barrier on group 'mine', which was destroyed"):
            pg.barrier()


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_two_groups_over_a_store(kind):
    if kind == "hash":
        store, transport = HashStore(), "inproc"
    else:
        store, transport = TCPStore("127.0.0.1", 0, is_master=True), "tcp"
    with store:
        on_threads(*(partial(check_two_groups, rank, 3, store, transport) for rank in range(3)))


def test_groups_across_jobs_as_scripts_make_them():
    def member(rank, store):
        limit = timedelta(seconds=30)
        gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, 2, limit)
        plain = ProcessGroup(PrefixStore("plain", store), rank, 2, limit)
        x = np.full(2, rank + 1)
        assert gloo.allreduce(x).wait()
        assert x.tolist() == [3, 3]
        y = np.full(2, rank)
        assert plain.broadcast([y], 1).wait()
        assert y.tolist() == [1, 1]
        assert gloo.timeout_s == plain.timeout_s == 30
        # Scripts ask for the class to find out the backend.
        assert isinstance(gloo, ProcessGroup)
        assert not isinstance(gloo, ProcessGroupNCCL)
        assert not issubclass(ProcessGroupNCCL, ProcessGroupGloo)
        assert gloo.config.device_backend_map["cpu"] == "gloo"
        gloo.close()
        plain.close()

    with HashStore() as store:
        on_threads(*(partial(member, rank, store) for rank in range(2)))
        if not is_nccl_available():
            with pytest.raises(UnsupportedError, match="backend 'nccl' needs nccl4py"):
                ProcessGroupNCCL(store, 0, 1, timedelta(seconds=1))


def test_methods_of_c10d_say_what_they_stand_for():
    assert ProcessGroup.allreduce.__name__ == "allreduce"
    assert ProcessGroup.allreduce.__doc__.startswith("`all_reduce` in c10d's forms")


FEW_DESCRIPTORS = """
import gc, os, resource, sys
import unisono as dist
from unisono.errors import UnisonoError

dist.init_process_group()  # imports what it needs
dist.destroy_process_group()
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
open_now = len(os.listdir("/dev/fd"))
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
for free in range(30):
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + free, most))
    wanted = f"may have {open_now + free} (ulimit -n)"
    # One number of descriptors takes the whole time-out; a busy machine needs the long one.
    for timeout_s in (0.5, 10.0):
        try:
            dist.init_process_group(timeout=timeout_s)
            dist.destroy_process_group()
            print("joined", free)
            sys.exit()
        except UnisonoError as error:
            first_line = str(error).partition("\\n")[0]
        gc.collect()
        if wanted in first_line:
            break
        assert "did not answer" in first_line or " within " in first_line, first_line
    assert wanted in first_line, first_line
"""


def test_a_process_without_descriptors_says_so():
    done = python("-c", FEW_DESCRIPTORS)
    assert (done.returncode, done.stdout[:6]) == (0, "joined"), done.stderr
