"""What all fault tests share: bodies that child processes can import, and quick children."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)

# Children import the bodies by name; multiprocessing hands them this path.
if HERE not in sys.path:
    sys.path.insert(0, HERE)

# The server that children are forked from loads NumPy and unisono once instead of each of them.
multiprocessing.set_forkserver_preload(["unisono", "unisono.testing"])
