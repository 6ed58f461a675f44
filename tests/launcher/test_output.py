"""`unisono run`'s output, programs, plan and binding, with real processes."""

import json
import os
import re
import select
import shlex
import signal

import pytest

from tests.support.launches import LIMIT_S, RUN, logs
from unisono.workbench.cli.main import main

CTRL_S, CTRL_Q = b"\x13", b"\x11"

pytestmark = pytest.mark.linux("written for Linux")

TALK = """
import os, sys
rank = os.environ["RANK"]
print("equal")
print("out", rank)
print("err", rank, file=sys.stderr)
"""
OUT = [b"equal\nout 0\n", b"equal\nout 1\n"]
ERR = [b"err 0\n", b"err 1\n"]


@pytest.fixture
def run(launches, tmp_path):
    """Run `unisono run` in a folder with talk.py; returns exit code, stdout and stderr."""
    (tmp_path / "talk.py").write_text(TALK)
    return lambda *words, **variables: launches.run(*words, TMPDIR=str(tmp_path), **variables)


def both(stream, texts):
    return {f"attempt_0/{rank}/{stream}.log": text for rank, text in enumerate(texts)}


EVERYTHING = both("stdout", OUT) | both("stderr", ERR)
PLAIN_OUT, PLAIN_ERR = ["equal", "equal", "out 0", "out 1"], ["err 0", "err 1"]
PREFIXED_OUT = ["[rank 0] equal", "[rank 0] out 0", "[rank 1] equal", "[rank 1] out 1"]


@pytest.mark.parametrize(
    ("flags", "files", "out", "err"),
    [
        (
            ["--tee", "3", "--rdzv-id", "a/b"],
            EVERYTHING,
            PREFIXED_OUT,
            ["[rank 0] err 0", "[rank 1] err 1"],
        ),
        (
            ["-r", "0:3,1:1"],
            both("stdout", OUT) | {"attempt_0/0/stderr.log": ERR[0]},
            [],
            ["err 1"],
        ),
        ([], EVERYTHING, PLAIN_OUT, PLAIN_ERR),
        (
            ["--local-ranks-filter", "1", "--duplicate-stdout-filters", "a,,qual,out", "-r0"],
            {"attempt_0/filtered_stdout.log": b"[rank 0] out 0\n[rank 1] out 1\n"},
            ["equal", "out 1"],
            ["err 1"],
        ),
    ],
    ids=["tee", "redirects", "log-dir alone", "filters"],
)
def test_where_output_goes(run, tmp_path, flags, files, out, err):
    code, shown, said = run("-n", 2, "--log-dir", "logs", *flags, "talk.py")
    assert (code, sorted(shown.splitlines())) == (0, out)
    note, *rest = said.splitlines()
    assert re.fullmatch(r"unisono run: logs in logs/\w+", note)
    assert sorted(rest) == err
    found = logs(tmp_path / "logs")
    if "attempt_0/filtered_stdout.log" in found:
        lines = found["attempt_0/filtered_stdout.log"].splitlines(keepends=True)
        found["attempt_0/filtered_stdout.log"] = b"".join(sorted(lines))
    assert found == files


def test_each_attempt_has_its_own_files(run, tmp_path):
    (tmp_path / "again.py").write_text(
        "import os, sys\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('attempt', attempt)\n"
        "sys.exit(attempt == '0')\n"
    )
    code, _, err = run("-r", 1, "--max-restarts", 1, "--log-dir", "logs", "again.py")
    assert code == 0, err
    assert logs(tmp_path / "logs") == {
        f"attempt_{i}/0/stdout.log": b"attempt %d\n" % i for i in range(2)
    }


def test_redirected_traceback_is_in_the_report_all_the_same(run, tmp_path):
    (tmp_path / "fail.py").write_text("raise ValueError('boom')")
    code, _, err = run("-r", 3, "--log-dir", "logs", "fail.py")
    assert code == 1
    assert err.splitlines()[-1] == "ValueError: boom"
    assert logs(tmp_path / "logs")["attempt_0/0/stderr.log"].endswith(b"ValueError: boom\n")


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        (["--prefix", "{host}:{rank}> "], {}, "{host}:0> "),
        (["-t", "3", "--role", "tr"], {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "{${role_name}"
          " ${local_rank}/${rank}} "}, "{{tr 0/0}} "),
        ([], {"UNISONO_PREFIX": "<{local_rank}> "}, "<0> "),
    ],
)  # fmt: skip
def test_prefix(run, arguments, env, expected):
    code, out, _ = run(*arguments, "talk.py", **env)
    prefix = expected.format(host=os.uname().nodename)
    assert (code, out) == (0, f"{prefix}equal\n{prefix}out 0\n")


def test_flags_about_workers_that_are_not_there(run):
    flags = {"--local-ranks-filter": "0,2-3", "--tee": "0:0,3:1", "--redirects": "3:1,2:2"}
    words = [word for flag in flags.items() for word in flag]
    code, _, err = run("-n2", "--log-dir=logs", *words, "talk.py")
    assert code == 0
    for flag, ranks in zip(flags, ("2-3", "3", "2-3"), strict=True):
        assert f"unisono run: {flag} names local rank {ranks}, but this node has 0-1 only\n" in err


def test_log_folder_that_cannot_be_made(run):
    code, _, err = run("-t", 3, "--log-dir", "talk.py", "talk.py")
    assert code == 1
    assert "unisono: error: cannot make a folder for logs in 'talk.py'" in err


def test_dev_null_as_log_folder_means_no_files(run):
    code, out, err = run("-t", 3, "--log-dir", "/dev/null", "talk.py")
    assert (code, out, err) == (0, "[rank 0] equal\n[rank 0] out 0\n", "[rank 0] err 0\n")


def test_folded_lines(run):
    code, out, _ = run("-n", 2, "--fold", "always", "talk.py")
    assert code == 0
    # The ranks may start so far apart that their equal lines are shown one by one.
    lines = sorted(out.splitlines())
    assert {line for line in lines if "out" in line} == {"[rank 0] out 0", "[rank 1] out 1"}
    equal = {line for line in lines if "equal" in line}
    assert equal in ({"[rank 0-1] equal ×2"}, {"[rank 0] equal", "[rank 1] equal"})  # noqa: RUF001


def on_a_terminal(launches, *words, script, **variables):
    """Run `unisono run` on a terminal; returns exit code and what was shown."""
    return launches.run(*words, script=script, terminal=True, **{"TERM": "xterm"} | variables)[:2]


EQUAL = """
import os
if os.environ["RANK"] == "2":
    open("late").read(1)
print("equal")
print("equal")
print("equal")
"""


def equal_lines(shown):
    """Return how many lines of how many ranks a terminal shows, however they were folded."""
    total = 0
    # The prefix of one rank has a colour.
    for ranks in re.findall(r"\[rank ([\d,-]+)\] (?:\x1b\[0m)?equal", shown):
        parts = [part.split("-") for part in ranks.split(",")]
        total += sum(int(part[-1]) - int(part[0]) + 1 for part in parts)
    return total


def test_terminal_shows_a_status_line_and_each_line_once(launches, fifo):
    late = fifo("late")
    launch = launches.start("-n", 3, script=EQUAL, terminal=True, TERM="xterm")
    launch.until(lambda: equal_lines(launch.out) == 6, "lines of ranks 0 and 1")
    os.write(late, b"x")
    code, shown, _ = launch.finish()
    assert code == 0
    assert "of 3 ranks up | 0 restarts | 0:0" in shown
    assert equal_lines(shown) == 9


ONE_DIES = """
import os, signal
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    with open("again", "w") as again:
        again.write(os.environ["RANK"])
elif os.environ["RANK"] == "0":
    print("here", flush=True)
    open("die").read(1)
    os._exit(3)
else:
    signal.pause()
"""


@pytest.fixture
def fifo(tmp_path):
    """Return a function that makes a FIFO and opens it."""
    opened = []

    def make(name):
        os.mkfifo(tmp_path / name)
        opened.append(os.open(tmp_path / name, os.O_RDWR))
        return opened[-1]

    yield make
    for fd in opened:
        os.close(fd)


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_that_stands_still_does_not_hold_the_launcher(launches, fifo, term):
    die, again = fifo("die"), fifo("again")
    flags = ("-n", 2, "--max-restarts=1", "--prefix=")
    launch = launches.start(*flags, script=ONE_DIES, terminal=True, TERM=term)
    launch.until(lambda: "here" in launch.out, "line of rank 0")
    os.write(launch.screen, CTRL_S)
    os.write(die, b"x")
    ready, _, _ = select.select([again], [], [], LIMIT_S)
    os.write(launch.screen, CTRL_Q)
    assert ready, "the other worker was not ended, and none was restarted"
    code, shown, _ = launch.finish()
    assert code == 0, shown
    assert "restart 1 of 1" in shown


STUCK = """
import os, select, signal
os.set_blocking(2, False)
poll = select.poll()
poll.register(2, select.POLLOUT)
while poll.poll(300):
    os.write(2, b"x" * 1023 + b"\\n")
with open("stuck", "w") as stuck:
    stuck.write("x")
signal.pause()
"""


def test_a_signal_ends_a_launch_whose_output_nobody_reads(launches, fifo):
    stuck = fifo("stuck")
    with open(os.devnull, "w") as nothing:
        launch = launches.start("--grace=0.2", script=STUCK, stdout=nothing.fileno())
    assert select.select([stuck], [], [], LIMIT_S)[0]
    launch.send_signal(signal.SIGTERM)
    assert launch.wait() == 128 + signal.SIGTERM


def test_a_reader_that_leaves_does_not_change_the_exit_code(launches):
    receiver, sender = os.pipe()
    os.close(receiver)
    with open(sender, "wb") as nobody:
        options = {"stdout": nobody.fileno(), "PYTHONUNBUFFERED": ""}
        code, _, err = launches.run("-n", 2, script=TALK, **options)
    assert (code, sorted(err.splitlines())) == (0, ["err 0", "err 1"])


ALONE = """
import os, select
if os.environ["RANK"] == "1":
    open("end").read()
else:
    again = os.open("again", os.O_RDWR)
    print("only one", flush=True)
    select.select([again], [], [], 200)
    print("only one again", flush=True)
    # Long enough that the launcher no longer waits for the other rank to say the same.
    select.select([], [], [], 0.5)
    for _ in range(5000):
        print("y" * 100)
    open("end", "w").close()
"""


def test_a_reader_that_leaves_does_not_end_the_copying_of_folded_lines(launches, fifo, tmp_path):
    os.mkfifo(tmp_path / "end")
    again = fifo("again")
    launch = launches.start("-n", 2, "--fold", "always", script=ALONE, PYTHONUNBUFFERED="")
    assert launch.lines(1)[0].endswith("only one")
    launch.close_output()
    os.write(again, b"x")
    assert launch.finish()[::2] == (0, "")


FLOOD = """
import os, select, sys
if os.environ["RANK"] == "0":
    os.set_blocking(1, False)
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    while poll.poll(300):
        os.write(1, b"x" * 1023 + b"\\n")
    print("nobody takes more", file=sys.stderr, flush=True)
"""


def test_standard_error_does_not_wait_for_a_reader_of_standard_output(launches):
    launch = launches.start("-n", 2, script=FLOOD)
    launch.told("nobody takes more\n")
    code, out, err = launch.finish()
    assert (code, err) == (0, "nobody takes more\n")
    assert set(out.splitlines()) == {"x" * 1023}


PROGRESS = """
import os, sys
assert sys.stdout.isatty() and not sys.stderr.isatty()
if os.environ["RANK"] == "0":
    for i in range(100):
        print(f"\\rbar {i} ", end="")
    print()
    print("width", os.get_terminal_size().columns)
print("équal" * 2000)
"""


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_script_shows_its_progress_bar_on_a_terminal(launches, term):
    code, shown = on_a_terminal(launches, "-n", 2, script=PROGRESS, TERM=term)
    assert code == 0, shown
    assert "bar 99" in shown
    assert "width 88" in shown  # room for the prefix
    # What is longer than the kernel keeps for a terminal arrives whole.
    assert "équal" * 2000 in re.sub(r"[\r\n]", "", shown)


def test_dumb_terminal_has_no_status_line(launches):
    _, shown = on_a_terminal(launches, "-n", 2, script="print('x')", UNISONO_FOLD="never")
    assert "ranks up" not in shown  # the workers have the terminal to themselves
    # A worker writes its line and the end of the line separately: "xx", then two ends, is right.
    assert "".join(shown.split()) == "xx"


# ---- several programs ----------------------------------------------------------------------


def test_one_world_of_different_programs(run, tmp_path):
    show = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv)"
    (tmp_path / "a.py").write_text(show)
    (tmp_path / "b.py").write_text(show)
    words = ["-n", 2, "a.py", "--x", ":", "y", ":", "-n", 1, "b.py", "${local_rank}"]
    words += [":", "--nproc-per-node=1", "--no-python", "sh", "-c", "echo $RANK $WORLD_SIZE"]
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "0 4 ['a.py', '--x', ':', 'y']",
        "1 4 ['a.py', '--x', ':', 'y']",
        "2 4 ['b.py', '2']",
        "3 4",
    ]


def test_after_two_dashes_all_is_the_scripts(run, tmp_path):
    (tmp_path / "a.py").write_text("import sys; print(sys.argv[1:])")
    code, out, _ = run("--", "a.py", ":", "-n", "2", "b.py")
    assert (code, out) == (0, "[':', '-n', '2', 'b.py']\n")


# ---- plan and binding ----------------------------------------------------------------------


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.py").touch()
    (tmp_path / "trap.py").write_text("open('started', 'w')")
    assert main(shlex.split("run -n 2 --dry-run trap.py 'a b' : -n 1 talk.py")) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert not (tmp_path / "started").exists()
    host = os.uname().nodename
    for rank in range(3):
        assert f"rank {rank}: local rank {rank} on {host}" in out
    assert out.count("trap.py 'a b'") == 2
    environments = [line.split()[1:] for line in out.splitlines() if line.startswith("  env")]
    assert [env[0] for env in environments] == ["RANK=0", "RANK=1", "RANK=2"]
    assert all("WORLD_SIZE=3" in env for env in environments)
    where = "--nnodes 2 --master-addr node0 --master-port 1234 --node-rank 1"
    assert main(f"run -n 2 --dry-run {where} talk.py".split()) == 0
    out, _ = capsys.readouterr()
    assert "nodes     2, meeting at node0:1234" in out
    assert "rank 2: local rank 0" in out
    assert "WORLD_SIZE=4" in out


SHOW_CPUS = """
import json, os
rank, threads = os.environ["RANK"], os.environ.get("OMP_NUM_THREADS")
print(json.dumps([rank, sorted(os.sched_getaffinity(0)), threads]))
"""


def test_workers_are_bound(launches):
    nprocs = min(2, len(os.sched_getaffinity(0)))
    code, out, err = launches.run("-n", nprocs, "--bind", "auto", script=SHOW_CPUS)
    assert code == 0
    shown = sorted(map(json.loads, out.splitlines()))
    seen = [cpu for _, cpus, _ in shown for cpu in cpus]
    assert re.match(r"unisono run: bind: (core \(local rank:CPUs 0:|none )", err)
    if "bind: core" in err:
        assert sorted(seen) == sorted(os.sched_getaffinity(0))
        assert all(1 <= int(threads) <= len(cpus) for _, cpus, threads in shown)


def test_launchers_own_cpus_are_the_limit(launches):
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    os.sched_setaffinity(0, {one})
    try:
        launch = launches.start("-n", 1, "--bind", "numa", script=SHOW_CPUS, program=RUN)
    finally:
        os.sched_setaffinity(0, allowed)
    code, out, err = launch.finish()
    assert (code, json.loads(out)) == (0, ["0", [one], "1"])
    assert err == f"unisono run: bind: numa (local rank:CPUs 0:{one})\n" or "cgroup limit" in err
