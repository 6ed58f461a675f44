"""Putting unisono.MPI in the place of mpi4py."""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
import types

VERSION = "4.1.0"


class _Rc:
    """mpi4py's options; the start is unisono's, so that they change nothing."""

    initialize = finalize = threads = True
    thread_level = "multiple"
    fast_reduce = recv_mprobe = True
    irecv_bufsz = 32768
    errors = "exception"

    def __call__(self, **options: object) -> None:
        for name, value in options.items():
            if not hasattr(self, name):
                raise TypeError(f"unexpected argument {name!r}")
            setattr(self, name, value)

    def __repr__(self) -> str:
        return "mpi4py.rc"


def replace() -> None:
    """Make `mpi4py` and `mpi4py.MPI` names of unisono.MPI, unless mpi4py's own MPI is loaded."""
    # By its name: the public module imports this package.
    MPI = importlib.import_module("unisono.MPI")
    if getattr(sys.modules.get("mpi4py.MPI"), "__name__", "unisono.MPI") != "unisono.MPI":
        raise ImportError("mpi4py.MPI is loaded already; import unisono.mpi4py before it")
    sys.modules.pop("mpi4py", None)
    found = importlib.util.find_spec("mpi4py")
    package = types.ModuleType("mpi4py", "unisono.MPI in the place of mpi4py.")
    package.__path__ = list(found.submodule_search_locations or ()) if found else []
    package.__spec__ = found
    package.__version__ = VERSION  # type: ignore[attr-defined]
    package.rc = _Rc()  # type: ignore[attr-defined]
    package.MPI = MPI  # type: ignore[attr-defined]
    package.get_include = lambda: ""  # type: ignore[attr-defined]
    package.get_config = dict  # type: ignore[attr-defined]
    sys.modules["mpi4py"], sys.modules["mpi4py.MPI"] = package, MPI


def main() -> None:
    """Run a program, a module (-m) or a text (-c), with unisono.MPI in the place of mpi4py."""
    arguments = sys.argv[1:]
    if not arguments:
        sys.exit("usage: python -m unisono.mpi4py [-m MODULE | -c TEXT | PROGRAM] ...")
    replace()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
