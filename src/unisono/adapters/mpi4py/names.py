"""The names of mpi4py.MPI, and the start: COMM_WORLD is unisono's default group."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import runpy
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

import unisono
from unisono.adapters.mpi4py import comm as comms
from unisono.adapters.mpi4py import (
    errors,
    files,
    handles,
    messages,
    objects,
    requests,
    topology,
    windows,
)
from unisono.adapters.mpi4py.buffers import AUTOMATIC, BOTTOM, IN_PLACE, buffer, memory_of
from unisono.adapters.mpi4py.datatypes import Datatype, by_code, named, typealign
from unisono.adapters.mpi4py.handles import EMPTY, ErrorHandler, Group, Info, WorldRanks, predefined
from unisono.adapters.mpi4py.ops import OPS, Op
from unisono.adapters.mpi4py.requests import Ongoing, Request
from unisono.core.c10d.lifecycle import destroy_process_group, init_process_group
from unisono.core.c10d.new_groups import new_group
from unisono.core.groups.world import current
from unisono.errors import UnsupportedError

_state = {"initialized": False, "finalized": False, "level": errors.NUMBERS["THREAD_MULTIPLE"]}
_attached: list[Any] = []
_CLASSES = [
    "Comm",
    "Intracomm",
    "Intercomm",
    "Topocomm",
    "Cartcomm",
    "Graphcomm",
    "Distgraphcomm",
    "Message",
    "Request",
    "Prequest",
    "Grequest",
    "Status",
    "Group",
    "Info",
    "Errhandler",
    "Win",
    "File",
]
_ERROR_CALLS = [
    "get_error_class",
    "get_error_string",
    "add_error_class",
    "add_error_code",
    "add_error_string",
    "remove_error_class",
    "remove_error_code",
    "remove_error_string",
]
_PRIVATE = [
    "_typecode",
    "_typealign",
    "_sizeof",
    "_comm_lock",
    "_comm_lock_table",
    "_commctx_intra",
    "_commctx_inter",
    "_set_abort_status",
]


def _start() -> dict[str, Any]:
    """Make the world, and its communicators."""
    from unisono.adapters.mpi4py.messages import CommState

    if current().default is None:
        init_process_group()
    world = current().default
    assert world is not None
    me = world.rank()
    everyone = range(world.size())
    CommState.services = new_group(list(everyone), group_desc="MPI services")
    alone = new_group([me], use_local_synchronization=True, group_desc="MPI_COMM_SELF")
    first, second = CommState(world), CommState(alone)
    for state, name in ((first, "MPI_COMM_WORLD"), (second, "MPI_COMM_SELF")):
        state.name = name
        numbers = errors.NUMBERS
        state.attributes |= {
            numbers["TAG_UB"]: errors.TAG_UB_VALUE,
            numbers["IO"]: errors.ANY_SOURCE,
            numbers["WTIME_IS_GLOBAL"]: 0,
            numbers["UNIVERSE_SIZE"]: world.size(),
            numbers["LASTUSEDCODE"]: errors.ERR_LASTCODE,
        }
    Group.me = world.ranks[me]
    handles.WORLD_RANKS[0] = WorldRanks(world.ranks)
    _state["initialized"] = True
    comms.SELF[0] = comms.Intracomm.of(second)
    return {
        "COMM_WORLD": comms.Intracomm.of(first),
        "COMM_SELF": comms.Intracomm.of(second),
    }


# ---- functions --------------------------------------------------------------------------------


def _finalize() -> None:
    """End all communicators."""
    if not _state["finalized"]:
        _state["finalized"] = True
        destroy_process_group()


def _vendor() -> tuple[str, tuple[int, ...]]:
    return "unisono", tuple(int(part) for part in unisono.__version__.split(".")[:3])


def _address(location: Any) -> int:
    """Return where the memory of an array is."""
    if location is BOTTOM:
        return 0
    return int(memory_of(location, False)[0].__array_interface__["data"][0])


def _attach_buffer(buf: Any) -> None:
    """Keep the memory until `Detach_buffer`; buffered sends make copies of their own."""
    errors.require(not _attached, "ERR_BUFFER")
    _attached.append(buf)


def _as_detached(buf: Any) -> Any:
    return buf if buf is AUTOMATIC or buf is None else buffer.frombuffer(buf)


def _done() -> Request:
    return Request.of(Ongoing())


# The import has started, so that Init and the like have nothing to do.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Init": lambda: None,
    "Init_thread": lambda required=3: _state["level"],
    "Finalize": _finalize,
    "Is_initialized": lambda: bool(_state["initialized"]),
    "Is_finalized": lambda: bool(_state["finalized"]),
    "Query_thread": lambda: _state["level"],
    "Is_thread_main": lambda: threading.current_thread() is threading.main_thread(),
    "Get_version": lambda: (errors.NUMBERS["VERSION"], errors.NUMBERS["SUBVERSION"]),
    "Get_library_version": lambda: f"unisono {unisono.__version__}",
    "get_vendor": _vendor,
    # There is no C library.
    "Get_abi_version": lambda: (-1, -1),
    "Get_processor_name": platform.node,
    "Get_hw_resource_info": lambda: Info.Create({"mpi_shared_memory": "true"}),
    "Wtime": time.perf_counter,
    "Wtick": lambda: time.get_clock_info("perf_counter").resolution,
    "Pcontrol": lambda level: None,
    "Get_address": _address,
    "Aint_add": lambda base, disp: base + disp,
    "Aint_diff": lambda addr1, addr2: addr1 - addr2,
    "Attach_buffer": _attach_buffer,
    "Detach_buffer": lambda: _as_detached(_attached.pop()) if _attached else None,
    "Flush_buffer": lambda: None,
    "Iflush_buffer": _done,
    "Alloc_mem": lambda size, info=None: buffer.allocate(size),
    "Free_mem": lambda mem: mem.release(),
    "Compute_dims": topology.Compute_dims,
    **{name.capitalize(): getattr(errors, name) for name in _ERROR_CALLS},
}
"""The functions of the module, by name."""


def _typecode(datatype: Datatype) -> str | None:
    try:
        return datatype.tocode()
    except ValueError:
        return None


def _typealign(datatype: Datatype) -> int | None:
    return None if datatype.ob is None else typealign(datatype.ob)


def _sizeof(arg: Any) -> int:
    return np.intp().itemsize


def _comm_lock_table(comm: Any) -> dict[Any, Any]:
    state = comm.live
    table: dict[Any, Any] = state.__dict__.setdefault("locks", {})
    return table


def _comm_lock(comm: Any, key: Any = None) -> Any:
    return _comm_lock_table(comm).setdefault(key, threading.Lock())


def _commctx_intra(comm: Any) -> tuple[Any, int]:
    """Return a duplicate for a library's messages, and the next tag in it."""
    state = comm.live
    if "context" not in state.__dict__:
        state.context = [comms.Intracomm.of(comm._duplicate()), -1]
    state.context[1] = (state.context[1] + 1) % errors.TAG_UB_VALUE
    return state.context[0], state.context[1]


def _commctx_inter(comm: Any) -> tuple[Any, int, Any, bool]:
    state = comm.live
    if "context" not in state.__dict__:
        group = comms.Intracomm.of(messages.CommState(comms._split(state.group, 0, state.rank)))
        state.context = [topology.Intercomm.of(comm._duplicate()), -1, group]
    state.context[1] = (state.context[1] + 1) % errors.TAG_UB_VALUE
    return state.context[0], state.context[1], state.context[2], state.is_first


def _set_abort_status(status: int) -> None:
    _state["abort"] = status


# ---- communicators' buffers, ULFM -------------------------------------------------------------


def _attach(self: Any, buf: Any) -> None:
    """Keep the memory until `Detach_buffer`."""
    self.live.attributes["buffer"] = buf


def _detach(self: Any) -> Any:
    """Return the memory of `Attach_buffer`."""
    return _as_detached(self.live.attributes.pop("buffer", None))


def _get_parent() -> topology.Intercomm:
    """Return the null communicator: no rank was spawned."""
    return topology.Intercomm()


comms.Comm.Attach_buffer = _attach  # type: ignore[attr-defined]
comms.Comm.Detach_buffer = _detach  # type: ignore[attr-defined]
comms.Comm.Flush_buffer = lambda self: None  # type: ignore[attr-defined]
comms.Comm.Iflush_buffer = lambda self: _done()  # type: ignore[attr-defined]
comms.Comm.Get_parent = staticmethod(_get_parent)  # type: ignore[attr-defined]


def _abort(of: Any, code: int) -> None:
    if code:
        of.Abort(code)


ERRORS_ARE_FATAL = handles.Errhandler.of(ErrorHandler(_abort))
ERRORS_ABORT = handles.Errhandler.of(ErrorHandler(_abort))


def _create_errhandler(cls: Any, errhandler_fn: Any) -> Any:
    """Make an error handler."""
    return handles.Errhandler.of(ErrorHandler(errhandler_fn))


handles.Attributes.Create_errhandler = classmethod(_create_errhandler)


def all_names() -> dict[str, Any]:
    """Return every name of the module."""
    from unisono.adapters.mpi4py import packing

    names: dict[str, Any] = {**errors.NUMBERS, **errors.ERRORS, **named, **OPS}
    names |= FUNCTIONS
    for module in (comms, topology, handles, requests, windows, files):
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__ and name in _CLASSES:
                names[name] = value
    names |= {
        "ERR_LASTCODE": errors.ERR_LASTCODE,
        **{"Datatype": Datatype, "Op": Op, "Exception": errors.Exception, "buffer": buffer},
        **{"memory": buffer, "BOTTOM": BOTTOM, "IN_PLACE": IN_PLACE, "BUFFER_AUTOMATIC": AUTOMATIC},
        **{"BottomType": type(BOTTOM), "InPlaceType": type(IN_PLACE)},
        **{"DATATYPE_NULL": Datatype(), "OP_NULL": Op(), "INFO_NULL": Info()},
        **{"GROUP_NULL": Group(), "GROUP_EMPTY": Group.of(EMPTY), "REQUEST_NULL": Request()},
        **{"ERRHANDLER_NULL": handles.Errhandler(), "ERRORS_RETURN": handles.ERRORS_RETURN},
        **{"ERRORS_ARE_FATAL": ERRORS_ARE_FATAL, "ERRORS_ABORT": ERRORS_ABORT},
        **{"COMM_NULL": comms.COMM_NULL, "MESSAGE_NULL": comms.MESSAGE_NULL},
        **{"MESSAGE_NO_PROC": comms.MESSAGE_NO_PROC, "WIN_NULL": windows.Win()},
        **{"FILE_NULL": files.FILE_NULL, "UNWEIGHTED": topology.UNWEIGHTED},
        **{"WEIGHTS_EMPTY": topology.WEIGHTS_EMPTY},
        "INFO_ENV": Info.Create({"command": ""}),
        "Pickle": objects.Pickle,
        "pickle": objects.pickle,
        **{name: globals()[name] for name in _PRIVATE},
        "_typedict": by_code,
        "_typedict_c": {k: v for k, v in by_code.items() if len(k) == 1},
        "_typedict_f": {},
        **_start(),
    }
    packing.install()
    names |= _refuse()
    for name, value in names.items():
        if isinstance(value, handles.Handle):
            key = value.family, id(value.ob)
            predefined.setdefault(key, (name, value))
            if name.endswith("_NULL") or key not in predefined:
                predefined[key] = (name, value)
        elif isinstance(value, type) and value.__module__.startswith(__package__ or ""):
            value.__module__ = "unisono.MPI"
    return names


# ---- what is not there ----

_SPAWN = "ranks are started by `unisono run` or mpiexec, not by ranks"


_PORTS = "worlds do not connect to each other"


_ULFM = "after a loss use unisono.shrink_group, or `unisono run --restart`"


_PARTS = "send the parts as messages"


REFUSED: dict[str, str] = {
    "Open_port": _PORTS,
    "Close_port": _PORTS,
    "Publish_name": _PORTS,
    "Unpublish_name": _PORTS,
    "Lookup_name": _PORTS,
    "Register_datarep": "files have the native data representation",
    "Get_abi_info": "there is no C library",
    "Get_abi_fortran_info": "there is no C library",
    "Session": "the world is unisono's default group; make communicators of it",
    "Intracomm.Spawn": _SPAWN,
    "Intracomm.Spawn_multiple": _SPAWN,
    "Intracomm.Accept": _PORTS,
    "Intracomm.Connect": _PORTS,
    "Comm.Join": _PORTS,
    "Comm.Revoke": _ULFM,
    "Comm.Is_revoked": _ULFM,
    "Comm.Get_failed": _ULFM,
    "Comm.Ack_failed": _ULFM,
    "Comm.Agree": _ULFM,
    "Comm.Iagree": _ULFM,
    "Comm.Shrink": _ULFM,
    "Comm.Ishrink": _ULFM,
    "Comm.Psend_init": _PARTS,
    "Comm.Precv_init": _PARTS,
    "Prequest.Pready": _PARTS,
    "Prequest.Pready_range": _PARTS,
    "Prequest.Pready_list": _PARTS,
    "Prequest.Parrived": _PARTS,
    "Grequest.Start": "use concurrent.futures.Future",
    "Grequest.Complete": "use concurrent.futures.Future",
    "Grequest.complete": "use concurrent.futures.Future",
    "Win.Create_dynamic": "a window's memory is given when it is made",
    "Win.Attach": "a window's memory is given when it is made",
    "Win.Detach": "a window's memory is given when it is made",
}
"""Name -> why it is not there."""


class RefusedCallError(UnsupportedError, NotImplementedError):
    """A name of mpi4py that unisono does not have was used."""


def _refusal(name: str, reason: str) -> Any:
    def refused(*arguments: Any, **how: Any) -> NoReturn:
        raise RefusedCallError(f"unisono.MPI has no {name}: {reason}")

    refused.__name__ = name.rpartition(".")[2]
    refused.__doc__ = f"Not available: {reason}."
    return refused


def page() -> str:
    """Return the page of the reference."""
    names: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        names.setdefault(reason, []).append(f"`{name}`")
    rows = "".join(f"| {', '.join(same)} | {reason} |\n" for reason, same in names.items())
    return (
        "# What unisono.MPI refuses\n\nA call raises `NotImplementedError` with the name and the "
        "reason. Written by\n`make docs`.\n\n"
        f"| names | reason |\n|---|---|\n{rows}"
    )


def _refuse() -> dict[str, Any]:
    """Add the names to the classes; return those of the module."""
    added: dict[str, Any] = {}
    for name, reason in REFUSED.items():
        home, _, method = name.rpartition(".")
        if not home:
            added[name] = _refusal(name, reason)
        else:
            of = next(vars(m)[home] for m in (comms, requests, windows) if home in vars(m))
            setattr(of, method, staticmethod(_refusal(name, reason)))
    session = added["Session"]
    added["Session"] = type("Session", (), {"Init": staticmethod(session), "__new__": session})
    return added


# ---- in the place of mpi4py ----

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
