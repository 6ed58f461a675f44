"""A host's part of a launch through ssh: `python -m unisono.launcher.ssh.remote`.

Standard input first brings two lines of JSON: what to examine, and what to call. Then each byte is
the number of a signal, or 0 as a sign of life. Its end and a long silence count as SIGTERM.
Messages to the other side are lines on standard error that begin with `MARK`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import select
import signal
import socket
import sys
import threading
from typing import Any

from unisono.core.base import document
from unisono.core.base.net.sockets import listen
from unisono.launcher.spec import LaunchResult

MARK = b"\0unisono "
"""The beginning of a message on standard error."""

_SILENCE_S = 30.0

_channel = -1


def own_version() -> str:
    """Return unisono's version; its package is loaded, but must not be imported by the launcher."""
    return str(sys.modules["unisono"].__version__)


def main() -> int:
    """Answer what this host lacks; then call what the other side wants, and return its result."""
    global _channel
    _channel = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # Without a buffer: what follows the lines belongs to `follow`.
    lines = os.fdopen(_channel, "rb", buffering=0, closefd=False)
    asked = json.loads(lines.readline() or "{}")
    if not asked:
        return 1
    os.environ.update(asked["environment"])
    answer = {"version": own_version(), "faults": _faults(asked), "port": asked["port"]}
    if asked["port"] == 0:
        answer["port"] = _free_port()
    _send("hello", json.dumps(answer))
    order = json.loads(lines.readline() or "{}")
    if not order:  # Another host cannot start its part.
        return 1
    os.environ["UNISONO_TOKEN"] = order["token"]
    os.chdir(asked["folder"])
    code: int = pickle.loads(base64.b64decode(order["call"]))()
    return code


def follow() -> None:
    """Let signals come through ssh; without effect if this process was not started through it."""
    if _channel >= 0:
        threading.Thread(target=_follow, name="unisono-ssh", daemon=True).start()


def send_result(result: LaunchResult) -> bool:
    """Send the result instead of a report; False if this process was not started through ssh."""
    if _channel >= 0:
        _send("result", document.dumps(result))
    return _channel >= 0


def _follow() -> None:
    while select.select([_channel], [], [], _SILENCE_S)[0] and (data := os.read(_channel, 4096)):
        for signum in data:
            os.kill(os.getpid(), signum)
    os.kill(os.getpid(), signal.SIGTERM)


def _send(kind: str, text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.buffer.write(MARK + f"{kind} {text}\n".encode())
        sys.stderr.buffer.flush()


def _faults(asked: dict[str, Any]) -> list[str]:
    """Return what this host lacks."""
    folder, script, first = asked["folder"], asked["script"], asked["first"]
    if not os.path.isdir(folder):
        return [f"no folder {folder}"]
    faults = []
    if script and not os.path.exists(path := os.path.join(folder, script)):
        faults.append(f"no script {path}")
    if first:
        try:
            found = {str(each[4][0]) for each in socket.getaddrinfo(first, None)}
        except OSError as error:
            faults.append(f"cannot resolve {first}: {error.strerror}")
        else:
            if all(address == "::1" or address.startswith("127.") for address in found):
                faults.append(f"{first} is {min(found)} there, which other hosts do not reach")
    return faults


def _free_port() -> int:
    sockets = listen("::", 0)
    port: int = sockets[0].getsockname()[1]
    for sock in sockets:
        sock.close()
    return port


if __name__ == "__main__":
    # The module that other modules import, not `__main__`, must know the channel.
    from unisono.launcher.ssh.remote import main as imported

    sys.exit(imported())
