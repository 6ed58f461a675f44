"""Print the reduction loops' speed, per dtype, op and instruction set, beside NumPy's.

Figures are GB/s of payload: bytes of one operand, 256 KiB, divided by the median time.

    python benchmarks/kernels.py [--nbytes 262144] [--ops SUM,MAX] [--dtypes float32,bfloat16]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from unisono import _engine
from unisono.core.base.types import RedOpType, ReduceOp, dtype_named
from unisono.core.engines.kernels import reduce_into

ROUNDS = 15


def main() -> None:
    """Print one row per dtype and op, one column per implementation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=int, default=256 << 10, help="size of one operand")
    parser.add_argument("--ops", default="SUM,PRODUCT,MIN,BAND", help="comma-separated")
    parser.add_argument("--dtypes", default=",".join(_engine.dtype_codes()), help="comma-separated")
    arguments = parser.parse_args()
    isas = _engine.isas()
    print(f"GB/s, {arguments.nbytes} bytes")
    print(f"{'dtype':12}{'op':9}{'numpy':>8}" + "".join(f"{isa:>8}" for isa in isas))
    for dtype in arguments.dtypes.split(","):
        for op in arguments.ops.split(","):
            if figures := measure(dtype, RedOpType[op], arguments.nbytes, isas):
                print(f"{dtype:12}{op:9}" + "".join(f"{figure:8.1f}" for figure in figures))


def measure(name: str, op: RedOpType, nbytes: int, isas: list[str]) -> list[float]:
    """Return GB/s of NumPy and of every instruction set; nothing if the pair is undefined."""
    dtype = dtype_named(name)
    into, other = np.ones((2, nbytes // dtype.itemsize), dtype.storage)
    if name == "bfloat16":  # the integer 1 would be a denormal, which is slow on some processors
        into[:] = other[:] = 0x3F80
    code = _engine.dtype_codes()[name]
    pointers = into.ctypes.data, other.ctypes.data

    def native() -> None:
        _engine.reduce(*pointers, into.size, code, int(op))

    try:
        native()
    except ValueError:
        return []
    figures = [gigabytes_per_s(lambda: reduce_into(into, other, dtype, ReduceOp(op)), nbytes)]
    for isa in isas:
        _engine.set_isa(isa)
        figures.append(gigabytes_per_s(native, nbytes))
    return figures


def gigabytes_per_s(call: Callable[[], None], nbytes: int) -> float:
    """Return the payload per second, from the median of several rounds."""
    times_s = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return nbytes / statistics.median(times_s) / 1e9


if __name__ == "__main__":
    main()
