"""Whom a call that timed out blames, by what the others said before and after its deadline."""

from types import SimpleNamespace

import pytest

from unisono.base.deadline import Deadline
from unisono.engines.api import Call, Communicator
from unisono.engines.failures import Expired, to_failure
from unisono.transports.status import Status

IN_IT, BEFORE = Status(7, "barrier()"), Status(6, "barrier()")


@pytest.mark.parametrize(
    ("heard", "fresh", "peers", "text"),
    [
        ({1: BEFORE, 2: IN_IT}, {1: BEFORE, 2: IN_IT}, (1,), "rank 1 never entered it"),
        ({1: BEFORE, 2: IN_IT}, {1: BEFORE}, (1,), "rank 1 never entered it"),
        ({2: IN_IT}, {}, (1,), "rank 1 does not answer"),
        ({2: BEFORE}, {}, (1, 2), "rank 2 never entered it, rank 1 does not answer"),
        ({1: BEFORE, 2: IN_IT}, {1: IN_IT, 2: IN_IT}, (), "every rank entered it, but the data "),
        # It stopped after its answer, in the call.
        ({1: IN_IT, 2: IN_IT}, {2: IN_IT}, (1,), "rank 1 does not answer"),
    ],
)
def test_who_is_late(heard, fresh, peers, text):
    transport = SimpleNamespace(
        rank=0,
        world_size=3,
        ask=lambda context, seq, ranks, deadline: fresh,
        failure=lambda context: None,
        unreached=dict,
    )
    comm = Communicator(transport, (0, 1, 2), "g")
    expired = Expired(SimpleNamespace(answers=heard, asked_s=0.0))
    found = to_failure(expired, comm, Call("barrier", "barrier()", 1, seq=7), Deadline(5.0))
    assert found.peers == peers
    assert found.reason.startswith(f"timed out after 5.0 s: {text}")
