"""Functions that return facts about groups, backends and launchers.

Source: torch.distributed.distributed_c10d (2.13).
"""

from __future__ import annotations

from typing import Any

from unisono.core.backends import BackendConfig, known_backends
from unisono.core.base import config
from unisono.core.base.buffers import device_type
from unisono.core.base.integers import as_integer
from unisono.core.base.types import ReduceOp, dtype_named, reduce_ops_of
from unisono.core.c10d.backend_names import Backend
from unisono.core.engines.choice import other_engine, why_no_nccl
from unisono.core.groups.world import Group, current, require_group, resolve
from unisono.core.rendezvous.launchers import local_rank
from unisono.errors import ArgumentTypeError, InvalidArgumentError, RendezvousError


def is_initialized() -> bool:
    """Whether there is a default group."""
    return current().default is not None


def get_rank(group: Group = None) -> int:
    """Return this process's rank in a group, -1 if it is not a member."""
    pg = resolve(group)
    return -1 if pg is None else pg.rank()


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks of a group, -1 if this process is not a member."""
    pg = resolve(group)
    return -1 if pg is None else pg.size()


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's number on its host, which its launcher has set.

    Args:
        fallback_rank: Returned if no launcher has set the number.

    Raises:
        RendezvousError: No launcher has set the number, and there is no `fallback_rank`.

    Source: torch.distributed.get_node_local_rank, torch 2.13.
    """
    if (number := local_rank(config.environ())) is not None:
        return number
    if fallback_rank is None:
        raise RendezvousError(
            "the local rank is not known: neither LOCAL_RANK nor a launcher's own variable is set",
            hint="pass fallback_rank, for example fallback_rank=0",
        )
    return int(fallback_rank)


def get_group_rank(group: Group, global_rank: int) -> int:
    """Return the rank in `group` of a global rank.

    Raises:
        InvalidArgumentError: This rank or `global_rank` is not a member.
    """
    return require_group(group).group_rank(global_rank)


def get_global_rank(group: Group, group_rank: int) -> int:
    """Return the global rank of a rank in `group`.

    Raises:
        InvalidArgumentError: This rank is not a member, or there is no such rank.
    """
    pg = require_group(group)
    group_rank = as_integer(group_rank, "group_rank")
    if not 0 <= group_rank < pg.size():
        raise InvalidArgumentError(
            f"group rank {group_rank} is not in group '{pg.name}' (0..{pg.size() - 1})"
        )
    return pg.ranks[group_rank]


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Return the global ranks of a group, in group order."""
    return list(require_group(group).ranks)


def get_backend(group: Group = None) -> str:
    """Return the name of the group's backend (the first one, if it has several)."""
    return next(iter(require_group(group).config.device_backend_map.values()))


def get_backend_config(group: Group = None) -> str:
    """Return the backends of a group by device: "cpu:unisono"."""
    return str(require_group(group).config)


def get_pg_count() -> int:
    """Return how many groups were made in this world, with the default group."""
    return current().made


def is_available() -> bool:
    """Whether the package can be used: always, once it is imported."""
    return True


def is_backend_available(backend: str) -> bool:
    """Whether a backend can be used; of "cpu:gloo,cuda:nccl", whether all of them can."""
    if not isinstance(backend, str):
        raise ArgumentTypeError(f"backend must be a string, got {backend!r}")
    try:
        BackendConfig(backend)
    except InvalidArgumentError:
        return False
    return True


def is_gloo_available() -> bool:
    """Whether the name "gloo" can be used: always, the CPU engine serves it."""
    return is_backend_available("gloo")


def is_mpi_available() -> bool:
    """Whether MPI can be used: mpi4py and an MPI library are installed. Initialises nothing."""
    try:
        mpi = other_engine("mpi")
    except InvalidArgumentError:
        return False
    return mpi is not None and not mpi.why_absent()


def is_nccl_available() -> bool:
    """Whether NCCL may be used: nccl4py is installed. Looks for no GPU."""
    return not why_no_nccl()


def is_ucc_available() -> bool:
    """Whether a backend named "ucc" is registered."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Whether a backend named "xccl" is registered."""
    return is_backend_available("xccl")


def is_torchelastic_launched() -> bool:
    """Whether `unisono run` or torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in config.environ()


def get_default_backend_for_device(device: Any) -> str:
    """Return the backend that serves a device if the caller names no backend.

    Args:
        device: "cuda", "cuda:1", or a torch.device.

    Raises:
        InvalidArgumentError: No backend serves the device; lists the devices that have a backend.
    """
    known_backends()
    served = Backend.default_device_backend_map
    name = served.get(device_type(device))
    if name is None:
        raise InvalidArgumentError(
            f"no backend is registered for device {device!r} (devices: {', '.join(served)})"
        )
    return name


def supports_complex(reduceOp: ReduceOp) -> bool:
    """Whether a reduce op is defined on complex numbers (torch lacks PRODUCT)."""
    return reduceOp.op in reduce_ops_of(dtype_named("complex64"))
