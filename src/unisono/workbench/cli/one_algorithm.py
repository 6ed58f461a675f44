"""`unisono explain NAME`: what an algorithm does, its cost, when it is good, and its rounds."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from unisono.errors import ScheduleError, UnisonoError

if TYPE_CHECKING:
    from unisono.core.schedules import Schedule

# The rounds that fit on a line.
_ROUNDS = 6
_WIDTH = 11


def sections(text: str) -> dict[str, str]:
    """Return the parts of a docstring: "does", its first sentence, then "use", "cost", "source"."""
    first, _, rest = text.partition("\n")
    found = {"does": first}
    for name, part in re.findall(r"^(Use|Cost|Source): (.*(?:\n    .*)*)", rest, re.MULTILINE):
        found[name.lower()] = " ".join(part.split())
    return found


def explain_algorithm(name: str, text: str, ranks: int | None = None) -> None:
    """Print an algorithm, from the docstrings of its builders.

    Args:
        name: Its name.
        text: What --algorithm takes: the name, or a file.
        ranks: Whose rounds to show; None: few.
    """
    from unisono.core.schedules import available
    from unisono.core.schedules.registry import operations_of

    builders = operations_of(name)
    texts = {op: sections(inspect.getdoc(builder) or "") for op, builder in builders.items()}
    (op, first), *others = texts.items()
    # A user's function may be wrong: then there is no output.
    drawn = list(picture(op, name, ranks))
    print(f"{name}, {op}: {first['does'] or 'no docstring'}\n")
    print(f"cost    {first.get('cost', 'not given')}")
    print("        n: bytes of the whole data, p: ranks, L: ranks per host, H: hosts, m: pieces")
    print(f"use     {first.get('use', 'not given')}")
    print(f"source  {first.get('source', 'not given')}")
    print("\n".join(drawn))
    for other, parts in others:
        print(f"\n{other}: {parts['does']}\n    cost  {parts.get('cost', 'not given')}")
    small = _world(op, name, ranks)[:2]
    larger = not ranks and text == name and name in available(op, 64, local=8)
    p, hosts = (64, 8) if larger else small
    words = f"unisono draw {op} -n {small[0]} --hosts {small[1]}"
    print(f"\ndraw it     {words} --algorithm {text} -o {name}.html")
    words = f"unisono simulate {op} -n {p} --hosts {hosts} --net fat-tree -b 1M"
    print(f"compare it  {words}" + f" --algorithm {text},linear" * (text != name))


def picture(op: str, name: str, wanted: int | None = None) -> Iterator[str]:
    """Yield lines that show the first rounds on few ranks."""
    from unisono.core.schedules import build
    from unisono.core.schedules.ir import ROOTED

    ranks, hosts, fault = _world(op, name, wanted)
    schedule = build(op, name, ranks, 0 if op in ROOTED else -1, 1, ranks // hosts)
    of_hosts = f", {hosts} hosts" if "local" in _parameters(op, name) else ""
    yield f"\n{ranks} ranks{of_hosts}, {schedule.rounds} round{'s' * (schedule.rounds != 1)}"
    if fault:
        yield f"# WRONG {fault}"
    yield from _table(schedule)
    yield ">2 sends to rank 2   <1 stores what rank 1 sent   +1 reduces it into its own"


def _world(op: str, name: str, wanted: int | None) -> tuple[int, int, str]:
    """Return few ranks that an algorithm serves, their hosts, and a size for which it is wrong."""
    from unisono.core.schedules import build
    from unisono.core.schedules.ir import ROOTED

    fault = ""
    # Functions and programs of users may serve few sizes, and raise ValueError for others.
    for ranks in () if wanted else (4, 8, 16, 32, 64, *range(2, 128)):
        hosts = max(1, ranks // 2)
        try:
            build(op, name, ranks, 0 if op in ROOTED else -1, 1, ranks // hosts)
        except UnisonoError as error:
            none_of_it = isinstance(error.__cause__, ValueError | None)
            if isinstance(error, ScheduleError) or not none_of_it:
                fault = fault or f"for {ranks} ranks: {error.what}"
        else:
            return ranks, hosts, fault
    # The error of the smallest usual size.
    ranks = wanted or 4
    hosts = max(1, ranks // 2)
    build(op, name, ranks, 0 if op in ROOTED else -1, 1, ranks // hosts)
    return ranks, hosts, fault


def _parameters(op: str, name: str) -> set[str]:
    from unisono.core.schedules.registry import operations_of

    return set(inspect.signature(operations_of(name)[op]).parameters)


def _table(schedule: Schedule) -> Iterator[str]:
    """Yield a line per rank, with a column per round."""
    import numpy as np

    from unisono.core.schedules.ir import Op

    shown = min(schedule.rounds, _ROUNDS)
    signs = {
        Op.SEND: ">", Op.POST: ">", Op.RECV: "<", Op.READ: "<", Op.RECV_REDUCE: "+",
        Op.READ_REDUCE: "+",
    }  # fmt: skip
    cells: dict[tuple[int, int], list[str]] = {}
    for k in range(shown):
        for rank, op, peer, *_ in schedule.steps(k, np.arange(schedule.world_size)).tolist():
            if op in signs:
                text = signs[Op(op)] + ("all" if peer < 0 else str(peer))
                each = cells.setdefault((rank, k), [])
                if text not in each:
                    each.append(text)
    wide = max([_WIDTH, *(len(" ".join(each)) + 2 for each in cells.values())])
    more = "..." if schedule.rounds > shown else ""
    numbers = "".join(str(k + 1).ljust(wide) for k in range(shown))
    digits = len(str(schedule.world_size - 1))
    yield f"round{' ' * (2 + digits)}{numbers}{more}".rstrip()
    for rank in range(schedule.world_size):
        row = [" ".join(cells.get((rank, k), [])).ljust(wide) for k in range(shown)]
        yield f"rank {rank:<{digits}}  {''.join(row)}".rstrip()
