"""Documents: those of an earlier commit, values of wrong types, and bounds.

`documents.json` has what commit 12b6e746, which had a codec for each document, wrote.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.core.base import document
from unisono.core.recorder.flight_recorder import encode, encode_short
from unisono.core.rendezvous import membership
from unisono.core.rendezvous.agents import state
from unisono.errors import RendezvousError
from unisono.launcher.report import WorkerFailure
from unisono.workbench.bench.plan import BenchPlan
from unisono.workbench.cli.doctor import examine
from unisono.workbench.cli.doctor.facts import Sharing
from unisono.workbench.trace.decoding import decode

BEFORE = json.loads(Path(__file__).with_name("documents.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("failures", list[WorkerFailure]),
        ("plan", BenchPlan),
        ("sharing", Sharing),
        ("facts", examine._Facts),
        ("found", examine._Found),
        ("numbers", list[int]),
    ],
)
def test_documents_of_before_are_read_and_written_alike(name, kind):
    found = document.loads(kind, BEFORE[name])
    assert document.dumps(found) == BEFORE[name]
    # As the codecs of before wrote them.
    plain = [asdict(each) for each in found] if name == "failures" else found
    plain = asdict(found) if hasattr(found, "__dataclass_fields__") else plain
    assert json.dumps(plain) == BEFORE[name]


@pytest.mark.parametrize(
    ("name", "loads"),
    [
        ("rendezvous", state.loads),
        ("rendezvous, empty", state.loads),
        ("membership", membership.loads),
    ],
)
def test_states_of_before_are_read_and_written_alike(name, loads):
    found = loads(BEFORE[name].encode())
    assert state.dumps(found).decode() == BEFORE[name]
    text = json.dumps(asdict(found), separators=(",", ":"), sort_keys=True)
    assert text == BEFORE[name]


def test_records_of_before_are_read():
    found = decode(BEFORE["records"].encode())
    assert decode(encode(found)) == decode(encode_short(found)) == found
    text = encode_short(found).decode()
    for newer in ('"runs": false', '"wait_begun_ns": null'):
        text = text.replace(f", {newer}", "")
    assert text == BEFORE["records"]


class Colour(StrEnum):
    RED = "red"


@dataclass
class Part:
    name: str
    colour: Colour = Colour.RED
    share: float | None = None


@dataclass
class Whole:
    parts: tuple[Part, ...]
    by_name: Mapping[str, Sequence[int] | None] = field(default_factory=dict)
    most: Part | None = None
    anything: Any = None
    is_done: bool = False


WHOLE = Whole(
    (Part("a"), Part("b", share=0.5)), {"x": (1, 2), "y": None}, Part("c"), [{"z": 1}], is_done=True
)


def test_a_document_is_read_as_it_was_written():
    text = document.dumps(WHOLE)
    assert document.loads(Whole, text) == document.loads(Whole, text, exact=True) == WHOLE
    assert document.plain(WHOLE) == json.loads(text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"parts": {}}, r"parts is \{\}, expected tuple\["),
        ({"parts": [1]}, "parts is 1, expected Part"),
        ({"parts": [{"colour": "red"}]}, "no key 'name'"),
        ({"parts": [{"name": 1}]}, "name is 1, expected str"),
        ({"parts": [{"name": "a", "colour": "blue"}]}, "'blue' is not a valid Colour"),
        ({"parts": [{"name": "a", "share": "1"}]}, r"share is '1', expected float \| None"),
        ({"parts": [{"name": "a", "share": 10**400}]}, "int too large to convert to float"),
        ({"by_name": {"x": 1}}, "x is 1, expected"),
        ({"by_name": {"x": [None]}}, "x is None, expected int"),
        ({"is_done": 1}, "is_done is 1, expected bool"),
        ({"most": "x" * 900}, r"most is 'x{49}, expected"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(change, text):
    changed = json.dumps(json.loads(document.dumps(WHOLE)) | change)
    with pytest.raises(ValueError, match=text):
        document.loads(Whole, changed)


def test_only_an_exact_document_has_no_other_keys():
    newer = '{"name": "a", "added": 1}'
    assert document.loads(Part, newer) == Part("a")
    with pytest.raises(ValueError, match="no key 'colour'"):
        document.loads(Part, newer, exact=True)
    whole = json.dumps(asdict(Part("a")) | {"added": 1})
    with pytest.raises(ValueError, match="unknown key 'added'"):
        document.loads(Part, whole, exact=True)


@pytest.mark.parametrize("value", [np.int64(1), {1}, b"ab", Path("a"), range(2), Part])
def test_a_value_without_a_place_in_documents_is_refused(value):
    for whole in (value, [value], {"a": value}, Whole((), anything=value)):
        for write in (document.dumps, document.plain):
            with pytest.raises(TypeError, match=f"no place for a {type(value).__name__}"):
                write(whole)


def test_the_version_is_read_first():
    for number, shown in (("true", "True"), ("1.0", "1.0"), ('"1"', "'1'")):
        with pytest.raises(ValueError, match=f"format {shown}, expected 1"):
            document.loads(Part, f'{{"format": {number}, "name": "a"}}', version=1)
    with pytest.raises(ValueError, match="format 1, expected 2"):
        document.loads(Part, '{"format": 1}', version=2)
    assert document.loads(Part, '{"format": 2, "name": "a"}', version=2) == Part("a")


@pytest.mark.parametrize("text", ["[" * 100_000, "", b"\xff", "{}", "[]", "9" * 5000])
def test_what_is_no_document_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011
        document.loads(Part, text)


def test_texts_and_packed_texts_have_a_bound(monkeypatch):
    monkeypatch.setattr(document, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="1001 bytes, expected at most 1000"):
        document.loads(Part, " " * 1001)
    store = {"k": b"1", "k/0": zlib.compress(bytes(10**8))}
    with pytest.raises(RendezvousError, match="1001 bytes, expected at most 1000"):
        examine._published(store, "k", Part, "h1")
