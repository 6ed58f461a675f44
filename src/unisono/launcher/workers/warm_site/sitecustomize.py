"""Stops an interpreter half-way through its start: torch is loaded, the script waits.

Python imports a module of this name, if there is one, before it looks at the script. The folder
of this file is on the path of a warm worker only (see `unisono.launcher.workers.warm`). All
the rest of a start is Python's own, with the worker's own command line, so that the script finds
what it finds after any other start.

Uses the standard library only, of whatever Python the workers have.
"""

import contextlib
import json
import os
import sys

_OOM = "/proc/self/oom_score_adj"


def _restore_path() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    sys.path_importer_cache.pop(folder, None)
    _, _, others = os.environ.pop("PYTHONPATH", "").partition(os.pathsep)
    if others:
        os.environ["PYTHONPATH"] = others


def _load_torch(wanted: str) -> None:
    """Load torch if it is the one that the running workers have."""
    from importlib import import_module
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or not os.path.samefile(os.path.dirname(spec.origin or ""), wanted):
        os._exit(0)
    import_module("torch.distributed")


def _is_shadowed() -> bool:
    """Whether the script has a module of its own in the place of one that is loaded by now.

    Its folder is not on the path yet, and it would find ours instead of its own.
    """
    from importlib.machinery import PathFinder

    words = [word for word in sys.orig_argv[1:] if word != "-u"]
    folder = os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        spec = PathFinder.find_spec(name, [folder]) if file and "." not in name else None
        if file and spec and spec.origin and not os.path.samefile(spec.origin, file):
            return True
    if folder not in sys.path:
        sys.path_importer_cache.pop(folder, None)
    return False


def _set_oom_score(score: str) -> str:
    """Make the kernel prefer this process, or not, when memory is short; return what it was."""
    with contextlib.suppress(OSError), open(_OOM, "r+") as file:
        before = file.read()
        file.seek(0)
        file.write(score)
        return before
    return score


def _take_on_environment(fd: int) -> None:
    """Say that all is ready, and wait for the worker's environment.

    Nothing comes, which is no JSON, if the launcher is gone.
    """
    os.write(fd, b"+")
    with open(fd, "rb") as link:
        env = json.loads(link.read())
    os.environ.clear()
    os.environ.update(env)


def _wait_with_torch() -> None:
    fd, torch_folder = os.environ.pop("UNISONO_WARM_LINK").split(":", 1)
    os.set_inheritable(int(fd), False)
    _restore_path()
    score = _set_oom_score("1000")
    _load_torch(torch_folder)
    if _is_shadowed():
        os._exit(0)
    _take_on_environment(int(fd))
    _set_oom_score(score)


try:
    _wait_with_torch()
except BaseException:
    # Python would go on with the script, in the environment of the last attempt.
    os._exit(1)
# Now the user's own module of this name. If there is none, that ImportError is what Python expects.
del sys.modules[__name__]
__import__(__name__)
