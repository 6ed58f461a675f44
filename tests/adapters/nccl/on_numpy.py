"""The NCCL backend over the fake NCCL, with NumPy arrays: for the bodies of other tests.

The backend serves NumPy arrays here: their memory stands for memory of a GPU. The host waits where
it would only make a stream wait, because NumPy has no streams. The comparison comes before the
kernels, so that a mismatch leaves arrays and group usable, as these tests expect.
"""

import contextlib
import os
from unittest import mock

import numpy as np

import unisono as dist
from tests.adapters.nccl import fake_cuda
from unisono.adapters.nccl import arrays
from unisono.adapters.nccl.backend import NCCLBackend
from unisono.adapters.nccl.calls import GPUCall
from unisono.core.backends.registry import known_backends
from unisono.errors import ArgumentTypeError, InvalidArgumentError

NAME = "nccl_on_numpy"
SETTINGS = {"UNISONO_CHECK": "before", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


class OnNumPy(NCCLBackend):
    device = "cpu"

    def split(self, spec):
        return OnNumPy(spec)

    def _submit(self, *call):
        # NCCL chooses them itself; the results must be those of all algorithms.
        options = call[-1]._replace(algorithm=None, deterministic=False)
        return super()._submit(*call[:-1], options)

    def _returned(self, call, options):
        if not options.async_op and self._batch is None:
            call.wait_or_expire(None)
        return call


class _NumPy(arrays._CuPy):
    """NumPy arrays of any byte order; a GPU has its own only, so others are packed."""

    def is_lazy(self, x):
        return not x.dtype.isnative

    def empty(self, x, count):
        return fake_cuda.Array(np.full(count, 0xAB, np.uint8).astype(x.dtype.newbyteorder("=")), 0)


def taken_over(obj, *, write, name):
    """Return an array of the CPU as an array of the only GPU."""
    if hasattr(obj, "detach"):
        obj = obj.detach().numpy()
    try:
        x = obj if isinstance(obj, np.ndarray) else np.asarray(memoryview(obj))
    except TypeError:
        raise ArgumentTypeError(f"{name} must be an array, got {type(obj).__name__}") from None
    if write and not x.flags.writeable:
        raise InvalidArgumentError(f"{name} is read-only but the operation writes into it")
    return _NumPy(fake_cuda._cupy()), fake_cuda.Array(x, 0)


@contextlib.contextmanager
def installed():
    """Make the backend known as `NAME` inside the block."""
    if NAME not in known_backends():
        dist.register_backend(NAME, lambda spec, device: OnNumPy(spec))
    with (
        fake_cuda.installed(),
        mock.patch.dict(os.environ, SETTINGS),
        mock.patch.object(arrays, "taken_over", taken_over),
        mock.patch.object(GPUCall, "enqueue_wait", return_value=False),
    ):
        yield
