"""Run the commands that documents give to readers, and compare the output with the page.

- Blocks of `bash` are run in the order of the page.
- A block with `title="NAME"` is written to the file NAME before that.
- A block with `title="Output"` has what a terminal shows of the command before it, without colours
  and the status line. Numbers of processes, names of hosts and durations may differ. Lines may have
  any order, unless a line `...` stands for lines that the page leaves out.

The pages of PAGES are run from the repository root when this is called as a program. Each page of
TUTORIAL is run in an empty folder by tests/project/test_docs.py.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/howto/install.md", "docs/howto/doctor.md")
TUTORIAL = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/tutorial/*.md"))
TUTORIAL.append("docs/howto/library.md")
# The folder of the reader's files, as the tutorial shows it.
_HOME = "/home/you"
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# Left out of the comparison: these differ from run to run or from machine to machine.
_MASKED = (
    (r"\bpid \d+", "pid N"),
    (r"\bhost [\w.-]+\)", "host NAME)"),
    (r"\b\d+\.\d s\b", "T s"),
    # pytest's; it warns of each editable installation
    (r"(, 1 warning)? in \d+\.\d\ds\b.*", " in T"),
    # A rank on a busy machine may answer before the deadline, and not within 0.1 s after it.
    (r"had not entered it T s ago and did not answer again", "never entered it"),
    # A rank that leaves closes its groups, then its transport; a peer reads either word first.
    (r"it left: (the group|its transport) was closed", "it left"),
    # The launcher needs rights on the kernel's log to know why a process was killed.
    (r"\((probably )?out of memory\b[^)]*\)", "(out of memory)"),
)

# Gloo of torch 2.13 ends some processes so at their exit: 1 of 30 under torchrun on a busy machine.
_GLOO_CRASH = "terminate called without an active exception"
_TURNS = 5
_PLAIN = {"TERM": "dumb", "NO_COLOR": "1"}


class Block(NamedTuple):
    """A fenced block: its language, its title or "", and its content."""

    language: str
    title: str
    content: str


def fenced(text: str) -> list[Block]:
    """Return the fenced blocks of a page, in their order."""
    return [Block(*found) for found in _BLOCK.findall(text)]


def blocks(language: str, text: str) -> list[str]:
    """Return the contents of the fenced blocks of a language."""
    return [block.content for block in fenced(text) if block.language == language]


def problems(page: str, folder: Path) -> Iterator[str]:
    """Run the commands of a page in a folder, and yield each failure or difference."""
    path = f"{ROOT / '.venv/bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    found = fenced((ROOT / page).read_text(encoding="utf-8"))
    for block, following in zip(found, [*found[1:], Block("", "", "")], strict=True):
        if block.title not in ("", "Output"):
            (folder / block.title).write_text(block.content, encoding="utf-8")
        if block.language != "bash":
            continue
        script = block.content
        print(f"--- {page}:\n{script}", flush=True)
        for _ in range(_TURNS):
            code, printed = in_terminal(script, folder, {**os.environ, "PATH": path, **_PLAIN})
            if _GLOO_CRASH not in printed or not uses_gloo(folder):
                break
        print(printed, end="", flush=True)
        if code != 0:
            yield f"{page}: exit code {code} of:\n{script}\n{printed}"
        elif following.title == "Output":
            printed = printed.replace(str(folder), _HOME)
            if not same(following.content, printed):
                yield f"{page}: the page shows\n{following.content}of:\n{script}\nnot\n{printed}"


def in_terminal(script: str, folder: Path, env: dict[str, str]) -> tuple[int, str]:
    """Run a script of bash on a terminal of 80 columns; return its exit code and its output."""
    own, given = pty.openpty()
    termios.tcsetwinsize(given, (24, 80))
    printed = bytearray()
    command = ["bash", "-euo", "pipefail", "-c", script]
    with subprocess.Popen(command, cwd=folder, env=env, stdout=given, stderr=given) as shell:
        os.close(given)
        # EIO: the last program that writes to the terminal has ended.
        with contextlib.suppress(OSError):
            while part := os.read(own, 65536):
                printed += part
    os.close(own)
    return shell.returncode, printed.decode(errors="replace").replace("\r\n", "\n")


def uses_gloo(folder: Path) -> bool:
    """Return whether a script of the page names the backend Gloo."""
    return any('"gloo"' in path.read_text(encoding="utf-8") for path in folder.glob("*.py"))


def same(shown: str, printed: str) -> bool:
    """Return whether a program printed the text of a page; "..." stands for lines, or a rest."""
    shown, printed = _masked(shown), _masked(printed)
    lines = shown.splitlines()
    if "..." not in lines:
        return sorted(lines) == sorted(printed.splitlines())
    texts = [line.removesuffix(" ...") for line in lines]
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(text) + (r"\n" if text == line else r" .*\n")
        for line, text in zip(lines, texts, strict=True)
    )
    return re.fullmatch(pattern, printed) is not None


def _masked(text: str) -> str:
    for pattern, replacement in _MASKED:
        text = re.sub(pattern, replacement, text)
    return text


def main() -> int:
    """Run the pages one after another; stop at the first command that fails."""
    for page in PAGES:
        for problem in problems(page, ROOT):
            print(problem, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
