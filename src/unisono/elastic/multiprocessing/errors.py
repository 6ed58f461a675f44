"""torch.distributed.elastic.multiprocessing.errors' path: `record`.

The launcher reads tracebacks from standard error, so `unisono run` does not need `record`. Another
launcher, such as torchrun, reads the file that it writes.
"""

from __future__ import annotations

import functools
import json
import time
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from unisono.core.base import config
from unisono.errors import WorkerFailedError
from unisono.launcher.environment import ERROR_FILE_VARIABLE

__all__ = ["ChildFailedError", "record"]

P = ParamSpec("P")
R = TypeVar("R")

ChildFailedError = WorkerFailedError
"""Another name of `WorkerFailedError`."""


def record(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Make a main function write its exception to the file TORCHELASTIC_ERROR_FILE, if it is set.

    As in torch, an exit with code 0 returns None.

    Source: torch.distributed.elastic.multiprocessing.errors (2.13), also for the file's format.
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return fn(*args, **kwargs)
        except SystemExit as end:
            if end.code == 0:
                return None
            raise
        except Exception as error:
            if path := config.environ().get(ERROR_FILE_VARIABLE):
                _write(path, error)
            raise

    return wrapper


def _write(path: str, error: Exception) -> None:
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)
