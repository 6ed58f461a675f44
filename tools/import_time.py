"""Measure `import unisono` and `import numpy`: median times of new interpreters."""

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
    # Alternate the statements, so that a load peak affects all of them equally.
    for _ in range(RUNS):
        for name, statement in STATEMENTS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        print(f"{name:28} {statistics.median(seconds) * 1000:6.0f} ms")


if __name__ == "__main__":
    main()
