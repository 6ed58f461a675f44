"""The live status line of `unisono run` on a terminal; needs rich, the extra `cli`."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import time
from typing import Any

from unisono.core.base.config import environ

_UPWARD = re.compile(r"\x1b\[\d*[AF]")
"""Control sequence that moves the cursor up, into lines of other ranks."""


def make_status_line(nprocs: int) -> StatusLine | None:
    """Return a status line if standard error is a terminal and rich is installed."""
    if not sys.stderr.isatty() or environ().get("TERM", "dumb") == "dumb":
        return None
    if importlib.util.find_spec("rich") is None:
        return None
    return StatusLine(nprocs)


class StatusLine:
    """The terminal: the workers' lines, and below them the number of running ranks and the time.

    rich is imported at the first `status`, when the workers have been started.
    """

    def __init__(self, nprocs: int) -> None:
        self._nprocs = nprocs
        self._up = 0
        self._restarts = 0
        self._progress: Any = None
        self._unfinished = False
        self._start_s = time.monotonic()
        self._live: Any = None

    def write(self, data: bytes, /) -> None:
        """Print whole lines above the status line."""
        if self._live is None:
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
            return
        from rich.text import Text

        text = data.decode(errors="replace")
        if self._unfinished:
            # The unfinished line was printed as a whole line, so drop its end.
            text = text.removeprefix("\n")
        self._unfinished = bool(text) and text[-1] not in "\r\n"
        for line in re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text):
            shown = Text.from_ansi(line.strip("\r\n"))
            # A progress bar, or a part of it: its next state overwrites it, so do not print it.
            self._progress = shown if line.endswith("\r") or _UPWARD.search(line) else None
            if self._progress is None:
                self._live.console.print(shown, soft_wrap=True)

    def flush(self) -> None:
        """Do nothing: `write` has no buffer."""

    def write_line(self, line: str) -> None:
        """Print a line of the launcher."""
        self.write(f"{line}\n".encode())

    def status(self, up: int, restarts: int) -> None:
        """Show the state of the launch."""
        self._up, self._restarts = up, restarts
        if self._live is None:
            self._begin()

    def close(self) -> None:
        """Remove the status line."""
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):
                live.stop()

    def _begin(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            self,
            console=Console(stderr=True),
            transient=True,
            refresh_per_second=2,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def __rich__(self) -> Any:
        from rich.text import Text

        elapsed_s = int(time.monotonic() - self._start_s)
        minutes, seconds = divmod(elapsed_s, 60)
        parts = [
            f"{self._up} of {self._nprocs} ranks up",
            f"{self._restarts} restarts",
            f"{minutes}:{seconds:02d}",
        ]
        text = Text(" | ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")
        return text if self._progress is None else text.append(" | ").append_text(self._progress)
