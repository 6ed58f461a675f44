"""Only unisono.core.base.seam decides between C++ and Python."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src/unisono"
SEAM = {"core/base/seam.py", "core/base/extension.py"}
OTHERS = [path for path in SOURCE.rglob("*.py") if str(path.relative_to(SOURCE)) not in SEAM]


def questions(tree):
    """Yield (line, name) for each way to ask whether there is an extension module."""
    names = {"_extension"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "unisono.core.base.seam":
            names |= {each.asname or each.name for each in node.names if each.name == "cpp"}
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                if f"{node.module}.{each.name}" in (
                    "unisono._engine",
                    "unisono.core.base.extension",
                ):
                    yield node.lineno, each.name
        elif isinstance(node, ast.Constant) and node.value == "unisono._engine":
            yield node.lineno, node.value
    for node in ast.walk(tree):
        tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert) else []
        tests += [node.left] if isinstance(node, ast.Compare) else []
        for each in tests:
            if isinstance(each, ast.Name) and each.id in names:
                yield each.lineno, each.id


def test_no_other_module_asks_for_the_extension():
    found = {path: list(questions(ast.parse(path.read_text(encoding="utf-8")))) for path in OTHERS}
    assert not {path: each for path, each in found.items() if each}


@pytest.mark.parametrize(
    "text",
    [
        "from unisono.core.base.seam import cpp as x\nif x is None: pass",
        "from unisono.core.base.seam import cpp\ny = 1 if cpp else 2",
        "from unisono import _engine",
        "import_module('unisono._engine')",
        "from unisono.core.base import extension",
    ],
)
def test_a_question_is_found(text):
    assert list(questions(ast.parse(text)))


# What C++ alone has: each class with the reason why Python has no class of this name.
CPP_ALONE = {
    "Segment": "memory that ranks share",
    "ThreadTeam": "threads that need no interpreter lock",
    "Group": "calls in that memory",
    "SharedAgreement": "an agreement in that memory",
    "Runner": "the base of what runs programs; in Python TaskRun runs one call",
    "Steps": "runs programs with messages; in Python TaskRun runs one call",
    "Calls": "runs repeated calls without Python",
    "Learner": "has Calls keep a call",
    "Messenger": "the base of Port",
    "Receive": "a receive for which Python has made no Message yet",
    "MPICall": "MPI needs the extension",
    "MPIDoubling": "MPI needs the extension",
    "MPIGroup": "MPI needs the extension",
    "MPIRunner": "MPI needs the extension",
}
# Python uses one or the other by the same methods.
SAME_METHODS = ("CallQueue", "Recorder", "StoreLink")


def classes_in(path):
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def parameters(node):
    """By public method: the names of its parameters, which may end with an underscore."""
    methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
    return {
        each.name: [argument.arg.strip("_") for argument in each.args.args]
        for each in methods
        if not each.name.startswith("_")
    }


CPP = classes_in(SOURCE / "_engine.pyi")
# These adapters have the names of Ray and of mpi4py.
FILES = {path: classes_in(path) for path in OTHERS if not {"clusters", "mpi4py"} & set(path.parts)}
PYTHON = {name: node for classes in FILES.values() for name, node in classes.items()}
TWINS = set(CPP) - set(CPP_ALONE)


def test_a_class_of_cpp_has_a_twin_of_its_name_or_a_reason():
    assert not set(CPP_ALONE) - set(CPP)
    assert not TWINS - set(PYTHON), "name the twin so, or add a reason"
    assert not set(CPP_ALONE) & set(PYTHON)


def test_each_twin_has_a_file_of_its_own():
    assert not {
        path: TWINS & set(each) for path, each in FILES.items() if len(TWINS & set(each)) > 1
    }


@pytest.mark.parametrize("name", SAME_METHODS)
def test_the_methods_of_twins_have_the_same_parameters(name):
    there, here = parameters(CPP[name]), parameters(PYTHON[name])
    both = sorted(set(there) & set(here))
    assert both
    assert {method: here[method] for method in both} == {method: there[method] for method in both}
