"""`unisono run` with real processes: environment, exit codes, reports, and what is left."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import unisono.launcher
from unisono.cli.main import main

SRC = str(Path(unisono.launcher.__file__).parents[2])
LIMIT_S = 200.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def environment(**extra):
    """The environment of a user who is not inside a launch."""
    names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in names}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [SRC, env.get("PYTHONPATH")]))
    return env | extra


class Launcher:
    """A running `unisono run`, and the processes whose numbers its workers print."""

    def __init__(self, *arguments, cwd, env=None, program=None, **options):
        self.popen = subprocess.Popen(
            program
            or [sys.executable, "-W", "error", "-m", "unisono", "run", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=cwd,
            env=env or environment(),
            # pytest may run as a shell's background job, which ignores SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            **options,
        )
        self.handles = []

    def follow(self, count):
        """Wait until the workers have printed `count` process numbers."""
        deadline = time.monotonic() + LIMIT_S
        text = b""
        while text.count(b"\n") < count:
            ready, _, _ = select.select([self.popen.stdout], [], [], deadline - time.monotonic())
            assert ready, f"only {text!r} after {LIMIT_S} s"
            data = os.read(self.popen.stdout.fileno(), 4096)
            assert data, self.popen.stderr.read().decode()
            text += data
        self.handles = [os.pidfd_open(int(line)) for line in text.split()]

    def finish(self):
        out, err = self.popen.communicate(timeout=LIMIT_S)
        return self.popen.returncode, out.decode(), err.decode()

    def survivors(self, limit_s):
        """How many of the followed processes are still there after `limit_s`."""
        deadline = time.monotonic() + limit_s
        waiting = set(self.handles)
        while waiting and (left := deadline - time.monotonic()) > 0:
            waiting -= set(select.select(list(waiting), [], [], left)[0])
        return len(waiting)

    def close(self):
        if self.popen.poll() is None:
            self.popen.kill()
        for handle in self.handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        self.popen.communicate(timeout=LIMIT_S)


@pytest.fixture
def launch(tmp_path):
    """Start `unisono run` on a script given as text; returns a Launcher."""
    launchers = []
    os.mkfifo(tmp_path / "fifo")

    def start(text, *options, args=(), nprocs=2, env=None):
        script = tmp_path / "script.py"
        script.write_text(text)
        flags = ("--nproc-per-node", nprocs, *options)
        launcher = Launcher(*flags, script, *args, cwd=tmp_path, env=env)
        launchers.append(launcher)
        return launcher

    yield start
    for launcher in launchers:
        launcher.close()


@pytest.fixture
def run(launch):
    """Run a script to its end; returns exit code, stdout and stderr."""
    return lambda *args, **kwargs: launch(*args, **kwargs).finish()


SHOW_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def test_each_worker_knows_its_place(run):
    code, out, err = run(SHOW_ENVIRONMENT, "--standalone", nprocs=3)
    assert (code, err) == (0, "")
    environments = sorted(map(json.loads, out.splitlines()), key=lambda env: int(env["RANK"]))
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


@pytest.mark.parametrize(
    ("nprocs", "given", "expected"), [(1, None, None), (2, None, "1"), (2, "5", "5")]
)
def test_thread_count_is_limited_only_if_nobody_set_it(run, nprocs, given, expected):
    env = environment() if given is None else environment(OMP_NUM_THREADS=given)
    _, out, _ = run(SHOW_ENVIRONMENT, nprocs=nprocs, env=env)
    seen = [json.loads(line).get("OMP_NUM_THREADS") for line in out.splitlines()]
    assert seen == [expected] * nprocs


def test_arguments_reach_the_script_unchanged(run):
    args = ["--", "--nproc-per-node", "9", "-m", "--grace", "", "a b", "--", "x"]
    code, out, _ = run("import sys; print(sys.argv[1:])", args=args, nprocs=1)
    assert (code, out) == (0, f"{args}\n")


def finish(*arguments, cwd):
    launcher = Launcher(*arguments, cwd=cwd)
    try:
        return launcher.finish()
    finally:
        launcher.close()


def test_underscores_in_flags(tmp_path):
    (tmp_path / "s.py").write_text("print('x')")
    assert finish("--nproc_per_node=3", "s.py", cwd=tmp_path) == (0, "x\n" * 3, "")


@pytest.mark.parametrize(
    ("closed", "seen"), [("<&-", "x\n"), (">&-", ""), ("2>&-", "x\n"), ("<&- >&- 2>&-", "")]
)
@pytest.mark.parametrize("nprocs", [1, 2])
def test_streams_that_are_closed(tmp_path, closed, seen, nprocs):
    (tmp_path / "s.py").write_text("import os; open('seen' + os.environ['RANK'], 'w'); print('x')")
    words = f"exec {sys.executable} -m unisono run -n {nprocs} s.py {closed}"
    launcher = Launcher(program=["sh", "-c", words], cwd=tmp_path)
    try:
        assert launcher.finish() == (0, seen * nprocs, "")
    finally:
        launcher.close()
    assert len(list(tmp_path.glob("seen?"))) == nprocs


@pytest.mark.parametrize("unread", ["2>/dev/full", "2>&1 | true"], ids=["full", "left"])
def test_launch_goes_on_when_nobody_can_read_what_is_told(tmp_path, unread):
    script = "import os; open('seen' + os.environ['RANK'], 'a').write('x'); raise SystemExit(7)"
    (tmp_path / "s.py").write_text(script)
    run = f"{sys.executable} -m unisono run --max-restarts=2 s.py"
    words = ["sh", "-c", f"{{ {run}; echo $? >code; }} {unread}"]
    subprocess.run(words, cwd=tmp_path, env=environment(), check=False, timeout=LIMIT_S)
    assert (tmp_path / "seen0").read_text() == "xxx"
    assert (tmp_path / "code").read_text() == "7\n"


def test_module(tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__main__.py").write_text("import sys; print(__package__, sys.argv[1:])")
    assert finish("-m", "pack", "--flag", cwd=tmp_path) == (0, "pack ['--flag']\n", "")


def test_any_program(tmp_path):
    code, out, _ = finish("--no-python", "sh", "-c", "echo rank $RANK; exit 3", cwd=tmp_path)
    assert (code, out) == (3, "rank 0\n")


def test_program_that_cannot_be_started(tmp_path):
    code, _, err = finish("--no-python", "--nproc-per-node", 2, "./absent", cwd=tmp_path)
    assert code == 1
    assert "cannot start rank 0 (./absent)" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script given"),
        (["absent.py"], "script not found: absent.py"),
        (
            ["--nproc-per-node", "0", "s.py"],
            "must be a number of at least 1, cpu, gpu or auto; got '0'",
        ),
        (
            ["--nproc-per-node", "two", "s.py"],
            "must be a number of at least 1, cpu, gpu or auto; got 'two'",
        ),
        (["--grace", "-1", "s.py"], "must be a number of seconds >= 0, got '-1'"),
        (["--unknown", "s.py"], "unrecognized arguments: --unknown"),
        (["--nproc-per-nde", "2", "s.py"], "(is --nproc-per-node meant?)"),
        (["--nprocs", "4", "s.py"], "--nprocs (is --nproc-per-node meant?)"),
        (["--epoch", "4", "s.py"], "unrecognized arguments: --epoch"),
        (["-m", "--no-python", "s.py"], "not allowed with argument"),
    ],
)
def test_usage_errors(tmp_path, arguments, message):
    code, out, err = finish(*arguments, cwd=tmp_path)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]


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


def on_rank_1(statement):
    """A script in which rank 1 fails, and the others would wait for ever."""
    return (
        f"import os, signal, sys\nif os.environ['RANK'] == '1':\n    {statement}\nsignal.pause()\n"
    )


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
def test_first_failure_ends_the_launch(run, statement, code, how):
    returned, _, err = run(on_rank_1(statement), nprocs=3)
    assert returned == code
    host = re.escape(os.uname().nodename)
    who = rf"unisono run: first failure: rank 1 \(pid \d+, host {host}\) {how}"
    assert re.search(who, err)
    assert "unisono run: ranks 0, 2 stopped by the launcher\n" in err


def test_real_traceback_is_printed_last(run, tmp_path):
    script = """
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
    _, _, err = run(script, nprocs=3)
    assert "only mentioned by Python" in err
    report = err[err.index("unisono run: first failure") :].splitlines()
    assert report[1:] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path / "script.py"}", line 9, in <module>',
        '    {}["k"]',
        "    ~~^^^^^",
        "KeyError: 'k'",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        f'  File "{tmp_path / "script.py"}", line 11, in <module>',
        '    raise ValueError("two\\nlines") from error',
        "ValueError: two",
        "lines",
    ]


def test_script_that_does_not_compile(run, tmp_path):
    code, _, err = run("def f(:\n", nprocs=2)
    assert code == 1
    report = err[err.index("unisono run: first failure") :].splitlines()
    assert report[1] == f'  File "{tmp_path / "script.py"}", line 1'
    assert report[-1] == "SyntaxError: invalid syntax"


def test_original_failure_beats_an_earlier_consequence(run):
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
    raise PeerLostError("rank 1 is gone")
with open("fifo") as fifo:
    select.select([os.pidfd_open(int(fifo.read()))], [], [])
raise ValueError("the cause")
"""
    code, _, err = run(script, nprocs=3)
    assert code == 1
    lines = err.splitlines()
    assert lines[-1] == "ValueError: the cause"
    [consequence] = [line for line in lines if line.startswith("unisono run: rank 0")]
    assert consequence.endswith("exited with code 1: PeerLostError: rank 1 is gone")


@pytest.mark.parametrize("nprocs", [1, 2])
def test_consequences_alone_are_a_failure(run, nprocs):
    # No connection between ranks is enough for that: each says that the other was lost.
    script = "class PeerLostError(Exception): pass\nraise PeerLostError('the other')"
    code, _, err = run(script, "--max-restarts=1", nprocs=nprocs)
    assert code == 1
    assert err.count("restart 1 of 1") == 1
    assert err.splitlines()[-1] == "PeerLostError: the other"
    told = re.findall(r"^unisono run: (?:first failure: )?rank \d \((pid \d+)", err, re.MULTILINE)
    assert len(set(told)) == len(told), "a failure is told once"


def test_other_workers_may_clean_up(run):
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
    code, out, _ = run(script, "--grace", LIMIT_S)
    assert (code, out) == (9, "cleaned up 1\n")


DEAF = """
import os, signal, sys, threading
for name in ("SIGTERM", "SIGINT", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
print(os.getpid())
threading.Event().wait()
"""


@pytest.mark.parametrize("fold", ["never", "always"])
@pytest.mark.parametrize("lines", [600, 6000], ids=["all-ended", "all-wait"])
def test_signal_while_nobody_reads_ends_the_launch(launch, lines, fold, tmp_path):
    # More than a pipe holds. The launcher would pass it on for a minute.
    script = f"open('fifo', 'w').write('x')\nfor _ in range({lines}): print('y' * 79)"
    fifo = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        launcher = launch(script, "--grace", 0.1, "--fold", fold)
        assert select.select([fifo], [], [], LIMIT_S)[0]
        launcher.popen.send_signal(signal.SIGTERM)
        assert launcher.popen.wait(LIMIT_S / 2) in (0, 128 + signal.SIGTERM)
    finally:
        os.close(fifo)


def test_worker_that_ignores_sigterm_is_killed_after_the_grace(launch):
    launcher = launch(DEAF, "--grace", 0.1)
    launcher.follow(2)
    signal.pidfd_send_signal(launcher.handles[0], signal.SIGKILL)
    assert launcher.finish()[0] == 137
    assert launcher.survivors(0.1) == 0


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


def test_failure_before_a_signal_is_reported_all_the_same(launch, tmp_path):
    launcher = launch(FAILS_WHILE_DEAF, "--grace", 3600, "--error-json", "error.json")
    # It prints when it is told to end, because of the failure.
    launcher.follow(1)
    launcher.popen.send_signal(signal.SIGINT)
    launcher.popen.send_signal(signal.SIGHUP)
    code, _, err = launcher.finish()
    assert code in (128 + signal.SIGINT, 128 + signal.SIGHUP)
    assert "unisono run: first failure: rank 1 " in err
    assert err.endswith("ValueError: the cause\n")
    [failure] = json.loads((tmp_path / "error.json").read_text())["failures"]
    assert (failure["rank"], failure["exception"]) == (1, "ValueError: the cause")


def test_second_ctrl_c_does_not_wait_for_the_grace(launch):
    launcher = launch(DEAF, "--grace", 3600)
    launcher.follow(2)
    # Signals of different kinds, because two equal ones may be merged into one.
    launcher.popen.send_signal(signal.SIGINT)
    launcher.popen.send_signal(signal.SIGTERM)
    assert launcher.finish()[0] in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert launcher.survivors(0.1) == 0


FAMILY = """
import os, signal, subprocess, sys
child = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
near = subprocess.Popen(child, stdin=subprocess.DEVNULL)
far = subprocess.Popen(child, stdin=subprocess.DEVNULL, start_new_session=True)
print(f"{os.getpid()}\\n{near.pid}\\n{far.pid}")
try:
    signal.pause()
except KeyboardInterrupt:
    sys.exit(0)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_launcher_ends_the_whole_family(launch, signum):
    launcher = launch(FAMILY)
    launcher.follow(6)
    launcher.popen.send_signal(signum)
    code, _, err = launcher.finish()
    assert code == 128 + signum
    assert err.splitlines()[-1] == f"unisono run: stopped by {signum.name}"
    assert launcher.survivors(0.1) == 0


def inner(launcher):
    """The process number of the one that has the workers."""
    main_thread = Path(f"/proc/{launcher.popen.pid}/task/{launcher.popen.pid}")
    [pid] = (main_thread / "children").read_text().split()
    return int(pid)


# What `env -i` and `setsid` leave of a process is its descent; `--fork` makes it lose its parent.
ESCAPED = """
import os, signal, subprocess, sys
child = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
subprocess.run(["env", "-i", "setsid", "--fork", sys.executable, "-S", "-c", child])
print(os.getpid(), flush=True)
signal.pause()
"""
WAYS = {
    "killed": lambda launcher: launcher.popen.kill(),
    "killed inside": lambda launcher: os.kill(inner(launcher), signal.SIGKILL),
    "stopped": lambda launcher: launcher.popen.terminate(),
    "a worker killed": lambda launcher: signal.pidfd_send_signal(launcher.handles[0], 9),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("script", ["FAMILY", "ESCAPED"])
def test_nothing_is_left_however_it_ends(launch, script, way):
    launcher = launch(globals()[script])
    launcher.follow(6 if script == "FAMILY" else 4)
    WAYS[way](launcher)
    assert launcher.survivors(2.0) == 0


def test_killed_process_group_leaves_nothing(tmp_path):
    # As timeout(1) and CI systems do it.
    (tmp_path / "script.py").write_text(ESCAPED)
    launcher = Launcher("--nproc-per-node=2", "script.py", cwd=tmp_path, process_group=0)
    try:
        launcher.follow(4)
        os.killpg(launcher.popen.pid, signal.SIGKILL)
        assert launcher.survivors(2.0) == 0
    finally:
        launcher.close()


def test_launcher_that_is_killed_inside_says_so(launch):
    launcher = launch(DEAF)
    launcher.follow(2)
    os.kill(inner(launcher), signal.SIGKILL)
    code, _, err = launcher.finish()
    assert code == 137
    assert err == "unisono run: the launcher was killed by SIGKILL, and all workers with it\n"


def test_strangers_are_spared(tmp_path):
    # A shell's background job becomes the launcher's child by `exec`.
    (tmp_path / "script.py").write_text(DEAF)
    words = [sys.executable, "-m", "unisono", "run", "--nproc-per-node=1", "script.py"]
    shell = f"sleep 3600 >/dev/null 2>&1 & echo $!; exec {' '.join(words)}"
    launcher = Launcher(program=["sh", "-c", shell], cwd=tmp_path)
    try:
        launcher.follow(2)
        stranger = launcher.handles[0]
        table = Path(f"/proc/{launcher.popen.pid}/task/{launcher.popen.pid}/children")
        [pid] = [p for p in table.read_text().split() if b"unisono" in cmdline(p)]
        os.kill(int(pid), signal.SIGKILL)
        assert launcher.popen.wait(LIMIT_S) == 137
        assert not select.select([stranger], [], [], 0)[0]
    finally:
        launcher.close()


def cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_orphans_that_end_do_not_pile_up(launch):
    script = """
import os, subprocess, sys
for _ in range(5):
    subprocess.run(["setsid", "--fork", "true"])
print(os.getpid())
sys.stdin.read()
"""
    launcher = launch(script, nprocs=1)
    launcher.follow(1)
    pid = inner(launcher)
    deadline = time.monotonic() + LIMIT_S
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while len(children.read_text().split()) > 1:
        assert time.monotonic() < deadline, children.read_text()
        time.sleep(0.01)
    assert launcher.finish()[0] == 0


def test_stop_and_go_on(launch):
    launcher = launch(DEAF)
    launcher.follow(2)
    both = [launcher.popen.pid, inner(launcher)]

    def states():
        return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in both]

    def wait_for(*expected):
        deadline = time.monotonic() + LIMIT_S
        while not all(state in expected for state in states()):
            assert time.monotonic() < deadline, states()
            time.sleep(0.01)

    launcher.popen.send_signal(signal.SIGTSTP)
    wait_for("T")
    launcher.popen.send_signal(signal.SIGCONT)
    wait_for("S", "R")


def test_killed_worker_takes_its_children_along(launch):
    launcher = launch(FAMILY)
    launcher.follow(6)
    signal.pidfd_send_signal(launcher.handles[0], signal.SIGKILL)
    assert launcher.finish()[0] == 137
    assert launcher.survivors(0.1) == 0


def test_killed_outer_launcher_ends_an_inner_launch(launch, tmp_path):
    (tmp_path / "inner.py").write_text(FAMILY)
    outer = "import os, sys\nos.execv(sys.executable, [sys.executable, '-m', 'unisono', 'run', "
    launcher = launch(outer + "'--nproc-per-node', '2', 'inner.py'])", nprocs=1)
    launcher.follow(6)
    launcher.popen.kill()
    assert launcher.survivors(2.0) == 0


def test_children_left_by_a_successful_worker_are_ended(launch):
    script = """
import os, subprocess, sys
child = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
print(subprocess.Popen(child).pid)
sys.stdin.read()
os._exit(0)
"""
    launcher = launch(script, nprocs=1)
    launcher.follow(1)
    code, _, err = launcher.finish()
    assert (code, err) == (0, "")
    assert launcher.survivors(0.1) == 0


def test_lines_of_ranks_do_not_mix(run):
    script = """
import os, sys
for i in range(300):
    print("out", os.environ["RANK"], i)
    print("err", os.environ["RANK"], i, file=sys.stderr)
sys.stderr.write("no newline at the end")
"""
    code, out, err = run(script, nprocs=3)
    assert code == 0
    expected = {f"{rank} {i}" for rank in range(3) for i in range(300)}
    assert {line.removeprefix("out ") for line in out.splitlines()} == expected
    rest = err.replace("no newline at the end", "")
    assert {line.removeprefix("err ") for line in rest.splitlines()} == expected
    assert err.count("no newline at the end") == 3


def test_workers_meet_in_the_agents_store(run):
    script = """
import os
from unisono.stores import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store.set("rank" + os.environ["RANK"], os.environ["RANK"])
print(sorted(store.get(f"rank{r}") for r in range(3)))
store.close()
"""
    assert run(script, nprocs=3) == (0, "[b'0', b'1', b'2']\n" * 3, "")


def test_eight_launches_at_once(launch):
    launchers = [launch("import os; print(os.environ['MASTER_PORT'])") for _ in range(8)]
    results = [launcher.finish() for launcher in launchers]
    assert [(code, err) for code, _, err in results] == [(0, "")] * 8
    ports = [out.split() for _, out, _ in results]
    assert all(first == second for first, second in ports)


def test_torch_script(run):
    pytest.importorskip("torch")
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(x)
print(x.tolist())
dist.destroy_process_group()
"""
    code, out, err = run(script)
    assert (code, out) == (0, "[3.0, 3.0, 3.0]\n" * 2), err


@pytest.mark.parametrize(
    ("flags", "size", "warned"), [([], "2", True), (["--standalone"], "2", False), ([], "1", False)]
)
def test_several_launchers_that_do_not_know_of_each_other_say_so(run, flags, size, warned):
    env = environment(PMI_RANK="0", PMI_SIZE=size)
    code, _, err = run("", *flags, env=env)
    assert code == 0
    expected = (
        "PMI) started 2 of this, and each makes a world of its own; for one world: --nnodes 2 "
    )
    assert (expected in err) == warned
    assert warned or err == ""


def test_the_report_needs_no_thread(tmp_path):
    (tmp_path / "s.py").write_text("raise ValueError('the cause')")
    program = """
import sys, types
from unisono.cli.run import command as run
from unisono.cli.main import main
def refuse(*arguments, **how):
    raise RuntimeError("can't start new thread")
run.threading = types.SimpleNamespace(Thread=lambda **how: types.SimpleNamespace(
    start=refuse, is_alive=lambda: False))
sys.exit(main(["run", "-n", "2", "s.py"]))
"""
    launcher = Launcher(program=[sys.executable, "-c", program], cwd=tmp_path, env=environment())
    code, _, err = launcher.finish()
    assert code == 1
    assert err.endswith("ValueError: the cause\n")
    assert "unisono run: first failure: rank " in err


def test_launcher_stays_light(tmp_path):
    (tmp_path / "s.py").write_text("")
    limit_kib = 60 * 1024
    program = (
        "import os, sys; from unisono.cli.main import main; code = main(['run', 's.py']); "
        # The launcher's two processes.
        "files = [open(f'/proc/{pid}/status') for pid in (os.getpid(), os.getppid())]\n"
        "peak = sum(int(line.split()[1]) for f in files for line in f if line[:5] == 'VmHWM')\n"
        "print(code, sorted({'numpy', 'torch'} & set(sys.modules)), peak)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    first, _, peak_kib = done.stdout.rpartition(" ")
    assert (first, done.stderr) == ("0 []", "")
    assert int(peak_kib) <= limit_kib
