"""Check the language of documents, docstrings and messages.

Run from the repository root: `python tools/prose.py [FILE ...]`. The rules are in CONTRIBUTING.md;
this program checks those that a program can: the length of sentences, semicolons and headings, and
in documents and messages the words that the style guide forbids. `--words` prints how many words
each document has.
"""

from __future__ import annotations

import argparse
import ast
import html
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SENTENCE_WORDS = 30
HEADING_WORDS = 8
# Words in all documents together, also of generated pages. Records of measurements do not count,
# because nobody reads them to use or to change the library: docs/decisions/0044.
ALL_WORDS = 45_000
FIGURES = ("benchmarks/results/", "docs/lab/")

# pattern -> what to write instead.
FORBIDDEN = {
    r"who|whom|whoever|whosoever": "name the rank, the process, the caller",
    r"nobody|somebody|anybody|everybody|anyone|someone|everyone": "name the ranks or the threads",
    r"tell|tells|told|telling": "log, report, raise, show",
    r"say|says|said|saying": "state, report, show, log",
    r"hear|hears|heard|hearing": "receive, detect",
    r"shall": "must",
    r"so many|so much|so long|as it were": "give the number",
    r"for want of|want of": "without",
    r"(?:this|that|each|any|another|the other|which|the|every|no) one"
    r"(?=\W*$|[.,;:)]|\s(?:is|was|has|had|that|which|of|in|at|on|to|and|or|with|as)\b)|"
    r"(?<!\.)ones(?!\()": "repeat the noun",
    r"those that|those which|that which|those who": "repeat the noun",
    r"where (?:it is|there is|there are|they are|that is|no|none|nothing)": "write if",
    r"what is more|of its own accord|all the same|by and by|thereby|therein": "leave it out",
    r"simply|obviously|of course": "leave it out",
}
_FORBIDDEN = re.compile(
    "|".join(rf"(?P<w{i}>\b(?:{words})\b)" for i, words in enumerate(FORBIDDEN)), re.IGNORECASE
)
_ADVICE = list(FORBIDDEN.values())
# A sentence that begins so has no subject with a name, unless it is a question.
_HEADLESS = re.compile(r"(?:What|Whatever|Whose|Whichever|One (?:that|of them|is))\b[^?]*$")
# Text in which words are quoted, not used.
_QUOTED = re.compile(r"```.*?```|``[^`]+``|`[^`]+`|\"[^\"\n]*\"|<!--.*?-->", re.DOTALL)
_END = re.compile(r"(?<=[.!?])[)\"'*_]*\s+(?=[A-Z(`\"'*_0-9])|:\s*\n|:\s*$")
_ABBREVIATED = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|approx|resp|Fig|No)\.")
_SECTION = re.compile(
    r"^(Args|Arguments|Attributes|Returns|Raises|Yields|Cost|Source|Example|Examples|Note|Notes):"
)


class Text(NamedTuple):
    """A paragraph: where it begins, what it is, and its words."""

    line: int
    kind: str  # "heading", "prose", "message" or "docstring"
    text: str


def main() -> int:
    """Print each violation, or one line that gives the number of words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="files; all tracked ones if none")
    parser.add_argument("--words", action="store_true", help="print the words of each document")
    flags = parser.parse_args()
    paths = flags.paths or tracked()
    documents = {path: words_of(read(path)) for path in paths if path.suffix == ".md"}
    if flags.words:
        for path, words in sorted(documents.items(), key=lambda item: item[1]):
            print(f"{words:6} {path}")
    problems = [f"{path}:{problem}" for path in paths for problem in check(path)]
    total = sum(n for path, n in documents.items() if not path.as_posix().startswith(FIGURES))
    if total > ALL_WORDS:
        problems.append(f"documents: {total} words (limit {ALL_WORDS})")
    print("\n".join(problems) or f"prose: {len(paths)} files, {total} words of documents")
    return 1 if problems else 0


def tracked() -> list[Path]:
    """Return the files of this repository whose language is checked."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout
    paths = [Path(line) for line in listed.splitlines()]
    code = ("src", "tools", "benchmarks", "examples")
    return [
        path
        for path in paths
        if path.exists()
        and (path.suffix == ".md" or (path.parts[0] in code and path.suffix == ".py"))
        # It quotes the words that it forbids.
        and path != Path("tools/prose.py")
    ]


def words_of(source: str) -> int:
    """Return the number of words of a document; rules and bars of tables are none."""
    return sum(bool(re.search(r"\w", word)) for word in source.split())


def read(path: Path) -> str:
    """Return the text of a file."""
    return path.read_text(encoding="utf-8")


def check(path: Path) -> Iterator[str]:
    """Yield what breaks the rules in one file, each with its line."""
    source = read(path)
    for text in markdown(source) if path.suffix == ".md" else python(source):
        for problem in violations(text):
            yield f"{text.line}: {problem}"


def violations(text: Text) -> Iterator[str]:
    """Yield what breaks the rules in one paragraph."""
    plain = _QUOTED.sub("X", html.unescape(text.text))
    for found in _FORBIDDEN.finditer(plain if text.kind != "docstring" else ""):
        advice = _ADVICE[int((found.lastgroup or "w0")[1:])]
        yield f"'{found.group()}': {advice}"
    if text.kind == "message":
        return
    if text.kind == "heading":
        if len(plain.split()) > HEADING_WORDS:
            yield f"heading of {len(plain.split())} words (limit {HEADING_WORDS})"
        return
    for sentence in sentences(plain):
        if text.kind == "prose" and _HEADLESS.match(sentence.strip()):
            yield f"subject without a name: {' '.join(sentence.split())[:40]} ..."
        words = [word for word in sentence.split() if re.search(r"\w", word)]
        if len(words) > SENTENCE_WORDS:
            start = " ".join(words[:6])
            yield f"sentence of {len(words)} words (limit {SENTENCE_WORDS}): {start} ..."
    if plain.count(";") > 1:
        start = " ".join(plain.split()[:6])
        yield f"{plain.count(';')} semicolons in a paragraph (limit 1): {start} ..."


def sentences(text: str) -> list[str]:
    """Return the sentences of a paragraph; a colon at the end of a line ends one, too."""
    return _END.split(_ABBREVIATED.sub(lambda found: found.group(1) + " ", text))


def markdown(source: str) -> Iterator[Text]:
    """Yield the paragraphs, list items, table cells and headings of a document."""
    # Blank what is not prose, and keep the numbers of the lines.
    blank = re.compile(r"^```.*?^```$|<!--.*?-->", re.MULTILINE | re.DOTALL)
    source = blank.sub(lambda found: "\n" * found.group().count("\n"), source)
    source = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", source)
    paragraph: list[str] = []
    start = 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        item = re.match(r"\s*([-*+]|\d+\.)\s+", line)
        ends = not line.strip() or item or line.startswith(("#", "|", "    ", "???", "!!!"))
        if ends and paragraph:
            yield Text(start, "prose", "\n".join(paragraph))
            paragraph = []
        if line.startswith("#"):
            yield Text(number, "heading", line.lstrip("# "))
        elif line.startswith("|"):
            for cell in line.strip("|").split("|"):
                yield Text(number, "prose", cell.strip())
        elif line.strip() and not (line.startswith("    ") and not item and not paragraph):
            start = start if paragraph else number
            paragraph.append(line[item.end() :] if item else line.strip())


def python(source: str) -> Iterator[Text]:
    """Yield docstrings, and the strings that look like messages."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            expression = node.body[0]
            assert isinstance(expression, ast.Expr)
            constant = expression.value
            assert isinstance(constant, ast.Constant)
            assert isinstance(constant.value, str)
            docstrings.add(constant)
            yield from docstring(inspect.cleandoc(constant.value), constant.lineno)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or node in docstrings:
            continue
        if isinstance(node.value, str) and node.value.count(" ") >= 3:
            yield Text(node.lineno, "message", node.value)


def docstring(doc: str, first: int) -> Iterator[Text]:
    """Yield the paragraphs of a docstring; indented blocks are code or pictures."""
    paragraph: list[str] = []
    start, section, examples = 0, False, False
    for number, line in enumerate([*doc.splitlines(), ""], first):
        header = _SECTION.match(line)
        indent = len(line) - len(line.lstrip())
        entry = section and indent == 4 and re.match(r"\s+\**[\w.]+( \([^)]*\))?: ", line)
        item = re.match(r"\s*([-*+]|\d+\.)\s+", line)
        if (not line.strip() or header or entry or item) and paragraph:
            yield Text(start, "docstring", "\n".join(paragraph))
            paragraph = []
        if line.strip() and indent == 0:
            examples = line.startswith("Examples:")
            section = bool(header) and not examples
        literal = indent >= 2 and not section and not item and not paragraph
        text = line[len(header.group()) :] if header else line
        if text.strip() and not literal and not examples:
            start = start if paragraph else number
            paragraph.append(text[entry.end() :] if entry else text.strip().lstrip("-*+ "))


if __name__ == "__main__":
    sys.exit(main())
