"""Functions for `launch`; importable, so that they work without cloudpickle too."""

import os
import re
import signal
import sys
import threading
from pathlib import Path

import unisono


class CustomError(Exception):
    """Cannot be rebuilt from its text alone."""

    def __init__(self, code, text):
        super().__init__(code, text)
        self.code = code


def scaled(rank, factor):
    return {"rank": rank * factor, "world_size": os.environ["WORLD_SIZE"]}


def fail_on_rank_1(rank):
    if rank == 1:
        raise CustomError(7, "boom")
    signal.pause()


def die_on_rank_1(rank):
    if rank == 1:
        os._exit(3)
    signal.pause()


def not_picklable(rank):
    return threading.Lock()


def large(rank, nbytes):
    return bytes([rank]) * nbytes


def leave(rank):
    sys.exit(0)


def add_rank(rank, array, fixed, text):
    array += rank
    return float(array.sum()), int(fixed.sum()), fixed.flags.writeable, text


def put_sum(rank, queue, array):
    queue.put((rank, int(array.sum())))


def share_of_memory(rank, array):
    """Return the sum of an array, and this rank's share of the memory file that it is in."""
    total = int(array.sum())
    unisono.init_process_group(timeout=60)
    unisono.barrier()  # all ranks have read the array
    smaps = Path("/proc/self/smaps").read_text()
    shares = re.findall(r"/memfd:unisono-payload.*?\nPss: +(\d+) kB", smaps, re.DOTALL)
    unisono.barrier()  # and none has ended
    unisono.destroy_process_group()
    return total, 1024 * sum(map(int, shares))


def payload_files(rank, data, path):
    """Write to a file which memory of arguments this process has mapped or open."""
    links = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    found = [str(link) for link in links if "unisono-payload" in str(link)]
    found += re.findall(r"/memfd:unisono-payload.*", Path("/proc/self/maps").read_text())
    Path(path).write_text(str(found))


def locked(rank, lock, array):
    array += rank
    with lock:
        return array.tolist()
