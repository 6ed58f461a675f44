"""Write the table in docs/reference/environment.md from `unisono.core.base.config`.

Run from the repository root: `make docs`. A test fails when the table is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

from unisono.core.base.config import VARIABLES

PAGE = Path("docs/reference/environment.md")
TABLE = re.compile(r"^\| variable \|.*?\n\n", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def page(old: str) -> str:
    """Return the page's text with a new table."""
    rows = [("variable", "default", "meaning"), ("---", "---", "---")]
    rows += [(f"`{name}`", v.default or "(empty)", v.meaning) for name, v in VARIABLES.items()]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    new, count = TABLE.subn(lambda _: f"{table}\n", old)
    if count != 1:
        raise SystemExit(f"{PAGE}: found {count} tables of variables, expected 1")
    return new


if __name__ == "__main__":
    main()
