import logging

import pytest

from unisono.testing.engine_suite import ENGINE_CHECKS


@pytest.mark.sweep(36)
@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_engine(make, check, caplog):
    caplog.set_level(logging.CRITICAL, "unisono")  # errors of callbacks are part of it
    check(make)
