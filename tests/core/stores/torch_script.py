"""What torch's TCPStore client sees; run by test_torch_interop in a process of its own.

Reads commands, and answers each with lines and the line `.`:
client HOST PORT | beside | serve | hold | worker PORT | master PORT FD
"""

import sys
import threading
from datetime import timedelta

import torch.distributed as dist

SHORT = timedelta(seconds=0.1)
LONG = timedelta(seconds=20)


def attempt(call):
    """Return the result, or the kind of failure with its first words."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:40]}"


def values(store, _):
    yield store.set("k", "v"), store.get("k")
    yield store.set("bytes", b"\xff\x00"), store.get("bytes")
    yield store.set("empty", ""), store.get("empty")
    yield store.set("k\u00fc", "1"), store.get("k\u00fc")
    yield store.set("large", b"x" * 5_000_000), len(store.get("large"))
    yield store.add("n", 5), store.add("n", -8), store.get("n")
    yield store.set("ten", "10"), store.add("ten", 1)
    yield store.append("ap", "a"), store.append("ap", "bc"), store.get("ap")
    yield store.compare_set("c", "", "one"), store.compare_set("c", "one", "two")
    yield store.compare_set("c", "x", "y"), store.compare_set("m", "exp", "v")
    yield store.multi_set(["m1", "m2"], ["x", "y"]), store.multi_get(["m2", "m1", "m2"])
    yield store.multi_get([]), store.check([]), store.check(["k"]), store.check(["k", "no"])
    yield sorted(store.list_keys()), store.num_keys()
    yield store.delete_key("k"), store.delete_key("k"), store.check(["k"])


def waits(store, other):
    yield store.wait(["n"]), store.wait([])
    yield attempt(lambda: store.wait(["lost", "n"], SHORT))
    yield store.get("n")
    for key, write in {
        "set": lambda: other.set("w/set", "1"),
        "add": lambda: other.add("w/add", 1),
        "append": lambda: other.append("w/append", "1"),
        "compare_set": lambda: other.compare_set("w/compare_set", "", "1"),
        "multi_set": lambda: other.multi_set(["w/multi_set", "z"], ["1", "1"]),
    }.items():
        thread = threading.Timer(0.02, write)
        thread.start()
        yield store.get(f"w/{key}")
        thread.join()


def queues(store, other):
    yield store.queue_push("q", "1"), store.queue_push("q", "2"), store.queue_len("q")
    yield store.check(["q"]), store.queue_pop("q"), store.queue_pop("q"), store.queue_len("q")
    yield attempt(lambda: store.queue_pop("q", block=False))
    store.set_timeout(SHORT)
    yield attempt(lambda: store.queue_pop("q"))
    store.set_timeout(LONG)
    thread = threading.Timer(0.02, lambda: other.queue_push("q", "late"))
    thread.start()
    yield store.queue_pop("q")
    thread.join()


def barriers(store, other):
    yield store.barrier("alone", 1)
    for _ in range(3):
        thread = threading.Thread(target=lambda: other.barrier("pair", 2))
        thread.start()
        yield store.barrier("pair", 2)
        thread.join()
    yield attempt(lambda: store.barrier("half", 2, SHORT))
    yield store.get("n")


def prefixes(store):
    view = dist.PrefixStore("p", dist.PrefixStore("q", store))
    yield view.set("k", "v"), store.get("q/p/k"), view.list_keys()
    clone = store.clone()
    yield clone.get("q/p/k")


def meet(port: int, listen_fd: int | None):
    """Be one of two clients that a master waits for, or be that master, with a shared server."""
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        2,
        is_master=listen_fd is not None,
        timeout=3 * LONG,
        multi_tenant=listen_fd is not None,
        master_listen_fd=listen_fd,
    )
    store.set("torch", "met")
    yield store.get("unisono")
    store.barrier("both", 2)


def seen(store):
    other = dist.TCPStore(store.host, store.port, None, False, LONG)
    for part in (values, waits, queues, barriers):
        yield from part(store, other)
    yield from prefixes(store)


def answers(held, mode, *words):
    """Yield the lines that answer one command; what is in `held` stays until the end."""
    match mode:
        case "worker" | "master":
            yield from meet(int(words[0]), int(words[1]) if mode == "master" else None)
        case "client":
            yield from seen(dist.TCPStore(words[0], int(words[1]), 1, False, LONG))
        case "beside":
            # The server of unisono in this process: torch's client holds the GIL to connect.
            from unisono.core.base.net.sockets import listen
            from unisono.core.stores import start_server

            server = start_server(listen("127.0.0.1", 0))
            yield from seen(dist.TCPStore("127.0.0.1", server.port, 1, False, LONG))
            server.close()
        case "serve":
            yield from seen(dist.TCPStore("127.0.0.1", 0, 1, True, LONG))
        case "hold":
            held.append(dist.TCPStore("127.0.0.1", 0, 1, True, LONG))
            yield held[0].port


def main() -> None:
    held = []
    for command in sys.stdin:
        for line in answers(held, *command.split()):
            print(line)
        print(".", flush=True)


if __name__ == "__main__":
    main()
