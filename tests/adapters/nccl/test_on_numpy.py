"""The bodies of other tests of groups on the NCCL backend, over the fake NCCL."""

from functools import partial
from unittest import mock

import pytest

import unisono as dist
from tests.adapters.mpi.runner import bodies, module_named
from tests.adapters.nccl import on_numpy as nccl_on_numpy
from tests.core.collectives import test_mismatch
from tests.support.together import on_threads
from unisono.core.groups.world import World, use

MODULES = (
    "aliasing", "coalescing_manager", "dispatch", "files", "groups_are_freed", "lists_of_arrays",
    "mismatch", "moved_as_bytes", "neighbors", "objects", "p2p", "subgroups", "uneven", "waiting",
    "work",
)  # fmt: skip
SIZE = 3
LIMIT_S = 60

# Bodies that NCCL does not pass, with the reasons.
OTHERWISE = {
    "test_lists_are_sent_to_a_rank_and_received_from_any": "NCCL has no receive from any source.",
    "test_an_array_that_is_coalesced_with_itself": "NCCL would write it twice at once.",
    "test_a_halo_exchange_needs_no_case_for_the_edges": "It receives from any source.",
    "test_elements_move_as_bytes": "Each rank sends before it receives.",
    "test_a_receive_from_a_rank_that_closed_the_group_ends_at_once": "NCCL knows no tags.",
    "test_messages_go_on_in_a_group_that_another_rank_has_closed": "A send waits for its receive.",
    "test_lists_that_several_threads_send_arrive_whole": "NCCL has one order for two ranks.",
    "test_blocks_that_do_not_fit_are_an_error_on_every_rank": "It ends with an algorithm.",
    "test_messages_that_do_not_fit_are_errors_of_the_receiver": "The group breaks.",
}


def found():
    """Yield the bodies."""
    for word in MODULES:
        for name, fn, case in bodies(module_named(f"test_{word}"), SIZE):
            if name not in OTHERWISE:
                yield pytest.param(fn, case, id="-".join([word, name, *map(str, case.values())]))


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("fn", "case"), list(found()))
def test_body(fn, case):
    store = dist.HashStore()
    # The start makes two calls, and mismatches have the numbers of calls.
    device_id = None if fn.__module__.endswith("mismatch") else 0

    def rank_thread(rank):
        with use(World()):
            dist.init_process_group(
                nccl_on_numpy.NAME,
                store=store,
                rank=rank,
                world_size=SIZE,
                timeout=LIMIT_S,
                device_id=device_id,
            )
            try:
                fn(rank, **case)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()

    usual = {name: call for name, call in test_mismatch.CASES.items() if name != "algorithm"}
    with nccl_on_numpy.installed(), mock.patch.object(test_mismatch, "CASES", usual):
        on_threads(*(partial(rank_thread, rank) for rank in range(SIZE)))
