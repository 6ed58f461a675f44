"""Convert Python objects to bytes: a header, and the memory of their arrays without a copy."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Serializer(Protocol):
    """Interface of a serializer: pass an instance as `serializer=`, the same kind on all ranks.

    Attributes:
        name: Compared between the ranks, so that no rank reads bytes of another serializer.
    """

    name: str

    def dumps(self, obj: Any) -> tuple[bytes, Sequence[memoryview]]:
        """Return a header and the buffers that it refers to, each flat bytes; copies no array."""
        ...

    def loads(self, header: bytes, buffers: Sequence[Any]) -> Any:
        """Return the object; `buffers` are writable, in the order of `dumps`, and may be kept."""
        ...


class PickleSerializer:
    """Pickle protocol 5 with out-of-band buffers: the memory of an array is never copied.

    Like every use of pickle it runs code that the sender chose: use it among ranks that trust
    one another.

    Source: PEP 574.
    """

    name = "pickle5"

    def dumps(self, obj: Any) -> tuple[bytes, Sequence[memoryview]]:
        """Return the pickle, and the memory of the arrays in it."""
        buffers: list[memoryview] = []

        def keep(buffer: pickle.PickleBuffer) -> None:
            buffers.append(buffer.raw())

        stream = io.BytesIO()
        _Pickler(stream, keep).dump(obj)
        return stream.getvalue(), buffers

    def loads(self, header: bytes, buffers: Sequence[Any]) -> Any:
        """Return the object; its arrays use the memory of `buffers`."""
        return pickle.loads(header, buffers=buffers)


class _Pickler(pickle.Pickler):
    """A pickler that also passes the memory of torch's storages out of band; torch copies it."""

    def __init__(self, stream: io.BytesIO, keep: Callable[[pickle.PickleBuffer], None]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=keep)

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(obj) is not torch.storage.TypedStorage:
            return NotImplemented
        untyped = obj._untyped_storage
        if untyped.device.type != "cpu" or untyped.nbytes() == 0:
            return NotImplemented
        memory = torch.empty(0, dtype=torch.uint8).set_(untyped).numpy()
        return _torch_storage, (pickle.PickleBuffer(memory), str(obj.dtype).removeprefix("torch."))


def _torch_storage(memory: Any, dtype: str) -> Any:
    """Return torch's storage over received memory."""
    torch = import_module("torch")
    untyped = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.storage.TypedStorage(
        wrap_storage=untyped, dtype=getattr(torch, dtype), _internal=True
    )
