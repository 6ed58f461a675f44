"""Write the records of this process to files: on request, after an error, at a signal."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import tempfile
import threading
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from unisono.core.base import config
from unisono.core.base.grouping import grouped
from unisono.core.base.log import get_logger
from unisono.core.recorder.flight_recorder import encode
from unisono.core.recorder.records import GroupTrace, all_traces
from unisono.core.recorder.snapshot import records_of
from unisono.core.recorder.stats import stats_of
from unisono.errors import InvalidArgumentError

SIGNAL: int = getattr(signal, "SIGUSR2", 0)
"""The signal at which a rank writes its file, if UNISONO_TRACE_DIR is set; 0: there is none."""

_log = get_logger("trace")
_writing = threading.RLock()


def write_trace(folder: str | os.PathLike[str] | None = None) -> list[str]:
    """Write the records of all groups of this process to a file, one for each rank in it.

    The file `trace_rank_N` has the format of torch's flight recorder, so that torch's analyser
    reads a folder with the files of all ranks: `torchfrtrace FOLDER`.

    Args:
        folder: Made if it does not exist; UNISONO_TRACE_DIR if None.

    Returns:
        The names of the files.

    Raises:
        InvalidArgumentError: No folder is given, and UNISONO_TRACE_DIR is not set.
        OSError: A file cannot be written.
    """
    folder = folder or config.get("UNISONO_TRACE_DIR")
    if not folder:
        raise InvalidArgumentError("write_trace: no folder given, and UNISONO_TRACE_DIR is not set")
    Path(folder).mkdir(parents=True, exist_ok=True)
    return [
        _write(Path(folder, f"trace_rank_{rank}"), rank, list(traces))
        for rank, traces in groupby(all_traces(), lambda trace: trace.rank)
    ]


def _write(path: Path, rank: int, traces: list[GroupTrace]) -> str:
    """Replace a file in one step, so that no reader sees a part of it."""
    content = encode(records_of(rank, traces))
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return str(path)


_kept: list[GroupTrace] = []


def keep_for_stats(trace: GroupTrace) -> None:
    """Write the statistics of this group at the end of the process, if UNISONO_STATS_DIR is set."""
    if not config.get("UNISONO_STATS_DIR"):
        return
    if not _kept:
        atexit.register(_write_stats, os.getpid())
    _kept.append(trace)


def _write_stats(pid: int) -> None:
    if pid != os.getpid():
        return  # in the child of a fork
    folder = Path(config.get("UNISONO_STATS_DIR"))
    by_rank = grouped((trace.rank, asdict(stats_of(trace))) for trace in _kept)
    for rank, stats in by_rank.items():
        try:
            folder.joinpath(f"stats_rank_{rank}.json").write_text(json.dumps(stats))
        except OSError as error:
            _log.warning("cannot write the statistics: %s", error)


def write_after_failure(*, aside: bool = False) -> None:
    """Write the files if UNISONO_TRACE_DIR is set; log an error instead of raising it.

    Args:
        aside: Write on another thread, because other work waits for this thread.
    """
    if not config.get("UNISONO_TRACE_DIR"):
        return
    if aside:
        # At the end of the interpreter no thread can be started.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=write_after_failure, name="unisono-trace", daemon=True).start()
        return
    with _writing:
        try:
            write_trace()
        except OSError as error:
            _log.warning("cannot write the trace: %s", error)


def watch_signal() -> None:
    """Write the files at `SIGNAL`, if UNISONO_TRACE_DIR is set and the program does not use it."""
    if not config.get("UNISONO_TRACE_DIR"):
        return
    if threading.current_thread() is not threading.main_thread():
        return
    if SIGNAL and signal.getsignal(SIGNAL) is signal.SIG_DFL:
        # A handler that interrupts a write of its own thread must not wait for the lock.
        signal.signal(SIGNAL, lambda *_: write_after_failure(aside=True))
