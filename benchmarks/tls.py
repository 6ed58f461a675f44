"""Measure what encryption costs between two hosts, which are network namespaces; needs root.

    python benchmarks/tls.py [--rounds 15] [--peers plain tls gloo] [--start 4x8]

`plain` is unisono with UNISONO_TLS=off, `tls` with auto and a token, `gloo` and `gloo-tls` are
torch's, of which torch's wheels have `gloo` only. All ranks of all peers are up at the same time,
and the peers take turns. The table has the median over rounds of the time of an all_reduce in place
on the slower rank, and the ratio to `plain`. Below it stands what the cipher alone would add, by
`openssl speed`: a rank encrypts and decrypts as many bytes as it has. With `--start HOSTSxRANKS` it
measures starts of `unisono run` instead, by turns.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unisono.testing.hosts import Host, Network

SIZES = {"8 B": 8, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
TURN_S = 0.15
TOKEN = "the token of this benchmark"
GLOO = "GLOO_DEVICE_TRANSPORT"
# With BENCH_CPU=1: on a busy machine the processor's time says more than the clock on the wall.
CLOCK = time.process_time if os.environ.get("BENCH_CPU") else time.perf_counter


class Pair(NamedTuple):
    """The two ranks of a peer."""

    ranks: list[subprocess.Popen[str]]

    def time(self, nbytes: int, count: int) -> float:
        """Return the seconds of a call on the slower rank."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{nbytes} {count}\n")
            rank.stdin.flush()
        return max(float(rank.stdout.readline()) for rank in self.ranks if rank.stdout) / count


def be_rank(peer: str, rank: int, host: str, port: int) -> None:
    """Join the world of a peer, and make the calls that standard input asks for."""
    tensor = None
    if peer.startswith("gloo"):
        dist: Any = importlib.import_module("torch.distributed")
        tensor = importlib.import_module("torch").from_numpy
        store = dist.TCPStore(host, port, 2, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    else:
        dist = importlib.import_module("unisono")
        store = dist.TCPStore(host, port, 2, is_master=rank == 0)
        dist.init_process_group(store=store, rank=rank, world_size=2)
    for line in sys.stdin:
        nbytes, count = map(int, line.split())
        array = np.zeros(nbytes // 8 or 1)
        x = array if tensor is None else tensor(array)
        dist.all_reduce(x)
        dist.barrier()
        begin_s = CLOCK()
        for _ in range(count):
            dist.all_reduce(x)
        print(CLOCK() - begin_s, flush=True)


def start_pair(peer: str, hosts: list[Host], port: int, folder: Path) -> Pair:
    """Start the ranks of a peer, one on each host."""
    environment = {
        "plain": {"UNISONO_TLS": "off", "UNISONO_TOKEN": TOKEN},
        "tls": {"UNISONO_TLS": "auto", "UNISONO_TOKEN": TOKEN},
        "gloo": {},
        "gloo-tls": {
            GLOO: "TCP_TLS",
            f"{GLOO}_TCP_TLS_PKEY": str(folder / "key.pem"),
            f"{GLOO}_TCP_TLS_CERT": str(folder / "cert.pem"),
            f"{GLOO}_TCP_TLS_CA_FILE": str(folder / "ca.pem"),
        },
    }[peer]
    words = [sys.executable, __file__, "--rank", peer]
    ranks = [
        subprocess.Popen(
            host.inside(*words, str(rank), hosts[0].v4, str(port)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **environment},
        )
        for rank, host in enumerate(hosts)
    ]
    return Pair(ranks)


def make_certificates(folder: Path) -> None:
    """Write ca.pem, key.pem and cert.pem."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    subject = "/CN=benchmark"
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem",
            "-subj", "/CN=authority", "-days", "2")  # fmt: skip
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "request.pem",
            "-subj", subject)  # fmt: skip
    openssl("x509", "-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-out", "cert.pem", "-days", "2")  # fmt: skip


def cipher_bytes_s() -> float:
    """Return the rate of AES-128-GCM in records of 16 KiB."""
    words = ["openssl", "speed", "-seconds", "1", "-evp", "aes-128-gcm", "-bytes", "16384"]
    shown = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return float(shown.split()[-1].rstrip("k")) * 1000


def compare(peers: list[str], rounds: int) -> None:
    """Measure all sizes, and print the table."""
    rate = cipher_bytes_s()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_certificates(folder)
        hosts = stack.enter_context(Network(2)).hosts
        pairs = {peer: start_pair(peer, hosts, 29600 + at, folder) for at, peer in enumerate(peers)}
        try:
            print(f"{'':>10}" + "".join(f"{peer:>22}" for peer in peers))
            for name, nbytes in SIZES.items():
                counts = {
                    peer: max(2, int(TURN_S / pair.time(nbytes, 5))) for peer, pair in pairs.items()
                }
                times: dict[str, list[float]] = {peer: [] for peer in peers}
                for _ in range(rounds):
                    for peer, pair in pairs.items():
                        times[peer].append(pair.time(nbytes, counts[peer]))
                medians = {peer: statistics.median(its) for peer, its in times.items()}
                cells = (
                    f"{us * 1e6:12.1f} us {us / medians[peers[0]]:5.2f} x"
                    for us in medians.values()
                )
                print(f"{name:>10}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
                bound_us = 2e6 * nbytes / rate
                least = 1 + bound_us / 1e6 / medians[peers[0]]
                print(f"{'cipher':>10}{bound_us:12.1f} us, with it at least {least:.2f} x")
        finally:
            for pair in pairs.values():
                for rank in pair.ranks:
                    rank.kill()
                    rank.communicate()


def starts(shape: str, rounds: int) -> None:
    """Measure starts of `unisono run` on hosts, by turns, until all ranks have left."""
    nodes, ranks = map(int, shape.split("x"))
    program = "import unisono as dist; dist.init_process_group(); dist.barrier()"
    times: dict[str, list[tuple[float, float]]] = {"off": [], "auto": []}
    with Network(nodes) as network:
        for number in range(rounds):
            for mode, its in times.items():
                port = 29700 + 2 * number + (mode == "auto")
                begin = (time.perf_counter(), cpu_s())
                words = ["-m", "unisono", "run", "--nnodes", str(nodes), "--nproc-per-node",
                         str(ranks), "--rdzv-backend=c10d",
                         "--rdzv-endpoint", f"{network.hosts[0].v4}:{port}",
                         "--no-python"]  # fmt: skip
                agents = [
                    subprocess.Popen(
                        host.inside(sys.executable, *words, "--", sys.executable, "-c", program),
                        env={**os.environ, "UNISONO_TLS": mode, "UNISONO_TOKEN": TOKEN},
                    )
                    for host in network.hosts
                ]
                if any(agent.wait() for agent in agents):
                    raise SystemExit("a start failed")
                its.append((time.perf_counter() - begin[0], cpu_s() - begin[1]))
    for at, clock in enumerate(["wall", "CPU"]):
        plain, tls = (statistics.median(each[at] for each in its) for its in times.values())
        print(f"start of {shape}, {clock}: {plain:.2f} s, tls {tls:.2f} s, {tls / plain:.2f} x")


def cpu_s() -> float:
    """Return the CPU time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Read the command line."""
    if sys.argv[1:2] == ["--rank"]:
        be_rank(sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", nargs="+", default=["plain", "tls", "gloo"])
    parser.add_argument("--start", metavar="HOSTSxRANKS")
    arguments = parser.parse_args()
    if arguments.start:
        starts(arguments.start, arguments.rounds)
    else:
        compare(arguments.peers, arguments.rounds)


if __name__ == "__main__":
    main()
