"""A transport of one's own: the processes of a host send over AF_UNIX sockets.

    unisono run --nproc-per-node 3 unix_transport.py

A rank connects to another when it first sends to it, and both send over this connection. If both
connect at once, each sends over its own. One thread per connection reads, one per rank writes.
"""

import socket
import struct
import tempfile
import threading
from collections import defaultdict
from contextlib import suppress
from queue import SimpleQueue

import numpy as np

import unisono as dist
from unisono.lowlevel import CPUOptions, Deadline, Key, Transport, register_transport

HEAD = struct.Struct("<QBqIQ")  # context, kind, tag, info, nbytes
LINGER_S, ANSWER_S = 2.0, 10.0


class UnixTransport(Transport):
    """One rank's connections to the other ranks of its host."""

    name = "unix"

    def __init__(self, store, rank, world_size, find):
        super().__init__(rank, world_size)
        self.find, self.leaving, self.guard = find, False, threading.RLock()
        # By rank: the frames to it, then None; an entry for each connection that has not ended.
        self.queues, self.connections = {}, defaultdict(list)
        self.threads, self.writers, self.sockets = [], [], []
        self.folder = tempfile.TemporaryDirectory()  # closed to other users
        self.address = f"{self.folder.name}/listener"
        self.listener = self.new_socket(self.address)
        self.listener.listen(world_size)
        self.start(self.accept)

    # ---- the contract

    def transmit(self, peer, key, transfer):
        frame = HEAD.pack(*key, transfer.info, transfer.into.nbytes) + transfer.into
        self.queue_to(peer).put(frame)
        transfer.finish()  # the frame is a copy

    def cancel_frames(self, unwanted, error):
        """Do nothing: each transfer is done when `transmit` returns."""

    def watch(self, peer):
        self.queue_to(peer)

    def linked(self):
        return [peer for peer in list(self.queues) if self.down(peer) is None]

    def shut(self):
        with self.guard:
            self.leaving = True
            for peer, queue in self.queues.items():
                self.good_bye(peer)
                queue.put(None)
        self.join(self.writers)
        with suppress(OSError), socket.socket(socket.AF_UNIX) as knock:
            knock.connect(self.address)  # ends `accept`
        for sock in self.sockets[1:]:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.join(self.threads)
        for sock in self.sockets:
            sock.close()
        self.folder.cleanup()

    def may_wait(self):
        return threading.current_thread() not in self.threads

    # ---- threads and connections

    def join(self, threads):
        until = Deadline(LINGER_S)
        for thread in threads:
            if self.may_wait():
                thread.join(until.remaining())

    def new_socket(self, path):
        self.sockets.append(sock := socket.socket(socket.AF_UNIX))
        sock.bind(path)
        return sock

    def start(self, body, *arguments):
        self.threads.append(thread := threading.Thread(target=body, args=arguments, daemon=True))
        thread.start()
        return thread

    def queue_to(self, peer, sock=None):
        """Return the queue to a rank; connect to it, unless there is a socket or a queue."""
        with self.guard:
            if peer not in self.queues and not self.leaving:
                self.queues[peer] = SimpleQueue()
                self.writers.append(self.start(self.write, peer, sock))
            return self.queues.get(peer) or SimpleQueue()

    def accept(self):
        while not self.leaving:
            sock, path = self.listener.accept()
            self.sockets.append(sock)
            with self.guard, suppress(OSError, ValueError):  # the path of a stranger has no rank
                if not self.leaving:
                    peer = int(path.rpartition("-")[2])
                    sock.send(b"!")
                    self.connections[peer].append(sock)
                    self.queue_to(peer, sock)
                    self.start(self.read, peer, sock)

    def write(self, peer, sock):
        try:
            if sock is None:
                self.connections[peer].append(None)
                sock = self.new_socket(f"{self.folder.name}/{peer}-{self.rank}")
                sock.settimeout(ANSWER_S)
                sock.connect(self.find(peer))
                if not sock.recv(1):
                    raise ConnectionError("it did not answer")
                sock.settimeout(None)
                self.start(self.read, peer, sock)
        except OSError as error:
            return self.end(peer, str(error), left=True)
        with suppress(OSError):  # the thread that reads detects the end
            while frame := self.queues[peer].get():
                sock.sendall(frame)

    def read(self, peer, sock):
        with suppress(OSError, ValueError, struct.error), sock.makefile("rb") as stream:
            while head := stream.read(HEAD.size):
                *key, info, nbytes = HEAD.unpack(head)
                if len(data := stream.read(nbytes)) < nbytes:
                    break
                self.arrive(peer, Key(*key), info, memoryview(data))
        self.end(peer, "its connection was closed")

    def end(self, peer, reason, left=False):
        """Note the end of a connection; with the last one the rank has ended."""
        self.connections[peer].pop()
        if not self.connections[peer]:
            self.ended(peer, reason, left=left)


def main():
    """Add numbers of all ranks."""
    register_transport("unix", UnixTransport)
    dist.init_process_group(pg_options=CPUOptions(transport="unix"))
    numbers = np.arange(3.0) + dist.get_rank()
    dist.all_reduce(numbers)
    print(f"rank {dist.get_rank()}: the sum is {numbers.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
