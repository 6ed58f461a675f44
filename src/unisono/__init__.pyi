"""The names of unisono, for type checkers; tools/stub.py writes it from `_HOMES`."""

from unisono.backends import BackendConfig as BackendConfig
from unisono.backends import register_backend as register_backend
from unisono.base.streams import Event as Event
from unisono.base.streams import Stream as Stream
from unisono.base.streams import current_stream as current_stream
from unisono.base.streams import default_stream as default_stream
from unisono.base.streams import stream as stream
from unisono.base.types import RedOpType as RedOpType
from unisono.base.types import ReduceOp as ReduceOp
from unisono.c10d.backend_names import Backend as Backend
from unisono.c10d.collectives import _all_gather_base as _all_gather_base
from unisono.c10d.collectives import _reduce_scatter_base as _reduce_scatter_base
from unisono.c10d.collectives import all_gather as all_gather
from unisono.c10d.collectives import all_gather_coalesced as all_gather_coalesced
from unisono.c10d.collectives import all_gather_into_tensor as all_gather_into_tensor
from unisono.c10d.collectives import all_gather_single as all_gather_single
from unisono.c10d.collectives import all_reduce as all_reduce
from unisono.c10d.collectives import all_reduce_coalesced as all_reduce_coalesced
from unisono.c10d.collectives import all_to_all as all_to_all
from unisono.c10d.collectives import all_to_all_single as all_to_all_single
from unisono.c10d.collectives import barrier as barrier
from unisono.c10d.collectives import broadcast as broadcast
from unisono.c10d.collectives import exscan as exscan
from unisono.c10d.collectives import gather as gather
from unisono.c10d.collectives import reduce as reduce
from unisono.c10d.collectives import reduce_scatter as reduce_scatter
from unisono.c10d.collectives import reduce_scatter_single as reduce_scatter_single
from unisono.c10d.collectives import reduce_scatter_tensor as reduce_scatter_tensor
from unisono.c10d.collectives import scan as scan
from unisono.c10d.collectives import scatter as scatter
from unisono.c10d.debug import DebugLevel as DebugLevel
from unisono.c10d.debug import breakpoint as breakpoint
from unisono.c10d.debug import get_debug_level as get_debug_level
from unisono.c10d.debug import record_comm as record_comm
from unisono.c10d.debug import set_debug_level as set_debug_level
from unisono.c10d.debug import set_debug_level_from_env as set_debug_level_from_env
from unisono.c10d.device_mesh import DeviceMesh as DeviceMesh
from unisono.c10d.device_mesh import init_device_mesh as init_device_mesh
from unisono.c10d.lifecycle import destroy_process_group as destroy_process_group
from unisono.c10d.lifecycle import init_process_group as init_process_group
from unisono.c10d.monitored_barrier import monitored_barrier as monitored_barrier
from unisono.c10d.new_groups import SHRINK_ABORT as SHRINK_ABORT
from unisono.c10d.new_groups import SHRINK_DEFAULT as SHRINK_DEFAULT
from unisono.c10d.new_groups import new_group as new_group
from unisono.c10d.new_groups import new_subgroups as new_subgroups
from unisono.c10d.new_groups import new_subgroups_by_enumeration as new_subgroups_by_enumeration
from unisono.c10d.new_groups import shrink_group as shrink_group
from unisono.c10d.new_groups import split_group as split_group
from unisono.c10d.objects.functions import all_gather_object as all_gather_object
from unisono.c10d.objects.functions import all_reduce_object as all_reduce_object
from unisono.c10d.objects.functions import broadcast_object_list as broadcast_object_list
from unisono.c10d.objects.functions import gather_object as gather_object
from unisono.c10d.objects.functions import recv_object_list as recv_object_list
from unisono.c10d.objects.functions import reduce_object as reduce_object
from unisono.c10d.objects.functions import scatter_object_list as scatter_object_list
from unisono.c10d.objects.functions import send_object_list as send_object_list
from unisono.c10d.objects.serializer import PickleSerializer as PickleSerializer
from unisono.c10d.objects.serializer import Serializer as Serializer
from unisono.c10d.other_names import DistBackendError as DistBackendError
from unisono.c10d.other_names import DistError as DistError
from unisono.c10d.other_names import DistNetworkError as DistNetworkError
from unisono.c10d.other_names import DistStoreError as DistStoreError
from unisono.c10d.other_names import GroupName as GroupName
from unisono.c10d.other_names import RankType as RankType
from unisono.c10d.other_names import _coalescing_manager as _coalescing_manager
from unisono.c10d.other_names import _get_process_group_name as _get_process_group_name
from unisono.c10d.other_names import _make_nccl_premul_sum as _make_nccl_premul_sum
from unisono.c10d.other_names import _rank_not_in_group as _rank_not_in_group
from unisono.c10d.other_names import default_pg_timeout as default_pg_timeout
from unisono.c10d.other_names import reduce_op as reduce_op
from unisono.c10d.p2p import P2POp as P2POp
from unisono.c10d.p2p import Received as Received
from unisono.c10d.p2p import batch_isend_irecv as batch_isend_irecv
from unisono.c10d.p2p import irecv as irecv
from unisono.c10d.p2p import isend as isend
from unisono.c10d.p2p import probe as probe
from unisono.c10d.p2p import recv as recv
from unisono.c10d.p2p import recv_array as recv_array
from unisono.c10d.p2p import send as send
from unisono.c10d.p2p import sendrecv as sendrecv
from unisono.c10d.preemption import should_stop as should_stop
from unisono.c10d.queries import get_backend as get_backend
from unisono.c10d.queries import get_backend_config as get_backend_config
from unisono.c10d.queries import get_default_backend_for_device as get_default_backend_for_device
from unisono.c10d.queries import get_global_rank as get_global_rank
from unisono.c10d.queries import get_group_rank as get_group_rank
from unisono.c10d.queries import get_node_local_rank as get_node_local_rank
from unisono.c10d.queries import get_pg_count as get_pg_count
from unisono.c10d.queries import get_process_group_ranks as get_process_group_ranks
from unisono.c10d.queries import get_rank as get_rank
from unisono.c10d.queries import get_world_size as get_world_size
from unisono.c10d.queries import is_available as is_available
from unisono.c10d.queries import is_backend_available as is_backend_available
from unisono.c10d.queries import is_gloo_available as is_gloo_available
from unisono.c10d.queries import is_initialized as is_initialized
from unisono.c10d.queries import is_mpi_available as is_mpi_available
from unisono.c10d.queries import is_nccl_available as is_nccl_available
from unisono.c10d.queries import is_torchelastic_launched as is_torchelastic_launched
from unisono.c10d.queries import is_ucc_available as is_ucc_available
from unisono.c10d.queries import is_xccl_available as is_xccl_available
from unisono.c10d.queries import supports_complex as supports_complex
from unisono.engines.choice import EngineInfo as EngineInfo
from unisono.engines.choice import engine_info as engine_info
from unisono.errors import QueueEmptyError as QueueEmptyError
from unisono.groups.c10d_methods import AllToAllOptions as AllToAllOptions
from unisono.groups.c10d_methods import AllgatherOptions as AllgatherOptions
from unisono.groups.c10d_methods import AllreduceCoalescedOptions as AllreduceCoalescedOptions
from unisono.groups.c10d_methods import AllreduceOptions as AllreduceOptions
from unisono.groups.c10d_methods import BarrierOptions as BarrierOptions
from unisono.groups.c10d_methods import BroadcastOptions as BroadcastOptions
from unisono.groups.c10d_methods import GatherOptions as GatherOptions
from unisono.groups.c10d_methods import ReduceOptions as ReduceOptions
from unisono.groups.c10d_methods import ReduceScatterOptions as ReduceScatterOptions
from unisono.groups.c10d_methods import ScatterOptions as ScatterOptions
from unisono.groups.process_group import ProcessGroup as ProcessGroup
from unisono.groups.work import Future as Future
from unisono.groups.work import Work as Work
from unisono.groups.work import collect_all as collect_all
from unisono.groups.work import wait_all as wait_all
from unisono.groups.work import wait_any as wait_any
from unisono.groups.world import GroupMember as GroupMember
from unisono.groups.world import group as group
from unisono.launcher import launch as launch
from unisono.launcher import spawn as spawn
from unisono.rendezvous import register_rendezvous_handler as register_rendezvous_handler
from unisono.rendezvous import rendezvous as rendezvous
from unisono.stores import FileStore as FileStore
from unisono.stores import HashStore as HashStore
from unisono.stores import PrefixStore as PrefixStore
from unisono.stores import Store as Store
from unisono.stores import TCPStore as TCPStore
from unisono.transports.messages import ANY_TAG as ANY_TAG
from unisono.transports.messages import MessageInfo as MessageInfo

__all__ = [
    "ANY_TAG",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "Backend",
    "BackendConfig",
    "BarrierOptions",
    "BroadcastOptions",
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
    "HashStore",
    "MessageInfo",
    "P2POp",
    "PickleSerializer",
    "PrefixStore",
    "ProcessGroup",
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
    "Store",
    "Stream",
    "TCPStore",
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
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "probe",
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
    "should_stop",
    "shrink_group",
    "spawn",
    "split_group",
    "stream",
    "supports_complex",
    "wait_all",
    "wait_any",
]
__version__: str
