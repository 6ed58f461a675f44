"""Measure what `import unisono` costs beyond `import numpy`: medians of fresh interpreters."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 11
STATEMENTS = {
    "nothing": "pass",
    "numpy": "import numpy",
    "unisono": "import unisono",
    "numpy + unisono.all_reduce": "import numpy, unisono; unisono.all_reduce",
}


def main() -> None:
    """Print one line per statement."""
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    # Round by round, so that a busy moment of the machine hits all statements alike.
    for _ in range(RUNS):
        for name, statement in STATEMENTS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        print(f"{name:28} {statistics.median(seconds) * 1000:6.0f} ms")


if __name__ == "__main__":
    main()
