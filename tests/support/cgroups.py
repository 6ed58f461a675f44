"""A cgroup with little memory."""

import contextlib
import os
from pathlib import Path

import pytest

from unisono.core.platform.machine import memory_cgroup


@contextlib.contextmanager
def small_cgroup(limit_bytes):
    """A cgroup below our own with little memory; the test is skipped if that is forbidden."""
    root, path = memory_cgroup()
    folder = Path(f"{root}{path}/unisono-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        limit = folder / ("memory.limit_in_bytes" if root.endswith("/memory") else "memory.max")
        try:
            limit.write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no memory limit can be set: {error}")
        yield folder
    finally:
        folder.rmdir()
