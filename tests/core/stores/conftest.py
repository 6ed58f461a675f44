"""Both servers behind the same tests."""

import pytest

from unisono.core.base.seam import is_wanted


@pytest.fixture(params=["native", "python"])
def server_kind(request, monkeypatch) -> str:
    """Make every store server of the test, also in processes it starts, one of that kind."""
    if request.param == "native" and not is_wanted():
        pytest.skip("the C++ engine is not built")
    monkeypatch.setenv("UNISONO_ENGINE", "reference" if request.param == "python" else "native")
    return request.param
