"""Every public name of torch.distributed is here with its signature, or is refused."""

import inspect
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

import numpy as np
import pytest

import unisono
from tests.support import tools
from unisono.errors import UnsupportedError
from unisono.groups.operations import CHECKS, OPS
from unisono.refused import INCIDENTAL, REFUSED
from unisono.testing import run

PAGE = (tools.ROOT / "docs/reference/compatibility.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE, re.MULTILINE))


# ---- the signatures of torch's C++ methods, which only their documentation has ----

_SIGNATURE = re.compile(r"^(?:\d+\. )?\w+\((.*)\) -> ", re.MULTILINE)


class Parameter(NamedTuple):
    """One parameter; `kind` is "positional", "keyword" or "both"."""

    name: str
    kind: str
    optional: bool
    type: str


Overload = tuple[Parameter, ...]

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "both",
}


def overloads(function: Callable[..., Any]) -> list[Overload]:
    """Return the ways in which a method can be called, without self and private parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        texts = _SIGNATURE.findall(function.__doc__ or "")
        return [tuple(parsed(text)) for text in texts if not text.startswith("*args")]
    return [
        tuple(
            Parameter(p.name, _KINDS[p.kind], p.default is not p.empty, str(p.annotation))
            for p in parameters
            if p.kind in _KINDS and p.name != "self" and not p.name.startswith("_")
        )
    ]


def parsed(text: str) -> Iterator[Parameter]:
    """Yield the parameters in a signature as pybind11 writes it."""
    kind = "both"
    for part in split(text):
        if part == "*":
            kind = "keyword"
        name, _, rest = part.partition(":")
        if name in ("self", "*", "/"):
            continue
        unnamed = re.fullmatch(r"arg\d+", name) is not None
        type_, equals, _ = rest.partition(" = ")
        yield Parameter(name, "positional" if unnamed else kind, bool(equals), type_.strip())


def split(text: str) -> Iterator[str]:
    """Yield what the commas outside of brackets separate."""
    depth = start = 0
    for place, character in enumerate(text):
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            yield text[start:place].strip()
            start = place + 1
    if text[start:].strip():
        yield text[start:].strip()


def calls(
    overload: Overload, value: Callable[[Parameter], Any]
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Yield arguments for one overload: all in their places, all by name, the required ones."""
    for by_name, all_of_them in ((False, True), (True, True), (False, False)):
        arguments: list[Any] = []
        keywords: dict[str, Any] = {}
        for parameter in overload:
            if parameter.optional and not all_of_them:
                continue
            if parameter.kind == "keyword" or (by_name and parameter.kind == "both"):
                keywords[parameter.name] = value(parameter)
            else:
                arguments.append(value(parameter))
        yield arguments, keywords


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
    assert set(tool.PACKAGES) == {name for name in modules if not name.startswith("_")}


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


def test_c10d_names_of_a_groups_properties():
    def body(rank):
        group = unisono.new_group(group_desc="pair")
        assert (group.group_name, group.group_desc) == (group.key, "pair")
        assert group.get_group_store() is group.store
        assert group.bound_device_id is None
        group.shutdown()
        assert "closed" in repr(group)

    run(body, 2)


def test_private_names_that_libraries_use():
    def body(rank):
        pair = unisono.new_group([0])
        name = unisono._get_process_group_name(unisono.group.WORLD)
        data = np.ones(2)
        unisono.all_reduce(data, unisono._make_nccl_premul_sum(0.5))
        return unisono._rank_not_in_group(pair), unisono._rank_not_in_group(None), name, data[0]

    assert run(body, 2) == [(False, False, "0", 1.0), (True, False, "0", 1.0)]


def test_every_function_of_a_group_takes_one():
    """What talks to other ranks does so in any group, for as long as one says."""
    talking = [
        name
        for name in unisono.__all__
        if inspect.isfunction(inspect.unwrap(function := getattr(unisono, name)))
        and function.__module__.startswith("unisono.c10d.")
        and "async_op" in inspect.signature(function).parameters
    ]
    assert len(talking) >= 14
    for name in talking:
        parameters = inspect.signature(getattr(unisono, name)).parameters
        assert {"group"} <= set(parameters), name
        assert {"timeout", "how"} & set(parameters), name


# ---- methods -------------------------------------------------------------------------------

# Constructors that differ: a group needs its store, a work comes from a call.
MADE_OTHERWISE = {"ProcessGroup", "Work"}


def test_methods_take_what_those_of_torch_do(tool):
    """In their places, by name, and without what is optional; groups' data calls see below."""
    compared, wrong = 0, []
    forms = {name for schema in OPS.values() for name in schema.c10d_methods}
    for name, theirs in tool.names_of_torch().items():
        # Not inspect.isclass, which looks at an attribute: torch's deprecated names warn of that.
        if not issubclass(type(theirs), type) or name in REFUSED:
            continue
        ours = getattr(unisono, name)
        skipped = forms if name == "ProcessGroup" else set()
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


class Recorder(unisono.ProcessGroup):
    """A group that writes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def _call_kernel(self, op, arguments, how):
        CHECKS[op](self, *arguments)
        self._options(op, **how)
        self.asked.append(op)

    _call_collective = _call_kernel
    _timeout_s = 60.0
    _rank = 0
    ranks = (0,)


DATA = [(s.name, method) for s in OPS.values() for method in s.c10d_methods]


@pytest.mark.parametrize(("op", "method"), DATA, ids=[method for _, method in DATA])
def test_a_groups_method_takes_every_form_of_torchs(op, method):
    c10d = pytest.importorskip("torch.distributed")
    group, made = Recorder(), 0
    for overload in overloads(getattr(c10d.ProcessGroup, method)):
        for arguments, keywords in calls(overload, argument):
            getattr(group, method)(*arguments, **keywords)
            made += 1
    assert group.asked == [op] * made
    assert made >= 3


def argument(parameter):
    """Return something of a parameter's type."""
    if parameter.name == "timeout":
        return timedelta(seconds=5)
    if parameter.type.endswith("Options"):
        return getattr(unisono, parameter.type.rpartition(".")[2])()
    if parameter.type.endswith("ReduceOp"):
        return unisono.ReduceOp.MAX
    if "Tensor" not in parameter.type:
        return [] if "Sequence" in parameter.type else 0
    value = np.zeros(2)
    for _ in range(parameter.type.count("Sequence")):
        value = [value]
    return value
