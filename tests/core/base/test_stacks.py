"""Stacks of ranks without a group of unisono: which processes are asked."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from unisono.core.base.source.stacks import offered_stacks
from unisono.workbench.cli.look import ask

SCRIPT = """
import os, sys
from unisono.core.base.source.stacks import offer_stack
offer_stack()
if len(sys.argv) > 1:
    os.setuid(int(sys.argv[1]))
print("there", flush=True)
sys.stdin.read()
"""


@contextmanager
def offering(*words, rank="3"):
    """Yield the process id of a process that offers its stack, as a rank of a launcher does."""
    variables = {"RANK": rank, "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "a:b"}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout.readline() == b"there\n"
        yield process.pid
        process.stdin.close()
    assert process.returncode == 0


@pytest.mark.linux("reads the memory of a process")
def test_rank_offers_its_stack():
    with offering() as pid:
        [found] = offered_stacks([pid])
        assert pid in ask._candidates(None)
    assert found[:4] == (pid, 3, 4, "a:b")
    # The process may not have returned from its print yet.
    assert found.rows[-1][:3] in [("<string>", line, "<module>") for line in (7, 8)]


@pytest.mark.parametrize("rank", ["x", "1:2:3", "-1"])
def test_rank_that_has_changed_its_variables_is_left_out(rank):
    with offering(rank=rank) as pid:
        assert [found.rank for found in offered_stacks([pid])] in ([], [1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_rank_that_has_become_another_user_is_left_out():
    with offering("65534") as pid:
        assert offered_stacks([pid]) == []
        assert pid not in ask._candidates(None)
