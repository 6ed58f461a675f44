"""Plain calls: torch's calls made by unisono's public functions on arrays, which C++ runs.

C++ runs calls of those functions on NumPy arrays (`engines/functions.py`). A plain torch tensor has
the same memory as a NumPy array at its address. The array describes that memory correctly even
after the tensor has gone, so it is kept for the next call. A kept array does not keep the memory
alive. So it serves only calls that end before they return. An asynchronous call gets an alias of
it, which does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch._C._distributed_c10d as c10d

from unisono.backends import Pending
from unisono.base.buffers import alias_torch
from unisono.base.extension import extension
from unisono.base.types import dtype_named
from unisono.c10d import collectives
from unisono.groups.c10d_methods import GROUP_DEFAULT
from unisono.groups.operations import OPS, OpSchema
from unisono.groups.process_group import ProcessGroup
from unisono.groups.work import Work
from unisono.torch.arguments import reduce_op
from unisono.torch.work import Caller, TorchWork

__all__ = ["PLAIN"]

Array = np.ndarray[Any, Any]


def _alias_of(array: Array, owner: object) -> Array:
    """Return an array over the memory of `array`, which keeps `owner`."""
    memory: Any = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    memory.owner = owner
    return np.ndarray(array.shape, array.dtype, memory)


alias_of: Callable[..., Array] = _alias_of if extension is None else extension.alias_of

# Types that NumPy has as well. Complex tensors are left out: they may be conjugate views, and
# torch passes them as real tensors.
_DTYPES = {
    getattr(torch, name): dtype_named(name)
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    )
}
_KINDS = (torch.Tensor, torch.nn.Parameter)

_MAX_KEPT = 1024
_kept: dict[tuple[Any, ...], Array] = {}


class NotPlain(Exception):
    """The call is not plain; `torch/operations.py` must make it."""


def as_array(tensor: Any, keep: bool = False) -> Array:
    """Return an array over the memory of a tensor; `keep`: the array keeps the memory alive.

    Raises:
        NotPlain: The tensor is of another kind.
    """
    if type(tensor) not in _KINDS or not tensor.is_cpu or tensor.layout is not torch.strided:
        raise NotPlain
    key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
    if not tensor.is_contiguous() or tensor.is_neg():
        raise NotPlain
    if (array := _kept.get(key)) is None:
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None or not key[0]:
            raise NotPlain
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        array = _kept[key] = alias_torch(tensor, dtype, "tensor", keep=False)
    return alias_of(array, tensor.untyped_storage()) if keep else array


def _listed(tensors: Any, keep: bool) -> list[Array]:
    return [as_array(tensor, keep) for tensor in tensors]


def _first(values: Any) -> Any:
    if len(values) != 1:
        raise NotPlain
    return values[0]


def _rank(group: ProcessGroup, rank: int) -> int:
    """Return the global rank of a rank in the group."""
    if not 0 <= rank < len(group.ranks):
        raise NotPlain
    return group.ranks[rank]


def _root(group: ProcessGroup, options: Any) -> int:
    if getattr(options, "rootTensor", 0):
        raise NotPlain
    return _rank(group, options.rootRank)


# Name in `OpSchema.data` or `.settings` -> conversion of c10d's argument to ours.
_DATA: dict[str, Callable[[Any, bool], Any]] = {
    "[tensor]": lambda values, keep: as_array(_first(values), keep),
    "[output]": lambda values, keep: as_array(_first(values), keep),
    "tensor": as_array,
    "output": as_array,
    "[outputs]": lambda values, keep: _listed(_first(values), keep) if values else None,
    "[inputs]": lambda values, keep: _listed(_first(values), keep) if values else None,
    "outputs": _listed,
    "inputs": _listed,
    # In c10d an empty list means equal parts; the check of the operation knows it, too.
    "output_split_sizes": lambda sizes, keep: None if type(sizes) is list and not sizes else sizes,
    "input_split_sizes": lambda sizes, keep: None if type(sizes) is list and not sizes else sizes,
}
_SETTINGS: dict[str, Callable[[ProcessGroup, Any], Any]] = {
    "root": _root,
    "op": lambda group, options: reduce_op(options.reduceOp),
}
_OPTIONS = {getattr(c10d, name) for name in dir(c10d) if name.endswith("Options")}


Plain = Callable[[Caller, Sequence[Any], dict[str, Any]], Any]


def _plain(schema: OpSchema) -> Plain:
    function: Any = getattr(collectives, schema.name)
    data = [_DATA[word] for word in schema.data.split()]
    settings = [_SETTINGS[word] for word in schema.settings.split()]
    count = len(data)
    # `gather` alone takes its arrays in another order than c10d does.
    order = [name for name in schema.parameters if name in schema.data_names]
    swapped = order != schema.data_names
    typed = schema.name == "all_reduce"

    def call(caller: Caller, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        if len(keywords) == 1 and "opts" in keywords:
            arguments = (*arguments, keywords["opts"])
        elif keywords:
            return NotImplemented
        if len(arguments) != count + 1 or type(options := arguments[count]) not in _OPTIONS:
            return NotImplemented
        if options.timeout != GROUP_DEFAULT:
            return NotImplemented
        group, keep = caller.unisono, options.asyncOp
        try:
            given = [to(value, keep) for to, value in zip(data, arguments, strict=False)]
            chosen = [of(group, options) for of in settings]
        except (NotPlain, AttributeError, TypeError):
            # `torch/operations.py` finds what is wrong, and reports it to the other ranks.
            return NotImplemented
        if swapped:
            given.reverse()
        if not keep:
            function(*given, *chosen, group)
            return None
        work = function(*given, *chosen, group, async_op=True)
        outputs = arguments[0]
        if type(outputs) is not list:
            outputs = [outputs]
        elif outputs and type(outputs[0]) is list:
            outputs = outputs[0]
        return TorchWork(work, outputs, caller, typed and outputs[0].dtype is torch.float16)

    return call


_SENT = Work(Pending(done=True), "send")


def _send(caller: Caller, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Send if the message can go at once."""
    group = caller.unisono
    if keywords or (port := group.plain_port) is None:
        return NotImplemented
    tensors, peer, tag = arguments
    try:
        sent = port.try_send(as_array(_first(tensors)), _rank(group, peer), tag)
    except NotPlain:
        return NotImplemented
    return TorchWork(_SENT, tensors, caller) if sent else NotImplemented


def _recv(caller: Caller, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Start receiving, from any rank if the arguments name none."""
    group = caller.unisono
    if keywords or (port := group.plain_port) is None:
        return NotImplemented
    tensors, *source, tag = arguments
    try:
        peer = _rank(group, source[0]) if source else None
        tensor = _first(tensors)
        started = port.irecv(as_array(tensor), peer, tag, tensor, group.timeout_s)
    except NotPlain:
        return NotImplemented
    return NotImplemented if started is None else TorchWork(Work(started, "recv"), tensors, caller)


PLAIN: dict[str, Plain] = {
    method: _plain(schema)
    for schema in OPS.values()
    if schema.repeat is not None and hasattr(collectives, schema.name)
    for method in (schema.name, *schema.c10d_methods)
} | {"send": _send, "recv": _recv, "recv_anysource": _recv}
"""Method of torch's process group -> function that makes a plain call and returns what the method
returns; NotImplemented: the call is not plain."""
