"""The table of promises: each engine keeps what docs/reference/promises.md has in its column."""

import pytest

from tests.support.promises import ENGINES, column
from tests.support.tools import ROOT, tool
from unisono.adapters.mpi import library as mpi_library

promises_page = tool("promises_page")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_published_page(engine):
    if engine == "mpi" and (why := mpi_library.why_absent()):
        pytest.skip(why)
    text = (ROOT / promises_page.PAGE).read_text(encoding="utf-8")
    published = promises_page.columns(text)
    assert published[engine] == column(engine), "run `make docs`"
    assert text == promises_page.page(published), "run `make docs`"
