"""Scripts of the project that are in no package."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tool(name, folder="tools"):
    """Import a fresh copy of a script of tools/ or benchmarks/, which a test may change."""
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
