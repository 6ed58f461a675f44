"""Keep torch.compile out of unisono's functions."""

from __future__ import annotations

import sys

__all__ = ["keep_out"]

_is_kept_out = False


def keep_out() -> None:
    """Make torch's compiler, if it is loaded, run unisono's functions without compiling them.

    C++ also calls a process group's methods inside compiled code, for example in DDP's broadcast of
    buffers. Dynamo would then trace unisono's Python frames and fail with an internal error at the
    first private attribute of a process group. To load Dynamo takes seconds, so this function does
    not load it.
    """
    global _is_kept_out
    if not _is_kept_out and (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.add("unisono")
        _is_kept_out = True
