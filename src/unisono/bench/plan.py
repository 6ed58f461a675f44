"""What `unisono bench` measures: operations, sizes and bandwidths by nccl-tests' conventions.

Pure: no array, no clock, no process.

Source: nccl-tests 2.19, doc/PERFORMANCE.md and the GetBw functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from unisono.errors import InvalidArgumentError

__all__ = ["DTYPES", "OPS", "PEERS", "REDOPS", "Case", "Op", "Plan", "cases", "parse_nbytes"]

PEERS = ("gloo", "mpi")

REDOPS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG"}
"""nccl-tests' name of a reduce op -> torch's."""

DTYPES = {
    "int8": 1,
    "uint8": 1,
    "float16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes per element. These are the types that NumPy and torch share and Gloo reduces."""


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        bus_factor: busbw / algbw for a number of ranks.
        blocks: The size counts one block per rank; otherwise it is that of one array.
        reduces: Takes a reduce op.
        rooted: Takes a root.
        messages: How many messages one timed call is; the time is that of one of them.
    """

    bus_factor: Callable[[int], float]
    blocks: bool = False
    reduces: bool = False
    rooted: bool = False
    messages: int = 1


def _others(p: int) -> float:
    return (p - 1) / p


def _whole(p: int) -> float:
    return 1.0


OPS = {
    "all_reduce": Op(lambda p: 2 * (p - 1) / p, reduces=True),
    "broadcast": Op(_whole, rooted=True),
    "reduce": Op(_whole, reduces=True, rooted=True),
    "all_gather": Op(_others, blocks=True),
    "reduce_scatter": Op(_others, blocks=True, reduces=True),
    "all_to_all": Op(_others, blocks=True),
    "gather": Op(_others, blocks=True, rooted=True),
    "scatter": Op(_others, blocks=True, rooted=True),
    "barrier": Op(_whole),
    "sendrecv": Op(_whole, messages=2),
}


@dataclass(frozen=True)
class Plan:
    """Everything the ranks must know; they get the same.

    Attributes:
        ops: Names from `OPS`, measured one after the other.
        nprocs: Number of ranks.
        hosts: So many network namespaces, with equal shares of the ranks; 0: this host as it is.
        min_bytes: First size.
        max_bytes: Last size.
        factor: The next size is the last one times this ...
        step_bytes: ... or, unless 0, plus this.
        iters: Calls per round; 0 chooses as many as take about 5 ms.
        warmup: Calls before each round, not timed.
        rounds: How often every library gets its turn per size.
        dtype: Element type, a name from `DTYPES`.
        redop: Reduce op, a name from `REDOPS`.
        root: Root of the rooted operations.
        check: Whether to compare results with the formula.
        engine: unisono's engine; None leaves it to UNISONO_ENGINE.
        algorithm: unisono's algorithm; None lets it select.
        peers: Libraries to compare with, of `PEERS`.
        timeout_s: Of each size, and of setting up.
    """

    ops: tuple[str, ...]
    nprocs: int
    hosts: int = 0
    min_bytes: int = 8
    max_bytes: int = 64 << 20
    factor: int = 2
    step_bytes: int = 0
    iters: int = 0
    warmup: int = 1
    rounds: int = 15
    dtype: str = "float32"
    redop: str = "sum"
    root: int = 0
    check: bool = True
    engine: str | None = None
    algorithm: str | None = None
    peers: tuple[str, ...] = ()
    timeout_s: float = 120.0

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        for name in ("ops", "peers"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    def to_json(self) -> str:
        """Return the plan as text, for a command line."""
        return json.dumps(asdict(self))

    def __post_init__(self) -> None:
        """Check what does not depend on one flag alone.

        Raises:
            InvalidArgumentError: Names the flag.
        """
        if self.min_bytes > self.max_bytes:
            raise InvalidArgumentError(
                f"-b {self.min_bytes} is larger than -e {self.max_bytes} (in bytes)"
            )
        if self.factor < 2 and not self.step_bytes:
            raise InvalidArgumentError(f"-f must be at least 2, got {self.factor}")
        if self.root >= self.nprocs:
            raise InvalidArgumentError(
                f"-r {self.root} is not one of the {self.nprocs} ranks (0..{self.nprocs - 1})"
            )
        if self.hosts and "mpi" in self.peers:
            raise InvalidArgumentError("--hosts goes with --peer gloo only; mpiexec knows one host")
        if "sendrecv" in self.ops and self.nprocs < 2:
            raise InvalidArgumentError("sendrecv needs at least 2 ranks, got --nproc-per-node 1")


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        op: Name of the operation.
        count: Elements that one rank contributes, nccl-tests' column "count".
        nbytes: Column "size": of the array, or of all ranks' blocks together.
    """

    op: str
    count: int
    nbytes: int


def cases(op: str, plan: Plan) -> Iterator[Case]:
    """Yield the sizes of one operation, rounded down to whole blocks of at least one element."""
    if op == "barrier":
        yield Case(op, 0, 0)
        return
    unit = DTYPES[plan.dtype] * (plan.nprocs if OPS[op].blocks else 1)
    before = 0
    nbytes = plan.min_bytes
    while nbytes <= plan.max_bytes:
        count = max(1, nbytes // unit)
        # Small sizes of many ranks round to the same one.
        if count != before:
            yield Case(op, count, count * unit)
        before = count
        nbytes = nbytes + plan.step_bytes if plan.step_bytes else nbytes * plan.factor


def parse_nbytes(text: str) -> int:
    """Return a number of bytes written as nccl-tests does: 8, 64K, 64M, 1G (powers of 1024).

    Raises:
        InvalidArgumentError: It is not of that form, or 0.
    """
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    shift = {"": 0, "K": 10, "M": 20, "G": 30}.get(unit)
    if shift is None or not digits.isdecimal() or int(digits) == 0:
        raise InvalidArgumentError(f"must be a size such as 8, 64K, 64M or 1G, got {text!r}")
    return int(digits) << shift
