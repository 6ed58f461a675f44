"""Run programs over links, in the order of a group's calls.

An engine knows buffers, peers, offsets and opcodes. It selects no algorithm.
"""

from unisono.core.base.seam import is_native_built
from unisono.core.engines.api import Call, Communicator, Engine, Exchange, Prepared, Task
from unisono.core.engines.choice import EngineKind, make_engine, other_engine, register_engine
from unisono.core.engines.native_engine import NativeEngine
from unisono.core.engines.reference import ReferenceEngine
from unisono.core.engines.shared_memory import host_id, memory_host

__all__ = [
    "Call",
    "Communicator",
    "Engine",
    "EngineKind",
    "Exchange",
    "NativeEngine",
    "Prepared",
    "ReferenceEngine",
    "Task",
    "host_id",
    "is_native_built",
    "make_engine",
    "memory_host",
    "other_engine",
    "register_engine",
]
