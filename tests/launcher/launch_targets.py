"""Functions for `launch`; importable, so that they work without cloudpickle too."""

import os
import signal
import sys
import threading


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
