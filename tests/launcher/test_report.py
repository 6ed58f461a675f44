"""Reports: the right traceback out of a standard error, the right failure out of several."""

import random
import signal
import traceback
from types import SimpleNamespace

import pytest

from tests.support.programs import python
from unisono.core.base import document
from unisono.core.rendezvous.agents.state import AgentsState
from unisono.errors import CollectiveAbortedError, PeerFailedError, PeerLostError, StepAborted
from unisono.launcher.agent import Agent
from unisono.launcher.report import (
    SETTLE_S,
    ExitLog,
    WorkerFailure,
    exit_status,
    leavers,
    render,
    root_cause_first,
)
from unisono.launcher.spec import LaunchResult, LaunchSpec
from unisono.launcher.traceback_text import exception_line, extract_traceback, is_consequence

PLAIN = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
ValueError: first line
second line"""

# As after an exception that ended the script; and in a call of a script.
AT_EXIT = """Fatal Python error: Aborted

Thread 0x00007f0156602b80 (most recent call first):
  <no Python frame>"""
IN_CALL = AT_EXIT.replace("<no Python frame>", 'File "a.py", line 7 in f')


def failure(rank, text="", time_s=0.0, exit_code=1):
    return WorkerFailure(rank=rank, pid=100 + rank, exit_code=exit_code, time_s=time_s, text=text)


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("", ""),
        ("just\na few\nlines", "just\na few\nlines"),
        ("\n".join(map(str, range(50))), "\n".join(map(str, range(30, 50)))),
        (f"warning\n{PLAIN}\n", PLAIN),
        (f"{PLAIN.replace('a.py', 'thread.py')}\nlog line\n{PLAIN}\n", PLAIN),
        (f"{PLAIN}\nException ignored in: <f>\nTraceback (most recent call last):\n  x\nE", PLAIN),
        (f"Exception ignored in: <f>\nTraceback (most recent call last):\n  x\nE\n{PLAIN}", PLAIN),
        (f"log\n{AT_EXIT}", AT_EXIT),
        (f"log\n{PLAIN}\nterminate called\n{AT_EXIT}", f"{PLAIN}\nterminate called\n{AT_EXIT}"),
        (f"log\n{PLAIN}\n{IN_CALL}", IN_CALL),
        ('log\n  File "a.py", line 1\n    (\nSyntaxError: bad', None),
    ],
)
def test_traceback_is_found_among_other_lines(stderr, expected):
    if expected is None:
        expected = stderr.removeprefix("log\n")
    assert extract_traceback(stderr) == expected


@pytest.mark.parametrize(
    "program",
    [
        "raise ValueError('boom')",
        "try:\n  1/0\nexcept ZeroDivisionError as e:\n  raise ValueError('boom') from e",
        "try:\n  1/0\nexcept ZeroDivisionError:\n  raise ValueError('boom')",
        "def f(n): raise ValueError('boom') if not n else f(n - 1)\nf(5)",
        "x = (",
        "raise ExceptionGroup('boom', [ValueError(1), KeyError(2)])",
    ],
)
def test_whole_text_of_the_real_interpreter_is_kept(program):
    done = python("-c", program)
    assert done.returncode == 1
    assert extract_traceback(f"a line before\n{done.stderr}") == done.stderr.rstrip("\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PLAIN, "ValueError: first line"),
        (f"KeyError: 1\n\n{PLAIN}", "ValueError: first line"),
        ("\n".join(f"[rank1]: {line}" for line in PLAIN.splitlines()), "ValueError: first line"),
        (f"{PLAIN}\n{AT_EXIT}", "ValueError: first line"),
        (f"{PLAIN}\n{IN_CALL}", "Fatal Python error: Aborted"),
        (AT_EXIT, "Fatal Python error: Aborted"),
        ("no traceback: at all", ""),
        ("", ""),
    ],
)
def test_exception_line(text, expected):
    assert exception_line(text) == expected


@pytest.mark.parametrize(
    ("last_line", "expected"),
    [
        ("ValueError: boom", False),
        ("ValueError: caused by a PeerLostError", False),
        ("PeerLostError", True),
        ("unisono.errors.PeerLostError: all_reduce #4: rank 1 is gone", True),
        ("unisono.errors.CollectiveAbortedError: x", True),
        ("unisono.errors.CollectiveTimeoutError: x", False),
        ("unisono.MPI.Exception: MPI_ERR_PROC_ABORTED: barrier #1: rank 1 raised KeyError", True),
        ("unisono.MPI.Exception: MPI_ERR_PROC_FAILED: barrier #1: rank 1 was lost", True),
        ("unisono.MPI.Exception: MPI_ERR_OTHER: CollectiveAbortedError: barrier #1", True),
        ("unisono.MPI.Exception: MPI_ERR_OTHER: ClosedError: rank 1", False),
        ("unisono.MPI.Exception: MPI_ERR_TRUNCATE: barrier #1 does not match", False),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("RuntimeError: [gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:9", True),
    ],
)
def test_consequences_of_another_ranks_end(last_line, expected):
    text = f'Traceback (most recent call last):\n  File "a.py", line 1\n{last_line}'
    assert is_consequence(text) is expected


GLOO = "[/a/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:9"


def raised(error, how="bare", above=None):
    """Return an error as it is after its `raise`."""
    try:
        if how == "from":
            raise error from above
        if how == "context":
            try:
                raise above
            finally:
                raise error
        raise error
    except BaseException as caught:
        return caught


def shown(error):
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("how", ["from", "context"])
@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (PeerLostError("rank 1 was lost"), True),
        (RuntimeError(GLOO), True),
        (ValueError("bad batch"), False),
        # torch's DataLoader raises from it when one of its workers has died.
        (ConnectionResetError(104, "Connection reset by peer"), False),
    ],
)
def test_wrapped_error_counts_as_what_it_wraps(how, inner, expected):
    outer = raised(KeyError("outer"), how, raised(RuntimeError("middle"), how, raised(inner)))
    for text in (shown(outer), "\n".join(f"[rank0]: {x}" for x in shown(outer).splitlines())):
        assert is_consequence(text) is expected
        assert exception_line(text) == "KeyError: 'outer'"


def test_error_that_ddp_has_made_a_text_of_is_a_consequence():
    text = "Got the following error when running the callback: PeerFailedError: rank 1 raised x"
    assert is_consequence(shown(raised(RuntimeError(f"{text}\n\nAt:\n  /a/b.py(1): f\n"))))
    assert not is_consequence(shown(raised(RuntimeError(text.replace("PeerFailed", "Value")))))


@pytest.mark.parametrize("seed", range(20))
def test_exceptions_of_every_shape_count_as_their_objects_tell(seed):
    draw = random.Random(seed)
    peers = PeerLostError, PeerFailedError, CollectiveAbortedError, StepAborted

    def make(depth):
        """Return an error and whether it reports only the end of a peer."""
        if depth and draw.random() < 0.4:
            members = [make(depth - 1) for _ in range(draw.randint(1, 4))]
            error = ExceptionGroup("several\n  | or so", [error for error, _ in members])
            follows = all(follows for _, follows in members)
        else:
            follows = draw.random() < 0.6
            error = draw.choice(peers)("x\ny") if follows else ValueError("one\n\ntwo: 2")
        if draw.random() < 0.2:
            return error, follows  # never raised: it has no traceback
        if not depth or draw.random() < 0.5:
            return raised(error), follows
        above, above_follows = make(depth - 1)
        if draw.random() < 0.2:
            return raised(error, "from", above), follows or above_follows
        how = draw.choice(["from", "context"])
        return raised(error, how, raised(above)), follows or above_follows

    for _ in range(20):
        error, follows = make(draw.randint(0, 4))
        text = shown(raised(error))
        assert is_consequence(text) is follows, text
        assert exception_line(text).startswith(type(error).__name__) or "." in exception_line(text)


def test_root_cause_is_the_earliest_original_failure():
    lost = PLAIN.replace("ValueError: first", "PeerLostError: first")
    failures = [failure(0, lost, 1.0), failure(1, PLAIN, 3.0), failure(2, "", 2.0, -9)]
    assert [f.rank for f in root_cause_first(failures)] == [2, 1, 0]
    assert [f.rank for f in root_cause_first([failures[0], failure(3, lost, 0.5)])] == [3, 0]


def test_first_failure_is_known_at_once_unless_it_is_a_consequence():
    texts = {0: PLAIN.replace("ValueError: first", "PeerLostError: first"), 1: PLAIN}
    exits = ExitLog(lambda rank: texts.get(rank, ""))
    exits.add(2, 102, 0)
    assert (exits.failures(), list(exits.left_s), exits.known_in_s()) == ([], [2], float("inf"))
    exits.add(0, 100, 1)
    assert exits.known_in_s() <= SETTLE_S
    # A rank printed an error of its own and has not ended: it may take longer, but not for ever.
    assert exits.settle_again()
    assert exits.known_in_s() > SETTLE_S
    assert not exits.settle_again()
    exits.add(1, 101, -9, "a hint")
    assert exits.known_in_s() == 0.0
    texts[0] += " and more"
    first, second = exits.failures()
    assert (first.rank, first.exit_code, first.hint, first.text) == (1, -9, "a hint", PLAIN)
    assert (second.rank, second.pid, second.text) == (0, 100, texts[0])


def test_an_original_failure_settles_nothing():
    exits = ExitLog({0: PLAIN}.__getitem__)
    exits.add(0, 100, 1)
    assert not exits.settle_again()
    assert exits.known_in_s() == 0.0


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "exited with code 3"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-99, "was killed by signal 99"),
    ],
)
def test_exit_status_in_words(code, words):
    assert exit_status(code) == words


def test_leavers_are_told_if_there_are_any():
    first = failure(0, "", 100.0)
    assert leavers(first, {}) == leavers(first, {1: 100.5}) == ""
    lost = failure(0, PLAIN.replace("ValueError: first", "PeerLostError: first"), 100.0)
    after = "left with exit code 0 after the first failure: rank 1 0.5 s"
    assert leavers(lost, {1: 100.5, 2: 102.0}) == after
    both = "left with exit code 0 before the first failure: rank 2 1.0 s; after the first failure"
    assert leavers(lost, {1: 100.5, 2: 99.0}) == f"{both}: rank 1 0.5 s"
    many = leavers(first, {rank: 90.0 + rank / 10 for rank in range(1, 12)})
    assert many.startswith(
        "left with exit code 0 before the first failure: rank 1 9.9 s, rank 2 9.8"
    )
    assert many.endswith("rank 8 9.2 s, ...")


def test_report_ends_with_the_first_failures_text():
    failures = [failure(1, PLAIN, 100.0), failure(0, "", 101.0, 7)]
    left_s, places = {4: 96.9, 5: 99.8, 6: 100.5}, {7: "in load (data.py:5)"}
    text = render(failures, [2, 3, 7], left_s, places, prefix="> ")
    lines = text.splitlines()
    assert lines[0].startswith("> rank 0 (pid 100, host ")
    assert lines[0].endswith("exited with code 7")
    assert lines[1] == "> ranks 2, 3 stopped by the launcher"
    assert lines[2] == "> rank 7 stopped by the launcher, in load (data.py:5)"
    assert (
        lines[3] == "> left with exit code 0 before the first failure: rank 4 3.1 s, rank 5 0.2 s"
    )
    assert lines[4].startswith("> first failure: rank 1 (pid 101, host ")
    assert lines[5:] == PLAIN.splitlines()
    shown = render(failures, [2, 3, 7], left_s, places, prefix="> ", is_shown=True).splitlines()
    assert shown[:4] == lines[:4]
    assert shown[4:] == [f"{lines[4]}; its traceback is above: ValueError: first line"]


def test_failures_of_another_node_that_cannot_be_read_hide_no_others():
    own, other = (
        WorkerFailure(rank=rank, pid=9, exit_code=1, time_s=float(rank), node=f"n{rank}")
        for rank in (1, 2)
    )
    texts = ["\ufffd", "[1]", document.dumps([other])]
    rendezvous = SimpleNamespace(
        node_id="n1", state=AgentsState(), exchange=lambda mine, *_, **__: [*texts, mine]
    )
    told = []
    agent = Agent(LaunchSpec(commands=[["true"]]), told.append)
    agent._rendezvous = rendezvous
    result = LaunchResult(failures=(own,), stopped=(), left_s={}, places={}, signum=None)
    assert agent._all_failures(result) == (own, other)
    assert [line.partition(": ")[0] for line in told] == [
        "the failures of another node cannot be read"
    ] * 2
