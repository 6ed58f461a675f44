"""Build unisono for pip with scikit-build-core; a wheel without the C++ engine has the reason.

If the engine cannot be built, scikit-build-core makes a wheel of the Python part alone: see
pyproject.toml. The first error in its output then goes into the wheel, beside the metadata,
because pip shows nothing of it.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import os
import re
import threading
import time
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

# In the folder of the metadata; core/base/extension.py reads it.
NOTE = "why_no_engine.txt"
_LONGEST = 500
TELL_S = 10.0
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
    with _told_terminal(), _copied_output(lines):
        name = build(folder, settings, metadata)
    wheel = Path(folder) / name
    with zipfile.ZipFile(wheel) as archive:
        modules = set(archive.namelist()) - {"unisono/_engine.pyi"}
    is_built = any(name.startswith("unisono/_engine.") for name in modules)
    _tell(f"the C++ engine is {'built' if is_built else 'not built: ' + first_error(lines)}")
    if not is_built and (why := first_error(lines)):
        _add_note(wheel, why)
    return name


def _tell(text: str) -> None:
    """Write a line to the terminal, if there is one: pip shows nothing of a build."""
    # What has a bar of its own sets the variable.
    if not os.environ.get("UNISONO_QUIET_BUILD"):
        with contextlib.suppress(OSError), open("/dev/tty", "w", encoding="utf-8") as terminal:
            terminal.write(f"\r\nunisono: {text}\r\n")


@contextlib.contextmanager
def _told_terminal() -> Iterator[None]:
    """Tell the terminal from time to time that a compiler runs."""
    ended, begun = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(TELL_S):
            _tell(f"compiling the C++ engine, {time.monotonic() - begun:.0f} s")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


@contextlib.contextmanager
def _copied_output(lines: list[str]) -> Iterator[None]:
    """Also append to `lines` what this process and its children write to standard output or error.

    It is read from pipes, so that the caller sees each line at once. A child that outlives the
    build loses its later output.
    """
    end = os.urandom(16).hex().encode()
    copies = [_Copy(fd, end) for fd in (1, 2)]
    try:
        yield
    finally:
        for each in copies:
            each.stop()
            lines += each.lines


class _Copy(threading.Thread):
    """Copies what goes to a descriptor into `lines`, until `stop`."""

    def __init__(self, fd: int, end: bytes) -> None:
        super().__init__()
        self._fd, self._end = fd, end
        self.lines: list[str] = []
        self._kept = os.dup(fd)
        self._read_end, self._write_end = os.pipe()
        self.start()
        os.dup2(self._write_end, fd)

    def run(self) -> None:
        with open(self._read_end, "rb") as pipe, contextlib.suppress(BrokenPipeError):
            for whole in pipe:
                # A child that goes on would keep the pipe open: so `stop` writes a mark.
                line, *after = whole.split(self._end)
                os.write(self._kept, line)
                if line:
                    self.lines.append(line.decode(errors="replace").strip())
                if after:
                    return

    def stop(self) -> None:
        os.dup2(self._kept, self._fd)
        with contextlib.suppress(BrokenPipeError):  # the caller has closed its end
            os.write(self._write_end, self._end + b"\n")
        os.close(self._write_end)
        self.join()
        os.close(self._kept)


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
        members = {member: archive.read(member) for member in archive.infolist()}
    record = next(each for each in members if each.filename.endswith(".dist-info/RECORD"))
    note = copy.copy(record)
    note.filename, text = record.filename.replace("RECORD", NOTE), why.encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
    members[record] += f"{note.filename},sha256={digest},{len(text)}\n".encode()
    draft = wheel.with_suffix(".new")
    with zipfile.ZipFile(draft, "w") as archive:
        # A member keeps its mode and its time.
        for member, content in {note: text, **members}.items():
            archive.writestr(member, content)
    draft.replace(wheel)
