"""Run the commands of the documents: every ```bash block, from the repository root.

`make test` is skipped, because the caller has just run it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/howto/install.md")


def blocks(language: str, text: str) -> list[str]:
    """Return the contents of the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def main() -> int:
    """Run the blocks one after another; stop at the first that fails."""
    path = f"{ROOT / '.venv/bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    for page in PAGES:
        for block in blocks("bash", (ROOT / page).read_text(encoding="utf-8")):
            script = "\n".join(line for line in block.splitlines() if line != "make test")
            print(f"--- {page}:\n{script}", flush=True)
            command = ["bash", "-euo", "pipefail", "-c", script]
            code = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}).returncode
            if code != 0:
                print(f"{page}: exit code {code} of:\n{script}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
