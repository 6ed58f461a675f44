"""What functions of a notebook read by name: generators, globals that they assign, shared memory.

The functions are those of a main module, because functions of a module are sent by name.
"""

import importlib
import os
import signal
import sys
import warnings

import numpy as np
import pytest

import unisono
from unisono.beyond.pool import display
from unisono.errors import ArgumentTypeError, InvalidArgumentError, UsageError, WorkerFailedError

pytest.importorskip("cloudpickle")


class Notebook(dict):
    """The main module of a notebook, as a namespace."""

    def __init__(self, cell):
        super().__init__(__name__="__main__")
        exec(cell, self)


@pytest.fixture(scope="module")
def ranks():
    with unisono.pool(2, start_method="fork") as made:
        yield made


@pytest.fixture(scope="module")
def executor():
    with unisono.Executor(2, start_method="fork") as made:
        yield made.bootup()


@pytest.mark.parametrize(
    ("cell", "what"),
    [
        ("rng = np.random.default_rng(0)\ndef f(i): return rng.normal()", "rng, a random Gen"),
        ("rng = np.random.RandomState(0)\ndef f(i): return rng.normal()", "rng, a random RandomS"),
        ("from random import Random\nr = Random(0)\ndef f(i): return r.random()", "r, a random R"),
        ("from random import gauss\ndef f(i): return gauss(0, 1)", "gauss, a method of a random R"),
        ("from random import random\ndef f(i): return random()", "random, a method of a random R"),
        ("from numpy.random import rand\ndef f(i): return rand()", "rand, a method of a random R"),
        ("g = np.random.PCG64(0)\ndef f(i): return g.random_raw()", "g, a random PCG64"),
        (
            "def make():\n    inner = np.random.default_rng(0)\n    return lambda i: inner.random()"
            "\nf = make()",
            "inner, a random Generator",
        ),
        ("rng = np.random.default_rng(0)\ndef g(): return rng\ndef f(i): return g()", "rng, a r"),
        ("f = np.random.default_rng(0).normal", "normal, a method of a random Generator"),
    ],
)
def test_a_generator_that_each_call_would_copy_is_refused(ranks, executor, cell, what):
    f = Notebook(f"import numpy as np\n{cell}")["f"]
    expected = f"each call gets a copy of {what}"
    for call in (lambda: ranks.map(f, range(4)), lambda: ranks.run(f, 1)):
        with pytest.raises(UsageError, match=expected) as caught:
            call()
        assert "np.random.SeedSequence(0).spawn(8)" in str(caught.value)
    if "f = np" not in cell:
        with pytest.raises(UsageError, match=expected):
            executor.submit(f, 1).result()


def test_a_generator_that_is_an_argument_and_seeds_for_tasks_are_not_refused(ranks, executor):
    notebook = Notebook(
        "import random\nimport numpy as np\nrng = np.random.default_rng(7)\n"
        "def draw(rng): return rng.normal()\n"
        "def simulate(seed): return np.random.default_rng(seed).normal()\n"
        "def own(i): return random.random(), np.random.rand()\n"
    )
    expected = np.random.default_rng(7).normal()
    assert ranks.run(notebook["draw"], notebook["rng"]) == [expected] * 2
    seeds = np.random.SeedSequence(0).spawn(6)
    found = ranks.map(notebook["simulate"], seeds)
    assert found == [np.random.default_rng(seed).normal() for seed in seeds]
    assert len(set(found)) == 6
    assert list(executor.map(notebook["simulate"], seeds)) == found
    assert len(ranks.map(notebook["own"], range(4))) == 4


@pytest.mark.parametrize(
    "cell",
    [
        "def f(i):\n    global count\n    count += 1",
        "def f(i):\n    global count\n    if not count:\n        count = i",
        "def f(i):\n    def add():\n        global count\n        count += 1\n    add()",
        "def add():\n    global count\n    count = count + 1\ndef f(i): add()",
    ],
)
def test_a_function_that_assigns_what_it_reads_of_the_notebook_is_refused_at_once(
    ranks, executor, cell
):
    notebook = Notebook(f"count = 0\n{cell}")
    for call in (
        lambda: ranks.map(notebook["f"], range(3)),
        lambda: ranks.run(notebook["f"], 1),
        lambda: executor.submit(notebook["f"], 1).result(),
    ):
        with pytest.raises(
            UsageError,
            match=r"(f|add) assigns the global count, which is a copy on a rank: the count of the "
            "notebook would stay as it is",
        ):
            call()


def test_a_name_that_the_ranks_alone_have_may_count(ranks):
    notebook = Notebook("def f():\n    global count\n    count += 1\n    return count")
    ranks.cell("count = 0")
    assert [ranks.run(notebook["f"]) for _ in range(2)] == [[1, 1], [2, 2]]


FILL = "def fill(i):\n    results[i] = i + 1\n    return results[i:i + 1]"


def test_the_array_of_one_pool_is_the_same_memory_in_another(ranks, executor):
    notebook = Notebook(FILL)
    with unisono.pool(2, start_method="fork") as before:
        results = notebook["results"] = before.shared_array(6)
        with pytest.raises(WorkerFailedError):
            before[1].run(end)
    parts = ranks.map(notebook["fill"], range(4))
    executor.submit(notebook["fill"], 4).result()
    [last] = executor.map(notebook["fill"], [5])
    assert np.array_equal(results, np.arange(1, 7))
    # Results are views of the memory, too.
    parts[0][0], last[0] = 50, 60
    assert results[[0, 5]].tolist() == [50, 60]


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def test_memory_that_came_with_a_task_goes_with_the_array(executor):
    with unisono.pool(1, start_method="fork") as made:
        results = made.shared_array(1000)
        notebook = Notebook(FILL)
        notebook["results"] = results[10:20]
        executor.submit(notebook["fill"], 0).result()
        assert results[10] == 1
        assert {len(executor.submit(attached).result()) for _ in range(4)} <= {0, 1}
        notebook.clear()
        del results
        assert [executor.submit(attached).result() for _ in range(4)] == [[]] * 4


def attached():
    from unisono.beyond.pool import memory

    return list(memory.attached)


def test_a_module_that_was_reloaded_here_alone_is_named(ranks, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "pool_model_of_test.py"
    file.write_text("def f(): return 1\n")
    ranks.cell(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})")
    model = importlib.import_module(file.stem)
    notebook = Notebook("def g(): return model.f()")
    notebook["model"] = model
    try:
        for call in (lambda: ranks.run(model.f), lambda: ranks.run(notebook["g"])):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                call()
            file.write_text(file.read_text() + "\n" * 7)
            importlib.reload(model)
            with pytest.warns(UserWarning, match=f"{file.stem} was reloaded here, and the ranks"):
                call()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                call()
    finally:
        del sys.modules[file.stem]


def test_slips_of_a_call_are_named_here(ranks):
    for call in (ranks.run, ranks[0].run, ranks.map, ranks.run_each):
        with pytest.raises(ArgumentTypeError, match="takes a function, got ndarray") as caught:
            call(np.ones(3), [1, 2])
        assert "(f, x), not " in str(caught.value)
    with pytest.raises(TypeError, match="map takes tasks after the function: map"):
        ranks.map(abs)
    for tasks in ((8,), ([1], 8)):
        with pytest.raises(TypeError, match="map takes an iterable of tasks, got 8"):
            ranks.map(divmod, *tasks)
    with pytest.raises(TypeError, match="starmap takes an iterable of tasks, got 8"):
        ranks.starmap(divmod, 8)


def test_a_pool_in_a_function_is_named(ranks):
    notebook = Notebook("def use(i): return ranks.shared_array(3)")
    notebook["ranks"] = ranks
    with pytest.raises(ArgumentTypeError, match="a pool cannot be pickled or copied") as caught:
        ranks.map(notebook["use"], range(2))
    assert "x = ranks.shared_array(3), then ranks.run(f, x)" in str(caught.value)


def test_what_is_no_shared_array(ranks):
    for shape, dtype, error, text in (
        (8, 1000, ArgumentTypeError, r"one tuple: ranks.shared_array\(\(8, 1000\)\)"),
        (3.0, float, ArgumentTypeError, "no array has shape=3.0, dtype=<class 'float'>: "),
        (-3, float, InvalidArgumentError, "no array has shape=-3, dtype=<class 'float'>: "),
        (10**19, float, InvalidArgumentError, "no array has shape=10000000000000000000"),
        (10**13, float, MemoryError, r"a shared array of 80000000000000 bytes: \d+ bytes are ava"),
    ):
        with pytest.raises(error, match=text):
            ranks.shared_array(shape, dtype)


def test_a_module_that_only_this_process_finds_is_named(ranks, executor, tmp_path, monkeypatch):
    (tmp_path / "late_module_of_test.py").write_text("def f(i): return i\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    late = importlib.import_module("late_module_of_test")
    try:
        for call in (
            lambda: ranks.map(late.f, range(2)),
            lambda: executor.submit(late.f, 1).result(),
        ):
            with pytest.raises(ModuleNotFoundError) as caught:
                call()
            assert any(
                note.startswith(f"late_module_of_test is {tmp_path}/late_module_of_test.py here.")
                for note in caught.value.__notes__
            )
            assert 'File "' not in str(caught.value.__cause__)
    finally:
        del sys.modules["late_module_of_test"]


@pytest.mark.parametrize("chunksize", [1, 3])
def test_exceptions_may_be_results_of_map(ranks, chunksize):
    notebook = Notebook("def f(i, k=1): return k / i")
    found = ranks.map(notebook["f"], [1, 0, 2, 0], chunksize=chunksize, return_exceptions=True)
    assert [found[0], found[2]] == [1, 0.5]
    for number in (1, 3):
        assert isinstance(found[number], ZeroDivisionError)
        assert found[number].__notes__ == [f"raised in task {number}"]
        text = str(found[number].__cause__)
        assert text.startswith(f"task {number} raised an exception\n")
        assert "in f\n" in text
    found = ranks.starmap(notebook["f"], [(1, 3), (0, 3)], return_exceptions=True)
    assert found[0] == 3
    assert isinstance(found[1], ZeroDivisionError)
    with pytest.raises(ZeroDivisionError) as caught:
        ranks.map(notebook["f"], [1, 0])
    assert "map(f, tasks, return_exceptions=True) returns them" in caught.value.__notes__[-1]


def draw():
    return np.random.rand()


def test_forked_ranks_draw_their_own_numbers(ranks, executor):
    found = [*ranks.run(draw), *ranks.run(draw), executor.submit(draw).result()]
    assert len(set(found)) == 5


def test_lines_of_ranks_beside_a_bar_of_a_notebook_do_not_go_through_rich(monkeypatch):
    progress = pytest.importorskip("rich.progress")
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setattr(display, "find_spec", lambda name: sys.__spec__ or name)
    made = []

    class Bar(progress.Progress):
        def __init__(self, **keywords):
            made.append(keywords)
            super().__init__(**keywords)

    monkeypatch.setattr(progress, "Progress", Bar)
    with display.progress_bar(2, True) as advance:
        advance(2)
    assert made == [{"redirect_stdout": False, "redirect_stderr": False}]
