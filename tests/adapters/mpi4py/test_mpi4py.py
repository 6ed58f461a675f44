"""Programs for mpi4py on unisono: every kind of call against NumPy, and mpi4py's own tests."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import unisono
from tests.adapters.mpi4py.run_suite import chosen, run_file
from unisono import MPI, testing
from unisono.adapters.mpi4py.buffers import _Managed, memory_of
from unisono.adapters.mpi4py.names import page
from unisono.adapters.mpi4py.requests import Ongoing, Request
from unisono.adapters.mpi4py.windows import WinState
from unisono.core.base.source.tracebacks import trimmed
from unisono.core.operations.work import Work
from unisono.core.platform.memory import is_readable
from unisono.errors import CollectiveMismatchError, UnsupportedError

PROGRAM = Path(__file__).with_name("program.py")


def run(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program under `unisono run`."""
    launcher = [sys.executable, "-m", "unisono", "run", "--nproc-per-node", str(ranks)]
    return subprocess.run([*launcher, *words], capture_output=True, text=True, timeout=150)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_calls_agree_with_numpy(ranks: int, tmp_path: Path) -> None:
    """Collective calls, messages, communicators, windows and files give NumPy's results."""
    done = run(ranks, str(PROGRAM), str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == ranks


def test_the_first_failure_is_no_error_of_mpi(tmp_path: Path) -> None:
    """An error of MPI that reports the end of another rank comes second, and once."""
    program = tmp_path / "program.py"
    program.write_text(
        "from unisono import MPI\nc = MPI.COMM_WORLD\n"
        "if c.rank == 1:\n    raise ValueError('bad data')\nc.Barrier()\n"
    )
    done = run(2, str(program))
    assert "first failure: rank 1" in done.stderr
    assert "The above exception was the direct cause" not in done.stderr


def differs(rank: int) -> BaseException | None:
    """Make different calls; return the error."""
    comm = MPI.COMM_WORLD
    try:
        if rank == 0:
            comm.allreduce(1)
        else:
            comm.bcast([1], 0)
    except MPI.Exception as error:
        return error
    return None


def test_a_mismatch_names_the_calls_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then the calls of unisono that they are made of; its cause is not printed."""
    monkeypatch.delenv("UNISONO_FULL_TRACEBACK", raising=False)
    errors = testing.run(differs, 2)
    texts = [*map(str, errors)]
    assert texts[0].startswith("MPI_ERR_TRUNCATE: in allreduce: all_gather_into_tensor #1 in")
    assert texts[1].startswith("MPI_ERR_TRUNCATE: in bcast: broadcast_object_list[1] #1 in")
    for error in errors:
        with trimmed(error):
            assert error.__cause__ is None
        assert isinstance(error.__cause__, CollectiveMismatchError)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["absent.py"], f"script not found: absent.py (in {os.getcwd()})\n"),
        (["-m", "absent.part"], "no module named absent\n"),
    ],
)
def test_a_program_that_is_absent_is_named(words: list[str], text: str) -> None:
    """Without a traceback of runpy."""
    command = [sys.executable, "-m", "unisono.mpi4py", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (1, text)


def test_synchronous_messages_keep_their_order() -> None:
    """Of arrays and objects, from several threads, and beside other messages."""
    done = run(2, str(PROGRAM.with_name("order_program.py")), "7")
    assert (done.returncode, done.stdout) == (0, "done\ndone\n"), done.stderr + done.stdout


@pytest.mark.parametrize("engine", ["native", "mpi"])
def test_takes_the_place_of_mpi4py(tmp_path: Path, engine: str) -> None:
    """`python -m unisono.mpi4py` runs a program that imports mpi4py, also if the engine has it."""
    if engine == "mpi" and not unisono.is_mpi_available():
        pytest.skip("no MPI library")
    program = tmp_path / "program.py"
    program.write_text("from mpi4py import MPI\nprint(MPI.COMM_WORLD.size, MPI.get_vendor()[0])\n")
    done = subprocess.run(
        [sys.executable, "-m", "unisono.mpi4py", str(program)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"UNISONO_ENGINE": engine},
    )
    assert (done.returncode, done.stdout) == (0, "1 unisono\n"), done.stderr


def test_a_call_that_is_refused_in_a_thread_ends_the_program(tmp_path: Path) -> None:
    """As in the executors of mpi4py.futures, for whose results their program waits."""
    program = tmp_path / "program.py"
    program.write_text(
        "from mpi4py import MPI\nfrom threading import Event, Thread\n"
        "Thread(target=MPI.COMM_SELF.Spawn, daemon=True).start()\nEvent().wait(90)\n"
    )
    done = run(2, "-m", "unisono.mpi4py", str(program))
    assert done.returncode == 1
    assert "RefusedCallError: unisono.MPI has no Intracomm.Spawn" in done.stderr
    assert "MPI.Comm.Abort(1)" in done.stderr


def test_the_page_lists_what_is_refused() -> None:
    """The reference is what `make docs` writes."""
    text = Path("docs/reference/mpi4py.md").read_text(encoding="utf-8")
    assert text == page()


# At 2 ranks; see CONTRIBUTING.md for the whole table.
_FILES = ["test_cco_obj", "test_comm", "test_group", "test_op", "test_status", "test_request"]


@pytest.mark.whole
def test_own_suite_of_mpi4py() -> None:
    """mpi4py's tests pass where they are: UNISONO_MPI4PY_TESTS names their folder."""
    folder = os.environ.get("UNISONO_MPI4PY_TESTS")
    if not folder:
        pytest.skip("UNISONO_MPI4PY_TESTS does not name the folder test/ of mpi4py's source")
    for file in chosen(Path(folder), _FILES):
        outcome = run_file(file, 2)
        assert outcome.ended, file.name
        assert not {n for n, word in outcome.tests.items() if word == "failed"}, file.name


def test_memory_that_the_cpu_may_not_read_is_told() -> None:
    """An array interface may name any address."""
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert is_readable(start, 2 * mmap.PAGESIZE)
    libc = ctypes.CDLL(None)
    behind = ctypes.c_void_p(start + mmap.PAGESIZE)
    assert libc.mprotect(behind, mmap.PAGESIZE, 0) == 0
    assert is_readable(start, mmap.PAGESIZE)
    assert not is_readable(start, mmap.PAGESIZE + 1)
    assert libc.mprotect(behind, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == 0


class _OnGpu:
    """An array whose DLPack says that it is on a GPU."""

    def __init__(self, address: int, count: int) -> None:
        self.shape = (ctypes.c_int64 * 1)(count)
        self.managed = _Managed()
        tensor = self.managed.tensor
        tensor.data, tensor.device[0], tensor.ndim = address, 2, 1
        tensor.code, tensor.bits, tensor.lanes = 2, 64, 1
        tensor.shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))

    def __dlpack__(self, **how: object) -> object:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_memory_of_a_gpu_is_taken_if_the_cpu_may_read_it() -> None:
    """Pinned and managed memory; the error for other memory comes before anything reads it."""
    values = np.arange(3.0)
    data, code = memory_of(_OnGpu(values.ctypes.data, 3), writes=True)
    assert (data.view("d").tolist(), code) == ([0.0, 1.0, 2.0], "d")
    with mmap.mmap(-1, mmap.PAGESIZE) as pages:
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        protect = ctypes.CDLL(None).mprotect
        assert protect(ctypes.c_void_p(start), mmap.PAGESIZE, 0) == 0
        with pytest.raises(UnsupportedError) as caught:
            memory_of(_OnGpu(start, 8), writes=False)
        assert protect(ctypes.c_void_p(start), mmap.PAGESIZE, 3) == 0
    assert str(caught.value) == "unisono.MPI takes memory of the CPU, and this is on a GPU"


class _Exported:
    """An array with CUDA's array interface, of memory that the CPU may read."""

    def __init__(self, array: np.ndarray[Any, Any], **changed: object) -> None:
        words = {"data": (array.ctypes.data, False), "typestr": array.dtype.str}
        shaped = {"shape": array.shape, "strides": array.strides}
        self.__cuda_array_interface__ = {**words, **shaped, **changed}


def test_an_array_interface_that_is_not_plain_memory_is_refused() -> None:
    """With masks, gaps, negative shapes and other types; records go as bytes, with a warning."""
    values = np.arange(12.0).reshape(3, 4)
    for array in (values, values.T):
        data, code = memory_of(_Exported(array), writes=True)
        assert (data.view("d").tolist(), code) == (list(range(12)), "d")
    assert memory_of(_Exported(values, typestr=">f8"), writes=False)[1] == ""
    wrong: list[dict[str, object]] = [
        {"mask": True},
        {"strides": (64, 8)},
        {"shape": (3, -4), "strides": None},
        {"typestr": "#f8"},
        {"data": (values.ctypes.data, True)},
    ]
    for each in wrong:
        with pytest.raises(BufferError):
            memory_of(_Exported(values, **each), writes=True)
    with pytest.raises(ValueError, match="X"):
        memory_of(_Exported(values, typestr="<fX"), writes=True)
    fields = {"typestr": "|V32", "shape": (3,), "strides": (32,), "descr": [("", "<f8")] * 4}
    with pytest.warns(RuntimeWarning, match="ignoring 'descr'"):
        data, code = memory_of(_Exported(values, **fields), writes=False)
    assert (len(data), code) == (96, "B")


def test_a_capsule_that_was_used_is_refused() -> None:
    """One that was not may be given again: it keeps the memory, which is not read after it."""
    values = np.arange(3.0)
    capsule: Any = values.__dlpack__()

    class Array:
        def __dlpack__(self, **how: object) -> object:
            return capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    for _ in range(2):
        assert memory_of(Array(), writes=False)[0].view("d").tolist() == [0.0, 1.0, 2.0]
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    name = ctypes.c_char_p(b"used_dltensor")
    rename(capsule, name)
    with pytest.raises(BufferError, match="that was not used"):
        memory_of(Array(), writes=False)
    rename(capsule, b"dltensor")


def _test_synchronous_sends(rank: int) -> tuple[Any, Any, int]:
    """Test synchronous sends to this rank, of which three of four messages have been received.

    Returns:
        What Testany and then Testsome return, and how many messages another thread has to end.
    """
    comm = MPI.COMM_WORLD
    with patch.object(Work, "on_end") as told:
        requests = [comm.issend(k, rank, 5) for k in range(4)]
        assert not MPI.Request.Testall(requests)
        assert [comm.recv(source=rank, tag=5) for _ in range(3)] == [0, 1, 2]
        assert not MPI.Request.Testall(requests)
        ended = MPI.Request.Testany(requests), MPI.Request.Testsome(requests)
        assert comm.recv(source=rank, tag=5) == 3
        MPI.Request.Waitall(requests)
    return *ended, told.call_count


def test_a_synchronous_send_to_itself_needs_no_other_thread() -> None:
    """A busy host may not run that thread for long; requests must end in their order then, too."""
    assert testing.run(_test_synchronous_sends, 1) == [((0, True), [1, 2], 0)]


class _EndsSoon(Ongoing):
    """A call that has ended when it is tested again."""

    def test(self) -> bool:
        self.is_done, was_tested = self.is_own, self.is_own
        self.is_own = True
        return was_tested


def test_the_first_request_that_has_ended_is_returned() -> None:
    """Also if one behind it was seen to end before: messages end in their order."""
    made: Any = Request
    first, second = made.of(_EndsSoon()), made.of(Ongoing())
    assert made.Testany([first, second]) == (0, True)
    assert made.Testany([first, second]) == (1, True)
    assert made.Waitany([made.of(_EndsSoon()), made.of(Ongoing())]) == 0


class _PutInto(np.ndarray[Any, Any]):
    """Memory of a program: while it is written, another rank puts a 7 into the public copy."""

    public: Any

    def __setitem__(self, where: Any, value: Any) -> None:
        super().__setitem__(where, value)
        self.public[2] = 7


def test_a_put_during_a_synchronisation_is_kept() -> None:
    """It is no change of the program, which would overwrite it at the next synchronisation."""
    state: Any = WinState.__new__(WinState)
    state.public, state.seen = np.array([1, 2, 3], np.uint8), np.array([1, 2, 3], np.uint8)
    state.memory = np.array([5, 2, 3], np.uint8).view(_PutInto)
    state.memory.public = state.public
    state.sync()
    state.sync()
    assert state.public.tolist() == state.memory.tolist() == [5, 2, 7]
