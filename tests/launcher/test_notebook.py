"""`unisono.launch` from the cells of a notebook, in a real kernel of Jupyter."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

import unisono
from tests.support.programs import python

SRC = str(Path(unisono.__file__).parents[1])
PROGRAM = str(Path(__file__).with_name("notebook_run.py"))

pytestmark = [
    pytest.mark.whole("starts a kernel of Jupyter"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("ipykernel", "nbclient")),
        reason="needs ipykernel and nbclient",
    ),
]

CELLS = [
    """
import numpy as np
import unisono as dist
offset = 1
class OwnError(Exception):
    pass
def step(rank, k):
    dist.init_process_group()
    x = np.full(2, float(rank + k + offset))
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.tolist()
def bad(rank):
    raise OwnError(f"rank {rank}")
""",
    "dist.launch(step, 2, (1,))",
    "offset = 2\ndist.launch(lambda rank: (rank, offset), 2)",
    "dist.launch(bad, 1)",
    """
try:
    dist.launch(bad, 2)
except OwnError as error:
    print("caught", type(error).__name__)
""",
    "print(dist.is_initialized(), 'RANK' in __import__('os').environ)",
]


@pytest.fixture(scope="module")
def outputs():
    drop = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: text for name, text in os.environ.items() if name not in drop}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [SRC, env.get("PYTHONPATH")]))
    done = python(PROGRAM, input=json.dumps(CELLS), env=env, limit_s=200.0)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def results(outputs):
    return [
        part["data"]["text/plain"] for part in outputs if part["output_type"] == "execute_result"
    ]


def printed(outputs):
    # The kernel may send one line in several parts.
    return "".join(part["text"] for part in outputs)


def test_functions_of_the_notebook_run_on_all_ranks(outputs):
    assert outputs[0] == []
    assert results(outputs[1]) == ["[[5.0, 5.0], [5.0, 5.0]]"]
    assert results(outputs[2]) == ["[(0, 2), (1, 2)]"]


def test_an_error_is_shown_with_its_rank_and_traceback(outputs):
    [error] = [part for part in outputs[3] if part["output_type"] == "error"]
    assert (error["ename"], error["evalue"]) == ("OwnError", "rank 0")
    text = "\n".join(error["traceback"])
    assert "rank 0 (pid " in text
    assert "in bad" in text


def test_an_error_of_the_notebooks_own_class_can_be_caught(outputs):
    assert printed(outputs[4]) == "caught OwnError\n"


def test_the_kernel_itself_is_in_no_world(outputs):
    assert printed(outputs[5]) == "False False\n"
