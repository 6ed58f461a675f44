"""Names of torch.distributed that unisono does not have, each with the reason.

A program that uses such a name gets the reason as an error. docs/reference/compatibility.md lists
all of them.
"""

from __future__ import annotations

from unisono.errors import RefusedNameError

_REDUCER = "a part of torch's C++ DistributedDataParallel, which runs on unisono as it is"
_PLUG_IN = 'use torch.distributed with init_process_group("unisono")'

REFUSED = {
    "BuiltinCommHookType": f"{_REDUCER}: {_PLUG_IN}",
    "GradBucket": f"{_REDUCER}: {_PLUG_IN}",
    "Logger": f"{_REDUCER}: {_PLUG_IN}",
    "Reducer": f"{_REDUCER}: {_PLUG_IN}",
    "_StoreCollectives": "experimental in torch: use a process group, or the methods of a store",
    "_time_estimator": "an estimate of NCCL's; no CPU backend of torch has it either",
    "algorithms": f"hooks and averagers for torch modules: {_PLUG_IN}",
    "autograd": f"the gradients of RPC: {_PLUG_IN}",
    "config": "switches of torch's own implementation",
    "device_mesh": "DeviceMesh and init_device_mesh are in unisono itself",
    "distributed_c10d": "all its public names are in unisono itself",
    "remote_device": "an address for RPC, which unisono does not have",
    "rpc": "remote procedure calls are another library's business",
    "utils": "helpers of torch's own sharding and DistributedDataParallel",
}

# Names in `dir(torch.distributed)` that torch only imports for its own use.
INCIDENTAL = {
    "c10d_logger",
    "constants",
    "log",
    "logging",
    "logging_handlers",
    "sys",
    "timedelta",
    "torch",
    "traceback",
    "typing",
}


def refuse(name: str) -> RefusedNameError:
    """Return the error for a name of `REFUSED`."""
    return RefusedNameError(f"unisono has no torch.distributed.{name}: {REFUSED[name]}")
