"""Run the cases of a program beside this file, in one cluster, and report each."""

import sys
import time
import traceback
from contextlib import contextmanager

import pytest

from unisono.errors import WorkerFailedError


def main(cases, *args):
    """Call each case; the exit code is 1 if one of them failed."""
    failed = 0
    for case in cases:
        began_s = time.monotonic()
        try:
            case(*args)
        except BaseException:
            failed = 1
            print("-" * 80, file=sys.stderr)
            print(f"{case.__name__} FAILED", flush=True)
            traceback.print_exc()
        else:
            print(f"{case.__name__} passed, {time.monotonic() - began_s:.2f} s", flush=True)
    sys.exit(failed)


@contextmanager
def error(kind, *texts, rank=None, peers=None, within_s=60.0):
    """Expect an error: its class, parts of its text and notes, and the rank that raised it."""
    began_s = time.monotonic()
    with pytest.raises(kind) as found:
        yield found
    caught = found.value
    assert type(caught) is kind, type(caught)
    whole = "\n".join([str(caught), *getattr(caught, "__notes__", [])])
    for text in texts:
        assert text in whole, whole
    if rank is not None:
        assert isinstance(caught.__cause__, WorkerFailedError)
        assert f"rank {rank} of " in str(caught.__cause__).partition("\n")[0]
        assert "Traceback (most recent call last)" in str(caught.__cause__)
    if peers is not None:
        assert caught.context.peers == peers, whole
    took_s = time.monotonic() - began_s
    assert took_s < within_s, took_s
