"""NVRTC: CUDA C++ as machine code of one kind of GPU; compiles without a GPU."""

from __future__ import annotations

import functools
import importlib
from importlib.resources import files
from typing import Any

from unisono.errors import UnsupportedError

SOURCE = "intra_node.cu"


def compiled(capability: tuple[int, int], ranks: int) -> bytes:
    """Return the kernels of IntraNodeComm as a module of CUDA; once compiled, from memory.

    Args:
        capability: Compute capability of the GPU.
        ranks: Number of ranks.

    Raises:
        UnsupportedError: NVRTC is missing, or refuses the text; has its messages.
    """
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        return _compiled(nvrtc, capability, ranks)
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"IntraNodeComm needs NVRTC: {error}",
            hint="pip install nvidia-cuda-nvrtc, or nvidia-cuda-nvrtc-cu12 for CUDA 12",
        ) from error


@functools.cache
def _compiled(nvrtc: Any, capability: tuple[int, int], ranks: int) -> bytes:
    text = files("unisono.adapters.nccl").joinpath(SOURCE).read_bytes()
    options = ["-std=c++17", f"-DRANKS={ranks}", "-arch=sm_{}{}".format(*capability)]
    made = _checked(nvrtc.nvrtcCreateProgram(text, SOURCE.encode(), 0, [], []))
    try:
        given = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(made, len(given), given)
        if int(status) != 0:
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(made)))
            nvrtc.nvrtcGetProgramLog(made, log)
            raise RuntimeError(f"{SOURCE} for {options}: {log.decode(errors='replace')}")
        code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(made)))
        _checked(nvrtc.nvrtcGetCUBIN(made, code))
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(made)


def _checked(answer: tuple[Any, ...]) -> Any:
    """Return the value of a function of NVRTC."""
    if int(answer[0]) != 0:
        raise RuntimeError(f"NVRTC failed: {answer[0]}")
    return answer[-1]
