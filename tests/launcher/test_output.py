"""`unisono run`'s output, programs, plan and binding, with real processes."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import unisono.launcher

SRC = str(Path(unisono.launcher.__file__).parents[2])
LIMIT_S = 200.0
CTRL_S, CTRL_Q = b"\x13", b"\x11"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="written for Linux")

TALK = """
import os, sys
rank = os.environ["RANK"]
print("equal")
print("out", rank)
print("err", rank, file=sys.stderr)
"""
OUT = [b"equal\nout 0\n", b"equal\nout 1\n"]
ERR = [b"err 0\n", b"err 1\n"]


def environment(**extra):
    drop = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    env = {k: v for k, v in os.environ.items() if k not in drop}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [SRC, env.get("PYTHONPATH")]))
    return env | extra


def command(*arguments):
    return [sys.executable, "-W", "error", "-m", "unisono", "run", *map(str, arguments)]


@pytest.fixture
def run(tmp_path):
    """Run `unisono run` in a folder with talk.py; returns exit code, stdout and stderr."""
    (tmp_path / "talk.py").write_text(TALK)

    def finish(*arguments, **env):
        done = subprocess.run(
            command(*arguments),
            cwd=tmp_path,
            env=environment(TMPDIR=str(tmp_path), **env),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
        return done.returncode, done.stdout, done.stderr

    return finish


def files(folder):
    """Return the logs of the only launch, by their path below its folder."""
    [launch] = folder.iterdir()
    return {
        path.relative_to(launch).as_posix(): path.read_bytes()
        for path in launch.rglob("*")
        if path.is_file()
    }


def both(stream, texts):
    return {f"attempt_0/{rank}/{stream}.log": text for rank, text in enumerate(texts)}


def test_tee_writes_files_and_shows_prefixed_lines(run, tmp_path):
    code, out, err = run("-n", 2, "--tee", 3, "--log-dir", "logs", "--rdzv-id", "a/b", "talk.py")
    assert code == 0
    assert files(tmp_path / "logs") == both("stdout", OUT) | both("stderr", ERR)
    assert sorted(out.splitlines()) == [
        f"[rank {r}] {text}" for r in range(2) for text in ("equal", f"out {r}")
    ]
    note, *rest = err.splitlines()
    assert re.fullmatch(r"unisono run: logs in logs/\w+", note)
    assert sorted(rest) == ["[rank 0] err 0", "[rank 1] err 1"]


def test_redirected_streams_go_to_files_only(run, tmp_path):
    code, out, err = run("-n", 2, "-r", "0:3,1:1", "--log-dir", "logs", "talk.py")
    assert (code, out) == (0, "")
    expected = both("stdout", OUT) | {"attempt_0/0/stderr.log": ERR[0]}
    assert files(tmp_path / "logs") == expected
    assert err.splitlines()[1:] == ["err 1"]


def test_log_dir_alone_writes_files_beside_the_usual_output(run, tmp_path):
    code, out, _ = run("-n", 2, "--log-dir", "logs", "talk.py")
    assert code == 0
    assert files(tmp_path / "logs") == both("stdout", OUT) | both("stderr", ERR)
    assert sorted(out.splitlines()) == ["equal", "equal", "out 0", "out 1"]


def test_each_attempt_has_its_own_files(run, tmp_path):
    (tmp_path / "again.py").write_text(
        "import os, sys\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('attempt', attempt)\n"
        "sys.exit(attempt == '0')\n"
    )
    code, _, err = run("-r", 1, "--max-restarts", 1, "--log-dir", "logs", "again.py")
    assert code == 0, err
    assert files(tmp_path / "logs") == {
        f"attempt_{i}/0/stdout.log": b"attempt %d\n" % i for i in range(2)
    }


def test_redirected_traceback_is_in_the_report_all_the_same(run, tmp_path):
    (tmp_path / "fail.py").write_text("raise ValueError('boom')")
    code, _, err = run("-r", 3, "--log-dir", "logs", "fail.py")
    assert code == 1
    assert err.splitlines()[-1] == "ValueError: boom"
    assert files(tmp_path / "logs")["attempt_0/0/stderr.log"].endswith(b"ValueError: boom\n")


def test_filters(run, tmp_path):
    arguments = ("--local-ranks-filter", 1, "--duplicate-stdout-filters", "a,,qual,out", "talk.py")
    code, out, err = run("-n", 2, "--log-dir", "logs", "-r", 0, *arguments)
    assert (code, out) == (0, "equal\nout 1\n")
    assert err.splitlines()[1:] == ["err 1"]
    [(name, text)] = files(tmp_path / "logs").items()
    assert name == "attempt_0/filtered_stdout.log"
    assert sorted(text.splitlines()) == [b"[rank 0] out 0", b"[rank 1] out 1"]


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


@pytest.mark.parametrize(
    ("flag", "value"), [("--local-ranks-filter", "0,2-3"), ("--tee", "0:0,3:1"), ("-r", "3:1,2:2")]
)
def test_flag_about_a_worker_that_is_not_there(run, flag, value):
    code, _, err = run("-n2", "--log-dir=logs", flag, value, "talk.py")
    assert code == 0
    name = "--redirects" if flag == "-r" else flag
    ranks = "3" if flag == "--tee" else "2-3"
    assert f"unisono run: {name} names local rank {ranks}, but this node has 0-1 only\n" in err


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


def on_a_terminal(*arguments, cwd, once=("", lambda terminal: None), **env):
    """Run `unisono run` on a terminal of its own; returns exit code and what was shown.

    Args:
        once: A text, and what to call when it has been shown.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        termios.tcsetwinsize(1, (30, 100))
        os.execvpe(sys.executable, command(*arguments), environment(**({"TERM": "xterm"} | env)))
    shown = b""
    with open(terminal, "rb", buffering=0) as screen:
        # Linux reports the last close of the other side as an error.
        try:
            while data := screen.read(65536):
                shown += data
                if once[0] and once[0] in shown.decode(errors="replace"):
                    once[1](terminal)
                    once = ("", None)
        except OSError:
            pass
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), shown.decode()


def test_terminal_shows_a_status_line_and_each_line_once(tmp_path):
    (tmp_path / "s.py").write_text("print('equal')\n" * 3)
    code, shown = on_a_terminal("-n", 3, "s.py", cwd=tmp_path)
    assert code == 0
    assert "of 3 ranks up | 0 restarts | 0:0" in shown
    # However the lines were folded, each rank's are all there.
    total = 0
    for ranks in re.findall(r"\[rank ([\d,-]+)\] equal", shown):
        parts = [part.split("-") for part in ranks.split(",")]
        total += sum(int(part[-1]) - int(part[0]) + 1 for part in parts)
    assert total == 9


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


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_that_stands_still_does_not_hold_the_launcher(tmp_path, term):
    (tmp_path / "s.py").write_text(ONE_DIES)
    fifos = {}
    for name in ("die", "again"):
        os.mkfifo(tmp_path / name)
        fifos[name] = os.open(tmp_path / name, os.O_RDWR)

    def stand_still(terminal):
        os.write(terminal, CTRL_S)
        os.write(fifos["die"], b"x")
        ready, _, _ = select.select([fifos["again"]], [], [], LIMIT_S)
        os.write(terminal, CTRL_Q)
        assert ready, "the other worker was not ended, and none was restarted"

    flags = ("-n", 2, "--max-restarts=1", "--prefix=")
    try:
        code, shown = on_a_terminal(
            *flags, "s.py", cwd=tmp_path, once=("here", stand_still), TERM=term
        )
    finally:
        for fd in fifos.values():
            os.close(fd)
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


def started(folder, *arguments, stdout=subprocess.PIPE):
    """Return a launch whose workers write when their buffers are full."""
    return subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env=environment(PYTHONUNBUFFERED=""),
        stdout=stdout,
        stderr=subprocess.PIPE,
    )


def test_a_signal_ends_a_launch_whose_output_nobody_reads(tmp_path):
    (tmp_path / "s.py").write_text(STUCK)
    os.mkfifo(tmp_path / "stuck")
    stuck = os.open(tmp_path / "stuck", os.O_RDWR)
    with started(tmp_path, "--grace=0.2", "s.py", stdout=subprocess.DEVNULL) as process:
        try:
            assert select.select([stuck], [], [], LIMIT_S)[0]
            process.terminate()
            assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
        finally:
            os.close(stuck)
            process.kill()


def test_a_reader_that_leaves_does_not_change_the_exit_code(tmp_path):
    (tmp_path / "talk.py").write_text(TALK)
    receiver, sender = os.pipe()
    os.close(receiver)
    with open(sender, "wb") as nobody:
        done = subprocess.run(
            command("-n", 2, "talk.py"),
            cwd=tmp_path,
            env=environment(PYTHONUNBUFFERED=""),
            stdout=nobody,
            stderr=subprocess.PIPE,
            timeout=LIMIT_S,
        )
    assert (done.returncode, sorted(done.stderr.splitlines())) == (0, [b"err 0", b"err 1"])


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
    select.select([], [], [], 1.0)
    for _ in range(5000):
        print("y" * 100)
    open("end", "w").close()
"""


def test_a_reader_that_leaves_does_not_end_the_copying_of_folded_lines(tmp_path):
    (tmp_path / "s.py").write_text(ALONE)
    os.mkfifo(tmp_path / "end")
    os.mkfifo(tmp_path / "again")
    again = os.open(tmp_path / "again", os.O_RDWR)
    with started(tmp_path, "-n", 2, "--fold", "always", "s.py") as process:
        try:
            assert process.stdout.readline().endswith(b"only one\n")
            process.stdout.close()
            os.write(again, b"x")
            _, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
            os.close(again)
    assert (process.returncode, err) == (0, b"")


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


def test_standard_error_does_not_wait_for_a_reader_of_standard_output(tmp_path):
    (tmp_path / "s.py").write_text(FLOOD)
    with subprocess.Popen(
        command("-n", 2, "s.py"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            ready, _, _ = select.select([process.stderr], [], [], LIMIT_S)
            assert ready, "standard error stands still, too"
            assert process.stderr.readline() == b"nobody takes more\n"
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, b"")
    assert set(out.splitlines()) == {b"x" * 1023}


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
def test_a_script_shows_its_progress_bar_on_a_terminal(tmp_path, term):
    (tmp_path / "s.py").write_text(PROGRESS)
    code, shown = on_a_terminal("-n", 2, "s.py", cwd=tmp_path, TERM=term)
    assert code == 0, shown
    assert "bar 99" in shown
    assert "width 88" in shown  # room for the prefix
    # What is longer than the kernel keeps for a terminal arrives whole.
    assert "équal" * 2000 in re.sub(r"[\r\n]", "", shown)


def test_redirected_output_is_no_terminal_for_the_workers(tmp_path):
    (tmp_path / "s.py").write_text("import sys; print(sys.stdout.isatty())")
    code, shown = on_a_terminal("-n", 2, "--tee", 1, "--log-dir", "l", "s.py", cwd=tmp_path)
    assert code == 0
    assert "False" in shown
    assert "True" not in shown


def test_dumb_terminal_has_no_status_line(tmp_path):
    (tmp_path / "s.py").write_text("print('x')")
    _, shown = on_a_terminal("-n", 2, "s.py", cwd=tmp_path, UNISONO_FOLD="never")
    assert "ranks up" not in shown  # the workers have the terminal to themselves
    assert shown.split() == ["x", "x"]


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


@pytest.mark.parametrize(
    ("following", "message"),
    [
        (["-n", "1"], "no script given"),
        (["-n", "0", "talk.py"], "must be a number of at least 1"),
        (["-n", "1", "absent.py"], "script not found: absent.py"),
    ],
)
def test_usage_errors_of_a_later_program(run, following, message):
    code, out, err = run("talk.py", ":", *following)
    assert (code, out) == (2, "")
    usage, last = err.splitlines()
    assert usage == ("usage: unisono run [options] script ... : -n N [-m | --no-python] script ...")
    assert last.startswith("unisono run (program 2): error: ")
    assert message in last


# ---- plan and binding ----------------------------------------------------------------------


def test_dry_run_prints_the_plan_and_starts_nothing(run, tmp_path):
    (tmp_path / "trap.py").write_text("open('started', 'w')")
    code, out, err = run("-n", 2, "--dry-run", "trap.py", "a b", ":", "-n", 1, "talk.py")
    assert (code, err) == (0, "")
    assert not (tmp_path / "started").exists()
    host = os.uname().nodename
    for rank in range(3):
        assert f"rank {rank}: local rank {rank} on {host}" in out
    assert out.count("trap.py 'a b'") == 2
    environments = [line.split()[1:] for line in out.splitlines() if line.startswith("  env")]
    assert [env[0] for env in environments] == ["RANK=0", "RANK=1", "RANK=2"]
    assert all("WORLD_SIZE=3" in env for env in environments)


def test_dry_run_of_two_nodes(run):
    where = ("--nnodes", 2, "--master-addr", "node0", "--master-port", 1234)
    code, out, _ = run("-n", 2, "--dry-run", *where, "--node-rank", 1, "talk.py")
    assert code == 0
    assert "nodes     2, meeting at node0:1234" in out
    assert "rank 2: local rank 0" in out
    assert "WORLD_SIZE=4" in out


SHOW_CPUS = """
import json, os
rank, threads = os.environ["RANK"], os.environ.get("OMP_NUM_THREADS")
print(json.dumps([rank, sorted(os.sched_getaffinity(0)), threads]))
"""


def test_workers_are_bound(run, tmp_path):
    (tmp_path / "cpus.py").write_text(SHOW_CPUS)
    nprocs = min(2, len(os.sched_getaffinity(0)))
    code, out, err = run("-n", nprocs, "--bind", "auto", "cpus.py")
    assert code == 0
    shown = sorted(map(json.loads, out.splitlines()))
    seen = [cpu for _, cpus, _ in shown for cpu in cpus]
    assert re.match(r"unisono run: bind: (core \(local rank:CPUs 0:|none )", err)
    if "bind: core" in err:
        assert sorted(seen) == sorted(os.sched_getaffinity(0))
        assert all(1 <= int(threads) <= len(cpus) for _, cpus, threads in shown)


def test_launchers_own_cpus_are_the_limit(run, tmp_path):
    (tmp_path / "cpus.py").write_text(SHOW_CPUS)
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    os.sched_setaffinity(0, {one})
    try:
        code, out, err = run("-n", 1, "--bind", "numa", "cpus.py")
    finally:
        os.sched_setaffinity(0, allowed)
    assert (code, json.loads(out)) == (0, ["0", [one], "1"])
    assert err == f"unisono run: bind: numa (local rank:CPUs 0:{one})\n" or "cgroup limit" in err
