"""Write src/unisono/__init__.pyi: for type checkers, the names that are loaded on first use.

Run from the repository root: `make docs`. A test fails when the stub is out of date.
"""

from __future__ import annotations

from pathlib import Path

import unisono

STUB = Path("src/unisono/__init__.pyi")

HEAD = '''\
"""The names of unisono, for type checkers; tools/stub.py writes it from `_HOMES`."""

'''


def main() -> None:
    """Write the stub."""
    STUB.write_text(text(), encoding="utf-8")


def text() -> str:
    """Return the stub: one line per name, so that a diff shows each added name."""
    lines = sorted(
        f"from unisono.{module} import {name} as {name}\n"
        for module, names in unisono._HOMES.items()
        for name in names.split()
    )
    names = "".join(f'    "{name}",\n' for name in unisono.__all__)
    return f"{HEAD}{''.join(lines)}\n__all__ = [\n{names}]\n__version__: str\n"


if __name__ == "__main__":
    main()
