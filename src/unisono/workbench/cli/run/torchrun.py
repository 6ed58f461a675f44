"""The flags of torchrun that have little or no effect here, accepted for its command lines."""

from __future__ import annotations

import argparse
import signal
from functools import partial

from unisono.launcher.signals import ENDING
from unisono.workbench.cli.flags import add_flag

NUMA_BINDINGS = {"node": "numa", "socket": "numa", "exclusive": "core", "core-complex": "core"}
"""Value of `--numa-binding` -> value of `--bind`."""

_START_METHODS = ("spawn", "fork", "forkserver")


def add_torchrun_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("for command lines of torchrun")
    add = partial(add_flag, group)
    add(
        "--signals-to-handle",
        type=_signals,
        metavar="NAMES",
        help="signals that end the launch, even if they are ignored at its start "
        f"({','.join(ENDING)}; of these an ignored SIGTERM or SIGHUP stays ignored); SIGUSR1 and "
        "SIGUSR2 are otherwise passed on to the workers",
    )
    add(
        "--virtual-local-rank",
        action="store_true",
        help="each worker sees one GPU only (CUDA_VISIBLE_DEVICES) and has LOCAL_RANK=0",
    )
    add(
        "--numa-binding",
        choices=sorted(NUMA_BINDINGS),
        help="node and socket are --bind numa, the others --bind core",
    )
    add(
        "--start-method",
        choices=_START_METHODS,
        default="spawn",
        help="no effect: a script always runs in a new process",
    )
    add(
        "--event-log-handler",
        choices=("null", "console"),
        default="null",
        help="no effect: events are always reported on standard error",
    )
    add(
        "--logs-specs",
        type=_own_logs,
        default="default",
        metavar="NAME",
        help="default (no effect); the name of a plug-in is an error, because unisono has none for "
        "logs",
    )


def signals_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the signals that end the launch. Of them none is ignored that the user names.

    By default these are SIGINT and SIGQUIT: a shell starts jobs in the background of a script with
    both ignored. SIGHUP stays ignored under nohup.
    """
    names: tuple[str, ...] | None = options.signals_to_handle
    for name in ("SIGINT", "SIGQUIT") if names is None else names:
        signum = getattr(signal, name, None)  # Windows has no SIGQUIT
        if signum is not None and signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    return ENDING if names is None else names


def _signals(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise argparse.ArgumentTypeError(f"{name!r} is no signal that a program can handle")
    return names


def _own_logs(name: str) -> str:
    if name == "default":
        return name
    raise argparse.ArgumentTypeError(
        f"{name!r}: torchrun's plug-ins for logs cannot be used here; see --log-dir, --prefix"
    )
