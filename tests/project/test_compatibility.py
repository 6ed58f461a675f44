"""Every public name of torch.distributed is here with its signature, or is refused."""

import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

import numpy as np
import pytest

import unisono
from tests.adapters.torch.torch_signatures import calls, overloads
from tests.support import tools
from unisono.core.operations.methods import OPS
from unisono.errors import UnsupportedError
from unisono.refused import INCIDENTAL, REFUSED, REFUSED_MODULES

PAGE = (tools.ROOT / "docs/reference/compatibility.md").read_text(encoding="utf-8")
SAME = re.search(r"defaults:\n\n((?: {4}.*\n)+)", PAGE)[1].split()
ROWS = dict.fromkeys(SAME, "same") | {
    name: status
    for names, status in re.findall(r"^\| ([`\w, ]+) \| (\w+) \|", PAGE, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", names)
}


# ---- tests ----


@pytest.fixture(scope="module")
def tool():
    pytest.importorskip("torch.distributed")
    return tools.tool("compatibility_page")


def test_page_is_up_to_date(tool):
    assert tool.page() == PAGE, "run `make docs`"


def test_every_name_has_a_row(tool):
    assert set(ROWS) == set(tool.names_of_torch())
    assert len(ROWS) > 100
    assert set(ROWS.values()) == {"same", "extended", "refused"}


def test_no_name_is_refused_that_is_there():
    assert {name for name, status in ROWS.items() if status == "refused"} == set(REFUSED)
    assert set(REFUSED).isdisjoint([*unisono._HOME_OF, *INCIDENTAL])


def test_notes_are_about_names_of_torch(tool):
    assert set(tool.NOTES) | set(tool.LACKING) <= set(ROWS)


def test_every_module_of_torch_has_a_row(tool):
    import torch.distributed

    modules = {module.name for module in iter_modules(torch.distributed.__path__)}
    rows = {name.partition(".")[0] for name in (*tool.MODULES, *REFUSED_MODULES)}
    assert rows == {name for name in modules if not name.startswith("_")}
    for name in (*tool.MODULES, *REFUSED_MODULES):
        assert find_spec(f"torch.distributed.{name}"), name
    for name in tool.MODULES:
        import_module(f"unisono.{name}")


def test_newer_names_are_here(tool):
    for name, text in tool.NEWER.items():
        owner, _, member = name.rpartition(".")
        there = hasattr(getattr(unisono, owner) if owner else unisono, member)
        assert there == (not text), name


def test_every_name_of_torchs_launcher_has_a_row(tool):
    for module, (names, _here) in tool.LAUNCHER.items():
        theirs = import_module(f"torch.distributed.{module}")
        assert names.split() == list(theirs.__all__), module


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_name_says_why(name):
    with pytest.raises(UnsupportedError) as caught:
        getattr(unisono, name)
    assert REFUSED[name] in caught.value.what
    assert not hasattr(unisono, name)


def test_attributes_that_the_page_takes_for_granted(tool, tmp_path):
    objects = {
        "DebugLevel": unisono.DebugLevel.INFO,
        "FileStore": unisono.FileStore(str(tmp_path / "store"), 1),
        "ReduceOp": unisono.ReduceOp.SUM,
        "TCPStore": unisono.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    for name, attributes in tool.ATTRIBUTES.items():
        for attribute in attributes:
            assert getattr(objects[name], attribute) is not None, (name, attribute)
    objects["FileStore"].close()
    objects["TCPStore"].close()


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (lambda a, b: None, lambda b, a: None, "parameters are"),
        (lambda a: None, lambda a, b=None: None, "parameters are"),
        (lambda a, b=1: None, lambda a, b=None: None, "b=1, torch has None"),
        (lambda a, b: None, lambda a: None, "parameters are"),
        (lambda *, a: None, lambda a: None, "KEYWORD_ONLY"),
        (lambda a, b: None, lambda a, b=3: None, "torch has 3"),
    ],
)
def test_a_difference_is_found(tool, ours, theirs, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        list(tool.extensions("f", ours, theirs))


def test_an_extension_is_told(tool):
    assert list(tool.extensions("f", lambda a, **how: None, lambda a: None)) == ["takes **how**"]
    found = list(tool.extensions("f", lambda a, b=None, *, c: None, lambda a, b: None))
    assert found == ["`b` may be left out", "takes `c`"]


@pytest.mark.ranks(2)
def test_c10d_names_of_a_groups_properties(rank):
    group = unisono.new_group(group_desc="pair")
    assert (group.group_name, group.group_desc) == (group.key, "pair")
    assert group.get_group_store() is group.store
    assert group.bound_device_id is None
    group.shutdown()
    assert "closed" in repr(group)


@pytest.mark.ranks(2)
def test_private_names_that_libraries_use(rank):
    first, data = unisono.new_group([0]), np.ones(2)
    assert unisono._get_process_group_name(unisono.group.WORLD) == "0"
    unisono.all_reduce(data, unisono._make_nccl_premul_sum(0.5))
    assert data[0] == 1
    assert unisono._rank_not_in_group(first) == (rank == 1)
    assert not unisono._rank_not_in_group(None)


# ---- methods -------------------------------------------------------------------------------

# Constructors that differ: a group needs its store, a work comes from a call. Gloo's options have
# no counterpart.
MADE_OTHERWISE = {"ProcessGroup", "ProcessGroupGloo", "Work"}


def test_methods_take_what_those_of_torch_do(tool):
    """In their places, by name, and without what is optional; groups' data calls see below."""
    compared, wrong = 0, []
    forms = {name for schema in OPS.values() for name in schema.c10d_methods}
    for name, theirs in tool.names_of_torch().items():
        # Not inspect.isclass, which looks at an attribute: torch's deprecated names warn of that.
        if not issubclass(type(theirs), type) or name in REFUSED:
            continue
        ours = getattr(unisono, name)
        skipped = forms if name.startswith("ProcessGroup") else set()
        for method in own_methods(theirs) - tool.LACKING.get(name, {}).keys() - skipped:
            if method == "__init__" and name in MADE_OTHERWISE:
                continue
            signature = inspect.signature(getattr(ours, method))
            kind = type(inspect.getattr_static(ours, method))
            bound = [] if kind in (staticmethod, classmethod) else [None]
            for overload in overloads(getattr(theirs, method)):
                for arguments, keywords in calls(overload, lambda _: None):
                    compared += 1
                    try:
                        signature.bind(*bound, *arguments, **keywords)
                    except TypeError as error:
                        wrong.append(f"{name}.{method}{signature}: {error}")
    assert wrong == []
    assert compared > 200


def own_methods(theirs) -> set[str]:
    """Return the names of public methods that a class has not from Python's own ones."""
    python = [base for base in theirs.__mro__ if base.__module__ == "builtins"]
    names = {name for name in dir(theirs) if not name.startswith("_")} | {"__init__"}
    return {
        name
        for name in names
        if callable(value := getattr(theirs, name))
        and not inspect.isclass(value)
        and not any(getattr(base, name, None) is value for base in python)
    }
