"""`unisono bench`: measure the operations of unisono and of other libraries."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from typing import Any

from unisono.errors import InvalidArgumentError
from unisono.workbench.bench.algorithms import HELP, named
from unisono.workbench.bench.plan import (
    ALL,
    DTYPES,
    OPS,
    PEERS,
    REDOPS,
    BenchPlan,
    LoopPlan,
    SizeRange,
)
from unisono.workbench.cli.flags import (
    add_algorithms,
    add_json,
    add_parser,
    add_picture,
    add_ranks,
    add_sizes,
    check_output,
    check_writable,
    non_negative,
    operation,
    positive,
    seconds,
    write_json,
)

_DESCRIPTION = """\
Measure operations over a range of sizes, with nccl-tests' flags, columns and bandwidths.

time is the time of a call: the mean over a loop on the slowest rank, and of that the median over
rounds. algbw = size / time. busbw = algbw x a factor of the operation, to compare with the
bandwidth of the hardware. size is that of the array, or of all ranks' blocks together. sendrecv is
a ping-pong, and its time half a round trip. Results are checked (#wrong).

With --peer another library is called in the same processes, on the same arrays, alternating with
unisono, so that both run under the same conditions. The column after its time is unisono's time
divided by that time (below 1: unisono is faster). With several MPI libraries there is a set of
processes for each, and the sets take turns. The column time is then that of all sets, and a ratio
that of the peer's set."""

_REDOPS = (*REDOPS, ALL)
_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command `bench`."""
    summary = "measure operations, beside other libraries"
    parser = add_parser(commands, "bench", summary, _DESCRIPTION, _bench, algorithms=True)
    add = parser.add_argument
    names = [*OPS, "all", "store"]
    meaning = ", ".join(names[:-1])
    one = operation(names)
    several: Any = lambda text: ",".join(one(part.strip()) for part in text.split(","))  # noqa: E731
    add("ops", nargs="+", type=several, choices=_Joined(names), metavar="OP", help=meaning)
    # -o is nccl-tests' flag.
    add_ranks(parser, "ranks per host (2, or 1 with -t or -g)")
    calls = "the same, as in all commands; beside it, -t or -g: nccl-tests' --iters"
    add("-n", dest="number", type=positive, metavar="N", help=calls)
    hosts = "number of hosts, as network namespaces on this machine; needs root"
    add("--hosts", type=positive, default=0, metavar="N", help=hosts)
    _add_sizes(parser)
    _add_loop(parser)
    _add_nccl_tests(parser)
    add("--engine", choices=("native", "reference"), help="unisono's engine")
    add_algorithms(parser, f"one, or several that take turns, each a {HELP}", metavar="A,B")
    peers = (
        "gloo or nccl (torch.distributed), nccl4py, deepspeed (its sum in shared memory), mpi "
        "(that of mpi4py, such as MPICH), intel-mpi, open-mpi, or copy (a plain copy of the bytes "
        "that a rank must get from others, at memory's limit); may be repeated"
    )
    how: dict[str, Any] = {"action": "append", "choices": PEERS, "default": [], "metavar": "NAME"}
    add("--peer", help=f"also measure {peers}", **how)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the arrays are (cpu)")
    add_json(parser, text_too=True)
    add_picture(parser, "draw time and busbw over size (also -o FILE)", short=())
    limit = "limit per size (120)"
    add("--timeout", type=seconds, default=120.0, metavar="SECONDS", help=limit)


class _Joined(list[str]):
    """Choices of which a value has one, or several with commas."""

    def __contains__(self, text: object) -> bool:
        return all(list.__contains__(self, part) for part in str(text).split(","))


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes and types")
    add = sizes.add_argument
    step = sizes.add_mutually_exclusive_group()
    nbytes = add_sizes(sizes, "8", "64M", 2, step)
    step.add_argument(
        "-i", "--stepbytes", type=nbytes, default=0, metavar="STEP", help="size step instead"
    )
    types = [*DTYPES, *_ALIASES, ALL]
    meaning = f"{', '.join(types)} (float32); bfloat16 needs ml_dtypes"
    names = ("-d", "--datatype", "--dtype")
    add(*names, choices=types, default="float32", metavar="TYPE", help=meaning)
    meaning = f"reduce op (sum): {', '.join(_REDOPS)}"
    how: dict[str, Any] = {
        "type": _redop_or_file,
        "action": _RedopOrFile,
        "default": "sum",
        "metavar": "OP",
    }
    add("-o", "--op", help=meaning, **how)
    add("-r", "--root", type=non_negative, default=0, metavar="ROOT", help="root rank (0)")


def _redop_or_file(text: str) -> str:
    if text in _REDOPS or "." in text:
        return text
    known = ", ".join(_REDOPS)
    raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {known})")


class _RedopOrFile(argparse.Action):
    """Take nccl-tests' reduce op, or, as the flag of other commands, the file of a picture."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, "op" if values in _REDOPS else "output", values)


def _add_loop(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("measuring").add_argument
    calls = "calls per round; 0 (the default): a number that takes about 5 ms"
    add("--iters", type=non_negative, default=0, metavar="ITERS", help=calls)
    calls = "calls before each round (1)"
    add("-w", "--warmup_iters", type=non_negative, default=1, metavar="WARMUP", help=calls)
    add("--rounds", type=positive, default=15, metavar="N", help="rounds per size (15)")
    load = "busy processes beside the ranks, to measure on a machine with other work (0)"
    add("--load", type=non_negative, default=0, metavar="N", help=load)
    add("--bind", action="store_true", help="bind each rank, of all libraries, to a core")
    add("-c", "--check", choices=("0", "1"), default="1", help="check results (1)")


def _add_nccl_tests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("for command lines of nccl-tests").add_argument
    more = "there; here the ranks per host are N times as many processes (1)"
    for names, meaning in (
        (("-t", "--nthreads"), "threads"),
        (("-g", "--ngpus"), "GPUs of each thread"),
    ):
        add(*names, type=positive, metavar="N", help=f"{meaning} {more}")
    start = "no effect: the ranks are processes, which start at the same time"
    add("-p", "--parallel_init", choices=("0", "1"), default="0", help=start)
    block = "no effect: a call on the CPU ends before the next begins"
    add("-z", "--blocking", choices=("0", "1"), default="0", help=block)


def _has_ranks(options: argparse.Namespace) -> bool:
    """Whether a flag besides -n sets the ranks, so that -n is that of nccl-tests."""
    return bool(options.ranks or options.nthreads or options.ngpus)


def _notes(options: argparse.Namespace, plan: BenchPlan) -> list[str]:
    """Return what the flags of nccl-tests mean here, if that is not what they mean there."""
    found = [note] if (note := plan.sizes.note()) else []
    if options.number:
        ranks = f"{options.number} ranks; --iters sets the calls per round"
        calls = "calls per round, as in nccl-tests: another flag sets the ranks"
        found.append(f"-n {options.number}: {calls if _has_ranks(options) else ranks}")
    if (options.nthreads or 1) * (options.ngpus or 1) > 1:
        found.append(
            f"-t {options.nthreads or 1} -g {options.ngpus or 1}: {plan.nprocs} ranks, each a "
            "process of its own; unisono has no ranks that are threads of one process"
        )
    if options.parallel_init == "1":
        found.append("-p 1: no effect; the ranks are processes, which start at the same time")
    if options.blocking == "1":
        where = "the GPU is awaited after each loop" if plan.device == "cuda" else "calls block"
        found.append(f"-z 1: no effect; {where} in any case")
    if options.datatype == ALL and "bfloat16" not in plan.dtype:
        found.append("-d all: without bfloat16, which needs the package ml_dtypes")
    return found


def _bench(options: argparse.Namespace) -> int:
    options.ops = ",".join(options.ops).split(",")  # each may be several
    if "store" in options.ops:
        raise InvalidArgumentError(
            "bench store is not part of the package: run benchmarks/store.py of the repository"
        )
    # These modules import NumPy, which `unisono run`, with the same parser, must not load.
    from unisono.workbench.bench.launch import check_installed, run_ranks
    from unisono.workbench.bench.report import ReportTable, document

    plan = _plan(options)
    if options.output and ALL in (options.datatype, options.op):
        raise InvalidArgumentError("--plot draws one type and one reduce op, not -d all or -o all")
    wanted = {
        **dict.fromkeys(options.peer, True),
        "cuda": plan.device == "cuda",
        "bfloat16": "bfloat16" in plan.dtype,
    }
    for feature in (name for name, is_wanted in wanted.items() if is_wanted):
        check_installed(feature)
    if options.output:
        check_output("bench", options.output)
    if options.json not in (None, "-"):
        check_writable(options.json)
    table = ReportTable(plan)
    for note in _notes(options, plan):
        table.take({"kind": "note", "text": note})
    for message in run_ranks(plan):
        table.take(message)
    table.end()
    result = document(plan, table, sys.argv[1:])
    write_json(options, _as_text(result))
    if options.output:
        from unisono.workbench.bench.plot import plot

        plot(result, options.output)
    own = [name for name in ("unisono", *plan.peers) if name not in PEERS]
    found = [row["results"][name] for row in table.rows for name in own]
    return 1 if any(result and result["wrong"] for result in found) else 0


def _as_text(result: dict[str, Any]) -> str:
    """Return JSON with a line per key and per row, so that two runs can be compared."""
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in result.items() if k != "rows"]
    return "{\n" + ",\n".join([*lines, f'"rows": [\n  {rows}\n]']) + "\n}\n"


def _plan(options: argparse.Namespace) -> BenchPlan:
    names = options.ops
    ops = tuple(OPS) if "all" in names else tuple(dict.fromkeys(names))
    share = (options.nthreads or 1) * (options.ngpus or 1)
    iters, ranks = options.iters, options.ranks
    if options.number and not _has_ranks(options):
        ranks = options.number
    elif options.number and options.iters:
        raise InvalidArgumentError(
            f"-n {options.number} --iters {options.iters}: both are the calls per round, because "
            "another flag sets the ranks, as in nccl-tests"
        )
    elif options.number:
        iters = options.number
    per_host = (ranks or (2 if share == 1 else 1)) * share
    nprocs = per_host * (options.hosts or 1)
    dtypes = _ALIASES.get(options.datatype, options.datatype)
    if dtypes == ALL:
        has_bfloat16 = importlib.util.find_spec("ml_dtypes") is not None
        dtypes = ",".join(name for name in DTYPES if has_bfloat16 or name != "bfloat16")
    if names == ["all"] and nprocs == 1:
        ops = tuple(op for op in ops if op != "sendrecv")
    algorithms = list(dict.fromkeys((options.algorithm or "").split(",")))
    if options.algorithm:
        from unisono.core.schedules.registry import entry

        for op in ops:
            for text in algorithms if op != "sendrecv" else ():
                entry(op, named(op, text))
    return BenchPlan(
        ops=ops,
        nprocs=nprocs,
        hosts=options.hosts,
        sizes=SizeRange(options.minbytes, options.maxbytes, options.stepfactor, options.stepbytes),
        loop=LoopPlan(
            iters=iters,
            warmup=options.warmup_iters,
            rounds=options.rounds,
            check=options.check == "1",
            timeout_s=options.timeout,
            load=options.load,
            bind=options.bind,
        ),
        dtype=dtypes,
        redop=",".join(REDOPS) if options.op == ALL else options.op,
        root=options.root,
        engine=options.engine,
        algorithm=algorithms[0] or None,
        peers=(*algorithms[1:], *dict.fromkeys(options.peer)),
        device=options.device,
    )
