"""Bodies that run on ranks live in modules of their own, which child processes import by name."""

import sys
from pathlib import Path

from unisono.testing.plugin import world

__all__ = ["world"]

sys.path.insert(0, str(Path(__file__).parent))
