"""The command `unisono`, and `python -m unisono`."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command line and return its exit code.

    A Ctrl-C while the command is imported ends it after the imports. Python ignores an exception in
    a callback of its import system, so the signal could be lost there.
    """
    came: list[int] = []
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, lambda signum, frame: came.append(signum))
    from unisono.workbench.cli.main import interrupted
    from unisono.workbench.cli.main import main as command

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        return interrupted()
    return command()


if __name__ == "__main__":
    sys.exit(main())
