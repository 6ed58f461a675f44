"""A process that tries what a rank does with another rank of its host: `... PID ADDRESS PROOF`."""

from __future__ import annotations

import ctypes
import json
import os
import sys

from unisono.engines.choice import engine_info


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def why_not_readable(pid: int, address: int, proof: bytes) -> str:
    """Return why this process cannot read `proof` in another process; "" if it can."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return "this system does not have it"
    found = ctypes.create_string_buffer(len(proof))
    here = _Range(ctypes.addressof(found), len(proof))
    there = _Range(address, len(proof))
    one, no_flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    got = libc.process_vm_readv(pid, ctypes.byref(here), one, ctypes.byref(there), one, no_flags)
    if got == len(proof) and found.raw == proof:
        return ""
    return os.strerror(ctypes.get_errno()) if got < 0 else "the process number is another's"


if __name__ == "__main__":
    pid, address, proof = sys.argv[1:]
    info = engine_info()
    answer = {
        "engine": f"{info.engine} engine ({info.why})",
        "shared_memory": "" if info.shared_memory == "memfd" else info.shared_memory,
        "remote_read": why_not_readable(int(pid), int(address), bytes.fromhex(proof)),
    }
    print(json.dumps(answer))
