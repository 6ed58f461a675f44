"""Read the kernel's text files, such as those in /proc and /sys."""

from __future__ import annotations


def read_text(path: str) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
