"""Build unisono for pip with scikit-build-core; a wheel without the C++ engine has the reason.

If the engine cannot be built, scikit-build-core makes a wheel of the Python part alone: see
pyproject.toml. The first error in its output then goes into the wheel, beside the metadata,
because pip shows nothing of it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from scikit_build_core import build as skbuild
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

# In the folder of the metadata; base/extension.py reads it.
NOTE = "why_no_engine.txt"
_LONGEST = 500
_ERROR = re.compile(r"\berror: |No space left|Killed")
_CMAKE = re.compile(r"^CMake Error.*\n((?:(?!CMake|Call Stack|-- |\*\*\* ).*\n)+)", re.MULTILINE)


def build_wheel(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel in a folder, and return its name."""
    return _build(skbuild.build_wheel, wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel that refers to these sources, and return its name."""
    return _build(skbuild.build_editable, wheel_directory, config_settings, metadata_directory)


def _build(
    build: Callable[..., str], folder: str, settings: dict | None, metadata: str | None
) -> str:
    lines: list[str] = []
    with _copied_output(lines):
        name = build(folder, settings, metadata)
    wheel = Path(folder) / name
    with zipfile.ZipFile(wheel) as archive:
        modules = set(archive.namelist()) - {"unisono/_engine.pyi"}
    is_built = any(name.startswith("unisono/_engine.") for name in modules)
    if not is_built and (why := first_error(lines)):
        _add_note(wheel, why)
    return name


@contextlib.contextmanager
def _copied_output(lines: list[str]) -> Iterator[None]:
    """Also append to `lines` what this process and its children write to standard output or error.

    It is read from a pipe, so that the caller sees each line at once.
    """
    read_end, write_end = os.pipe()
    kept = {fd: os.dup(fd) for fd in (1, 2)}

    def copy() -> None:
        with open(read_end, errors="replace") as pipe:
            for line in pipe:
                lines.append(line.strip())
                os.write(kept[1], line.encode())

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        for fd in kept:
            os.dup2(write_end, fd)
        yield
    finally:
        for fd, old in kept.items():
            os.dup2(old, fd)
        os.close(write_end)
        thread.join()
        for old in kept.values():
            os.close(old)


def first_error(lines: list[str]) -> str:
    """Return the first error of a compiler, else of CMake; "" if there is none."""
    for line in lines:
        if _ERROR.search(line):
            return line[:_LONGEST]
    # The reason is below the place.
    found = _CMAKE.search("\n".join(lines))
    return " ".join(found[1].split())[:_LONGEST] if found else ""


def _add_note(wheel: Path, why: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    record = next(name for name in members if name.endswith(".dist-info/RECORD"))
    note, text = record.replace("RECORD", NOTE), why.encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
    members[record] += f"{note},sha256={digest},{len(text)}\n".encode()
    draft = wheel.with_suffix(".new")
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in {note: text, **members}.items():
            archive.writestr(member, content)
    draft.replace(wheel)
