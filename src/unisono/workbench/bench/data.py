"""The arrays of one benchmark case: input, output and expected output."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from unisono.core.base.buffers import Array
from unisono.workbench.bench.plan import OPS, BenchPlan, Case

# A prime, so that no two blocks or chunks of a message start at the same place of the pattern.
_PERIOD = 251


class Data:
    """The input and the output of one rank, which all libraries use in turn.

    `input` and `output` are one array if the operation works in place. In a gather only the root's
    `output` is not empty; in a scatter only the root's `input` is not empty.

    Args:
        case: Operation and size.
        plan: Type, reduce op, root and number of ranks.
        rank: This rank.
    """

    def __init__(self, case: Case, plan: BenchPlan, rank: int) -> None:
        self.case, self.plan, self.rank = case, plan, rank
        self.dtype, self._eps = _numpy_type(plan.dtype)
        part, whole = case.count, case.count * plan.nprocs
        is_root = rank == plan.root
        sizes = {
            "all_gather": (part, whole),
            "reduce_scatter": (whole, part),
            "all_to_all": (whole, whole),
            "gather": (part, whole if is_root else 0),
            "scatter": (whole if is_root else 0, part),
            "sendrecv": (part, part),
        }
        # np.full writes every page. Otherwise the first call would include page faults.
        if case.op in sizes:
            inputs, outputs = sizes[case.op]
            self.input = np.full(inputs, 1, self.dtype)
            self.output = np.full(outputs, 1, self.dtype)
        else:
            self.input = self.output = np.full(part, 1, self.dtype)

    @property
    def arrays(self) -> tuple[Any, Any]:
        """Input and output, as libraries get them."""
        return self.input, self.output

    def end(self) -> None:
        """Wait until the calls have ended; the arrays then have the results."""

    def fill_for_check(self) -> None:
        """Write this rank's pattern to the input, and a wrong value to the output."""
        self.output[:] = 99
        if self.case.op != "scatter" or self.rank == self.plan.root:
            self.input[:] = self._pattern(self.rank, self.input.size)

    def fill_for_timing(self) -> None:
        """Write numbers that repeated reductions in place do not change."""
        grows = OPS[self.case.op].reduces and self.plan.redop == "sum"
        self.input[:] = self.output[:] = 0 if grows else 1

    def count_wrong(self) -> int:
        """Return how many elements of the output differ from the formula."""
        expected = self._expected()
        if expected is None:
            return 0
        differs = np.flatnonzero(self.output != expected)
        if self._eps:
            # Libraries reduce in different orders: allow one rounding per rank.
            tolerance = self._eps * self.plan.nprocs
            got, want = (array[differs].astype(np.float64) for array in (self.output, expected))
            differs = differs[~np.isclose(got, want, rtol=tolerance, atol=0.0)]
        return int(differs.size)

    def _expected(self) -> Array | None:
        """Return this rank's expected output; None if the operation does not define it."""
        op, plan, count = self.case.op, self.plan, self.case.count
        mine = slice(self.rank * count, (self.rank + 1) * count)
        whole = count * plan.nprocs
        match op:
            case "all_reduce":
                return self._reduced(count)
            case "reduce":
                return self._reduced(count) if self.rank == plan.root else None
            case "broadcast":
                return self._pattern(plan.root, count)
            case "all_gather":
                return self._gathered(count)
            case "gather":
                return self._gathered(count) if self.rank == plan.root else None
            case "reduce_scatter":
                return self._reduced(whole)[mine]
            case "scatter":
                return self._pattern(plan.root, whole)[mine]
            case "all_to_all":
                return np.concatenate([self._pattern(r, whole)[mine] for r in range(plan.nprocs)])
            case "sendrecv":
                peer = plan.peer_of(self.rank)
                return None if peer is None else self._pattern(peer, count)
        return None

    def _gathered(self, count: int) -> Array:
        return np.concatenate([self._pattern(rank, count) for rank in range(self.plan.nprocs)])

    def _pattern(self, rank: int, count: int) -> Array:
        """Return small integers, so that their sum over some ranks is exact in every type."""
        numbers = np.arange(_PERIOD) * 7 + 3 * rank
        if self.plan.redop == "prod":
            numbers = numbers % 2 + 1
        else:
            few_bits = self.dtype.itemsize == 1 or self._eps > 2**-8
            numbers %= 5 if few_bits else 31
        return np.resize(numbers.astype(self.dtype), count)

    def _reduced(self, count: int) -> Array:
        redop = self.plan.redop
        # A product of many ranks overflows float16, so compute in float64 and round once.
        wide = np.dtype(np.float64) if self._eps else self.dtype
        total = self._pattern(0, count).astype(wide)
        combine: dict[str, Any] = {
            "prod": np.multiply,
            "min": np.minimum,
            "max": np.maximum,
        }
        for rank in range(1, self.plan.nprocs):
            combine.get(redop, np.add)(total, self._pattern(rank, count), out=total)
        if redop == "avg":
            divide = np.divide if wide.kind == "f" else np.floor_divide
            divide(total, self.plan.nprocs, out=total)
        return total.astype(self.dtype)


def _numpy_type(name: str) -> tuple[Any, float]:
    """Return a type and its relative rounding step, which is 0 for integers."""
    if name == "bfloat16":
        extension = importlib.import_module("ml_dtypes")
        return np.dtype(extension.bfloat16), float(extension.finfo(extension.bfloat16).eps)
    dtype = np.dtype(name)
    return dtype, float(np.finfo(dtype).eps) if dtype.kind == "f" else 0.0


def to_tensor(torch: Any, array: Array) -> Any:
    """Return an array as a tensor on the CPU, without a copy."""
    if array.dtype.name == "bfloat16":  # torch does not know the type of ml_dtypes
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class GPUData(Data):
    """The arrays of a case on a GPU, as tensors of torch.

    Args:
        case: As for `Data`.
        plan: As for `Data`.
        rank: This rank.
        torch: The module.
    """

    def __init__(self, case: Case, plan: BenchPlan, rank: int, torch: Any) -> None:
        super().__init__(case, plan, rank)
        self._torch = torch
        result = to_tensor(torch, self.output).cuda()
        given = result if self.input is self.output else to_tensor(torch, self.input).cuda()
        self._tensors = given, result

    @property
    def arrays(self) -> tuple[Any, Any]:
        return self._tensors

    def end(self) -> None:
        self._torch.cuda.synchronize()

    def fill_for_check(self) -> None:
        super().fill_for_check()
        self._copy_to_gpu()

    def fill_for_timing(self) -> None:
        super().fill_for_timing()
        self._copy_to_gpu()

    def count_wrong(self) -> int:
        to_tensor(self._torch, self.output).copy_(self._tensors[1])
        return super().count_wrong()

    def _copy_to_gpu(self) -> None:
        for tensor, array in zip(self._tensors, (self.input, self.output), strict=True):
            tensor.copy_(to_tensor(self._torch, array))
        self._torch.cuda.synchronize()
