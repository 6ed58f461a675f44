"""Uncaught errors are printed without the frames of unisono."""

import os
import re
import sys
import threading

import pytest

import unisono as dist
from tests.support.programs import python
from unisono.core.base.source.tracebacks import OWN_FOLDER, trimmed

SCRIPT = """\
import numpy as np
import unisono as dist

def train():
    dist.group.WORLD.broadcast(np.zeros(2), 5)

dist.init_process_group()
train()
"""

WHERE = """\
Traceback (most recent call last):
  File "{file}", line 8, in <module>
    train()
  File "{file}", line 5, in train
    dist.group.WORLD.broadcast(np.zeros(2), 5)
unisono.errors.InvalidArgumentError: """


def test_a_traceback_ends_in_the_users_line(launches):
    code, _, err = launches.run("--nproc-per-node", 1, script=SCRIPT)
    assert code == 1
    # From 3.13 on, Python marks a part of some lines.
    plain = re.sub(r"\n +[~^]+(?=\n)", "", err)
    assert plain.count(WHERE.format(file=launches.folder / "script.py")) == 1
    assert OWN_FOLDER not in err


def test_all_frames_are_shown_on_request(launches):
    options = {"script": SCRIPT, "UNISONO_FULL_TRACEBACK": "1"}
    code, _, err = launches.run("--nproc-per-node", 1, **options)
    assert code == 1
    assert f'File "{OWN_FOLDER}core/operations/methods.py"' in err


def failing(rank):
    dist.init_process_group()
    dist.group.WORLD.broadcast(None, 9)


def test_a_spawned_rank_reports_the_users_line():
    with pytest.raises(Exception, match="failing") as caught:
        dist.spawn(failing, nprocs=1)
    assert "dist.group.WORLD.broadcast(None, 9)" in str(caught.value)
    assert OWN_FOLDER not in str(caught.value)


CELLS = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("import unisono as dist")
shell.run_cell("ranks = dist.pool(1)")
shell.run_cell("ranks.run(lambda: 1 / 0)")
shell.run_cell("ranks.close()")
shell.run_cell("ranks.run(len)")
shell.run_cell("dist.launch(lambda rank: {}[rank], 1)")
"""


def test_a_cell_of_a_notebook_shows_the_users_line(tmp_path):
    pytest.importorskip("IPython")
    pytest.importorskip("cloudpickle")
    done = python("-c", CELLS, check=True, env=os.environ | {"IPYTHONDIR": str(tmp_path)})
    shown = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
    ends = ("\nZeroDivisionError: division by zero", "\nClosedError: the pool is closed")
    assert [end in shown for end in ends] == [True] * 2, shown
    assert "----> 1 ranks.run(len)" in shown
    assert "pool.py" not in shown, shown
    assert "\nKeyError: 0" in shown
    assert "spawn.py" not in shown, shown


def test_causes_are_trimmed_and_restored(monkeypatch):
    monkeypatch.delenv("UNISONO_FULL_TRACEBACK", raising=False)
    try:
        dist.Store.set(dist.FileStore("/nonexistent/x"), "key", "value")
    except Exception as error:
        caught = error
    whole = caught.__traceback__
    assert whole.tb_next is not None
    with trimmed(caught):
        inside = caught.__traceback__
        assert inside.tb_frame is sys._getframe()
        assert inside.tb_next is None
    assert caught.__traceback__ is whole


def test_errors_of_other_libraries_stay_whole():
    with pytest.raises(KeyError) as caught:
        {}[1]
    before = caught.value.__traceback__
    with trimmed(caught.value):
        assert caught.value.__traceback__ is before


def test_frames_within_the_text_of_a_runtime_error_are_cut(monkeypatch):
    """C++ of torch appends them to the error of a callback, and DDP raises that text."""
    monkeypatch.delenv("UNISONO_FULL_TRACEBACK", raising=False)
    text = f"callback: PeerFailedError: rank 1\n\nAt:\n  {OWN_FOLDER}unisono/a.py(126): _outcome\n"
    foreign = "callback: x\n\nAt:\n  /usr/a.py(126): f\n"
    for whole, shown in ((text, "callback: PeerFailedError: rank 1"), (foreign, foreign)):
        error = RuntimeError(whole)
        with trimmed(error):
            assert str(error) == shown
        assert str(error) == whole
    monkeypatch.setenv("UNISONO_FULL_TRACEBACK", "1")
    with trimmed(error := RuntimeError(text)):
        assert str(error) == text


def test_the_hook_of_threads_trims_too(monkeypatch):
    from unisono.core.base.source import tracebacks

    seen = []
    monkeypatch.setattr(tracebacks, "_is_installed", False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(
        threading, "excepthook", lambda args: seen.append(args.exc_value.__traceback__)
    )
    tracebacks.hide_own_frames()

    def work():
        dist.HashStore().wait(["key"], -1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    last = seen[0]
    while last.tb_next is not None:
        last = last.tb_next
    assert last.tb_frame.f_code.co_name == "work"
