"""One GPU of this process: its streams, events and memory, through cuda-core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from unisono.adapters.nccl.library import Libraries
from unisono.errors import CommunicationError

# Above the streams of a program, which have priority 0, so that ranks do not wait for one another.
_PRIORITY = -1


class GPU:
    """A GPU.

    Args:
        libraries: The libraries of CUDA.
        index: Of the GPU among the GPUs of this process.

    Attributes:
        driver: cuda.bindings.driver.
    """

    def __init__(self, libraries: Libraries, index: int) -> None:
        self.index = index
        self._cuda = libraries.cuda
        self.driver = libraries.driver
        self._device = self._cuda.Device(index)

    @property
    def uuid(self) -> str:
        """Name of the GPU that every process sees."""
        return str(self._device.uuid)

    @property
    def has_float8(self) -> bool:
        """Whether NCCL reduces float8 on it: from compute capability 9.0 on."""
        return self.capability >= (9, 0)

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        major, minor = self._device.compute_capability
        return major, minor

    @property
    def multiprocessors(self) -> int:
        """Number of multiprocessors."""
        return int(self._device.properties.multiprocessor_count)

    def links(self, uuids: Sequence[str]) -> int:
        """Return bits of the GPUs, by their names, that this GPU is or has an NVLink to.

        An NVLink has atomics, PCIe has none. A GPU that this process may not see has no link.
        """
        count = checked(self.driver.cuDeviceGetCount(), "to count GPUs")
        index_of = {str(self._cuda.Device(index).uuid): index for index in range(count)}
        kind = self.driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        made = 0
        for at, uuid in enumerate(uuids):
            linked = uuid == self.uuid
            if not linked and uuid in index_of:
                found = self.driver.cuDeviceGetP2PAttribute(kind, self.index, index_of[uuid])
                linked = bool(checked(found, "to find links"))
            made |= linked << at
        return made

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the current GPU of the calling thread inside the block."""
        # By contexts: a thread without one would get one on GPU 0, which takes memory there.
        _, before = self.driver.cuCtxGetCurrent()
        self._device.set_current()
        try:
            yield
        finally:
            self.driver.cuCtxSetCurrent(before)

    def make_stream(self) -> Any:
        """Return a new stream of high priority."""
        options = self._cuda.StreamOptions(nonblocking=True, priority=_PRIORITY)
        return self._device.create_stream(options=options)

    def stream_of(self, handle: int) -> Any:
        """Return the stream of a handle; 0 is the default stream."""
        return self._cuda.Stream.from_handle(handle)

    def allocate(self, nbytes: int, stream: Any) -> Any:
        """Return memory that the stream may use; it is freed with the object."""
        return self._device.allocate(nbytes, stream=stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy bytes between two addresses, in the order of the stream."""
        if not nbytes or target == source:
            return
        copied = self.driver.cuMemcpyDtoDAsync(target, source, nbytes, int(stream.handle))
        checked(copied, f"to copy {nbytes} bytes on GPU {self.index}")


def checked(answer: tuple[Any, ...], what: str) -> Any:
    """Return the value of a function of the driver.

    Raises:
        CommunicationError: The function failed.
    """
    if int(answer[0]) != 0:
        raise CommunicationError(f"CUDA refused {what}: {answer[0]}")
    return answer[-1]
