"""`unisono run --hosts`: the flags, and what each host is to run."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from unisono.errors import InvalidArgumentError, UnisonoError
from unisono.launcher.output.files import LogOptions
from unisono.launcher.spec import LaunchSpec
from unisono.launcher.ssh.hosts import HostsSpec
from unisono.workbench.cli.flags import add_flag, checked

# A host starts at once, or not at all.
_JOIN_S = "60"
# A name or an IPv6 address in brackets, a user before it, a number behind it.
_HOST = re.compile(r"(?!-)((?:[^\s:\[\]]+@)?(?:[^\s:\[\]]+|\[[^\s\]]+\]))(?::([1-9][0-9]*))?")


def parse_hosts(text: str) -> dict[str, int]:
    """Return the number of workers by host for "a:4,b:2"; 0 where none is given.

    Raises:
        InvalidArgumentError: It is no such text, or names a host twice.
    """
    found: dict[str, int] = {}
    for word in text.split(","):
        match = _HOST.fullmatch(word.strip())
        if match is None or match[1] in found:
            raise InvalidArgumentError(
                f"must be different hosts, HOST or HOST:WORKERS; got {text!r}"
            )
        found[match[1]] = int(match[2] or 0)
    return found


def add_hosts_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("several hosts, through ssh")
    add = partial(add_flag, group)
    add(
        "--hosts",
        type=checked(parse_hosts),
        default=(),
        metavar="HOST[:N],...",
        help="start N workers (-n) on each host, in this folder; ssh must need no password",
    )
    add(
        "--remote-python",
        default=sys.executable,
        metavar="PATH",
        help="Python on these hosts (the same path as here)",
    )
    about = "ssh and its options, as in 'ssh -p 2222'"
    add("--ssh", type=shlex.split, default="ssh", metavar="COMMAND", help=about)


def hosts_spec(
    options: argparse.Namespace, spec: LaunchSpec, run: Callable[[argparse.Namespace], int]
) -> HostsSpec:
    """Return the launch of `--hosts`; on each host `run` is called with changed options.

    Raises:
        InvalidArgumentError: Another flag decides how nodes meet.
    """
    static = options.rdzv_backend == "static" and not options.rdzv_endpoint
    if not static or options.nnodes != (1, 1) or options.node_rank or options.standalone:
        raise InvalidArgumentError(
            "--hosts decides how the nodes meet: leave out --nnodes, --node-rank, --standalone and "
            "--rdzv-*"
        )
    command = [word for word in options.command if word != "--"]
    is_script = not options.module and not options.no_python
    has_address = options.master_addr != options.parser.get_default("master_addr")
    return HostsSpec(
        hosts=tuple(options.hosts),
        call=partial(_call, options, spec.logs, run),
        script=command[0] if is_script else "",
        address=options.master_addr if has_address else "",
        port=options.master_port or 0,
        ssh=options.ssh,
        python=options.remote_python,
        signals=spec.signals,
        grace_s=spec.grace_s,
    )


def _call(
    options: argparse.Namespace,
    logs: LogOptions,
    run: Callable[[argparse.Namespace], int],
    number: int,
    address: str,
    port: int,
) -> Callable[[], int]:
    """Return what host `number` must call."""
    hosts: Mapping[str, int] = options.hosts
    own = vars(options) | {
        "hosts": (),
        "parser": None,
        "handler": None,
        "stdout": None,
        "nnodes": (len(hosts), len(hosts)),
        "node_rank": number,
        "master_addr": address,
        "master_port": port,
        "rdzv_conf": {"join_timeout": _JOIN_S, **(options.rdzv_conf or {})},
        "prefix": logs.default_prefix if options.prefix is None else options.prefix,
        "error_json": None,
        "doctor": options.doctor or (len(hosts) > 1 and "errors"),
    }
    if slots := list(hosts.values())[number]:
        own["nproc_per_node"] = (0, slots)
    return partial(_run_there, run, own)


def _run_there(run: Callable[[argparse.Namespace], int], own: dict[str, Any]) -> int:
    try:
        return run(argparse.Namespace(**own | {"parser": argparse.ArgumentParser("unisono run")}))
    except UnisonoError as error:
        print("unisono: error:", error, file=sys.stderr, flush=True)
        return 1


def describe_hosts(spec: HostsSpec, options: argparse.Namespace) -> str:
    """Return a text about the launch."""
    most = options.nproc_per_node[1]
    shown = [f"{host}: {count or most} workers" for host, count in options.hosts.items()]
    return "\n".join([*shown, f"command  {shlex.join(spec.ssh)} HOST {spec.python}"])
