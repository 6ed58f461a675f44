"""Write docs/reference/api/: one page for each subject of the public API.

Run from the repository root: `make docs`. The pages only name the objects; `make site` fills in the
docstrings. A public name without a page or without a docstring is an error: the site would lack it.
The source is read, not imported, so that neither torch nor the C++ engine is needed.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES_AT = ROOT / "docs/reference/api"


class Page(NamedTuple):
    """One page.

    Attributes:
        name: Name of its file.
        title: Its heading.
        intro: Its first sentence, also shown in the list of pages.
        more: Further sentences, with links.
        tier: The public module that exports the names.
        homes: Modules and packages below `unisono` whose names are on this page; all of the tier
            if empty.
    """

    name: str
    title: str
    intro: str
    more: str = ""
    tier: str = "unisono"
    homes: str = ""


PAGES = (
    Page(
        "groups", "Process groups",
        "Make, query and end process groups; `ProcessGroup` has every operation as a method.",
        homes="core.c10d.lifecycle core.c10d.new_groups core.c10d.queries core.groups",
    ),
    Page(
        "membership", "Ranks that come and go",
        "Continue without lost ranks, take newcomers in, and commit steps.",
        "[Membership](../../explanation/membership.md) has the protocol and what can be lost.",
        homes="beyond.membership core.c10d.reconfigure_by_handles beyond.state_sync beyond.steps",
    ),
    Page(
        "collectives", "Collectives",
        "Operations that all ranks of a group call together.",
        "In the examples, `rank` is `dist.get_rank()`. "
        "[Reductions](../reductions.md) defines the results, [Matrix](../matrix.md) the dtypes.",
        homes="core.c10d.collectives core.c10d.monitored_barrier core.base.types "
        "core.operations.keywords core.operations.reductions",
    ),
    Page(
        "point-to-point", "Point to point",
        "Messages between two ranks, matched by peer and tag.",
        homes="core.c10d.p2p core.transports.messages",
    ),
    Page(
        "objects", "Python objects",
        "Collectives and messages of Python objects, and their serialisation.",
        homes="core.c10d.objects",
    ),
    Page(
        "counters", "Counters and locks",
        "Numbers and locks that the ranks of a group share.",
        homes="beyond.counters",
    ),
    Page(
        "shared-arrays", "Shared arrays",
        "Arrays with one copy per host, which all its ranks read and write in place.",
        homes="beyond.shared_arrays",
    ),
    Page(
        "windows", "Windows",
        "Memory of each rank that the other ranks read, write and signal.",
        homes="beyond.windows",
    ),
    Page(
        "reshard", "Arrays from one sharding to another",
        "Plans that move arrays between shardings and groups of ranks, versions of weights, and "
        "checkpoints.",
        homes="beyond.reshard",
    ),
    Page(
        "neighbors", "Neighbours in a grid or graph",
        "Halo exchange between neighbours in a grid or graph of ranks.",
        "`examples/jacobi.py` uses them.",
        homes="beyond.neighbors",
    ),
    Page(
        "files", "Files of all ranks",
        "One file that all ranks of a group write or read together, for example a checkpoint.",
        "`examples/jacobi.py` writes and reads one.",
        homes="beyond.files",
    ),
    Page(
        "trace", "Recorded calls",
        "The last calls of a rank: where they were made, how long they took, and for which rank "
        "they waited.",
        "[Recorded calls](../../howto/trace.md) shows how to find a late or a missing rank.",
        homes="beyond.tracing core.recorder",
    ),
    Page(
        "hooks", "Hooks and checks of data",
        "Functions before and after the calls of a group; NaN, and replicas that differ.",
        homes="beyond.checks core.operations.hooks",
    ),
    Page(
        "work", "Works and futures",
        "Handles of calls with `async_op=True`.",
        homes="core.operations.work",
    ),
    Page(
        "stores", "Stores and rendezvous",
        "Key-value services, and the ways for ranks to meet.",
        "[Stores](../stores.md) compares the stores.",
        homes="core.stores core.rendezvous",
    ),
    Page(
        "launcher", "Launcher",
        "Start ranks from Python, and end them together.",
        "[Running scripts](../../howto/run.md) covers `unisono run`.",
        homes="launcher beyond.preemption",
    ),
    Page(
        "pool", "Ranks that stay, and tasks",
        "Processes that stay as the ranks of one group, and an executor for tasks.",
        "[Notebooks and tasks](../../howto/notebooks.md) shows both.",
        homes="beyond.pool",
    ),
    Page(
        "streams", "Streams and events",
        "CUDA's streams and events for CPU arrays.",
        "[Streams and events](../../explanation/streams.md) has the rules.",
        homes="core.base.threads.streams",
    ),
    Page(
        "device-mesh", "Device mesh",
        "Ranks in a grid, with a group for each row and column.",
        homes="core.c10d.device_mesh",
    ),
    Page(
        "backends", "Backends and debugging",
        "Backends and engines of this process, and the debug level.",
        homes="core.backends core.c10d.backend_names core.engines core.c10d.debug",
    ),
    Page(
        "torch-names", "Other names of torch",
        "Option objects and second names that scripts for torch.distributed use.",
        "[Compatibility](../compatibility.md) lists every name of torch.",
        homes="core.operations.c10d_methods core.c10d.other_names",
    ),
    Page(
        "errors", "Error classes",
        "Every error class of `unisono.errors`.",
        "[Errors](../errors.md) lists their effects on a group.",
        tier="unisono.errors",
    ),
    Page(
        "torch", "Plug-in for torch.distributed",
        "Importing `unisono.torch` registers the backend \"unisono\".",
        "[Under torch.distributed](../../howto/torch.md) shows its use.",
        tier="unisono.torch",
    ),
    Page(
        "parallel", "Data-parallel training",
        "`unisono.parallel` trains torch modules without torch.distributed.",
        "[Data-parallel training](../../howto/data-parallel.md) shows its use.",
        tier="unisono.parallel",
    ),
    Page(
        "ray", "Groups in Ray actors",
        "`unisono.ray` makes process groups in actors.",
        "[Ray](../../howto/ray.md) shows its use.",
        tier="unisono.ray",
    ),
    Page(
        "dask", "Groups on Dask workers",
        "`unisono.dask` calls a function on workers as the ranks of a group.",
        "[Dask](../../howto/dask.md) shows its use.",
        tier="unisono.dask",
    ),
    Page(
        "spark", "Groups in Spark tasks",
        "`unisono.spark` calls a function in barrier tasks as the ranks of a group.",
        "[Spark](../../howto/spark.md) shows its use.",
        tier="unisono.spark",
    ),
    Page(
        "lowlevel", "unisono.lowlevel",
        "The second public tier: names for authors of backends, transports and schedules.",
        tier="unisono.lowlevel",
    ),
    Page(
        "testing", "unisono.testing",
        "The third public tier: run ranks in a test, and check a store, transport or engine.",
        tier="unisono.testing",
    ),
)  # fmt: skip


INHERITED = {"unisono.ProcessGroup": "\n    options:\n      inherited_members: true"}
"""Classes whose pages show what they inherit."""


def main() -> None:
    """Write the pages; delete those of subjects that are no more."""
    PAGES_AT.mkdir(exist_ok=True)
    written = pages()
    for path in set(PAGES_AT.glob("*.md")) - {PAGES_AT / name for name in written}:
        path.unlink()
    for name, text in written.items():
        (PAGES_AT / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Return the text of each page by its file name.

    Raises:
        SystemExit: A public name has no page or no docstring; lists these names.
    """
    names = {page.name: names_of(page) for page in PAGES}
    if problems := [*missing(names), *undocumented(names)]:
        raise SystemExit("\n".join(["the API reference lacks:", *problems]))
    index = [
        "# API",
        "",
        "Written by `tools/api_pages.py` from the source; do not edit. `make site` fills in the",
        "docstrings. In Python, `help(unisono.all_reduce)` shows them.",
        "",
        *(f"- [{page.title}]({page.name}.md)" for page in PAGES),
        "",
    ]
    texts = {"index.md": "\n".join(index)}
    for page in PAGES:
        parts = [f"# {page.title}", f"{page.intro} {page.more}".strip()]
        paths = [_path(page.tier, name) for name in names[page.name]]
        parts += [f"::: {path}{INHERITED.get(path, '')}" for path in paths]
        texts[f"{page.name}.md"] = "\n\n".join(parts) + "\n"
    return texts


def _path(tier: str, name: str) -> str:
    """Return where to find the docstring: at the public name unless it leads elsewhere.

    It leads to a module if that has the same name, and to several signatures if the stub has some.
    """
    home = source_of(_home(tier, name), name)
    place = ROOT / "src" / tier / name
    is_module = home.endswith(f".{name}") or place.exists() or place.with_suffix(".py").exists()
    stub = (ROOT / "src" / tier / "__init__.pyi") if tier == "unisono" else None
    if is_module or (stub and name not in _imported(stub)):
        return f"{home}.{name}"
    return f"{tier}.{name}"


@functools.cache
def _imported(stub: Path) -> set[str]:
    """Return the names that a stub imports."""
    body = ast.parse(stub.read_text(encoding="utf-8")).body
    return {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}


def names_of(page: Page) -> list[str]:
    """Return the names of a page, in the order of the source."""
    if not page.homes:
        return sorted(exported(page.tier), key=lambda name: (name.lower(), name))
    prefixes = [f"{home}." for home in page.homes.split()]
    return [
        name
        for prefix in prefixes
        for home, names in _homes().items()
        if f"{home}.".startswith(prefix)
        for name in names
        if name[0] != "_"
    ]


def missing(names: dict[str, list[str]]) -> list[str]:
    """Return the public names that are on no page."""
    # torch has this error under the same name; it is on the page of errors.
    shown = {"unisono": {"QueueEmptyError"}}
    for page in PAGES:
        shown.setdefault(page.tier, set()).update(names[page.name])
    return [
        f"{tier}.{name}: its module is on no page of tools/api_pages.py"
        for tier, there in shown.items()
        for name in sorted(exported(tier) - there)
    ]


def undocumented(names: dict[str, list[str]]) -> list[str]:
    """Return the names without a docstring."""
    return [
        f"{page.tier}.{name}: no docstring"
        for page in PAGES
        for name in names[page.name]
        if not document(_home(page.tier, name), name)
    ]


def _home(tier: str, name: str) -> str:
    if tier == "unisono":
        return next(f"unisono.{home}" for home, names in _homes().items() if name in names)
    return tier


@functools.cache
def _homes() -> dict[str, list[str]]:
    """Return the names of the first tier by the modules that they are loaded from."""
    for node in tree("unisono").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            return {home: names.split() for home, names in ast.literal_eval(node.value).items()}
    raise LookupError("src/unisono/__init__.py has no _HOMES")


@functools.cache
def exported(module: str) -> set[str]:
    """Return the names in a module's `__all__`."""
    if module == "unisono":
        return {name for names in _homes().values() for name in names if name[0] != "_"}
    for node in tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise LookupError(f"{module} has no __all__")


def document(module: str, name: str) -> str | None:
    """Return the docstring of a name, wherever the module has it from."""
    body = _body(source_of(module, name))
    for node, after in zip(body, [*body[1:], None], strict=True):
        is_definition = isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        if is_definition and (found := ast.get_docstring(node)):  # an overload has none
            return found
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            return _text(after)
    return None


@functools.cache
def source_of(module: str, name: str) -> str:
    """Return the module that defines a name; `module` may import it from there."""
    for node in _body(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unisono"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return source_of(node.module, alias.name)
    return module


def _body(module: str) -> list[ast.stmt]:
    """Return the statements of a module; those of `if TYPE_CHECKING`, too."""
    body = tree(module).body
    return [*body, *(inner for node in body if isinstance(node, ast.If) for inner in node.body)]


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {ast.unparse(target) for target in targets}


def _text(node: ast.stmt | None) -> str | None:
    """Return a string that stands alone, as the docstring of an assignment does."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return None


@functools.cache
def tree(module: str) -> ast.Module:
    """Return the parsed source of a module."""
    path = ROOT.joinpath("src", *module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
