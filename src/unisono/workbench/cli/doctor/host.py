"""The facts about this host: its limits, its names, and what a second process may do here.

The second process is this module with the words `PID ADDRESS PROOF`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import math
import os
import platform
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

from unisono import __version__
from unisono.core.base import config, document
from unisono.core.base.deadline import Deadline
from unisono.core.base.host import reason_of
from unisono.core.base.net import tls
from unisono.core.platform.machine import cpu_quota, huge_pages, most_descriptors, usable_cores
from unisono.core.platform.memory import available_memory_bytes, why_not_readable
from unisono.errors import UnisonoError
from unisono.workbench.cli.doctor.facts import HostFacts, Sharing, SystemLimits

_NAME_S = 2.0
"""Seconds for the look-up of all names. A name server that does not answer takes 5 and more."""

_CHILD_S = 20.0
"""Seconds for the second process, which imports NumPy. It needs 0.3 unless the host is busy."""

_PROOF_BYTES = 16


def examine_host(nprocs: int, addresses: Sequence[str], names: Iterable[str]) -> HostFacts:
    """Return the facts about this host.

    Args:
        nprocs: Number of ranks that are to run here.
        addresses: Addresses that they would publish.
        names: Names to resolve, beside that of this host.
    """
    name = socket.gethostname()
    admits = "token" if config.get("UNISONO_TOKEN") else "local"
    return HostFacts(
        name=name,
        nprocs=nprocs,
        addresses=tuple(addresses),
        names=resolve([name, *names]),
        versions={
            "unisono": __version__,
            "Python": platform.python_version(),
            "NumPy": _version("numpy"),
            "torch": _version("torch"),
            "processor": platform.machine(),
            "byte order": sys.byteorder,
        },
        admits="any" if config.get("UNISONO_INSECURE") == "1" else admits,
        protection=protection(),
        limits=_limits(),
        sharing=_sharing(),
    )


def protection() -> str:
    """Return what protects connections of this host to others; "none: ..." if nothing can."""
    token = config.get("UNISONO_TOKEN")
    try:
        shown = tls.protection(token)
    except UnisonoError as error:
        return f"none: {error}"
    is_missed = shown == "none" and token and config.get("UNISONO_TLS") == "auto"
    return f"none: {tls.why_no_tls()}" if is_missed else shown


def resolve(names: Iterable[str]) -> dict[str, tuple[str, ...] | None]:
    """Return the addresses of names: none if a name is unknown, None without an answer."""

    def look_up(name: str) -> None:
        try:
            infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            infos = []
        found[name] = tuple(dict.fromkeys(str(info[4][0]) for info in infos))

    found: dict[str, tuple[str, ...] | None] = {}
    wanted, deadline = tuple(dict.fromkeys(names)), Deadline(_NAME_S)
    # A look-up cannot be interrupted: its thread ends with the name server's time-out.
    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline.remaining())
    return {name: found.get(name) for name in wanted}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _limits() -> SystemLimits:
    descriptors, quota = most_descriptors(), cpu_quota()
    return SystemLimits(
        cores=usable_cores(),
        cpu_quota=None if quota == math.inf else quota,
        memory_bytes=available_memory_bytes(),
        descriptors=sys.maxsize if descriptors == math.inf else int(descriptors),
    )


def _sharing() -> Sharing:
    """Try in a second process what the ranks of a host do with each other."""
    proof = ctypes.create_string_buffer(secrets.token_bytes(_PROOF_BYTES), _PROOF_BYTES)
    # The child reads its parent, as a rank reads its sibling; a parent may always read its child.
    words = [str(os.getpid()), str(ctypes.addressof(proof)), proof.raw.hex()]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "unisono.workbench.cli.doctor.host", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHILD_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Sharing(engine="", shared_memory=reason_of(error))
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Sharing(engine="", shared_memory=last)
    return replace(document.loads(Sharing, done.stdout), huge_pages=huge_pages())


def _report(pid: str, address: str, proof: str) -> None:
    """Print what this process, as the second one, finds."""
    # The doctor must run where NumPy, which this loads, is broken.
    from unisono.core.engines.choice import engine_info

    info = engine_info()
    found = Sharing(
        engine=f"{info.engine} engine ({info.why})",
        shared_memory="" if info.shared_memory == "memfd" else info.shared_memory,
        remote_read=why_not_readable(int(pid), int(address), bytes.fromhex(proof)),
    )
    print(document.dumps(found))


if __name__ == "__main__":
    _report(*sys.argv[1:])
