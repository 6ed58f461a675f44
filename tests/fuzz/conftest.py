"""The fuzzer's modules are imported by name, in child processes too."""

import multiprocessing
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

multiprocessing.set_forkserver_preload(["unisono", "unisono.testing"])
