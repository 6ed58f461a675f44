"""Get the records of all ranks: from files, or from the ranks of a running job."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from unisono.core.base.host import reason_of
from unisono.core.platform.machine import clock_name
from unisono.core.recorder.flight_recorder import RankRecords
from unisono.core.transports.tcp.wire import CLOCK, CLOCK_TIME, RECORDS
from unisono.errors import InvalidArgumentError, UnisonoError
from unisono.workbench.cli.look.ask import Endpoint, exchange
from unisono.workbench.cli.look.verdict import JobView
from unisono.workbench.cli.terminal import plain
from unisono.workbench.trace.clocks import Trip
from unisono.workbench.trace.decoding import decode

# A pickle or JSON of more bytes than these is refused before it is read.
_MOST_FILE_BYTES = 1 << 29

_ANSWER_S = 20.0

# Questions for the time of a host. The quickest of them counts.
_TRIPS = 16

_THREADS = 16


def read_files(paths: Sequence[str]) -> list[RankRecords]:
    """Return the records in files, and in all files of folders.

    A path that is no regular file is left out, with a line on standard error, because a named pipe
    would block. The rank in a file of another library is the number at the end of the file's name.

    Raises:
        InvalidArgumentError: A file cannot be read, has another format, or has no rank.
    """
    found = []
    for path in map(Path, paths):
        inside = sorted(path.glob("[!.]*")) if path.is_dir() else [path]
        special = [each for each in inside if each.exists() and not each.is_file()]
        for each in special:
            print(plain(f"trace: {each} is no regular file: left out"), file=sys.stderr)
        found += [_read(each) for each in inside if each not in special]
    return found


def _read(path: Path) -> RankRecords:
    try:
        size = path.stat().st_size
        if size > _MOST_FILE_BYTES:
            raise InvalidArgumentError(f"it has {size} bytes, at most {_MOST_FILE_BYTES} are read")
        found = decode(path.read_bytes())
    except (OSError, UnisonoError) as error:
        raise InvalidArgumentError(f"trace: cannot read {path}: {reason_of(error)}") from None
    if found.rank is not None:
        return found
    number = re.search(r"(\d+)(\.\w+)?$", path.name)
    if number is None:
        raise InvalidArgumentError(f"trace: the name of {path} does not end in a rank")
    return replace(found, rank=int(number[1]))


def ask_ranks(job: JobView) -> tuple[list[RankRecords], list[Trip]]:
    """Return the records of the ranks of a job, and questions for the time of other hosts."""
    # A rank without a group of unisono does not listen, and has no records.
    endpoints: dict[int, Endpoint] = {
        rank: state["endpoint"] for rank, state in job.states.items() if "endpoint" in state
    }
    with ThreadPoolExecutor(_THREADS) as pool:
        answers = [each for each in pool.map(_records, endpoints.values()) if each is not None]
    mine, trips = clock_name(), list[Trip]()
    clocks = {
        each.origin.clock: each.rank for each in answers if each.origin and each.rank is not None
    }
    for clock, rank in clocks.items():
        if clock != mine:
            trips += list(_trips(mine, clock, endpoints[rank]))
    return answers, trips


def _records(endpoint: Endpoint) -> RankRecords | None:
    answer = exchange(endpoint, RECORDS, _ANSWER_S)
    return None if answer is None else decode(answer.data)


def _trips(mine: str, clock: str, endpoint: Endpoint) -> Iterator[Trip]:
    """Ask a rank for its time, some times."""
    deadline = time.monotonic() + _ANSWER_S
    for _ in range(_TRIPS):
        answer = exchange(endpoint, CLOCK, _ANSWER_S)
        if answer is not None and len(answer.data) == CLOCK_TIME.size:
            (theirs_ns,) = CLOCK_TIME.unpack(answer.data)
            yield Trip(mine, answer.asked_ns, clock, theirs_ns, answer.got_ns)
        if time.monotonic() > deadline:
            return
