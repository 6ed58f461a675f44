"""The flag --compress: what a call with `compress=` makes, in virtual time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from unisono.errors import InvalidArgumentError
from unisono.workbench.bench.plan import OPS

_PHASES = {
    "all_reduce": ("all_to_all", "all_gather"),
    "reduce_scatter": ("all_to_all",),
    "all_gather": ("all_gather",),
}

# Nanoseconds of one core to encode a float32, and to decode it, in C++ with AVX-512.
_CODING_NS = {"int8": (0.14, 0.12), "fp8": (0.31, 0.27), "bf16": (0.11, 0.08)}


def add_compress(parser: argparse.ArgumentParser) -> None:
    """Add the flag."""
    meaning = "also a call with compress=KIND: int8, fp8, bf16"
    parser.add_argument("--compress", choices=sorted(_CODING_NS), metavar="KIND", help=meaning)


def check_compress(options: argparse.Namespace) -> None:
    """Check that the operation has what is asked for.

    Raises:
        InvalidArgumentError: It has no `compress`.
    """
    if options.compress and options.op not in _PHASES:
        raise InvalidArgumentError(f"--compress: {options.op} has none, only {', '.join(_PHASES)}")


def compressed_row(
    options: argparse.Namespace,
    shape: tuple[int, int],
    exchange: Callable[[str, int], dict[str, Any]],
) -> dict[str, Any]:
    """Return a row as `row_of` does, of the exchanges of codes with the work between them.

    While a piece is on the way, ranks work on others. With k pieces the shorter of both, traffic
    and work, adds a k-th of it.

    Args:
        options: With `compress`, `op` and `itemsize`.
        shape: The ranks and the bytes.
        exchange: Called as exchange(op, nbytes): returns the row of the algorithm of a group.
    """
    from unisono.core.engines.block_codes import coded_nbytes
    from unisono.core.operations.sums.compressed import piece_of

    (p, nbytes), kind = shape, options.compress
    n = nbytes // options.itemsize
    coded = p * coded_nbytes(kind, -(-n // p))
    rows = {op: exchange(op, coded) for op in _PHASES[options.op]}
    encode_ns, decode_ns = _CODING_NS[kind]
    others, gathers = n * (p - 1) / p * (options.op != "all_gather"), options.op != "reduce_scatter"
    coding_us = (encode_ns + decode_ns) * others / 1e3
    coding_us += (encode_ns * n / p + decode_ns * n) / 1e3 * gathers
    traffic_us = sum(float(row["time_us"]) for row in rows.values())
    pieces = max(1, -(-(n // p) // piece_of(n // p, p)))
    time_us = max(traffic_us, coding_us) + min(traffic_us, coding_us) / pieces
    algbw = nbytes / time_us / 1000 if time_us else 0.0
    # Not the parts of the path, which has the work as well.
    return {
        "ranks": p, "size_bytes": nbytes, "algorithm": f"compress={kind}", "pipeline": pieces,
        "rounds": sum(row["rounds"] for row in rows.values()), "time_us": time_us, "algbw": algbw,
        "busbw": algbw * OPS[options.op].bus_factor(p), "coded_bytes": coded,
        "bound_us": sum(float(row["bound_us"]) for row in rows.values()), "coding_us": coding_us,
        "phases": {op: row["algorithm"] for op, row in rows.items()}, "published_us": None,
        "exact": all(row["exact"] for row in rows.values()),
    }  # fmt: skip


def phases_text(row: dict[str, Any]) -> str:
    """Return what a row is made of, as a line."""
    made = " and ".join(f"{phase} ({name})" for phase, name in row["phases"].items())
    return (
        f"{row['algorithm']}: {made} of {row['coded_bytes']:,} B of codes, "
        f"{row['coding_us']:,.0f} us to code"
    )
