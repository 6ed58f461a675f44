"""`pool` and `%%ranks` in a real kernel of Jupyter: the notebook of examples/."""

import importlib.util
import json
import os
from pathlib import Path

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
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
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
