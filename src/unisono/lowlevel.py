"""The second public tier, for authors of backends, transports, engines and schedules."""

from unisono.adapters.nccl.streams import CUDAEvent, CUDAStream
from unisono.core.backends import CallOptions, CPUOptions, DeviceBackend, GroupSpec, Pending
from unisono.core.base.buffers import BufferView, device_of, view
from unisono.core.base.deadline import Deadline
from unisono.core.base.threads.completion import Completion
from unisono.core.base.types import DType
from unisono.core.engines import (
    Call,
    Communicator,
    Engine,
    EngineKind,
    Exchange,
    Prepared,
    ReferenceEngine,
    Task,
    register_engine,
)
from unisono.core.operations.dispatch import Dispatcher, dispatcher
from unisono.core.operations.methods import OPS, OpSchema, schema_of
from unisono.core.schedules import Layout, Program, Schedule, Topology, build, lower, select
from unisono.core.schedules.ir import Buf, Op, copy, make_rows, recv, recv_reduce, reduce, send
from unisono.core.schedules.msccl import from_msccl, to_msccl
from unisono.core.schedules.registry import register_algorithm, register_schedule
from unisono.core.schedules.verify import verify
from unisono.core.stores.services.etcd import EtcdStore
from unisono.core.stores.services.redis import RedisStore
from unisono.core.transports import (
    InprocTransport,
    Key,
    TCPTransport,
    Transfer,
    Transport,
    register_transport,
)

__all__ = [
    "OPS",
    "Buf",
    "BufferView",
    "CPUOptions",
    "CUDAEvent",
    "CUDAStream",
    "Call",
    "CallOptions",
    "Communicator",
    "Completion",
    "DType",
    "Deadline",
    "DeviceBackend",
    "Dispatcher",
    "Engine",
    "EngineKind",
    "EtcdStore",
    "Exchange",
    "GroupSpec",
    "InprocTransport",
    "Key",
    "Layout",
    "Op",
    "OpSchema",
    "Pending",
    "Prepared",
    "Program",
    "RedisStore",
    "ReferenceEngine",
    "Schedule",
    "TCPTransport",
    "Task",
    "Topology",
    "Transfer",
    "Transport",
    "build",
    "copy",
    "device_of",
    "dispatcher",
    "from_msccl",
    "lower",
    "make_rows",
    "recv",
    "recv_reduce",
    "reduce",
    "register_algorithm",
    "register_engine",
    "register_schedule",
    "register_transport",
    "schema_of",
    "select",
    "send",
    "to_msccl",
    "verify",
    "view",
]
