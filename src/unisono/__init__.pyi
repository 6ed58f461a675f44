"""The names of unisono, for type checkers; tools/stub.py writes it from `_HOMES`."""

from collections.abc import Sequence
from typing import Literal, Unpack, overload

from unisono.core.base.deadline import Timeout
from unisono.core.base.types import Arrays, Function
from unisono.core.operations.keywords import AlgorithmKeywords
from unisono.core.groups.world import Group
from unisono.beyond.checks import FlightRecorderHook as FlightRecorderHook
from unisono.beyond.checks import NanCheckHook as NanCheckHook
from unisono.beyond.checks import assert_equal as assert_equal
from unisono.beyond.counters import Counter as Counter
from unisono.beyond.counters import Lock as Lock
from unisono.beyond.estimates import _time_estimator as _time_estimator
from unisono.beyond.files import CollectiveFile as CollectiveFile
from unisono.beyond.files import open_file as open_file
from unisono.beyond.membership import membership_changed as membership_changed
from unisono.beyond.membership import reconfigure as reconfigure
from unisono.beyond.neighbors import Neighbors as Neighbors
from unisono.beyond.neighbors import neighbor_all_gather as neighbor_all_gather
from unisono.beyond.neighbors import neighbor_all_to_all as neighbor_all_to_all
from unisono.beyond.pool import Executor as Executor
from unisono.beyond.pool import Pool as Pool
from unisono.beyond.pool import PoolRank as PoolRank
from unisono.beyond.pool import pool as pool
from unisono.beyond.preemption import should_stop as should_stop
from unisono.beyond.reshard.checkpoints import load_arrays as load_arrays
from unisono.beyond.reshard.checkpoints import save_arrays as save_arrays
from unisono.beyond.reshard.parts import Sharded as Sharded
from unisono.beyond.reshard.run import ReshardPlan as ReshardPlan
from unisono.beyond.reshard.run import reshard as reshard
from unisono.beyond.reshard.versions import Publisher as Publisher
from unisono.beyond.reshard.versions import Subscriber as Subscriber
from unisono.beyond.shared_arrays import SharedArray as SharedArray
from unisono.beyond.shared_arrays import shared_array as shared_array
from unisono.beyond.state_sync import sync_state as sync_state
from unisono.beyond.steps import Step as Step
from unisono.beyond.steps import step as step
from unisono.beyond.tracing import stats as stats
from unisono.beyond.tracing import trace_records as trace_records
from unisono.beyond.windows.names import PutOptions as PutOptions
from unisono.beyond.windows.names import SignalOptions as SignalOptions
from unisono.beyond.windows.names import WaitSignalOptions as WaitSignalOptions
from unisono.beyond.windows.names import WindowAccessType as WindowAccessType
from unisono.beyond.windows.names import WindowAttr as WindowAttr
from unisono.beyond.windows.window import Window as Window
from unisono.beyond.windows.window import new_window as new_window
from unisono.core.backends import BackendConfig as BackendConfig
from unisono.core.backends import register_backend as register_backend
from unisono.core.base.threads.streams import Event as Event
from unisono.core.base.threads.streams import Stream as Stream
from unisono.core.base.threads.streams import current_stream as current_stream
from unisono.core.base.threads.streams import default_stream as default_stream
from unisono.core.base.threads.streams import stream as stream
from unisono.core.base.types import Array as Array
from unisono.core.base.types import RedOpType as RedOpType
from unisono.core.base.types import ReduceOp as ReduceOp
from unisono.core.c10d.backend_names import Backend as Backend
from unisono.core.c10d.debug import DebugLevel as DebugLevel
from unisono.core.c10d.debug import breakpoint as breakpoint
from unisono.core.c10d.debug import get_debug_level as get_debug_level
from unisono.core.c10d.debug import record_comm as record_comm
from unisono.core.c10d.debug import set_debug_level as set_debug_level
from unisono.core.c10d.debug import set_debug_level_from_env as set_debug_level_from_env
from unisono.core.c10d.device_mesh import DeviceMesh as DeviceMesh
from unisono.core.c10d.device_mesh import init_device_mesh as init_device_mesh
from unisono.core.c10d.lifecycle import destroy_process_group as destroy_process_group
from unisono.core.c10d.lifecycle import find_group as find_group
from unisono.core.c10d.lifecycle import init_process_group as init_process_group
from unisono.core.c10d.monitored_barrier import monitored_barrier as monitored_barrier
from unisono.core.c10d.new_groups import SHRINK_ABORT as SHRINK_ABORT
from unisono.core.c10d.new_groups import SHRINK_DEFAULT as SHRINK_DEFAULT
from unisono.core.c10d.new_groups import new_group as new_group
from unisono.core.c10d.new_groups import new_subgroups as new_subgroups
from unisono.core.c10d.new_groups import (
    new_subgroups_by_enumeration as new_subgroups_by_enumeration,
)
from unisono.core.c10d.new_groups import shrink_group as shrink_group
from unisono.core.c10d.new_groups import split_group as split_group
from unisono.core.c10d.objects.functions import all_gather_object as all_gather_object
from unisono.core.c10d.objects.functions import all_reduce_object as all_reduce_object
from unisono.core.c10d.objects.functions import broadcast_object_list as broadcast_object_list
from unisono.core.c10d.objects.functions import gather_object as gather_object
from unisono.core.c10d.objects.functions import recv_object_list as recv_object_list
from unisono.core.c10d.objects.functions import reduce_object as reduce_object
from unisono.core.c10d.objects.functions import scatter_object_list as scatter_object_list
from unisono.core.c10d.objects.functions import send_object_list as send_object_list
from unisono.core.c10d.objects.serializer import PickleSerializer as PickleSerializer
from unisono.core.c10d.objects.serializer import Serializer as Serializer
from unisono.core.c10d.other_names import DistBackendError as DistBackendError
from unisono.core.c10d.other_names import DistError as DistError
from unisono.core.c10d.other_names import DistNetworkError as DistNetworkError
from unisono.core.c10d.other_names import DistStoreError as DistStoreError
from unisono.core.c10d.other_names import GroupName as GroupName
from unisono.core.c10d.other_names import ProcessGroupGloo as ProcessGroupGloo
from unisono.core.c10d.other_names import ProcessGroupNCCL as ProcessGroupNCCL
from unisono.core.c10d.other_names import RankType as RankType
from unisono.core.c10d.other_names import _coalescing_manager as _coalescing_manager
from unisono.core.c10d.other_names import _get_process_group_name as _get_process_group_name
from unisono.core.c10d.other_names import _make_nccl_premul_sum as _make_nccl_premul_sum
from unisono.core.c10d.other_names import _rank_not_in_group as _rank_not_in_group
from unisono.core.c10d.other_names import default_pg_timeout as default_pg_timeout
from unisono.core.c10d.other_names import reduce_op as reduce_op
from unisono.core.c10d.p2p import P2POp as P2POp
from unisono.core.c10d.p2p import Received as Received
from unisono.core.c10d.p2p import batch_isend_irecv as batch_isend_irecv
from unisono.core.c10d.p2p import recv as recv
from unisono.core.c10d.p2p import send as send
from unisono.core.c10d.p2p import sendrecv as sendrecv
from unisono.core.c10d.queries import get_backend as get_backend
from unisono.core.c10d.queries import get_backend_config as get_backend_config
from unisono.core.c10d.queries import (
    get_default_backend_for_device as get_default_backend_for_device,
)
from unisono.core.c10d.queries import get_global_rank as get_global_rank
from unisono.core.c10d.queries import get_group_rank as get_group_rank
from unisono.core.c10d.queries import get_node_local_rank as get_node_local_rank
from unisono.core.c10d.queries import get_pg_count as get_pg_count
from unisono.core.c10d.queries import get_process_group_ranks as get_process_group_ranks
from unisono.core.c10d.queries import get_rank as get_rank
from unisono.core.c10d.queries import get_world_size as get_world_size
from unisono.core.c10d.queries import is_available as is_available
from unisono.core.c10d.queries import is_backend_available as is_backend_available
from unisono.core.c10d.queries import is_gloo_available as is_gloo_available
from unisono.core.c10d.queries import is_initialized as is_initialized
from unisono.core.c10d.queries import is_mpi_available as is_mpi_available
from unisono.core.c10d.queries import is_nccl_available as is_nccl_available
from unisono.core.c10d.queries import is_torchelastic_launched as is_torchelastic_launched
from unisono.core.c10d.queries import is_ucc_available as is_ucc_available
from unisono.core.c10d.queries import is_xccl_available as is_xccl_available
from unisono.core.c10d.queries import supports_complex as supports_complex
from unisono.core.c10d.reconfigure_by_handles import (
    _get_reconfigure_handle as _get_reconfigure_handle,
)
from unisono.core.c10d.reconfigure_by_handles import _reconfigure as _reconfigure
from unisono.core.c10d.reconfigure_by_handles import _supports_reconfigure as _supports_reconfigure
from unisono.core.engines.choice import EngineInfo as EngineInfo
from unisono.core.engines.choice import engine_info as engine_info
from unisono.core.groups.process_group import ProcessGroup as ProcessGroup
from unisono.core.groups.world import Group as Group
from unisono.core.groups.world import GroupMember as GroupMember
from unisono.core.groups.world import group as group
from unisono.core.operations.c10d_methods import AllToAllOptions as AllToAllOptions
from unisono.core.operations.c10d_methods import AllgatherOptions as AllgatherOptions
from unisono.core.operations.c10d_methods import (
    AllreduceCoalescedOptions as AllreduceCoalescedOptions,
)
from unisono.core.operations.c10d_methods import AllreduceOptions as AllreduceOptions
from unisono.core.operations.c10d_methods import BarrierOptions as BarrierOptions
from unisono.core.operations.c10d_methods import BroadcastOptions as BroadcastOptions
from unisono.core.operations.c10d_methods import GatherOptions as GatherOptions
from unisono.core.operations.c10d_methods import ReduceOptions as ReduceOptions
from unisono.core.operations.c10d_methods import ReduceScatterOptions as ReduceScatterOptions
from unisono.core.operations.c10d_methods import ScatterOptions as ScatterOptions
from unisono.core.operations.hooks import HookOpName as HookOpName
from unisono.core.operations.hooks import PostHookArgs as PostHookArgs
from unisono.core.operations.hooks import PreHookArgs as PreHookArgs
from unisono.core.operations.keywords import CallKeywords as CallKeywords
from unisono.core.operations.reductions import commutative as commutative
from unisono.core.operations.reductions import maxloc as maxloc
from unisono.core.operations.reductions import minloc as minloc
from unisono.core.operations.work import Future as Future
from unisono.core.operations.work import Work as Work
from unisono.core.operations.work import collect_all as collect_all
from unisono.core.operations.work import wait_all as wait_all
from unisono.core.operations.work import wait_any as wait_any
from unisono.core.recorder import GroupStats as GroupStats
from unisono.core.recorder import OperationStats as OperationStats
from unisono.core.recorder import TraceRecord as TraceRecord
from unisono.core.recorder import write_trace as write_trace
from unisono.core.rendezvous import register_rendezvous_handler as register_rendezvous_handler
from unisono.core.rendezvous import rendezvous as rendezvous
from unisono.core.stores import FileStore as FileStore
from unisono.core.stores import HashStore as HashStore
from unisono.core.stores import PrefixStore as PrefixStore
from unisono.core.stores import Store as Store
from unisono.core.stores import TCPStore as TCPStore
from unisono.core.transports.messages import ANY_TAG as ANY_TAG
from unisono.core.transports.messages import MessageInfo as MessageInfo
from unisono.core.transports.messages import PROC_NULL as PROC_NULL
from unisono.errors import QueueEmptyError as QueueEmptyError
from unisono.launcher import launch as launch
from unisono.launcher import spawn as spawn
from unisono import algorithms as algorithms
from unisono import device_mesh as device_mesh
from unisono import distributed_c10d as distributed_c10d
from unisono import elastic as elastic
from unisono import errors as errors
from unisono import functional as functional
from unisono import lowlevel as lowlevel
from unisono import nn as nn
from unisono import parallel as parallel
from unisono import testing as testing

__all__ = [
    "ANY_TAG",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "Array",
    "Backend",
    "BackendConfig",
    "BarrierOptions",
    "BroadcastOptions",
    "CallKeywords",
    "CollectiveFile",
    "Counter",
    "DebugLevel",
    "DeviceMesh",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "EngineInfo",
    "Event",
    "Executor",
    "FileStore",
    "FlightRecorderHook",
    "Future",
    "GatherOptions",
    "Group",
    "GroupMember",
    "GroupName",
    "GroupStats",
    "HashStore",
    "HookOpName",
    "Lock",
    "MessageInfo",
    "NanCheckHook",
    "Neighbors",
    "OperationStats",
    "P2POp",
    "PROC_NULL",
    "PickleSerializer",
    "Pool",
    "PoolRank",
    "PostHookArgs",
    "PreHookArgs",
    "PrefixStore",
    "ProcessGroup",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "Publisher",
    "PutOptions",
    "QueueEmptyError",
    "RankType",
    "Received",
    "RedOpType",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ReshardPlan",
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "ScatterOptions",
    "Serializer",
    "Sharded",
    "SharedArray",
    "SignalOptions",
    "Step",
    "Store",
    "Stream",
    "Subscriber",
    "TCPStore",
    "TraceRecord",
    "WaitSignalOptions",
    "Window",
    "WindowAccessType",
    "WindowAttr",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_object",
    "all_to_all",
    "all_to_all_single",
    "assert_equal",
    "barrier",
    "batch_isend_irecv",
    "breakpoint",
    "broadcast",
    "broadcast_object_list",
    "collect_all",
    "commutative",
    "current_stream",
    "default_pg_timeout",
    "default_stream",
    "destroy_process_group",
    "engine_info",
    "exscan",
    "find_group",
    "gather",
    "gather_into_tensor",
    "gather_object",
    "gather_single",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "launch",
    "load_arrays",
    "maxloc",
    "membership_changed",
    "minloc",
    "monitored_barrier",
    "neighbor_all_gather",
    "neighbor_all_to_all",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "new_window",
    "open_file",
    "pool",
    "probe",
    "reconfigure",
    "record_comm",
    "recv",
    "recv_array",
    "recv_object_list",
    "reduce",
    "reduce_object",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register_backend",
    "register_rendezvous_handler",
    "rendezvous",
    "reshard",
    "save_arrays",
    "scan",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "sendrecv",
    "set_debug_level",
    "set_debug_level_from_env",
    "shared_array",
    "should_stop",
    "shrink_group",
    "spawn",
    "split_group",
    "stats",
    "step",
    "stream",
    "supports_complex",
    "sync_state",
    "trace_records",
    "wait_all",
    "wait_any",
    "write_trace",
]
__version__: str

@overload
def broadcast(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    async_op: Literal[False] = False,
    group_src: int | None = None,
    **how: Unpack[CallKeywords],
) -> None:
    """Copy the tensor of rank `src` into the tensors of all ranks.

    Args:
        tensor: [...] same number of elements and dtype on all ranks.
        src: Global rank of the root.
        group: The default group if None.
        async_op: Return a `Work` at once.
        group_src: The root's rank in the group, instead of `src`.
        **how: timeout, algorithm.

    Raises:
        CollectiveMismatchError: Ranks disagree about dtype, count or root.
        CollectiveTimeoutError, PeerLostError: See `unisono.errors`.

    Cost: at least ceil(log2 p) rounds; large tensors about 2(p-1)/p of their size per rank.

    Examples: On rank 1 of 2
        >>> x = np.array([7 - rank])
        >>> dist.broadcast(x, src=0)
        >>> x
        array([7])
    """

@overload
def broadcast(
    tensor: Array,
    src: int | None = None,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    group_src: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def broadcast(
    tensor: Array,
    src: int | None,
    group: ProcessGroup | None,
    async_op: Literal[True],
    group_src: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def broadcast(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def all_reduce(
    tensor: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    accumulate: str | None = None,
    reproducible: bool = False,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> None:
    """Replace every rank's tensor by the reduction over all ranks.

    For every rank r:  tensor_r = tensor_0 (op) tensor_1 (op) ... (op) tensor_{p-1}

    The result has the same bits on every rank.

    Args:
        tensor: [...] same number of elements and dtype on all ranks; any layout.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR or PREMUL_SUM(factor). Or a NumPy ufunc,
            `minloc`, or another associative function of two arrays, applied in the order of ranks.
            It gets NumPy arrays, or tensors, and gathers all arrays on each rank first. It is
            tried on the rank's own array before that, so a side effect happens then, too.
        group: The default group if None.
        async_op: Return a `Work` at once; the tensor must stay untouched until it is done.
        accumulate: "float32" sums float16 and bfloat16 in float32, and rounds once.
        reproducible: Round the exact sum once (SUM; AVG divides it), so that the bits depend on
            the contributions only: not on their order, algorithm or hosts. See also
            `functional.reproducible_sum`.
        compress: "int8", "fp8" or "bf16": send that, and sum in float32 (SUM and AVG of floats).
            Each contribution and the result then have an error. That of int8 is at most 1/252 of
            the largest magnitude in a block of 128, of fp8 1/16 of an element, of bf16 1/256.
        **how: timeout (seconds or timedelta), algorithm, deterministic (reductions).

    Raises:
        UnsupportedError: `op` is not defined on the dtype. The group stays usable.
        CollectiveMismatchError: Ranks disagree about op, dtype or count. No tensor was changed.
        CollectiveTimeoutError, PeerLostError: See `unisono.errors`. The group is broken then.

    Cost: small: ceil(log2 p) rounds; large: 2(p-1)/p of the tensor's bytes sent per rank.

    Examples: On rank 1 of 2
        >>> x = np.array([10, rank])
        >>> dist.all_reduce(x)
        >>> x
        array([20,  1])
    """

@overload
def all_reduce(
    tensor: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def all_reduce(
    tensor: Array,
    op: ReduceOp | Function,
    group: ProcessGroup | None,
    async_op: Literal[True],
    *,
    accumulate: str | None = None,
    reproducible: bool = False,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def all_reduce(
    tensor: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    accumulate: str | None = None,
    reproducible: bool = False,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def all_reduce_coalesced(
    tensors: Arrays,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: Literal[False] = False,
    **how: Unpack[CallKeywords],
) -> None:
    """all_reduce of several tensors of one dtype, as one message.

    As in torch, an asynchronous call returns a `Future` of the tensors.

    Examples: On rank 1 of 2
        >>> x, y = np.array([rank]), np.array([10, 20])
        >>> dist.all_reduce_coalesced([x, y])
        >>> x, y
        (array([1]), array([20, 40]))
    """

@overload
def all_reduce_coalesced(
    tensors: Arrays,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Future: ...
@overload
def all_reduce_coalesced(
    tensors: Arrays,
    op: ReduceOp,
    group: ProcessGroup | None,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Future: ...
@overload
def all_reduce_coalesced(
    tensors: Arrays,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    **how: Unpack[CallKeywords],
) -> Future | None: ...
@overload
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: Literal[False] = False,
    group_dst: int | None = None,
    *,
    accumulate: str | None = None,
    reproducible: bool = False,
    **how: Unpack[CallKeywords],
) -> None:
    """Replace the tensor of rank `dst` by the reduction over all ranks.

    The other ranks' tensors keep their values (torch leaves them unspecified).

    Examples: On rank 0 of 2
        >>> x = np.array([rank + 2])
        >>> dist.reduce(x, dst=0, op=dist.ReduceOp.PRODUCT)
        >>> x
        array([6])
    """

@overload
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def reduce(
    tensor: Array,
    dst: int | None,
    op: ReduceOp | Function,
    group: ProcessGroup | None,
    async_op: Literal[True],
    group_dst: int | None = None,
    *,
    accumulate: str | None = None,
    reproducible: bool = False,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    accumulate: str | None = None,
    reproducible: bool = False,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def all_gather(
    tensor_list: Arrays,
    tensor: Array,
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> None:
    """Copy the tensor of rank i into tensor_list[i] on all ranks.

    Args:
        tensor_list: One output per rank, in group order, each as large as `tensor`.
        tensor: [...] same number of elements and dtype on all ranks.
        group: The default group if None.
        async_op: Return a `Work` at once.
        compress: As for all_reduce.
        **how: timeout, algorithm.

    Examples: On rank 1 of 2
        >>> parts = [np.zeros(2), np.zeros(2)]
        >>> dist.all_gather(parts, np.array([rank, 5.0]))
        >>> parts
        [array([0., 5.]), array([1., 5.])]
    """

@overload
def all_gather(
    tensor_list: Arrays,
    tensor: Array,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def all_gather(
    tensor_list: Arrays,
    tensor: Array,
    group: ProcessGroup | None,
    async_op: Literal[True],
    *,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def all_gather(
    tensor_list: Arrays,
    tensor: Array,
    group: Group = None,
    async_op: bool = False,
    *,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> None:
    """Concatenate the tensors of all ranks in the output of each rank.

    For every rank r: `output_r[i*n : (i+1)*n] = input_i`, `n = input.count`

    Args:
        output_tensor: [p*n] elements in C order; concatenation or stack along dimension 0.
        input_tensor: [n] elements; may be a part of the output.
        group: The default group if None.
        async_op: Return a `Work` at once.
        compress: As for all_reduce.
        **how: timeout, algorithm.

    Examples: On rank 1 of 2
        >>> x = np.zeros(4)
        >>> dist.all_gather_into_tensor(x, np.array([rank, 5.0]))
        >>> x
        array([0., 5., 1., 5.])
    """

@overload
def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: ProcessGroup | None,
    async_op: Literal[True],
    *,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def all_gather_into_tensor(
    output_tensor: Array,
    input_tensor: Array,
    group: Group = None,
    async_op: bool = False,
    *,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[Arrays],
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: Literal[False] = False,
    **how: Unpack[CallKeywords],
) -> None:
    """all_gather of several tensors of one dtype, as one message.

    `output_tensor_lists[i][j]` becomes the j-th tensor of rank i. As in torch, an asynchronous
    call returns a `Future`.

    Examples: On rank 1 of 2
        >>> parts = [[np.zeros(1), np.zeros(2)] for _ in range(2)]
        >>> dist.all_gather_coalesced(parts, [np.full(1, 7.0), np.array([rank, 5.0])])
        >>> parts
        [[array([7.]), array([0., 5.])], [array([7.]), array([1., 5.])]]
    """

@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[Arrays],
    input_tensor_list: Arrays,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Future: ...
@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[Arrays],
    input_tensor_list: Arrays,
    group: ProcessGroup | None,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Future: ...
@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[Arrays],
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: bool = False,
    **how: Unpack[CallKeywords],
) -> Future | None: ...
@overload
def gather(
    tensor: Array,
    gather_list: Arrays | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: Literal[False] = False,
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> None:
    """Copy the tensor of rank i into gather_list[i] on rank `dst` (global rank 0 by default).

    `gather_list` is required on `dst` and must be empty or None elsewhere.

    Examples: On rank 0 of 2
        >>> parts = [np.zeros(1), np.zeros(1)] if rank == 0 else None
        >>> dist.gather(np.array([rank + 5.0]), parts, dst=0)
        >>> parts
        [array([5.]), array([6.])]
    """

@overload
def gather(
    tensor: Array,
    gather_list: Arrays | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def gather(
    tensor: Array,
    gather_list: Arrays | None,
    dst: int | None,
    group: ProcessGroup | None,
    async_op: Literal[True],
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def gather(
    tensor: Array,
    gather_list: Arrays | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def gather_into_tensor(
    output_tensor: Array | None,
    input_tensor: Array,
    dst: int | None = None,
    group: Group = None,
    async_op: Literal[False] = False,
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> None:
    """Concatenate the tensors of all ranks on rank `dst` (global rank 0 by default).

    Args:
        output_tensor: [p*rows, ...] on `dst`, an array with rows, such as a NumPy array; None
            elsewhere.
        input_tensor: [rows, ...] same number of elements and dtype on all ranks.
        dst: Global rank of the root.
        group: The default group if None.
        async_op: Return a `Work` at once.
        group_dst: The root's rank in the group, instead of `dst`.
        **how: timeout, algorithm.

    Examples: On rank 0 of 2
        >>> x = np.zeros(4) if rank == 0 else None
        >>> dist.gather_into_tensor(x, np.array([rank, 5.0]), dst=0)
        >>> x
        array([0., 5., 1., 5.])
    """

@overload
def gather_into_tensor(
    output_tensor: Array | None,
    input_tensor: Array,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def gather_into_tensor(
    output_tensor: Array | None,
    input_tensor: Array,
    dst: int | None,
    group: ProcessGroup | None,
    async_op: Literal[True],
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def gather_into_tensor(
    output_tensor: Array | None,
    input_tensor: Array,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None: ...

gather_single = gather_into_tensor

@overload
def scatter(
    tensor: Array,
    scatter_list: Arrays | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: Literal[False] = False,
    group_src: int | None = None,
    **how: Unpack[CallKeywords],
) -> None:
    """Copy scatter_list[i] of rank `src` (global rank 0 by default) into rank i's tensor.

    `scatter_list` is required on `src` and must be empty or None elsewhere.

    Examples: On rank 1 of 2
        >>> x, parts = np.zeros(1), [np.array([5.0]), np.array([6.0])]
        >>> dist.scatter(x, parts if rank == 0 else None, src=0)
        >>> x
        array([6.])
    """

@overload
def scatter(
    tensor: Array,
    scatter_list: Arrays | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    group_src: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def scatter(
    tensor: Array,
    scatter_list: Arrays | None,
    src: int | None,
    group: ProcessGroup | None,
    async_op: Literal[True],
    group_src: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def scatter(
    tensor: Array,
    scatter_list: Arrays | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def reduce_scatter(
    output: Array,
    input_list: Arrays,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> None:
    """Fill the output of rank i with the reduction of input_list[i] over all ranks.

    Examples: On rank 1 of 2
        >>> x = np.zeros(1)
        >>> dist.reduce_scatter(x, [np.array([rank + 1.0]), np.array([rank + 5.0])])
        >>> x
        array([11.])
    """

@overload
def reduce_scatter(
    output: Array,
    input_list: Arrays,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def reduce_scatter(
    output: Array,
    input_list: Arrays,
    op: ReduceOp,
    group: ProcessGroup | None,
    async_op: Literal[True],
    *,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def reduce_scatter(
    output: Array,
    input_list: Arrays,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    reproducible: bool = False,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> None:
    """Reduce equal parts of `input` over all ranks; each rank keeps its own part.

    For every rank r: `output_r = reduction over q of input_q[r*n : (r+1)*n]`, `n = output.count`

    Args:
        output: [n] elements; may be a part of the input.
        input: [p*n] elements in C order.
        op: As for all_reduce.
        group: The default group if None.
        async_op: Return a `Work` at once.
        reproducible: As for all_reduce.
        compress: As for all_reduce.
        **how: timeout, algorithm.

    Examples: On rank 1 of 2
        >>> x = np.zeros(1)
        >>> dist.reduce_scatter_tensor(x, np.array([rank + 1.0, rank + 5.0]))
        >>> x
        array([11.])
    """

@overload
def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: ReduceOp | Function,
    group: ProcessGroup | None,
    async_op: Literal[True],
    *,
    reproducible: bool = False,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    reproducible: bool = False,
    compress: str | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def all_to_all(
    output_tensor_list: Arrays,
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: Literal[False] = False,
    **how: Unpack[CallKeywords],
) -> None:
    """Copy input_tensor_list[j] of rank i into output_tensor_list[i] of rank j.

    Sizes may differ from pair to pair; both ranks of a pair must give the same size.

    Examples: On rank 1 of 2
        >>> parts = [np.zeros(1), np.zeros(1)]
        >>> dist.all_to_all(parts, [np.array([rank + 10.0]), np.array([rank + 20.0])])
        >>> parts
        [array([20.]), array([21.])]
    """

@overload
def all_to_all(
    output_tensor_list: Arrays,
    input_tensor_list: Arrays,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def all_to_all(
    output_tensor_list: Arrays,
    input_tensor_list: Arrays,
    group: ProcessGroup | None,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def all_to_all(
    output_tensor_list: Arrays,
    input_tensor_list: Arrays,
    group: Group = None,
    async_op: bool = False,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: Literal[False] = False,
    **how: Unpack[CallKeywords],
) -> None:
    """Copy the j-th part of rank i's input into the i-th part of rank j's output.

    Args:
        output: [rows, ...] as many rows as this rank receives.
        input: [rows, ...] as many rows as this rank sends.
        output_split_sizes: Rows from each rank, as a list, array, tensor or iterator of integers;
            equal parts if None or empty.
        input_split_sizes: Rows to each rank, likewise.
        group: The default group if None.
        async_op: Return a `Work` at once.
        **how: timeout, algorithm.

    Raises:
        ArgumentTypeError: Split sizes that are not integers.
        InvalidArgumentError: Splits that do not add up, or rows that do not divide.
        CollectiveMismatchError: A rank sends another size than the receiver expects; names the
            pairs.

    Examples: On rank 1 of 2
        >>> x = np.zeros(2 + 2 * rank)
        >>> dist.all_to_all_single(x, np.arange(3.0) + 10 * rank, [1 + rank, 1 + rank], [1, 2])
        >>> x
        array([ 1.,  2., 11., 12.])
    """

@overload
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: ProcessGroup | None,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def scan(
    tensor: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: Literal[False] = False,
    **how: Unpack[CallKeywords],
) -> None:
    """Replace rank r's tensor by the reduction over ranks 0..r.

    For every rank r:  tensor_r = tensor_0 (op) tensor_1 (op) ... (op) tensor_r

    Args:
        tensor: [...] same number of elements and dtype on all ranks; any layout.
        op: As for all_reduce; AVG divides by r + 1.
        group: The default group if None.
        async_op: Return a `Work` at once; the tensor must stay untouched until it is done.
        **how: timeout (seconds or timedelta), algorithm, deterministic.

    Raises:
        UnsupportedError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError: As
            `all_reduce` does.

    Cost: small: ceil(log2 p) rounds; large: a chain, in which every rank sends its tensor once.
    Source: MPI_Scan.

    Examples: On rank 1 of 2
        >>> x = np.array([rank + 2])
        >>> dist.scan(x)
        >>> x
        array([5])
    """

@overload
def scan(
    tensor: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def scan(
    tensor: Array,
    op: ReduceOp | Function,
    group: ProcessGroup | None,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def scan(
    tensor: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def exscan(
    tensor: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: Literal[False] = False,
    **how: Unpack[CallKeywords],
) -> None:
    """Replace rank r's tensor by the reduction over ranks 0..r-1; rank 0 keeps its own.

    For every rank r > 0:  tensor_r = tensor_0 (op) tensor_1 (op) ... (op) tensor_{r-1}

    Arguments and errors are those of `scan`; AVG divides by r.

    Cost: small: one round more than scan; large: the same as scan.
    Source: MPI_Exscan, which leaves rank 0's result undefined.

    Examples: On rank 1 of 2
        >>> x = np.array([rank + 2])
        >>> dist.exscan(x)
        >>> x
        array([2])
    """

@overload
def exscan(
    tensor: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def exscan(
    tensor: Array,
    op: ReduceOp | Function,
    group: ProcessGroup | None,
    async_op: Literal[True],
    **how: Unpack[CallKeywords],
) -> Work: ...
@overload
def exscan(
    tensor: Array,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def barrier(
    group: Group = None,
    async_op: Literal[False] = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    **how: Unpack[AlgorithmKeywords],
) -> None:
    """Return on no rank before every rank has called it.

    `device_ids` is accepted for torch's sake; a barrier of CPU ranks touches no device.

    Examples: On rank 1 of 2
        >>> work = dist.barrier(async_op=True)
        >>> work.wait()
        True
    """

@overload
def barrier(
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    **how: Unpack[AlgorithmKeywords],
) -> Work: ...
@overload
def barrier(
    group: ProcessGroup | None,
    async_op: Literal[True],
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    **how: Unpack[AlgorithmKeywords],
) -> Work: ...
@overload
def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    **how: Unpack[AlgorithmKeywords],
) -> Work | None: ...

all_gather_single = all_gather_into_tensor

_all_gather_base = all_gather_into_tensor

reduce_scatter_single = reduce_scatter_tensor

_reduce_scatter_base = reduce_scatter_tensor

@overload
def isend(
    tensor: Array,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work:
    """Start sending to a rank, also to this rank; the tensor must stay until it is done.

    Args:
        tensor: [...] any layout.
        dst: Global rank of the receiver; `PROC_NULL`: send nothing.
        group: The default group if None.
        tag: A receive takes messages of its tag, in order.
        group_dst: The receiver's rank in the group, instead of `dst`.
        **how: timeout.

    Examples: On rank 1 of 2
        >>> x, received = np.array([rank]), np.array([-1])
        >>> works = [dist.isend(x, dst=1 - rank), dist.irecv(received, src=1 - rank)]
        >>> dist.wait_all(works)
        >>> received
        array([0])
    """

@overload
def isend(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def irecv(
    tensor: Array,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work:
    """Start receiving from a rank, or from any rank without `src` and `group_src`.

    Examples: On rank 1 of 2
        >>> x = np.array([rank])
        >>> work = dist.irecv(x) if rank == 1 else dist.isend(x, dst=1)
        >>> work.wait(), work.source_rank(), x
        (True, 0, array([0]))
    """

@overload
def irecv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    **how: Unpack[CallKeywords],
) -> Work | None: ...
@overload
def recv_array(
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    timeout: Timeout | None = None,
) -> Received:
    """Receive a message of any size and dtype into a new array.

    Return the array, the sender's rank and the tag. The array has 1 dimension, because a message
    has no shape. Its dtype is the sender's. Records, texts and times come as bytes, for
    `array.view(dtype)`. bfloat16 and float8 come as unsigned integers unless ml_dtypes is imported.
    The call is one receive: no other thread can take the message between a probe and the receive.

    Args:
        src: Global rank of the sender; any rank without `src` and `group_src`.
        group: The default group if None. On a rank that is no member: warns, returns None.
        tag: Of the message; `ANY_TAG` takes every tag.
        group_src: The sender's rank in the group, instead of `src`.
        timeout: The group's if None.

    Raises:
        CollectiveTimeoutError: No message in time; the group stays usable.
        MemoryError: The message does not fit in memory, and was dropped.

    Examples: On rank 1 of 2
        >>> dist.send(np.arange(3), dst=1, tag=5) if rank == 0 else dist.recv_array(tag=5)
        Received(array=array([0, 1, 2]), source=0, tag=5)
    """

@overload
def recv_array(
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    timeout: Timeout | None = None,
) -> Received | None: ...
@overload
def probe(
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = ANY_TAG,
    group_src: int | None = None,
    *,
    wait: Literal[True] = True,
    timeout: Timeout | None = None,
) -> MessageInfo:
    """Wait for a message, and return its source, tag and size.

    A later receive takes the message. Another thread may take it before that receive; `recv_array`
    has no such gap.

    Args:
        src: Global rank of the sender; any rank without `src` and `group_src`.
        group: The default group if None. On a rank that is no member: warns, returns None.
        tag: Of the message; by default any.
        group_src: The sender's rank in the group, instead of `src`.
        wait: Otherwise return None at once if there is no message.
        timeout: The group's if None.

    Raises:
        CollectiveTimeoutError: No message in time; the group stays usable.

    Examples: On rank 1 of 2
        >>> dist.send(np.arange(3), dst=1, tag=5) if rank == 0 else dist.probe()
        MessageInfo(source=0, tag=5, dtype='int64', count=3, nbytes=24)
    """

@overload
def probe(
    src: int | None = None,
    group: Group = None,
    tag: int = ANY_TAG,
    group_src: int | None = None,
    *,
    wait: bool = True,
    timeout: Timeout | None = None,
) -> MessageInfo | None: ...
