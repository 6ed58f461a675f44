"""`pool` and `%%ranks` in a real kernel of Jupyter: the notebook of examples/."""

import importlib.util
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

import unisono
from tests.support.programs import python

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/ranks_that_stay.ipynb"

pytestmark = [
    pytest.mark.whole("starts a kernel of Jupyter"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("ipykernel", "nbclient")),
        reason="needs ipykernel and nbclient",
    ),
]


@pytest.fixture(scope="module")
def outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return run(["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"])


def run(sources):
    """Return the outputs of cells."""
    drop = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: text for name, text in os.environ.items() if name not in drop}
    src = str(Path(unisono.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [src, env.get("PYTHONPATH")]))
    program = ROOT / "tests/launcher/notebook_run.py"
    done = python(program, input=json.dumps(sources), env=env, limit_s=200.0)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def result(cell):
    assert not [part for part in cell if part["output_type"] == "error"], cell
    return [part["data"]["text/plain"] for part in cell if part["output_type"] == "execute_result"]


def printed(cell):
    return "".join(part.get("text", "") for part in cell)


def test_the_pool_shows_its_state(outputs):
    assert result(outputs[0]) == ["<unisono.pool of 2 ranks: ready>"]


def test_a_cell_of_ranks_prints_below_itself(outputs):
    assert result(outputs[1]) == []
    lines = sorted(printed(outputs[1]).splitlines())
    assert [line[:14] for line in lines] == ["[rank 0] array", "[rank 1] array"]


def test_a_function_uses_names_of_the_notebook_and_of_the_rank(outputs):
    assert result(outputs[2]) == ["True"]


def test_an_error_leaves_what_the_ranks_hold(outputs):
    assert "no batch ['raised on rank 1 of 2']" in printed(outputs[3])
    assert result(outputs[3]) == ["1000"]


def test_the_ranks_write_into_the_array_of_the_notebook(outputs):
    [text] = result(outputs[4])
    assert text.replace("\n", "").replace(" ", "") == "array([[1.,0.,1.],[2.,0.,2.]])"


def test_map_returns_the_results_in_order(outputs):
    assert result(outputs[5]) == [str([sum(range(n)) for n in range(6)])]


def test_k_means_has_the_centers_of_a_single_process(outputs):
    rng = np.random.default_rng(0)
    table = np.concatenate([rng.normal(c, 0.3, (2000, 2)) for c in (0, 3, 6)])
    centers = table[[0, 2000, 4000]]
    for _ in range(10):
        near = ((table[:, None] - centers) ** 2).sum(2).argmin(1)
        centers = np.stack([table[near == j].mean(0) for j in range(3)])
    assert result(outputs[6]) == [repr(centers.round(1))]


CELLS = [
    "import unisono as dist",
    "%%ranks\n1",
    "ranks = dist.pool(2)",
    """def halve(n):
    return n / (n - n)
ranks.run(halve, 2)""",
    "of_notebook = 3",
    "%%ranks\nof_notebook",
    """%%ranks
class Table:
    def _repr_html_(self):
        return "<b>1</b>"
Table()""",
    "dist.get_rank()",
    "%%ranks 1\nnumber = 3\nnumber",
    "%%ranks\n1;",
    "%%ranks --rank=1\n1",
    "lambda: of_notebook\nranks.run(lambda: of_notebook)",
    "of_notebook = 4",
    "%%ranks\nof_notebook",
    """import matplotlib.pyplot as plt
def draw():
    plt.plot([1])
    plt.show()
    display(dist.get_rank())
ranks.run(draw)""",
    "ranks.close()",
]


@pytest.fixture(scope="module")
def cells():
    return run(CELLS)


def error(cell):
    [found] = [part for part in cell if part["output_type"] == "error"]
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(found["traceback"]))


def test_the_magic_is_there_with_the_import(cells):
    assert "UsageError: there is no open pool" in error(cells[1])


def test_a_traceback_has_the_line_of_the_cell_and_no_frames_of_the_library(cells):
    text = error(cells[3])
    assert re.search(r'File ".*", line 2, in halve\n    return n / \(n - n\)', text)
    assert "src/unisono" not in text
    assert "dynamic-code" not in text


def test_a_cell_that_uses_a_name_of_the_notebook_gets_a_hint(cells):
    assert "the notebook has of_notebook: run(f, of_notebook) gives it to all" in error(cells[5])


def test_tables_are_displayed_below_their_rank(cells):
    shown = [part["data"]["text/html"] for part in cells[6] if part["output_type"] != "stream"]
    assert shown == ["<b>1</b>"] * 2
    assert printed(cells[6]) == "[rank 0]\n[rank 1]\n"


def test_a_call_in_the_notebook_names_the_place_for_it(cells):
    assert "call it inside ranks.run or %%ranks" in error(cells[7])


def test_the_line_of_the_magic_and_a_semicolon(cells):
    assert printed(cells[8]) == "[rank 1] 3\n"
    assert cells[9] == []
    assert "takes the name of a pool and numbers of ranks, got '--rank=1'" in error(cells[10])


def test_a_cell_never_has_an_old_copy_of_a_name(cells):
    assert result(cells[11]) == ["[3, 3]"]
    assert "the notebook has of_notebook: run(f, of_notebook)" in error(cells[13])


def test_figures_and_what_display_gets_are_shown_after_run(cells):
    pytest.importorskip("matplotlib")
    shown = [part["data"] for part in cells[14] if part["output_type"] == "display_data"]
    assert ["image/png" in each for each in shown] == [True, True]
    assert printed(cells[14]) == "[rank 0] 0\n[rank 0]\n[rank 1] 1\n[rank 1]\n"
