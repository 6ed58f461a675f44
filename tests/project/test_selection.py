"""What a run of the tests leaves out, and what it says about that: tests/support/selection.py."""

import itertools
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.programs import python
from tests.support.selection import sample

TESTS = """
    import pytest

    @pytest.mark.sweep(2)
    @pytest.mark.parametrize("case", range(10))
    def test_sweep(case):
        pass

    @pytest.mark.whole("long")
    def test_whole():
        pass

    @pytest.mark.skip(reason="no server; `make servers`")
    @pytest.mark.parametrize("case", range(3))
    def test_of_a_server(case):
        pass

    def test_of_a_module():
        pytest.importorskip("no_such_module", reason="no module")

    @pytest.mark.alone
    @pytest.mark.sweep(1)
    @pytest.mark.parametrize("case", range(4))
    def test_alone(case):
        pass
"""
ABSENT = "import pytest\npytest.skip('no library', allow_module_level=True)\n"
SKIPPED = [
    "skipped: 3, no server; `make servers`",
    "skipped: 1, no library",
    "skipped: 1, no module",
]
ENDING = "`make test-all` runs them, --sample=any draws the same sweeps"


@pytest.fixture
def summary(tmp_path):
    """Return a function that runs these tests, and returns what the end says about the others."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.support.selection"]\n')
    (tmp_path / "test_some.py").write_text(textwrap.dedent(TESTS))
    (tmp_path / "test_absent.py").write_text(ABSENT)

    def run(*words):
        root = Path(__file__).parents[2]
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *words]
        done = python(*words, "--sample=any", cwd=tmp_path, env={"PYTHONPATH": str(root)})
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        return [line for line in lines if line.startswith(("skipped:", "not run:"))], lines[-1]

    return run


@pytest.mark.parametrize("workers", [["-n", "2"], ["-p", "no:xdist"]])
def test_what_was_left_out_is_counted_once(summary, workers):
    told, last = summary(*workers, "-m", "not alone")
    *skipped, left = told
    assert left == f"not run: 8 cases of sweeps and 1 tests marked `whole`; {ENDING}"
    assert sorted(skipped) == sorted(SKIPPED)
    assert skipped[0] == SKIPPED[0]
    assert last.startswith("2 passed, ")


def test_tests_that_run_alone_are_counted_by_themselves(summary):
    told, last = summary("-m", "alone")
    assert told == [f"not run: 3 cases of sweeps and 0 tests marked `whole`; {ENDING}"]
    assert last.startswith("1 passed, ")


def test_with_all_tests_only_skips_are_told(summary):
    told, last = summary("--all", "-n", "1")
    assert sorted(told) == sorted(SKIPPED)
    assert last.startswith("15 passed, ")


def test_a_sample_has_every_value_of_each_parameter():
    def case(*values):
        mark = SimpleNamespace(args=(4,))
        name = f"test_some.py::test_calls[{'-'.join(values)}]"
        return SimpleNamespace(nodeid=name, get_closest_marker=lambda _: mark)

    cases = [case(*values) for values in itertools.product("1234", ("native", "reference"))]
    samples = [sample(cases, str(commit)) for commit in range(60)]
    for drawn in samples:
        assert len(drawn) == 4
        assert {name.partition("[")[2][0] for name in drawn} == set("1234")
        assert {name.partition("-")[2] for name in drawn} == {"native]", "reference]"}
    assert set().union(*samples) == {each.nodeid for each in cases}
