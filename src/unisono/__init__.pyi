"""The names of unisono, for type checkers; tools/stub.py writes it from `_HOMES`."""

from collections.abc import Sequence
from typing import Literal, Unpack, overload

from unisono.core.base.deadline import Timeout
from unisono.core.base.types import Arrays
from unisono.core.operations.keywords import AlgorithmKeywords
from unisono.core.groups.world import Group
from unisono.beyond.counters import Counter as Counter
from unisono.beyond.counters import Lock as Lock
from unisono.beyond.files import CollectiveFile as CollectiveFile
from unisono.beyond.files import open_file as open_file
from unisono.beyond.membership import membership_changed as membership_changed
from unisono.beyond.membership import reconfigure as reconfigure
from unisono.beyond.neighbors import Neighbors as Neighbors
from unisono.beyond.neighbors import neighbor_all_gather as neighbor_all_gather
from unisono.beyond.neighbors import neighbor_all_to_all as neighbor_all_to_all
from unisono.beyond.preemption import should_stop as should_stop
from unisono.beyond.shared_arrays import SharedArray as SharedArray
from unisono.beyond.shared_arrays import shared_array as shared_array
from unisono.beyond.state_sync import sync_state as sync_state
from unisono.beyond.steps import Step as Step
from unisono.beyond.steps import step as step
from unisono.beyond.tracing import stats as stats
from unisono.beyond.tracing import trace_records as trace_records
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
from unisono.core.c10d.collectives import _all_gather_base as _all_gather_base
from unisono.core.c10d.collectives import _reduce_scatter_base as _reduce_scatter_base
from unisono.core.c10d.collectives import all_gather as all_gather
from unisono.core.c10d.collectives import all_gather_coalesced as all_gather_coalesced
from unisono.core.c10d.collectives import all_gather_into_tensor as all_gather_into_tensor
from unisono.core.c10d.collectives import all_gather_single as all_gather_single
from unisono.core.c10d.collectives import all_reduce as all_reduce
from unisono.core.c10d.collectives import all_reduce_coalesced as all_reduce_coalesced
from unisono.core.c10d.collectives import all_to_all as all_to_all
from unisono.core.c10d.collectives import all_to_all_single as all_to_all_single
from unisono.core.c10d.collectives import barrier as barrier
from unisono.core.c10d.collectives import broadcast as broadcast
from unisono.core.c10d.collectives import exscan as exscan
from unisono.core.c10d.collectives import gather as gather
from unisono.core.c10d.collectives import reduce as reduce
from unisono.core.c10d.collectives import reduce_scatter as reduce_scatter
from unisono.core.c10d.collectives import reduce_scatter_single as reduce_scatter_single
from unisono.core.c10d.collectives import reduce_scatter_tensor as reduce_scatter_tensor
from unisono.core.c10d.collectives import scan as scan
from unisono.core.c10d.collectives import scatter as scatter
from unisono.core.c10d.debug import DebugLevel as DebugLevel
from unisono.core.c10d.debug import breakpoint as breakpoint
from unisono.core.c10d.debug import get_debug_level as get_debug_level
from unisono.core.c10d.debug import record_comm as record_comm
from unisono.core.c10d.debug import set_debug_level as set_debug_level
from unisono.core.c10d.debug import set_debug_level_from_env as set_debug_level_from_env
from unisono.core.c10d.device_mesh import DeviceMesh as DeviceMesh
from unisono.core.c10d.device_mesh import init_device_mesh as init_device_mesh
from unisono.core.c10d.lifecycle import destroy_process_group as destroy_process_group
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
from unisono.core.c10d.p2p import irecv as irecv
from unisono.core.c10d.p2p import isend as isend
from unisono.core.c10d.p2p import probe as probe
from unisono.core.c10d.p2p import recv as recv
from unisono.core.c10d.p2p import recv_array as recv_array
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
from unisono.core.engines.choice import EngineInfo as EngineInfo
from unisono.core.engines.choice import engine_info as engine_info
from unisono.core.groups.process_group import ProcessGroup as ProcessGroup
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
from unisono.core.operations.keywords import CallKeywords as CallKeywords
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
    "FileStore",
    "Future",
    "GatherOptions",
    "GroupMember",
    "GroupName",
    "GroupStats",
    "HashStore",
    "Lock",
    "MessageInfo",
    "Neighbors",
    "OperationStats",
    "P2POp",
    "PROC_NULL",
    "PickleSerializer",
    "PrefixStore",
    "ProcessGroup",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "QueueEmptyError",
    "RankType",
    "Received",
    "RedOpType",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "ScatterOptions",
    "Serializer",
    "SharedArray",
    "Step",
    "Store",
    "Stream",
    "TCPStore",
    "TraceRecord",
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
    "barrier",
    "batch_isend_irecv",
    "breakpoint",
    "broadcast",
    "broadcast_object_list",
    "collect_all",
    "current_stream",
    "default_pg_timeout",
    "default_stream",
    "destroy_process_group",
    "engine_info",
    "exscan",
    "gather",
    "gather_object",
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
    "membership_changed",
    "monitored_barrier",
    "neighbor_all_gather",
    "neighbor_all_to_all",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "open_file",
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
