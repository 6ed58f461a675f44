"""PMI-1: answered from a store for MPICH and Intel MPI without mpiexec, and asked under mpiexec.

An MPI library asks its launcher for rank, size and the addresses of the other ranks. MPICH, Intel
MPI and their relatives ask by PMI-1: one line for each request, over an inherited descriptor. Here
a thread of the same process answers, and the store of the ranks holds the addresses.

`answer` is pure: from a request to the reply and to what the store must do.

Under mpiexec the launcher answers. `carry` asks it before or after the MPI library does, so that
ranks of several hosts find one another without MASTER_ADDR.

Source: MPICH 5 (src/pmi), Intel MPI 2021.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import select
import socket
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from unisono.core.base.host import reason_of
from unisono.core.base.threads.worker import WorkerThread
from unisono.core.platform.posix import require_posix
from unisono.core.platform.processes import loaded_files
from unisono.core.stores import Store
from unisono.errors import RendezvousError, UnisonoError

_VARIABLES = ("PMI_FD", "PMI_RANK", "PMI_SIZE", "PMI_PORT", "MPIR_CVAR_PMI_VERSION")
_LONGEST_VALUE = 4096
_LONGEST_REFUSAL = 200
_END = b"cmd=finalize_ack rc=0\n"

# How long the end of the thread may take, which may be in a call to the store.
_STOP_S = 1.0


class MPIJob(NamedTuple):
    """An MPI world, as one of its ranks asks for it.

    Attributes:
        name: Name that no other world in this store has had. An MPI library that finds the
            addresses of an earlier world fails or hangs.
        rank: This rank.
        size: Number of ranks.
        mapping: Text of `process_mapping`.
    """

    name: str
    rank: int
    size: int
    mapping: str


class PMIStep(NamedTuple):
    """The consequence of a request.

    Attributes:
        reply: The line to send; "{}" stands for the value that the store has.
        act: The store's part: "put", "get" (without a value the reply is `_missing(key)`), or
            "barrier". "abort": the MPI library is about to end the process, and expects no reply.
        key: Of the store.
        value: Of the store, or the reason of an abort.
    """

    reply: str
    act: Literal["", "put", "get", "barrier", "abort"] = ""
    key: str = ""
    value: str = ""


def answer(job: MPIJob, line: str) -> PMIStep:
    """Return the reply to one request."""
    # A value may contain spaces, and is always the last word.
    line, _, value = line.strip().partition(" value=")
    words = dict(word.split("=", 1) for word in line.split() if "=" in word)
    command, key = words.get("cmd", ""), words.get("key", "")
    replies = {
        "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
        "get_maxes": f"cmd=maxes kvsname_max=256 keylen_max=64 vallen_max={_LONGEST_VALUE} rc=0",
        "get_appnum": "cmd=appnum appnum=0 rc=0",
        "get_universe_size": f"cmd=universe_size size={job.size} rc=0",
        "get_my_kvsname": f"cmd=my_kvsname kvsname={job.name} rc=0",
        "finalize": _END.decode().strip(),
    }
    if command in replies:
        return PMIStep(replies[command])
    if command == "put":
        return PMIStep("cmd=put_result rc=0 msg=success", "put", key, value)
    if command == "get":
        found = "cmd=get_result rc=0 msg=success value={}"
        if key == "PMI_process_mapping":
            return PMIStep(found.format(job.mapping) if job.mapping else _missing(key))
        return PMIStep(found, "get", key)
    if command == "barrier_in":
        return PMIStep("cmd=barrier_out rc=0", "barrier")
    if command == "abort":
        return PMIStep("", "abort", value=words.get("exitcode", "?"))
    return PMIStep(f"cmd={command}_result rc=-1 msg=unknown_command")


def _missing(key: str) -> str:
    return f"cmd=get_result rc=-1 msg=key_{key}_not_found value=unknown"


def process_mapping(hosts: Sequence[str]) -> str:
    """Return the host of each rank in PMI's form: blocks of (first host, hosts, ranks per host).

    Without it MPICH takes each rank for a host of its own, and uses the network.

    Args:
        hosts: Ids of hosts, by rank.

    Returns:
        For 4 ranks on each of 2 hosts "(vector,(0,2,4))". "" if the text would be too long.
    """
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    blocks: list[list[int]] = []
    for host, same in groupby(hosts):
        number, count = numbers[host], len(list(same))
        if blocks and blocks[-1][2] == count and sum(blocks[-1][:2]) == number:
            blocks[-1][1] += 1
        else:
            blocks.append([number, 1, count])
    text = ",".join(f"({first},{several},{count})" for first, several, count in blocks)
    text = f"(vector,{text})"
    return text if len(text) < _LONGEST_VALUE else ""


def carry(fd: int, key: str, value: str | None, timeout_s: float) -> str:
    """Return the value of a key that one rank gives to all; every rank of the launch must call.

    Args:
        fd: The descriptor to the launcher, PMI_FD.
        key: No other value of the launch has it.
        value: None on the ranks that receive it.
        timeout_s: Of each answer; the launcher answers when all ranks have asked.

    Raises:
        RendezvousError: The launcher refuses or speaks no PMI-1, or a rank did not ask in time.
    """
    asked = "init"
    try:
        with _link(fd) as link:
            _ask(link, "init pmi_version=1 pmi_subversion=1", "pmi_version", timeout_s)
            _finalize_at_exit(fd, os.getpid())
            asked = "get_my_kvsname"
            name = _ask(link, asked, "kvsname", timeout_s)
            if value is not None:
                asked = "put"
                _ask(link, f"put kvsname={name} key={key} value={value}", "cmd", timeout_s)
            asked = "barrier_in"
            _ask(link, asked, "cmd", timeout_s)
            asked = "get"
            return _ask(link, f"get kvsname={name} key={key}", "value", timeout_s)
    except OSError as error:
        raise _no_answer(f"cannot be asked {asked!r} (PMI-1): {reason_of(error)}") from error


def _link(fd: int) -> socket.socket:
    """Return a socket of its own for a descriptor."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        # A child process that did not inherit the descriptor may have another file there.
        os.close(copy)
        raise


def _ask(link: socket.socket, request: str, wanted: str, timeout_s: float) -> str:
    """Return the word `wanted` of the reply to a request."""
    require_posix("to ask mpiexec")
    asked, reply = f"{request.partition(' ')[0]!r} (PMI-1)", b""
    # The MPI library uses the same file, and expects its mode unchanged: no time-out is set.
    link.sendall(f"cmd={request}\n".encode())
    while not reply.endswith(b"\n"):
        ready = select.select([link], [], [], timeout_s)[0]
        if not ready or not (part := link.recv(_LONGEST_VALUE, socket.MSG_DONTWAIT)):
            raise _no_answer(f"did not answer {asked} within {timeout_s:g} s")
        reply += part
    text, _, value = reply.decode(errors="replace").strip().partition(" value=")
    words = dict(word.partition("=")[::2] for word in text.split()) | {"value": value}
    if words.get("rc", "0") != "0" or not words.get(wanted):
        raise _no_answer(f"refused {asked}: {text[:_LONGEST_REFUSAL]!r}")
    return words[wanted]


def _no_answer(what: str) -> RendezvousError:
    return RendezvousError(
        f"mpiexec {what}", hint="set MASTER_ADDR and MASTER_PORT for all processes"
    )


@functools.cache
def _finalize_at_exit(fd: int, pid: int) -> None:
    """Report the end to the launcher. Intel MPI's otherwise kills all ranks when the first ends."""

    def finalize() -> None:
        # After an uncaught exception the launcher must not believe that this rank ended well.
        if pid == os.getpid() and not (hasattr(sys, "last_value") or _is_mpi_initialized()):
            with contextlib.suppress(OSError):
                os.write(fd, b"cmd=finalize\n")

    atexit.register(finalize)


def _is_mpi_initialized() -> bool:
    """Return whether an MPI library of this process, loaded in any way, reports the end itself."""
    require_posix("to ask MPI")
    flag = ctypes.c_int()
    for path in {file for file in loaded_files() if "mpi" in file.lower()}:
        with contextlib.suppress(OSError, AttributeError):  # no library, or none of MPI
            ctypes.CDLL(path, os.RTLD_NOLOAD).MPI_Initialized(ctypes.byref(flag))
        if flag.value:
            return True
    return False


class PMIServer:
    """Answers the MPI library of this process, on a thread.

    The library must be initialised without the interpreter lock, because this thread needs it.

    Args:
        store: Shared by exactly the ranks of the world.
        job: The world.
        timeout_s: Of each wait for the other ranks.

    Attributes:
        error: Why no request is answered any more; None at first.
        fds: The descriptors of both ends; `stop` leaves them open.
        worker: The thread.
    """

    def __init__(self, store: Store, job: MPIJob, timeout_s: float) -> None:
        self.error: BaseException | None = None
        self.job = job
        # With a connection of its own, because the group closes its store before MPI's end.
        self._store = store.clone()
        self._timeout_s = timeout_s
        self._ending = self._stopped = False
        self._barriers = 0
        self._ours, theirs = socket.socketpair()
        # The library may close its descriptor.
        self._wakes = theirs.dup()
        self.fds = self._ours.fileno(), theirs.detach()
        self.worker = WorkerThread("unisono-pmi")

    def start(self) -> None:
        """Start the thread, and set the variables by which the MPI library finds it."""
        job = self.job
        os.environ.pop("PMI_PORT", None)
        os.environ.update(PMI_FD=str(self.fds[1]), PMI_RANK=str(job.rank), PMI_SIZE=str(job.size))
        # MPICH ends the process if it finds the variables of srun --mpi=pmix, too, and no choice.
        os.environ["MPIR_CVAR_PMI_VERSION"] = "1"
        self.worker.start(self._serve)

    @staticmethod
    def hide() -> None:
        """Remove the variables: a child process does not inherit the descriptor."""
        for name in _VARIABLES:
            os.environ.pop(name, None)

    def expect_end(self, timeout_s: float) -> None:
        """Answer the library's last barriers although ranks are missing, after this time."""
        self._ending, self._timeout_s = True, timeout_s

    def stop(self) -> None:
        """End the thread, send the last reply in advance, and leave the descriptor open.

        MPICH sends its last request when the process ends. Then this thread cannot answer any more,
        and without the reply the process would never end. The request would also wake the thread.
        Its end then frees memory of OpenSSL, which the exit handlers free at the same time.
        """
        self._stopped = True
        with contextlib.suppress(OSError):
            self._ours.sendall(_END)
            self._wakes.sendall(b"\n")
        with contextlib.suppress(UnisonoError):
            self._store.close()
        self.worker.join(_STOP_S)
        self._wakes.close()
        # No destructor may close them before the end of the process.
        self._ours.detach()

    def _serve(self) -> None:
        try:
            with self._ours.makefile("r", encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if self._stopped:
                        return
                    reply = self._handle(answer(self.job, line))
                    if not reply:
                        return
                    self._ours.sendall(f"{reply}\n".encode())
        except Exception as error:
            self.error = error

    def _handle(self, step: PMIStep) -> str:
        store = self._store
        if step.act == "put":
            store.set(step.key, step.value)
        elif step.act == "get":
            if not store.check([step.key]):
                return _missing(step.key)
            return step.reply.format(store.get(step.key).decode())
        elif step.act == "barrier":
            self._barriers += 1
            try:
                store.barrier(f"barrier/{self._barriers}", self.job.size, self._timeout_s)
            except UnisonoError:
                # The other ranks may run on for hours, or the host of the store may have ended.
                if not self._ending:
                    raise
        elif step.act == "abort":
            self.error = RuntimeError(f"the MPI library ends this process with code {step.value}")
        return step.reply
