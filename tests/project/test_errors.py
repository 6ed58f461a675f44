"""The catalogue of errors: complete, and every first line asserted by some test."""

import ast
import re

from tests.support.tools import ROOT, tool

errors_page = tool("errors_page")


def test_the_catalogue_is_that_of_the_source(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert errors_page.PAGE.read_text(encoding="utf-8") == errors_page.page(), "run `make docs`"


# First lines that no test can bring about.
UNREACHED = {
    "the native engine ended with status {code}, peer {peer}": "a bug of ours",
    "a world with the native engine has messages in C++": "a bug of ours",
    "cannot open the workers' store: {what}": "a port that is taken between choosing and opening",
}


def said_in_tests():
    """Return all texts in the tests and in the conformance suites, regular expressions undone."""
    for folder in (ROOT / "tests", ROOT / "src/unisono/testing"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield re.sub(r"\\(.)", r"\1", node.value).strip()


def test_every_first_line_is_asserted_by_a_test(monkeypatch):
    """Statically: a text in the tests holds the longest fixed part of it, or is a part of that."""
    monkeypatch.chdir(ROOT)
    texts = {text for text in said_in_tests() if len(text) >= 8}
    # A search in one text is faster than in each of them.
    together = "\0".join(texts)
    missing = []
    composed = [
        errors_page.Message(cls, line, "any")
        for cls, lines in errors_page.COMPOSED.items()
        for line in lines
    ]
    for message in [*sorted(set(errors_page.messages())), *composed]:
        longest, *rest = errors_page.fixed_parts(message.text)
        parts = "\0".join([longest, *rest])
        if not (
            longest in together
            or message.text in UNREACHED
            or any(len(text) >= 12 and text in parts for text in texts)
        ):
            missing.append(f"{message.module}: {message.cls}: {message.text}")
    assert not missing, "assert these lines in a test:\n" + "\n".join(missing)
