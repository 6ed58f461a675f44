"""One end of a wire between two hosts: delays every packet, loses some and all that are too long.

Linux has `tc netem` for that, but not every kernel is built with it. Packets come from a TUN
device and go to the other end over a socket that both ends inherited.

    wire.py SOCKET ADDRESS/PREFIX DELAY_S LOSS SEED MOST_BYTES
"""

import collections
import contextlib
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MTU = 1400


def open_device(address):
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"wire0", IFF_TUN | IFF_NO_PI))
    for words in (
        ["address", "add", address, "dev"],
        ["link", "set", "mtu", str(MTU), "up", "dev"],
    ):
        subprocess.run(["ip", *words, "wire0"], check=True)
    return tun


def forward(tun, wire, delay_s, loss, rng, most_bytes):
    """Forward until the other end, or whoever holds our input, is gone."""
    waiting = collections.deque()
    while True:
        limit_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([tun, wire, 0], [], [], limit_s)
        if 0 in ready:
            return
        packet = os.read(tun, 65536) if tun in ready else b""
        if packet and rng.random() >= loss and len(packet) <= most_bytes:
            waiting.append((time.monotonic() + delay_s, packet))
        if wire in ready:
            packet = os.read(wire, 65536)
            if not packet:
                return
            os.write(tun, packet)
        while waiting and waiting[0][0] <= time.monotonic():
            # Both ends would wait for each other if a full wire did not lose packets, too.
            with contextlib.suppress(BlockingIOError):
                os.write(wire, waiting.popleft()[1])


if __name__ == "__main__":
    wire, address, delay_s, loss, seed, most_bytes = sys.argv[1:]
    tun = open_device(address)
    print("ready", flush=True)
    rng = random.Random(f"{seed} {address}")
    os.set_blocking(int(wire), False)
    forward(tun, int(wire), float(delay_s), float(loss), rng, int(most_bytes))
