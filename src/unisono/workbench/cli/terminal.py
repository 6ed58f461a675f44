"""Text for the terminal, from files, jobs and other users."""

from __future__ import annotations


def plain(line: str) -> str:
    """Return a line without control characters, with which a job could write to the terminal."""
    return "".join(each if each.isprintable() else "?" for each in line)
