"""What other software sends to other hosts: refused, or logged once, as UNISONO_TLS asks.

unisono cannot encrypt the connections of a service's client, of torch's store, MPI or NCCL.
"""

from __future__ import annotations

import logging
import platform
import socket

from unisono.core.base import config
from unisono.core.base.log import get_logger, log_once
from unisono.core.base.net.sockets import format_address, is_local, is_loopback
from unisono.core.platform.machine import boot_and_processes
from unisono.errors import UnsupportedError

_LOG = get_logger("tls")

_STRICT = ("on", "cert")


def this_host() -> str:
    """Return a text that differs between hosts, and between containers of one host."""
    return str(boot_and_processes() or platform.node())


def strictest(modes: set[str]) -> str:
    """Return the value of UNISONO_TLS that decides for ranks with these values."""
    return next((mode for mode in (*_STRICT, "auto") if mode in modes), "off")


def check_unencrypted(what: str, hint: str, mode: str | None = None, *, warns: bool = True) -> None:
    """Refuse, or log once, what goes to another host unencrypted.

    Args:
        what: That goes, such as "the connection of ... to host:port".
        hint: How it can be encrypted, or avoided.
        mode: UNISONO_TLS of this process if None.
        warns: Whether this process logs it.

    Raises:
        UnsupportedError: UNISONO_TLS is on or cert.
    """
    mode = mode or config.get("UNISONO_TLS")
    if mode in _STRICT:
        raise UnsupportedError(
            f"{what} is not encrypted by unisono, which UNISONO_TLS={mode} forbids", hint=hint
        )
    if mode == "auto" and warns and config.get("UNISONO_TOKEN"):
        log_once(_LOG, logging.WARNING, "%s is not encrypted by unisono; %s", what, hint)


def check_call(who: str, host: str, port: int, hint: str, *, is_shared: bool = False) -> None:
    """Do the same for a connection to an address that somebody calls, if it is another host's.

    Args:
        who: Calls.
        host: Its name or address.
        port: Its port.
        hint: As for `check_unencrypted`.
        is_shared: Whether all ranks call it. A rank on that host refuses it as the others do, or it
            would wait for them.
    """
    mode = config.get("UNISONO_TLS")
    if mode in _STRICT and is_shared:
        is_here = is_loopback(host)
    else:
        # The answer of a resolver may take long.
        is_asked = mode in _STRICT or (mode == "auto" and bool(config.get("UNISONO_TOKEN")))
        is_here = not is_asked or _is_here(host, port)
    if not is_here:
        check_unencrypted(f"the connection of {who} to {format_address(host, port)}", hint)


def _is_here(host: str, port: int) -> bool:
    """Whether a name or an address is known to be of this host only."""
    if is_loopback(host):
        return True
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        for family, kind, proto, _, address in found:
            with socket.socket(family, kind, proto) as probe:
                probe.connect(address)  # sends nothing
                if not is_local(probe):
                    return False
    except OSError:
        return False
    return True
