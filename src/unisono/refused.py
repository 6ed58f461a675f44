"""Names and modules of torch.distributed that unisono does not have, each with the reason.

A program that uses such a name, or imports such a module, gets the reason as an error.
docs/reference/compatibility.md lists all of them.
"""

from __future__ import annotations

from unisono.errors import RefusedModuleError, RefusedNameError

_REDUCER = "a part of torch's C++ DistributedDataParallel, which runs on unisono as it is"
_PLUG_IN = 'use torch.distributed with init_process_group("unisono")'
_ON_US = 'built on torch.distributed: runs on `init_process_group("unisono")`'
_OF_AGENT = "the agent belongs to the command `unisono run`"

REFUSED_MODULES = {
    "algorithms.ddp_comm_hooks": f"{_ON_US}; `unisono.parallel` has hooks without it",
    "algorithms.model_averaging": _ON_US,
    "argparse_util": "`unisono run` itself reads its flags from variables",
    "autograd": f"the gradients of RPC: {_PLUG_IN}",
    "c10d_logger": "logs of torch's own calls",
    "checkpoint": _ON_US,
    "collective_utils": _ON_US,
    "config": "switches of torch's own implementation",
    "constants": "`default_pg_timeout` is in `unisono`",
    "debug": "a server that shows torch's state; `unisono top` and `unisono stacks` show unisono's",
    "elastic.agent": _OF_AGENT,
    "elastic.control_plane": "a server in each worker",
    "elastic.events": "`unisono run` reports events on standard error",
    "elastic.metrics": "metrics of torch's agent; UNISONO_METRICS_PORT serves unisono's",
    "elastic.rendezvous": "`unisono run --rdzv-backend`; `unisono.rendezvous` opens URLs",
    "elastic.utils": "`ElasticSampler` is in `unisono.parallel`",
    "flight_recorder": "reads NCCL's traces; `unisono trace` reads both",
    "fsdp": _ON_US,
    "launch": "`python -m unisono.run`; the variables are always set",
    "logging_handlers": "logs of torch's own calls",
    "nn.api": f"remote modules, which need RPC: {_PLUG_IN}",
    "optim": f"{_ON_US}, except `DistributedOptimizer`, which needs RPC",
    "pipelining": _ON_US,
    "remote_device": "an address for RPC, which unisono does not have",
    "rpc": "remote procedure calls are another library's business",
    "tensor": f"DTensor: {_ON_US}",
    "utils": "helpers of torch's own sharding and DistributedDataParallel",
}
"""Module below torch.distributed -> why there is none below `unisono`."""

REFUSED = {
    "BuiltinCommHookType": f"{_REDUCER}: {_PLUG_IN}",
    "GradBucket": f"{_REDUCER}: {_PLUG_IN}",
    "Logger": f"{_REDUCER}: {_PLUG_IN}",
    "Reducer": f"{_REDUCER}: {_PLUG_IN}",
    "_StoreCollectives": "experimental in torch: use a process group, or the methods of a store",
    **{
        name: REFUSED_MODULES[name]
        for name in ("autograd", "config", "remote_device", "rpc", "utils")
    },
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


def refuse(name: str) -> RefusedNameError | None:
    """Return the error for a name of torch.distributed that is refused, else None."""
    if (reason := REFUSED.get(name) or REFUSED_MODULES.get(name)) is None:
        return None
    return RefusedNameError(f"unisono has no torch.distributed.{name}: {reason}")


def check_module(name: str) -> None:
    """Check that a module, which is not here, is not one that is refused.

    Args:
        name: Name below `unisono`.

    Raises:
        RefusedModuleError: It is a module of torch.distributed; gives the reason.
    """
    if (reason := REFUSED_MODULES.get(name)) is not None:
        raise RefusedModuleError(f"there is no module unisono.{name}: {reason}")
