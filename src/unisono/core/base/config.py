"""Read the environment: the table of all variables of unisono, and the functions that read them.

Other modules call `get("UNISONO_ALGO")`. No other module of the library reads `os.environ`.
The site hook of warm workers does, because it runs before the library is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from unisono.errors import InvalidArgumentError


class Variable(NamedTuple):
    """One environment variable: its default and what it does."""

    default: str
    meaning: str


VARIABLES: dict[str, Variable] = {
    "UNISONO_ALGO": Variable("", "algorithms to use, in NCCL_ALGO's grammar"),
    "UNISONO_DETERMINISTIC": Variable("0", "1: reduce in the order of ranks in every call"),
    "UNISONO_ENGINE": Variable("auto", "auto, native, reference or mpi"),
    "UNISONO_CPU": Variable("", "instruction set of the native engine: plain, v3 or v4"),
    "UNISONO_MOVE": Variable("1", "0: waiting ranks do not move to other cores"),
    "UNISONO_THREADS": Variable(
        "auto", "threads of calls above 1 MiB; auto: cores per rank that shares them, at most 8"
    ),
    "UNISONO_TRANSPORT": Variable(
        "auto", "auto, inproc, tcp, or a name that the program or a package registers"
    ),
    "UNISONO_RANKS_PER_HOST": Variable(
        "0", "C++ engine: ranks to treat as one host, to try out several hosts; 0: the real hosts"
    ),
    "UNISONO_NODES": Variable(
        "numa",
        "nodes of a host: numa, cache (of an L3 cache), 0 (one), or a number of ranks each",
    ),
    "UNISONO_SHARED_MEMORY": Variable("1", "0: this rank sends and receives only over sockets"),
    "UNISONO_TOKEN": Variable(
        "", "secret of the job, which its store requires; `unisono run` makes a token"
    ),
    "UNISONO_INSECURE": Variable(
        "", "1: clients without a token (torch's) may use a store from other machines and users"
    ),
    "UNISONO_TLS": Variable(
        "auto",
        "what to encrypt: auto (to other hosts, by the token), off, on (all) or cert (to others)",
    ),
    "UNISONO_TLS_CERT": Variable("", "PEM file of this host's certificate, for UNISONO_TLS=cert"),
    "UNISONO_TLS_PKEY": Variable("", "PEM file of the certificate's private key"),
    "UNISONO_TLS_CA_FILE": Variable("", "PEM file of the authority that signs all certificates"),
    "UNISONO_CHECK": Variable(
        "beside",
        "before: a call on a GPU waits until all ranks were compared; beside: NCCL does not wait",
    ),
    "UNISONO_CHANNELS": Variable(
        "1", "connections to each rank of another host, over which large messages are spread"
    ),
    "UNISONO_HOST": Variable(
        "",
        "addresses this rank listens on and publishes, separated by commas; empty: those of the "
        "interfaces in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, or all",
    ),
    "UNISONO_PUBLISH": Variable(
        "",
        "addresses at which the ranks of other hosts reach this rank behind NAT, separated by "
        "commas, in addition to those it listens on",
    ),
    "UNISONO_PORTS": Variable(
        "", "low-high: ranks and stores without a given port listen on these ports; empty: any"
    ),
    "UNISONO_HOST_TIMEOUT": Variable(
        "10", "seconds after which a host that answers no packet counts as lost; 0: never"
    ),
    "UNISONO_JOIN": Variable(
        "0", "1: init_process_group waits until the ranks of a running job call reconfigure()"
    ),
    "UNISONO_STORE": Variable(
        "", "URL of the service in which env:// meets instead of MASTER_ADDR; set by `unisono run`"
    ),
    "UNISONO_LOG": Variable(
        "",
        "log level (DEBUG, INFO, ...) on standard error; empty: warnings, if the program logs none",
    ),
    "UNISONO_FULL_TRACEBACK": Variable(
        "0", "1: show the frames of unisono in the tracebacks of its uncaught errors"
    ),
    "UNISONO_STATS_DIR": Variable(
        "", "folder to which each rank writes its statistics at its end; `unisono run --stats`"
    ),
    "UNISONO_METRICS_PORT": Variable(
        "", "PORT or ADDRESS:PORT of Prometheus' metrics, plus the local rank; address: 127.0.0.1"
    ),
    "UNISONO_TRACE": Variable("1", "0: do not record calls"),
    "UNISONO_TRACE_DIR": Variable(
        "", "folder to which each rank writes its records after an error, and at SIGUSR2"
    ),
    "UNISONO_TUNING": Variable(
        "", "file of a tuning table, 0 for none; empty: the tables that `unisono tune` wrote"
    ),
    "UNISONO_TORCH_NAME": Variable(
        "unisono",
        "name that torch's groups show to libraries: unisono or gloo",
    ),
    "UNISONO_TIMEOUT": Variable("1800", "default time-out of a process group in seconds"),
}


def environ() -> Mapping[str, str]:
    """Return the process environment, for variables of other programs (RANK, PMI_RANK, ...)."""
    return os.environ


def is_true(name: str) -> bool:
    """Return whether a variable of torch has a word that torch's C++ takes for true."""
    # Torch's Python, as also the launcher, writes "True".
    return os.environ.get(name, "").lower() in ("1", "t", "true", "y", "yes")


def get(name: str) -> str:
    """Return a UNISONO_* variable, or its default if unset or empty."""
    return os.environ.get(name, "") or VARIABLES[name].default


def is_set(name: str) -> bool:
    """Return whether a UNISONO_* variable has another value than its default."""
    return get(name) != VARIABLES[name].default


def get_flag(name: str) -> bool:
    """Return whether a UNISONO_* variable is 1.

    Raises:
        InvalidArgumentError: It is neither 0 nor 1. The text names the variable.
    """
    text = get(name)
    if text not in ("0", "1"):
        raise InvalidArgumentError(f"environment variable {name}={text!r} is neither 0 nor 1")
    return text == "1"


def get_float(name: str) -> float:
    """Return a UNISONO_* variable as a number.

    Raises:
        InvalidArgumentError: It is not a number. The text names the variable.
    """
    text = get(name)
    try:
        return float(text)
    except ValueError:
        raise InvalidArgumentError(
            f"environment variable {name}={text!r} is not a number"
        ) from None


def get_int(name: str, most: int) -> int:
    """Return a UNISONO_* variable as a number from 1 to `most`.

    Raises:
        InvalidArgumentError: It is not such a number. The text names the variable.
    """
    text = get(name)
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise InvalidArgumentError(
            f"environment variable {name}={text!r} is not a number from 1 to {most}"
        )
    return int(text)
