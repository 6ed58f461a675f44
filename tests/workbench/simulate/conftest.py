"""The published and computed results of other simulators."""

import json
from pathlib import Path

import pytest

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))


def case_id(case):
    sizes = [str(case.get("p", case.get("npus"))), case.get("topology", case.get("net", ""))]
    return "-".join(filter(None, [case["collective"], case["algorithm"], *sizes]))


@pytest.fixture
def golden():
    return GOLDEN


def pytest_generate_tests(metafunc):
    """Give a test with the mark `golden(name)` one call per case of that table."""
    for mark in metafunc.definition.iter_markers("golden"):
        cases = GOLDEN[mark.args[0]]["cases"]
        metafunc.parametrize("case", cases, ids=map(case_id, cases))


def pytest_configure(config):
    config.addinivalue_line("markers", "golden(name): one call per case of a table of golden.json")
