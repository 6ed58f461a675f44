"""`pip install` of a checkout: each build has a folder of its own, and a failed one says why."""

import contextlib
import os
import pty
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.support.tools import ROOT, tool

pytest.importorskip("scikit_build_core", reason="pip would fetch it from an index")
# Instead of an engine it installs the name of its build folder, after both builds have begun.
BOTH = """
cmake_minimum_required(VERSION 3.18)
project(unisono LANGUAGES NONE)
file(TOUCH $ENV{MET}/$ENV{ME})
file(WRITE ${CMAKE_BINARY_DIR}/_engine.so ${CMAKE_BINARY_DIR})
while(NOT EXISTS $ENV{MET}/0 OR NOT EXISTS $ENV{MET}/1)
  execute_process(COMMAND ${CMAKE_COMMAND} -E sleep 0.02)
endwhile()
install(FILES ${CMAKE_BINARY_DIR}/_engine.so DESTINATION unisono)
"""


@pytest.fixture
def checkout(tmp_path):
    """What a build needs, without the sources of the engine."""
    copy = tmp_path / "checkout"
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        copy.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, copy)
    (copy / "native").mkdir()
    shutil.copy(ROOT / "native/build_backend.py", copy / "native")
    (copy / "src/unisono/core/base").mkdir(parents=True)
    for name in ("__init__.py", "core/base/__init__.py", "core/base/extension.py"):
        shutil.copy(ROOT / "src/unisono" / name, copy / "src/unisono" / name)
    return copy


def pip(*arguments, **variables):
    names = ("SKBUILD_BUILD_DIR", "UNISONO_REQUIRE_NATIVE", "CXX", "CMAKE_CXX_COMPILER_LAUNCHER")
    env = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-m", "pip", *arguments, "--no-build-isolation", "--no-deps", "-q"]
    return subprocess.Popen(
        [*command, "--disable-pip-version-check"],
        env=env | {"UNISONO_QUIET_BUILD": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_builds_of_one_checkout_at_once(tmp_path, checkout):
    (checkout / "CMakeLists.txt").write_text(BOTH)
    builds = [
        pip("wheel", "-w", tmp_path / str(me), checkout, MET=str(tmp_path), ME=str(me))
        for me in range(2)
    ]
    outputs = [build.communicate(timeout=60)[0] for build in builds]
    assert [build.returncode for build in builds] == [0, 0], outputs
    folders = set()
    for me in range(2):
        (wheel,) = (tmp_path / str(me)).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            folders.add(archive.read("unisono/_engine.so"))
    assert len(folders) == 2


def why(target):
    program = "import unisono.core.base.extension as e; print(e.why_absent)"
    # -S: else the finder of the developer's own editable installation finds it first.
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(target)}, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip() or done.stderr


BROKEN = "#include <no_such_header.h>\nint main() { return undeclared; }\n"
ABSENT = "the extension module was not built: "


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("c++", "fatal error: no_such_header.h: No such file"), ("no-such-compiler", "no-such-comp")],
)
def test_failed_build_leaves_its_first_error_in_the_package(tmp_path, checkout, compiler, reason):
    if shutil.which(compiler) is None and compiler == "c++":
        pytest.skip("there is no C++ compiler")
    loops = ("kernels/kernels_isa.cpp", "kernels/codes_isa.cpp")
    for name in (*loops, "core/a.cpp", "bindings/interface.cpp"):
        (checkout / "native" / name).parent.mkdir(exist_ok=True)
        (checkout / "native" / name).write_text(BROKEN)
    shutil.copy(ROOT / "src/unisono/_engine.pyi", checkout / "src/unisono")
    target = tmp_path / "target"
    build = pip("install", "--target", target, checkout, CXX=compiler)
    output = build.communicate(timeout=100)[0]
    assert build.returncode == 0, output
    told = why(target)
    assert told.startswith(ABSENT), told
    assert reason in told, told
    # pip accepts what the list of the files says.
    record = next(target.glob("unisono-*.dist-info/RECORD")).read_text()
    assert "/why_no_engine.txt,sha256=" in record


COPIED = """
import subprocess, build_backend
lines = []
with build_backend._copied_output(lines):
    left = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    subprocess.run(["sh", "-c", "echo a: error: b; printf tail; echo other >&2"])
left.stdin.close()
left.wait()
assert lines == ["a: error: b", "tail", "other"], lines
"""


def test_output_is_copied_and_a_child_that_stays_does_not_hold_up_the_build():
    done = subprocess.run(
        [sys.executable, "-c", COPIED],
        env=os.environ | {"PYTHONPATH": str(ROOT / "native")},
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"a: error: b\ntail", b"other\n")


TOLD = """
import build_backend
build_backend.TELL_S = 0.01
with build_backend._told_terminal():
    input()
build_backend._tell("the C++ engine is built")
"""


def test_a_terminal_shows_that_a_compiler_runs():
    """Pip shows nothing of a build, so the lines go to the terminal itself."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "native"), "UNISONO_QUIET_BUILD": ""}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", TOLD], env)
    shown, released = b"", False
    with contextlib.suppress(OSError):  # the end of a terminal on Linux
        while data := os.read(terminal, 1000):
            shown += data
            if b"unisono: compiling the C++ engine, 0 s" in shown and not released:
                released = True
                os.write(terminal, b"\n")
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, shown
    assert shown.rstrip().endswith(b"unisono: the C++ engine is built")


def test_a_note_leaves_the_members_of_a_wheel_as_they_are(tmp_path):
    wheel = tmp_path / "a.whl"
    script, record = (zipfile.ZipInfo(name) for name in ("a/run", "a-1.dist-info/RECORD"))
    script.external_attr = 0o755 << 16
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(script, "run", zipfile.ZIP_DEFLATED)
        archive.writestr(record, "a/run,,\n")
    tool("build_backend", "native")._add_note(wheel, "no compiler")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        assert archive.read("a-1.dist-info/why_no_engine.txt") == b"no compiler"
        members = {each.filename: each for each in archive.infolist()}
    kept = members["a/run"]
    assert (kept.external_attr, kept.date_time) == (0o755 << 16, script.date_time)
    assert kept.compress_type == zipfile.ZIP_DEFLATED


def test_build_that_must_have_the_engine_fails(tmp_path, checkout):
    build = pip(
        "install",
        "--target",
        tmp_path / "target",
        checkout,
        CXX="no-such-compiler",
        UNISONO_REQUIRE_NATIVE="1",
    )
    assert "no-such-compiler" in build.communicate(timeout=100)[0]
    assert build.returncode != 0
