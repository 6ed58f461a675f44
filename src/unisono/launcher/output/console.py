"""The console: prefixes the lines of several ranks, and shows equal lines once."""

from __future__ import annotations

import re
import socket
import string
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unisono.errors import InvalidArgumentError
from unisono.launcher.output.colours import painted_rank
from unisono.launcher.output.reader import TRACEBACK, Sink
from unisono.launcher.ranges import format_ranges

HOLD_S = 0.1
"""How long a line waits for equal lines of other ranks."""

_MAX_HELD = 1000
_PIECES = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_FIELDS = ("rank", "local_rank", "host", "role")


@dataclass(frozen=True, kw_only=True)
class WorkerName:
    """The values of a prefix template for one worker."""

    rank: int
    local_rank: int
    host: str = field(default_factory=socket.gethostname)
    role: str = "default"
    attempt: int = 0


def check_prefix(template: str) -> str:
    """Return a prefix template if it is valid.

    Raises:
        InvalidArgumentError: The template has an unknown field, or braces that do not match.
    """
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        template.format(**dict.fromkeys(_FIELDS, ""))
    except (ValueError, KeyError, IndexError, AttributeError):
        fields = ["?"]
    if not set(fields) <= set(_FIELDS):
        known = ", ".join(f"{{{name}}}" for name in _FIELDS)
        raise InvalidArgumentError(f"prefix {template!r} is no template of {known}")
    return template


@dataclass
class _Held:
    line: bytes
    since_s: float
    ranks: list[int] = field(default_factory=list)


class LineFold:
    """Joins equal lines of different ranks; each rank's lines keep their order."""

    def __init__(self) -> None:
        self._held: deque[_Held] = deque()
        # Lines are numbered in order; `_first` is the number of the oldest line in `_held`.
        self._first = 0
        self._where: dict[bytes, deque[int]] = {}
        self._last: dict[int, int] = {}

    def add(self, rank: int, line: bytes, now_s: float) -> None:
        """Take a line of a rank."""
        places = self._where.setdefault(line, deque())
        after = self._last.get(rank, -1)
        place = next((place for place in places if place > after), None)
        if place is None:
            place = self._first + len(self._held)
            places.append(place)
            self._held.append(_Held(line, now_s))
        self._held[place - self._first].ranks.append(rank)
        self._last[rank] = place

    def take(self, now_s: float, world: int) -> list[tuple[bytes, list[int]]]:
        """Return, oldest first, the lines that all `world` ranks wrote or that waited `HOLD_S`."""
        taken = []
        while self._held:
            oldest = self._held[0]
            waited = now_s >= oldest.since_s + HOLD_S or len(self._held) > _MAX_HELD
            if len(oldest.ranks) < world and not waited:
                break
            self._held.popleft()
            self._first += 1
            places = self._where[oldest.line]
            places.popleft()
            if not places:
                del self._where[oldest.line]
            taken.append((oldest.line, sorted(oldest.ranks)))
        return taken

    def due_s(self, now_s: float) -> float | None:
        """Return in how many seconds the oldest line has waited `HOLD_S`; None without a line."""
        return max(0.0, self._held[0].since_s + HOLD_S - now_s) if self._held else None


class Console:
    """Decorates the lines of all ranks and writes them to one sink.

    Args:
        sink: Standard output, standard error, or a `Screen`.
        prefix: Template of the text before each line, "" for none. Fields: rank, local_rank,
            host, role.
        fold: Whether to join equal lines of several ranks.
        clock: Monotonic clock, in seconds.
        colours: Whether each rank's prefix has a colour of its own.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        prefix: str,
        fold: bool,
        clock: Callable[[], float],
        colours: bool = False,
    ) -> None:
        self._sink = sink
        self._prefix = prefix
        self._fold = LineFold() if fold else None
        self._colours = colours
        self._clock = clock
        self._names: dict[int, WorkerName] = {}
        self._unfinished: int | None = None

    def sink_of(self, name: WorkerName) -> Sink:
        """Return the sink for a worker's lines."""
        self._names[name.rank] = name
        return _RankSink(self, name.rank)

    def take(self, rank: int, data: bytes) -> None:
        """Take whole lines, a traceback or an unfinished line of a rank."""
        if "{rank}" in self._prefix:
            # torch.distributed writes the rank before each line of a traceback, too.
            data = re.sub(rb"^\[rank%d\]: " % rank, b"", data, flags=re.MULTILINE)
        pieces = _PIECES.findall(data)
        if TRACEBACK in data:
            pieces = [data if data.endswith(b"\n") else data + b"\n"]
        for piece in pieces:
            finished = piece[-1:] in b"\r\n"
            if self._unfinished == rank:
                self._sink.write(piece)
            elif self._fold is not None and finished:
                if piece != b"\r":
                    self._fold.add(rank, piece, self._clock())
                continue
            elif piece != b"\r":
                self._release(float("inf"))
                self._end_unfinished()
                self._sink.write(self._decorated(piece, [rank]))
            self._unfinished = None if finished else rank
        self._release(self._clock())
        self._sink.flush()

    def tick(self) -> float | None:
        """Write the lines that waited long enough; return the seconds to the next call, or None."""
        if self._fold is None:
            return None
        now_s = self._clock()
        if self._release(now_s):
            self._sink.flush()
        return self._fold.due_s(now_s)

    def close(self) -> None:
        """Write all lines that are held."""
        self._release(float("inf"))
        self._sink.flush()

    def _release(self, now_s: float) -> bool:
        lines = [] if self._fold is None else self._fold.take(now_s, len(self._names))
        if lines:
            self._end_unfinished()
            self._sink.write(b"".join(self._decorated(line, ranks) for line, ranks in lines))
        return bool(lines)

    def _end_unfinished(self) -> None:
        if self._unfinished is not None:
            self._unfinished = None
            self._sink.write(b"\n")

    def _decorated(self, line: bytes, ranks: Sequence[int]) -> bytes:
        names = [self._names[rank] for rank in ranks]
        prefix = self._prefix.format(
            rank=format_ranges(name.rank for name in names),
            local_rank=format_ranges(name.local_rank for name in names),
            host=names[0].host,
            role=names[0].role,
        )
        if self._colours and prefix and len(ranks) == 1:
            prefix = painted_rank(prefix, ranks[0])
        text = line.rstrip(b"\r\n")
        end = line[len(text) :]
        if len(ranks) > 1:
            end = f" \N{MULTIPLICATION SIGN}{len(ranks)}".encode() + end
        return prefix.encode() + text.replace(b"\n", b"\n" + prefix.encode()) + end


class _RankSink:
    """The sink of one rank's lines."""

    def __init__(self, console: Console, rank: int) -> None:
        self._console = console
        self._rank = rank

    def write(self, data: bytes) -> None:
        self._console.take(self._rank, data)

    def flush(self) -> None:
        pass
