"""`unisono run` with real processes: environment, exit codes, reports, and what is left."""

import json
import os
import re
import select
import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import unisono
from tests.support.calls import wait_until
from tests.support.launches import LIMIT_S, RUN, children, environment
from tests.support.programs import python
from unisono.workbench.cli.main import main

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def shown(out):
    """Return arguments and environment of each rank that ran SHOW."""
    return sorted(map(json.loads, out.splitlines()), key=lambda line: int(line[1]["RANK"]))


def test_each_worker_knows_its_place(launches):
    flags = ("--standalone", "--nproc-per-node", 3)
    code, out, err = launches.run(*flags, script=SHOW, program=RUN)
    assert (code, err) == (0, "")
    environments = [env for _, env in shown(out)]
    assert len(environments) == 3
    for rank, env in enumerate(environments):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "NODE_RANK": "0",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": environments[0]["MASTER_PORT"],
            "TORCHELASTIC_RUN_ID": environments[0]["TORCHELASTIC_RUN_ID"],
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }
        assert {name: env.get(name) for name in expected} == expected
        assert 0 < int(env["MASTER_PORT"]) < 65536


def test_arguments_and_a_thread_count_of_the_user_reach_the_script_unchanged(launches):
    args = ["--", "--nproc-per-node", "9", "-m", "--grace", "", "a b", "--", "x"]
    [[argv, env]] = shown(launches.run(script=SHOW, args=args)[1])
    assert argv == args
    assert "OMP_NUM_THREADS" not in env
    _, out, _ = launches.run("--nproc_per_node=2", script=SHOW, OMP_NUM_THREADS="5")
    assert [env["OMP_NUM_THREADS"] for _, env in shown(out)] == ["5", "5"]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("closed", "seen"), [("<&-", "x\n"), (">&-", ""), ("2>&-", "x\n"), ("<&- >&- 2>&-", "")]
)
@pytest.mark.parametrize("nprocs", [1, 2])
def test_streams_that_are_closed(launches, tmp_path, closed, seen, nprocs):
    script = "import os; open('seen' + os.environ['RANK'], 'w'); print('x')"
    words = f"exec {shlex.join(RUN)} -n {nprocs} script.py {closed}"
    (tmp_path / "script.py").write_text(script)
    assert launches.run(program=["sh", "-c", words]) == (0, seen * nprocs, "")
    assert len(list(tmp_path.glob("seen?"))) == nprocs


@pytest.mark.parametrize("unread", ["2>/dev/full", "2>&1 | true"], ids=["full", "left"])
def test_launch_goes_on_when_nobody_can_read_what_is_told(launches, tmp_path, unread):
    script = "import os; open('seen' + os.environ['RANK'], 'a').write('x'); raise SystemExit(7)"
    (tmp_path / "s.py").write_text(script)
    run = f"{{ {shlex.join(RUN)} --max-restarts=2 s.py; echo $? >code; }} {unread}"
    launches.run(program=["sh", "-c", run])
    assert (tmp_path / "seen0").read_text() == "xxx"
    assert (tmp_path / "code").read_text() == "7\n"


def test_module_or_any_program(launches, tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__main__.py").write_text("import sys; print(__package__, sys.argv[1:])")
    assert launches.run("-m", "pack", "--flag") == (0, "pack ['--flag']\n", "")
    shell = ("--no-python", "sh", "-c", "echo rank $RANK; exit 3")
    assert launches.run(*shell)[:2] == (3, "rank 0\n")
    code, _, err = launches.run("--no-python", "--nproc-per-node", 2, "./absent")
    assert code == 1
    assert "cannot start rank 0 (./absent)" in err.splitlines()[-1]


PROGRAM_2 = "unisono run (program 2): error: "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no script given"),
        ("absent.py", "script not found: absent.py"),
        ("--nproc-per-node 0 s.py", "must be a number of at least 1, cpu, gpu or auto; got '0'"),
        ("--nproc-per-node two s.py", "number of at least 1, cpu, gpu or auto; got 'two'"),
        ("--grace -1 s.py", "must be a number of seconds >= 0, got '-1'"),
        ("--unknown s.py", "unrecognized arguments: --unknown"),
        ("--nproc-per-nde 2 s.py", "(is --nproc-per-node meant?)"),
        ("--nprocs 4 s.py", "--nprocs (is --nproc-per-node meant?)"),
        ("--epoch 4 s.py", "unrecognized arguments: --epoch"),
        ("-m --no-python s.py", "not allowed with argument"),
        ("--logs-specs mine s.py", "torchrun's plug-ins for logs cannot be used here"),
        ("--signals-to-handle=SIGKILL s.py", "'SIGKILL' is no signal that a program can handle"),
        ("--signals-to-handle=SIGFOO s.py", "'SIGFOO' is no signal that a program can handle"),
        ("--signals-to-handle=TERM s.py", "'TERM' is no signal that a program can handle"),
        ("s.py : -n 1", f"{PROGRAM_2}no script given"),
        ("s.py : -n 0 s.py", f"{PROGRAM_2}argument -n/--nproc-per-node"),
        ("s.py : -n 1 absent.py", f"{PROGRAM_2}script not found: absent.py"),
    ],
)
def test_usage_errors(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments.split()])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert message in err.splitlines()[-1]
    assert err.startswith("usage: unisono run [options] script ")


@pytest.mark.parametrize("flags", ["", "-m", "--no-python", "s.py : -n 1 "])
def test_variables_exclude_each_other_as_flags_do(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    variables = {"-m": ("PET_NO_PYTHON",), "--no-python": ("UNISONO_MODULE",)}
    for name in variables.get(flags, ("PET_NO_PYTHON", "PET_MODULE")):
        monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as ended:
        main(["run", *flags.split(), "s.py"])
    assert ended.value.code == 2
    expected = "error: argument --no-python: not allowed with argument -m/--module\n"
    assert capsys.readouterr().err.endswith(expected)


def test_unknown_key_of_the_rendezvous_is_told(launches):
    code, _, err = launches.run("--rdzv-conf=use_libuv=1", script="")
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith(
        "unisono run: --rdzv-conf: unknown key 'use_libuv' without effect (known: "
    )


def test_the_command_says_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"unisono {unisono.__version__}\n"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PET_STANDALONE", "yes", "PET_STANDALONE must be 0 or 1; got 'yes'"),
        ("UNISONO_FOLD", "x", "UNISONO_FOLD must be always or auto or never; got 'x'"),
    ],
)
def test_bad_defaults_in_the_environment(monkeypatch, capsys, name, value, message):
    monkeypatch.setenv(name, value)
    assert main(["run", "s.py"]) == 1
    assert capsys.readouterr() == ("", f"unisono: error: {message}\n")


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("statement", "code", "how"),
    [
        ("sys.exit(7)", 7, "exited with code 7"),
        ("os._exit(3)", 3, "exited with code 3"),
        ("raise ValueError('boom')", 1, "exited with code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "was killed by SIGTERM"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
    ],
)
def test_first_failure_ends_the_launch(launches, statement, code, how):
    first = f"import os, signal, sys\nif os.environ['RANK'] == '1':\n    {statement}\n"
    returned, _, err = launches.run("-n3", script=f"{first}signal.pause()\n")
    assert returned == code
    host = re.escape(os.uname().nodename)
    assert re.search(rf"unisono run: first failure: rank 1 \(pid \d+, host {host}\) {how}", err)
    assert "unisono run: ranks 0, 2 stopped by the launcher\n" in err


SLOW_TO_END = """
import atexit, os, signal
if os.environ["RANK"] == "0":
    atexit.register(signal.pause)
    raise ValueError("of rank 0")
open("fifo").close()
raise KeyError("of rank 1")
"""


@pytest.mark.linux("watches processes")
def test_a_rank_that_was_stopped_after_its_own_error(launches, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    launch = launches.start("-n2", script=SLOW_TO_END)
    launch.told("ValueError: of rank 0\n")
    with open(tmp_path / "fifo", "w"):
        code, _, err = launch.finish()
    assert code == 1
    printed = "after it printed ValueError: of rank 0"
    assert f"unisono run: rank 0 stopped by the launcher, {printed}\n" in err
    assert err.endswith("KeyError: 'of rank 1'\n")


CAUSE_ENDS_LATER = """
import atexit, os, time
from unisono.errors import PeerLostError
if os.environ["RANK"] == "0":
    atexit.register(time.sleep, 0.5)  # only a launcher that does not wait comes before
    atexit.register(lambda: open("fifo").read())  # until rank 1 has ended
    raise ValueError("of rank 0")
fifo = open("fifo", "w")
raise PeerLostError("rank 0 is gone")
"""


@pytest.mark.linux("watches processes")
def test_a_cause_that_ends_after_its_consequence_is_named(launches, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    at_once = {"unisono.launcher.report.SETTLE_S": 0.0}
    code, _, err = launches.run("-n2", script=CAUSE_ENDS_LATER, patches=at_once)
    assert code == 1
    assert "unisono run: first failure: rank 0 " in err
    assert err.endswith("ValueError: of rank 0\n")


IN_LOAD = """
import threading
from unisono.core.base.source.stacks import offer_stack
def load():
    print("loads"); threading.Event().wait()
offer_stack()  # as `import torch` does
load()
"""


@pytest.mark.linux("watches processes")
def test_ctrl_c_tells_where_the_ranks_were(launches):
    patient = {"unisono.core.base.source.stacks._ANSWER_S": LIMIT_S}
    launch = launches.start("-n2", script=IN_LOAD, patches=patient)
    launch.lines(2, "loads")
    launch.send_signal(signal.SIGINT)
    code, _, err = launch.finish()
    assert code == 128 + signal.SIGINT
    assert err.splitlines()[-2:] == [
        "unisono run: ranks 0, 1 stopped by the launcher, in load (script.py:5), called from "
        "script.py:7",
        "unisono run: stopped by SIGINT",
    ]


def test_flags_of_the_launch_after_the_script_are_told(launches):
    told = "unisono run: 1 worker; {} went to script.py: options of unisono run come before the"
    (launches.folder / "script.py").write_text("")
    for words, flag in (["-n", "2"], "-n"), (["--max-restarts=3"], "--max-restarts=3"):
        code, _, err = launches.run("script.py", *words)
        assert (code, told.format(flag) in err) == (0, True), err
    for words in (["-n2", "script.py", "-n", "2"], ["--", "script.py", "-n2"], ["script.py", "-k"]):
        code, _, err = launches.run(*words)
        assert (code, err) == (0, "")


NOISY = """
import os, signal
class Noisy:
    def __del__(self): raise RuntimeError("only mentioned by Python")
if os.environ["RANK"] != "1":
    signal.pause()
noisy = Noisy()
try:
    {}["k"]
except KeyError as error:
    raise ValueError("two\\nlines") from error
"""


def test_real_traceback_is_printed_last_if_other_text_follows_it(launches):
    _, _, err = launches.run("-n3", script=NOISY)
    assert "only mentioned by Python" in err
    report = err[err.index("unisono run: first failure") :].splitlines()
    file = f'  File "{launches.folder / "script.py"}", line'
    assert report[1:] == [
        "Traceback (most recent call last):",
        f"{file} 9, in <module>",
        '    {}["k"]',
        "    ~~^^^^^",
        "KeyError: 'k'",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        f"{file} 11, in <module>",
        '    raise ValueError("two\\nlines") from error',
        "ValueError: two",
        "lines",
    ]


RAISES_ON_1 = """
import os, signal, sys
if os.environ["RANK"] == "1":
    open("fifo").read()
    {}["k"]
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(os.environ.get("LAST_WORDS")))
    open("fifo", "w").close()
signal.pause()
"""


def test_the_traceback_is_printed_once(launches, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    header, last = "Traceback (most recent call last):", "KeyError: 'k'"
    told = r"unisono run: first failure: rank 1 \(.*\) exited with code 1"
    above = f"{told}; its traceback is above: {last}"
    # On the console; with a prefix on the console and in a file; only in a file; of other ranks.
    for flags, count, expected in (
        ((), 1, above),
        (("--tee", "3", "--log-dir", "logs"), 1, above),
        (("--redirects", "3", "--log-dir", "logs"), 1, told),
        (("--redirects", "1:2", "--log-dir", "logs"), 1, told),
        (("--local-ranks-filter", "0"), 1, told),
    ):
        _, _, err = launches.run("-n3", *flags, script=RAISES_ON_1)
        assert err.count(header) == count, err
        line = err.splitlines()[-1 if expected is above else err.splitlines().index(header) - 1]
        assert re.fullmatch(expected, line), err
    # Another rank writes after it.
    _, _, err = launches.run("-n3", script=RAISES_ON_1, LAST_WORDS="saved")
    assert (err.count(header), err.splitlines()[-1]) == (2, last), err


COLOURED = """
import os, select, sys
from pathlib import Path

def fail(name):
    print("Traceback (most recent call last):", file=sys.stderr)
    print('  File \x1b[35m"x.py"\x1b[0m, line \x1b[35m1\x1b[0m, in f', file=sys.stderr)
    sys.exit(f"\x1b[1;35m{name}\x1b[0m: \x1b[35mtext\x1b[0m")

if os.environ["RANK"] == "0":
    Path("fifo").write_text(str(os.getpid()))
    fail("__main__.PeerLostError")
select.select([os.pidfd_open(int(Path("fifo").read_text()))], [], [])
fail("ValueError")
"""


@pytest.mark.linux("watches processes")
def test_colours_of_tracebacks_hide_no_cause(launches, tmp_path):
    # Python 3.13 colours them if FORCE_COLOR is set.
    os.mkfifo(tmp_path / "fifo")
    code, _, err = launches.run("-n2", script=COLOURED, NO_COLOR="1")
    assert code == 1
    assert "unisono run: first failure: rank 1 " in err
    assert err.endswith("ValueError: text\n")


def test_the_report_as_json(launches, tmp_path):
    for script, code, flag in (("raise SystemExit(7)", 7, "--error-json"), ("", 0, "--json")):
        assert launches.run("-n2", flag, "r.json", script=script)[0] == code
        report = json.loads((tmp_path / "r.json").read_text())
        assert (report["exit_code"], bool(report["failures"])) == (code, bool(code))
    code, _, err = launches.run("-n2", "--json", "-", script="")
    assert (code, "standard output is that of the workers" in err) == (2, True)


def test_last_lines_without_a_traceback_are_printed_once(launches):
    code, _, err = launches.run("-n1", script="def f(:\n")
    assert code == 1
    assert err.endswith("; its traceback is above: SyntaxError: invalid syntax\n")
    assert err.count("    def f(:\n") == 1
    code, _, err = launches.run("-n1", script="import sys\nsys.exit('no data')")
    assert re.fullmatch(
        "no data\nunisono run: first failure: rank 0 .* code 1; its last lines are above\n", err
    )


@pytest.mark.linux("watches processes")
@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("error", "PeerLostError: rank 1 is gone"),
        ("RuntimeError('step') from error", "RuntimeError: step"),
        ("RuntimeError('step')", "RuntimeError: step"),
        ("ExceptionGroup('tasks', [error])", "ExceptionGroup: tasks (1 sub-exception)"),
    ],
)
def test_original_failure_beats_an_earlier_consequence(launches, tmp_path, raised, told):
    # Rank 1 raises only after the end of rank 0.
    script = """
import os, select, signal
class PeerLostError(Exception): pass
rank = int(os.environ["RANK"])
if rank == 2:
    signal.pause()
if rank == 0:
    with open("fifo", "w") as fifo:
        fifo.write(str(os.getpid()))
    try:
        raise PeerLostError("rank 1 is gone")
    except PeerLostError as error:
        raise RAISED
with open("fifo") as fifo:
    select.select([os.pidfd_open(int(fifo.read()))], [], [])
raise ValueError("the cause")
"""
    os.mkfifo(tmp_path / "fifo")
    code, _, err = launches.run("-n3", script=script.replace("RAISED", raised))
    assert code == 1
    lines = err.splitlines()
    assert lines[-1].endswith("ValueError: the cause")
    [consequence] = [line for line in lines if line.startswith("unisono run: rank 0")]
    assert consequence.endswith(f"exited with code 1: {told}")


def test_a_rank_that_ends_well_after_the_failure_of_another_is_named(launches, tmp_path):
    script = """
import os
class PeerLostError(Exception): pass
if os.environ["RANK"] == "0":
    fifo = os.open("fifo", os.O_WRONLY)
    raise PeerLostError("rank 1 is gone")
with open("fifo") as fifo:
    fifo.read()  # until rank 0 has ended
"""
    os.mkfifo(tmp_path / "fifo")
    code, _, err = launches.run("-n2", script=script)
    assert code == 1
    told = (
        r"^unisono run: left with exit code 0 (before|after) the first failure: rank 1 \d+\.\d s$"
    )
    assert re.search(told, err, re.MULTILINE), err


@pytest.mark.linux("watches processes")
def test_worker_whose_error_wraps_a_lost_peer_is_not_replaced(launches, tmp_path):
    # Rank 1 raises only after the end of rank 0, whose replacement would not help.
    script = """
import os, select
class PeerLostError(Exception): pass
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    raise SystemExit
if os.environ["RANK"] == "0":
    with open("fifo", "w") as fifo:
        fifo.write(str(os.getpid()))
    try:
        raise PeerLostError("rank 1 is gone")
    except PeerLostError as error:
        raise RuntimeError("step") from error
with open("fifo") as fifo:
    select.select([os.pidfd_open(int(fifo.read()))], [], [])
raise ValueError("the cause")
"""
    os.mkfifo(tmp_path / "fifo")
    options = "--restart=worker", "--max-restarts=1"
    code, _, err = launches.run("-n2", *options, script=script)
    [line] = [line for line in err.splitlines() if line.startswith("unisono run: ")]
    assert (code, line.startswith("unisono run: rank 1 ")) == (0, True), err
    assert line.endswith("ValueError: the cause; restart 1 of 1")


@pytest.mark.parametrize("nprocs", [1, 2])
def test_consequences_alone_are_a_failure(launches, nprocs):
    # No connection between ranks is enough for that: each says that the other was lost.
    script = "class PeerLostError(Exception): pass\nraise PeerLostError('the other')"
    code, _, err = launches.run("-n", nprocs, "--max-restarts=1", script=script)
    assert code == 1
    assert err.count("restart 1 of 1") == 1
    assert err.endswith("PeerLostError: the other\n")
    told = re.findall(r"^unisono run: (?:first failure: )?rank \d \((pid \d+)", err, re.MULTILINE)
    assert len(set(told)) == len(told), "a failure is told once"


def test_other_workers_may_clean_up(launches, tmp_path):
    script = """
import os, signal, sys
def clean_up(*_):
    print("cleaned up", os.environ["RANK"])
    sys.exit(0)
signal.signal(signal.SIGTERM, clean_up)
fifo = os.open("fifo", os.O_RDWR)  # never closed: the last one to close it empties it
if os.environ["RANK"] == "0":
    os.read(fifo, 1)
    sys.exit(9)
os.write(fifo, b"x")
signal.pause()
"""
    os.mkfifo(tmp_path / "fifo")
    assert launches.run("-n2", "--grace", LIMIT_S, script=script)[:2] == (9, "cleaned up 1\n")


@pytest.mark.linux("watches processes")
@pytest.mark.sweep(2)
@pytest.mark.parametrize("fold", ["never", "always"])
@pytest.mark.parametrize("lines", [600, 6000], ids=["all-ended", "all-wait"])
def test_signal_while_nobody_reads_ends_the_launch(launches, lines, fold, tmp_path):
    # More than a pipe holds. The launcher would pass it on for a minute.
    script = f"open('fifo', 'w').write('x')\nfor _ in range({lines}): print('y' * 79)"
    os.mkfifo(tmp_path / "fifo")
    fifo = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        launch = launches.start("-n2", "--grace", 0.1, "--fold", fold, script=script)
        assert select.select([fifo], [], [], LIMIT_S)[0]
        launch.send_signal(signal.SIGTERM)
        assert launch.wait(LIMIT_S / 2) in (0, 128 + signal.SIGTERM)
    finally:
        os.close(fifo)


FAILS_WHILE_DEAF = """
import os, signal
if os.environ["RANK"] == "1":
    open("fifo").close()
    raise ValueError("the cause")
signal.signal(signal.SIGTERM, lambda *_: print(os.getpid()))
signal.signal(signal.SIGINT, signal.SIG_IGN)
open("fifo", "w").close()
while True:
    signal.pause()
"""


@pytest.mark.linux("watches processes")
def test_failure_before_a_signal_is_reported_all_the_same(launches, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    flags = ("-n2", "--grace", 3600, "--error-json", "error.json")
    launch = launches.start(*flags, script=FAILS_WHILE_DEAF)
    # It prints when it is told to end, because of the failure.
    launch.follow(1)
    launch.send_signal(signal.SIGINT)
    launch.send_signal(signal.SIGHUP)
    code, _, err = launch.finish()
    assert code in (128 + signal.SIGINT, 128 + signal.SIGHUP)
    assert "unisono run: first failure: rank 1 " in err
    assert err.endswith("ValueError: the cause\n")
    [failure] = json.loads((tmp_path / "error.json").read_text())["failures"]
    assert (failure["rank"], failure["exception"]) == (1, "ValueError: the cause")


DEAF = """
import os, signal, sys, threading
for name in ("SIGTERM", "SIGINT", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
print(os.getpid())
threading.Event().wait()
"""


@pytest.mark.linux("watches processes")
def test_worker_that_ignores_sigterm_is_killed_after_the_grace(launches):
    launch = launches.start("-n2", "--grace", 0.1, script=DEAF)
    launch.follow(2)
    signal.pidfd_send_signal(launch.handles[0], signal.SIGKILL)
    assert launch.finish()[0] == 137
    assert launch.survivors(0.1) == 0


@pytest.mark.linux("watches processes")
def test_second_ctrl_c_does_not_wait_for_the_grace(launches):
    launch = launches.start("-n2", "--grace", 3600, script=DEAF)
    launch.follow(2)
    # Signals of different kinds, because two equal ones may be merged into one.
    launch.send_signal(signal.SIGINT)
    launch.send_signal(signal.SIGTERM)
    assert launch.finish()[0] in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert launch.survivors(0.1) == 0


# What `env -i` and `setsid` leave of a process is its descent; `--fork` makes it lose its parent.
FAMILY = """
import os, signal, subprocess, sys
child = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
near = subprocess.Popen(child, stdin=subprocess.DEVNULL)
far = subprocess.Popen(child, stdin=subprocess.DEVNULL, start_new_session=True)
escaped = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
subprocess.run(["env", "-i", "setsid", "--fork", sys.executable, "-S", "-c", escaped])
os.write(1, f"{near.pid}\\n{far.pid}\\n{os.getpid()}\\n".encode())
try:
    signal.pause()
except KeyboardInterrupt:
    sys.exit(0)
"""
KILLED_INSIDE = "unisono run: the launcher was killed by SIGKILL, and all workers with it\n"
WAYS = {
    "killed": (lambda launch: launch.send_signal(signal.SIGKILL), -signal.SIGKILL, ""),
    # As timeout(1) and CI systems do it.
    "group killed": (lambda launch: os.killpg(launch.pid, signal.SIGKILL), -signal.SIGKILL, ""),
    "killed inside": (lambda launch: os.kill(launch.inner(), signal.SIGKILL), 137, KILLED_INSIDE),
    "a worker killed": (lambda launch: signal.pidfd_send_signal(launch.worker, 9), 137, None),
} | {
    signum.name: (
        lambda launch, signum=signum: launch.send_signal(signum),
        128 + signum,
        f"unisono run: stopped by {signum.name}\n",
    )
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
}


@pytest.mark.linux("watches processes")
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_however_it_ends(launches, way):
    launch = launches.start("-n2", script=FAMILY)
    launch.follow(8)
    end, code, told = WAYS[way]
    [inner] = children(launch.pid)
    launch.worker = os.pidfd_open(children(inner)[0])
    end(launch)
    os.close(launch.worker)
    # After SIGKILL no process is left that could report the end of all others.
    if code < 0:
        assert launch.survivors(LIMIT_S) == 0
    returned, _, err = launch.finish()
    assert launch.survivors(0.1) == 0
    assert returned == code
    assert told is None or err == told


@pytest.mark.linux("watches processes")
def test_strangers_are_spared(launches, tmp_path):
    # A shell's background job becomes the launcher's child by `exec`.
    (tmp_path / "script.py").write_text(DEAF)
    shell = f"sleep 3600 >/dev/null 2>&1 & echo $!; exec {shlex.join(RUN)} -n1 script.py"
    launch = launches.start(program=["sh", "-c", shell])
    launch.follow(2)
    cmdlines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(launch.pid)}
    [pid] = [pid for pid, cmdline in cmdlines.items() if b"unisono" in cmdline]
    os.kill(pid, signal.SIGKILL)
    assert launch.wait() == 137
    assert not select.select([launch.handles[0]], [], [], 0)[0]


@pytest.mark.linux("watches processes")
def test_what_a_successful_worker_leaves_is_ended(launches):
    script = """
import os, subprocess, sys
for _ in range(5):
    subprocess.run(["setsid", "--fork", "true"])
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
print(child.pid)
sys.stdin.read()
os._exit(0)
"""
    launch = launches.start(script=script)
    launch.follow(1)
    # Orphans that end do not pile up as zombies.
    assert wait_until(lambda: len(children(launch.inner())) == 1, LIMIT_S)
    assert launch.finish()[::2] == (0, "")
    assert launch.survivors(0.1) == 0


@pytest.mark.linux("watches processes")
def test_stop_and_go_on(launches):
    launch = launches.start("-n2", script=DEAF)
    launch.follow(2)
    both = [launch.pid, launch.inner()]

    def states():
        return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in both]

    launch.send_signal(signal.SIGTSTP)
    assert wait_until(lambda: set(states()) == {"T"}, LIMIT_S), states()
    launch.send_signal(signal.SIGCONT)
    assert wait_until(lambda: set(states()) <= {"S", "R"}, LIMIT_S), states()


@pytest.mark.linux("watches processes")
def test_killed_outer_launcher_ends_an_inner_launch(launches, tmp_path):
    (tmp_path / "inner.py").write_text(FAMILY)
    outer = f"import os\nos.execv({sys.executable!r}, {[*RUN, '-n2', 'inner.py']})"
    launch = launches.start(script=outer)
    launch.follow(8)
    launch.send_signal(signal.SIGKILL)
    assert launch.survivors(LIMIT_S) == 0


def test_lines_of_ranks_do_not_mix(launches):
    script = """
import os, sys
for i in range(300):
    print("out", os.environ["RANK"], i)
    print("err", os.environ["RANK"], i, file=sys.stderr)
sys.stderr.write("no newline at the end")
"""
    code, out, err = launches.run("-n3", script=script)
    assert code == 0
    expected = {f"{rank} {i}" for rank in range(3) for i in range(300)}
    assert {line.removeprefix("out ") for line in out.splitlines()} == expected
    rest = err.replace("no newline at the end", "")
    assert {line.removeprefix("err ") for line in rest.splitlines()} == expected
    assert err.count("no newline at the end") == 3


@pytest.mark.parametrize(
    ("flags", "size", "warned"), [([], "2", True), (["--standalone"], "2", False), ([], "1", False)]
)
def test_several_launchers_that_do_not_know_of_each_other_say_so(launches, flags, size, warned):
    code, _, err = launches.run(*flags, "--no-python", "true", PMI_RANK="0", PMI_SIZE=size)
    assert code == 0
    expected = "PMI) started 2 of this, and each makes a world of its own; for one world: --nnodes"
    assert (f"{expected} 2 " in err) == warned
    assert warned or err == ""


class NoThread:
    """A thread that the system does not allow."""

    def __init__(self, **how):
        pass

    def start(self):
        raise RuntimeError("can't start new thread")

    def is_alive(self):
        return False


def test_the_report_needs_no_thread(launches):
    patches = {"unisono.workbench.cli.run.run.threading": SimpleNamespace(Thread=NoThread)}
    code, _, err = launches.run("-n2", script="raise ValueError('the cause')", patches=patches)
    assert code == 1
    assert err.endswith("ValueError: the cause\n")
    assert "unisono run: first failure: rank " in err


@pytest.mark.linux("reads the memory of a process")
def test_launcher_stays_light(tmp_path):
    (tmp_path / "s.py").write_text("")
    limit_kib = 60 * 1024
    program = (
        "import os, sys; from unisono.workbench.cli import main; code = main(['run', 's.py']); "
        # The launcher's two processes.
        "files = [open(f'/proc/{pid}/status') for pid in (os.getpid(), os.getppid())]\n"
        "peak = sum(int(line.split()[1]) for f in files for line in f if line[:5] == 'VmHWM')\n"
        "print(code, sorted({'numpy', 'torch'} & set(sys.modules)), peak)"
    )
    done = python("-c", program, cwd=tmp_path, env=environment(), check=True)
    first, _, peak_kib = done.stdout.rpartition(" ")
    assert (first, done.stderr) == ("0 []", "")
    assert int(peak_kib) <= limit_kib
