"""`unisono.testing.run` in another project: modules found by file, texts of failures."""

import re
import signal
import sys
import textwrap
import threading

import pytest

import unisono as dist
from tests.support.programs import python
from unisono.errors import (
    ArgumentTypeError,
    CollectiveAbortedError,
    InvalidArgumentError,
    LaunchError,
)
from unisono.testing import run

# Each rank imports its module of tests, and hence pytest, unless the server has done that.
CONFTEST = """
    import multiprocessing

    multiprocessing.set_forkserver_preload(["pytest", "unisono.testing"])
"""

# No folder of this project is on sys.path, and pytest makes up the name `deep.er.test_plain`.
PLAIN = """
    import functools
    import numpy as np
    import pytest
    import unisono as dist
    from unisono.testing import run

    class Point:
        def __init__(self, x):
            self.x = x

    def moved(rank, point, by=0):
        dist.barrier()
        assert type(point) is Point
        return Point(point.x + rank + by)

    def test_classes_of_this_file_travel(world):
        assert [p.x for p in world(moved, 2, args=[Point(5)])] == [5, 6]

    def test_partial():
        assert run(functools.partial(moved, by=1), 1, args=[Point(1)], ranks="processes")[0].x == 2

    @pytest.mark.ranks(2, kind="processes")
    class TestClass:
        def test_method(self, rank):
            dist.all_reduce(data := np.ones(2))
            assert data.tolist() == [2.0, 2.0]
"""

# The package's folder is not on sys.path either: its modules import one another.
PACKAGED = """
    import pytest
    from .helpers import Box

    def doubled(rank, box):
        return Box(2 * box.value)

    def test_packaged(world):
        assert [box.value for box in world(doubled, 2, args=[Box(4)])] == [8, 8]
"""
HELPERS = """
    class Box:
        def __init__(self, value):
            self.value = value
"""

FAILING = """
    import pytest
    import unisono as dist

    def inner(rank, total):
        hidden = pytest
        long = "x" * 1000
        assert total == 3, "wrong total"

    def on_rank_1(rank):
        if rank == 1:
            inner(rank, 4)
        dist.barrier()

    def raises(rank):
        raise ValueError("same\\nlines")

    def caller(world):
        world(on_rank_1, 3)

    def test_one(world):
        caller(world)

    def test_equal(world):
        world(raises, 4)

    @pytest.mark.ranks(2, kind="both")
    def test_marker(rank):
        if rank == 0:
            raise KeyError("zero") from OSError("cause")
        assert rank == 2

    @pytest.mark.ranks(1, kind="both")
    def test_error_of_unisono(rank):
        dist.send(b"", 7)

    @pytest.mark.ranks(1, kind="both")
    def test_wrapped_error(rank):
        try:
            dist.send(b"", 7)
        except ValueError as error:
            raise KeyError("mine") from error

    @pytest.mark.ranks(1, kind="both")
    def test_error_of_mpi(rank):
        from unisono import MPI

        MPI.COMM_WORLD.Send(b"", 7)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Run pytest on the project; return the text of each failure by name, and the summary."""
    root = tmp_path_factory.mktemp("project")
    files = {
        "conftest.py": CONFTEST,
        "deep/er/test_plain.py": PLAIN,
        "pkg/__init__.py": "",
        "pkg/test_packaged.py": PACKAGED,
        "pkg/helpers.py": HELPERS,
        "test_failing.py": FAILING,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    words = ["--import-mode=importlib", "--rootdir", root, root, "-q", "-p", "no:cacheprovider"]
    done = python("-m", "pytest", *words, cwd=root.parent, limit_s=200.0)
    output = done.stdout.replace(str(root), "ROOT")
    # Python marks the failing part of a line, each version in another way.
    output = re.sub(r"^ +[~^]+\n", "", output, flags=re.MULTILINE)
    body, _, summary = output.partition("= short test summary info =")
    parts = re.split(r"^_+ (\w+\S*) _+\n", body, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True)), summary + done.stderr


def test_processes_load_modules_that_no_import_finds(reports):
    _, summary = reports
    assert "test_plain" not in summary
    assert "test_packaged" not in summary
    assert re.search(r"^12 failed, 6 passed", summary, re.MULTILINE), summary


def test_each_rank_that_failed_shows_its_own_traceback(reports):
    texts, summary = reports
    above = """\
  File "ROOT/test_failing.py", line 22, in test_one
    caller(world)
  File "ROOT/test_failing.py", line 19, in caller
    world(on_rank_1, 3)
"""
    frames = """\
Traceback (most recent call last):
  File "ROOT/test_failing.py", line 12, in on_rank_1
    inner(rank, 4)
  File "ROOT/test_failing.py", line 8, in inner
    assert total == 3, "wrong total"
AssertionError: wrong total
"""
    start = f"{above}rank 1 of 3 (thread): AssertionError: wrong total\n{frames}assert 4 == 3\n\n"
    assert texts["test_one[threads]"].startswith(start)
    start = f"""{above}rank 1 of 3 (process): AssertionError: wrong total\n{frames}\
assert 4 == 3
"""
    found = texts["test_one[processes]"]
    assert found.startswith(start)
    others = [line for line in found.removeprefix(start).splitlines() if line]
    assert len(others) == 2
    assert {line[:17] for line in others} == {"rank 0 of 3 (proc", "rank 2 of 3 (proc"}
    for line in others:
        assert re.match(r"rank . of 3 \(process\): Peer(Failed|Lost)Error: barrier ", line)
    assert "test_one[threads] - rank 1 of 3 (thread): " in summary


def test_equal_tracebacks_are_shown_once(reports):
    texts, _ = reports
    for kind in ("threads", "processes"):
        assert (
            texts[f"test_equal[{kind}]"]
            == f"""\
  File "ROOT/test_failing.py", line 25, in test_equal
    world(raises, 4)
ranks 0, 1, 2 and 3 of 4 ({kind}): ValueError: same
Traceback (most recent call last):
  File "ROOT/test_failing.py", line 16, in raises
    raise ValueError("same\\nlines")
ValueError: same
lines
"""
        )


def test_the_marker_shows_nothing_but_the_ranks(reports):
    texts, _ = reports
    zero = """\
: KeyError: 'zero'
OSError: cause

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "ROOT/test_failing.py", line 30, in test_marker
    raise KeyError("zero") from OSError("cause")
KeyError: 'zero'"""
    one = """\
Traceback (most recent call last):
  File "ROOT/test_failing.py", line 31, in test_marker
    assert rank == 2
AssertionError"""
    end = f": AssertionError: assert 1 == 2\n{one}: assert 1 == 2"
    for kind in ("thread", "process"):
        wanted = {f"rank 0 of 2 ({kind}){zero}", f"rank 1 of 2 ({kind}){end}"}
        text = texts[f"test_marker[2-{kind}{'s' if kind == 'thread' else 'es'}]"]
        assert set(re.split(r"\n\n(?=rank)", text.rstrip())) == wanted


def test_frames_inside_unisono_are_not_shown_with_its_errors(reports):
    texts, _ = reports
    for kind in ("threads", "processes"):
        files = re.findall(r'File "(.*?)"', texts[f"test_error_of_unisono[1-{kind}]"])
        assert files == ["ROOT/test_failing.py"]
        files = re.findall(r'File "(.*?)"', texts[f"test_wrapped_error[1-{kind}]"])
        assert files == ["ROOT/test_failing.py"] * 2
        files = re.findall(r'File "(.*?)"', texts[f"test_error_of_mpi[1-{kind}]"])
        assert files == ["ROOT/test_failing.py"]


def test_the_cause_has_the_text_without_pytest(tmp_path):
    """A script may define the function itself: multiprocessing runs the script as `__main__`."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""\
        from unisono.testing import run

        class Point:
            def __init__(self, x):
                self.x = x

        def made(rank, point):
            return Point(point.x + rank)

        def fails(rank):
            if rank == 1:
                raise RuntimeError("on rank 1")

        if __name__ == "__main__":
            print([point.x for point in run(made, 2, args=[Point(3)], ranks="processes")])
            for kind in ("threads", "processes"):
                try:
                    run(fails, 2, ranks=kind)
                except RuntimeError as error:
                    print(error)
                    print(error.__cause__)
        """)
    )
    done = python(script, check=True)
    text = """\
on rank 1
rank 1 of 2 ({}): RuntimeError: on rank 1
Traceback (most recent call last):
  File "{}", line 12, in fails
    raise RuntimeError("on rank 1")
RuntimeError: on rank 1
"""
    wanted = [text.format(kind, script) for kind in ("thread", "process")]
    assert done.stdout == "[3, 4]\n" + "".join(wanted)


def test_a_plain_assert_is_shown_with_its_variables(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""\
        import re
        from unisono.testing import run

        def fails(rank, total):
            hidden = re
            long = "x" * 1000
            assert total == 3, "wrong total"

        if __name__ == "__main__":
            for kind in ("threads", "processes"):
                try:
                    run(fails, 1, args=[4], ranks=kind)
                except AssertionError as error:
                    print(str(error.__cause__).partition("variables ")[2])
        """)
    )
    text = r"on rank 0:\n  rank = 0\n  total = 4\n  long = 'x{90,105}\.\.\.x{90,105}'\n"
    done = python(script, check=True)
    assert re.fullmatch(text * 2, done.stdout), done.stdout


def sleeps_or_raises(rank, released):
    if rank == 0:
        raise ValueError("rank 0 is first")
    released.wait()


def test_a_rank_that_does_not_end_hides_no_failure():
    released = threading.Event()
    with pytest.raises(LaunchError, match=r"rank 1 of 2 did not end within 2 s") as caught:
        run(sleeps_or_raises, 2, args=[released], timeout=1.0)
    released.set()
    assert str(caught.value.__cause__).startswith("rank 0 of 2 (thread): ValueError: rank 0 is")


def test_threads_that_go_on_after_a_failure_are_left(monkeypatch):
    monkeypatch.setattr("unisono.testing.ranks._GRACE_S", 0.5)
    released = threading.Event()
    with pytest.raises(LaunchError) as caught:
        run(sleeps_or_raises, 2, args=[released], timeout=600.0)
    released.set()
    text = "rank 1 of 2 did not end within 0.5 s of the failure of rank 0: in sleeps_or_raises ("
    assert str(caught.value).startswith(text)
    assert caught.value.hint is not None
    assert "a thread cannot be ended" in caught.value.hint
    assert str(caught.value.__cause__).startswith("rank 0 of 2 (thread): ValueError: rank 0 is")


def test_arguments_in_the_wrong_order_are_named(world):
    with pytest.raises(ArgumentTypeError, match=r"run\(fn, world_size\): fn must be .*, got 2"):
        world(2, lambda rank: rank)
    for size in (0, 2.0, [2]):
        text = f"world_size must be a number of ranks, got {size!r}"
        with pytest.raises(InvalidArgumentError, match=re.escape(text)):
            world(lambda rank: rank, size)


def test_ctrl_c_ends_the_calls_of_threads():
    released, seen, ended = threading.Event(), [], threading.Event()

    def body(rank):
        if rank == 1:
            signal.raise_signal(signal.SIGINT)  # Python handles it in the main thread
            released.wait()
            return
        try:
            dist.barrier()
        except Exception as error:
            seen.append(error)
        ended.set()

    try:
        with pytest.raises(KeyboardInterrupt):
            run(body, 2, timeout=600.0)
        assert ended.wait(60.0)
    finally:
        released.set()
    assert type(seen[0]) is CollectiveAbortedError
    assert "KeyboardInterrupt on rank" in str(seen[0])


def test_a_function_defined_in_the_test_runs_in_processes(monkeypatch):
    seen = 3

    def body(rank):
        return seen + rank

    for ranks in ("threads", "processes"):
        assert run(body, 2, ranks=ranks) == [3, 4]
    assert run(lambda rank: rank, 2, ranks="processes") == [0, 1]
    # Without cloudpickle the error has the remedy.
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(
        InvalidArgumentError, match="the function cannot be sent to other proce"
    ) as e:
        run(body, 2, ranks="processes")
    assert "pip install cloudpickle" in e.value.hint
