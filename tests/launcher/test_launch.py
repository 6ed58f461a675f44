"""`launch`: results, errors, and calls from sessions without a file."""

import shlex
import sys

import pytest

from tests.launcher import launch_targets as targets
from tests.support.programs import python
from unisono.errors import ArgumentTypeError, InvalidArgumentError, WorkerFailedError
from unisono.launcher import launch, spawn

FORKED = {"start_method": "forkserver"}


@pytest.fixture
def no_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_results_come_back_by_rank(method):
    got = launch(targets.scaled, 3, (10,), start_method=method)
    assert got == [{"rank": rank * 10, "world_size": "3"} for rank in range(3)]


def test_works_without_cloudpickle(no_cloudpickle):
    assert [r["rank"] for r in launch(targets.scaled, 2, (1,), **FORKED)] == [0, 1]


def test_lambda_and_closure():
    offset = 5
    assert launch(lambda rank, x: rank * x + offset, 2, (3,)) == [5, 8]


def test_large_results():
    expected = [bytes([rank]) * (1 << 20) for rank in (0, 1)]
    assert launch(targets.large, 2, (1 << 20,), **FORKED) == expected


def test_first_failure_is_raised_as_it_was_with_rank_and_traceback():
    with pytest.raises(targets.CustomError) as caught:
        launch(targets.fail_on_rank_1, 3, **FORKED)
    assert caught.value.code == 7
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerFailedError)
    assert cause.context.rank == 1
    last = str(cause).splitlines()
    assert "in fail_on_rank_1" in last[-3]
    assert last[-1] == "tests.launcher.launch_targets.CustomError: (7, 'boom')"


def test_rank_that_dies_without_an_exception():
    with pytest.raises(WorkerFailedError, match=r"rank 1 .* exited with code 3"):
        launch(targets.die_on_rank_1, 2, **FORKED)


def test_result_that_cannot_be_pickled():
    with pytest.raises(InvalidArgumentError, match=r"the result of rank \d cannot be sent"):
        launch(targets.not_picklable, 2, **FORKED)


def test_function_that_cannot_be_pickled_without_cloudpickle(no_cloudpickle):
    with pytest.raises(InvalidArgumentError, match="the function or its arguments") as caught:
        launch(lambda rank: rank, 2)
    assert caught.value.hint.startswith("pip install cloudpickle")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"nprocs": 0}, "nprocs must be at least 1"), ({"start_method": "x"}, "got 'x'")],
)
@pytest.mark.parametrize("start", [launch, spawn])
def test_bad_arguments(start, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        start(**{"fn": targets.scaled, "nprocs": 1, "args": (1,)} | options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: launch(len, 2, 10), "args must be a tuple or list of arguments, got int"),
        (lambda: launch(len, 2, "ab"), "args must be a tuple or list of arguments, got str"),
        (lambda: launch(4, len), "fn must be a function, got int"),
        (lambda: launch(len, 2.0), "nprocs must be an integer, got float"),
        (lambda: spawn(len, 4), "args must be a tuple or list of arguments, got int"),
        (lambda: spawn(4, len), "fn must be a function, got int"),
    ],
)
def test_arguments_of_the_wrong_type(call, message):
    with pytest.raises(ArgumentTypeError) as caught:
        call()
    assert caught.value.what == message
    assert caught.value.hint.startswith(("launch(fn, nprocs, args)", "spawn(fn, args, nprocs)"))


SESSION = """
from unisono.launcher import launch
class MyError(Exception):
    pass
def cell(rank, k):
    import unisono as dist
    import numpy as np
    dist.init_process_group()
    x = np.full(2, float(rank + k))
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.tolist()
def bad(rank):
    raise MyError("boom")
print(launch(cell, 2, (1,)))
try:
    launch(bad, 1)
except MyError as error:
    print(type(error) is MyError, error, error.__notes__)
"""
# How a notebook's kernel runs a cell: in a module __main__ that comes from no file.
NOTEBOOK = """
import sys, types
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
exec(compile({session!r}, "<ipython-input-1>", "exec"), main.__dict__)
"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", ["command", "stdin", "notebook"])
def test_sessions_without_a_file(launches, kind):
    code = NOTEBOOK.format(session=SESSION) if kind == "notebook" else SESSION
    python = [sys.executable, "-W", "error"]
    (launches.folder / "stdin").write_text(code)
    command = ["sh", "-c", f"exec {shlex.join(python)} <stdin"]
    program = command if kind == "stdin" else [*python, "-c", code]
    expected = "[[3.0, 3.0], [3.0, 3.0]]\nTrue boom ['raised on rank 0 of 1']\n"
    assert launches.run(program=program) == (0, expected, "")


CLASSES_OF_THE_SCRIPT = """
import sys
import cloudpickle
from unisono.launcher import launch
class MyError(Exception):
    pass
class Box:
    pass
def work(rank):
    return Box()
def bad(rank):
    raise MyError
if __name__ == "__main__":
    print(type(launch(work, 1, start_method=sys.argv[1])[0]) is Box)
    try:
        launch(bad, 1, start_method=sys.argv[1])
    except MyError as error:
        print(error.__notes__)
"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_results_and_errors_have_the_classes_of_the_script(launches, method):
    script = launches.folder / "script.py"
    script.write_text(CLASSES_OF_THE_SCRIPT)
    expected = "True\n['raised on rank 0 of 1']\n"
    assert launches.run(program=[sys.executable, str(script), method]) == (0, expected, "")


WITHOUT_CLOUDPICKLE = """
import sys
sys.modules["cloudpickle"] = None
from unisono.launcher import launch
def cell(rank): pass
try:
    launch(cell, 2)
except ValueError as error:
    print(error.what)
"""


def test_session_without_a_file_and_without_cloudpickle(launches):
    _, out, err = launches.run(program=[sys.executable, "-c", WITHOUT_CLOUDPICKLE])
    assert "defined in a session without a file" in out, err


OF_A_POOL = """
import sys
sys.modules["cloudpickle"] = None
import unisono
def cell(x): pass
with unisono.pool(1, start_method="fork") as ranks, unisono.Executor(1) as executor:
    for call in (ranks.map, lambda *task: list(executor.map(*task))):
        try:
            call(cell, [1])
        except ValueError as error:
            print(error.hint)
"""


def test_map_without_cloudpickle_has_the_hint_too(launches):
    _, out, err = launches.run(program=[sys.executable, "-c", OF_A_POOL])
    hint = "pip install cloudpickle, or define it in a module and import it\n"
    assert out == hint * 2, err


@pytest.mark.parametrize("call", [launch, spawn])
def test_a_function_that_does_not_take_the_rank_is_refused_here(call):
    with pytest.raises(ArgumentTypeError, match="does not take the rank and 0 arguments") as caught:
        call(lambda: 1, nprocs=1)
    assert caught.value.hint == f"{call.__name__} calls fn(rank, *args)"
    with pytest.raises(ArgumentTypeError, match="does not take the rank and 3 arguments"):
        call(targets.scaled, args=(1, 2, 3), nprocs=1)


def test_the_hint_of_a_function_that_no_child_finds_names_the_pool(launches):
    program = "from unisono import spawn\ndef cell(rank): pass\nspawn(cell, nprocs=1)"
    _, _, err = launches.run(program=[sys.executable, "-c", program])
    assert "use `unisono.pool`" in err


SCRIPT = """
import unisono
def work(rank):
    raise ValueError("mine")  # of work
if __name__ == "__main__":
    unisono.launch(work, 1)
"""


def test_a_traceback_of_a_function_sent_by_value_has_its_lines(tmp_path):
    """cloudpickle names another file, whose lines nobody can show."""
    pytest.importorskip("cloudpickle")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = python(path)
    assert done.returncode == 1
    assert f'File "{path}", line 4, in work\n    raise ValueError("mine")' in done.stderr
    assert "dynamic-code" not in done.stderr
