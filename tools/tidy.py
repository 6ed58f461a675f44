"""Check the C++ code: its format with clang-format, its constructs with clang-tidy.

Run from the repository root: `python tools/tidy.py`. Without a C++ compiler or CMake only the
format is checked. A file that passed is not given to clang-tidy again until the file, a header
that it includes or its compile command changes.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path("native")
SUFFIXES = {".cpp", ".hpp", ".inl"}
BUILD = Path("build/tidy")
PASSED = BUILD / "passed.json"
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def main() -> int:
    """Print what is wrong, or one line that gives the number of files."""
    files = sorted(path for path in SOURCES.rglob("*") if path.suffix in SUFFIXES)
    problems = badly_formatted(files)
    if not problems:
        problems = untidy() if can_configure() else ""
    print(problems or f"tidy: {len(files)} files of C++")
    return 1 if problems else 0


def badly_formatted(files: list[Path]) -> str:
    """Return what clang-format would change."""
    command = [tool("clang-format"), "--dry-run", "-Werror", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True).stderr


def can_configure() -> bool:
    """Return whether CMake and a compiler are installed."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    return bool(shutil.which("cmake") and shutil.which(compiler))


def untidy() -> str:
    """Return the findings of clang-tidy in files that have changed since they passed."""
    commands = compile_commands()
    passed = json.loads(PASSED.read_text()) if PASSED.exists() else {}
    current = {path: digest(Path(path), command) for path, command in commands.items()}
    changed = [path for path in current if passed.get(path) != current[path]]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        findings = dict(zip(changed, pool.map(findings_in, changed), strict=True))
    done = {path: current[path] for path in current if not findings.get(path)}
    PASSED.write_text(json.dumps(done))
    # A finding in a header comes once for each file that includes the header.
    return "\n".join(dict.fromkeys(text for text in findings.values() if text))


def compile_commands() -> dict[str, str]:
    """Return how each file of ours is compiled, by its path."""
    nanobind = [sys.executable, "-m", "nanobind", "--cmake_dir"]
    folder = subprocess.run(nanobind, capture_output=True, text=True, check=True).stdout.strip()
    configure = ["cmake", "-S", ".", "-B", str(BUILD), "-DUNISONO_TESTS=ON", "-DSKBUILD=1"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={folder}"]
    done = subprocess.run(configure, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"cmake failed:\n{done.stdout}{done.stderr}")
    entries = json.loads((BUILD / "compile_commands.json").read_text())
    root = SOURCES.resolve()
    commands: dict[str, str] = {}
    for entry in entries:
        path = entry["file"]
        if Path(path).is_relative_to(root):
            commands[path] = commands.get(path, "") + entry["command"]
    return commands


def digest(path: Path, command: str) -> str:
    """Return a hash of all that the findings in a file depend on."""
    hashed = hashlib.sha256(command.encode())
    hashed.update(Path(".clang-tidy").read_bytes())
    for each in sorted(with_headers(path, set())):
        hashed.update(each.read_bytes())
    return hashed.hexdigest()


def with_headers(path: Path, found: set[Path]) -> set[Path]:
    """Add a file, and the headers of ours that it includes directly or not, to `found`."""
    if path not in found and path.exists():
        found.add(path)
        for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            with_headers(SOURCES / name, found)
    return found


def findings_in(path: str) -> str:
    """Return what clang-tidy finds in one file."""
    command = [tool("clang-tidy"), "-p", str(BUILD), "--quiet", path]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout.strip() or done.stderr.strip()


def tool(name: str) -> str:
    """Return the path of a program that is installed beside this Python."""
    return str(Path(sys.executable).parent / name)


if __name__ == "__main__":
    sys.exit(main())
