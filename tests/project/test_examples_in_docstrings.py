"""The examples in the docstrings of operations give what they show."""

from __future__ import annotations

import doctest
import inspect
import re

import numpy as np
import pytest

import unisono as dist
from unisono.core.c10d import p2p
from unisono.core.c10d.objects import functions as objects
from unisono.core.operations.methods import OPS
from unisono.testing import run

FLAGS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


def functions_of(module):
    """The public functions that a module defines."""
    own = [f for f in vars(module).values() if getattr(f, "__module__", "") == module.__name__]
    return {f.__name__: f for f in own if callable(f) and f.__name__ in dist.__all__}


# An operation without a function of its own is a method only.
OPERATIONS = {
    **{name: getattr(dist, name, getattr(dist.ProcessGroup, name)) for name in OPS},
    **{name: f for name, f in functions_of(p2p).items() if not inspect.isclass(f)},
    **functions_of(objects),
}


class Checker(doctest.OutputChecker):
    """Compares what the rank of an example prints; the other rank may print anything."""

    def __init__(self, compares):
        self.compares = compares

    def check_output(self, want, got, flags):
        return not self.compares or super().check_output(want, got, flags)


def problems(rank, names):
    """Run the examples of operations up to the first failure; return its text."""
    for name in names:
        doc = inspect.getdoc(OPERATIONS[name])
        shown = re.search(r"^Examples: On rank ([01]) of 2$", doc, re.MULTILINE)
        names_in_examples = {"np": np, "dist": dist, "rank": rank}
        test = doctest.DocTestParser().get_doctest(doc, names_in_examples, name, None, 0)
        text: list[str] = []
        runner = doctest.DocTestRunner(Checker(int(shown[1]) == rank), False, FLAGS)
        runner.run(test, out=text.append)
        if text:
            return f"rank {rank}: {''.join(text)}"
    return ""


def test_every_operation_has_an_example_with_a_result():
    assert len(OPERATIONS) >= len(OPS) + 10
    for name, function in OPERATIONS.items():
        doc = inspect.getdoc(function)
        assert re.search(r"^Examples: On rank [01] of 2$", doc, re.MULTILINE), name
        examples = doctest.DocTestParser().get_examples(doc)
        assert any(name in example.source for example in examples), name
        assert examples[-1].want, name


def test_examples_give_what_they_show():
    # Processes, because doctest replaces sys.stdout, which threads share.
    found = run(problems, 2, ranks="processes", args=([*OPERATIONS],), timeout=20.0)
    assert found == ["", ""]


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_example_is_found(rank, monkeypatch):
    def scan(x):
        """Examples: On rank 1 of 2
        >>> dist.get_world_size()
        3
        """  # fmt: skip

    monkeypatch.setitem(OPERATIONS, "scan", scan)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert ("Expected:\n    3\nGot:\n    2" in problems(rank, ["scan"])) == (rank == 1)
