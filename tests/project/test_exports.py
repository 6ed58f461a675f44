"""Every public name has one home, can be imported, and is documented."""

import ast
import inspect
from pathlib import Path

import pytest

import unisono
import unisono.errors
import unisono.lowlevel
import unisono.testing
from tests.support.programs import python
from tests.support.tools import ROOT, tool

TIERS = (unisono, unisono.lowlevel, unisono.testing, unisono.errors)
PUBLIC = [(tier, name) for tier in TIERS for name in tier.__all__]
IDS = [f"{tier.__name__}.{name}" for tier, name in PUBLIC]


def test_type_checkers_and_the_interpreter_see_the_same_names():
    stub = Path(unisono.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    body = ast.parse(stub).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    declared = [alias.asname for node in imports for alias in node.names if alias.asname]
    declared += {node.name for node in body if isinstance(node, ast.FunctionDef)}
    declared += [ast.unparse(node.targets[0]) for node in body if isinstance(node, ast.Assign)]
    assert sorted(declared) == sorted({*unisono._HOME_OF, *unisono._MODULES, "__all__"}), (
        "run `make docs`"
    )
    assert "__getattr__" not in stub, "to type checkers, a name that is not here is a mistake"


def test_stub_is_up_to_date():
    pytest.importorskip("ruff")
    stub = Path(unisono.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    assert tool("stub").text() == stub, "run `make docs`"


def test_stub_of_mpi_is_up_to_date():
    pytest.importorskip("ruff")
    stub = (ROOT / "src/unisono/MPI/__init__.pyi").read_text(encoding="utf-8")
    # In a process of its own, because the import makes a world.
    made = python("tools/mpi4py_stub.py", "--print", cwd=ROOT, check=True).stdout
    assert made == stub, "run `make docs`"


def test_each_public_name_has_one_home():
    homes: dict[str, list[str]] = {}
    for tier, name in PUBLIC:
        homes.setdefault(name, []).append(tier.__name__)
    # torch has this error under the same name, so scripts expect it in the first tier too.
    assert homes.pop("QueueEmptyError") == ["unisono", "unisono.errors"]
    # The steps of a schedule have the words of the calls that do the same.
    for name in ("send", "recv", "reduce"):
        assert homes.pop(name) == ["unisono", "unisono.lowlevel"]
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier.__name__)
def test_all_has_no_duplicates(tier):
    assert len(set(tier.__all__)) == len(tier.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'unisono' has no attribute 'all_reduces'"):
        unisono.all_reduces  # noqa: B018  the access is the test


def test_dir_lists_every_name():
    assert set(unisono.__all__) <= set(dir(unisono))


@pytest.mark.parametrize(("tier", "name"), PUBLIC, ids=IDS)
def test_public_classes_and_functions_are_documented(tier, name):
    value = getattr(tier, name)
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return
    undocumented = [name] if not inspect.getdoc(value) else []
    if inspect.isclass(value):
        undocumented += [
            f"{name}.{method}"
            for method, function in vars(value).items()
            if not method.startswith("_")
            and inspect.isfunction(function)
            and method not in getattr(value, "__dataclass_fields__", {})
            and not inspect.getdoc(getattr(value, method))
        ]
    assert undocumented == []
