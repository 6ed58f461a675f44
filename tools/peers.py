"""Install libraries that `unisono bench` can compare with: `make peers PEERS="open-mpi"`.

Each goes into a folder of its own in `.venv/peers`; a folder that is there stays. Of DeepSpeed two
C++ files are compiled, with its own flags, because its package would bring much more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from unisono.workbench.bench.peers import FOLDER, package_of, peer_file

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq"]
_SOURCES = ("shm_interface.cpp", "shm.cpp")


def install(peer: str) -> None:
    """Install one library, unless it is there."""
    file = Path(peer_file(peer))
    if file.exists():
        return
    if package := package_of(peer):
        _pip(
            "install", "--ignore-installed", "--no-compile", "--prefix", f"{FOLDER}/{peer}", package
        )
    else:
        _compile_deepspeed(file)
    if not file.exists():
        raise SystemExit(f"{peer}: {file} is not there after the installation")


def _compile_deepspeed(file: Path) -> None:
    from torch.utils import cpp_extension  # type: ignore[import-not-found, unused-ignore]

    with tempfile.TemporaryDirectory() as folder:
        # Its build asks for torch, which is in this environment.
        words = ("--no-deps", "--no-build-isolation", "--no-binary", "deepspeed", "deepspeed")
        _pip("download", "-d", folder, *words)
        (archive,) = Path(folder).glob("deepspeed-*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        source = Path(folder, archive.name.removesuffix(".tar.gz"), "csrc/cpu")
        # torch calls the programs ninja and c++.
        os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        cpp_extension.load(
            file.stem,
            [str(source / "comm" / name) for name in _SOURCES],
            extra_include_paths=[str(source / "includes")],
            extra_cflags=["-O2", "-fopenmp"],
            build_directory=folder,
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        version = archive.name.removeprefix("deepspeed-").removesuffix(".tar.gz")
        (file.parent / "version").write_text(f"DeepSpeed {version}\n", encoding="utf-8")
        shutil.copy(Path(folder, file.name), file)


def _pip(command: str, *words: str) -> None:
    subprocess.run([*PIP, command, *words], check=True)


def main() -> None:
    """Install the libraries that the command line names; say which cannot be."""
    for peer in sys.argv[1:]:
        try:
            install(peer)
        except (subprocess.CalledProcessError, ImportError, OSError, RuntimeError) as error:
            first = str(error).splitlines()[0]
            print(f"{peer} is not there ({first}): tests and benchmarks with it are left out")


if __name__ == "__main__":
    main()
