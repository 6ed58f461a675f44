"""`unisono simulate --against`: measured times beside what a network predicts.

Measured is what nccl-tests prints, or `unisono bench`, whose JSON document is read, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from unisono.core.base.host import reason_of
from unisono.core.schedules.ir import REDUCING, ROOTED
from unisono.errors import InvalidArgumentError
from unisono.workbench.bench.algorithms import label
from unisono.workbench.bench.plan import OPS, PEERS
from unisono.workbench.cli.flags import operation
from unisono.workbench.simulate import Machine

Values = dict[str, Any]
Times = dict[int, float]

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_RANK = re.compile(r"#\s+Rank\s+\d+ .* on\s+(\S+) device")
_OWN = re.compile(r"^# unisono bench: (\d+) ranks(?: on (\d+) hosts)?; (.*)", re.MULTILINE)
_CHOSEN = re.compile(r"^# time, algbw, busbw: (.*)", re.MULTILINE)
_START = re.compile(r"# Collective test starting: (\S+)")


class MeasuredRun(NamedTuple):
    """What a benchmark printed about one operation.

    Attributes:
        ranks: Number of ranks; 0 if the text has none.
        hosts: Number of hosts; 0 if the text has none.
        times_us: The out-of-place time of each size in bytes, by algorithm; "" if it has no name.
        group: The group of `unisono bench`; "" for nccl-tests.
    """

    ranks: int
    hosts: int
    times_us: dict[str, Times]
    group: str = ""

    @property
    def in_shared_memory(self) -> bool:
        """Whether the messages crossed no network."""
        return "over=shared-memory" in self.group and self.hosts < 2


def read(name: str, op: str) -> MeasuredRun:
    """Return the times that a file has of an operation.

    Raises:
        InvalidArgumentError: The file cannot be read, or has no times of the operation.
    """
    try:
        text = Path(name).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {name}: {reason_of(error)}") from None
    if text.lstrip().startswith("{"):
        return _of_document(name, text, op)
    convert, found, own = operation(list(OPS)), "", _OWN.search(text)
    chosen = _CHOSEN.search(text)
    first = label(chosen[1].strip()) if chosen else ""
    times: dict[str, Times] = {}
    heads: list[str] = []
    others: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if start := _START.match(line):
            others.append(found := convert(start[1]))
        if line.startswith("#") and "size" in words and "count" in words:
            heads = words[words.index("size") :]
        if len(words) < 6 or not (words[0].isdigit() and words[1].isdigit()):
            continue
        # Size, count, type, perhaps the operation, perhaps the root, time, algbw, busbw.
        numbers = [word for word in words[2:] if _NUMBER.fullmatch(word)]
        if found not in ("", op) or len(numbers) < 3:
            continue
        if not found:
            _check_kind(name, op, words[3], int(float(numbers[0])) if "root" in heads else None)
        columns = [(first, numbers["root" in heads])]
        if own:
            # Behind these nine are the peers, each with its ratio.
            columns += list(zip(heads[9::2], words[9::2], strict=False))
        for column, us in columns:
            if column not in PEERS and us != "-" and float(us) > 0 < int(words[0]):
                times.setdefault(column, {})[int(words[0])] = float(us)
    if not times:
        raise _nothing(name, op, others)
    if own:
        return MeasuredRun(int(own[1]), int(own[2] or 0), times, own[3])
    hosts = _RANK.findall(text)
    return MeasuredRun(len(hosts), len(set(hosts)), times)


def _of_document(name: str, text: str, op: str) -> MeasuredRun:
    """Return what the JSON document of `unisono bench` has."""
    times: dict[str, Times] = {}
    try:
        document = json.loads(text)
        plan, rows = document["plan"], document["rows"]
        first = label(plan["algorithm"] or "")
        for row in rows:
            for column, result in row["results"].items() if row["op"] == op else ():
                column = first if column == "unisono" else label(column)
                if column not in PEERS and result and result["time_us"] > 0 < row["size_bytes"]:
                    times.setdefault(column, {})[row["size_bytes"]] = result["time_us"]
        run = MeasuredRun(plan["nprocs"], plan["hosts"], times, document["group"])
    except (ValueError, LookupError, TypeError, AttributeError):
        raise InvalidArgumentError(f"{name} is no document of `unisono bench --json`") from None
    if not times:
        raise _nothing(name, op, [row["op"] for row in rows])
    return run


def _nothing(name: str, op: str, others: list[str]) -> InvalidArgumentError:
    if others and op not in others:
        return InvalidArgumentError(f"{name} has {', '.join(dict.fromkeys(others))}, not {op}")
    return InvalidArgumentError(f"{name} has no line of nccl-tests: size, count, ..., time")


def _check_kind(name: str, op: str, redop: str, root: int | None) -> None:
    """Check a row of a text that does not name its operation."""
    wrong = [f"redop {redop}"] * (redop[:1].isalpha() and (redop != "none") != (op in REDUCING))
    if root is not None and (root >= 0) != (op in ROOTED):
        wrong.append(f"root {root}")
    if wrong:
        raise InvalidArgumentError(f"{name} has rows with {' and '.join(wrong)}: no {op}")


def columns(name: str, run: MeasuredRun, asked: list[str]) -> dict[str, Times]:
    """Return the times of the algorithms that are asked for; [] for all.

    Raises:
        InvalidArgumentError: The file has times of other algorithms.
    """
    has = run.times_us
    if not (missing := [each for each in asked if each not in has]):
        return {each: has[each] for each in asked or has}
    if "" not in has:
        raise InvalidArgumentError(f"{name} has times of {', '.join(has)}, not of {missing[0]}")
    return {"": has[""]}


def causes(
    net: Machine, measured_us: float, predicted_us: Callable[[Machine], float]
) -> Iterator[str]:
    """Yield what would explain a time that is more than 10 % longer than the prediction.

    Args:
        net: The machine.
        measured_us: The time of the largest size.
        predicted_us: Function that returns the time on a machine; 0 if it has no algorithm.
    """
    values = net.values
    # What a variant changes in the values of the machine, and in those of an algorithm.
    variants: dict[str, Callable[[Values], Values]] = {}
    cards = values["interfaces"]
    while cards > 1:
        cards //= 2
        variants[f"{cards} of {values['interfaces']} interfaces in use"] = _sets(interfaces=cards)
    variants["messages inside hosts at 25 GB/s: PCIe, no NVLink"] = _sets(
        inside_gbps=25.0, inside_efficiency=1.0, nvls=False
    )
    if values["nvls"]:
        variants["no reductions in switches (NCCL_NVLS_ENABLE=0)"] = _sets(nvls=False)
    if values["channels"] > 1:
        # For reductions in switches NCCL's formula has a factor of channels - 1.
        one = _sets(channels=1, nvls=False)
        variants["1 channel (NCCL_MAX_NCHANNELS, NCCL_NTHREADS)"] = one
    variants["interfaces at half of their bandwidth"] = lambda own: {"gbps": own["gbps"] / 2}
    variants["100 us more per message between hosts"] = lambda own: {
        "latency_us": own["latency_us"] + 100
    }
    for text, changed in variants.items():
        tables = {name: table | changed(net.of(name)) for name, table in net.algorithms.items()}
        us = predicted_us(Machine(net.name, values | changed(values), tables, {}))
        if us and abs(measured_us / us - 1) < 0.15:
            yield f"{text}: {us:,.0f} us"


def _sets(**values: Any) -> Callable[[Values], Values]:
    return lambda _: values
