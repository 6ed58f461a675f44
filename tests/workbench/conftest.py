"""What all tests of the commands share."""

import pytest

from unisono.core.schedules import registry


@pytest.fixture(autouse=True)
def registry_is_restored(monkeypatch):
    """Files register their functions in the process."""
    table = {op: dict(names) for op, names in registry._TABLE.items()}
    monkeypatch.setattr(registry, "_TABLE", table)
