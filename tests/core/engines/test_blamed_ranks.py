"""Whom a call that timed out blames, by what the others said before and after its deadline."""

from types import SimpleNamespace

import pytest

from unisono.core.base.deadline import Deadline
from unisono.core.engines.api import Call, Communicator
from unisono.core.engines.errors import DeadlinePassed, broken_group_error, to_failure
from unisono.core.engines.places import places_of
from unisono.core.transports import LinkDown
from unisono.core.transports.messages import CLOSED, CallStatus, Failure, LastCall

BEFORE, IN_IT, AFTER = (CallStatus(seq, "barrier()") for seq in (6, 7, 8))
NOT_YET = "had not entered it 4.0 s ago and did not answer again"
GONE = 3


@pytest.mark.parametrize(
    ("heard", "fresh", "peers", "text"),
    [
        # By what they say now.
        ({1: BEFORE, 2: IN_IT}, {1: BEFORE, 2: IN_IT}, (1,), "rank 1 never entered it"),
        ({1: BEFORE, 2: IN_IT}, {1: IN_IT, 2: IN_IT}, (), "every rank entered it, but the data "),
        ({}, {1: AFTER, 2: IN_IT}, (), "every rank entered it, but the data "),
        ({1: BEFORE, 2: IN_IT}, {1: BEFORE}, (1,), "rank 1 never entered it"),
        ({2: IN_IT}, {}, (1,), "rank 1 did not answer"),
        # It may have come after it said so.
        ({2: BEFORE}, {}, (1, 2), f"rank 2 {NOT_YET}, rank 1 did not answer"),
        ({1: BEFORE, 2: BEFORE}, {}, (1, 2), f"ranks 1 and 2 {NOT_YET}"),
        ({1: BEFORE}, {2: BEFORE}, (1, 2), f"rank 2 never entered it, rank 1 {NOT_YET}"),
        # It came to a stop in the call, or is only busy.
        ({1: IN_IT, 2: IN_IT}, {2: IN_IT}, (1,), "rank 1 entered it but did not answer again"),
        ({1: IN_IT, 2: IN_IT}, {2: BEFORE}, (2,), "rank 2 never entered it"),
        # One that is gone has perhaps done its part.
        ({1: IN_IT, 3: BEFORE}, {1: IN_IT, 2: BEFORE}, (2,), "rank 2 never entered it"),
        ({3: BEFORE}, {1: IN_IT, 2: IN_IT}, (3,), "rank 3 left or died"),
    ],
)
def test_who_is_late(monkeypatch, heard, fresh, peers, text):
    ranks = (0, 1, 2, GONE) if GONE in heard else (0, 1, 2)
    closed = []
    transport = SimpleNamespace(
        rank=0,
        world_size=len(ranks),
        ask=lambda context, seq, ranks, deadline, places: fresh,
        messages=SimpleNamespace(addresses=()),
        close_question=closed.append,
        failure=lambda context: None,
        unreached=dict,
        silence_of=lambda rank: "",
        down=lambda rank: LinkDown(rank, CLOSED) if rank == GONE else None,
    )
    monkeypatch.setattr("time.monotonic", lambda: 104.0)
    comm = Communicator(transport, ranks, "g")
    question = SimpleNamespace(answers=heard, asked_s=100.0)
    call = Call("barrier", "barrier()", 1, seq=7)
    found = to_failure(DeadlinePassed(question), comm, call, Deadline(5.0))
    assert found.peers == peers
    assert found.reason.startswith(f"timed out after 5.0 s: {text}")
    # So that nothing is added to the answers while they are looked at.
    assert closed == [question]


def in_load(seq, *recorded):
    return CallStatus(seq, "all_reduce(float64[3])", {}, "in load (data.py:57)", recorded)


@pytest.mark.parametrize(
    ("answers", "lines"),
    [
        (
            {rank: in_load(6, LastCall("all_reduce #6", False, rank + 0.04)) for rank in (1, 2, 3)},
            [
                "ranks 1, 2 and 3 are in load (data.py:57); their last call was all_reduce #6, "
                "1.0 to 3.0 s ago"
            ],
        ),
        (
            {
                1: in_load(6, LastCall("all_reduce #6", False, 12.31)),
                2: in_load(6, LastCall("barrier #6", False, 12.29)),
            },
            [
                "rank 1 is in load (data.py:57); its last call was all_reduce #6, 12.3 s ago",
                "rank 2 is in load (data.py:57); its last call was barrier #6, 12.3 s ago",
                "rank 3 does not answer at all",
            ],
        ),
        (
            # The first call of this group, in which the rank cannot be behind, and another group.
            {1: in_load(0, LastCall("barrier #2 of group 'b'", True, 0.5)), 2: in_load(0)},
            [
                "rank 1 is in load (data.py:57); its call barrier #2 of group 'b' has run for "
                "0.5 s",
                "rank 2 is in load (data.py:57)",
                "rank 3 does not answer at all",
            ],
        ),
        (
            # A rank that records nothing.
            {1: in_load(6), 2: in_load(7)},
            [
                "rank 1 is in load (data.py:57); its last call was all_reduce #6",
                "rank 2 is in load (data.py:57)",
                "rank 3 does not answer at all",
            ],
        ),
    ],
)
def test_places_and_last_calls_of_equal_ranks_share_a_line(answers, lines):
    transport = SimpleNamespace(
        rank=0,
        world_size=4,
        messages=SimpleNamespace(addresses=()),
        silence_of=lambda rank: "does not answer at all",
    )
    comm = Communicator(transport, (0, 1, 2, 3), "g")
    assert places_of(comm, (1, 2, 3), answers, 7) == lines


@pytest.mark.parametrize(("by", "end"), [(0, ""), (1, ""), (2, " (found by rank 2)")])
def test_a_rank_that_reports_itself_has_not_found_it(by, end):
    comm = Communicator(SimpleNamespace(rank=0, world_size=3), (0, 1, 2), "g")
    failure = Failure("failed", "rank 1 raised KeyError: 'x'", (1,), by)
    line = str(broken_group_error(failure, comm, "barrier")).partition("\n")[0]
    assert line.endswith(f"rank 1 raised KeyError: 'x'{end}"), line
