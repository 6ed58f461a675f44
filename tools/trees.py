"""Try the C++ engine in a tree of Debian packages: for aarch64, or for another version of Python.

Run from the repository root, as root on Debian or Ubuntu: `python tools/trees.py arm64` (by
`make test-arm`) or `python tools/trees.py python3.14` (by `make test-pythons`). Elsewhere it prints
why it does nothing. The first time it takes some minutes: what it needs comes from Debian and PyPI
into build/trees/NAME. It builds the engine outside of the tree, for arm64 with a cross compiler. In
the tree it runs the engine's own tests (arm64), 2 ranks, and a sample of the tests.

Programs for arm64 run under qemu, which starts them in a user namespace of its own: nothing outside
changes but the installed packages. Qemu does not reorder accesses to memory as a processor may. For
that see tests/core/engines/test_memory_orders.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

BIN = Path(sys.executable).parent
QEMU = "/usr/bin/qemu-aarch64-static"
CROSS_COMPILER = "aarch64-linux-gnu-g++"
FOR_TESTS = ("numpy", "pytest", "pytest-timeout", "hypothesis", "cloudpickle", "rich", "shtab")
# qemu-user has no process_vm_readv, so no rank reads directly there.
NOT_UNDER_QEMU = "^test_direct$"
SAMPLE = (
    *("tests/core/engines/test_programs.py", "tests/core/engines/test_turn.py"),
    "tests/beyond/test_reconfigure_by_handles.py",
)
# From the kernel's documentation: how an ELF file for aarch64 begins, and which bits count.
MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
# Arguments: the tree, the repository, the interpreter of foreign programs, the command.
ENTER = rf"""set -e
root=$1
mkdir -p "$root/srv" "$root/mnt"
if test -n "$3"; then
    mount -t binfmt_misc none "$root/srv"
    printf '%s' ':foreign:M::{MAGIC}:{MASK}:'"$3":F >"$root/srv/register"
fi
for folder in proc dev sys; do mount --rbind /$folder "$root/$folder"; done
mount --bind "$2" "$root/mnt"
shift 3
exec chroot "$root" /usr/bin/env -i -C /mnt HOME=/root PATH=/usr/bin:/bin LANG=C.UTF-8 \
    PYTHONDONTWRITEBYTECODE=1 "$@"
"""


class Kind(NamedTuple):
    """The contents of a tree. Without a release the tree has the release of this machine."""

    processor: str
    release: str
    python: str

    @property
    def is_foreign(self) -> bool:
        return self.processor == "arm64"


KINDS = {
    "arm64": Kind("arm64", "", "python3"),
    "python3.14": Kind("amd64", "forky", "python3.14"),
}


class Tree:
    """A folder of unpacked packages, and what is built for it."""

    def __init__(self, name: str) -> None:
        self.kind = KINDS[name]
        self.folder = Path("build/trees").resolve() / name
        self.root = self.folder / "root"
        self.build = self.folder / "engine"
        self.python = self.folder / "python"  # runs the tree's Python from outside

    def version(self) -> str:
        """Return the version of the tree's Python, such as "3.11"."""
        return ask(self.python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")

    def packages(self) -> Path:
        """Return the folder for packages that are not Debian's."""
        return self.root / f"usr/local/lib/python{self.version()}/dist-packages"

    def make(self) -> None:
        """Unpack Debian's packages and those of PyPI; no script of a package runs."""
        if (self.folder / "is-complete").exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
        words = dict(line.split("=", 1) for line in lines if "=" in line)
        release = self.kind.release or words["VERSION_CODENAME"]
        # A release that this debootstrap does not know is made as the one under development.
        shutil.copytree("/usr/share/debootstrap", self.folder / "debootstrap")
        script = self.folder / "debootstrap/scripts" / release
        if not script.exists():
            script.symlink_to("sid")
        python = self.kind.python
        wanted = f"{python},lib{python}-dev,libstdc++6"
        options = ("--foreign", f"--arch={self.kind.processor}", "--variant=minbase")
        variables = {"DEBOOTSTRAP_DIR": str(self.folder / "debootstrap")}
        run("debootstrap", *options, f"--include={wanted}", release, self.root, **variables)
        for package in sorted((self.root / "var/cache/apt/archives").glob("*.deb")):
            run("dpkg-deb", "-x", package, self.root)
        self._add_packages()
        (self.folder / "is-complete").touch()

    def _add_packages(self) -> None:
        """Write the script that starts the tree's Python, and add the packages of PyPI."""
        start = (
            f"{QEMU} -L {self.root} {self.root}" if self.kind.is_foreign else f"chroot {self.root} "
        )
        self.python.write_text(
            f'#!/bin/sh\nexec {start}/usr/bin/{self.kind.python} "$@"\n', encoding="utf-8"
        )
        self.python.chmod(0o755)
        machine = "aarch64" if self.kind.is_foreign else "x86_64"
        tags = [f"manylinux_2_{minor}_{machine}" for minor in (28, 27, 17)]
        platforms = [f"--platform={tag}" for tag in (*tags, f"manylinux2014_{machine}")]
        options = ("-q", "--target", self.packages(), "--only-binary", ":all:")
        about = ("--python-version", self.version(), *platforms)
        run(sys.executable, "-m", "pip", "install", *options, *about, *FOR_TESTS)

    def build_engine(self) -> None:
        """Build the module, and for arm64 the C++ tests, and copy the package into the tree."""
        settings = {
            # Behind the compiler's own: only Python's headers that differ by processor.
            "CMAKE_CXX_FLAGS": f"-idirafter {self.root}/usr/include",
            "Python_EXECUTABLE": self.python,
            "Python_INCLUDE_DIR": self.root / f"usr/include/python{self.version()}",
            "Python_NumPy_INCLUDE_DIR": self.packages() / "numpy/_core/include",
            "nanobind_DIR": ask(sys.executable, "-m", "nanobind", "--cmake_dir"),
            "SKBUILD": "ON",  # build the module
        }
        if self.kind.is_foreign:
            settings |= {
                "CMAKE_SYSTEM_NAME": "Linux",
                "CMAKE_SYSTEM_PROCESSOR": "aarch64",
                "CMAKE_CXX_COMPILER": CROSS_COMPILER,
                "CMAKE_CROSSCOMPILING_EMULATOR": f"{QEMU};-L;{self.root}",
                "UNISONO_STRICT": "ON",
                "UNISONO_TESTS": "ON",
            }
        options = [f"-D{name}={value}" for name, value in settings.items()]
        run(BIN / "cmake", "-G", "Ninja", "-S", ".", "-B", self.build, "-Wno-dev", *options)
        run(BIN / "cmake", "--build", self.build)
        (module,) = self.build.glob("_engine.*.so")
        into = self.packages() / "unisono"
        shutil.rmtree(into, ignore_errors=True)
        left_out = shutil.ignore_patterns("__pycache__", "_engine.*.so")
        shutil.copytree("src/unisono", into, ignore=left_out)
        shutil.copy(module, into)
        # Entry points are found there: without them there is no engine "mpi".
        for about in Path(sysconfig.get_path("purelib")).glob("unisono-*.dist-info"):
            shutil.copytree(about, self.packages() / about.name, dirs_exist_ok=True)

    def run_inside(self, *command: object) -> None:
        """Run a command in the tree and in the repository."""
        qemu = QEMU if self.kind.is_foreign else ""
        run(*namespaces(), "sh", "-c", ENTER, "enter", self.root, Path.cwd(), qemu, *command)


def main() -> int:
    """Make a tree and try the engine there; stop at the first command that fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=KINDS)
    name = parser.parse_args().name
    tree = Tree(name)
    reason = why_not(tree.kind)
    if reason:
        print(f"{name}: skipped, because {reason}")
        return 0
    programs = {"debootstrap": "debootstrap"}
    if tree.kind.is_foreign:
        programs |= {QEMU: "qemu-user-static", CROSS_COMPILER: "g++-aarch64-linux-gnu"}
    lacking = [package for program, package in programs.items() if shutil.which(program) is None]
    if lacking:
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-qq", "-y", "--no-install-recommends", *lacking)
    tree.make()
    tree.build_engine()
    if tree.kind.is_foreign:
        run(BIN / "ctest", "--test-dir", tree.build, "--output-on-failure", "-E", NOT_UNDER_QEMU)
    python = (f"/usr/bin/{tree.kind.python}", "-m")
    tree.run_inside(*python, "unisono", "run", "--nproc-per-node", 2, "tools/two_ranks.py")
    tree.run_inside(*python, "pytest", "-q", "-p", "no:cacheprovider", "--sample=", *SAMPLE)
    return 0


def why_not(kind: Kind) -> str:
    """Return why this machine cannot, or an empty text."""
    if os.geteuid() != 0:
        return "only root can install packages and enter a tree"
    if shutil.which("apt-get") is None or not sys.platform.startswith("linux"):
        return "the packages are Debian's"
    if os.uname().machine != "x86_64":
        return "the compilers are those for x86-64"
    command = ("mount", "-t", "binfmt_misc", "none", "/srv") if kind.is_foreign else ("true",)
    done = subprocess.run([*namespaces(), *command], capture_output=True, text=True)
    return f"of this: {done.stderr.strip()}" if done.returncode else ""


def namespaces() -> tuple[str, ...]:
    """Return the begin of a command that runs in namespaces of its own."""
    return ("unshare", "--user", "--map-root-user", "--mount")


def run(*command: object, **variables: str) -> None:
    """Run a command, and exit if it fails."""
    words = [str(word) for word in command]
    if subprocess.run(words, env=os.environ | variables).returncode != 0:
        sys.exit(f"failed: {words[0]}")


def ask(*command: object) -> str:
    """Return what a command prints."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
