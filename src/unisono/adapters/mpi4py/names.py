"""The names of mpi4py.MPI."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

import unisono
from unisono.adapters.mpi4py import (
    buffers,
    datatypes,
    errors,
    files,
    handles,
    messages,
    requests,
    topology,
    windows,
)
from unisono.adapters.mpi4py import comm as comms
from unisono.adapters.mpi4py.buffers import (
    BOTTOM,
    BUFFER_AUTOMATIC,
    IN_PLACE,
    Constant,
    buffer,
    memory_of,
    pickle,
)
from unisono.adapters.mpi4py.datatypes import Datatype, by_code, named, typealign
from unisono.adapters.mpi4py.handles import (
    EMPTY,
    ErrorHandler,
    Group,
    Info,
    default_group,
    finalized,
    predefined,
)
from unisono.adapters.mpi4py.ops import OPS, Op
from unisono.adapters.mpi4py.requests import Ongoing, Request
from unisono.core.c10d.lifecycle import destroy_process_group
from unisono.core.groups.world import current
from unisono.errors import UnsupportedError
from unisono.launcher.workers.program import run_program

_state = {"level": errors.NUMBERS["THREAD_MULTIPLE"]}
_attached: list[Any] = []
_CLASSES = (
    "Comm Intracomm Intercomm Topocomm Cartcomm Graphcomm Distgraphcomm Message Request Prequest "
    "Grequest Status Group Info Errhandler Win File Datatype Op Pickle buffer"
)
_CONSTANTS = Constant, topology.Weights
_ERROR_CALLS = (
    "get_error_class get_error_string add_error_class add_error_code add_error_string "
    "remove_error_class remove_error_code remove_error_string"
)
_PRIVATE = (
    "_typecode _typealign _sizeof _comm_lock _comm_lock_table _commctx_intra _commctx_inter "
    "_set_abort_status"
)


# ---- functions --------------------------------------------------------------------------------


def _finalize() -> None:
    """End all communicators."""
    world = current()
    if world not in finalized:
        finalized.add(world)
        if world.default is not None:
            destroy_process_group()


def _init(required: int = 3) -> int:
    """Make the world, unless there is one."""
    default_group()
    return _state["level"]


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
    return buf if buf is BUFFER_AUTOMATIC or buf is None else buffer.frombuffer(buf)


def _done() -> Request:
    return Request.of(Ongoing())


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Init": lambda: (_init(), None)[1],
    "Init_thread": _init,
    "Finalize": _finalize,
    # Any call can be made after the import: the first one makes the world.
    "Is_initialized": lambda: True,
    "Is_finalized": lambda: current() in finalized,
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
    **{name.capitalize(): getattr(errors, name) for name in _ERROR_CALLS.split()},
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
    table: dict[Any, Any] = comm.live.locks
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
    names: dict[str, Any] = {**errors.NUMBERS, **errors.ERRORS, **named, **OPS}
    names |= FUNCTIONS
    modules = (comms, topology, handles, requests, windows, files, datatypes, buffers)
    for each in (globals(), *map(vars, modules)):
        for name, value in each.items():
            is_constant = name.isupper() and isinstance(value, (handles.Handle, *_CONSTANTS))
            if is_constant or (isinstance(value, type) and name in _CLASSES.split()):
                names[name] = value
    names |= {
        "ERR_LASTCODE": errors.ERR_LASTCODE,
        **{"Exception": errors.Exception, "memory": buffer},
        **{"BottomType": type(BOTTOM), "InPlaceType": type(IN_PLACE)},
        **{"OP_NULL": Op(), "INFO_NULL": Info(), "GROUP_NULL": Group()},
        **{"GROUP_EMPTY": Group.of(EMPTY), "ERRHANDLER_NULL": handles.Errhandler()},
        "INFO_ENV": Info.Create({"command": ""}),
        "pickle": pickle,
        **{name: globals()[name] for name in _PRIVATE.split()},
        "_typedict": by_code,
        "_typedict_c": {k: v for k, v in by_code.items() if len(k) == 1},
        "_typedict_f": {},
    }
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

_REASONS = {
    "worlds do not connect to each other": "Open_port Close_port Publish_name Unpublish_name "
    "Lookup_name Intracomm.Accept Intracomm.Connect Comm.Join",
    "files have the native data representation": "Register_datarep",
    "there is no C library": "Get_abi_info Get_abi_fortran_info",
    "the world is unisono's default group; make communicators of it": "Session",
    "ranks are started by `unisono run` or mpiexec, not by ranks": "Intracomm.Spawn "
    "Intracomm.Spawn_multiple",
    "after a loss use unisono.shrink_group, or `unisono run --restart`": "Comm.Revoke "
    "Comm.Is_revoked Comm.Get_failed Comm.Ack_failed Comm.Agree Comm.Iagree Comm.Shrink "
    "Comm.Ishrink",
    "send the parts as messages": "Comm.Psend_init Comm.Precv_init Prequest.Pready "
    "Prequest.Pready_range Prequest.Pready_list Prequest.Parrived",
    "use concurrent.futures.Future": "Grequest.Start Grequest.Complete Grequest.complete",
    "a window's memory is given when it is made": "Win.Create_dynamic Win.Attach Win.Detach",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
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
    if getattr(sys.modules.get("mpi4py.MPI"), "__name__", "unisono.MPI") != "unisono.MPI":
        raise ImportError("mpi4py.MPI is loaded already; import unisono.mpi4py before it")
    # By its name: the public module imports this package. Its engine may load mpi4py's own MPI.
    MPI = importlib.import_module("unisono.MPI")
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
    hook = threading.excepthook

    def report(raised: Any) -> None:
        hook(raised)
        if isinstance(raised.exc_value, RefusedCallError):
            # As by MPI's default: the program, or mpi4py.futures, may wait for the thread for ever.
            comms.COMM_WORLD.Abort(1)

    threading.excepthook = report


def main() -> None:
    """Run a program, a module (-m) or a text (-c), with unisono.MPI in the place of mpi4py."""
    arguments = sys.argv[1:]
    if not arguments:
        sys.exit("usage: python -m unisono.mpi4py [-m MODULE | -c TEXT | PROGRAM] ...")
    replace()
    run_program(arguments)
