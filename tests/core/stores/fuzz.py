"""Nonsense for store servers and clients: recorded frames, mutated, in random pieces.

usage: fuzz.py SECONDS [SEED]

Prints a line per target, and ends with an error if a server dies, stops serving others, grows
beyond a bound, or if a client raises anything but the errors it documents.
"""

import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time

from unisono.core.platform.processes import resident_bytes
from unisono.core.stores import TCPStore
from unisono.core.stores.tcp.link import StoreLink, open_link
from unisono.core.stores.tcp.token import HELLO
from unisono.core.stores.tcp.wire import MAGIC, RequestOp, encode_reply, encode_request
from unisono.errors import UnisonoError

MAX_GROWTH_BYTES = 256 << 20
PATIENCE_S = 20.0
TOKEN = "token"

VALIDATE = encode_request(RequestOp.VALIDATE, MAGIC)
KEYS = ["/k", "/n", "/queue", "/" + "x" * 200, ""]


def requests(rng: random.Random) -> bytes:
    """One valid request."""
    key, value = rng.choice(KEYS), rng.randbytes(rng.choice([0, 1, 8, 300]))
    number = rng.choice([0, 1, -1, 2, 2**63 - 1, -(2**63)])
    keys = rng.choices(KEYS, k=rng.randrange(4))
    arguments = {
        RequestOp.VALIDATE: (MAGIC,),
        RequestOp.SET: (key, value),
        RequestOp.COMPARE_SET: (key, value, b"x"),
        RequestOp.GET: (key,),
        RequestOp.ADD: (key, number),
        RequestOp.CHECK: (keys,),
        RequestOp.WAIT: (keys,),
        RequestOp.APPEND: (key, value),
        RequestOp.MULTI_GET: (keys,),
        RequestOp.MULTI_SET: ([(each, value) for each in keys],),
        RequestOp.PING: (7,),
        RequestOp.QUEUE_PUSH: (key, value),
        RequestOp.QUEUE_POP: (key,),
        RequestOp.QUEUE_LEN: (key,),
        RequestOp.DELETE_KEY: (key,),
        RequestOp.BARRIER: (key, number),
    }
    op = rng.choice(list(RequestOp))
    return encode_request(op, *arguments.get(op, ()))


def replies(rng: random.Random) -> bytes:
    """One valid reply."""
    results = {
        RequestOp.GET: b"value",
        RequestOp.ADD: 5,
        RequestOp.CHECK: 0,
        RequestOp.LIST_KEYS: KEYS,
        RequestOp.PING: 0,
    }
    op = rng.choice(list(results))
    return encode_reply(op, results[op])


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Change bytes in one of the ways in which a parser may be wrong."""
    broken = bytearray(data)
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        at = rng.randrange(len(broken) + 1)
        match rng.randrange(6):
            case 0 if at < len(broken):
                broken[at] ^= 1 << rng.randrange(8)
            case 1:
                del broken[at:]
            case 2:
                broken[at:at] = rng.randbytes(rng.randrange(20))
            case 3:
                size = rng.choice([0, 1, 8192, 8193, 2**26, 2**26 + 1, 2**32, 2**63, 2**64 - 1])
                broken[at : at + 8] = struct.pack("<Q", size)
            case 4:
                broken[at:at] = broken[: rng.randrange(len(broken) + 1)]
            case 5:
                broken[at:] = bytes(len(broken) - at)
    return bytes(broken)


def dialogue(rng: random.Random) -> bytes:
    """What one mad client says."""
    start = rng.choice([VALIDATE, VALIDATE, VALIDATE, b"", HELLO + rng.randbytes(32)])
    return start + b"".join(mutated(rng, requests(rng)) for _ in range(rng.randrange(1, 6)))


SERVER = """
import logging, sys
from unisono.core.stores import TCPStore
logging.getLogger("unisono").addHandler(logging.NullHandler())
logging.getLogger("unisono").propagate = False
store = TCPStore("127.0.0.1", 0, is_master=True, token=sys.argv[1])
print(store.port, flush=True)
sys.stdin.read()
"""


def fuzz_server(engine: str, token: str, seconds: float, rng: random.Random) -> int:
    """Talk nonsense to a server; return the number of connections made."""
    variables = {**os.environ, "UNISONO_ENGINE": engine}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, token],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=variables,
    ) as process:
        port = int(process.stdout.readline())
        before, count, end = (resident_bytes(process.pid) or 0), 0, time.monotonic() + seconds
        open_ones: list[socket.socket] = []
        with TCPStore("127.0.0.1", port, token=token, timeout=PATIENCE_S) as witness:
            while time.monotonic() < end:
                open_ones += [talk(port, rng) for _ in range(20)]
                count += 20
                rng.shuffle(open_ones)
                while len(open_ones) > 30:
                    hang_up(open_ones.pop(), rng)
                witness.set("witness", "here")
                assert witness.get("witness") == b"here"
                assert witness.add("count", 1) == count // 20
                for key in witness.list_keys():
                    if key != "count":
                        witness.delete_key(key)
                grown = (resident_bytes(process.pid) or 0) - before
                assert grown < MAX_GROWTH_BYTES, f"the server grew by {grown} bytes"
        for sock in open_ones:
            sock.close()
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    return count


def talk(port: int, rng: random.Random) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    data = dialogue(rng)
    with contextlib.suppress(ConnectionError):
        while data:
            piece = rng.choice([1, 7, 40, 4096])
            sock.sendall(data[:piece])
            data = data[piece:]
    return sock


def hang_up(sock: socket.socket, rng: random.Random) -> None:
    sock.setblocking(False)
    with contextlib.suppress(OSError):
        if rng.random() < 0.5:
            sock.recv(1 << 16)
        if rng.random() < 0.3:
            # A reset instead of an orderly end.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def fuzz_client(seconds: float, rng: random.Random) -> int:
    """Answer clients with nonsense; return how often."""
    asked = (
        (RequestOp.GET, "/k"),
        (RequestOp.LIST_KEYS,),
        (RequestOp.SET, "/k", b"v"),
        (RequestOp.MULTI_GET, ["/a", "/b"]),
    )
    before, count, end = (resident_bytes(os.getpid()) or 0), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        client, server = socket.socketpair()
        with client, server:
            link = open_link(client) if rng.random() < 0.5 else StoreLink(client)
            server.sendall(mutated(rng, b"".join(replies(rng) for _ in range(5)))[:4096])
            server.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError, ValueError, OverflowError):
                link.exchange(PATIENCE_S, tuple(rng.choices(asked, k=2)))
        count += 1
        grown = (resident_bytes(os.getpid()) or 0) - before
        assert grown < MAX_GROWTH_BYTES, f"the client grew by {grown} bytes"
    return count


def fuzz_handshake(seconds: float, rng: random.Random) -> int:
    """Be a false server for stores that connect; return how often."""
    count, end = 0, time.monotonic() + seconds
    with socket.create_server(("127.0.0.1", 0)) as listener:
        while time.monotonic() < end:
            answer = mutated(rng, rng.choice([b"\x01" + rng.randbytes(64), rng.randbytes(4), b""]))
            thread = threading.Thread(target=answer_once, args=(listener, answer))
            thread.start()
            with contextlib.suppress(UnisonoError):
                TCPStore(
                    "127.0.0.1", listener.getsockname()[1], token=rng.choice(["", "t"]), timeout=0
                ).close()
            thread.join()
            count += 1
    return count


def answer_once(listener: socket.socket, answer: bytes) -> None:
    sock, _ = listener.accept()
    with sock, contextlib.suppress(OSError):
        sock.recv(100)
        sock.sendall(answer)


def main(seconds: float, seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}", flush=True)
    share = seconds / 6
    for engine in ("native", "reference"):
        for token in ("", TOKEN):
            count = fuzz_server(engine, token, share, rng)
            print(f"server {engine}, token {token!r}: {count} connections", flush=True)
    print(f"client: {fuzz_client(share, rng)} exchanges", flush=True)
    print(f"handshake: {fuzz_handshake(share, rng)} connections", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.getrandbits(32))
