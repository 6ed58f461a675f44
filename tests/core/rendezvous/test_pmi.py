"""PMI-1: replies line by line, and the server behind the socket of an MPI library."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from functools import partial

import pytest

from tests.support.calls import wait_until
from tests.support.together import on_threads
from unisono.core.rendezvous.pmi import MPIJob, PMIServer, answer, carry, process_mapping
from unisono.core.stores import HashStore, PrefixStore
from unisono.errors import RendezvousError

JOB = MPIJob("unisono_1", 1, 4, "(vector,(0,2,2))")

# As MPICH 5.0 and Intel MPI 2021 send them.
TRANSCRIPT = [
    ("cmd=init pmi_version=1 pmi_subversion=1",
     "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"),
    ("cmd=get_maxes", "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=4096 rc=0"),
    ("cmd=get_appnum", "cmd=appnum appnum=0 rc=0"),
    ("cmd=get_universe_size", "cmd=universe_size size=4 rc=0"),
    ("cmd=get_my_kvsname", "cmd=my_kvsname kvsname=unisono_1 rc=0"),
    ("cmd=get kvsname=unisono_1 key=PMI_process_mapping",
     "cmd=get_result rc=0 msg=success value=(vector,(0,2,2))"),
    ("cmd=get kvsname=unisono_1 key=PMI_hwloc_xmlfile",
     "cmd=get_result rc=-1 msg=key_PMI_hwloc_xmlfile_not_found value=unknown"),
    ("cmd=put kvsname=unisono_1 key=bc-1 value=tcp:10.0.0.1 port=7 = {}",
     "cmd=put_result rc=0 msg=success"),
    ("cmd=get kvsname=unisono_1 key=bc-1",
     "cmd=get_result rc=0 msg=success value=tcp:10.0.0.1 port=7 = {}"),
    ("cmd=barrier_in", "cmd=barrier_out rc=0"),
    ("cmd=spawn nprocs=1", "cmd=spawn_result rc=-1 msg=unknown_command"),
    ("", "cmd=_result rc=-1 msg=unknown_command"),
    ("cmd=finalize", "cmd=finalize_ack rc=0"),
]  # fmt: skip


@contextlib.contextmanager
def served(store, job, timeout_s=30):
    """Yield the server, and the library's end of its socket as a file."""
    server = PMIServer(store, job, timeout_s)
    server.start()
    fd = int(os.environ["PMI_FD"])
    assert (os.environ["PMI_RANK"], os.environ["PMI_SIZE"]) == (str(job.rank), str(job.size))
    server.hide()
    assert not any(name.startswith("PMI_") for name in os.environ)
    try:
        with socket.socket(fileno=os.dup(fd)) as end, end.makefile("rw", newline="\n") as lines:
            yield server, lines
            end.shutdown(socket.SHUT_RDWR)
    finally:
        server.stop()
        # A thread that ends in the exit handlers of the process crashes in OpenSSL.
        assert not server.worker.thread.is_alive()
        # `stop` leaves the descriptors to the process.
        for number in server.fds:
            os.close(number)


def ask(lines, text):
    lines.write(f"{text}\n")
    lines.flush()
    return lines.readline().strip()


def test_a_transcript():
    store = HashStore()
    with served(store, JOB) as (_, lines):
        for request, reply in TRANSCRIPT:
            if request == "cmd=barrier_in":
                others = [
                    threading.Thread(target=store.barrier, args=("barrier/1", 4)) for _ in range(3)
                ]
                for other in others:
                    other.start()
            assert ask(lines, request) == reply
        for other in others:
            other.join()


def test_values_and_half_lines_between_two_ranks():
    store = HashStore()
    long = "x" * 4000
    with (
        served(PrefixStore("a", store), MPIJob("k", 0, 2, "")) as (_, first),
        served(PrefixStore("a", store), MPIJob("k", 1, 2, "")) as (_, second),
    ):
        assert "success" in ask(first, f"cmd=put kvsname=k key=a value={long}")
        first.write("cmd=barr")
        first.flush()
        first.write("ier_in\n")
        first.flush()
        assert ask(second, "cmd=barrier_in") == "cmd=barrier_out rc=0"
        assert first.readline() == "cmd=barrier_out rc=0\n"
        assert ask(second, "cmd=get kvsname=k key=a").endswith(f"value={long}")
        assert "not_found" in ask(second, "cmd=get kvsname=k key=PMI_process_mapping")


def test_an_abort_and_a_rank_that_never_comes_are_errors():
    with served(HashStore(), JOB) as (server, lines):
        lines.write("cmd=abort exitcode=15\n")
        lines.flush()
        wait_until(lambda: server.error is not None)
        assert "code 15" in str(server.error)
    with served(HashStore(), JOB, timeout_s=0.1) as (server, lines):
        lines.write("cmd=barrier_in\n")
        lines.flush()
        wait_until(lambda: server.error is not None)
        assert "1 of 4 callers arrived" in str(server.error)


def test_stop_ends_the_thread_while_the_library_is_connected():
    # MPICH writes to its descriptor when the process ends.
    server = PMIServer(HashStore(), JOB, 30)
    server.start()
    server.hide()
    ours, theirs = server.fds
    with socket.socket(fileno=theirs) as library, library.makefile("rw", newline="\n") as lines:
        assert ask(lines, "cmd=get_appnum") == "cmd=appnum appnum=0 rc=0"
        server.stop()
        assert not server.worker.thread.is_alive()
        assert ask(lines, "cmd=finalize") == "cmd=finalize_ack rc=0"
    os.close(ours)


def test_the_last_barrier_does_not_wait_for_ever():
    with served(HashStore(), JOB) as (server, lines):
        server.expect_end(0.1)
        assert ask(lines, "cmd=barrier_in") == "cmd=barrier_out rc=0"
        assert server.error is None


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("aaaa", "(vector,(0,1,4))"),
        ("aaaabbbb", "(vector,(0,2,4))"),
        ("abc", "(vector,(0,3,1))"),
        ("abab", "(vector,(0,2,1),(0,2,1))"),
        ("aabbbc", "(vector,(0,1,2),(1,1,3),(2,1,1))"),
    ],
)
def test_process_mapping(hosts, text):
    assert process_mapping(hosts) == text
    assert answer(JOB._replace(mapping=text), "cmd=get key=PMI_process_mapping").reply.endswith(
        text
    )


def test_a_mapping_that_is_too_long_is_left_out():
    hosts = [str(n % 700 if n % 3 else n % 7) for n in range(3000)]
    assert process_mapping(hosts) == ""


def test_a_value_is_carried_to_all_ranks():
    store = HashStore()
    jobs = [MPIJob("unisono_1", rank, 2, "") for rank in range(2)]
    with contextlib.ExitStack() as stack:
        fds = [stack.enter_context(served(store, job))[0].fds[1] for job in jobs]
        for number, text in enumerate(["29500,10.0.0.1,fd00::1", "x = 1 value=2"]):
            values = on_threads(
                partial(carry, fds[0], f"k{number}", text, 30),
                partial(carry, fds[1], f"k{number}", None, 30),
            )
            assert values == [text, text]


def test_a_launcher_that_does_not_answer():
    ours, theirs = socket.socketpair()
    line = r"mpiexec did not answer 'init' \(PMI-1\) within 0\.01 s"
    with ours, theirs, pytest.raises(RendezvousError, match=line) as caught:
        carry(theirs.fileno(), "k", "v", 0.01)
    assert "MASTER_ADDR" in caught.value.hint


# The launcher's answers in turn -> the line of the error
REFUSALS = {
    "init": (["cmd=response_to_init rc=-1"], r"refused 'init' \(PMI-1\): 'cmd=resp"),
    "no text": (["", "x"], "refused 'init' .*: ''"),
    "name": (["pmi_version=1", "cmd=my_kvsname rc=-1"], "refused 'get_my_kvsname' .*rc=-1'"),
    "no name": (["pmi_version=1", "cmd=my_kvsname kvsname="], "refused 'get_my_kvsname'"),
    "put": (["pmi_version=1", "kvsname=k", "cmd=put_result rc=-1 msg=full"], "refused 'put'.*full"),
    "get": (["pmi_version=1", "kvsname=k", "cmd=x rc=0", "cmd=barrier_out", "cmd=get_result rc=-1"],
        "refused 'get' "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_launcher_that_refuses(name):
    replies, line = REFUSALS[name]
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def serve():
            with ours.makefile("r") as requests:
                for _, reply in zip(requests, replies, strict=False):
                    ours.sendall(f"{reply}\n".encode())

        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(RendezvousError, match=f"^mpiexec {line}") as caught:
            carry(theirs.fileno(), "k", "v", 30)
        assert "MASTER_ADDR" in caught.value.hint
        theirs.shutdown(socket.SHUT_RDWR)
        server.join()


def test_a_launcher_whose_descriptor_was_not_inherited(tmp_path):
    line = r"^mpiexec cannot be asked 'init' \(PMI-1\): "
    with open(tmp_path / "file", "w") as file, pytest.raises(RendezvousError, match=line):
        carry(file.fileno(), "k", "v", 30)
    with pytest.raises(RendezvousError, match=r"^mpiexec cannot be asked 'init' .*: Bad file des"):
        carry(987_654, "k", "v", 30)


ENDS = """
import ctypes, sys
from unisono.core.rendezvous.pmi import carry
assert carry(int(sys.argv[1]), "k", "v", 30) == "v"
"""
LIBRARY = "int MPI_Initialized(int *flag) { *flag = 1; return 0; }"
LISTS = pytest.mark.linux("lists the libraries of a process")
HAS_CC = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.mark.parametrize(
    ("end", "reported"),
    [
        ("", b"cmd=finalize\n"),
        ("raise ValueError", b""),
        pytest.param("ctypes.CDLL(sys.argv[2])", b"", marks=(HAS_CC, LISTS)),
    ],
    ids=["well", "exception", "MPI without mpi4py"],
)
def test_end_is_reported_once_and_not_after_an_exception(tmp_path, end, reported):
    mpi = tmp_path / "libmpi.so"
    if "CDLL" in end:
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(mpi)]
        subprocess.run(command, input=LIBRARY, text=True, check=True)
    replies = "pmi_version=1", "kvsname=k", "cmd=put_result", "cmd=barrier_out", "cmd=x value=v"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", ENDS + end, str(theirs.fileno()), str(mpi)]
        fds = (theirs.fileno(),)
        with subprocess.Popen(command, pass_fds=fds, stderr=subprocess.DEVNULL) as process:
            theirs.close()
            with ours.makefile("rb") as requests:
                for reply in replies:
                    assert requests.readline()
                    ours.sendall(f"{reply}\n".encode())
                assert requests.read() == reported
    assert process.returncode == ("raise" in end)
