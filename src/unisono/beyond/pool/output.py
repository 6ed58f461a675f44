"""The output of the ranks of a pool, which the thread that calls them shows."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from multiprocessing import connection
from typing import Any

from unisono.launcher.output.console import Console, WorkerName
from unisono.launcher.output.reader import WorkerStream


class _CurrentStdout:
    """The standard output of the moment: a notebook replaces it for each cell."""

    def write(self, data: bytes, /) -> None:
        sys.stdout.write(data.decode("utf-8", "replace"))

    def flush(self) -> None:
        sys.stdout.flush()


class RankOutput:
    """The pipes to which the ranks print."""

    def __init__(self) -> None:
        self._console = Console(
            _CurrentStdout(), prefix="[rank {rank}] ", fold=False, clock=time.monotonic
        )
        self._streams: dict[int, WorkerStream] = {}

    def open(self, rank: int) -> int:
        """Return a new descriptor for a rank; the caller closes it."""
        source, target = os.pipe()
        name = WorkerName(rank=rank, local_rank=rank)
        file = open(source, "rb", 0)  # noqa: SIM115  the stream closes it
        self._streams[rank] = WorkerStream(file, [self._console.sink_of(name)])
        return target

    def sources(self) -> list[Any]:
        """Return what is readable when output has come."""
        return [stream.source for stream in self._streams.values()]

    def pump(self, ready: Iterable[Any]) -> None:
        """Pass on the output of the sources among `ready`, once each."""
        found = set(ready)
        for rank, stream in list(self._streams.items()):
            if stream.source in found and not stream.pump():
                stream.finish()
                del self._streams[rank]

    def flush(self) -> None:
        """Pass on the output that has come; a thread of a rank may print without end."""
        # One read takes all that a pipe holds.
        self.pump(connection.wait(self.sources(), 0))
        for stream in self._streams.values():
            stream.flush_partial()
        self._console.close()

    def finish(self, ranks: Iterable[int]) -> None:
        """Close the pipes of ranks that have ended."""
        for rank in ranks:
            if (stream := self._streams.pop(rank, None)) is not None:
                stream.finish()
