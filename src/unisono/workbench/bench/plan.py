"""The settings of `unisono bench`: operations, sizes and bandwidths as in nccl-tests.

Pure: no array, no clock, no process.

Source: nccl-tests 2.19, doc/PERFORMANCE.md and the GetBw functions.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from unisono.errors import InvalidArgumentError

GPU_PEERS = ("nccl", "nccl4py")

MPI_PEERS = ("mpi", "intel-mpi", "open-mpi")
"""MPI libraries: that of this Python's environment, and those of folders of their own."""

COPY = "copy"
"""The peer that only copies: what the memory of this machine allows, see `BenchPlan.copied`."""

PEERS = ("gloo", *MPI_PEERS, "deepspeed", *GPU_PEERS, COPY)

REDOPS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG"}
"""nccl-tests' name of a reduce op -> torch's."""

DTYPES = {
    "int8": 1,
    "uint8": 1,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes per element of the types that NumPy (or ml_dtypes) and torch have and Gloo can reduce."""

ALL = "all"
"""nccl-tests' name of all types (`-d`), and of all reduce ops (`-o`)."""


@dataclass(frozen=True)
class OpTraits:
    """The properties of one operation.

    Attributes:
        bus_factor: Function of the number of ranks that returns busbw / algbw.
        blocks: Whether the size is that of all ranks' blocks together, not of one array.
        reduces: Whether the operation has a reduce op.
        rooted: Whether the operation has a root.
        messages: Number of messages in one timed call; the reported time is per message.
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
    "all_reduce": OpTraits(lambda p: 2 * (p - 1) / p, reduces=True),
    "broadcast": OpTraits(_whole, rooted=True),
    "reduce": OpTraits(_whole, reduces=True, rooted=True),
    "all_gather": OpTraits(_others, blocks=True),
    "reduce_scatter": OpTraits(_others, blocks=True, reduces=True),
    "all_to_all": OpTraits(_others, blocks=True),
    "gather": OpTraits(_others, blocks=True, rooted=True),
    "scatter": OpTraits(_others, blocks=True, rooted=True),
    "barrier": OpTraits(_whole),
    "sendrecv": OpTraits(_whole, messages=2),
}


@dataclass(frozen=True)
class SizeRange:
    """The range of sizes of each operation, in bytes; iterate to get them.

    Attributes:
        min_bytes: First size.
        max_bytes: Largest size.
        factor: Factor from one size to the next.
        step_bytes: Difference from one size to the next; replaces the factor unless 0.
    """

    min_bytes: int = 8
    max_bytes: int = 64 << 20
    factor: int = 2
    step_bytes: int = 0

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            InvalidArgumentError: Names the flag.
        """
        if self.min_bytes > self.max_bytes:
            raise InvalidArgumentError(
                f"-b {self.min_bytes} is larger than -e {self.max_bytes} (in bytes)"
            )
        if self.factor < 2 and not self.step_bytes:
            raise InvalidArgumentError(f"-f must be at least 2, got {self.factor}")

    def __iter__(self) -> Iterator[int]:
        nbytes = self.min_bytes
        while nbytes <= self.max_bytes:
            yield nbytes
            nbytes = nbytes + self.step_bytes if self.step_bytes else nbytes * self.factor

    def note(self) -> str:
        """Return a text if the last size is below the largest one that was asked for, else ""."""
        *_, last = self
        step = f"-i {self.step_bytes}" if self.step_bytes else f"-f {self.factor}"
        more = f"the last size is {last} B: {step} does not meet -e {self.max_bytes}"
        return more if last < self.max_bytes else ""


@dataclass(frozen=True)
class LoopPlan:
    """How each size is measured.

    Attributes:
        iters: Calls per round; 0 chooses a number that takes about 5 ms.
        warmup: Calls before each round, which are not timed.
        rounds: Number of rounds; in each round every library is measured once.
        check: Whether to compare results with the formula.
        timeout_s: Time-out of each size, and of the start.
        load: Number of busy processes beside the ranks.
        bind: Whether each rank is bound to a core.
        turn: Number of this set of ranks, and how many sets take turns; see `BenchPlan.worlds`.
    """

    iters: int = 0
    warmup: int = 1
    rounds: int = 15
    check: bool = True
    timeout_s: float = 120.0
    load: int = 0
    bind: bool = False
    turn: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class BenchPlan:
    """The settings of a benchmark, equal on all ranks.

    Attributes:
        ops: Names from `OPS`, in the order in which they are measured.
        nprocs: Number of ranks.
        hosts: Number of network namespaces, each with an equal share of the ranks; 0: this host.
        sizes: Sizes of each operation.
        loop: Measurement of each size.
        dtype: Element type, a name from `DTYPES`, or several with commas between; see `variants`.
        redop: Reduce op, a name from `REDOPS`, or several with commas between.
        root: Root of the rooted operations.
        engine: Engine of unisono; None: that of UNISONO_ENGINE.
        algorithm: Algorithm of unisono; None: unisono selects it.
        peers: What to compare with: libraries, of `PEERS`, and further algorithms of unisono.
        device: "cpu" or "cuda": where the arrays are.
    """

    ops: tuple[str, ...]
    nprocs: int
    hosts: int = 0
    sizes: SizeRange = SizeRange()
    loop: LoopPlan = LoopPlan()
    dtype: str = "float32"
    redop: str = "sum"
    root: int = 0
    engine: str | None = None
    algorithm: str | None = None
    peers: tuple[str, ...] = ()
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check combinations of flags.

        Raises:
            InvalidArgumentError: Names the flag.
        """
        if self.root >= self.nprocs:
            raise InvalidArgumentError(
                f"-r {self.root} is not one of the {self.nprocs} ranks (0..{self.nprocs - 1})"
            )
        if self.hosts and set(self.peers) & set(PEERS) - {"gloo"}:
            raise InvalidArgumentError(
                "--hosts goes with --peer gloo only; mpiexec and DeepSpeed know one host"
            )
        on_gpu = self.device == "cuda"
        libraries = [peer for peer in self.peers if peer in PEERS]
        if wrong := [peer for peer in libraries if (peer in GPU_PEERS) != on_gpu]:
            raise InvalidArgumentError(
                f"--device {self.device} does not go with --peer {wrong[0]}; "
                "nccl and nccl4py need --device cuda, the other peers --device cpu"
            )
        if on_gpu and (self.algorithm or self.engine or self.hosts):
            raise InvalidArgumentError(
                "--device cuda takes no --algorithm, --engine or --hosts: NCCL moves the data"
            )
        if "sendrecv" in self.ops and self.nprocs < 2:
            raise InvalidArgumentError("sendrecv needs at least 2 ranks, got --nproc-per-node 1")

    def worlds(self) -> list[BenchPlan]:
        """Return the plan of each set of ranks: a process can load only one MPI library."""
        mpis = [peer for peer in self.peers if peer in MPI_PEERS]
        first = tuple(peer for peer in self.peers if peer not in mpis[1:])
        peers = [first, *((peer,) for peer in mpis[1:])]
        return [
            replace(self, peers=each, loop=replace(self.loop, turn=(number, len(peers))))
            for number, each in enumerate(peers)
        ]

    def variants(self, op: str) -> Iterator[BenchPlan]:
        """Yield the plan with one type and one reduce op, for each that makes a difference."""
        dtypes, redops = self.dtype.split(","), self.redop.split(",")
        if op == "barrier":
            del dtypes[1:]
        if not OPS[op].reduces:
            del redops[1:]
        for dtype, redop in itertools.product(dtypes, redops):
            yield replace(self, dtype=dtype, redop=redop)

    def peer_of(self, rank: int) -> int | None:
        """Return the rank with which a rank exchanges messages, on another host if there is one.

        An unpaired last rank, or the ranks of an unpaired last host, get None.
        """
        share = self.nprocs // self.hosts if self.hosts > 1 else 1
        peer = (rank // share ^ 1) * share + rank % share
        return peer if peer < self.nprocs else None

    def copied(self, case: Case, rank: int) -> int:
        """Return the bytes of other ranks that a rank must get: those of busbw."""
        op, is_root = OPS[case.op], rank == self.root
        receives = is_root == (case.op in ("reduce", "gather")) if op.rooted else True
        share = 1 / self.nprocs if case.op == "scatter" else op.bus_factor(self.nprocs)
        return round(case.nbytes * share) if receives else 0

    def pairs(self) -> list[tuple[int, int]]:
        """Return the pairs of `peer_of`, the lower rank first."""
        peers = ((rank, self.peer_of(rank)) for rank in range(self.nprocs))
        return [(rank, peer) for rank, peer in peers if peer is not None and rank < peer]

    def fields(self) -> dict[str, Any]:
        """Return all settings in one flat dict, for the file of `--json`."""
        fields = asdict(self)
        flat = {**fields.pop("sizes"), **fields.pop("loop"), **fields}
        del flat["turn"]
        return flat


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        op: Name of the operation.
        count: Elements that one rank contributes, nccl-tests' column "count".
        nbytes: Size of the array, or of all ranks' blocks together; column "size".
    """

    op: str
    count: int
    nbytes: int


def cases(op: str, plan: BenchPlan) -> Iterator[Case]:
    """Yield the sizes of one operation, rounded down to whole blocks of at least one element."""
    if op == "barrier":
        yield Case(op, 0, 0)
        return
    unit = DTYPES[plan.dtype] * (plan.nprocs if OPS[op].blocks else 1)
    # With many ranks several small sizes round to the same count.
    for count, _ in itertools.groupby(max(1, nbytes // unit) for nbytes in plan.sizes):
        yield Case(op, count, count * unit)


def parse_nbytes(text: str) -> int:
    """Return the bytes of 8, 64K, 1.5M, "1 MB", 1GiB: powers of 1024, as in nccl-tests; or of 1e6.

    Raises:
        InvalidArgumentError: The text has another form, or is no whole number, or 0.
    """
    number, unit = r"([0-9]+)(?:\.([0-9]+))?", r"(?:E\+?([0-9]{1,2}) ?| ?([KMGT])I?| )?"
    if found := re.fullmatch(rf"{number}{unit}B?", text.strip().upper()):
        digits, decimals, power, letter = found[1], found[2] or "", found[3] or 0, found[4] or " "
        scaled = int(digits + decimals) * int(10 ** int(power)) << 10 * " KMGT".index(letter)
        nbytes, rest = divmod(scaled, int(10 ** len(decimals)))
        if nbytes and not rest:
            return nbytes
    raise InvalidArgumentError(f"must be a size such as 8, 64K, 64M or 1G, got {text!r}")
