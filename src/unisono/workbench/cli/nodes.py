"""The flags about nodes, rendezvous and restarts, of `unisono run` and `unisono doctor`."""

from __future__ import annotations

import argparse
import glob
import re
from functools import partial
from typing import Any

from unisono.core.base.config import environ
from unisono.core.platform.machine import usable_cores
from unisono.core.rendezvous.agents.member import Timing
from unisono.core.rendezvous.agents.state import JobLimits
from unisono.core.rendezvous.endpoint import parse_endpoint
from unisono.errors import InvalidArgumentError, RendezvousError
from unisono.launcher.spec import NodeMeeting
from unisono.workbench.cli.flags import add_flag, non_negative, seconds

_SERVICES = ("etcd", "redis")
_BACKENDS = ("static", "c10d", *_SERVICES)
# torchrun has two rendezvous over etcd, which differ in its code only.
_OTHER_NAMES = {"etcd-v2": "etcd"}
# torchrun's names for the certificates and the key of a secured etcd.
_SECRETS = {"cacert": "ca_cert", "ca_cert": "ca_cert", "cert": "cert_cert", "key": "cert_key"}
_BEATS = 10

_CONF = {
    "join_timeout": "seconds to wait for the job's nodes (600)",
    "last_call_timeout": "seconds to wait for more nodes than MIN (30)",
    "close_timeout": "seconds the store's host serves the other nodes after the end (30)",
    "keep_alive_interval": "seconds between heartbeats (1)",
    "keep_alive_max_attempt": "missed heartbeats after which a node counts as lost (10)",
    "is_host": "1: serve the store here, 0: do not; otherwise the first agent on its host does",
    "store_type": "tcp, or file: --rdzv-endpoint is then a path that all nodes share",
    "read_timeout": "no effect; accepted because torchrun has it",
    "heartbeat_timeout": "no effect; accepted because torchrun has it",
    "timeout": "no effect; accepted because torchrun has it",
    "rank": "as --node-rank",
}
_ETCD_CONF = re.compile("protocol|key|(ssl_)?cert|ssl_cert_key|ca_?cert|etcd_prefix")


def add_count_flag(
    parser: argparse.ArgumentParser, meaning: str, *, may_vary: bool = False
) -> None:
    """Add the flag for the number of workers on this node; `may_vary`: a pair, also MIN:MAX."""
    add_flag(
        parser,
        "-n",
        "--nproc-per-node",
        type=_workers if may_vary else workers_per_node,
        default="1",
        metavar="N|MIN:MAX|cpu|gpu|auto" if may_vary else "N|cpu|gpu|auto",
        help=f"{meaning}; also -np, --ranks",
    )
    how: dict[str, Any] = {
        "default": argparse.SUPPRESS,
        "help": argparse.SUPPRESS,
        "dest": "nproc_per_node",
    }
    parser.add_argument("-np", "--ranks", type=_workers if may_vary else workers_per_node, **how)


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; `node_options` reads them."""
    group = parser.add_argument_group("several nodes, restarts")
    add = partial(add_flag, group)
    add("--standalone", action="store_true", help="this host only, without a rendezvous")
    add("--nnodes", type=_nodes, default="1", metavar="N|MIN:MAX", help="nodes (1)")
    add(
        "--node-rank",
        type=non_negative,
        default=0,
        metavar="N",
        help="this node's number, with --rdzv-backend static (0)",
    )
    add("--master-addr", default="127.0.0.1", metavar="HOST", help="host of node 0")
    add(
        "--master-port",
        type=non_negative,
        metavar="PORT",
        help="port of the store on node 0 (29500; any free one with a single node)",
    )
    add(
        "--rdzv-backend",
        type=lambda name: _OTHER_NAMES.get(name, name),
        default="static",
        metavar="NAME",
        help="how nodes meet: static (fixed --node-rank), c10d (in the order in which they come), "
        "etcd or redis (like c10d, in a service that outlives every node); etcd-v2 is etcd",
    )
    add("--rdzv-endpoint", default="", metavar="HOST:PORT", help="where they meet")
    add("--rdzv-id", metavar="NAME", help="name of the job")
    add(
        "--rdzv-conf",
        type=_conf,
        default="",
        metavar="KEY=VALUE,...",
        help="; ".join(f"{key}: {meaning}" for key, meaning in _CONF.items())
        + "; another key: a warning, and no effect",
    )
    add("--local-addr", metavar="HOST", help="this node's address")
    _add_restart_flags(group)


def _add_restart_flags(group: Any) -> None:
    add = partial(add_flag, group)
    add(
        "--max-restarts",
        type=non_negative,
        default=0,
        metavar="N",
        help="number of restarts of the whole job that failures of workers may cause (0)",
    )
    add(
        "--restart",
        choices=("all", "worker"),
        default="all",
        help="after a failure restart all workers (all), or only the failed one, which joins the "
        "others when they call reconfigure() (worker); --max-restarts counts both",
    )
    add(
        "--monitor-interval",
        type=seconds,
        default=0.1,
        metavar="SECONDS",
        help="pause between checks of the other nodes (0.1); ends of workers are detected at once",
    )
    add("--role", default="default", metavar="NAME", help="the workers' role")


def workers_per_node(text: str) -> int:
    """Return the number for "N", "cpu", "gpu" or "auto" (GPUs if there are any, else CPUs)."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text not in ("cpu", "gpu", "auto"):
        raise argparse.ArgumentTypeError(
            f"must be a number of at least 1, cpu, gpu or auto; got {text!r}"
        )
    gpus = 0 if text == "cpu" else _count_gpus()
    if gpus:
        return gpus
    if text == "gpu":
        raise argparse.ArgumentTypeError("no GPU can be seen on this host")
    return usable_cores()


def _workers(text: str) -> tuple[int, int]:
    """Return (MIN, MAX) for "MIN:MAX", and (0, N) for a number of workers."""
    low, colon, high = text.rpartition(":")
    most = workers_per_node(high)
    least = workers_per_node(low) if colon else 0
    if least > most:
        raise argparse.ArgumentTypeError(f"needs MIN <= MAX, got {text!r}")
    return least, most


def _count_gpus() -> int:
    visible = environ().get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def _nodes(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[0-9]+(:[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"must be N or MIN:MAX, got {text!r}")
    numbers = [int(part) for part in text.split(":")]
    low, high = numbers[0], numbers[-1]
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"needs 1 <= MIN <= MAX, got {text!r}")
    return low, high


def _conf(text: str) -> dict[str, str]:
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (word.strip() for word in part.partition("="))
        if not key or not value:
            raise argparse.ArgumentTypeError(f"{part!r} is not KEY=VALUE")
        found[key] = value
    return found


def unknown_conf(options: argparse.Namespace) -> str:
    """Return a warning about the keys of --rdzv-conf that have no effect, or ""."""
    keys = [key for key in options.rdzv_conf if key not in _CONF and not _ETCD_CONF.fullmatch(key)]
    named = f"unknown key{'s' if len(keys) > 1 else ''} {', '.join(map(repr, keys))}"
    return f"--rdzv-conf: {named} without effect (known: {', '.join(_CONF)})" if keys else ""


def node_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a LaunchSpec that the flags of `add_node_flags` decide.

    Raises:
        InvalidArgumentError: Flags contradict each other, or the backend is unknown.
    """
    low, high = options.nnodes
    if options.standalone and high > 1:
        raise InvalidArgumentError(f"--standalone is for one node, but --nnodes is {low}:{high}")
    single = high == 1
    timing = Timing(poll_s=options.monitor_interval)
    # Check the flags about the rendezvous even if this is the only node.
    meeting = NodeMeeting() if options.standalone else _meeting(options, low, high)
    return {
        "limits": JobLimits(
            min_nodes=low,
            max_nodes=high,
            max_restarts=options.max_restarts,
            replaces=options.restart == "worker",
            durable=options.restart == "worker" and bool(meeting.service) and not single,
        ),
        "meeting": NodeMeeting(timing=timing) if single else meeting,
        "run_id": options.rdzv_id or (None if single else "none"),
        "role": options.role,
        "master_port": options.master_port or 0,
    }


def _meeting(options: argparse.Namespace, low: int, high: int) -> NodeMeeting:
    backend, conf = options.rdzv_backend, options.rdzv_conf
    if backend not in _BACKENDS:
        raise InvalidArgumentError(
            f"unknown --rdzv-backend {backend!r} (known: {', '.join(_BACKENDS)})"
        )
    common = {"timing": _timing(conf, options.monitor_interval), "address": options.local_addr}
    if backend == "static":
        return _static(options, low, high, common)
    if high == 1 and not options.rdzv_endpoint:
        return NodeMeeting(**common)
    if not options.rdzv_endpoint:
        raise InvalidArgumentError(
            f"--nnodes {low}:{high} --rdzv-backend {backend} needs --rdzv-endpoint HOST:PORT",
            hint="name the hosts of the service, HOST:PORT,HOST:PORT"
            if backend in _SERVICES
            else "name one of the job's hosts; the agent there serves the store",
        )
    if backend in _SERVICES:
        return NodeMeeting(endpoint=_service(options), **common)
    if conf.get("store_type", "tcp") == "file":
        return NodeMeeting(endpoint=options.rdzv_endpoint, **common)
    hosting = {"1": True, "true": True, "0": False, "false": False}.get(
        conf.get("is_host", "").lower()
    )
    endpoint = _endpoint(options.rdzv_endpoint, high)
    return NodeMeeting(endpoint=endpoint, hosting=hosting, **common)


def _service(options: argparse.Namespace) -> str:
    """Return the URL of the service in which the nodes meet."""
    conf, backend = options.rdzv_conf, options.rdzv_backend
    secured = "s" if backend == "etcd" and conf.get("protocol") == "https" else ""
    prefix = conf.get("etcd_prefix", "").strip("/")
    secrets = [f"{_SECRETS[key]}={value}" for key, value in conf.items() if key in _SECRETS]
    return f"{backend}{secured}://{options.rdzv_endpoint}/{prefix}?{'&'.join(secrets)}"


def _static(
    options: argparse.Namespace, low: int, high: int, common: dict[str, Any]
) -> NodeMeeting:
    if low != high:
        raise InvalidArgumentError(
            f"--nnodes {low}:{high} needs --rdzv-backend c10d: static is for a fixed number"
        )
    rank = _number(options.rdzv_conf, "rank", options.node_rank)
    if rank >= high:
        raise InvalidArgumentError(f"--node-rank must be 0 to {high - 1}, got {rank:g}")
    port = 29500 if options.master_port is None else options.master_port
    endpoint = (options.master_addr, port)
    if options.rdzv_endpoint:
        endpoint = _endpoint(options.rdzv_endpoint, high)
    return NodeMeeting(
        endpoint=_known_port(*endpoint, "--master-port", high),
        hosting=rank == 0,
        node_rank=int(rank),
        share_port=True,
        **common,
    )


def _endpoint(text: str, nodes: int) -> tuple[str, int]:
    try:
        return _known_port(*parse_endpoint(text), "--rdzv-endpoint", nodes)
    except RendezvousError as error:
        raise InvalidArgumentError(f"--rdzv-endpoint: {error.what}") from None


def _known_port(host: str, port: int, flag: str, nodes: int) -> tuple[str, int]:
    if port == 0 and nodes > 1:
        raise InvalidArgumentError(
            f"{flag}: port 0 means any free one, which {nodes} nodes cannot guess",
            hint="give all nodes the same number, or none: the default is torchrun's",
        )
    return host, port


def _timing(conf: dict[str, str], poll_s: float) -> Timing:
    beat_s = _number(conf, "keep_alive_interval", 1.0)
    if beat_s <= 0:
        raise InvalidArgumentError("--rdzv-conf: keep_alive_interval must be more than 0")
    return Timing(
        join_timeout_s=_number(conf, "join_timeout", 600.0),
        last_call_s=_number(conf, "last_call_timeout", 30.0),
        dead_after_s=beat_s * _number(conf, "keep_alive_max_attempt", _BEATS),
        poll_s=poll_s,
        beat_s=beat_s,
        close_s=_number(conf, "close_timeout", 30.0),
    )


def _number(conf: dict[str, str], key: str, default: float) -> float:
    if key not in conf:
        return default
    try:
        return seconds(conf[key])
    except argparse.ArgumentTypeError as error:
        raise InvalidArgumentError(f"--rdzv-conf: {key} {error}") from None
