"""Make every operation that torch calls on a process group a call of a unisono process group.

Most methods have a short way: torch's arguments become those of unisono's function, which C++ runs
or learns (`operations.methods.in_cpp`). C++ reads plain tensors as it reads NumPy's arrays. The
general way takes every form of the arguments and every kind of tensor. A synchronous call returns
None, which torch allows if the operation is done. Calls from C++ (DDP, functional collectives) are
asynchronous and get a work.

Source: torch.distributed.ProcessGroup (2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.adapters.torch import arguments
from unisono.adapters.torch.callbacks import CallbackThreads
from unisono.adapters.torch.dynamo import keep_out
from unisono.adapters.torch.errors import for_torch
from unisono.adapters.torch.special import make_special
from unisono.adapters.torch.values import are_fake, dense, done
from unisono.adapters.torch.work import torch_work
from unisono.core.backends import Pending
from unisono.core.c10d import collectives, p2p
from unisono.core.c10d.monitored_barrier import monitored_barrier
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.operations.c10d_methods import GROUP_DEFAULT, refusing
from unisono.core.operations.methods import OPS, OpSchema, in_cpp
from unisono.core.operations.work import Work
from unisono.errors import UnisonoError

__all__ = ["TorchOperations"]

Method = Callable[..., Any]

_profiled = torch._C._autograd._profiler_enabled


def _operation(
    read: Method | None = None, function: Method | None = None
) -> Callable[[Method], Method]:
    """Make a method with the behaviour that all operations have in common.

    Tensors of another device go to that device's backend. torch's profiler shows the name of the
    call. Errors are translated to torch's classes.

    Args:
        read: Returns the arguments of `function`, given the group and the arguments of the method.
            An error means that the call must go the general way, which finds what is wrong, and
            reports it to the other ranks. None: there is no short way.
        function: unisono's function that the short way calls.
    """
    learned = None if read is None or function is None else _learned(function)
    takes_options = function not in (p2p.isend, p2p.irecv)

    def made(general: Method) -> Method:
        name = general.__name__

        # One frame for the short way: each takes as long as a tenth of the call in C++.
        @functools.wraps(general)
        def method(self: TorchOperations, *args: Any, **kwargs: Any) -> Any:
            keep_out()
            try:
                # The first call goes the general way, which checks the names of the backends.
                if learned and read and self._has_devices is not None and not _profiled():
                    try:
                        opts = args[-1] if args else kwargs["opts"]
                        if takes_options and opts.timeout != GROUP_DEFAULT:
                            raise ValueError
                        given = read(self.unisono, *args, **kwargs)
                    except (AttributeError, LookupError, TypeError, ValueError):
                        pass
                    else:
                        if (work := learned(*given)) is None:
                            return None
                        if work is not NotImplemented:
                            return torch_work(work, _outputs_of(args), self)
                return self._make(name, general, args, kwargs)
            except UnisonoError as error:
                raise for_torch(error) from error.__cause__

        return method

    return made


def _learned(function: Method) -> Method:
    """Return unisono's function as far as C++ runs or learns it; else it is NotImplemented."""
    python = getattr(function, "__wrapped__", function)

    @in_cpp
    @functools.wraps(python)
    def learned(*arguments: Any, **how: Any) -> Any:
        return python(*arguments, **how) if "_learn" in how else NotImplemented

    return learned


def device_of(args: Sequence[Any]) -> str:
    """Return the device type of the first tensor in nested lists of arguments."""
    for arg in args:
        if isinstance(arg, Tensor):
            return str(arg.device.type)
        if isinstance(arg, list) and arg:
            return device_of(arg)
    return "cpu"


def _collective(name: str, function: Method, read: Method | None = None) -> Method:
    """Return a method that makes a collective call; see `_operation`.

    Args:
        name: Of the method.
        function: unisono's function or method.
        read: Gets c10d's option struct as last argument.
    """
    schema = OPS[function.__name__]

    def general(self: TorchOperations, *args: Any, **kwargs: Any) -> Any:
        return self._issue(schema, args, kwargs)

    general.__name__ = name
    general.__doc__ = f"unisono's `{schema.name}`."
    return _operation(read, function)(general)


def _outputs_of(args: Any) -> list[Any]:
    """Return the tensors that hold the result of a call."""
    first = args[0] if args else []
    if type(first) is not list:
        return [first] if isinstance(first, Tensor) else []
    return first[0] if first and type(first[0]) is list else first


class TorchOperations:
    """The operations of torch's process group; a sub-class sets the attributes of `Caller`."""

    unisono: ProcessGroup
    callbacks: CallbackThreads
    _has_devices: bool | None

    def has_devices(self) -> bool:
        """Return whether the group has backends of other devices."""
        raise NotImplementedError

    def on_device(self, device: str) -> Any:
        """Return the process group for tensors of another device."""
        raise NotImplementedError

    broadcast = _collective("broadcast", collectives.broadcast, arguments.broadcast)
    allreduce = _collective("allreduce", collectives.all_reduce, arguments.all_reduce)
    allreduce_coalesced = _collective("allreduce_coalesced", collectives.all_reduce_coalesced)
    reduce = _collective("reduce", collectives.reduce, arguments.reduce)
    allgather = _collective("allgather", collectives.all_gather, arguments.all_gather)
    _allgather_base, all_gather_single = (
        _collective(name, collectives.all_gather_into_tensor, arguments.arrays)
        for name in ("_allgather_base", "all_gather_single")
    )
    allgather_coalesced = _collective("allgather_coalesced", collectives.all_gather_coalesced)
    allgather_into_tensor_coalesced, all_gather_single_coalesced = (
        _collective(name, ProcessGroup.all_gather_into_tensor_coalesced)
        for name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced")
    )
    gather = _collective("gather", collectives.gather, arguments.gather)
    scatter = _collective("scatter", collectives.scatter, arguments.scatter)
    reduce_scatter = _collective(
        "reduce_scatter", collectives.reduce_scatter, arguments.reduce_scatter
    )
    _reduce_scatter_base, reduce_scatter_single = (
        _collective(name, collectives.reduce_scatter_tensor, arguments.reduced_arrays)
        for name in ("_reduce_scatter_base", "reduce_scatter_single")
    )
    reduce_scatter_tensor_coalesced, reduce_scatter_single_coalesced = (
        _collective(name, ProcessGroup.reduce_scatter_tensor_coalesced)
        for name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced")
    )
    alltoall = _collective("alltoall", collectives.all_to_all, arguments.arrays)
    alltoall_base, all_to_all_single = (
        _collective(name, collectives.all_to_all_single, arguments.split_arrays)
        for name in ("alltoall_base", "all_to_all_single")
    )
    barrier = _collective("barrier", collectives.barrier, arguments.no_arrays)

    @_operation()
    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have called it, or raise an error that names missing ranks."""
        monitored_barrier(self.unisono, timeout, wait_all_ranks)

    @_operation(arguments.message, p2p.isend)
    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Any:
        """Send to a rank; the work is done when the tensor may be changed."""
        work = self.unisono.send(dense(_single(tensors)), dstRank, tag, async_op=True)
        return torch_work(work, tensors, self)

    @_operation(arguments.message, p2p.irecv)
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Any:
        """Receive from a rank."""
        return self._receive(tensors, srcRank, tag)

    @_operation(arguments.from_any, p2p.irecv)
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """Receive from any rank."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[Tensor], source: int | None, tag: int) -> Any:
        work = self.unisono.recv(dense(_single(tensors)), source, tag, async_op=True)
        return torch_work(work, tensors, self)

    def _make(
        self, name: str, general: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make a call the general way."""
        data = (*args, *kwargs.values())
        fake = are_fake(data)
        if self.has_devices() and (device := device_of(data)) != "cpu" and not fake:
            return getattr(self.on_device(device), name)(*args, **kwargs)
        if fake:
            return done(data[0])
        if _profiled():
            with torch.profiler.record_function(f"unisono:{name}"):
                return general(self, *args, **kwargs)
        return general(self, *args, **kwargs)

    def _issue(self, schema: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call; return its work, or None if it was synchronous."""
        group = self.unisono
        with refusing(group, schema, args):
            call = arguments.read_call(schema, args, kwargs)
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
        return torch_work(work, outputs, self)


def _single(tensors: list[Tensor]) -> Any:
    """Return the tensor of a list with one tensor; else the list, which unisono refuses."""
    return tensors[0] if len(tensors) == 1 else tensors
