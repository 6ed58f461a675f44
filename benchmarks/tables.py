"""Write a page beside each file of benchmarks/results, and the table of benchmarks/README.md.

Run from the repository root: `make docs`. A test fails when a page is out of date. A file is one of

- written by `unisono bench --json`: it has a "plan"
- written by `python benchmarks/store.py --json`: it has "argv"
- copied by hand from what the other programs of this folder print: it has a "title"

Each may also have "tables", a list of {"text", "head", "rows"}, and "remarks", a list of paragraphs
about this run. Both are written by hand. `python benchmarks/tables.py FILE` prints one page.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

RESULTS = Path("benchmarks/results")
README = Path("benchmarks/README.md")
# Between these lines README.md has its table.
BEGIN, END = "<!-- headline: written by tables.py -->", "<!-- end -->"

PEERS = {
    "intel-mpi": "Intel MPI",
    "open-mpi": "Open MPI",
    "mpi": "MPICH",
    "deepspeed": "DeepSpeed",
    "gloo": "Gloo",
}
# The columns of a page.
COLUMNS = {**PEERS, "copy": "copy"}
# The files of `unisono bench`, in the order of the table of README.md.
RUNS = ("2-ranks", "peers", "busy", "4-ranks", "8-ranks", "2-hosts", "2-hosts-of-2")
VERSIONS = {
    "python": "Python ",
    "numpy": "NumPy ",
    "torch": "torch ",
    "mpi4py": "mpi4py ",
    "mpi": "",
    "intel-mpi": "",
    "open-mpi": "",
    "deepspeed": "",
}

Document = dict[str, Any]


def main() -> None:
    """Write all pages, or print the page of one file."""
    if len(sys.argv) > 1:
        print(page(Path(sys.argv[1])), end="")
        return
    for path, text in pages():
        path.write_text(text, encoding="utf-8")


def pages() -> Iterator[tuple[Path, str]]:
    """Yield every generated page with its path."""
    for path in sorted(RESULTS.glob("*.json")):
        yield path.with_suffix(".md"), page(path)
    yield README, readme(README.read_text(encoding="utf-8"))


def page(path: Path) -> str:
    """Return the page of one file of results."""
    document = read(path)
    parts = [f"# {title(document)}", *origin(path, document)]
    if "plan" in document:
        parts.append(bench_table(document["rows"]))
        parts += ["Microseconds of an all_reduce, medians (Gloo: fastest rounds):"]
        parts.append(times_table(document["rows"]))
    elif "argv" in document:
        parts.append(store_table(document["rows"]))
    for each in document.get("tables", []):
        parts += [wrapped(each["text"]), table(each["head"], each["rows"])]
    parts += [wrapped(remark) for remark in document.get("remarks", [])]
    return "\n\n".join(parts) + "\n"


def readme(text: str) -> str:
    """Return README.md with the table of what the runs of `unisono bench` gave."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{headline()}\n\n{END}{after}"


def headline() -> str:
    """Return a table with one row per run and a column per library."""
    rows = []
    for name in RUNS:
        document = read(RESULTS / f"{name}.json")
        small = document["rows"][0]["results"]
        # Beside busy processes the fastest round is a round that they did not disturb.
        what = "time_us" if document["plan"].get("load") else "best_us"
        cells = [f"[{title(document)}](results/{name}.md)", short(small["unisono"][what])]
        for peer in PEERS:
            found = ratios(document["rows"], peer, "time_us")
            above = sum(ratio > 1 for ratio, _ in found)
            us = short(small[peer][what]) if small.get(peer) else ""
            cells.append(f"{us} / {mean(found)} ({above})" if found else "")
        rows.append(cells)
    return table(["run", "unisono", *PEERS.values()], rows)


def read(path: Path) -> Document:
    """Return what a file of results holds."""
    document: Document = json.loads(path.read_text(encoding="utf-8"))
    return document


def title(document: Document) -> str:
    """Return the heading of a page."""
    if "plan" in document:
        ranks, hosts = document["plan"]["nprocs"], document["plan"]["hosts"]
        if load := document["plan"].get("load"):
            return f"{ranks} ranks beside {load} processes"
        where = f"{hosts} hosts" if hosts else "one host"
        peers = ", all peers" if set(PEERS) <= set(document["plan"]["peers"]) else ""
        return f"{ranks} ranks on {where}{peers}"
    return "Stores" if "argv" in document else str(document["title"])


def origin(path: Path, document: Document) -> Iterator[str]:
    """Yield how the results came about: file, machine, date and command."""
    yield f"Written by `benchmarks/tables.py` from [{path.name}]({path.name}); do not edit.\n" + (
        "[Benchmarks](../README.md) defines the columns."
    )
    machine = document["machine"]
    system = re.sub(r"(\d+\.\d+)\S*", r"\1", machine["system"])
    facts = [machine["cpu"], f"{machine['cores']} cores", f"{machine['memory_gib']} GiB", system]
    facts += [f"load {machine['load_before']} before"] if "load_before" in machine else []
    versions = [name + machine[key] for key, name in VERSIONS.items() if key in machine]
    date = document["date"][:10] if "date" in document else "not recorded"
    yield wrapped(f"Date: {date}. Machine: {', '.join(facts)}. {', '.join(versions)}.")
    for words in commands(document):
        line = " ".join(re.sub(r"^.*/(?=[^/]+\.(json|png)$)", f"{RESULTS}/", w) for w in words)
        yield fill(
            line,
            96,
            initial_indent="    ",
            subsequent_indent="        ",
            break_long_words=False,
            break_on_hyphens=False,
        ).replace("\n", " \\\n")


def commands(document: Document) -> Iterable[Sequence[str]]:
    """Return the command lines of a run."""
    if "argv" in document:
        return [document["argv"]]
    if "plan" in document:
        return [document["command"]]
    return [line.split() for line in document["commands"]]


def bench_table(rows: list[Document]) -> str:
    """Return the ratios of each operation to each peer."""
    by_op = defaultdict(list)
    for row in rows:
        by_op[row["op"]].append(row)
    peers = [p for p in COLUMNS if any(p in row["results"] for row in rows)]
    head = ["operation"]
    for peer in peers:
        head += [f"/ {COLUMNS[peer]}", "best", "above 1", "worst"]
    found = [*by_op.items(), ("all", rows)]
    return table(head, [[op, *(c for p in peers for c in cells(of, p))] for op, of in found])


def times_table(rows: list[Document]) -> str:
    """Return the times of all_reduce over sizes."""
    found = [row for row in rows if row["op"] == "all_reduce"]
    libraries = [name for name in ("unisono", *COLUMNS) if found[0]["results"].get(name)]
    lines = []
    for row in found:
        # Sizes 32 times apart: a row for every size would make the table long.
        if row["size_bytes"].bit_length() % 5 == 4:
            times = [
                row["results"][name]["best_us" if name == "gloo" else "time_us"]
                for name in libraries
            ]
            lines.append([size(row["size_bytes"]), *map(short, times)])
    return table(["size", *(COLUMNS.get(name, name) for name in libraries)], lines)


def cells(rows: list[Document], peer: str) -> list[str]:
    """Return the four columns that compare with one peer."""
    found = ratios(rows, peer, "time_us")
    if not found:
        return ["-"] * 4
    worst, nbytes = max(found)
    above = sum(ratio > 1 for ratio, _ in found)
    best = mean(ratios(rows, peer, "best_us"))
    return [mean(found), best, f"{above} of {len(found)}", f"{worst:.2g} at {size(nbytes)}"]


def ratios(rows: list[Document], peer: str, what: str) -> list[tuple[float, int]]:
    """Return (unisono's time over the peer's, size in bytes) of every row that has both."""
    return [
        (
            found.get(f"unisono_{what}", row["results"]["unisono"][what]) / found[what],
            row["size_bytes"],
        )
        for row in rows
        if (found := row["results"].get(peer))
    ]


def short(number: float) -> str:
    """Return a number with two digits, or all digits before the point."""
    return f"{number:.2g}" if number < 100 else f"{number:.0f}"


def size(nbytes: int) -> str:
    """Return a number of bytes in the largest unit that divides it."""
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def mean(found: list[tuple[float, int]]) -> str:
    """Return the geometric mean of ratios."""
    return f"{math.exp(sum(math.log(ratio) for ratio, _ in found) / len(found)):.2g}"


def store_table(rows: list[Document]) -> str:
    """Return torch's and Redis's figures, and the ratios to torch's."""

    def figure(row: Document, name: str) -> str:
        found = row["results"].get(name)
        if found is None:
            return ""
        number = found["median"]
        return f"{number:,.0f} {row['unit']}" if number >= 1000 else f"{number:.3g} {row['unit']}"

    def ratio(row: Document, name: str) -> str:
        found = row["ratio_to_torch"].get(name)
        return "" if found is None else f"{found:.2f}"

    return table(
        ["", "torch", "Redis", "same client: ratio", "unisono: ratio"],
        [
            [
                row["row"],
                figure(row, "torch"),
                figure(row, "redis"),
                ratio(row, "torch client"),
                ratio(row, "unisono"),
            ]
            for row in rows
        ],
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in [head, *rows]]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def wrapped(text: str) -> str:
    """Return a paragraph in lines of at most 98 columns."""
    return fill(text, 98, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    main()
