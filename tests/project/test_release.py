"""The workflows of GitHub Actions and the tool for wheels fit the project."""

import re
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import unisono
from tests.support.programs import python
from tests.support.tools import ROOT, tool

WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
RELEASE = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
TESTS = (ROOT / ".github/workflows/tests.yml").read_text("utf-8")


def supported():
    """The versions of Python that the metadata of a release lists."""
    classifiers = " ".join(PROJECT["project"]["classifiers"])
    return re.findall(r"Python :: (3\.\d+)", classifiers)


@pytest.fixture
def wheels():
    return tool("wheels")


def test_supported_pythons_begin_with_the_required_one():
    assert PROJECT["project"]["requires-python"] == f">={supported()[0]}"


def test_the_citation_has_the_version_and_the_licence():
    words = (ROOT / "CITATION.cff").read_text("utf-8").splitlines()
    assert f"version: {unisono.__version__}" in words
    assert f"license: {PROJECT['project']['license']}" in words


def test_tools_of_developers_are_no_extras():
    extras, groups = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]
    assert set(groups) == {"test", "dev", "docs", "release"}
    assert not set(groups) & set(extras)
    (names,) = re.findall(r"unisono\[(.*)\]", " ".join(extras["all"]))
    assert set(names.split(",")) < set(extras)


def test_pytest_finds_the_plug_in_under_the_name_of_its_module():
    """Otherwise `pytest_plugins = ["unisono.testing.plugin"]` would register it twice."""
    found = PROJECT["project"]["entry-points"]["pytest11"]
    assert found == {"unisono.testing.plugin": "unisono.testing.plugin"}
    code = "import sys, unisono.testing.plugin; sys.exit('numpy' in sys.modules)"
    assert python("-c", code).returncode == 0, "every run of pytest would load it"


def test_workflows_use_the_supported_pythons():
    (listed,) = re.findall(r"^ +python: \[(.*)\]$", TESTS, re.MULTILINE)
    assert re.findall(r"[\d.]+", listed) == supported()
    built = PROJECT["tool"]["cibuildwheel"]["build"]
    assert built == [f"cp{version.replace('.', '')}-manylinux_*" for version in supported()]
    used = re.findall(r'python-version: "(.*)"', TESTS + RELEASE)
    assert used
    assert set(used) <= set(supported())


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_names_targets_and_jobs_that_exist(workflow):
    text = workflow.read_text("utf-8")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    asked = re.findall(r"\bmake ([\w-]+)", text)
    assert asked
    assert set(asked) <= set(targets)
    jobs = re.findall(r"^  ([\w-]+):$", text.partition("\njobs:\n")[2], re.MULTILINE)
    needed = re.findall(r"[\w-]+", " ".join(re.findall(r"^    needs: (.*)$", text, re.MULTILINE)))
    assert set(needed) <= set(jobs)
    names = re.findall(r"^    name: (.*)$", text, re.MULTILINE)
    assert len(set(names)) == len(jobs)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_pins_each_action_and_bounds_each_job(workflow):
    text = workflow.read_text("utf-8")
    # A workflow of this repository has the version of the commit.
    used = re.findall(r"uses: ([^.].*)", text)
    assert [use for use in used if not re.search(r"@.*v\d", use)] == []
    assert text.count("timeout-minutes:") == text.count("runs-on:")


def test_workflows_need_no_switch():
    conditions = re.findall(r"^ +if: (.*)$", TESTS + RELEASE, re.MULTILINE)
    assert conditions == ["github.event_name == 'push' # the push of a tag"]


def test_only_a_tag_publishes_and_only_the_publisher_may_identify_itself():
    jobs = dict(re.findall(r"^  (\w+):\n((?: {4}.*\n|\n)+)", RELEASE, re.MULTILINE))
    assert re.search(
        r"^on:\n  push:\n    tags: \[\"v\*\"\]\n  workflow_dispatch:$", RELEASE, re.MULTILINE
    )
    assert "needs: [tests, archive, wheels]" in jobs["publish"]
    assert "if: github.event_name == 'push' #" in jobs["publish"]
    assert "needs: publish" in jobs["site"]
    assert [name for name, job in jobs.items() if "id-token: write" in job] == ["publish", "site"]


def test_tool_finds_this_python_once_and_no_older_ones(wheels, tmp_path):
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\necho '[\"cpython\", [3, 10], true, false]'\n")
    broken = tmp_path / "python3.99"
    broken.write_text("#!/bin/sh\nexit 127\n")
    for script in (old, broken):
        script.chmod(0o755)
    version = ".".join(map(str, sys.version_info[:2]))
    found = list(wheels.pythons([old, broken, sys.executable, sys.executable]))
    builds = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    assert found == [(version, Path(sys.executable))] * builds


def test_tool_refuses_a_wheel_without_engine_or_with_tests(wheels, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    files = [
        name.removeprefix("src/") for name in wheels.run("git", "ls-files", "src/unisono").split()
    ]
    folder = "unisono-1.dist-info"
    files += [f"{folder}/licenses/LICENSE", f"{folder}/entry_points.txt"]
    metadata = "Name: unisono\nRequires-Python: >=3.11\nLicense-Expression: BSD-3-Clause\n"

    def check(names, text=metadata):
        wheel = tmp_path / "unisono-1.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            for name in names:
                file.writestr(name, "")
            file.writestr(f"{folder}/METADATA", text)
        wheels.check_wheel(wheel)

    engine = "unisono/_engine.cpython-311-x86_64-linux-gnu.so"
    check([*files, engine])
    with pytest.raises(SystemExit, match="no engine"):
        check(files)
    with pytest.raises(SystemExit, match=r"unexpected files.*test_x"):
        check([*files, engine, "tests/test_x.py"])
    with pytest.raises(SystemExit, match=r"lacks.*py\.typed"):
        check([name for name in [*files, engine] if not name.endswith("py.typed")])
    with pytest.raises(SystemExit, match="lacks 'License-Expression"):
        check([*files, engine], metadata.replace("BSD-3-Clause", "MIT"))
