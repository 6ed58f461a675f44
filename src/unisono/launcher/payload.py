"""Pickled objects in a file in memory, from which child processes load them."""

from __future__ import annotations

import io
import linecache
import mmap
import os
import pickle
import re
import sys
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import reduction
from types import CodeType
from typing import Any

from unisono.core.platform.memory import new_memory_file
from unisono.core.platform.posix import require_posix

_ALIGNMENT = 64


class Payload:
    """Objects that are pickled once and loaded by several processes.

    multiprocessing writes the arguments of a new process to a pipe. That write would never end if
    the process died before it had read them. A Payload in these arguments is a descriptor only.
    Each process maps the file privately. It thus copies the pages of an array that it writes to.

    Args:
        value: The objects.
        dumps: `pickle.dumps`, or a function with the same arguments.
    """

    def __init__(self, value: object, dumps: Callable[..., Any] = pickle.dumps) -> None:
        views: list[memoryview] = []
        # The buffers stay out of the pickle, because `append` returns None.
        stream = dumps(value, protocol=5, buffer_callback=lambda each: views.append(each.raw()))
        parts = []
        self._own(_memory_file())
        with open(self._fd, "wb", closefd=False) as file:
            for view in (memoryview(stream), *views):
                parts.append((file.tell(), view.nbytes, view.readonly))
                file.write(view)
                file.write(bytes(-view.nbytes % _ALIGNMENT))
            self._parts_at = file.tell()
            pickle.dump(parts, file)

    def _own(self, fd: int) -> None:
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)

    def send(self, link: Any, pid: int) -> None:
        """Send the file over a link to a process, for `received`."""
        link.send(self._parts_at)
        reduction.send_handle(link, self._fd, pid)

    @classmethod
    def received(cls, link: Any) -> Payload:
        """Return the objects that the other end of a link sends."""
        payload = cls.__new__(cls)
        payload._parts_at = link.recv()
        payload._own(reduction.recv_handle(link))
        return payload

    def data(self) -> bytes:
        """Return the file, for `of` on another host."""
        # A file is never empty, and other processes share its offset.
        with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as file:
            return file[:] + self._parts_at.to_bytes(8, "little")

    @classmethod
    def of(cls, data: Any) -> Payload:
        """Return the objects of `data`."""
        view, payload = memoryview(data), cls.__new__(cls)
        payload._own(_memory_file())
        with open(payload._fd, "wb", closefd=False) as file:
            file.write(view[:-8])
        payload._parts_at = int.from_bytes(view[-8:], "little")
        return payload

    def load(self, loads: Callable[..., Any] = pickle.loads) -> Any:
        """Return the objects; they are new objects at each call."""
        view = memoryview(mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY))
        views = view, view.toreadonly()
        stream, *buffers = (
            views[readonly][start : start + nbytes]
            for start, nbytes, readonly in pickle.loads(view[self._parts_at :])
        )
        return loads(stream, buffers=buffers)

    def load_once(self, loads: Callable[..., Any] = pickle.loads) -> Any:
        """Return the objects, and close the file, so that its memory ends with their arrays."""
        try:
            return self.load(loads)
        finally:
            self._close()

    def __getstate__(self) -> tuple[Any, int]:
        """Return how a new process opens the file; possible only while that process starts."""
        require_posix("an argument of unisono.spawn")
        return reduction.DupFd(self._fd), self._parts_at

    def __setstate__(self, state: tuple[Any, int]) -> None:
        """Open the file in the new process."""
        descriptor, self._parts_at = state
        self._own(descriptor.detach())


def _memory_file() -> int:
    try:
        return new_memory_file("unisono-payload")
    except OSError:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


class CallArguments:
    """A function and its arguments for one child.

    A forked child inherits them. For another child they become a Payload of its own when the child
    starts, because only then multiprocessing can pickle its locks, queues and connections.
    """

    def __init__(self, fn: Callable[..., object], args: tuple[object, ...]) -> None:
        self._value: Any = fn, args

    def load(self) -> Any:
        """Return the function and its arguments; in a child that was not forked, once."""
        return self._value.load_once() if isinstance(self._value, Payload) else self._value

    def __getstate__(self) -> dict[str, Payload]:
        """Return the Payload; it stays open here until the next child starts."""
        self._payload = Payload(self._value, _forking_dumps)
        return {"_value": self._payload}


def pickler_of(module: Any) -> Any:
    """Return the Pickler of a module; with cloudpickle functions keep the lines of their source.

    Args:
        module: pickle or cloudpickle.
    """
    if module is pickle:
        return pickle.Pickler

    class Pickler(module.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if type(value) is CodeType:
                return _with_source(value, module.cloudpickle._code_reduce(value))
            return super().reducer_override(value)

    return Pickler


# Classes of cloudpickle that a process made by loading them: their sender may change them.
_loaded: weakref.WeakSet[type] = weakref.WeakSet()


class OwnUnpickler(pickle.Unpickler):
    """Leaves the classes that this process has defined as they are.

    cloudpickle would give them the attributes that they had where the pickle was made.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the object of a name."""
        found = super().find_class(module, name)
        if module == "cloudpickle.cloudpickle":
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return partial(_made, found)
            if name == "_class_setstate":
                return lambda made, state: found(made, state) if made in _loaded else made
        return found


def _made(make: Callable[..., type], *args: Any) -> type:
    # `make` comes from this module.
    is_known = args[-2] in sys.modules[make.__module__]._DYNAMIC_CLASS_TRACKER_BY_ID
    made = make(*args)
    if not is_known:
        _loaded.add(made)
    return made


def loads_result(data: Any, *, buffers: Any = ()) -> Any:
    """Load what another process has returned or raised; see `OwnUnpickler`."""
    if re.search(b"_class_setstate", data) is None:
        return pickle.loads(data, buffers=buffers)
    return OwnUnpickler(io.BytesIO(data), buffers=buffers).load()


def dumps_by(pickler: Any) -> Callable[..., memoryview[int]]:
    """Return a function like `pickle.dumps`."""

    def dumps(value: object, protocol: int = 5, buffer_callback: Any = None) -> memoryview[int]:
        file = io.BytesIO()
        pickler(file, protocol=protocol, buffer_callback=buffer_callback).dump(value)
        return file.getbuffer()

    return dumps


def dumps_of(module: Any) -> Callable[..., memoryview[int]]:
    """Return the function `dumps` of `pickler_of`."""
    return dumps_by(pickler_of(module))


def _with_source(code: CodeType, reduced: Any) -> Any:
    """Keep the file of a code object, for tracebacks; also the text of a cell, which has none."""
    make, args = reduced[:2]
    file = code.co_filename
    text = "" if os.path.exists(file) else "".join(linecache.getlines(file))
    args = tuple(file if each == "<dynamic-code>" else each for each in args)
    return _code_with_source, (make, args, file, text)


def _code_with_source(make: Callable[..., CodeType], args: Any, file: str, text: str) -> CodeType:
    if text:
        remember_source(file, text)
    return make(*args)


def remember_source(file: str, text: str) -> None:
    """Let tracebacks show lines of a text that is in no file."""
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file


def _forking_dumps(value: object, *, protocol: int, buffer_callback: Any) -> memoryview:
    file = io.BytesIO()
    reduction.ForkingPickler(file, protocol, True, buffer_callback).dump(value)
    return file.getbuffer()
