"""The documents tell the truth: generated pages, commands, links, and the README's texts."""

import json
import os
import re
import sys
import threading

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable
from tests.support.programs import python
from tests.support.tools import ROOT, tool
from unisono.core.base.config import VARIABLES
from unisono.core.base.seam import why_absent
from unisono.core.schedules import build
from unisono.errors import CollectiveMismatchError, CollectiveTimeoutError
from unisono.testing import run
from unisono.testing.hosts import why_no_hosts
from unisono.workbench.simulate.pictures.timeline import in_rounds

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)


blocks = tool("readme").blocks


# ---- pages ---------------------------------------------------------------------------------


def test_algorithms_page_is_up_to_date():
    page = (ROOT / "docs/reference/algorithms.md").read_text(encoding="utf-8")
    assert page == tool("algorithms_page").page(), "run `make docs`"


def test_pictures_are_up_to_date():
    drawn = dict(tool("pictures").pictures())
    there = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/pictures/*")}
    assert drawn == there, "run `make docs`"


def test_pictures_show_each_message_once():
    draw = tool("pictures")
    shown = in_rounds(build("all_reduce", "double_tree", 8)).messages
    # Two trees over eight ranks: seven edges each, up and down.
    assert len(shown) == 2 * 2 * 7
    assert sum(message.reduces for message in shown) == 2 * 7
    # The legend has an arrow for each of the two heads.
    assert draw.lanes("all_reduce", "double_tree").count("stroke-width='1.3'/>") == len(shown) + 2


def test_detection_page_is_up_to_date():
    page = (ROOT / "docs/reference/environment-detection.md").read_text(encoding="utf-8")
    assert page == tool("detection_page").page(), "run `make docs`"


def test_pages_of_results_are_up_to_date():
    tables = tool("tables", "benchmarks")
    assert {path.stem for path in ROOT.glob("benchmarks/results/*.md")} == {
        path.stem for path in ROOT.glob("benchmarks/results/*.json")
    }
    for path, text in tables.pages():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `make docs`"


def test_environment_page_lists_what_the_code_reads():
    page = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8")
    assert page == tool("environment_page").page(page), "run `make docs`"
    assert [name for name in VARIABLES if f"| `{name}` |" not in page] == []


def test_environment_page_lists_what_the_launcher_sets():
    page = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8")
    show = "import json, os; print(json.dumps(sorted(os.environ)))"
    command = ["-m", "unisono", "run", "--no-python", sys.executable, "-c", show]
    # Without `env` a child also gets what readline has put there.
    done = python(*command, check=True, env=dict(os.environ))
    given = set(json.loads(done.stdout)) - set(os.environ)
    assert {"RANK", "MASTER_PORT"} <= given
    assert [name for name in sorted(given) if not re.search(rf"\b{name}\b", page)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_index_has_each_page_under_its_title():
    docs = ROOT / "docs"
    listed = re.findall(r"^- .*?\[(.+?)\]\((.+?)\)", (docs / "index.md").read_text("utf-8"), re.M)
    folders = ("tutorial", "howto", "reference", "explanation")
    pages = [
        docs / "glossary.md",
        *(page for name in folders for page in docs.glob(f"{name}/*.md")),
    ]
    titles = {p.relative_to(docs).as_posix(): p.read_text("utf-8").split("\n")[0] for p in pages}
    assert {page: f"# {title}" for title, page in listed} == titles
    assert [page for _, page in listed if "tutorial/" in page] == sorted(
        page for page in titles if "tutorial/" in page
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_source_files_that_a_page_names_exist(page):
    text = page.read_text("utf-8")
    names = re.findall(r"`((?:src/|tests/|tools/|examples/)?[\w/]+\.py)`", text)
    if page.name == "design.md":  # the map of the folders
        names += re.findall(r"`([\w/]+/)`", text)
    own = {"script.py", *(block.title for block in tool("readme").fenced(text))}  # the reader's
    names = [name for name in names if name not in own]
    places = (ROOT, ROOT / "src/unisono", ROOT / "src/unisono/core/schedules")
    assert [name for name in names if not any((p / name).exists() for p in places)] == []


def test_each_package_of_a_shelf_has_a_sentence():
    text = (ROOT / "src/README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+/\w+)` \| (.+?) \|$", text, re.MULTILINE))
    source = ROOT / "src/unisono"
    shelves = set(re.findall(r"^\| \*\*(\w+)\*\* \|", text, re.MULTILINE))
    packages = {
        path.parent.relative_to(source).as_posix()
        for shelf in shelves
        for path in source.glob(f"{shelf}/*/__init__.py")
    }
    assert shelves == {"workbench", "adapters", "beyond", "launcher", "core"}
    assert set(rows) == packages
    assert all(row.endswith(".") for row in rows.values())


def test_texts_of_errors_that_the_page_on_trouble_quotes_exist():
    page = (ROOT / "docs/howto/troubleshooting.md").read_text(encoding="utf-8")
    quoted = [q for line in page.splitlines() for q in re.findall(r"^\| `([^`]+)`", line)]
    assert len(quoted) > 10
    source = " ".join(path.read_text("utf-8") for path in ROOT.glob("src/unisono/**/*.py"))
    said = re.sub(r'"\s*f?"', "", source)
    assert [text for text in quoted if text not in said] == []


# ---- the README's commands -----------------------------------------------------------------


def test_commands_exist():
    commands = [line for block in blocks("bash", README) for line in block.splitlines()]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    assert {c.split()[1] for c in commands if c.startswith("make ")} <= targets
    scripts = [word for c in commands for word in c.split() if word.endswith(".py")]
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_pages_whose_commands_are_run_are_those_that_have_some():
    marked = [page for page in PAGES if blocks("bash", page.read_text(encoding="utf-8"))]
    names = {page.relative_to(ROOT).as_posix() for page in marked}
    assert names == {*tool("readme").PAGES, *tool("readme").TUTORIAL}


# ---- the tutorial --------------------------------------------------------------------------


def of_torch(page):
    """Return the page as a parameter; one whose programs load torch waits for --all."""
    path = page if page in tool("readme").TUTORIAL else f"docs/{page}"
    loads = "import torch" in (ROOT / path).read_text(encoding="utf-8")
    return pytest.param(page, marks=[pytest.mark.whole("each rank loads torch")] * loads)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("page", [*map(of_torch, tool("readme").TUTORIAL)])
def test_tutorial_prints_what_its_pages_show(page, tmp_path):
    text = (ROOT / page).read_text(encoding="utf-8")
    if "import torch" in text:
        pytest.importorskip("torch")
    if "unisono.testing.hosts" in text and (reason := why_no_hosts()):
        pytest.skip(reason)
    if re.search("engine=native|over shared memory", text) and why_absent:
        pytest.skip(why_absent)
    assert list(tool("readme").problems(page, tmp_path)) == []


def test_outputs_are_compared():
    same = tool("readme").same
    assert same("b\na\n", "a\nb\n")
    assert not same("a\nb\n", "a\n")
    assert not same("a\n", "a\nb\n")
    assert same("first (pid 12, host a)\n", "first (pid 3, host b.c)\n")
    assert same("...\nb\n...\nd\n", "a\nb\nc\nd\n")
    assert not same("...\nb\n...\nd\n", "a\nd\nc\nb\n")
    assert not same("...\nb\n", "a\nb\nc\n")
    quiet = "rank 1 had not entered it 1.0 s ago and did not answer again\n"
    assert same("rank 1 never entered it\n", quiet)


def test_first_example_prints_what_the_readme_says(tmp_path):
    example, expected = blocks("python", README)[0], blocks("text", README)[0]
    script = tmp_path / "hello.py"
    script.write_text(example, encoding="utf-8")
    # Unbuffered, print() writes a line and its end separately, and two ranks mix them.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = python("-W", "error", script, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == expected.splitlines()
    assert len(example.splitlines()) <= 14


# What holds after the first program of a page, on each of two ranks.
AFTERWARDS = {
    "howto/from-mpi4py.md": """
assert x.tolist() == [3.0, 3.0] and rows.tolist() == [[3.0, 3.0]] * 2
assert objects == [{"rank": 0}, {"rank": 1}] and most == (3.0, 1)
""",
    "howto/data-parallel.md": """
weight = next(model.parameters()).detach()
assert torch.allclose(weight, torch.ones(1, 10), atol=0.05), weight
""",
    "explanation/streams.md": """
assert x.tolist() == [3.0] * 4 and y.tolist() == [30.0] * 4
""",
}


@pytest.mark.parametrize("page", [*map(of_torch, AFTERWARDS)])
def test_program_of_a_page_runs(page, tmp_path):
    program = blocks("python", (ROOT / "docs" / page).read_text(encoding="utf-8"))[0]
    if "import torch" in program:
        pytest.importorskip("torch")
    script = tmp_path / "program.py"
    script.write_text(program + AFTERWARDS[page], encoding="utf-8")
    words = ("-W", "error", "-m", "unisono", "run", "--nproc-per-node", 2, script)
    done = python(*words, limit_s=200.0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_names_of_the_page_for_users_of_mpi4py_exist():
    page = (ROOT / "docs/howto/from-mpi4py.md").read_text(encoding="utf-8")
    here = " ".join(line.split("|")[2] for line in page.splitlines() if line.startswith("| `"))
    names = re.findall(r"`(?:dist\.)?([a-z_]+(?:_[a-z]+)+)(?=[`(])", here)
    assert len(names) >= 15
    assert [name for name in names if not hasattr(dist, name) and name != "async_op"] == []


# ---- the README's differences from Gloo ----------------------------------------------------


@pytest.mark.ranks(2)
def test_column_of_an_array_is_reduced_and_nothing_else(rank):
    table = np.zeros((3, 4))
    table[:, 1] = rank + 1
    dist.all_reduce(table[:, 1])
    np.testing.assert_array_equal(table, [[0, 3, 0, 0]] * 3)


@pytest.mark.ranks(2)
def test_different_calls_give_the_readmes_text_and_leave_a_usable_group(rank):
    data = np.full(3 if rank else 4, rank, np.float32)
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.all_reduce(data)
    np.testing.assert_array_equal(data, rank)
    check_usable()
    what = re.sub(r"test_docs\.py:\d+", "train.py:7", caught.value.what)
    assert rank or what in blocks("text", README)[1]


def test_missing_rank_gives_the_readmes_text():
    together, told = threading.Barrier(2), threading.Barrier(3)

    def body(rank):
        what = None
        if rank != 2:
            together.wait(30)
            with pytest.raises(CollectiveTimeoutError) as caught:
                dist.all_reduce(np.zeros(4), timeout=0.5)
            what = caught.value.what
        # Rank 2 is alive all the time; were it gone, the error would be another one.
        told.wait(30)
        return what

    found = run(body, 3)
    # Ranks 0 and 1 give up together; the one that is first says so to the other.
    first, *lines = found[0].splitlines()
    assert first.removesuffix(" (found by rank 1)") == blocks("text", README)[2].rstrip()
    assert len(lines) == 1
    assert "rank 2 never entered it" in found[1]
