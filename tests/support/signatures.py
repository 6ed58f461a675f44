"""The signatures of all public names; run as a program, write them to the stored file.

.venv/bin/python -m tests.support.signatures
"""

import inspect
import json
import re
from importlib import import_module
from types import ModuleType

from tests.support.tools import ROOT
from unisono.core.base.text import AbsentName

STORED = ROOT / "tests/project/signatures.json"
TIERS = ("unisono", "unisono.errors", "unisono.lowlevel", "unisono.testing")


def snapshot():
    """Return {"tier.name" or "tier.Class.member": signature or value and first line of doc}."""
    found = {}
    for tier in TIERS:
        for name in import_module(tier).__all__:
            value = getattr(import_module(tier), name)
            found[f"{tier}.{name}"] = _described(value)
            if inspect.isclass(value):
                members = _members(value)
                found |= {f"{tier}.{name}.{key}": _described(member) for key, member in members}
    return found


def _members(cls):
    """Yield the members that unisono gives a class, and its bases."""
    yield "bases", ", ".join(base.__name__ for base in cls.__mro__[1:])
    for name in sorted(dir(cls)):
        owner = next((c for c in cls.__mro__ if name in vars(c)), None)
        known = name.startswith("_") and name not in OWN
        value = inspect.getattr_static(cls, name, None)
        known = known or isinstance(value, AbsentName)
        if owner is not None and owner.__module__.startswith("unisono") and not known:
            yield name, value


# Private names that torch's code calls.
OWN = (
    "_allgather_base",
    "_reduce_scatter_base",
    "_get_sequence_number_for_group",
    "_source_rank",
)


def _described(value):
    """Return the signature of what can be called, or the value of a constant."""
    if isinstance(value, (classmethod, staticmethod)):
        return f"{type(value).__name__} {_described(value.__func__)}"
    if isinstance(value, property):
        return f"property {_described(value.fget)}"
    if isinstance(value, ModuleType):  # torch's path of a function, if a test has imported it
        value = value.rendezvous
    if not callable(value):
        return f"{type(value).__name__}"
    try:
        shown = str(inspect.signature(value))
    except (TypeError, ValueError):
        shown = "(?)"
    own = getattr(value, "__doc__", None) or ""
    # A class without a docstring may have one that Python made.
    doc = "" if own.startswith(getattr(value, "__name__", "?") + "(") else own
    return f"{_plain(shown)}  # {doc.strip().partition(chr(10))[0]}"


def _plain(text):
    """Return a signature as every version of Python writes it."""
    text = re.sub(r"ForwardRef\(('[^']*')\)", r"\1", text)
    text = re.sub(r"^\(self: '\w+'", "(self", text)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


if __name__ == "__main__":
    STORED.write_text(json.dumps(snapshot(), indent=0, sort_keys=True) + "\n", encoding="utf-8")
