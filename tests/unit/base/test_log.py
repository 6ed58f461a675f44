"""Warnings are seen once: by the program's own handlers, or on standard error."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import logging, sys
{settings}
import unisono as dist
future = dist.Future()
future.add_done_callback(lambda _: 1 / 0)
future.set_result(None)
"""


@pytest.mark.parametrize(
    ("settings", "level", "first"),
    [
        ("", "", "unisono: a done-callback raised"),
        ("logging.basicConfig(format='own: %(message)s')", "", "own: a done-callback raised"),
        ("logging.getLogger('unisono').addHandler(logging.NullHandler())", "", None),
        ("", "CRITICAL", None),
        ("sys.stderr = None", "", None),
        ("import os; sys.stderr = open(os.devnull, 'w'); sys.stderr.close()", "", None),
    ],
)
def test_a_callback_that_raises(settings, level, first):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(settings=settings)],
        capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "UNISONO_LOG": level},
    )  # fmt: skip
    lines = done.stderr.splitlines()
    if first is None:
        assert not lines
    else:
        assert (lines[0], lines[-1]) == (first, "ZeroDivisionError: division by zero")
        assert done.stderr.count("done-callback raised") == 1
