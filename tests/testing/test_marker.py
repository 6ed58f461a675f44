"""The marker `ranks` in another project: what it refuses, coroutines, ranks that stand still."""

import inspect
import re
import textwrap

import pytest

from tests.support.programs import python
from unisono.testing import plugin, run

# Marker -> the error at the setup of the test.
WRONG = {
    "ranks": "ranks needs sizes, such as ranks(2)",
    "ranks()": "ranks needs sizes, such as ranks(2)",
    "ranks([1, 2])": "ranks([1, 2]): a size is a number of ranks, as in ranks(1, 2)",
    "ranks(0)": "ranks(0): a size is a number of ranks, as in ranks(1, 2)",
    "ranks(2, kind='process')": (
        "ranks(kind='process'): expected one of 'both', 'threads', 'processes'"
    ),
    "ranks(2, kind=None)": "ranks(kind=None): expected one of 'both', 'threads', 'processes'",
    "ranks(2, engine='nativ')": (
        "ranks(engine='nativ'): expected one of 'both', 'native', 'reference'"
    ),
    "ranks(2, time_out=3)": "ranks(time_out=3): no such option; did you mean timeout=?",
    "ranks(2, nprocs=3)": (
        "ranks(nprocs=3): no such option; expected kind, engine, timeout, transport, dead"
    ),
}
BODY = "import pytest\n\n@pytest.mark.{}\ndef test_it(rank):\n    pass\n"

COROUTINES = """
    import numpy as np
    import pytest
    import unisono as dist

    @pytest.mark.ranks(2, kind="both")
    async def test_passes(rank):
        x = np.full(2, rank + 1.0)
        await dist.all_reduce(x, async_op=True)
        assert x.tolist() == [3, 3]

    @pytest.mark.ranks(2, kind="both")
    async def test_fails(rank):
        assert rank == 0, "rank 1 is here"
"""

STUCK = """
    import threading
    import pytest

    @pytest.mark.ranks(3, kind="both", timeout=2)
    def test_waits(rank):
        if rank:
            threading.Event().wait(60)
"""

OUTCOMES = """
    import pytest
    import unisono as dist

    @pytest.mark.ranks(2, kind="both")
    def test_is_skipped(rank):
        if rank:
            pytest.skip("no luck")
        dist.barrier()

    @pytest.mark.ranks(2, kind="both")
    def test_is_skipped_too(rank):
        pytest.importorskip("module_that_is_absent")

    @pytest.mark.ranks(2, kind="both")
    def test_is_known(rank):
        pytest.xfail("known")

    @pytest.mark.ranks(2, kind="both")
    def test_is_told(rank):
        pytest.fail("told")
"""

FIXTURES = """
    import pytest

    @pytest.fixture
    def reader():
        with open(__file__) as file:
            yield file

    @pytest.mark.ranks(1, kind="processes")
    def test_reads(rank, tmp_path, reader):
        pass

    @pytest.mark.ranks(1, kind="threads")
    def test_reads_in_threads(rank, tmp_path, reader):
        assert reader.read()
"""

RETURNS = """
    import numpy as np
    import pytest
    import unisono as dist

    @pytest.mark.ranks(3, kind="both")
    def test_returns(rank):
        if rank != 1:
            dist.all_reduce(np.ones(2))
"""

THREADS = """
    import contextvars
    import numpy as np
    import unisono as dist
    from concurrent.futures import ThreadPoolExecutor
    from unisono import MPI
    from unisono.testing import run

    def in_thread(rank, *call):
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(*call, lambda: MPI.COMM_WORLD.rank).result()

    def test_other_threads():
        run(in_thread, 2)

    def test_with_context():
        assert run(lambda rank: in_thread(rank, contextvars.copy_context().run), 2) == [0, 1]

    def test_no_group():
        dist.all_reduce(np.ones(2))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Run pytest on the project; return its output, with the folder as ROOT."""
    root = tmp_path_factory.mktemp("project")
    for at, marker in enumerate(WRONG):
        (root / f"test_wrong_{at}.py").write_text(BODY.format(marker))
    no_argument = BODY.format("ranks(2)").replace("it(rank)", "has_no_argument()")
    no_marker = "\n\ndef test_has_no_marker(rank):\n    pass\n"
    (root / "test_no_argument.py").write_text(no_argument + no_marker)
    files = {"coroutines": COROUTINES, "stuck": STUCK, "outcomes": OUTCOMES, "fixtures": FIXTURES}
    files |= {"threads": THREADS, "returns": RETURNS}
    for name, text in files.items():
        (root / f"test_{name}.py").write_text(textwrap.dedent(text))
    words = ["--rootdir", root, root, "-q", "-rsx"]
    done = python("-m", "pytest", *words, "-p", "no:cacheprovider", cwd=root, limit_s=200.0)
    return done.stdout.replace(str(root), "ROOT")


def test_the_marker_names_the_argument(project):
    text = "the marker ranks calls the test with its rank: add the argument rank\n"
    assert text in project.split("_ ERROR at setup of test_has_no_argument _")[1]


def test_the_argument_names_the_marker(project):
    text = project.split("_ ERROR at setup of test_has_no_marker _")[1]
    assert "E       fixture 'rank' not found: the marker pytest.mark.ranks gives it\n" in text


def text_of(project, test):
    return re.split(rf"^_+ {re.escape(test)} _+\n", project, flags=re.MULTILINE)[1]


def test_a_wrong_marker_is_an_error_of_its_test_alone(project):
    found = re.findall(r"^_+ ERROR at setup of test_it\S* _+\n(.*)$", project, re.MULTILINE)
    assert found == list(WRONG.values())
    assert re.search(rf"\b{len(WRONG) + 2} errors\b", project)


def test_the_options_are_those_of_run():
    known = inspect.signature(run, eval_str=True).parameters
    assert {"args", "ranks", "engine", *plugin._OPTIONS} == {
        name for name, each in known.items() if each.kind == 3
    }
    of_fixture = inspect.signature(plugin.RunOnRanks.__call__, eval_str=True).parameters
    assert [*of_fixture.values()][1:] == [each for each in known.values() if each.name != "ranks"]


def test_a_coroutine_runs_on_every_rank(project):
    assert "test_passes" not in project
    for kind, one in (("threads", "thread"), ("processes", "process")):
        lines = text_of(project, f"test_fails[2-{kind}]").splitlines()
        assert lines[0].startswith(f"rank 1 of 2 ({one}): AssertionError: rank 1 is here")
        # No frame of asyncio.
        assert re.findall(r'File "(.*?)"', "\n".join(lines[:4])) == ["ROOT/test_coroutines.py"]


def test_outcomes_of_pytest_reach_it(project):
    assert re.search(r"\b4 skipped, 2 xfailed\b", project)
    for reason in ("no luck", "could not import 'module_that_is_absent'"):
        skips = re.findall(rf"^SKIPPED \[(.)\] .*: {reason}", project, re.MULTILINE)
        assert sum(map(int, skips)) == 2
    for line in (8, 13):  # of both kinds
        assert f"SKIPPED [2] test_outcomes.py:{line}: " in project
    for kind in ("threads", "processes"):
        assert f"XFAIL test_outcomes.py::test_is_known[2-{kind}] - known" in project
        text = text_of(project, f"test_is_told[2-{kind}]")
        assert text.startswith(f"ranks 0 and 1 of 2 ({kind}): Failed: told\n")


def test_ranks_that_stand_still_are_named_with_their_lines(project):
    line = 'File "ROOT/test_stuck.py", line 8, in test_waits'
    for kind in ("threads", "processes"):
        text = text_of(project, f"test_waits[3-{kind}]")
        assert text.startswith(
            "ranks 1 and 2 of 3 did not end within 4 s, twice timeout=2: "
            f"in test_waits (test_stuck.py:8)\n  {line}\n    threading.Event().wait(60)\n"
        )
        assert "hint: a test that needs more time sets timeout=" in text


def test_a_rank_that_returned_early_is_no_fault_of_the_network(project):
    for kind in ("threads", "processes"):
        text = text_of(project, f"test_returns[3-{kind}]")
        assert text.startswith("rank 1 of 3 returned before this call\n\nrank ")


def test_a_thread_that_is_no_rank_is_not_a_world_of_one(project):
    text = text_of(project, "test_other_threads")
    assert "ranks 0 and 1 of 2 (threads): NotInitializedError: the default process group" in text
    assert "hint: ranks are threads here, and this thread is none: give it the context" in text
    assert "test_with_context" not in project


def test_an_error_ends_in_the_line_of_the_test(project):
    lines = text_of(project, "test_no_group").splitlines()
    assert lines[2] == ">       dist.all_reduce(np.ones(2))"
    assert lines[3].startswith("E       unisono.errors.NotInitializedError: the default process")
    assert lines[6] == "test_threads.py:20: NotInitializedError"


def test_an_argument_that_no_process_can_get_is_named(project):
    text = text_of(project, "test_reads[1-processes]")
    first = "InvalidArgumentError: argument 'reader' cannot be sent to processes: TypeError("
    assert text.startswith(first)
    assert "hint: make it inside the test, or run the ranks as threads" in text
    assert "test_reads_in_threads" not in project
