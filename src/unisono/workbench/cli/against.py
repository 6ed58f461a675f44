"""`unisono simulate --against`: the output of nccl-tests beside what a network predicts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from unisono.core.base.host import reason_of
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate import Machine

Values = dict[str, Any]

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_RANK = re.compile(r"#\s+Rank\s+\d+ .* on\s+(\S+) device")


class MeasuredRun(NamedTuple):
    """What nccl-tests printed.

    Attributes:
        ranks: Number of ranks; 0 if the text has none.
        hosts: Number of hosts; 0 if the text has none.
        times_us: The out-of-place time of each size in bytes.
    """

    ranks: int
    hosts: int
    times_us: dict[int, float]


def read(name: str) -> MeasuredRun:
    """Return the times of a file of nccl-tests.

    Raises:
        InvalidArgumentError: The file cannot be read, or has no line of times.
    """
    try:
        text = Path(name).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {name}: {reason_of(error)}") from None
    has_root = re.search(r"^#.*\bcount\b.*\broot\b", text, re.MULTILINE) is not None
    times: dict[int, float] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) < 6 or not (words[0].isdigit() and words[1].isdigit()):
            continue
        # Size, count, type, perhaps the operation, perhaps the root, time, algbw, busbw.
        numbers = [word for word in words[2:] if _NUMBER.fullmatch(word)][has_root:]
        if len(numbers) >= 3 and float(numbers[0]) > 0 < int(words[0]):
            times[int(words[0])] = float(numbers[0])
    if not times:
        raise InvalidArgumentError(f"{name} has no line of nccl-tests: size, count, ..., time")
    hosts = _RANK.findall(text)
    return MeasuredRun(len(hosts), len(set(hosts)), times)


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
