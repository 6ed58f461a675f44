"""Every public name of torch.distributed is here with its signature, or is refused."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import unisono
from unisono.errors import UnsupportedError
from unisono.refused import INCIDENTAL, REFUSED
from unisono.testing import run

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/compatibility.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE, re.MULTILINE))


@pytest.fixture(scope="module")
def tool():
    pytest.importorskip("torch.distributed")
    path = ROOT / "tools/compatibility_page.py"
    spec = importlib.util.spec_from_file_location("tools_compatibility_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_every_function_of_a_group_takes_one():
    """What talks to other ranks does so in any group, for as long as one says."""
    talking = [
        name
        for name in unisono.__all__
        if inspect.isfunction(inspect.unwrap(function := getattr(unisono, name)))
        and function.__module__.startswith("unisono.groups.")
        and "async_op" in inspect.signature(function).parameters
    ]
    assert len(talking) >= 14
    for name in talking:
        parameters = inspect.signature(getattr(unisono, name)).parameters
        assert {"group"} <= set(parameters), name
        assert {"timeout", "how"} & set(parameters), name
