"""Interrupt the start of an interpreter: load torch, then wait before the script.

Python imports a module of this name, if it exists, before it opens the script. Only half-started
workers have the folder of this file on their path (see `unisono.launcher.workers.warm`). Python
does the rest of the start as usual, with the worker's command line. The script thus finds the same
state as after any other start.

The module uses the standard library only, because the workers may use another Python.
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
    """Load torch from the folder `wanted`; exit if the path leads to another torch."""
    from importlib import import_module
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or not os.path.samefile(os.path.dirname(spec.origin or ""), wanted):
        os._exit(0)
    import_module("torch.distributed")


def _is_shadowed() -> bool:
    """Whether the script's folder has a module with the name of a loaded module.

    That folder is not on the path yet, so the script would get the loaded module instead.
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
    """Set how soon the kernel kills this process when memory runs out; return the old value."""
    with contextlib.suppress(OSError), open(_OOM, "r+") as file:
        before = file.read()
        file.seek(0)
        file.write(score)
        return before
    return score


def _take_on_environment(fd: int) -> None:
    """Report that torch is loaded, and wait for the worker's environment.

    If the launcher is gone, the text is empty, which is not JSON: this raises ValueError.
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
    # The rank is known later only. Without it `import torch` does not offer the stack of a rank.
    os.environ.pop("RANK", None)
    _load_torch(torch_folder)
    if _is_shadowed():
        os._exit(0)
    _take_on_environment(int(fd))
    _set_oom_score(score)
    if stacks := sys.modules.get("unisono.core.base.source.stacks"):
        stacks.offer_stack()


try:
    _wait_with_torch()
except BaseException:
    # Otherwise Python would run the script in the environment of the last attempt.
    os._exit(1)
# Import the user's own module of this name. If there is none, Python expects the ImportError.
del sys.modules[__name__]
__import__(__name__)
