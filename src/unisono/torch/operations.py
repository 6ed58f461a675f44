"""Make every operation that torch calls on a process group a call of a unisono process group.

The methods are made from the table in `groups/operations.py`, which has c10d's names, argument
order and option structs. A synchronous call returns None, which torch allows if the operation is
done. Calls from C++ (DDP, functional collectives) are asynchronous and get a work.

Source: torch.distributed.ProcessGroup (2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from unisono.backends import Pending
from unisono.c10d.monitored_barrier import monitored_barrier
from unisono.errors import UnisonoError
from unisono.groups.c10d_methods import refusing
from unisono.groups.operations import OPS, OpSchema
from unisono.groups.process_group import ProcessGroup
from unisono.groups.work import Work
from unisono.torch.arguments import read_call
from unisono.torch.callbacks import CallbackThreads
from unisono.torch.dynamo import keep_out
from unisono.torch.errors import for_torch
from unisono.torch.plain import PLAIN
from unisono.torch.special import make_special
from unisono.torch.values import are_fake, dense, done
from unisono.torch.work import TorchWork

__all__ = ["Operations"]

Method = Callable[..., Any]

_profiled = torch._C._autograd._profiler_enabled


def operation(method: Method) -> Method:
    """Return a method with the behaviour that all operations have in common.

    Tensors of another device go to that device's backend. Plain calls use the fast path (`plain`).
    torch's profiler shows the name of the call. Errors are translated to torch's classes.
    """
    name = method.__name__
    title = f"unisono:{name}"
    plain = PLAIN.get(name)

    @functools.wraps(method)
    def call(self: Operations, *args: Any, **kwargs: Any) -> Any:
        keep_out()
        data = (*args, *kwargs.values()) if kwargs else args
        if self.has_devices() and (device := device_of(data)) != "cpu" and not are_fake(data):
            return getattr(self.on_device(device), name)(*args, **kwargs)
        try:
            if _profiled() and not are_fake(data):
                with torch.profiler.record_function(title):
                    return method(self, *args, **kwargs)
            if plain is not None and (result := plain(self, args, kwargs)) is not NotImplemented:
                return result
            if are_fake(data):
                return done(data[0])
            return method(self, *args, **kwargs)
        except UnisonoError as error:
            raise for_torch(error) from error.__cause__

    return call


def device_of(args: Sequence[Any]) -> str:
    """Return the device type of the first tensor in nested lists of arguments."""
    for arg in args:
        if isinstance(arg, Tensor):
            return str(arg.device.type)
        if isinstance(arg, list) and arg:
            return device_of(arg)
    return "cpu"


class Operations:
    """The operations of torch's process group; a sub-class sets the attributes of `Caller`."""

    unisono: ProcessGroup
    callbacks: CallbackThreads

    def has_devices(self) -> bool:
        """Return whether the group has backends of other devices."""
        raise NotImplementedError

    def on_device(self, device: str) -> Any:
        """Return the process group for tensors of another device."""
        raise NotImplementedError

    @operation
    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Any:
        """Send to a rank; the work is done when the tensor may be changed."""
        work = self.unisono.send(dense(_single(tensors)), dstRank, tag, async_op=True)
        return TorchWork(work, tensors, self)

    @operation
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Any:
        """Receive from a rank."""
        return self._receive(tensors, srcRank, tag)

    @operation
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """Receive from any rank."""
        return self._receive(tensors, None, tag)

    @operation
    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have called it, or raise an error that names missing ranks."""
        monitored_barrier(self.unisono, timeout, wait_all_ranks)

    def _issue(self, schema: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call; return its work, or None if it was synchronous."""
        group = self.unisono
        with refusing(group, schema, args):
            call = read_call(schema, args, kwargs)
            outputs = make_special(group, call)
            if outputs is None:
                op = call.given.get("op")
                given = {name: dense(value, op) for name, value in call.arguments().items()}
        if outputs is None:
            work: Work = getattr(group, schema.name)(**given)
            outputs = work.result()
        else:
            work = Work(Pending(done=True), schema.name)
        if not call.given["async_op"]:
            return None
        typed = schema.name == "all_reduce" and outputs[0].dtype is torch.float16
        return TorchWork(work, outputs, self, typed)

    def _receive(self, tensors: list[Tensor], source: int | None, tag: int) -> Any:
        work = self.unisono.recv(dense(_single(tensors)), source, tag, async_op=True)
        return TorchWork(work, tensors, self)


def _single(tensors: list[Tensor]) -> Any:
    """Return the tensor of a list with one tensor; else the list, which unisono refuses."""
    return tensors[0] if len(tensors) == 1 else tensors


def _method(schema: OpSchema, name: str) -> Method:
    def method(self: Operations, *args: Any, **kwargs: Any) -> Any:
        return self._issue(schema, args, kwargs)

    method.__name__ = name
    method.__doc__ = f"unisono's `{schema.name}`."
    return operation(method)


for _schema in OPS.values():
    for _name in {*_schema.c10d_methods, _schema.name}:
        if hasattr(torch_dist.ProcessGroup, _name) and not hasattr(Operations, _name):
            setattr(Operations, _name, _method(_schema, _name))
