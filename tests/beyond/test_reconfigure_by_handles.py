"""The members of the default group by handles: fewer, more, split, merged, after an abort."""

import contextlib

import numpy as np
import pytest

import unisono as dist
from unisono.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    RendezvousError,
    UnsupportedError,
    UsageError,
)


@contextlib.contextmanager
def reconfigurable(rank, path):
    """Yield (collect, reconfigure): exchange handles by the store; make a group."""
    assert not dist._supports_reconfigure()
    with pytest.raises(UnsupportedError, match="group 'default' cannot be reconfigured by handles"):
        dist._get_reconfigure_handle()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(str(path), 3)
    how = {"rank": rank, "world_size": 3, "timeout": 30, "enable_reconfigure": True}
    dist.init_process_group(store=store, **how)
    assert dist._supports_reconfigure()

    def collect(name):
        store.set(f"{name}/{rank}", dist._get_reconfigure_handle())
        return [store.get(f"{name}/{each}").decode() for each in range(3)]

    def reconfigure(uuid, handles, expected):
        assert dist._reconfigure(uuid, handles).wait()
        assert dist.get_world_size() == len(handles)
        x = np.array([10**rank])
        dist.all_reduce(x)
        assert x[0] == expected

    yield collect, reconfigure
    dist.barrier()
    dist.destroy_process_group()
    store.close()


@pytest.mark.ranks(3, kind="both")
def test_groups_shrink_split_and_merge(rank, tmp_path):
    with reconfigurable(rank, tmp_path / "store") as (collect, reconfigure):
        with pytest.raises(UsageError, match="has no members before _reconfigure"):
            dist.barrier()
        handles = collect("first")
        reconfigure(100, handles, 111)
        assert dist.get_rank() == rank
        if rank != 1:
            reconfigure(101, [handles[2], handles[0]], 101)
            assert dist.get_rank() == (1 if rank == 0 else 0)
        else:
            reconfigure(102, [handles[1]], 10)
        reconfigure(103, collect("again"), 111)
        dist.group.WORLD.abort()
        reconfigure(104, set(handles), 111)
        assert dist.get_rank() == sorted(handles).index(handles[rank])


@pytest.mark.ranks(3)
def test_wrong_members_are_errors(rank, tmp_path):
    with reconfigurable(rank, tmp_path / "store") as (collect, reconfigure):
        handles = collect("first")
        reconfigure(7, handles, 111)
        with pytest.raises(InvalidArgumentError, match="uuid 7 was already used by this process"):
            dist._reconfigure(7, handles)
        others = [each for each in handles if each != dist._get_reconfigure_handle()]
        with pytest.raises(InvalidArgumentError, match="this process must be once among the 2"):
            dist._reconfigure(8, others)
        with pytest.raises(InvalidArgumentError, match="each handle must be there once, got"):
            dist._reconfigure(8, [handles[rank], *others, *others])
        with pytest.raises(ArgumentTypeError, match=r"handles must be texts, got \[5\]"):
            dist._reconfigure(9, [5])
        dist.barrier()
        if rank == 0:
            with pytest.raises(RendezvousError, match="for ranks that never came: 1"):
                dist._reconfigure(10, handles[:2], timeout=0.3)
        reconfigure(11, collect("again"), 111)
