"""Apply each fault of tests/planted to a copy of the tree, and report which test catches it.

Run from the repository root: `python tools/planted.py [NAME ...]`. The copy with its own virtual
environment is build/planted, so the developer's tree never changes. The exit status is 1 if the
tests do not catch a fault, or if a fault does not apply or does not compile. It is also 1 if one of
the catching tests fails without a fault, too. A patch names the test that catches its fault. That
test runs first; if it passes, the whole suite runs, and the name in the patch is a problem.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path.cwd()
PATCHES = Path("tests/planted")
COPY = ROOT / "build/planted"
PYTHON = COPY / ".venv/bin/python"
LOG = COPY / "build/last.log"
# A digest of the C++ sources that the copy's engine was built from.
BUILT = COPY / "build/built"
BUILD = [
    *("-m", "pip", "install", "-qq", "--disable-pip-version-check"),
    *("--no-build-isolation", "--no-deps", "-e", "."),
]
PR_SET_CHILD_SUBREAPER = 36
# Exit status of pytest.
NOTHING_RAN = 5

# Folders of tests by the package, or the folder of C++, that a fault changes, nearest first. The
# others have the folder of their package and the tests of the workbench.
WORLDS = "core/collectives core/groups core/messages"
IN_CPP = f"core/engines {WORLDS} faults"
NEAREST = {
    "autoload": "adapters/torch",
    "backends": f"{WORLDS} core/schedules faults",
    "base": f"core/base core/stores {WORLDS}",
    "bindings": IN_CPP,
    "c10d": f"{WORLDS} project",
    "clusters": "adapters/clusters",
    "core": IN_CPP,
    "engines": IN_CPP,
    "errors": f"project {WORLDS}",
    "groups": f"{WORLDS} faults",
    "kernels": f"core/engines {WORLDS}",
    "launcher": "launcher faults",
    "messages": f"core/engines core/transports {WORLDS} faults",
    "mpi": "adapters/mpi core/engines",
    "nccl": "adapters/nccl",
    "operations": f"{WORLDS} faults",
    "parallel": "beyond/parallel adapters/torch faults",
    "platform": "core/platform core/stores core/transports launcher",
    "recorder": f"core/recorder {WORLDS}",
    "rendezvous": "core/rendezvous launcher",
    "schedules": f"core/schedules {WORLDS}",
    "shared": IN_CPP,
    "steps": IN_CPP,
    "store": "core/stores",
    "stores": "core/stores launcher",
    "testing": f"testing {WORLDS}",
    "torch": "adapters/torch",
    "transports": f"core/transports {WORLDS} faults",
}
SHELVES = ("core", "beyond", "adapters", "workbench")


class Verdict(NamedTuple):
    """The result of one fault: the test that caught the fault, or a problem."""

    name: str
    caught_by: str
    problem: str
    seconds: float

    def __str__(self) -> str:
        found = f"ERROR: {self.problem}" if self.problem else self.caught_by
        return f"{self.name:32} {self.seconds:6.0f} s  {found}"


def main(names: list[str]) -> int:
    """Print a line for each fault, and return the exit status."""
    patches = [path for path in sorted(PATCHES.glob("*.patch")) if not names or path.stem in names]
    if unknown := set(names) - {path.stem for path in patches}:
        print(f"planted: no such fault: {', '.join(sorted(unknown))}")
        return 1
    adopt_orphans()
    prepare()
    # Faults of C++ one after the other: the engine is built once for each, and once at the end.
    patches.sort(key=lambda path: not any(file.startswith("native") for file in changed(path)))
    verdicts = []
    for path in patches:
        verdicts.append(plant(path))
        print(verdicts[-1], flush=True)
    problems = sum(bool(verdict.problem) for verdict in verdicts)
    tests = sorted({verdict.caught_by for verdict in verdicts if "tests/" in verdict.caught_by})
    copy_tree()
    if tests and (problem := build() or (run_tests(tests) or "")):
        print(f"planted: fails without a fault, too: {problem}")
        problems += 1
    print(f"planted: {len(verdicts)} faults, {problems} problems")
    return 1 if problems else 0


def plant(patch: Path) -> Verdict:
    """Return which test catches one fault."""
    began = time.monotonic()
    copy_tree()
    command = ["git", "apply", f"--directory={COPY.relative_to(ROOT)}", str(patch)]
    applied = subprocess.run(command, capture_output=True, text=True)
    problem = "the patch does not apply" if applied.returncode else build()
    caught_by = None
    if not problem:
        named, (first, rest) = catcher(patch), suite(changed(patch))
        caught_by = run_tests([named])
        if not caught_by:
            caught_by = run_tests(first) or run_tests(rest)
            problem = f"{named} passes; {caught_by or 'no test'} fails"
    return Verdict(patch.stem, caught_by or "", problem, time.monotonic() - began)


def catcher(patch: Path) -> str:
    """Return the test that a patch names."""
    return re.findall(r"^Caught by: (\S+)$", patch.read_text(encoding="utf-8"), re.MULTILINE)[0]


def changed(patch: Path) -> list[str]:
    """Return the files that a patch changes."""
    return re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(encoding="utf-8"), re.MULTILINE)


def package_of(module: Path) -> str:
    """Return PACKAGE of src/unisono/SHELF/PACKAGE/..., or FOLDER of native/FOLDER/..."""
    if module.parts[0] != "src":
        return module.parts[1]
    return module.parts[3 if module.parts[2] in SHELVES else 2]


def suite(files: list[str]) -> tuple[list[str], list[str]]:
    """Return all test files: the tests near to changed modules, best first, and the rest."""
    modules = [Path(file).with_suffix("") for file in files]
    folders = [
        test
        for folder in {package_of(module) for module in modules}
        for test in NEAREST.get(folder, f"workbench/{folder} workbench launcher beyond").split()
    ]
    stems = [module.name.lstrip("_") for module in modules]
    ranks = {}
    for path in sorted(COPY.glob("tests/**/test_*.py")):
        test = path.relative_to(COPY).as_posix()
        near = [i for i, folder in enumerate(folders) if test.startswith(f"tests/{folder}/")]
        alike = any(stem in test or Path(test).stem[5:] in stem for stem in stems)
        ranks[test] = (not near, not alike, near[:1])
    # The first fails with each fault, because a fault does not apply twice. The second needs git's
    # list of files, which the copy lacks.
    for test in ("test_planted.py", "test_release.py"):
        ranks.pop(f"tests/project/{test}", None)
    tests = sorted(ranks, key=lambda test: ranks[test])
    first = [test for test in tests if not ranks[test][0]]
    return first, tests[len(first) :]


def run_tests(tests: list[str]) -> str | None:
    """Run tests in the copy until the first failure; return that test's name, or None."""
    if not tests:
        return None
    options = ["-x", "-q", "-rfE", "--tb=short", "--no-header", "-p", "no:cacheprovider"]
    status, output = run([str(PYTHON), "-m", "pytest", *options, *tests])
    if status in (0, NOTHING_RAN):
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return failed[0] if failed else f"pytest (exit status {status}, see {LOG})"


def build() -> str:
    """Build the copy's engine unless it is that of the sources; return a problem, or ''."""
    sources = [COPY / "CMakeLists.txt", *sorted((COPY / "native").rglob("*.?pp"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    if BUILT.exists() and BUILT.read_text() == digest:
        return ""
    status, output = run([str(PYTHON), *BUILD], UNISONO_REQUIRE_NATIVE="1")
    if status:
        print(output, file=sys.stderr)
        return "the tree does not compile"
    BUILT.write_text(digest)
    return ""


def prepare() -> None:
    """Make the copy, with an environment that also finds the packages of the present one."""
    copy_tree()
    if PYTHON.exists():
        return
    venv.create(COPY / ".venv", symlinks=True)
    bin_here, bin_there = Path(sys.prefix, "bin"), PYTHON.parent
    # The MPI library of the present environment: without it the tests of MPI would be skipped.
    for file in Path(sys.prefix, "lib").iterdir():
        if not (there := COPY / ".venv/lib" / file.name).exists():
            there.symlink_to(file)
    # Only lines with paths: .pth files of the present environment are not read, so that the
    # present unisono is not found before the copy's.
    packages = Path(*Path(subprocess.__file__).parts[-2:-1]) / "site-packages"
    (COPY / ".venv/lib" / packages / "parent.pth").write_text(
        f"{Path(sys.prefix, 'lib') / packages}\n"
    )
    for program in bin_here.iterdir():
        there = bin_there / program.name
        if there.exists() or program.is_dir():
            continue
        text = program.read_bytes()
        if text.startswith(b"#!" + bytes(bin_here)):
            there.write_bytes(text.replace(bytes(bin_here), bytes(bin_there), 1))
            there.chmod(0o755)
        else:
            there.symlink_to(program)


def copy_tree() -> None:
    """Make the copy's files equal to those of the tree; write only what differs."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    files = {file for file in listed if file and Path(file).exists()}
    for file in files:
        source, target = ROOT / file, COPY / file
        content = source.read_bytes()
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            shutil.copymode(source, target)
    for folder in ("src", "native", "tests"):
        for path in (COPY / folder).rglob("*.*"):
            kept = "__pycache__" in path.parts or path.is_dir() or ".egg-info" in str(path)
            if not kept and str(path.relative_to(COPY)) not in files:
                path.unlink()
    LOG.parent.mkdir(exist_ok=True)


def run(command: list[str], **variables: str) -> tuple[int, str]:
    """Run a command in the copy; return its exit status and output. Leave no process of it."""
    with LOG.open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command,
            cwd=COPY,
            env={**os.environ, **variables, "PATH": f"{PYTHON.parent}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait()
        finally:
            kill_descendants()
        return status, LOG.read_text(encoding="utf-8", errors="replace")


def adopt_orphans() -> None:
    """Become the parent of orphans, so that a process with its own session is found, too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants() -> None:
    """Kill all descendants: killing a child makes its children those of this process."""
    children = Path("/proc/self/task") / str(os.getpid()) / "children"
    while children.exists() and (pids := children.read_text().split()):
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    # A shell starts what runs in the background with SIGINT ignored.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
