"""The name of the backend in torch.distributed, and the name for libraries that compare names.

Some libraries compare the name of a backend with the names that they know. For them there is
UNISONO_TORCH_NAME=gloo. Torch itself always gets the true name, because it makes groups by it.
"""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import torch.distributed as torch_dist
import torch.distributed.distributed_c10d as c10d

from unisono.core.base import config
from unisono.errors import InvalidArgumentError

__all__ = ["NAME", "answer_libraries", "shown_name", "warn_of_libraries"]

NAME = "unisono"
_NAMES = (NAME, "gloo")
_OWN = re.compile(rf"(?<![^:,]){NAME}(?![^:,])")

# Module -> what it does with a name that it does not know, without a word.
_SILENT = {
    "ignite.distributed": "ignite.distributed.auto_model returns the model without "
    "DistributedDataParallel, so each rank trains alone",
}

_warned: set[str] = set()


def wanted_name() -> str:
    """Return the name for libraries.

    Raises:
        InvalidArgumentError: UNISONO_TORCH_NAME has another value than unisono and gloo.
    """
    name = config.get("UNISONO_TORCH_NAME")
    if name not in _NAMES:
        raise InvalidArgumentError(
            f"environment variable UNISONO_TORCH_NAME={name!r} is neither "
            f"{' nor '.join(map(repr, _NAMES))}"
        )
    return name


def shown_name(depth: int) -> str:
    """Return the name for the Python function that is `depth` frames above this function's caller.

    Torch and unisono get the true name.
    """
    wanted = wanted_name()
    if wanted == NAME:
        return NAME
    try:
        asking = sys._getframe(depth + 1).f_globals.get("__name__", "")
    except ValueError:
        return NAME  # C++ asks, on a thread of its own.
    return NAME if asking.partition(".")[0] in ("torch", "unisono") else wanted


def answer_libraries() -> None:
    """Let `torch.distributed.get_backend` return the name that the user wants to libraries.

    A library that has taken the function out of torch before gets the true name.
    """
    original: Any = c10d.get_backend
    if wanted_name() == NAME or getattr(original, "is_unisono", False):
        return

    @functools.wraps(original)
    def get_backend(group: Any = None) -> str:
        # The name, or one for each device: "cpu:unisono,cuda:nccl".
        name, shown = str(original(group)), shown_name(1)
        return _OWN.sub(shown, name)

    get_backend.is_unisono = True  # type: ignore[attr-defined]
    for module in (torch_dist, c10d):
        module.get_backend = get_backend


def warn_of_libraries() -> None:
    """Log a warning, once, of each loaded library that does the wrong thing without a word."""
    for module, what in _SILENT.items():
        if module in sys.modules and module not in _warned and wanted_name() == NAME:
            # Imported here: a wrong UNISONO_LOG must not break `import torch`.
            from unisono.core.base.log import get_logger

            _warned.add(module)
            get_logger("torch.name").warning(
                "%s does not know the backend 'unisono': %s; set UNISONO_TORCH_NAME=gloo, "
                "or wrap the model yourself",
                module,
                what,
            )
