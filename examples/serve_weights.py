"""Serve a model by HTTP while trainers publish new versions of its weights.

    python -m unisono run --nproc-per-node 5 examples/serve_weights.py

Ranks 0 and 1 are trainers: each has half of the rows of each layer. Ranks 2 and 3 are engines: each
serves the whole model, and takes a new version beside the one in use. Rank 4 sends requests to both
engines without a pause. It checks that each answer is that of one whole version, and prints how
long answers took before, during and after the updates.
"""

import argparse
import http.client
import json
import shutil
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

import unisono as dist

TRAINERS, ENGINES, CLIENT = [0, 1], [2, 3], 4
LAYERS = ("up", "down")
LIMIT_S = 60.0


class Worker:
    """An engine: a model, and the interface by which its weights change."""

    def __init__(self, folder, width):
        self.subscriber = dist.Subscriber(folder)
        self.weights, self.spare = (
            {name: np.zeros((width, width), np.float32) for name in LAYERS} for _ in range(2)
        )
        self.version = 0
        self.lock = threading.Lock()

    def generate(self, x):
        """Return the version and the answer to a request."""
        with self.lock:
            version, weights = self.version, self.weights
        y = x @ weights["up"] @ weights["down"]
        return version, y

    def update_weights(self):
        """Take the newest version, if there is one, and use it from the next request on."""
        taken = self.subscriber.take(self.spare)
        if taken is not None:
            with self.lock:
                # Requests that have begun keep what they have; so the next spare is new memory.
                self.version, self.weights = taken, self.spare
                self.spare = {name: np.empty_like(x) for name, x in self.weights.items()}


def server_of(worker, width):
    """Return an HTTP server that answers POST /generate with a number and a version."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer leaves in one piece

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            version, y = worker.generate(np.full(width, asked["x"], np.float32))
            body = json.dumps({"version": version, "y": float(y.mean())}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def train(folder, args):
    """Publish version 1, and the others when the client has begun; each version is its number."""
    publisher = dist.Publisher(folder, trainers)
    shape = args.width, args.width
    rows = {
        name: np.empty((args.width // len(TRAINERS), args.width), np.float32) for name in LAYERS
    }
    mine = {name: dist.Sharded(x, shape, mesh=TRAINERS, placements=[0]) for name, x in rows.items()}
    for version in range(1, args.versions + 1):
        for x in rows.values():
            x[:] = version
        assert publisher.publish(mine) == version
        if version == 1:
            dist.barrier()
            dist.recv(np.zeros(1), CLIENT)


def serve(folder, args):
    """Serve until the client has enough."""
    worker = Worker(folder, args.width)
    server = server_of(worker, args.width)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    dist.send(np.array([server.server_port]), CLIENT)
    dist.barrier()
    ends = dist.irecv(np.zeros(1), CLIENT)
    while not ends.is_completed():
        worker.update_weights()
        time.sleep(0.005)
    server.shutdown()
    server.server_close()


def ask(port, args, goes_on, times, seen):
    """Send requests to one engine while `goes_on`; check each answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    while goes_on(times, seen):
        began = time.perf_counter()
        connection.request("POST", "/generate", '{"x": 1.0}')
        answer = json.loads(connection.getresponse().read())
        times.append(time.perf_counter() - began)
        seen.append(answer["version"])
        if not np.isclose(answer["y"], (args.width * answer["version"]) ** 2):
            seen.append(None)
    connection.close()


def phase(name, ports, args, goes_on):
    """Send requests to all engines, and print how long the answers took."""
    rows = [([], []) for _ in ports]
    threads = [
        threading.Thread(target=ask, args=(port, args, goes_on, *row))
        for port, row in zip(ports, rows, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times, seen = [t for row in rows for t in row[0]], {v for row in rows for v in row[1]}
    middle, high = np.percentile(times, [50, 99]) * 1e3
    print(f"{name}: {len(times)} answers, median {middle:.2f} ms, p99 {high:.2f} ms", flush=True)
    if None in seen:
        sys.exit("WRONG: an answer of no version")
    return seen


def load(args):
    """Send requests before, during and after the updates."""
    ports = []
    for rank in ENGINES:
        port = np.zeros(1, int)
        dist.recv(port, rank)
        ports.append(int(port[0]))
    dist.barrier()

    def counted(times, seen):
        return len(times) < args.requests

    limit_s = time.monotonic() + LIMIT_S

    def until_last(times, seen):
        return seen[-1:] != [args.versions] and time.monotonic() < limit_s

    phase("start ", ports, args, lambda times, seen: seen[-1:] != [1])
    phase("before", ports, args, counted)
    works = [dist.isend(np.zeros(1), rank) for rank in TRAINERS]
    phase("during", ports, args, until_last)
    if phase("after ", ports, args, counted) != {args.versions}:
        sys.exit("WRONG: an engine did not take the last version")
    dist.wait_all(works)
    for rank in ENGINES:
        dist.send(np.zeros(1), rank)


parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--versions", type=int, default=10)
parser.add_argument("--requests", type=int, default=500)
args = parser.parse_args()

dist.init_process_group()
rank = dist.get_rank()
trainers = dist.new_group(TRAINERS)
shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
place = [tempfile.mkdtemp(dir=shared) if rank == 0 else None]
dist.broadcast_object_list(place, src=0)
try:
    if rank in TRAINERS:
        train(place[0], args)
    elif rank in ENGINES:
        serve(place[0], args)
    else:
        load(args)
    dist.barrier()
finally:
    if rank == 0:
        shutil.rmtree(place[0], ignore_errors=True)
dist.destroy_process_group()
