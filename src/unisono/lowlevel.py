"""The second public tier, for authors of backends, transports, engines and schedules."""

from unisono.backends import CallOptions, CPUOptions, DeviceBackend, GroupSpec, Pending
from unisono.backends.nccl.streams import CUDAEvent, CUDAStream
from unisono.base.buffers import BufferView, device_of, view
from unisono.base.completion import Completion
from unisono.base.deadline import Deadline
from unisono.base.types import DType
from unisono.engines import (
    Call,
    Communicator,
    Engine,
    Exchange,
    Prepared,
    ReferenceEngine,
    Task,
)
from unisono.groups.dispatch import Dispatcher, dispatcher
from unisono.groups.operations import OPS, OpSchema, schema_of
from unisono.schedules import Layout, Program, Schedule, Topology, build, lower, select
from unisono.schedules.ir import Buf, Op, copy, make_rows, recv, recv_reduce, reduce, send
from unisono.schedules.msccl import from_msccl, to_msccl
from unisono.schedules.registry import register_algorithm, register_schedule
from unisono.schedules.verify import verify
from unisono.stores.services.etcd import EtcdStore
from unisono.stores.services.redis import RedisStore
from unisono.transports import (
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
    "register_schedule",
    "register_transport",
    "schema_of",
    "select",
    "send",
    "to_msccl",
    "verify",
    "view",
]
