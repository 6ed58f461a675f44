"""The pages of the API name every public object; `make site` fills in the docstrings."""

import re
from importlib import import_module

import pytest

from tests.support.tools import ROOT, tool

# torch has this error, too; its page is that of unisono.errors.
ELSEWHERE = ("unisono", "QueueEmptyError")
TIERS = ("unisono", "unisono.errors", "unisono.lowlevel", "unisono.testing")


@pytest.fixture
def api_pages():
    return tool("api_pages")


def test_pages_are_up_to_date(api_pages):
    there = {page.name: page.read_text("utf-8") for page in ROOT.glob("docs/reference/api/*.md")}
    assert api_pages.pages() == there, "run `make docs`"


@pytest.mark.parametrize("tier", TIERS)
def test_each_public_name_is_on_one_page(api_pages, tier):
    names = [name for name in import_module(tier).__all__ if (tier, name) != ELSEWHERE]
    pages = [page for page in api_pages.PAGES if page.tier == tier]
    assert sorted(n for page in pages for n in api_pages.names_of(page)) == sorted(names)
    for page in pages:
        text = (api_pages.PAGES_AT / f"{page.name}.md").read_text("utf-8")
        shown = [path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", text, re.M)]
        assert shown == api_pages.names_of(page)


def test_pages_name_only_modules_that_exist(api_pages):
    homes = [home for page in api_pages.PAGES for home in page.homes.split()]
    places = [ROOT / "src/unisono" / home.replace(".", "/") for home in homes]
    assert [p for p in places if not (p.is_dir() or p.with_suffix(".py").exists())] == []


def test_name_without_a_page_is_an_error(api_pages, monkeypatch):
    pages = [page for page in api_pages.PAGES if page.name != "device-mesh"]
    monkeypatch.setattr(api_pages, "PAGES", pages)
    with pytest.raises(SystemExit, match=r"unisono\.DeviceMesh: .* on no page"):
        api_pages.pages()


def test_name_without_a_docstring_is_an_error(api_pages, monkeypatch):
    found = api_pages.document
    monkeypatch.setattr(
        api_pages, "document", lambda home, name: None if name == "scan" else found(home, name)
    )
    with pytest.raises(SystemExit, match=r"unisono\.scan: no docstring"):
        api_pages.pages()


def test_docstrings_are_found_where_a_name_comes_from(api_pages):
    assert api_pages.document("unisono.errors", "UsageError")
    assert api_pages.document("unisono.testing", "run")
    # An instance has the string that follows its assignment; an overload has none.
    assert api_pages.document("unisono.lowlevel", "dispatcher")
    assert api_pages.document("unisono.launcher", "spawn")
    assert api_pages.document("unisono.lowlevel", "DType")
    assert api_pages.document("unisono.core.c10d.other_names", "DistError")
    assert api_pages.document("unisono.errors", "annotations") is None


def test_a_name_that_is_also_a_module_is_shown_from_there(api_pages):
    assert "\n::: unisono.core.schedules.choice.select.select\n" in api_pages.pages()["lowlevel.md"]
    assert "\n::: unisono.core.rendezvous.registry.rendezvous\n" in api_pages.pages()["stores.md"]
    assert "\n::: unisono.lowlevel.build\n" in api_pages.pages()["lowlevel.md"]


def test_files_that_are_no_text_are_copied(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    pytest.importorskip("mkdocs")
    hooks = import_module("site_hooks")
    for path in ROOT.glob("examples/*.*"):
        if b"\0" in path.read_bytes():
            assert hooks.page_of(f"examples/{path.name}") == f"source/examples/{path.name}"


def test_site_opens_as_the_readme_does_and_finds_functions_first(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    pytest.importorskip("mkdocs")
    hooks = import_module("site_hooks")
    opening = hooks.opening()
    assert opening.startswith("# unisono\n")
    assert "](../docs/tutorial/1-two-processes.md)" in opening
    pages = ("reference/api/collectives.md", "reference/api/groups.md", "howto/run.md", "lab/x.md")
    boosts = [hooks.rank_in_search(page)["boost"] for page in pages]
    assert boosts == sorted(set(boosts), reverse=True)
    assert hooks.rank_in_search("project/readme.md") == {"exclude": True}
