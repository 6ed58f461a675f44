"""Write docs/reference/compatibility.md: the state of each public name of torch.distributed.

Run from the repository root: `make docs`. It compares with the installed torch (2.13), and does
nothing without torch. A test fails when the page is out of date, or when a signature differs
without a reason.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import unisono
from unisono.refused import INCIDENTAL, REFUSED, REFUSED_MODULES

PAGE = Path("docs/reference/compatibility.md")

HEAD = """\
# Compatibility with torch.distributed

Written by `tools/compatibility_page.py` from a comparison with the installed torch (2.13); do not
edit.

This page lists every public name of `torch.distributed` and
`torch.distributed.distributed_c10d`, and the private names that libraries use.
[From torch](../howto/from-torch.md) shows how a script moves.

These names take the same arguments, in the same order, with the same defaults:

{same}

These take more arguments, or differ as listed, or are *refused*: `unisono.NAME` raises
`UnsupportedError` with the reason, and `hasattr` is False.

**how** stands for the keywords `timeout` (seconds or timedelta), `algorithm` and `deterministic`
(reduce in the order of ranks, see [reductions](reductions.md)). The methods of a ProcessGroup also
take c10d's keywords (`tensors`, `opts`, `srcRank`, ...).

| names | status | additions, or reason |
| --- | --- | --- |
"""

PACKAGES_HEAD = """
## Modules of torch.distributed

| module below `torch.distributed` | below `unisono` |
| --- | --- |
"""

REFUSALS = "An import of any other module raises an ImportError with the reason:"

NEWER_HEAD = """
## Names of torch's main line

They were read from torch's source in 2026; a test cannot compare them with 2.13. The same here:
{same}.

| name | here |
| --- | --- |
"""

LAUNCHER_HEAD = """
## Launcher of torch.distributed

`unisono run` takes torchrun's [command line](../howto/run.md). torch's other classes for launches
have no counterpart.

| module of `torch.distributed` | here |
| --- | --- |
"""

# Private names that other libraries use.
PRIVATE = (
    "_all_gather_base",
    "_coalescing_manager",
    "_get_process_group_name",
    "_make_nccl_premul_sum",
    "_rank_not_in_group",
    "_reduce_scatter_base",
    "_StoreCollectives",
    "_time_estimator",
)

EXTRA = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)

# Differences in behaviour from torch, besides the arguments.
NOTES = {
    "DeviceMesh": "`mesh` is a NumPy array; a group has the grid's order; slices in any order",
    "P2POp": "`op` is unisono's isend or irecv",
    "ProcessGroup": "can be made directly, without a default group",
    "ReduceOp": "members are ReduceOp objects, equal and hashed by value",
    "Work": "the caller may drop it; can be awaited; `wait(timeout)` leaves the group usable",
    "_make_nccl_premul_sum": "for every backend",
    "all_gather_object": "arrays are not copied into the message",
    "all_reduce": "the same bits on every rank",
    "barrier": "`device_ids` is ignored",
    "breakpoint": "counts `skip` for each place in the source",
    "broadcast_object_list": "`device` is ignored",
    "gather": "any dtype",
    "get_backend": '"unisono" unless another backend was named',
    "get_node_local_rank": "also reads the variables of mpiexec, srun and others",
    "init_process_group": "without any launcher the world has one rank",
    "is_gloo_available": "True: the CPU engine serves that name",
    "monitored_barrier": "on every backend; every rank raises the error; the group stays usable",
    "new_subgroups": "`group_size` is by default the number of ranks of a host",
    "record_comm": "errors raised inside carry the name",
    "recv_object_list": "receives from any source, as torch's text promises",
    "reduce": "the other ranks' tensors keep their values",
    "rendezvous": "`timeout` in seconds or timedelta",
    "set_debug_level": "sets the level of the logger; checks are always on",
    "shrink_group": "on the CPU; after a rank was lost, too",
    "split_group": "on the CPU; no bound device needed",
    "supports_complex": "PRODUCT is defined, too",
}

# Names of torch's main line -> what is here; "" if the name is here.
NEWER = {
    **dict.fromkeys(
        (
            *("FlightRecorderHook", "HookOpName", "NanCheckHook", "PostHookArgs", "PreHookArgs"),
            *("ProcessGroup.register_abort_hook", "ProcessGroup.register_post_hook"),
            *("ProcessGroup.register_pre_hook", "_get_reconfigure_handle", "_reconfigure"),
            *("_supports_reconfigure", "gather_into_tensor", "gather_single"),
        ),
        "",
    ),
    "ProcessGroup.register_completion_hook": "`Work.on_end`, `Work.get_future`",
}

# Modules of torch.distributed that are here under the same path.
MODULES = {
    "algorithms.join": "`Join`, `Joinable`, `JoinHook`",
    "device_mesh": "`DeviceMesh`, `init_device_mesh`",
    "distributed_c10d": "all public names, and the private getters that libraries use",
    "elastic.multiprocessing.errors": "`record`, `ChildFailedError`",
    "elastic.timer": "`expires`, without a server",
    "launcher.api": "`LaunchConfig`, `elastic_launch`, `launch_agent`, on one host",
    "nn.functional": "collectives of torch tensors with gradients; averages have one, too",
    "rendezvous": "`rendezvous`, `register_rendezvous_handler`",
    "run": "`python -m unisono.run` is `unisono run`",
}

# Public names of torch's launcher: module -> (names, what is here).
ABSENT = "no counterpart"
LAUNCHER = {
    "launcher.api": (
        "LaunchConfig elastic_launch launch_agent",
        "the same on one host, as `unisono.launch(fn, nprocs, args)`; `unisono run` on several",
    ),
    "elastic.agent.server.api": (
        "WorkerSpec Worker WorkerState WorkerGroup RunResult ElasticAgent SimpleElasticAgent",
        ABSENT,
    ),
    "elastic.multiprocessing": (
        "start_processes MultiprocessContext PContext ProcessFailure RunProcsResult "
        "SignalException Std LogsDest LogsSpecs DefaultLogsSpecs SubprocessContext to_map",
        "`unisono.spawn(..., join=False)` returns a context; logs by `--log-dir`, `--tee`, "
        "`--redirects`",
    ),
    "elastic.multiprocessing.errors": (
        "ProcessFailure ChildFailedError record ErrorHandler get_error_handler",
        "`record`, `ChildFailedError`; not needed for tracebacks",
    ),
    "elastic.rendezvous": (
        "RendezvousClosedError RendezvousConnectionError RendezvousError "
        "RendezvousGracefulExitError RendezvousHandler RendezvousHandlerCreator "
        "RendezvousHandlerRegistry RendezvousInfo RendezvousParameters RendezvousStateError "
        "RendezvousStoreInfo RendezvousTimeoutError rendezvous_handler_registry",
        "`--rdzv-backend static`, `c10d`, `etcd`, `redis`, without plug-ins; `unisono.errors` has "
        "`RendezvousError`",
    ),
    "elastic.control_plane": ("worker_main", ABSENT),
}

# Members of torch's classes that unisono's classes lack, with the reason.
_BOXES = "for torch's compiler"
_ENUM = "there is no enumeration of C++ backends"
_GLOO = "Gloo's own; unisono's backend \"gloo\" has the environment variables of unisono"
LACKING = {
    "Backend": {"backend_type_map": _ENUM},
    "ProcessGroup": {
        **dict.fromkeys(
            ("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL"), _ENUM
        ),
        **dict.fromkeys(("boxed", "unbox"), _BOXES),
        "merge_remote_group": "no CPU backend of torch has it either",
        "monitored_barrier": "a function of the module",
        "name": "an attribute, the group's name: for the backend's use get_backend(group)",
        "split_group": "a function of the module",
        "use_pg_for_symm_mem_rendezvous": "symmetric memory is for GPUs",
    },
    "ProcessGroupGloo": {
        **dict.fromkeys(
            ("Device", "Options", "create_default_device", "create_device", "options"), _GLOO
        ),
        **dict.fromkeys(
            (
                *("allocate_tensor", "eager_connect_single_device", "mem_allocator"),
                *("memory_stats", "resume", "setUsePgForSymmMemRendezvous", "shrink"),
                *("supports_coalescing", "supports_shrinking", "supports_splitting"),
                *("supports_tensor_alloc", "supports_time_estimate", "suspend"),
            ),
            "the methods of torch's C++ backends",
        ),
        "monitored_barrier": "a function of the module",
        "name": "an attribute, the group's name: for the backend's use get_backend(group)",
    },
    "Work": {**dict.fromkeys(("boxed", "unbox"), _BOXES), "get_future_result": "NCCL only"},
}


class Entry(NamedTuple):
    """One row of the page."""

    name: str
    status: str
    text: str


def main() -> None:
    """Write the page, if torch is installed."""
    try:
        text = page()
    except ImportError:
        print(f"{PAGE} left as it is: torch is not installed")
        return
    PAGE.write_text(text, encoding="utf-8")


def page() -> str:
    """Return the page's text."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, status, text in entries():
        rows.setdefault((status, text), []).append(name)
    head = HEAD.replace("{same}", block(rows.pop(("same", ""))))
    table = "".join(
        f"| {quoted(names)} | {status} | {text} |\n" for (status, text), names in rows.items()
    )
    packages = "".join(f"| `{name}` | {text} |\n" for name, text in MODULES.items())
    refused = f"{REFUSALS}\n\n{block(sorted(REFUSED_MODULES))}"
    newer = "".join(f"| `{name}` | {text} |\n" for name, text in NEWER.items() if text)
    newer_head = NEWER_HEAD.format(same=quoted(name for name, text in NEWER.items() if not text))
    launcher = "".join(
        f"| `{name}` | {text} |\n" for name, (_, text) in LAUNCHER.items() if text != ABSENT
    )
    return (
        f"{head}{table}{filled(newer_head)}{newer}{PACKAGES_HEAD}{packages}\n{refused}\n"
        f"{LAUNCHER_HEAD}{launcher}"
    )


def quoted(names: Iterable[str]) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def block(names: Iterable[str]) -> str:
    """Return names as an indented block."""
    return textwrap.indent(textwrap.fill(" ".join(names), 96), "    ")


def filled(text: str) -> str:
    """Return text with its long lines broken."""
    return "\n".join(textwrap.fill(line, 100) for line in text.splitlines()) + "\n"


def entries() -> Iterator[Entry]:
    """Yield the state of each public name.

    Raises:
        ValueError: A name of torch is neither in unisono nor refused, or differs without a reason.
    """
    for name, theirs in sorted(names_of_torch().items()):
        if name == "reduce_op":
            yield Entry(name, "same", "deprecated in torch; here another name of ReduceOp")
            continue
        if name in REFUSED:
            yield Entry(name, "refused", REFUSED[name])
            continue
        if name not in unisono._HOME_OF:
            raise ValueError(f"torch.distributed.{name} is neither in unisono nor refused")
        more = [*extensions(name, getattr(unisono, name), theirs)]
        lacks = LACKING.get(name, {})
        if lacks:
            grouped: dict[str, list[str]] = {}
            for member, why in lacks.items():
                grouped.setdefault(why, []).append(member)
            more += [
                f"without `{', '.join(m)}` ({why})" if len(m) < 9 else f"without {len(m)} of {why}"
                for why, m in grouped.items()
            ]
        if name in NOTES:
            more.append(NOTES[name])
        yield Entry(name, "extended" if more else "same", sentences(more))


def sentences(notes: list[str]) -> str:
    """Join notes, and the parts of a note between semicolons, as sentences."""
    parts = "; ".join(notes).split("; ")
    return ". ".join(part[:1].upper() + part[1:] for part in parts)


def names_of_torch() -> dict[str, Any]:
    """Return the public names of torch.distributed, without names it imports for its own use."""
    import torch.distributed
    from torch.distributed import distributed_c10d

    names = {name for name in dir(torch.distributed) if not name.startswith("_")}
    names |= {*distributed_c10d.__all__, *PRIVATE}
    found = {
        name: getattr(torch.distributed, name, None) or getattr(distributed_c10d, name)
        for name in names - INCIDENTAL
    }
    return {name: value for name, value in found.items() if not _is_foreign(name, value)}


def _is_foreign(name: str, value: Any) -> bool:
    """Return whether a name is a sub-module that another module has imported."""
    # isinstance reads an attribute, for which torch's deprecated names warn.
    return issubclass(type(value), ModuleType) and name not in REFUSED


def extensions(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    """Yield the additional arguments of unisono's name.

    Raises:
        ValueError: There is another difference.
    """
    if inspect.isclass(theirs):
        lacks = missing_members(name, ours, theirs)
        if lacks != set(LACKING.get(name, {})):
            raise ValueError(f"{name} lacks {sorted(lacks)}, LACKING has another list")
    signatures = signature(ours), signature(theirs)
    if None in signatures:
        return
    mine, other = ({n: p for n, p in s.parameters.items() if n[0] != "_"} for s in signatures)
    for name, parameter in [*other.items()]:
        if parameter.kind is parameter.VAR_KEYWORD:
            del other[name]
    common = [n for n, p in mine.items() if n in other or p.kind not in EXTRA]
    if common != [*other]:
        raise ValueError(f"{name}: parameters are {common}, torch has {[*other]}")
    for parameter, expected in other.items():
        got = mine[parameter]
        if got.kind != expected.kind:
            raise ValueError(f"{name}: {got} is {got.kind}, torch has {expected.kind}")
        if got.default is not got.empty and expected.default is expected.empty:
            yield f"`{parameter}` may be left out"
        elif not same_default(got.default, expected.default):
            raise ValueError(f"{name}: {parameter}={got.default!r}, torch has {expected.default!r}")
    added = [f"**{n}**" if p.kind is p.VAR_KEYWORD else f"`{n}`" for n, p in mine.items()
             if n not in other]  # fmt: skip
    if added:
        yield f"takes {', '.join(added)}"


def signature(value: Any) -> inspect.Signature | None:
    """Return a signature, or None if `value` is not callable or is C++ without a signature."""
    if issubclass(type(value), ModuleType):
        value = value.rendezvous  # a package that can be called like the function
    if value is unisono.GroupMember or not callable(value):
        return None
    try:
        return inspect.signature(value)
    except (TypeError, ValueError):
        return None


def same_default(ours: Any, theirs: Any) -> bool:
    """Return whether two defaults are equal; reduce ops are compared by name."""
    if isinstance(ours, unisono.ReduceOp):
        return ours.name == str(theirs).rpartition(".")[2]
    return bool(ours == theirs)


def missing_members(name: str, ours: Any, theirs: Any) -> set[str]:
    """Return the public members and special methods that only torch's class has."""
    public = {member for member in dir(theirs) if member[:1] != "_" or member[:2] == "__"}
    # The last three are not needed, because pickling works without them.
    public -= {"__weakref__", "__entries", "__setstate__", "__copy__", "__deepcopy__"}
    missing = {member for member in public if not hasattr(ours, member)}
    return missing - {*getattr(ours, "__annotations__", {})} - ATTRIBUTES.get(name, set())


# Attributes of instances of unisono's classes; the class does not have them.
ATTRIBUTES = {
    "DebugLevel": {"name", "value"},
    "FileStore": {"path"},
    "ReduceOp": {"op"},
    "TCPStore": {"host", "port"},
}

if __name__ == "__main__":
    main()
