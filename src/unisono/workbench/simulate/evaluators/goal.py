"""GOAL, the text that LogGOPSim reads: write schedules, read programs.

    num_ranks 2
    rank 0 {
    l0: send 1024b to 1 tag 0
    l1: recv 1024b from 1 tag 0
    l1 irequires l0
    }

`l1 requires l0`: l1 begins when l0 is done. `l1 irequires l0`: l1 begins when l0 has begun.
`calc 100` is local work of 100 ns.

Source: LogGOPSim's txt2bin.re; Hoefler, Siebert and Lumsdaine, "Group Operation Assembly Language",
ICPP 2009.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate.evaluators.loggops import Program
from unisono.workbench.simulate.evaluators.traffic import RECV, SEND, WORK

_NS = 1000
_LABEL = r"[a-zA-Z][a-zA-Z0-9_]*"
_MESSAGE = re.compile(
    rf"(?:({_LABEL})\s*:\s*)?(send|recv)\s+(\d+)\s*b\s+(to|from)\s+(\d+)((?:\s+(?:tag|cpu|nic)\s+\d+)*)$"
)
_CALC = re.compile(rf"(?:({_LABEL})\s*:\s*)?calc\s+(\d+)((?:\s+(?:cpu|nic)\s+\d+)*)$")
_EDGE = re.compile(rf"({_LABEL})\s+(i?requires)\s+({_LABEL})$")
_RANK = re.compile(r"rank\s+(\d+)\s*\{$")
_RANKS = re.compile(r"num_ranks\s+(\d+)$")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def to_goal(program: Program) -> str:
    """Return the text of a program; the label of an operation is its place on its rank."""
    own: list[list[int]] = [[] for _ in range(program.ranks)]
    label: list[str] = []
    for i, rank in enumerate(program.rank):
        label.append(f"l{len(own[rank])}")
        own[rank].append(i)
    lines = [f"num_ranks {program.ranks}"]
    for rank, operations in enumerate(own):
        lines += ["", f"rank {rank} {{"]
        edges = []
        for i in operations:
            lines.append(f"{label[i]}: {_operation(program, i)}")
            for word, later in (("requires", program.on_done), ("irequires", program.on_start)):
                edges += [f"{label[j]} {word} {label[i]}" for j in later[i]]
        lines += [*edges, "}"]
    return "\n".join(lines) + "\n"


def _operation(program: Program, i: int) -> str:
    kind, size = program.kind[i], program.size[i]
    if kind == WORK:
        return f"calc {-(-size // _NS)}"
    word = "send" if kind == SEND else "recv"
    way = "to" if kind == SEND else "from"
    return f"{word} {size}b {way} {program.peer[i]} tag {program.tag[i]}"


def from_goal(text: str) -> Program:
    """Return the program of a GOAL text.

    Raises:
        InvalidArgumentError: A line has another form, a label or a rank does not exist, or an
            operation is not for processor 0 and interface 0. The text has the number of the line.
    """
    program: Program | None = None
    rank, labels = -1, dict[str, int]()
    for number, line in _lines(text):
        if program is None:
            found = _RANKS.match(line)
            if not found:
                raise _error(number, line, "'num_ranks N' first")
            program = Program(int(found[1]))
        elif found := _RANK.match(line):
            rank, labels = int(found[1]), {}
            if rank >= program.ranks:
                raise _error(number, line, f"a rank below {program.ranks}")
        elif line == "}":
            rank = -1
        elif rank < 0:
            raise _error(number, line, "'rank R {'")
        else:
            _read_operation(program, rank, labels, number, line)
    if program is None:
        raise InvalidArgumentError("GOAL: the text is empty, expected 'num_ranks N' first")
    return program


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that have content, without comments, with their numbers."""
    plain = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    for number, line in enumerate(plain.splitlines(), 1):
        if line := line.strip():
            yield number, line


def _read_operation(
    program: Program, rank: int, labels: dict[str, int], number: int, line: str
) -> None:
    if found := _EDGE.match(line):
        for name in (found[1], found[3]):
            if name not in labels:
                raise _error(number, line, f"a label of rank {rank}, not {name!r}")
        program.wait(labels[found[1]], labels[found[3]], started=found[2] == "irequires")
        return
    if found := _CALC.match(line):
        name, places = found[1], found[3]
        index = program.add(rank, WORK, int(found[2]) * _NS)
    elif found := _MESSAGE.match(line):
        name, places = found[1], found[6]
        if (found[2] == "send") != (found[4] == "to") or int(found[5]) >= program.ranks:
            raise _error(number, line, f"'send Sb to R' or 'recv Sb from R', R < {program.ranks}")
        kind = SEND if found[2] == "send" else RECV
        tag = re.search(r"tag\s+(\d+)", places)
        index = program.add(rank, kind, int(found[3]), int(found[5]), int(tag[1]) if tag else 0)
    else:
        raise _error(number, line, "send, recv, calc, requires or irequires")
    if re.search(r"(?:cpu|nic)\s+0*[1-9]", places):
        raise _error(number, line, "cpu 0 and nic 0: a rank has one of each here")
    if name is not None:
        labels[name] = index


def _error(number: int, line: str, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"GOAL, line {number}: expected {expected}, got {line!r}")
