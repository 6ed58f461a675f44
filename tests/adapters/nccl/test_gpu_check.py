"""The script of `make test-gpu`, without a GPU: a run on a lent GPU must not be lost by a fault."""

import subprocess
import sys

import pytest

from tests.adapters.nccl import gpu_check

HANGS = """
import os, time

def forever():
    time.sleep(600)

print("before")
print("one of its ranks" if os.fork() == 0 else "itself")
forever()
"""


def test_a_stage_that_hangs_leaves_its_output_and_its_stacks(tmp_path):
    log = tmp_path / "log"
    assert gpu_check.ended([sys.executable, "-c", HANGS], log, 6) == "NOT ENDED in 6 s"
    text = log.read_text()
    assert all(each in text for each in ("before", "one of its ranks", "itself"))
    # Both processes write at once, perhaps into each other's lines.
    assert text.count("forever") == 2


@pytest.mark.parametrize(("code", "result"), [("print(5)", "passed"), ("1 / 0", "FAILED")])
def test_the_results_of_stages(tmp_path, code, result):
    assert gpu_check.ended([sys.executable, "-c", code], tmp_path / "log", 60) == result
    assert (tmp_path / "log").read_text()


def test_a_failure_is_in_the_table_and_the_other_stages_run(tmp_path, monkeypatch, capsys):
    codes = {"sums": "print('the bits differ'); raise SystemExit(1)", "kernels": "print('fine')"}
    monkeypatch.setattr(gpu_check, "command_of", lambda name: [sys.executable, "-c", codes[name]])
    monkeypatch.setattr(gpu_check, "why_no_gpu", lambda: "")
    monkeypatch.setenv("UNISONO_TEST_GPU", "0")
    assert gpu_check.main(["--logs", str(tmp_path), *codes]) == 1
    shown = capsys.readouterr().out
    assert "the bits differ" in shown
    rows = [line.split() for line in shown.splitlines()[-2:]]
    assert [(row[0], row[2]) for row in rows] == [("sums", "FAILED"), ("kernels", "passed")]
    assert (tmp_path / "kernels.log").read_text() == "fine\n"


def test_every_stage_has_its_function_or_its_tests():
    for name, stage in gpu_check.STAGES.items():
        assert stage.pytest or callable(getattr(gpu_check, name)), name
        command = gpu_check.command_of(name)
        if stage.pytest:
            subprocess.run([*command, "--collect-only"], capture_output=True, check=True)
