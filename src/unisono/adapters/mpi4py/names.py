"""The names of mpi4py.MPI, and the start: COMM_WORLD is unisono's default group."""

from __future__ import annotations

import platform
import threading
import time
from typing import Any

import numpy as np

from unisono.adapters.mpi4py import comm as comms
from unisono.adapters.mpi4py import constants, errors, handles, messages, requests, topology
from unisono.adapters.mpi4py.buffers import AUTOMATIC, BOTTOM, IN_PLACE, buffer, memory_of
from unisono.adapters.mpi4py.datatypes import Datatype, by_code, named, typealign
from unisono.adapters.mpi4py.handles import EMPTY, ErrorHandler, Group, Info, WorldRanks, predefined
from unisono.adapters.mpi4py.ops import OPS, Op
from unisono.adapters.mpi4py.requests import Ongoing, Request
from unisono.core.c10d.lifecycle import destroy_process_group, init_process_group
from unisono.core.c10d.new_groups import new_group
from unisono.core.groups.world import current

_state = {"initialized": False, "finalized": False, "level": constants.NUMBERS["THREAD_MULTIPLE"]}
_attached: list[Any] = []


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
        numbers = constants.NUMBERS
        state.attributes |= {
            numbers["TAG_UB"]: constants.TAG_UB_VALUE,
            numbers["IO"]: constants.ANY_SOURCE,
            numbers["WTIME_IS_GLOBAL"]: 0,
            numbers["UNIVERSE_SIZE"]: world.size(),
            numbers["LASTUSEDCODE"]: constants.ERR_LASTCODE,
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


def Init() -> None:
    """Do nothing: the import has started."""


def Init_thread(required: int = 3) -> int:
    """Return THREAD_MULTIPLE: the import has started."""
    return _state["level"]


def Finalize() -> None:
    """End all communicators."""
    if not _state["finalized"]:
        _state["finalized"] = True
        destroy_process_group()


def Is_initialized() -> bool:
    """Return whether the world is there."""
    return bool(_state["initialized"])


def Is_finalized() -> bool:
    """Return whether `Finalize` was called."""
    return bool(_state["finalized"])


def Query_thread() -> int:
    """Return THREAD_MULTIPLE."""
    return _state["level"]


def Is_thread_main() -> bool:
    """Return whether this is the main thread."""
    return threading.current_thread() is threading.main_thread()


def Get_version() -> tuple[int, int]:
    """Return the version of MPI whose names are here."""
    return constants.NUMBERS["VERSION"], constants.NUMBERS["SUBVERSION"]


def Get_library_version() -> str:
    """Return the version of unisono."""
    from unisono import __version__

    return f"unisono {__version__}"


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """Return the name and version of unisono."""
    from unisono import __version__

    major, minor, micro = (int(part) for part in __version__.split(".")[:3])
    return "unisono", (major, minor, micro)


def Get_abi_version() -> tuple[int, int]:
    """Return (-1, -1): there is no C library."""
    return -1, -1


def Get_processor_name() -> str:
    """Return the name of the host."""
    return platform.node()


def Get_hw_resource_info() -> Info:
    """Return what Split_type knows."""
    return Info.Create({"mpi_shared_memory": "true"})


def Wtime() -> float:
    """Return seconds of a clock that only goes forward."""
    return time.perf_counter()


def Wtick() -> float:
    """Return the resolution of the clock."""
    return time.get_clock_info("perf_counter").resolution


def Pcontrol(level: int) -> None:
    """Do nothing."""


def Get_address(location: Any) -> int:
    """Return where the memory of an array is."""
    if location is BOTTOM:
        return 0
    return int(memory_of(location, False)[0].__array_interface__["data"][0])


def Aint_add(base: int, disp: int) -> int:
    """Return the sum."""
    return base + disp


def Aint_diff(addr1: int, addr2: int) -> int:
    """Return the difference."""
    return addr1 - addr2


def Attach_buffer(buf: Any) -> None:
    """Keep the memory until `Detach_buffer`; buffered sends make copies of their own."""
    errors.require(not _attached, "ERR_BUFFER")
    _attached.append(buf)


def _as_detached(buf: Any) -> Any:
    return buf if buf is AUTOMATIC or buf is None else buffer.frombuffer(buf)


def Detach_buffer() -> Any:
    """Return the memory of `Attach_buffer`."""
    return _as_detached(_attached.pop()) if _attached else None


def Flush_buffer() -> None:
    """Do nothing: buffered sends are copies."""


def Iflush_buffer() -> Request:
    """Return a request that is done."""
    return Request.of(Ongoing())


def Alloc_mem(size: int, info: Any = None) -> buffer:
    """Return memory."""
    return buffer.allocate(size)


def Free_mem(mem: buffer) -> None:
    """Forget memory."""
    mem.release()


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
    state.context[1] = (state.context[1] + 1) % constants.TAG_UB_VALUE
    return state.context[0], state.context[1]


def _commctx_inter(comm: Any) -> tuple[Any, int, Any, bool]:
    state = comm.live
    if "context" not in state.__dict__:
        group = comms.Intracomm.of(messages.CommState(comms._split(state.group, 0, state.rank)))
        state.context = [topology.Intercomm.of(comm._duplicate()), -1, group]
    state.context[1] = (state.context[1] + 1) % constants.TAG_UB_VALUE
    return state.context[0], state.context[1], state.context[2], state.is_first


def _set_abort_status(status: int) -> None:
    _state["abort"] = status


# ---- communicators' buffers, ULFM -------------------------------------------------------------


def _attach(self: Any, buf: Any) -> None:
    """Keep the memory until `Detach_buffer`."""
    self.live.buffer = buf


def _detach(self: Any) -> Any:
    """Return the memory of `Attach_buffer`."""
    buf, self.live.buffer = self.live.buffer, None
    return _as_detached(buf)


def _get_parent() -> topology.Intercomm:
    """Return the null communicator: no rank was spawned."""
    return topology.Intercomm()


comms.Comm.Attach_buffer = _attach  # type: ignore[attr-defined]
comms.Comm.Detach_buffer = _detach  # type: ignore[attr-defined]
comms.Comm.Flush_buffer = lambda self: None  # type: ignore[attr-defined]
comms.Comm.Iflush_buffer = lambda self: Request.of(Ongoing())  # type: ignore[attr-defined]
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
    from unisono.adapters.mpi4py import files, packing, refused, windows

    names: dict[str, Any] = {**constants.NUMBERS, **constants.ERRORS, **named, **OPS}
    names |= {
        name: value
        for name, value in globals().items()
        if getattr(value, "__module__", "") == __name__ and name[0].isupper()
    }
    for module in (comms, topology, handles, requests, windows, files):
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__ and name in _CLASSES:
                names[name] = value
    names |= {
        "ERR_LASTCODE": constants.ERR_LASTCODE,
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
        **{"WEIGHTS_EMPTY": topology.WEIGHTS_EMPTY, "Compute_dims": topology.Compute_dims},
        "INFO_ENV": Info.Create({"command": ""}),
        "Pickle": comms.Pickle,
        "pickle": comms.pickle,
        **{name.capitalize(): getattr(errors, name) for name in _ERROR_CALLS},
        **{name: globals()[name] for name in _PRIVATE},
        "get_vendor": get_vendor,
        "_typedict": by_code,
        "_typedict_c": {k: v for k, v in by_code.items() if len(k) == 1},
        "_typedict_f": {},
        **_start(),
    }
    packing.install()
    names |= refused.install(names)
    for name, value in names.items():
        if isinstance(value, handles.Handle):
            key = value.family, id(value.ob)
            predefined.setdefault(key, (name, value))
            if name.endswith("_NULL") or key not in predefined:
                predefined[key] = (name, value)
        elif isinstance(value, type) and value.__module__.startswith(__package__ or ""):
            value.__module__ = "unisono.MPI"
    return names


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
