"""The ports on which this process may listen: any, or those of UNISONO_PORTS."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence

from unisono.core.base import config
from unisono.errors import InvalidArgumentError

# How often the system is asked for another port if a port is free on some addresses only.
_TRIES = 16
_MOST = 65535
# The agent of `unisono run` and the ranks have a store each.
_STORES = 2


def allowed_ports() -> range:
    """Return the ports of UNISONO_PORTS; empty if every port is allowed.

    Raises:
        InvalidArgumentError: The variable is not low-high.
    """
    text = config.get("UNISONO_PORTS")
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    low, high = map(int, found.groups()) if found else (0, 0)
    if not 0 < low <= high <= _MOST:
        raise InvalidArgumentError(
            f"environment variable UNISONO_PORTS={text!r} is not low-high with 1 <= low <= high "
            f"<= {_MOST}"
        )
    return range(low, high + 1)


def ports_to_try() -> Sequence[int]:
    """Return the ports to try, in this order, for a server that may have any; 0: as the system has.

    Raises:
        InvalidArgumentError: See `allowed_ports`.
    """
    return allowed_ports() or (0,) * _TRIES


def none_free() -> str:
    """Return the text that no port of UNISONO_PORTS is free."""
    ports = allowed_ports()
    return (
        f"none of the {len(ports)} ports of UNISONO_PORTS={ports[0]}-{ports[-1]} is free on "
        f"{platform.node()}"
    )


def ports_hint() -> str:
    """Return the hint for `none_free`, with the number of ports that a host needs."""
    env = config.environ()
    ranks = env.get("LOCAL_WORLD_SIZE") or env.get("WORLD_SIZE") or ""
    needed = f" (here up to {int(ranks) + _STORES})" if ranks.isdecimal() else ""
    return (
        f"a host needs a port for each of its ranks, and up to {_STORES} for stores{needed}; give "
        "UNISONO_PORTS more ports, or end what uses them"
    )
