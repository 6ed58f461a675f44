"""unisono: PyTorch's c10d written anew in Python, for NumPy arrays and torch tensors.

`import unisono as dist` replaces `import torch.distributed as dist`. This module is the first of
three public tiers and has the names for scripts. `unisono.lowlevel` is for authors of backends,
transports and schedules, `unisono.testing` is for tests. `unisono.functional` has collectives that
return their result, and some modules have the paths of torch.distributed's. All other modules are
private.

Names are loaded on first use, so that the launcher, which needs none of them, starts without NumPy.
Type checkers read `__init__.pyi`, which `make docs` writes.
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # without an import of typing
if TYPE_CHECKING:
    # An editor finds the source of what the stub gives several signatures.
    from typing import Any

    from unisono.core.c10d.collectives import *  # noqa: F403
    from unisono.core.c10d.p2p import *  # noqa: F403

__version__ = "0.1.0"

# module -> names.
_HOMES = {
    "core.backends": "BackendConfig register_backend",
    "core.base.threads.streams": "Event Stream current_stream default_stream stream",
    "core.base.types": "Array RedOpType ReduceOp",
    "launcher": "launch spawn",
    "beyond.pool": "Executor Pool PoolRank pool",
    "core.engines.choice": "EngineInfo engine_info",
    "core.operations.c10d_methods": (
        "AllgatherOptions AllreduceCoalescedOptions AllreduceOptions AllToAllOptions "
        "BarrierOptions BroadcastOptions GatherOptions ReduceOptions ReduceScatterOptions "
        "ScatterOptions"
    ),
    "core.c10d.backend_names": "Backend",
    "core.c10d.lifecycle": "destroy_process_group find_group init_process_group",
    "core.c10d.queries": (
        "get_backend get_backend_config get_default_backend_for_device get_global_rank "
        "get_group_rank get_node_local_rank get_pg_count get_process_group_ranks get_rank "
        "get_world_size is_available is_backend_available is_gloo_available is_initialized "
        "is_mpi_available is_nccl_available is_torchelastic_launched is_ucc_available "
        "is_xccl_available supports_complex"
    ),
    "core.c10d.new_groups": (
        "SHRINK_ABORT SHRINK_DEFAULT new_group new_subgroups new_subgroups_by_enumeration "
        "shrink_group split_group"
    ),
    "core.c10d.collectives": (
        "_all_gather_base _reduce_scatter_base all_gather all_gather_coalesced "
        "all_gather_into_tensor all_gather_single all_reduce all_reduce_coalesced all_to_all "
        "all_to_all_single barrier broadcast exscan gather gather_into_tensor gather_single "
        "reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scan scatter"
    ),
    "errors": "QueueEmptyError",
    "beyond.counters": "Counter Lock",
    "core.c10d.debug": (
        "DebugLevel breakpoint get_debug_level record_comm set_debug_level set_debug_level_from_env"
    ),
    "core.c10d.other_names": (
        "DistBackendError DistError DistNetworkError DistStoreError GroupName ProcessGroupGloo "
        "ProcessGroupNCCL RankType _coalescing_manager _get_process_group_name "
        "_make_nccl_premul_sum _rank_not_in_group default_pg_timeout reduce_op"
    ),
    "core.c10d.device_mesh": "DeviceMesh init_device_mesh",
    "beyond.membership": "membership_changed reconfigure",
    "beyond.estimates": "_time_estimator",
    "beyond.checks": "FlightRecorderHook NanCheckHook assert_equal",
    "core.c10d.reconfigure_by_handles": (
        "_get_reconfigure_handle _reconfigure _supports_reconfigure"
    ),
    "beyond.files": "CollectiveFile open_file",
    "beyond.neighbors": "Neighbors neighbor_all_gather neighbor_all_to_all",
    "core.c10d.monitored_barrier": "monitored_barrier",
    "beyond.reshard.parts": "Sharded",
    "beyond.reshard.run": "ReshardPlan reshard",
    "beyond.reshard.checkpoints": "load_arrays save_arrays",
    "beyond.reshard.versions": "Publisher Subscriber",
    "beyond.state_sync": "sync_state",
    "beyond.steps": "Step step",
    "core.c10d.objects.functions": (
        "all_gather_object all_reduce_object broadcast_object_list gather_object "
        "recv_object_list reduce_object scatter_object_list send_object_list"
    ),
    "beyond.shared_arrays": "SharedArray shared_array",
    "beyond.tracing": "stats trace_records",
    "core.recorder": "GroupStats OperationStats TraceRecord write_trace",
    "core.c10d.p2p": (
        "P2POp Received batch_isend_irecv irecv isend probe recv recv_array send sendrecv"
    ),
    "core.operations.hooks": "HookOpName PostHookArgs PreHookArgs",
    "core.operations.keywords": "CallKeywords",
    "core.operations.reductions": "commutative maxloc minloc",
    "core.groups.process_group": "ProcessGroup",
    "core.c10d.objects.serializer": "PickleSerializer Serializer",
    "beyond.preemption": "should_stop",
    "core.operations.work": "Future Work collect_all wait_all wait_any",
    "core.groups.world": "Group GroupMember group",
    "core.rendezvous": "register_rendezvous_handler rendezvous",
    "core.transports.messages": "ANY_TAG MessageInfo PROC_NULL",
    "beyond.windows.names": (
        "PutOptions SignalOptions WaitSignalOptions WindowAccessType WindowAttr"
    ),
    "beyond.windows.window": "Window new_window",
    "core.stores": "FileStore HashStore PrefixStore Store TCPStore",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(name for name in _HOME_OF if not name.startswith("_"))


# Modules that `import unisono` alone gives: those that torch.distributed imports itself, and tiers.
_MODULES = {
    *("algorithms", "device_mesh", "distributed_c10d", "elastic", "functional", "nn"),
    *("errors", "lowlevel", "parallel", "testing"),
}
# Modules whose import does more: it makes the world, or loads another library.
_SEPARATE = {"MPI", "dask", "futures", "mpi4py", "ray", "spark", "torch"}
_OTHER_WORDS = {"bcast": "broadcast", "rank": "get_rank", "size": "get_world_size"}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"unisono.{name}")
    module = _HOME_OF.get(name)
    if module is None:
        if (refusal := import_module("unisono.refused").refuse(name)) is not None:
            raise refusal
        raise AttributeError(f"module 'unisono' has no attribute {name!r}{_hint(name)}")
    home = import_module(f"unisono.{module}")
    value = globals()[name] = getattr(home, name)
    return value


def _hint(name: str) -> str:
    if name in _SEPARATE:
        return f" before `import unisono.{name}`"
    if name[:1] == "_":
        return ""
    text = import_module("unisono.core.base.text")
    return str(text.did_you_mean(name, [*__all__, *_MODULES], _OTHER_WORDS))


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__version__"]


def load_ipython_extension(shell: Any) -> None:
    """Add the magic `%%ranks` to IPython, as the import of this module does in a notebook."""

    def ranks(line: str, cell: str) -> None:
        import_module("unisono.beyond.pool.pool").run_magic(line, cell)

    shell.register_magic_function(ranks, "cell", "ranks")


_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
if _shell is not None:
    load_ipython_extension(_shell)


class _Refusals:
    """The last finder of modules: says why unisono lacks a module of torch.distributed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        top, _, below = name.partition(".")
        # `errors` and `refused` are needed to say it, and private modules are never torch's.
        if top == "unisono" and below not in ("errors", "refused") and below[:1] != "_":
            import_module("unisono.refused").check_module(below)


sys.meta_path.append(_Refusals)  # type: ignore[arg-type]  # a class with the method will do
