"""The fixture of all tests that start `unisono run`."""

import pytest

from tests.support.launches import Launches


@pytest.fixture
def launches(tmp_path):
    """Return the launches in a new folder; all of them end with the test."""
    launches = Launches(tmp_path)
    yield launches
    launches.close()
