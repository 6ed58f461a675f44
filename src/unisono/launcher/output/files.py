"""The destinations of the workers' output: a file per rank, the console, or both.

    <log dir>/<run id>_xxxxxxxx/attempt_<n>/<local rank>/{stdout,stderr}.log

The folders are those of torchrun. All output passes through the launcher. A file and the console
thus get the same whole lines, and the failure report always has the end of standard error.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Protocol, TextIO

from unisono.core.base.config import environ
from unisono.core.base.deadline import Deadline
from unisono.errors import InvalidArgumentError, LaunchError
from unisono.launcher.output.colours import has_colours
from unisono.launcher.output.console import Console, WorkerName, check_prefix
from unisono.launcher.output.reader import CONTROL, OutputReader, Sink, WorkerStream
from unisono.launcher.workers.worker import CommandWorker, Stdout

DEFAULT_PREFIX = "[rank {rank}] "

_LAST_BYTES = 64 * 1024


class Std(enum.IntFlag):
    """Standard streams, with torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


_NAMES = {Std.OUT: "stdout", Std.ERR: "stderr"}


@dataclass(frozen=True)
class StdChoice:
    """Some standard streams of some workers."""

    every: Std = Std.NONE
    single: Mapping[int, Std] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> StdChoice:
        """Read "0" (none), "1" (out), "2" (err), "3" (both), or "0:3,1:0" by local rank.

        Raises:
            InvalidArgumentError: The text has another form.

        Source: torch 2.13, torch.distributed.elastic.multiprocessing.Std.from_str.
        """
        if re.fullmatch("[0-3]", text):
            return cls(Std(int(text)))
        if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
            raise InvalidArgumentError(
                f"{text!r} is neither 0, 1, 2, 3 (none, out, err, both) nor a list of "
                "local rank:number such as 0:3,1:0"
            )
        pairs = (pair.split(":") for pair in text.split(","))
        return cls(single={int(rank): Std(int(number)) for rank, number in pairs})

    def of(self, local_rank: int) -> Std:
        """Return the streams of one worker."""
        return self.single.get(local_rank, Std.NONE) if self.single else self.every

    def __bool__(self) -> bool:
        return bool(self.every) or any(self.single.values())


class Screen(Sink, Protocol):
    """A terminal with a status line below the output."""

    def status(self, up: int, restarts: int) -> None:
        """Show the numbers of running workers and of restarts."""

    def close(self) -> None:
        """Remove the status line."""


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """The user's choice of files and console for the workers' output.

    Attributes:
        log_dir: Parent of the launch's folder. Empty: a new temporary folder. /dev/null: no
            files. If only `log_dir` is given, without `redirects` and `tee`, all streams go to
            files as well as to the console.
        redirects: Streams that go to files only.
        tee: Streams that go to files and, with a prefix, to the console.
        local_ranks: Workers whose output the console shows; all if None.
        prefix: Template of the prefix on the console. None: `default_prefix` for lines that are
            teed or folded, otherwise no prefix.
        default_prefix: The template for `prefix=None`.
        fold: Whether to join equal lines of several ranks. None: on a terminal only.
        stdout_filters: Lines with one of these texts also go to filtered_stdout.log.
        stderr_filters: The same for standard error and filtered_stderr.log.
        screen: Replaces the terminal if given.
    """

    log_dir: str = ""
    redirects: StdChoice | None = None
    tee: StdChoice | None = None
    local_ranks: Collection[int] | None = None
    prefix: str | None = None
    default_prefix: str = DEFAULT_PREFIX
    fold: bool | None = None
    stdout_filters: Sequence[str] = ()
    stderr_filters: Sequence[str] = ()
    screen: Screen | None = None

    def __post_init__(self) -> None:
        check_prefix(self.prefix or "")

    def to_file(self, std: Std, local_rank: int) -> bool:
        """Whether a worker's stream is written to a file."""
        if self.log_dir == os.devnull:
            return False
        if self.redirects is None and self.tee is None:
            return bool(self.log_dir)
        return bool(std & (self._redirected(local_rank) | self.teed(local_rank)))

    def to_console(self, std: Std, local_rank: int) -> bool:
        """Whether a worker's stream is shown."""
        if self.local_ranks is not None and local_rank not in self.local_ranks:
            return False
        return not std & self._redirected(local_rank) & ~self.teed(local_rank)

    def teed(self, local_rank: int) -> Std:
        """Return the streams of a worker that go to file and console."""
        return Std.NONE if self.tee is None else self.tee.of(local_rank)

    def folds(self, nprocs: int, terminal: bool) -> bool:
        """Whether equal lines are joined."""
        return nprocs > 1 and (terminal if self.fold is None else self.fold)

    def stdout(self, nprocs: int, terminal: bool) -> Stdout:
        """Return the kind of the workers' standard output."""
        # Workers write whole lines to a terminal, but pieces of lines to a pipe or file. Pieces
        # of several ranks would mix, so such output passes through the launcher.
        several = nprocs > 1 and (not terminal or self.folds(nprocs, terminal))
        asked = self.redirects or self.tee or self.log_dir or self.prefix or self.stdout_filters
        if not several and not asked and self.local_ranks is None:
            return "inherited"
        # A terminal would make programs write progress bars and colours into the files.
        files = self.redirects or self.tee or self.log_dir or self.stdout_filters
        return "terminal" if terminal and not files else "pipe"

    def _redirected(self, local_rank: int) -> Std:
        return Std.NONE if self.redirects is None else self.redirects.of(local_rank)


class Output:
    """The output of all workers of a launch on this host, over all its attempts.

    Args:
        options: The user's choice of files and console.
        run_id: Name of the job; part of the folder's name.
        nprocs: Number of workers on this host.
        notify: Function that shows a line of text. A thread that may wait for a reader calls it.

    Attributes:
        stdout: Kind of the workers' standard output.
    """

    def __init__(
        self, options: LogOptions, *, run_id: str, nprocs: int, notify: Callable[[str], None]
    ) -> None:
        self._options = options
        self._notify = notify
        self._run_id = re.sub(r"[^\w.-]", "_", run_id)
        self._nprocs = nprocs
        self._folder = ""
        self._scratch = ""
        self._files: dict[str, IO[bytes]] = {}
        self._consoles: dict[tuple[Std, bool], Console] = {}
        self._last: tuple[WorkerName | None, bytes] = None, b""
        # If stdout and stderr differ, each has a thread: if stdout is not read, stderr continues.
        self._readers = {
            std: OutputReader(partial(self._tick, std), partial(self._release, std))
            for std in ((Std.ERR,) if _are_one(sys.stdout, sys.stderr) else _NAMES)
        }
        self._readers.setdefault(Std.OUT, self._readers[Std.ERR])
        self._sinks = {Std.OUT: self._sink(sys.stdout), Std.ERR: self._sink(sys.stderr)}
        self.stdout = options.stdout(nprocs, sys.stdout.isatty())

    def error_file(self, name: WorkerName) -> str:
        """Return the value of TORCHELASTIC_ERROR_FILE, in which a worker describes an exception.

        The file is beside the worker's logs, if there are any, otherwise in a folder that `close`
        removes. The path is "" if no folder can be made.
        """
        try:
            if self._options.log_dir and self._options.log_dir != os.devnull:
                folder = os.path.join(self._attempt_folder(name), str(name.local_rank))
            else:
                if not self._scratch:
                    parent = environ().get("TMPDIR") or "/tmp"
                    self._scratch = os.path.join(parent, f"unisono_{os.urandom(16).hex()}")
                    os.mkdir(self._scratch, 0o700)
                folder = os.path.join(self._scratch, f"{name.attempt}_{name.local_rank}")
            os.makedirs(folder, exist_ok=True)
        except OSError:
            return ""
        return os.path.join(folder, "error.json")

    def attach(self, worker: CommandWorker, name: WorkerName) -> WorkerStream:
        """Begin to pass on a worker's output; return the stream of its standard error."""
        if worker.stdout is not None:
            self._add(Std.OUT, worker.stdout, name)
        return self._add(Std.ERR, worker.stderr, name)

    def status(self, up: int, restarts: int) -> None:
        """Show the numbers of running workers and of restarts, on a terminal."""
        if self._options.screen is not None:
            self._readers[Std.ERR].do(partial(self._options.screen.status, up, restarts))

    def notify(self, line: str) -> None:
        """Show a line of the launcher, without waiting for a reader."""
        self._readers[Std.ERR].do(partial(self._notify, line))

    def ends_with(self, text: str) -> bool:
        """Whether the last lines that a worker put where standard error leads are this text."""
        lines = CONTROL.sub(b"", self._last[1]).decode("utf-8", errors="replace").splitlines()
        return bool(text) and "\n".join(["", *lines]).endswith(f"\n{text}")

    @property
    def is_stuck(self) -> bool:
        """Whether output was left unread at `close`."""
        return any(reader.is_running for reader in self._readers.values())

    def close(self, timeout_s: float, canceled: Callable[[], bool]) -> None:
        """Pass on the rest of the output, for at most `timeout_s`, or until `canceled`."""
        begun = Deadline(timeout_s)
        for reader in (readers := set(self._readers.values())):
            reader.begin_close(timeout_s)
        for reader in readers:
            reader.close(begun.remaining(), canceled)
        for file in self._files.values():
            file.close()
        if self._scratch:
            import shutil  # slow to import; at this point all workers have ended

            shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def _is_one(self) -> bool:
        return self._readers[Std.OUT] is self._readers[Std.ERR]

    def _sink(self, std: TextIO) -> Sink:
        screen = self._options.screen
        shown = screen is not None and (std is sys.stderr or self._is_one)
        return screen if screen is not None and shown else std.buffer

    def _consoles_of(self, std: Std) -> list[Console]:
        every = list(self._consoles.items())  # a copy, because other threads add to the dict
        return [console for (of, _), console in every if self._is_one or of is std]

    # The next two methods run on the thread of an OutputReader, which may wait for a reader.

    def _tick(self, std: Std) -> float | None:
        waits = []
        for console in self._consoles_of(std):
            # If the reader of the console has left, the workers and this thread must continue.
            with contextlib.suppress(OSError, ValueError):
                waits.append(console.tick())
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def _release(self, std: Std) -> None:
        ends = [console.close for console in self._consoles_of(std)]
        if std is Std.ERR and self._options.screen is not None:
            ends.append(self._options.screen.close)
        for end in ends:
            with contextlib.suppress(OSError, ValueError):
                end()

    def _add(self, std: Std, source: IO[bytes], name: WorkerName) -> WorkerStream:
        options, local_rank = self._options, name.local_rank
        sinks = []
        if options.to_console(std, local_rank):
            console = self._console(std, name)
            remembers = std is Std.ERR or self._is_one
            sinks.append(
                _Remembered(console, partial(self._remember, name)) if remembers else console
            )
        filters = options.stdout_filters if std is Std.OUT else options.stderr_filters
        if filters:
            path = os.path.join(self._attempt_folder(name), f"filtered_{_NAMES[std]}.log")
            sinks.append(self._filter(path, filters, name))
        files = []
        if options.to_file(std, local_rank):
            folder = os.path.join(self._attempt_folder(name), str(local_rank))
            files.append(_create(os.path.join(folder, f"{_NAMES[std]}.log")))
        return self._readers[std].add(source, *sinks, files=files, keep_tail=std is Std.ERR)

    def _remember(self, name: WorkerName, data: bytes) -> None:
        before = self._last[1] if self._last[0] == name else b""
        self._last = name, (before + data)[-_LAST_BYTES:]

    def _console(self, std: Std, name: WorkerName) -> Sink:
        stream = sys.stdout if std is Std.OUT else sys.stderr
        terminal = stream.isatty()
        fold = self._options.folds(self._nprocs, terminal)
        decorated = fold or bool(std & self._options.teed(name.local_rank))
        prefix = self._options.prefix
        if prefix is None:
            prefix = self._options.default_prefix if decorated else ""
        if not fold and not prefix:
            return self._sinks[std]
        key = (std, bool(prefix))
        if key not in self._consoles:
            self._consoles[key] = Console(
                self._sinks[std],
                prefix=prefix,
                fold=fold,
                clock=time.monotonic,
                colours=has_colours(stream),
            )
        return self._consoles[key].sink_of(name)

    def _filter(self, path: str, texts: Sequence[str], name: WorkerName) -> Sink:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = _create(path)
        prefix = self._options.prefix
        console = Console(
            _Filter(file, [text.encode() for text in texts]),
            prefix=self._options.default_prefix if prefix is None else prefix,
            fold=False,
            clock=time.monotonic,
        )
        return console.sink_of(name)

    def _attempt_folder(self, name: WorkerName) -> str:
        if not self._folder:
            import tempfile  # slow to import, and most launches write no files

            try:
                parent = self._options.log_dir or tempfile.mkdtemp(prefix="unisono_")
                os.makedirs(parent, exist_ok=True)
                self._folder = tempfile.mkdtemp(prefix=f"{self._run_id}_", dir=parent)
            except OSError as error:
                raise LaunchError(
                    f"cannot make a folder for logs in {self._options.log_dir!r}: {error.strerror}"
                ) from error
            self.notify(f"logs in {self._folder}")
        return os.path.join(self._folder, f"attempt_{name.attempt}")


class _Remembered:
    """Passes all on, and then calls a function with it."""

    def __init__(self, sink: Sink, remember: Callable[[bytes], None]) -> None:
        self._sink = sink
        self._remember = remember

    def write(self, data: bytes) -> None:
        self._sink.write(data)
        self._remember(data)

    def flush(self) -> None:
        self._sink.flush()


class _Filter:
    """Passes on only lines with one of some texts."""

    def __init__(self, sink: Sink, texts: Sequence[bytes]) -> None:
        self._sink = sink
        self._texts = texts

    def write(self, data: bytes) -> None:
        if any(text in data for text in self._texts):
            self._sink.write(data)

    def flush(self) -> None:
        self._sink.flush()


def _are_one(first: TextIO, second: TextIO) -> bool:
    """Whether two streams lead to the same terminal, pipe or file."""
    try:
        return os.path.sameopenfile(first.fileno(), second.fileno())
    except OSError:
        return False


def _create(path: str) -> IO[bytes]:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return open(path, "wb")
    except OSError as error:
        raise LaunchError(f"cannot write the log {path!r}: {error.strerror}") from error
