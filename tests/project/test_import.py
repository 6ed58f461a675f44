"""`import unisono` needs NumPy and the standard library, and loads little of them."""

import ast
import json
import sys
from pathlib import Path

import pytest

import unisono
from tests.support.programs import python

SOURCE = Path(unisono.__file__).parent

# Imports of others that are allowed: in these modules, and only when a feature is used.
OPTIONAL = {
    "cloudpickle": {"launcher/launch.py"},
    "distributed": {"adapters/clusters/dask.py"},
    "ml_dtypes": {"core/base/types.py", "core/base/buffers.py"},
    "prometheus_client": {"core/recorder/metrics.py"},
    "py4j": {"adapters/clusters/spark.py"},
    "pyspark": {"adapters/clusters/spark.py"},
    "pytest": {"testing/plugin.py"},
    "ray": {
        "adapters/clusters/ray.py",
        "adapters/clusters/ray_collective.py",
        "adapters/clusters/ray_transport.py",
    },
    "rich": {"beyond/pool", "workbench"},
    "shtab": {"workbench/cli/completion.py"},
    "torch": {"adapters/torch", "beyond/parallel", "nn/functional.py"},
}

SCRIPT = """
import json, sys
before = set(sys.modules)
{statement}
print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a statement loads in a fresh interpreter."""
    done = python("-W", "error", "-c", SCRIPT.format(statement=statement), check=True)
    return set(json.loads(done.stdout))


def foreign(modules: set[str]) -> set[str]:
    # multiprocessing gives the main module a second name.
    return modules - sys.stdlib_module_names - {"unisono", "__mp_main__"}


def test_import_alone_does_not_even_load_numpy():
    assert foreign(loaded_by("import unisono")) == set()


@pytest.mark.parametrize(
    "statement",
    [
        "import unisono as dist; dist.all_reduce; dist.init_process_group; dist.TCPStore",
        "import unisono.lowlevel",
        "import unisono as dist; dist.init_process_group(); dist.barrier()",
    ],
)
def test_use_loads_numpy_and_nothing_else(statement):
    assert foreign(loaded_by(statement)) == foreign(loaded_by("import numpy"))


def test_launcher_loads_neither_numpy_nor_an_engine():
    statement = (
        "import unisono.workbench.cli.main; loaded = [m for m in sys.modules if '.engines' in m]"
    )
    assert foreign(loaded_by(f"{statement}; assert not loaded, loaded")) == set()


def imports(path: Path) -> set[str]:
    """Return the top-level names that a file imports anywhere, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix()
)
def test_every_import_is_of_numpy_or_the_standard_library(path):
    where = path.relative_to(SOURCE)
    optional = {
        name
        for name, places in OPTIONAL.items()
        if places & {where.as_posix(), *(folder.as_posix() for folder in where.parents)}
    }
    assert foreign(imports(path)) - {"numpy"} <= optional
