"""Half-started workers: that they are used, that a script cannot tell, and that none is left.

A folder `torch` that maps a file of the right name takes the place of torch, so that nobody has to
load the real one.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.launches import LIMIT_S, Launches, children, gone
from unisono.launcher.workers.script_scan import is_untouched
from unisono.launcher.workers.warm import WarmWorkers

pytestmark = pytest.mark.linux("looks into /proc")

HURRY = {f"unisono.launcher.workers.warm.{name}": 0.05 for name in ("FIRST_LOOK_S", "_BETWEEN_S")}

TORCH = """
import mmap, os
_file = open(os.path.join(os.path.dirname(__file__), "lib", "libtorch_cpu.so"), "rb")
_map = mmap.mmap(_file.fileno(), 0, prot=mmap.PROT_READ)
_file.close()
"""
DISTRIBUTED = "import os\nopen(f'loaded_{os.getpid()}', 'w').close()\n"

# Everything that a script can see of how it was started; rank 1 of the first attempt fails when
# it is told to.
SCRIPT = """
import json, os, resource, signal, sys
import torch.distributed
import __main__
state = {
    "pid": os.getpid(),
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "cmdline": open("/proc/self/cmdline").read(),
    "path": sys.path,
    "flags": list(sys.flags),
    "modules": sorted(sys.modules),
    "environ": dict(os.environ),
    "main": [sorted(vars(__main__)), getattr(__main__.__spec__, "name", ""), __main__.__package__],
    "site": vars(os).get("site_of_the_user", ""),
    "cwd": os.getcwd(),
    "parent": os.getppid(),
    "leader": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "handlers": [str(signal.getsignal(s)) for s in signal.valid_signals()],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
    "streams": [type(s.buffer).__name__ + str(s.write_through) for s in (sys.stdout, sys.stderr)],
    "cpus": sorted(os.sched_getaffinity(0)),
    "nice": os.nice(0),
    "limits": [resource.getrlimit(i) for i in range(16)],
    "oom": open("/proc/self/oom_score_adj").read(),
}
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
with open(f"seen_{attempt}_{rank}", "x") as file:
    json.dump(state, file)
os.rename(f"seen_{attempt}_{rank}", f"done_{attempt}_{rank}")
if attempt == "0":
    with open("fifo_" + rank) as fifo:
        fifo.read()
    sys.exit(1)
"""


class Job(Launches):
    """A launch whose first attempt waits to be told to fail."""

    def begin(self, *arguments, torch=TORCH, path=""):
        folder = self.folder
        (folder / "torch" / "lib").mkdir(parents=True)
        (folder / "torch" / "lib" / "libtorch_cpu.so").write_text("something")
        (folder / "torch" / "__init__.py").write_text(torch)
        (folder / "torch" / "distributed.py").write_text(DISTRIBUTED)
        (folder / "script.py").write_text(SCRIPT)
        for rank in range(2):
            os.mkfifo(folder / f"fifo_{rank}")
        words = ("-n", 2, "--max-restarts", 1, *arguments)
        path = os.pathsep.join(filter(None, [str(folder), path]))
        self.launch = self.start(*words, patches=HURRY, PYTHONPATH=path)

    def wait_for(self, condition, what):
        deadline = time.monotonic() + LIMIT_S
        while not (value := condition()):
            assert time.monotonic() < deadline, f"no {what}"
            assert self.launch.is_running(), self.launch.finish()
            time.sleep(0.01)
        return value

    def warm(self):
        """Wait for both half-started workers; return their process numbers."""
        return self.wait_for(self._warm, "2 half-started workers")

    def ready(self):
        """Wait until both half-started workers have torch; return their process numbers."""
        pids = self.warm()
        self.wait_for(lambda: all(map(self._is_ready, pids)), "torch in them")
        return pids

    def ended(self):
        """Wait until a half-started worker has failed; return its process number."""

        def find():
            # It is not waited for yet, and has no memory any more.
            pids = [pid for main in children(self.launch.pid) for pid in children(main)]
            return next((pid for pid in pids if not Path(f"/proc/{pid}/maps").read_text()), None)

        return self.wait_for(find, "half-started worker that failed")

    def _is_ready(self, pid):
        # With torch there, the next thing that makes it sleep is to wait for its environment.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return (self.folder / f"loaded_{pid}").exists() and state == "S"

    def _warm(self):
        found = set()
        # The process that was started here has one child, which has all the others.
        for pid in [pid for main in children(self.launch.pid) for pid in children(main)]:
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(entry.startswith(b"UNISONO_WARM_LINK=") for entry in environ):
                found.add(pid)
        return found if len(found) == 2 else None

    def saw(self, attempt):
        """Wait for both workers of an attempt; return what they saw."""
        paths = [self.folder / f"done_{attempt}_{rank}" for rank in range(2)]
        self.wait_for(lambda: all(path.exists() for path in paths), f"attempt {attempt}")
        return [json.loads(path.read_text()) for path in paths]

    def fail(self):
        """Make both workers of the first attempt end; return how the launch ended, and the rest."""
        for rank in range(2):
            (self.folder / f"fifo_{rank}").write_text("now")
        ended = self.launch.finish()
        files = [self.folder / f"done_1_{rank}" for rank in range(2)]
        return ended, [json.loads(path.read_text()) for path in files]


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.close()


PER_ATTEMPT = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", "MASTER_PORT")
USERS_OWN = "import os\nvars(os)['site_of_the_user'] = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
# The real torch has loaded them in any case.
ALSO_OF_TORCH = ("json", "contextlib", "importlib", "warnings")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("command", [["script.py", "a b", "--", "-x"], ["-m", "script", "y"]])
@pytest.mark.parametrize("users_own", [False, True], ids=["", "sitecustomize of the user"])
def test_a_script_cannot_tell(job, tmp_path, command, users_own):
    if users_own:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(USERS_OWN)
    job.begin(*command, path=str(tmp_path / "site"))
    before = job.saw(0)
    warm = job.ready()
    (code, out, err), after = job.fail()
    assert (code, out) == (0, ""), err
    assert {state.pop("pid") for state in after} == warm
    for first, second in zip(before, after, strict=True):
        del first["pid"]
        more = set(second.pop("modules")) ^ set(first.pop("modules"))
        assert not [m for m in more if m.lstrip("_").partition(".")[0] not in ALSO_OF_TORCH]
        assert [s.pop("site") for s in (first, second)] == (["0", "1"] if users_own else ["", ""])
        for state in (first, second):
            for name in PER_ATTEMPT:
                del state["environ"][name]
        assert second == first


def test_killed_half_started_workers_are_done_without(job):
    job.begin("script.py")
    job.saw(0)
    warm = job.warm()
    for pid in warm:
        os.kill(pid, signal.SIGKILL)
    (code, _, _), after = job.fail()
    assert code == 0
    assert not {state["pid"] for state in after} & warm


ONLY_IN_A_SCRIPT = TORCH + "import __main__\nassert hasattr(__main__, '__file__')\n"


def test_script_never_runs_in_a_half_started_worker_that_failed(job):
    job.begin("script.py", torch=ONLY_IN_A_SCRIPT)
    job.saw(0)
    job.ended()
    (code, _, err), _ = job.fail()
    # A second dump of the same attempt would have been an error.
    assert code == 0, err
    assert "assert" not in err


def test_script_has_its_own_module_of_a_name_that_torch_loaded(job, tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "colorsys.py").touch()
    (tmp_path / "app" / "script.py").write_text("import colorsys\n" + SCRIPT)
    job.begin("app/script.py", torch="import colorsys\n" + TORCH)
    [before, _] = job.saw(0)
    pid = job.ended()
    (code, _, _), states = job.fail()
    assert code == 0
    assert pid not in {state["pid"] for state in states}
    assert all(state["modules"] == before["modules"] for state in states)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_none_is_left_when_the_launch_ends(job, signum, code):
    job.begin("script.py")
    warm = job.warm()
    job.launch.send_signal(signum)
    assert job.launch.finish()[0] == code
    assert gone(warm) if signum == signal.SIGKILL else not any(map(is_there, warm))


def is_there(pid):
    return Path(f"/proc/{pid}").exists()


def test_none_without_a_restart_or_where_none_is_wanted():
    commands = [[sys.executable, "s.py"]] * 2
    for count, wanted, expected in ((0, True, None), (2, False, None), (2, True, 2.0)):
        warm = WarmWorkers(commands, count)
        warm.begin(wanted=wanted)
        due_s = warm.due_s()
        assert due_s == expected if expected is None else 0 < due_s <= expected


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['OMP_NUM_THREADS'] = '4'\n",
        "from os import environ\nenviron['A'] += 'b'\n",
        "import os\nos.environ.setdefault('A', 'b')\n",
        "import os\nos.environ |= {}\n",
        "import os\ndel os.environ['A']\n",
        "import os\nos.putenv('A', 'b')\n",
        "import os\nos.sched_setaffinity(0, {1})\n",
        "import os\nenv = os.environ\nenv['A'] = 'b'\n",
        "from os import environ as e\ne['A'] = 'b'\n",
        "import os\nk = ['A']\nos.environ[k[0]] = 'b'\n",
        "import os\nos.environ[\n    'A'\n] = 'b'\n",
        "import os\nos.environ['A'], b = 'c', 'd'\n",
        "import os\nos.environ.__setitem__('A', 'b')\n",
        "import os\ndef f(e): e['A'] = 'b'\nf(os.environ)\n",
        "from unittest import mock\nmock.patch.dict('os.environ', A='b').start()\n",
        "import psutil\npsutil.Process().cpu_affinity([1])\n",
        "import importlib\nimportlib.import_module('beside')\n",
        "import importlib, sys\nimportlib.import_module(sys.argv[1])\n",
        "import runpy\nrunpy.run_path('beside.py')\n",
        "import beside\n",
        "from pack.inner import x\n",
        "def f():\n    from pack import inner\n",
        "import on_the_path\n",
        "def f(:\n",
    ],
)
def test_who_touches_the_environment(tmp_path, monkeypatch, text):
    touches = "import os\nos.environ['A'] = 'b'\n"
    (tmp_path / "beside.py").write_text(touches)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("from . import other\n")
    (tmp_path / "pack" / "inner.py").write_text("from .deeper import y\nx = 1\n")
    (tmp_path / "pack" / "other.py").touch()
    (tmp_path / "pack" / "deeper.py").write_text("y = 1\n" + touches)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "on_the_path.py").write_text(touches)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    script = tmp_path / "script.py"
    script.write_text(text)
    assert not is_untouched(*[sys.executable, "-u", str(script)])
    monkeypatch.chdir(tmp_path)
    assert not is_untouched(*[sys.executable, "-m", "script"])


def test_who_does_not_touch_it(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, numpy, json, pack, unisono\n"
        "rank = os.environ['RANK']\n"
        "if os.environ.get('A') == os.environ['B'] == 'x': pass\n"
        "if 'A' in os.environ: print(dict(os.environ), {**os.environ}, env=os.environ | {})\n"
        "for name in os.environ: os.environ[name].strip()\n"
        "__import__('importlib').import_module('json')\n"
    )
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "__main__.py").write_text("import script")
    assert is_untouched(*[sys.executable, str(script), "--flag"])
    monkeypatch.chdir(tmp_path)
    assert is_untouched(*[sys.executable, "-u", "-m", "pack", "x"])
    for command in (["sh", str(script)], [sys.executable, "absent.py"], [sys.executable], []):
        assert not is_untouched(*command)
