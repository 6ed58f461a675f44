"""Try unisono on each installed Python: build a wheel, run 2 ranks and a sample of the tests.

Run by `make test-pythons`, from the repository root. It finds interpreters in PATH, in pyenv and in
build/pythons, also free-threaded builds, or takes the interpreters that are named. There is no
package of a free-threaded Python in Debian. `apt-get source python3.13` has the sources:
`./configure --disable-gil --prefix=$PWD/build/pythons/3.13t` and `make install` build one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import wheels

# The hypothesis that is Python alone: later ones have no wheel for a free-threaded Python.
FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis<6.153", "cloudpickle", "rich", "shtab")
SAMPLE = (
    "tests/core/engines/test_programs.py",
    "tests/core/engines/test_turn.py",
    "tests/core/base/test_tls.py",  # without C++, keys from the token need Python 3.13
)


def main() -> int:
    """Try each interpreter; stop at the first command that fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pythons", nargs="*", help="interpreters; all that are found if none")
    options = parser.parse_args()
    paths = options.pythons or [*wheels.candidates(), *Path().glob("build/pythons/*/bin/python3")]
    tried = 0
    with tempfile.TemporaryDirectory() as folder:
        for version, python in wheels.pythons(paths, free_threaded=True):
            last = attempt(python.absolute(), Path(folder) / version, version.endswith("t"))
            print(f"{version}: {last}", flush=True)
            tried += 1
    wheels.require(tried > 0, "found no CPython >= 3.11 with C headers")
    return 0


def attempt(python: Path, folder: Path, free_threaded: bool) -> str:
    """Build and try a wheel; return the last line of the tests."""
    wheel = wheels.build(python, Path.cwd(), folder)
    own = folder / "bin/python"  # of the environment that the build has made
    wheels.run(own, "-m", "pip", "install", "-q", wheel, *FOR_TESTS)
    # A free-threaded Python warns that the module enables the lock, and the tests allow no warning.
    env = os.environ | {"PYTHON_GIL": "1"} if free_threaded else os.environ
    launch = (folder / "bin/unisono", "run", "--nproc-per-node", 2, wheels.PROGRAM.resolve())
    printed = sorted(wheels.run(*launch, cwd=folder, env=env, timeout=120).splitlines())
    expected = [f"rank {rank} of 2 is right" for rank in (0, 1)]
    wheels.require(printed == expected, "\n".join(printed))
    tests = (own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SAMPLE)
    return wheels.run(*tests, env=env).splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
