"""How many threads share the loops of a rank's large calls."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.base import config
from unisono.core.platform.machine import allowed_cpus, by_core, cpu_quota
from unisono.errors import InvalidArgumentError

# A few cores use all bandwidth of a memory.
_MOST_BY_ITSELF = 8
_MOST = 1024


def wanted_threads() -> int | None:
    """Return the value of UNISONO_THREADS; None: auto.

    Raises:
        InvalidArgumentError: It is neither.
    """
    text = config.get("UNISONO_THREADS")
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise InvalidArgumentError(
            f"environment variable UNISONO_THREADS={text!r} is neither auto nor a number from 1 to "
            f"{_MOST}"
        )
    return int(text)


def threads_of(rank: int, hosts: Sequence[str], sharers: int) -> int:
    """Return the number of threads of a rank, with its own; 1 if ranks fill the cores.

    Args:
        rank: The rank that asks.
        hosts: The `host_id` of each rank.
        sharers: What `sharers_of` returned.
    """
    if (wanted := wanted_threads()) is not None:
        return wanted
    cores = len(by_core(sorted(allowed_cpus())))
    share = min(cores // sharers, cpu_quota() // len(_near(rank, hosts)))
    return int(min(max(share, 1), _MOST_BY_ITSELF))


def sharers_of(rank: int, hosts: Sequence[str], pids: Sequence[int]) -> int:
    """Return how many ranks may run on the cores of a rank, with itself.

    Args:
        rank: The rank that asks.
        hosts: The `host_id` of each rank.
        pids: The process id of each rank, in its own container.
    """
    mine = set(allowed_cpus())
    sharers = 0
    for other in _near(rank, hosts):
        is_known = _machine(hosts[other])[1] == _machine(hosts[rank])[1]
        cpus = _cpus(pids[other]) if is_known and other != rank else mine
        sharers += not mine.isdisjoint(cpus or mine)
    return sharers


def _near(rank: int, hosts: Sequence[str]) -> list[int]:
    """Return the ranks on the machine of a rank."""
    machine = _machine(hosts[rank])[0]
    return [other for other, host in enumerate(hosts) if _machine(host)[0] == machine]


def threads_text() -> str:
    """Return for people what UNISONO_THREADS means here."""
    try:
        wanted = wanted_threads()
    except InvalidArgumentError as error:
        return error.what
    return f"auto, at most {threads_of(0, [''], 1)}" if wanted is None else str(wanted)


def _machine(host: str) -> tuple[str, str]:
    """Return the parts of a host id that name the machine, and its container."""
    _, machine, container, *_ = *host.split("/"), "", "", ""
    return machine, container


def _cpus(pid: int) -> set[int]:
    """Return the cores of a process; none if they are unknown."""
    try:
        return set(allowed_cpus(pid))
    except OSError:
        return set()
