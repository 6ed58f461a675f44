"""The switch of shaped links: a rate, a delay and a buffer for each host.

    switch.py RATE_GBPS DELAY_S BUFFER_BYTES PID ...

It makes `eth0`, a TAP device, in the network namespace of each process. Linux has `tc netem` for
delays, but not every kernel is built with it. Every host has an uplink and a downlink of the given
rate. A packet that finds more than the buffer waiting before a link is dropped.

It answers "done" to each line "cut NUMBER" or "restore NUMBER", and ends with its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import heapq
import os
import select
import struct
import sys
import time
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PACKET_INFO, _HEADER = 0x0002, 0x1000, 0x4000
# Segments up to 64 KiB, whose checksums the receiver does not need.
_OFFLOADS = 0x1 | 0x2 | 0x4
# Of virtio_net, before each frame.
_HEADER_BYTES = 10
# Each packet of a segment has these headers on the wire; each frame has gaps around it.
_REPEATED_BYTES, _GAP_BYTES = 66, 24
_MOST_FRAMES = 16


def _open_device(pid: str) -> int:
    """Make `eth0` in the network namespace of a process, and stay in that namespace."""
    if sys.platform != "linux":
        raise OSError("shaped links need Linux")
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_PACKET_INFO | _HEADER
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOADS)
    return device


def _wire_bytes(frame: bytes) -> int:
    """Return the bytes that a frame takes on a wire, as packets of the segment's size."""
    nbytes = len(frame) - _HEADER_BYTES
    kind, size = frame[1], frame[4] | frame[5] << 8
    return nbytes + _GAP_BYTES + (nbytes // size * _REPEATED_BYTES if kind and size else 0)


class _Way:
    """One direction of a host's link; a queue that ends at `free_s`."""

    def __init__(self, bytes_per_s: float, buffer_bytes: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._most_s = buffer_bytes / bytes_per_s
        self._free_s = 0.0

    def end_s(self, now_s: float, nbytes: int, ready_s: float) -> float | None:
        """Return when a frame has passed; None: it is dropped.

        Args:
            now_s: When its first byte may pass.
            nbytes: Bytes on the wire.
            ready_s: When its last byte is there.
        """
        begin_s = max(self._free_s, now_s)
        if begin_s - now_s > self._most_s:
            return None
        self._free_s = max(begin_s + nbytes / self._bytes_per_s, ready_s)
        return self._free_s


class _FrameSwitch:
    """Passes frames between devices, by the last byte of the address of their target."""

    def __init__(self, devices: list[int], gbps: float, delay_s: float, buffer_bytes: int) -> None:
        self._devices = devices
        self._delay_s = delay_s
        rate = gbps * 1e9 / 8
        self._bytes_per_s = rate
        self._up = [_Way(rate, buffer_bytes) for _ in devices]
        self._down = [_Way(rate, buffer_bytes) for _ in devices]
        self._cut: set[int] = set()
        # (time, order, from, to, frame): at the switch; from -1: at the target.
        self._events: list[tuple[float, int, int, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        """Pass frames until the input ends."""
        watched = [0, *self._devices]
        while True:
            wait_s = max(0.0, self._events[0][0] - time.monotonic()) if self._events else None
            ready, _, _ = select.select(watched, [], [], wait_s)
            for source, device in enumerate(self._devices):
                if device in ready:
                    for frame in self._frames(device):
                        self._enter(source, frame)
            self._advance()
            if 0 in ready and not self._obey():
                return

    def _frames(self, device: int) -> Iterator[bytes]:
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_FRAMES):
                yield os.read(device, 1 << 17)

    def _enter(self, source: int, frame: bytes) -> None:
        now_s = time.monotonic()
        end_s = self._up[source].end_s(now_s, _wire_bytes(frame), now_s)
        if end_s is None or source in self._cut:
            return
        target = frame[_HEADER_BYTES + 5] - 1
        # An odd first byte: to all hosts.
        everyone = range(len(self._devices)) if frame[_HEADER_BYTES] & 1 else (target,)
        for host in everyone:
            if host != source and 0 <= host < len(self._devices):
                self._at(end_s, source, host, frame)

    def _at(self, when_s: float, source: int, target: int, frame: bytes) -> None:
        self._count += 1
        heapq.heappush(self._events, (when_s, self._count, source, target, frame))

    def _advance(self) -> None:
        now_s = time.monotonic()
        while self._events and self._events[0][0] <= now_s:
            when_s, _, source, target, frame = heapq.heappop(self._events)
            if target in self._cut:
                continue
            if source >= 0:
                # The downlink passes the first byte before the last one is there.
                nbytes = _wire_bytes(frame)
                first_s = when_s - nbytes / self._bytes_per_s
                end_s = self._down[target].end_s(first_s, nbytes, when_s)
                if end_s is not None:
                    self._at(end_s + self._delay_s, -1, target, frame)
            else:
                # The device is down, or its host is too slow.
                with contextlib.suppress(OSError):
                    os.write(self._devices[target], frame)

    def _obey(self) -> bool:
        line = sys.stdin.readline().split()
        if not line:
            return False
        verb, number = line
        (self._cut.add if verb == "cut" else self._cut.discard)(int(number) - 1)
        print("done", flush=True)
        return True


def main(gbps: str, delay_s: str, buffer_bytes: str, *pids: str) -> None:
    """Make the devices, print "ready" and pass frames."""
    switch = _FrameSwitch(
        [_open_device(pid) for pid in pids], float(gbps), float(delay_s), int(buffer_bytes)
    )
    with contextlib.suppress(OSError):  # busy ranks would delay frames by more than their link
        if sys.platform == "linux":
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(5))
    gc.disable()
    print("ready", flush=True)
    switch.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
