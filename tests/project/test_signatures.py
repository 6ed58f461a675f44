"""No public signature, default or first line of a docstring changes unseen."""

import json

from tests.support import signatures


def test_public_signatures_are_the_stored_ones():
    stored = json.loads(signatures.STORED.read_text("utf-8"))
    found = signatures.snapshot()
    changed = {
        name: (stored.get(name), found.get(name))
        for name in stored.keys() | found.keys()
        if stored.get(name) != found.get(name)
    }
    assert changed == {}, "if that is meant: .venv/bin/python -m tests.support.signatures"


def test_every_operation_and_form_is_stored():
    stored = json.loads(signatures.STORED.read_text("utf-8"))
    for name in ("all_reduce", "allreduce", "_allgather_base", "recv_anysource", "probe"):
        assert stored[f"unisono.ProcessGroup.{name}"].startswith("(self")
    assert "op: 'ReduceOp | Function'" in stored["unisono.all_reduce"]
