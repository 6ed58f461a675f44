"""The Python stack of a process that has no group of unisono, read by its launcher and `stacks`.

In a rank of a launcher, `import torch` registers Python's faulthandler for a signal. At the signal
it writes the stack of the main thread to a file in memory, also while that thread is in C. Without
a signal this costs nothing. The kernel lets only the same user read the file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable
from typing import NamedTuple

from unisono.core.base.source.where import FrameRow, is_of_user
from unisono.core.platform.files import lock
from unisono.core.platform.memory import new_memory_file
from unisono.core.platform.posix import pread
from unisono.core.platform.processes import (
    IS_LINUX,
    catches,
    is_of_this_user,
    open_file_of,
    open_files,
)

_NAME = "unisono-stack"
_LONGEST_NAME = 200
_SIGNAL = getattr(signal, "SIGRTMAX", 64) - 5  # real-time signals are for programs
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')

# How long the processes have for their answers, and how long a complete answer stays unchanged.
_ANSWER_S = 0.3
_QUIET_S = 0.02


def offer_stack() -> None:
    """Make the main thread's stack readable, if this process is a rank of a launcher.

    Does nothing on systems other than Linux, in children of a rank, or if the program uses the
    signal itself.
    """
    # The launcher makes each rank the leader of a session. The children have its variables, too.
    if not IS_LINUX or os.getsid(0) != os.getpid():
        return
    places = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")]
    if not all(places) or signal.getsignal(_SIGNAL) != signal.SIG_DFL:
        return
    name = ":".join(map(str, (_NAME, os.getpid(), *places)))
    with contextlib.suppress(ValueError, OSError):  # not the main thread; an old kernel
        # At its end the interpreter sets this again. With the default, a signal would then kill it.
        signal.signal(_SIGNAL, signal.SIG_IGN)
        fd = new_memory_file(name[:_LONGEST_NAME], os.O_APPEND)
        # The stacks of other threads change while the handler would read them.
        faulthandler.register(_SIGNAL, file=fd, all_threads=False)


class OfferedStack(NamedTuple):
    """The stack of the main thread of a rank, innermost frame first."""

    pid: int
    rank: int
    world_size: int
    run_id: str
    rows: list[FrameRow]


def offered_stacks(pids: Iterable[int]) -> list[OfferedStack]:
    """Return the stacks of these processes of this host, as far as they answer."""
    with contextlib.ExitStack() as opened:
        asked = []
        for pid in pids:
            with contextlib.suppress(OSError):
                # The program of another user may name any file so, which root would cut to 0 bytes.
                if not is_of_this_user(pid) or (found := _find(pid)) is None:
                    continue
                fd, words = found
                file = opened.enter_context(open_file_of(pid, fd))
                lock(file)  # another client reads
                file.truncate(0)
                os.kill(pid, _SIGNAL)
                asked.append((file, pid, words))
        deadline, texts = time.monotonic() + _ANSWER_S, [b""] * len(asked)
        while time.monotonic() < deadline:
            time.sleep(_QUIET_S)
            before = texts
            texts = [pread(file.fileno(), 1 << 16, 0) for file, *_ in asked]
            if all(texts) and texts == before:
                break
    return [
        OfferedStack(pid, int(words[0]), int(words[1]), words[2], rows_of_dump(text.decode()))
        for (_, pid, words), text in zip(asked, texts, strict=True)
        if text
    ]


def _find(pid: int) -> tuple[int, list[str]] | None:
    """Return the descriptor and (rank, world size, run id); None if the process offers no stack."""
    for fd, target in open_files(pid).items():
        name, _, rest = target.removesuffix(" (deleted)").partition(":")[2].partition(":")
        owner, *words = rest.split(":", 3)
        # A child of the process has the file, too. The program may have changed the variables.
        is_rank = len(words) == 3 and words[0].isdecimal() and words[1].isdecimal()
        if name == _NAME and owner == str(pid) and is_rank and catches(pid, _SIGNAL):
            return fd, words
    return None


def rows_of_dump(text: str) -> list[FrameRow]:
    """Return the frames of faulthandler's text."""
    found = [_LINE.fullmatch(line) for line in text.splitlines()]
    return [(m[1], int(m[2]), m[3], is_of_user(m[1])) for m in found if m]
