"""Warnings are seen once: by the program's own handlers, or on standard error."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.programs import python

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
    env = os.environ | {"UNISONO_LOG": level}
    done = python("-c", SCRIPT.format(settings=settings), check=True, env=env)
    lines = done.stderr.splitlines()
    if first is None:
        assert not lines
    else:
        assert (lines[0], lines[-1]) == (first, "ZeroDivisionError: division by zero")
        assert done.stderr.count("done-callback raised") == 1


LINES = """
import os
import unisono as dist
from unisono.core.base.log import get_logger
log = get_logger("base.test")
for rank in ("-", "7"):
    log.warning("before any group")
    os.environ["RANK"] = "7"
with dist.HashStore() as store:
    dist.init_process_group(store=store, rank=0, world_size=1)
    log.warning("in a group")
    dist.destroy_process_group()
log.warning("afterwards")
"""


def test_lines_name_rank_and_process():
    with subprocess.Popen(
        [sys.executable, "-c", LINES],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "UNISONO_LOG": "WARNING"},
    ) as process:  # fmt: skip
        lines = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 0
    found = [re.fullmatch(r"\S+ \S+ rank (\S+) pid (\d+) unisono.base.test WARNING .*", line)
             for line in lines]  # fmt: skip
    assert [match.groups() for match in found] == [
        (rank, str(process.pid)) for rank in ("-", "7", "0", "7")
    ], lines


RAISING = """
import logging, sys, threading
import unisono as dist

class Broken(logging.Handler):
    def emit(self, record):
        raise SystemExit(7)

logging.getLogger("unisono").addHandler(Broken())
ended = threading.Event()

def run():
    future = dist.Future()
    future.add_done_callback(lambda _: 1 / 0)
    future.set_result(None)
    ended.set()

threading.Thread(target=run).start()
assert ended.wait(30)
run()
"""


def test_a_log_handler_that_raises_ends_neither_thread_nor_program():
    done = python("-c", RAISING, check=True)
    assert done.stderr.count("--- Logging error ---") == 2
    assert "SystemExit: 7" in done.stderr
