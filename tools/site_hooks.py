"""Hooks of mkdocs for `make site`: the navigation, and pages of the repository outside docs.

Links in the documents are links of the repository. A link from docs to README.md or to an example
leaves docs; such a file becomes a page of the site, too. So every link works in both places.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import api_pages

ROOT = Path(__file__).parents[1]

# Folders of docs, in the order of the navigation.
SECTIONS = {
    "tutorial": "Tutorial",
    "howto": "How-to",
    "reference": "Reference",
    "explanation": "Explanation",
    "decisions": "Decisions",
    "lab": "Lab",
}

# Pages outside docs, and their places on the site.
PROJECT = {
    "README.md": "project/readme.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
_NAMES = {page: name for name, page in PROJECT.items()}

_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(\s*([^)#\s]+)(#[^)\s]*)?\)")
_FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_OUTPUT = re.compile(r'<div class="language-text .*?</pre>', re.DOTALL)
_COLUMNS = re.compile(r"\S( {2,}\S+){2}")
_COPIED = {".gz", ".json", ".png", ".svg"}  # other files become pages
_LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml"}


@event_priority(-50)
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Check the pages of the API.

    Raises:
        SystemExit: A public name lacks a page or a docstring, or `make docs` was not run.
    """
    stale = [
        name
        for name, text in api_pages.pages().items()
        if (api_pages.PAGES_AT / name).read_text(encoding="utf-8") != text
    ]
    if stale:
        raise SystemExit(f"run `make docs`: docs/reference/api is older than {', '.join(stale)}")
    config.site_name += f" {version()}"
    # Instead of the script that the offline plugin loads from another site.
    config.extra["polyfills"] = ["assets/offline.js"]
    return config


def version() -> str:
    """Return the version of unisono."""
    source = (ROOT / "src/unisono/__init__.py").read_text(encoding="utf-8")
    [found] = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    return str(found)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that documents link to, and make the navigation."""
    taken = set()

    def take(name: str) -> None:
        """Add a file or folder outside docs, and the files that it links to."""
        if name in taken:
            return
        taken.add(name)
        if Path(name).suffix in _COPIED:
            file = File.generated(config, page_of(name), abs_src_path=str(ROOT / name))
            files.append(file)
            return
        text = shown(name)
        files.append(File.generated(config, page_of(name), content=text))
        for link in links(name, text):
            take(link)

    for name in PROJECT:
        take(name)
    for file in list(files.documentation_pages()):
        if file.generated_by is None:
            for link in links(f"docs/{file.src_uri}", file.content_string):
                take(link)
    config.nav = navigation(files)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the repository into links of the site."""
    here = page.file.src_uri
    if here == "index.md":
        # The site opens as the README does.
        markdown = opening() + markdown[markdown.index("\n## ") :]
    page.meta.setdefault("search", rank_in_search(here))

    def rewritten(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        found = resolve(source_of(here), target)
        if found is None:
            return match.group()
        link = posixpath.relpath(page_of(found), posixpath.dirname(here) or ".")
        return f"{text}({link}{anchor or ''})"

    parts = _FENCED.split(markdown)
    return "".join(p if p.startswith("```") else _LINK.sub(rewritten, p) for p in parts)


def rank_in_search(page: str) -> dict[str, object]:
    """Return what the search plugin reads: a function comes before pages that mention it."""
    tiers = {f"reference/api/{each.name}.md": each.tier for each in api_pages.PAGES}
    if page == "reference/api/groups.md":  # its methods have the names of functions
        return {"boost": 3}
    if page in tiers:
        return {"boost": 4 if tiers[page] == "unisono" else 2}
    # The site opens with the README, and reasons and measurements are for few readers.
    is_rare = page.startswith(("decisions/", "lab/"))
    return {"exclude": True} if page == PROJECT["README.md"] else {"boost": 0.5 if is_rare else 1}


def opening() -> str:
    """Return the README up to the end of its entrances, with links as of a page in docs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text[: text.index("\n## What works today")]
    return _LINK.sub(lambda found: f"{found[1]}(../{found[2]}{found[3] or ''})", text)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark tables of commands, which are scrolled; other output is wrapped.

    A page of the API that shows a module instead of the function of the same name is refused.
    """
    if "doc-symbol-heading doc-symbol-module" in html:
        raise SystemExit(f"{page.file.src_uri} shows a module: see _path in tools/api_pages.py")
    return _OUTPUT.sub(_marked, html)


def _marked(found: re.Match[str]) -> str:
    """Return a block of output, with a class if two lines have columns."""
    rows = [line for line in found[0].split("\n") if _COLUMNS.search(line)]
    return found[0].replace("language-text", "language-text columns", 1) if rows[1:] else found[0]


def links(name: str, text: str) -> list[str]:
    """Return the files and folders outside docs that a file links to."""
    prose = "" if Path(name).suffix in _LANGUAGES else _FENCED.sub("", text)
    found = (resolve(name, match[1]) for match in _LINK.findall(prose))
    return [link for link in found if link is not None and not link.startswith("docs/")]


def resolve(name: str, target: str) -> str | None:
    """Return the file of the repository that a link leads to, or None if there is none."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    if "://" in target or found.startswith("..") or not (ROOT / found).exists():
        return None
    if found.startswith("docs/") and (ROOT / found).is_dir():
        pages = sorted((ROOT / found).glob("*.md"), key=lambda page: page.name != "index.md")
        return pages[0].relative_to(ROOT).as_posix() if pages else None
    return found


def page_of(name: str) -> str:
    """Return the place on the site of a file of the repository."""
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if Path(name).suffix in {*_COPIED, ".md"}:
        return PROJECT.get(name) or f"source/{name}"
    return f"source/{name}.md"


def source_of(page: str) -> str:
    """Return the file of the repository that a page of the site shows."""
    if page.startswith("source/"):
        name = page.removeprefix("source/")
        return name if (ROOT / name).exists() else name.removesuffix(".md")
    return _NAMES.get(page) or f"docs/{page}"


def shown(name: str) -> str:
    """Return the Markdown of a page for a file or folder."""
    path = ROOT / name
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    if path.is_dir():
        inside = sorted(each.name for each in path.glob("*.*"))
        rows = "\n".join(f"- [{each}]({path.name}/{each})" for each in inside)
        return f"# {name}\n\n{rows}\n"
    if path.suffix == ".ipynb":
        return notebook(path)
    language = _LANGUAGES.get(path.suffix, "text")
    text = path.read_text(encoding="utf-8")
    return f"---\nsearch: {{exclude: true}}\n---\n\n# {name}\n\n````{language}\n{text}\n````\n"


def notebook(path: Path) -> str:
    """Return the Markdown of a notebook: its texts, its cells and the texts of their outputs."""
    parts = ["---\nsearch: {exclude: true}\n---\n"]
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(f"````python\n{source}\n````\n" if is_code else source + "\n")
        texts = [o.get("text") or o["data"]["text/plain"] for o in cell.get("outputs", [])]
        if texts:
            shown_text = "".join("".join(each).rstrip() + "\n" for each in texts)
            parts.append(f"````text\n{shown_text}````\n")
    return "\n".join(parts)


def navigation(files: Files) -> list[dict[str, object]]:
    """Return the pages by section, in the order in which the index links to them."""
    pages = [file.src_uri for file in files.documentation_pages() if file.generated_by is None]
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    linked = [match[1] for match in _LINK.findall(index)]
    order = {page: linked.index(page) if page in linked else len(linked) for page in pages}
    pages.sort(key=lambda page: (order[page], page))
    nav: list[dict[str, object]] = [{"Home": "index.md"}]
    for folder, title in SECTIONS.items():
        inside: list[object] = [page for page in pages if posixpath.dirname(page) == folder]
        if folder == "reference":
            api = [f"reference/api/{page.name}.md" for page in api_pages.PAGES]
            inside.append({"API": ["reference/api/index.md", *api]})
            inside += [page for page in pages if "/" not in page and page != "index.md"]
        if inside:
            nav.append({title: inside})
    nav.append({"Project": list(PROJECT.values())})
    return nav
