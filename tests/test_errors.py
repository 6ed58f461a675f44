"""The catalogue of errors: complete, and every first line asserted by some test."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

sys.path.insert(0, str(ROOT / "tools"))
import errors_page  # noqa: E402

sys.path.remove(str(ROOT / "tools"))


def test_the_catalogue_is_that_of_the_source(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert errors_page.PAGE.read_text(encoding="utf-8") == errors_page.page(), "run `make docs`"
