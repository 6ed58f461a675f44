"""Load the C++ extension module; None if there is no usable module."""

from __future__ import annotations

import contextlib
import os
from importlib import import_module
from typing import Any

_NAME = "unisono._engine"
_STALE = (
    "the extension module was built from other sources than these: rebuild it with `make native`, "
    "or install unisono again"
)
_STUB = os.path.join(os.path.dirname(__file__), "../../_engine.pyi")


def _load() -> tuple[Any, str]:
    """Return the module and "", or None and the reason why it cannot be used."""
    try:
        module = import_module(_NAME)
    except ModuleNotFoundError as error:
        if error.name == _NAME:
            return (
                None,
                f"the extension module was not built: {_why_not_built()}",
            )
        return None, f"the extension module cannot be loaded: {error}"
    except ImportError as error:
        return None, f"the extension module cannot be loaded: {error}"
    if not _fits(module):
        return None, _STALE
    return module, ""


def _why_not_built() -> str:
    """Return the error that pip's build left in the package; native/build_backend.py writes it."""
    # Only here, because it takes 20 ms to import.
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        if why := metadata.distribution("unisono").read_text("why_no_engine.txt"):
            return why
    return "there was no C++ compiler, or it failed"


def _fits(module: Any) -> bool:
    """Whether the module was built for these sources: it knows the digest of its stub."""
    try:
        with open(_STUB, "rb") as file:
            stub = file.read()
    except OSError:
        return True  # installed without its stub, so hardly apart from it
    return hasattr(module, "fits") and bool(module.fits(stub))


extension, why_absent = _load()
