"""Every operation on arrays of every dtype and layout, against the oracle."""

import hashlib
import warnings
from collections import Counter
from functools import partial

import numpy as np

import unisono as dist
from tests.support.operations import Operations
from tests.support.oracle import (
    ALL_OPS,
    DTYPES,
    REDUCE_OPS,
    Placed,
    bits,
    check,
    layouts,
    np_dtype,
    reduce_op,
    reduction,
    values,
)  # fmt: skip
from unisono.errors import InvalidArgumentError, UnsupportedError

MOVING = (
    "broadcast", "all_gather", "gather", "scatter", "all_gather_into_tensor",
    "all_gather_coalesced", "all_to_all",
)  # fmt: skip
REDUCING = (
    "all_reduce", "reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor",
)  # fmt: skip
BEYOND_TORCH = ("scan", "exscan")
# Whose bits must be the same on all ranks.
EVERYWHERE = ("all_reduce", "all_reduce_coalesced")


class Matrix(Operations):
    """One rank's run of the matrix.

    Attributes:
        cells: How often each (operation, dtype, reduce op, outcome) was seen.
        digest: Of what must be equal on all ranks.
    """

    def __init__(self, rank, library):
        super().__init__(rank, dist.get_world_size())
        self.library = library
        self.cells, self.digest = Counter(), hashlib.sha256()
        self.case, self.op_name = (), ""

    # ---- what the operations are made of

    def value(self, rank, part=0, count=None):
        return values(self.dtype, rank, self.count if count is None else count, part)

    def reduced(self, ranks, part=0, count=None):
        """Return the reduction, with the distance that a result may have from it."""
        count = self.count if count is None else count
        if self.op_name not in REDUCE_OPS[self.dtype]:
            return (self.value(0, part, count),)
        return reduction(self.dtype, self.op_name, len(ranks), count, part)

    def placed(self, before, *after):
        """Return an array with `before`; it must become `after`, or stay as it is."""
        self.made.append((Placed(before, self.layout, self.library), before, after))
        return self.made[-1][0].array

    def write(self, before, after):
        return self.placed(before, *(after if isinstance(after, tuple) else (after,)))

    def keep(self, values):
        return self.placed(values)

    def room(self, after):
        exact = after[0] if isinstance(after, tuple) else after
        before = np.zeros(exact.size, np_dtype(self.dtype))
        before.view(np.uint8)[:] = 1
        return self.write(before, after)

    # ---- cells

    def compare(self, name, kind="", call=None):
        """Make a call, compare all arrays, and count the cells."""
        self.made = []
        (call or getattr(self, name))()
        case = (*self.case, name + kind, self.op_name)
        for array, before, after in self.made:
            got = array.elements()
            if not after:
                assert bits(got) == bits(before), f"{case}: an input was changed"
                continue
            check(case, got, *after)
            outcome = "equal" if len(after) == 1 or after[1] is None else "rounded"
            self.cells[name + kind, self.dtype, self.op_name, outcome] += 1
            if name in EVERYWHERE:
                self.digest.update(bits(got))

    def compare_uneven(self, names):
        """Compare, where rank r has count + r % 3 elements."""
        self.uneven = [self.count + r % 3 for r in range(self.p)]
        for name in names:
            self.compare(name, " (uneven)")
        self.uneven = None

    def move(self):
        """Run all operations that only move data."""
        self.root, self.op_name = self.p // 2, ""
        for name in MOVING:
            self.compare(name)
        if self.layout in ("contiguous", "strided") and (self.p <= 4 or self.count > self.p):
            self.compare_uneven(("all_gather", "gather", "scatter"))
        self.compare("isend + irecv", call=lambda: self.send((self.me - 1) % self.p))
        self.compare("irecv from any", call=lambda: self.send(None))

    def send(self, source):
        """Send to the next rank, and receive from the one before or from any."""
        out = self.room(self.value((self.me - 1) % self.p))
        works = [dist.irecv(out, source)]
        works.append(dist.isend(self.read(self.value(self.me)), (self.me + 1) % self.p))
        for work in works:
            work.wait()

    def move_rows(self):
        """Run all_to_all_single of rows of 3 elements, in equal and in uneven parts."""
        self.count, self.op_name = 6, ""
        self.compare("all_to_all_single")
        self.compare_uneven(["all_to_all_single"])

    def table(self):
        source, target = np.ogrid[: self.p, : self.p]
        return (source * 2 + target) % 3 * 3 if self.uneven else super().table()

    def rows(self, counts):
        # Placed gives Fortran arrays [size/3, 3] if the size is a multiple of 3.
        return (counts // 3 if self.layout == "fortran" else counts).tolist()

    def reduce_all(self, name, is_plain):
        """Run all operations that reduce."""
        self.root, self.op_name, self.op = self.p - 1, name, reduce_op(name)
        for operation in (*REDUCING, *(BEYOND_TORCH if is_plain else ())):
            self.compare(operation)
        if is_plain:
            self.compare_uneven(["reduce_scatter"])

    # ---- what is refused

    def refuse(self, name):
        """A reduce op that the dtype lacks is refused on every rank, before anything is sent."""
        self.count, self.root, self.op_name, self.op = 1, 0, name, reduce_op(name)
        for operation in (*REDUCING, *BEYOND_TORCH, "reduce_scatter (uneven)"):
            self.uneven = [1 + r % 3 for r in range(self.p)] if "(" in operation else None
            call = getattr(self, operation.partition(" ")[0])
            told = self.error_of(call, UnsupportedError, (self.dtype, operation, name))
            assert f"reduce op {name} is not defined on {self.dtype} " in told, told
            self.cells[operation, self.dtype, name, "UnsupportedError"] += 1
        self.uneven, self.made = None, []

    def refuse_sizes(self):
        """One element more or less than the ranks can share equally is refused on every rank."""
        p = self.p
        for extra in (-1, 1):
            one, whole = np.ones(2, np.float32), np.ones(2 * p + extra, np.float32)
            calls = {
                "all_gather_into_tensor": lambda a, b: dist.all_gather_into_tensor(b, a),
                "reduce_scatter_tensor": lambda a, b: dist.reduce_scatter_tensor(a, b),
            }
            if p > 2:
                calls["all_to_all_single"] = lambda a, b: dist.all_to_all_single(b, b)
            for name, call in calls.items():
                call = partial(call, one, whole)
                told = self.error_of(call, InvalidArgumentError, ("float32", name, extra))
                assert str(2 * p + extra) in told, (name, told)
                self.cells[name, "", f"{extra:+d} element", "InvalidArgumentError"] += 1

    def error_of(self, call, error, case):
        try:
            call()
        except error as raised:
            self.digest.update(raised.what.encode())
            return raised.what
        raise AssertionError(f"{case} was accepted")

    # ---- all of it

    def run(self, layouts, thorough, dtypes):
        # The fnuz variants move as the other float8 do; a few ranks are enough.
        for self.dtype in [d for d in dtypes if self.p <= 3 or "fnuz" not in d]:
            for self.layout in layouts:
                self.one_layout(thorough)
            self.layout = "contiguous"
            for op in sorted(set(ALL_OPS) - set(REDUCE_OPS[self.dtype])):
                self.refuse(op)
            dist.barrier()
        self.refuse_sizes()
        dist.barrier()

    def one_layout(self, thorough):
        """All operations on one dtype and layout."""
        p, layout, counts = self.p, self.layout, [6]
        if layout == "scalar":
            counts = [1]
        elif layout == "contiguous" and thorough:
            counts = sorted({0, max(p - 1, 1), p + 1} | ({2 * p} if p <= 4 else set()))
        is_plain = layout == "contiguous" or (p <= 4 and layout == "strided")
        for self.count in counts:
            self.case = (self.library, p, self.dtype, layout, self.count)
            self.move()
            # Few dtypes for nothing and for p - 1 elements: reductions take most of the time.
            if self.count > p or len(counts) == 1 or self.dtype in ("float32", "int64"):
                for op in REDUCE_OPS[self.dtype]:
                    self.reduce_all(op, is_plain)
        if layout != "scalar":
            self.move_rows()


def matrix(rank, library="numpy", thorough=False, dtypes=DTYPES):
    """Run the matrix; return its cells after a check that all ranks found the same."""
    warnings.simplefilter("error")
    if library == "mixed":
        library = "torch" if rank % 2 else "numpy"
        shapes = ["contiguous", "strided", "fortran", "scalar"]
    else:
        shapes = [*layouts(library), "scalar"]
    found = Matrix(rank, library)
    found.run(shapes, thorough, dtypes)
    digests = [None] * found.p
    dist.all_gather_object(digests, found.digest.hexdigest())
    assert len(set(digests)) == 1, "ranks differ"
    return found.cells


def require_one_outcome_each(cells):
    """Fail if an operation on a dtype with a reduce op ended in different ways."""
    outcomes = {}
    for name, dtype, op, outcome in cells:
        outcomes.setdefault((name, dtype, op), set()).add(outcome)
    assert {cell: seen for cell, seen in outcomes.items() if len(seen) > 1} == {}
