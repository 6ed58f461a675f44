"""The fixture of all tests that start `unisono run`."""

import os

import pytest

from tests.support.launches import Launches


@pytest.fixture
def launches(tmp_path):
    """Return the launches in a new folder; all of them end with the test."""
    launches = Launches(tmp_path)
    yield launches
    launches.close()


@pytest.fixture
def clean_environment(monkeypatch):
    """Take away what gives the options of `unisono run` other defaults."""
    for name in list(os.environ):
        if name.startswith(("PET_", "UNISONO_")) or name in ("RANK", "OMP_NUM_THREADS"):
            monkeypatch.delenv(name)
