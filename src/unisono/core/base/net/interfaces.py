"""The networks of this host: its interfaces and addresses, and whether a job has other hosts."""

from __future__ import annotations

import ipaddress
import logging
import socket

from unisono.core.base import config
from unisono.core.base.log import get_logger, log_once
from unisono.core.base.net.sockets import is_loopback
from unisono.core.platform.network import interfaces
from unisono.errors import InvalidArgumentError

_LOG = get_logger("network")


def spans_hosts() -> bool:
    """Return whether the environment shows that the job has ranks on other hosts.

    The sign is a WORLD_SIZE above LOCAL_WORLD_SIZE. Without these numbers the sign is a token,
    which only ranks on other hosts need. Without a sign, a store at localhost means that no rank is
    on another host, and ranks listen on loopback only.
    """
    env = config.environ()
    size, local_size = env.get("WORLD_SIZE", ""), env.get("LOCAL_WORLD_SIZE", "")
    if size.isdecimal() and local_size.isdecimal():
        return int(size) > int(local_size)
    return bool(config.get("UNISONO_TOKEN"))


def served_host(host: str) -> str:
    """Return the host on which a server must listen whose address is `host`: `host`, or any.

    Operators of Kubernetes name the host of rank 0, or of the first node, localhost there, and by
    its name elsewhere. Without a sign of other hosts, a server at localhost is for this host.
    """
    return "::" if is_loopback(host) and spans_hosts() else host


def named_hosts() -> list[str]:
    """Return the names that this host has for itself as numeric addresses, by its resolver."""
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(info[4][0]) for info in infos]


def reachable_hosts() -> list[str]:
    """Return the addresses of this host that another host can probably reach; may be empty."""
    found = [host for host in named_hosts() if not is_loopback(host)]
    if not found:
        # Debian maps the host name to 127.0.1.1, which is useless to other hosts. They need an
        # address of an interface.
        found = [host for hosts in interfaces().values() for host in hosts]
    return [host for host in dict.fromkeys(found) if not is_loopback(host)]


def published_hosts() -> list[str]:
    """Return the addresses of UNISONO_PUBLISH, which a router forwards to this host.

    Raises:
        InvalidArgumentError: They are not numeric addresses.
    """
    hosts = [each.strip() for each in config.get("UNISONO_PUBLISH").split(",") if each.strip()]
    for host in hosts:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise InvalidArgumentError(
                f"environment variable UNISONO_PUBLISH: {host!r} is not a numeric address"
            ) from None
    return hosts


def chosen_hosts() -> list[str]:
    """Return the addresses of the interfaces that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names.

    Gloo's variable counts first. It has names, NCCL's has prefixes; after "=" names, after "^" what
    to leave out. If no interface has such a name, log that and return nothing.

    Source: gloo 0.5 (torch 2.13), NCCL 2.27, "Environment Variables".
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if not (text := config.environ().get(variable, "")):
            continue
        there = interfaces()
        names = _matching(text, list(there), exact=variable[0] == "G")
        if hosts := [host for name in names for host in there[name]]:
            return sorted(dict.fromkeys(hosts), key=is_loopback)
        log_once(
            _LOG,
            logging.WARNING,
            "%s=%s names no interface with an address here (there are: %s), so it is ignored; "
            "UNISONO_HOST takes addresses",
            variable,
            text,
            ", ".join(there) or "none",
        )
        return []
    return []


def _matching(text: str, there: list[str], *, exact: bool) -> list[str]:
    """Return the interfaces that a list names, in its order."""
    excluded = not exact and text.startswith("^")
    text = text[1:] if excluded else text
    if not exact and text.startswith("="):
        exact, text = True, text[1:]
    wanted = [each.strip() for each in text.split(",") if each.strip()]

    def fits(name: str, each: str) -> bool:
        return name == each if exact else name.startswith(each)

    if excluded:
        return [name for name in there if not any(fits(name, each) for each in wanted)]
    return list(dict.fromkeys(name for each in wanted for name in there if fits(name, each)))
