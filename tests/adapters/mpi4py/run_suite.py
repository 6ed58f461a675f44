"""Run mpi4py's own tests, from where they are, on unisono and on an MPI library; write a table.

    python -m tests.adapters.mpi4py.run_suite PATH/mpi4py/test --ranks 1 2 3 5
    python -m tests.adapters.mpi4py.run_suite PATH/mpi4py/test --reference PYTHON --ranks 2 3

A row has the tests of one file at one number of ranks: passed on all ranks, refused by name (an
UnsupportedError), skipped by the suite, failed. A file that does not end in time fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

# Runs one file with a result class that records each test, and writes it for this rank.
_PROGRAM = """
import json, os, sys, unittest
folder, name, out, front = sys.argv[1:5]
if front == "unisono":
    import unisono.mpi4py
    from unisono.errors import UnsupportedError
else:
    class UnsupportedError(Exception): pass
sys.path.insert(0, folder)
sys.dont_write_bytecode = True
from mpi4py import MPI
rows, texts = {}, {}
class Result(unittest.TestResult):
    def note(self, test, word, text=""):
        key = test.id()
        order = ["passed", "skipped", "refused", "failed"]
        rows[key] = max(rows.get(key, "passed"), word, key=order.index)
        if text: texts[key] = text
    def addSuccess(self, test): self.note(test, "passed")
    def addSkip(self, test, reason): self.note(test, "skipped")
    def addExpectedFailure(self, test, error): self.note(test, "passed")
    def problem(self, test, error):
        words = error[0], error[1]
        cause, seen = error[1], []
        while cause is not None:
            seen.append(cause); cause = cause.__cause__
        refused = any(isinstance(e, UnsupportedError) for e in seen)
        self.note(test, "refused" if refused else "failed", self._exc_info_to_string(error, test))
    addError = addFailure = problem
    def addSubTest(self, test, subtest, error):
        if error is not None: self.problem(test, error)
suite = unittest.defaultTestLoader.loadTestsFromName(name)
suite.run(Result())
rank = MPI.COMM_WORLD.Get_rank()
with open(f"{out}.{rank}.part", "w") as file:
    json.dump([rows, texts], file)
os.rename(f"{out}.{rank}.part", f"{out}.{rank}")
"""

WORDS = ("passed", "refused", "skipped", "failed")
FILES = [
    "test_cco_*",
    "test_p2p_*",
    "test_comm",
    "test_comm_inter",
    "test_comm_topo",
    "test_group",
    "test_op",
    "test_request",
    "test_status",
    "test_msgspec",
    "test_msgzero",
    "test_pack",
    "test_datatype",
    "test_win",
    "test_rma",
    "test_rma_nb",
    "test_file",
    "test_io",
    "test_util_pkl5",
    "test_util_pool",
    "test_util_sync",
    "test_exceptions",
]


class Outcome(NamedTuple):
    """What one file gave.

    Attributes:
        tests: Word by test: the worst of all ranks.
        texts: Traceback by test that failed or was refused.
        ended: Whether the file ended in time.
    """

    tests: dict[str, str]
    texts: dict[str, str]
    ended: bool


def run_file(file: Path, ranks: int, reference: str | None = None, limit_s: float = 240) -> Outcome:
    """Run one file of the suite."""
    import json

    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(_PROGRAM)
        out = Path(folder, "out")
        front = "unisono" if reference is None else "mpi"
        words = [str(program), str(file.parent), file.stem, str(out), front]
        if reference is None:
            launcher = [sys.executable, "-m", "unisono", "run", "--nproc-per-node", str(ranks)]
        else:
            launcher = [str(Path(reference).parent / "mpiexec"), "-n", str(ranks), reference]
        ended = True
        try:
            done = subprocess.run(
                [*launcher, *words], capture_output=True, text=True, timeout=limit_s, cwd=folder
            )
            text = done.stdout[-3000:] + done.stderr[-3000:]
        except subprocess.TimeoutExpired as error:
            ended, text = False, str((error.stderr or b"")[-3000:])
        tests: dict[str, str] = {}
        texts: dict[str, str] = {}
        for rank in range(ranks):
            part = Path(f"{out}.{rank}")
            if not part.exists():
                ended = False
                continue
            rows, why = json.loads(part.read_text())
            texts = {**why, **texts}
            for name, word in rows.items():
                order = ("passed", "skipped", "refused", "failed")
                tests[name] = max(tests.get(name, "passed"), word, key=order.index)
        if not ended:
            texts["(file)"] = text
        return Outcome(tests, texts, ended)


def chosen(folder: Path, names: list[str]) -> list[Path]:
    """Return the files of the suite with these names, which may have a star at their ends."""
    pattern = "|".join(re.escape(n.removesuffix(".py")).replace(r"\*", ".*") for n in names)
    return [f for f in sorted(folder.glob("test_*.py")) if re.fullmatch(pattern, f.stem)]


def main() -> None:
    """Write the table to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--files", nargs="+", default=FILES)
    parser.add_argument("--reference", help="an interpreter with mpi4py, beside its mpiexec")
    parser.add_argument("--limit", type=float, default=240, help="seconds per file")
    parser.add_argument("--texts", type=Path, help="write the tracebacks here")
    given = parser.parse_args()
    sums = dict.fromkeys(WORDS, 0)
    print("| file | ranks | " + " | ".join(WORDS) + " | ended |")
    print("|---|---|" + "---|" * (len(WORDS) + 1))
    for file in chosen(given.folder, given.files):
        for ranks in given.ranks:
            outcome = run_file(file, ranks, given.reference, given.limit)
            counts = {word: list(outcome.tests.values()).count(word) for word in WORDS}
            for word, count in counts.items():
                sums[word] += count
            cells = " | ".join(str(counts[word]) for word in WORDS)
            row = f"| {file.stem} | {ranks} | {cells} | {'yes' if outcome.ended else 'NO'} |"
            print(row, flush=True)
            if given.texts:
                with given.texts.open("a") as texts:
                    for name, text in outcome.texts.items():
                        texts.write(f"==== {ranks} {name}\n{text}\n")
    print("| sum | | " + " | ".join(str(sums[word]) for word in WORDS) + " | |")


if __name__ == "__main__":
    main()
