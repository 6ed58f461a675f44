"""The coalescing manager: several calls, one message."""

import pytest

from tests.support import several
from tests.worlds import coalesced_manager_bodies as bodies
from unisono.testing import run

BODIES = [
    bodies.calls_made_before,
    bodies.operations_stay_apart,
    bodies.gathers_and_scatters,
    bodies.rules,
]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_threads(body, size):
    run(body, size)


def test_on_processes():
    # `reduces` counts calls by a wrapper, of which a process has one set for all its threads.
    run(several.run_all, 2, ranks="processes", args=([bodies.reduces, *BODIES],))


def test_a_wait_has_a_time_out(world):
    world(bodies.waits_no_longer_than_told, 2)
