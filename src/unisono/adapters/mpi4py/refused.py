"""What is not there: names that raise an error with the reason when they are used."""

from __future__ import annotations

from typing import Any, NoReturn

from unisono.adapters.mpi4py import comm, requests, windows
from unisono.errors import UnsupportedError

_SPAWN = "ranks are started by `unisono run` or mpiexec, not by ranks"
_PORTS = "worlds do not connect to each other"
_ULFM = "after a loss use unisono.shrink_group, or `unisono run --restart`"
_PARTS = "send the parts as messages"

REFUSED: dict[str, str] = {
    "Open_port": _PORTS,
    "Close_port": _PORTS,
    "Publish_name": _PORTS,
    "Unpublish_name": _PORTS,
    "Lookup_name": _PORTS,
    "Register_datarep": "files have the native data representation",
    "Get_abi_info": "there is no C library",
    "Get_abi_fortran_info": "there is no C library",
    "Session": "the world is unisono's default group; make communicators of it",
    "Intracomm.Spawn": _SPAWN,
    "Intracomm.Spawn_multiple": _SPAWN,
    "Intracomm.Accept": _PORTS,
    "Intracomm.Connect": _PORTS,
    "Comm.Join": _PORTS,
    "Comm.Revoke": _ULFM,
    "Comm.Is_revoked": _ULFM,
    "Comm.Get_failed": _ULFM,
    "Comm.Ack_failed": _ULFM,
    "Comm.Agree": _ULFM,
    "Comm.Iagree": _ULFM,
    "Comm.Shrink": _ULFM,
    "Comm.Ishrink": _ULFM,
    "Comm.Psend_init": _PARTS,
    "Comm.Precv_init": _PARTS,
    "Prequest.Pready": _PARTS,
    "Prequest.Pready_range": _PARTS,
    "Prequest.Pready_list": _PARTS,
    "Prequest.Parrived": _PARTS,
    "Grequest.Start": "use concurrent.futures.Future",
    "Grequest.Complete": "use concurrent.futures.Future",
    "Grequest.complete": "use concurrent.futures.Future",
    "Win.Create_dynamic": "a window's memory is given when it is made",
    "Win.Attach": "a window's memory is given when it is made",
    "Win.Detach": "a window's memory is given when it is made",
}
"""Name -> why it is not there."""


class RefusedCallError(UnsupportedError, NotImplementedError):
    """A name of mpi4py that unisono does not have was used."""


def _refusal(name: str, reason: str) -> Any:
    def refused(*arguments: Any, **how: Any) -> NoReturn:
        raise RefusedCallError(f"unisono.MPI has no {name}: {reason}")

    refused.__name__ = name.rpartition(".")[2]
    refused.__doc__ = f"Not available: {reason}."
    return refused


def page() -> str:
    """Return the page of the reference."""
    rows = "".join(f"| `{name}` | {reason} |\n" for name, reason in REFUSED.items())
    return (
        "# What unisono.MPI refuses\n\nA call raises `NotImplementedError` with the name and the "
        "reason. Written by\n`python -m unisono.adapters.mpi4py.refused`.\n\n"
        f"| name | reason |\n|---|---|\n{rows}"
    )


def install(names: dict[str, Any]) -> dict[str, Any]:
    """Add the names to the classes; return those of the module."""
    homes = {
        "Intracomm": comm.Intracomm,
        "Comm": comm.Comm,
        "Prequest": requests.Prequest,
        "Grequest": requests.Grequest,
        "Win": windows.Win,
    }
    added: dict[str, Any] = {}
    for name, reason in REFUSED.items():
        home, _, method = name.rpartition(".")
        if not home:
            added[name] = _refusal(name, reason)
        else:
            setattr(homes[home], method, staticmethod(_refusal(name, reason)))
    session = _refusal("Session", REFUSED["Session"])
    added["Session"] = type("Session", (), {"Init": staticmethod(session), "__new__": session})
    return added


if __name__ == "__main__":
    print(page(), end="")
