"""Any command line of torchrun 2.13 is one of `unisono run`: torchrun itself is the oracle."""

import argparse
import json
import signal
import subprocess
import sys

import pytest

from tests.support.launches import LIMIT_S, environment
from unisono.workbench.cli.run import run as run_command

THEIRS = [sys.executable, "-m", "torch.distributed.run"]

pytestmark = [
    pytest.mark.linux("torchrun runs on Linux"),
    pytest.mark.usefixtures("clean_environment"),
]

# A value that is right for flags that take one and are no free text.
VALUES = {
    "nnodes": "1",
    "nproc_per_node": "3",
    "redirects": "0:3",
    "tee": "1",
    "max_restarts": "3",
    "monitor_interval": "0.5",
    "start_method": "fork",
    "rdzv_conf": "join_timeout=3,timeout=9,read_timeout=5",
    "local_ranks_filter": "0,1",
    "node_rank": "0",
    "master_port": "1234",
    "event_log_handler": "console",
    "numa_binding": "node",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "shutdown_timeout": "7",
}
SWITCHES = ("standalone", "module", "no_python", "run_path", "virtual_local_rank")
# They have no default in the environment there either.
WITHOUT_VARIABLE = ("logs_specs", "numa_binding")


def their_flags():
    """What torchrun's own parser knows, beside the script and its arguments."""
    run = pytest.importorskip("torch.distributed.run")
    return [a for a in run.get_args_parser()._actions if a.option_strings and a.dest != "help"]


def parse(*arguments):
    """The options of `unisono run`."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    run_command.add_command(parser.add_subparsers())
    return parser.parse_args(["run", *arguments, "script.py"])


def test_every_flag_in_every_spelling():
    seen = set()
    for action in their_flags():
        if action.dest == "logs_specs":
            continue
        name = "grace" if action.dest == "shutdown_timeout" else action.dest
        for flag in action.option_strings:
            value = [] if action.nargs == 0 else [VALUES.get(action.dest, "text")]
            options = parse(flag, *value)
            assert options.command == ["script.py"], flag
            assert (
                getattr(options, name) != getattr(parse(), name) or value == ["1"] or value == ["0"]
            ), flag
        seen.add(action.dest)
    assert set(VALUES) | set(SWITCHES) <= seen


def test_default_plug_in_for_logs():
    assert parse("--logs-specs", "default").logs_specs == parse().logs_specs


def test_every_variable(monkeypatch):
    for action in their_flags():
        if action.dest in WITHOUT_VARIABLE:
            continue
        value = "1" if action.nargs == 0 else VALUES.get(action.dest, "text")
        given = parse(*action.option_strings[:1], *([] if action.nargs == 0 else [value]))
        for prefix in ("PET_", "UNISONO_"):
            monkeypatch.setenv(prefix + action.dest.upper(), value)
            ours = vars(parse())
            assert {k: ours[k] for k in ours if k != "parser"} == {
                k: v for k, v in vars(given).items() if k != "parser"
            }, action.dest
            monkeypatch.delenv(prefix + action.dest.upper())


SHOW = """
import json, os, sys
with open(os.environ["SEEN"] + os.environ["RANK"], "w") as file:
    json.dump([sys.argv, sys.path[0], sys.executable, dict(os.environ)], file)
"""
# What differs between any two launches, or is said to differ in docs/reference/launcher-events.md.
OWN = {
    "MASTER_ADDR": "127.0.0.1 and localhost",
    "MASTER_PORT": "free",
    "TORCHELASTIC_RUN_ID": "random",
    "TORCHELASTIC_ERROR_FILE": "in a new folder",
    "SEEN": "of this test",
    "UNISONO_TOKEN": "ours",
    "PYTHONFAULTHANDLER": "ours",
    "NODE_RANK": "ours",
}
# Set by torchrun's agent for itself, and inherited.
AGENTS_OWN = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}


@pytest.mark.whole("runs torchrun")
@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (["--standalone", "--nproc-per-node=2"], {}),
        (["--nnode", "1", "--virtual-local-rank", "--nproc_per_node=2", "--role", "trainer"], {}),
        (
            ["--max_restarts=3", "--rdzv_id=job", "--node_rank=0", "--master_port=0"],
            {"CUDA_VISIBLE_DEVICES": "5, 7", "PET_NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "3"},
        ),
    ],
    ids=["standalone", "virtual local rank", "static"],
)
def test_workers_get_what_torchruns_workers_get(launches, tmp_path, flags, variables):
    pytest.importorskip("torch")
    words = [*flags, "script.py", "a b", "--x=${local_rank}"]
    code, _, err = launches.run(*flags, script=SHOW, args=words[-2:], SEEN="ours", **variables)
    assert code == 0, err
    env = environment(SEEN="theirs", **variables)
    subprocess.run([*THEIRS, *words], cwd=tmp_path, env=env, timeout=LIMIT_S, check=True)
    seen = {}
    for name in ("ours", "theirs"):
        paths = sorted(tmp_path.glob(f"{name}?"))
        assert [path.name for path in paths] == [f"{name}0", f"{name}1"]
        seen[name] = [json.loads(path.read_text()) for path in paths]
    for mine, reference in zip(seen["ours"], seen["theirs"], strict=True):
        assert mine[:3] == reference[:3]
        assert set(reference[3]) - set(mine[3]) <= AGENTS_OWN
        assert set(mine[3]) - set(reference[3]) <= set(OWN)
        for name in set(reference[3]) - set(OWN) - AGENTS_OWN:
            assert mine[3][name] == reference[3][name], name


def test_other_interpreter(launches, tmp_path):
    (tmp_path / "other").write_text("#!/bin/sh\necho other $2 $3\n")
    (tmp_path / "other").chmod(0o755)
    done = launches.run(script="", args=["x"], PYTHON_EXEC="./other")
    assert done == (0, "other script.py x\n", "")


def test_run_path_wins_over_no_python(launches):
    script = "import sys; print(__name__, sys.argv)"
    done = launches.run("--run-path", "--no-python", script=script, args=["x"])
    assert done == (0, "__main__ ['script.py', 'x']\n", "")


def test_fewer_gpus_than_workers(launches):
    flags = ("--virtual-local-rank", "--nproc-per-node=2")
    code, _, err = launches.run(*flags, script="", CUDA_VISIBLE_DEVICES="4")
    assert code == 1
    assert "local rank 1 needs a GPU of its own" in err


def test_signals_to_handle(launches):
    script = "import os, signal\nos.kill(os.getppid(), signal.SIGUSR1)\nsignal.pause()\n"
    code, _, err = launches.run("--signals-to-handle=SIGTERM,SIGUSR1", script=script)
    assert code == 128 + signal.SIGUSR1
    assert err.splitlines()[-1] == "unisono run: stopped by SIGUSR1"


# As a script of the shell starts `unisono run ... &`, and as nohup does.
@pytest.mark.parametrize(
    ("name", "flags", "ends"),
    [
        ("INT", [], True),
        ("QUIT", [], True),
        ("HUP", [], False),
        ("HUP", ["--signals-to-handle=SIGHUP,SIGTERM"], True),
    ],
)
def test_a_signal_that_was_ignored_at_the_start(tmp_path, name, flags, ends):
    signum = signal.Signals[f"SIG{name}"]
    text = f"import os, signal\nos.kill(os.getppid(), {signum:d})\n"
    (tmp_path / "script.py").write_text(text + "signal.pause()\n" * ends)
    done = subprocess.run(
        ["bash", "-c", f"trap '' {name}; exec \"$@\"", "-", sys.executable, "-m", "unisono", "run",
         *flags, "script.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == (128 + signum) * ends, done.stderr


RECORDED = """
import os, sys
os.dup2(os.open("own_stderr", os.O_WRONLY | os.O_CREAT), 2)
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("only in the file")
main()
"""


# What the decorator writes.
AS_RECORDED = """
import json, os, sys
text = "ValueError: only in the file"
extra = {"py_callstack": "Traceback (most recent call last):\\n" + text, "timestamp": "1"}
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": {"message": text, "extraInfo": extra}}, file)
sys.exit(1)
"""


@pytest.mark.parametrize(
    "script",
    [AS_RECORDED, pytest.param(RECORDED, marks=pytest.mark.whole("loads torch"))],
    ids=["as recorded", "recorded"],
)
def test_error_file_of_torchs_record_decorator_is_read(launches, tmp_path, script):
    if script == RECORDED:
        pytest.importorskip("torch")
    code, _, err = launches.run("--log-dir", "logs", script=script)
    assert code == 1
    assert err.splitlines()[-1] == "ValueError: only in the file"
    [path] = tmp_path.glob("logs/*/attempt_0/0/error.json")
    assert json.loads(path.read_text())["message"]["message"] == "ValueError: only in the file"


def test_error_file_without_logs_is_gone_afterwards(launches, tmp_path):
    script = (
        "import json, os, sys\n"
        "path = os.environ['TORCHELASTIC_ERROR_FILE']\n"
        "print(os.stat(os.path.dirname(os.path.dirname(path))).st_mode & 0o777)\n"
        "json.dump({'message': 'in words'}, open(path, 'w'))\n"
        "sys.exit(3)\n"
    )
    (tmp_path / "tmp").mkdir()
    code, out, err = launches.run(script=script, TMPDIR=str(tmp_path / "tmp"))
    assert (code, out) == (3, f"{0o700}\n")
    assert err.splitlines()[-1] == "in words"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_launcher_inside_a_launcher_hands_the_error_on(launches, tmp_path):
    path = tmp_path / "outer.json"
    script = "raise ValueError('boom')"
    assert launches.run(script=script, TORCHELASTIC_ERROR_FILE=str(path))[0] == 1
    message = json.loads(path.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: boom", 1)
    assert message["extraInfo"]["py_callstack"].endswith("ValueError: boom")
