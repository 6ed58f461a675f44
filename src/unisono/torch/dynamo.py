"""Keeping torch.compile out of unisono's own functions."""

from __future__ import annotations

import sys

__all__ = ["keep_out"]

_told = False


def keep_out() -> None:
    """Tell torch's compiler, once it is loaded, to run our functions and not to compile them.

    C++ calls a process group's methods also in the middle of compiled code (DDP's broadcast of
    buffers, say). Dynamo would look at our Python frames then, and end in an internal error at the
    first private attribute of a process group. It takes seconds to load, so it is not loaded here.
    """
    global _told
    if not _told and (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.add("unisono")
        _told = True
