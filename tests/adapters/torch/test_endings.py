"""torch's process groups end in order, and end also if the program drops them."""

import gc
import weakref
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest

from tests.faults.fault_calls import BUSY_S
from tests.faults.test_endings import (
    CALLS,
    ENDS,
    EXPECTED,
    SHOW,
    WAYS,
    check_a_late_rank,
    wait_for_closers,
)
from tests.support.calls import wait_until
from tests.support.together import on_threads

torch = pytest.importorskip("torch")
torch_dist = pytest.importorskip("torch.distributed")

from unisono.adapters.torch.membership import create  # noqa: E402  needs torch

pytestmark = pytest.mark.usefixtures("forked_with_torch")

TORCH = """
import torch, unisono
import torch.distributed as dist
from datetime import timedelta
dist.init_process_group("unisono", timeout=timedelta(seconds=60))
make = torch.tensor
client = unisono.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
store = lambda: unisono.PrefixStore("worker/attempt_0/default_pg/0", client)
"""


@pytest.mark.sweep(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", ["destroy", "sub-group", "exit", "exit with sub-group"])
@pytest.mark.parametrize("op", EXPECTED)
def test_a_call_that_nobody_waits_for_is_finished_at_a_normal_end(op, end, way):
    calls = CALLS
    if end == "exit with sub-group":
        calls = CALLS.replace('END == "sub-group"', "True")
    check_a_late_rank(SHOW + TORCH + calls + ENDS, op, end, **WAYS[way])


def make_two(name, store):
    """Make two groups as torchft does: from a store, without a default group."""

    def make(rank):
        options = SimpleNamespace(
            store=torch_dist.PrefixStore(name, store),
            group_rank=rank,
            group_size=2,
            timeout=timedelta(seconds=60),
            global_ranks_in_group=[],
            group_id="0",
        )
        groups[rank] = create(options, None)
        x = torch.ones(4)
        work = groups[rank].allreduce([x])
        work.get_future().then(lambda future: future.value()).wait()
        assert x.tolist() == [2.0] * 4

    groups = [None, None]
    on_threads(partial(make, 0), partial(make, 1))
    return groups


def test_the_peer_of_a_dropped_group_has_an_error_at_once():
    stays, goes = make_two("a", torch_dist.HashStore())
    alive = weakref.ref(goes)
    del goes
    # The thread that ran a callback may not have let go of it yet.
    assert wait_until(lambda: gc.collect() >= 0 and alive() is None)
    stays.set_timeout(timedelta(seconds=BUSY_S))
    with pytest.raises(torch_dist.DistBackendError, match="rank 1 was lost: it left"):
        stays.allreduce([torch.ones(4)]).wait()
    stays.shutdown()
    wait_for_closers()


def test_dropped_groups_leave_no_thread_and_no_descriptor():
    # The guard of all tests (conftest.py) compares threads and descriptors before and after.
    store = torch_dist.HashStore()
    for number in range(3):
        make_two(str(number), store)
    gc.collect()
    wait_for_closers()
