"""Every public call that blocks ends in time, and says whom it waited for."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect

import pytest

import unisono
from tests.faults import deadline_bodies
from tests.faults.fault_calls import COLLECTIVES
from unisono import Serializer
from unisono.testing import run

TIMEOUT_S = 0.5
# The promise.
SLACK_S = 0.2

# A call that is wrong in each of these is so for a reason of its own; else a busy machine made the
# absent rank or its peer late. The later ones have more slack: beside processes of higher priority
# the same few calls were late by a tenth of a second four times in a row.
ROUNDS = 6

# What says for whom or for what a call has waited, where it is not rank 2.
NAMED = {
    "shrink_group": "never came: 1",
    "TCPStore.wait_for_workers": "waiting for clients: 1 of 2 joined",
    "recv from any": "no rank sent a message that fits",
    "Event.synchronize": "stream 'compute' was not done",
    "Stream.synchronize": "stream 'compute' was not done",
    "Event.wait": "stream 'compute' was not done",
    "TCPStore.get": "absent",
    "TCPStore.wait": "absent",
    "TCPStore.queue_pop": "absent",
    "TCPStore.barrier": "absent",
    "HashStore.get": "absent",
    "HashStore.queue_pop": "absent",
    "HashStore.barrier": "absent",
    "FileStore.get": "absent",
    "FileStore.wait": "absent",
    "TCPStore": "127.0.0.1",
    "rendezvous": "127.0.0.1",
    "get of a stopped server": "127.0.0.1",
    "set of a stopped server": "127.0.0.1",
    "Work.wait of a collective": "barrier was not done",
    "Future.wait of a collective": "barrier",
    "collect_all of a collective": "barrier",
    "then of a collective": "barrier",
    "wait_any of a collective": "none of 1 works was done",
    "wait_all of a collective": "1 of 1 works were not done",
}


# Other names for what is made.
SAME = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "new_subgroups_by_enumeration": "new_group",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "Store": "TCPStore",
}


def functions_with_a_time_out():
    """Return the public names that take a time-out, by itself or among further keywords."""
    for name in unisono._HOME_OF:
        thing = getattr(unisono, name)
        if callable(thing) and not dataclasses.is_dataclass(thing) and thing is not Serializer:
            with contextlib.suppress(TypeError, ValueError):  # no signature
                parameters = inspect.signature(thing).parameters.values()
                if any(p.name == "timeout" or p.kind is p.VAR_KEYWORD for p in parameters):
                    yield name


@pytest.mark.parametrize("rank_2", ["stopped", "elsewhere"])
@pytest.mark.parametrize("engine", [None, "reference"])
def test_every_blocking_call_obeys_its_time_out(tmp_path, engine, rank_2):
    wrong = None
    for turn in range(ROUNDS):
        (folder := tmp_path / str(turn)).mkdir()
        results = run(
            deadline_bodies.time_outs,
            3,
            ranks="processes",
            engine=engine,
            args=(TIMEOUT_S, rank_2 == "stopped", str(folder)),
        )
        found = wrong_calls(results, rank_2, SLACK_S * (1 + turn // 2))
        wrong = found if wrong is None else {call: found[call] for call in wrong if call in found}
        if not wrong:
            return
    raise AssertionError("\n".join(wrong.values()))


def wrong_calls(results, rank_2, slack_s):
    """Return {(name, rank): text} of calls that were late, or blame nobody who was absent."""
    wrong = {}
    if rank_2 == "stopped":
        made = {SAME.get(name, name) for name in functions_with_a_time_out()}
        assert {
            name for name in made if not any(key.startswith(name) for key in results[0])
        } == set()
    for rank in (0, 1):
        assert set(COLLECTIVES) < set(results[rank])
        for name, (caught, late_s) in results[rank].items():
            first = caught.text.partition("\n")[0]
            # A rank that began a little earlier may end the call of all.
            told = "(found by rank" in first or "the group is broken" in first
            told = told or name == "monitored_barrier"
            least = 0.0 if told else TIMEOUT_S - 0.01
            most = TIMEOUT_S + slack_s + late_s
            assert caught.took_s >= least, (name, rank, caught)
            if caught.took_s > most:
                took = f"took {caught.took_s:.3f} s, at most {most:.3f} s: {first}"
                wrong[name, rank] = f"{name} on rank {rank} {took}"
            # The server of all ranks runs in the test's own process, which may be late itself.
            slow = "TCPStore." in name and "the store server at 127.0.0.1" in first
            if NAMED.get(name, "rank 2") not in first and 2 not in caught.peers and not slow:
                told = f"{name} on rank {rank} does not say whom it waited for: {first}"
                wrong[name, rank] = told
    return wrong
