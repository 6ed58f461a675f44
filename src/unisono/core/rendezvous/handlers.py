"""The three built-in rendezvous methods: env://, tcp:// and file://."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from unisono.core.base import config
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.net.interfaces import served_host
from unisono.core.base.net.sockets import format_address
from unisono.core.rendezvous.agents.worker_world import attempt_keys
from unisono.core.rendezvous.launchers import GIVEN, LAUNCHERS, LauncherPlace, find_place, job_of
from unisono.core.rendezvous.services import open_launched
from unisono.core.rendezvous.url import (
    check_port,
    host_and_port,
    once,
    parse_integer,
    parse_query,
    rank_and_size,
    ranks_of,
    warn_unknown,
)
from unisono.core.stores import FileStore, HashStore, PrefixStore, Store, TCPStore
from unisono.errors import Context, RendezvousError, StoreConnectionError, StoreTimeoutError

_RANKS = {"rank", "world_size"}
_Met = Iterator[tuple[Store, int, int]]
_WORLD = "unisono/world"
_PAUSE_S = 0.02

# (host, port, rank) -> the world for which this process last used that store as that rank.
_worlds: dict[tuple[str, int, int], bytes] = {}


def env_handler(url: str, timeout: Timeout) -> _Met:
    """Meet at MASTER_ADDR:MASTER_PORT as RANK of WORLD_SIZE; rank 0 runs the store.

    `rank` and `world_size` in the URL's query take precedence over the variables. If RANK and
    WORLD_SIZE are not set, the variables of another launcher are used (mpiexec, srun, ...). The
    ranks then meet without MASTER_ADDR and MASTER_PORT, too. With UNISONO_STORE the store is in the
    service of that URL.

    Raises:
        RendezvousError: A variable is missing or bad. The text names it and lists all four.

    Source: torch.distributed.rendezvous, torch 2.13.
    """
    query = parse_query(url)
    warn_unknown(url, query, _RANKS)
    environment = config.environ()
    place = None if query else find_place(environment)
    if place is not None and place.launcher is not LAUNCHERS[0]:
        yield from once("env://", _foreign_store(place, timeout), place.rank, place.world_size)
    rank = _from_query_or_variable(query, "rank", "RANK")
    world_size = _from_query_or_variable(query, "world_size", "WORLD_SIZE")
    rank, world_size = ranks_of(rank, world_size, "env:// rendezvous (RANK, WORLD_SIZE)")
    if url := config.get("UNISONO_STORE"):
        store: Store = open_launched(url, timeout)
    else:
        store = _tcp_store(*master(), rank, world_size, timeout)
    yield from once("env://", store, rank, world_size)


def tcp_handler(url: str, timeout: Timeout) -> _Met:
    """Meet at tcp://host:port?rank=&world_size=; rank 0 runs the store.

    Raises:
        RendezvousError: Host, port, rank or world_size is missing or bad.

    Source: torch.distributed.rendezvous, torch 2.13.
    """
    host, port = host_and_port(url)
    warn_unknown(url, parse_query(url), _RANKS)
    rank, world_size = rank_and_size(url, "tcp://")
    yield from once("tcp://", _tcp_store(host, port, rank, world_size, timeout), rank, world_size)


def file_handler(url: str, timeout: Timeout) -> _Met:
    """Meet in the file of file:///path?rank=&world_size=&run_id=, which every rank must reach.

    `run_id` separates a run from the previous run, whose file may still exist. A launcher that
    names its jobs (Slurm, Open MPI, `unisono run`) supplies the run id.

    Raises:
        RendezvousError: Path, rank or world_size is missing or bad.

    Source: torch.distributed.rendezvous, torch 2.13.
    """
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        # torch drops this part and opens another file than the user meant.
        raise RendezvousError(
            f"the URL {url!r} names the host {parts.netloc!r}; write file:///absolute/path"
        )
    if not parts.path:
        raise RendezvousError(f"the URL {url!r} has no path; write file:///absolute/path")
    rank, world_size = rank_and_size(url, "file://")
    query = parse_query(url)
    warn_unknown(url, query, _RANKS | {"run_id"})
    run_id = query.get("run_id") or job_of(config.environ())
    store = FileStore(parts.path, world_size, timeout=timeout, run_id=run_id)
    yield from once("file://", store, rank, world_size)


def _foreign_store(place: LauncherPlace, timeout: Timeout) -> Store:
    """Open the store of ranks whose launcher does not set the variables of env://."""
    if place.world_size == 1:
        return HashStore()
    environment = config.environ()
    if environment.get("MASTER_ADDR") and environment.get("MASTER_PORT"):
        return _tcp_store(*master(), place.rank, place.world_size, timeout)
    # Imported here because `unisono run` must start fast and does not need this module.
    from unisono.core.rendezvous.meeting import open_store

    return open_store(place, environment, timeout)


def master() -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT.

    Raises:
        RendezvousError: A variable is missing or bad.
    """
    host = _variable("MASTER_ADDR")
    return host, check_port(_integer_variable("MASTER_PORT"), "environment variable MASTER_PORT")


def attempt_prefix() -> str:
    """Return the prefix of this attempt's keys in the launcher's store; "" without such a store."""
    environment = config.environ()
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return attempt_keys(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _tcp_store(host: str, port: int, rank: int, world_size: int, timeout: Timeout) -> Store:
    """Open the store; rank 0 serves it, unless the launcher runs a server.

    torchrun's server is used by all attempts of a job. Each attempt has a prefix, so that restarted
    workers do not find the keys of earlier workers. A script may name another port than that of the
    launcher's server.
    """
    prefix = attempt_prefix()
    agent_has_store = bool(prefix) and config.environ().get("MASTER_PORT") == str(port)
    if rank == 0 and not agent_has_store:
        host = served_host(host)

    def connect(timeout: Timeout) -> TCPStore:
        return TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0 and not agent_has_store,
            timeout=timeout,
            # The users of the store wait for each rank by name. This option only counts ranks.
            wait_for_workers=False,
            multi_tenant=not agent_has_store,
        )

    if agent_has_store:
        return PrefixStore(prefix, connect(timeout), owns_store=True)
    if rank == 0:
        store = connect(timeout)
        store.set(_WORLD, uuid.uuid4().hex)
        return store
    return _store_of_next_world((host, port, rank), connect, timeout)


def _store_of_next_world(
    place: tuple[str, int, int], connect: Callable[[Timeout], TCPStore], timeout: Timeout
) -> TCPStore:
    """Connect to rank 0's store, but not to the store of the previous world, if that is still open.

    Raises:
        StoreConnectionError: Rank 0 did not open a store.
        RendezvousError: Rank 0 is still in the previous world.
    """
    deadline = Deadline(timeout)
    while True:
        store = connect(round(deadline.remaining(), 3))
        try:
            world = store.get(_WORLD, deadline.remaining())
            if world != _worlds.get(place):
                _worlds[place] = world
                store.set_timeout(timeout)
                return store
        except StoreConnectionError:
            pass  # the previous store was closed meanwhile
        except StoreTimeoutError as error:
            store.close()
            raise RendezvousError(
                f"rank {place[2]} waited {deadline.timeout_s:g} s for rank 0 at the store at "
                f"{format_address(*place[:2])}, which another process serves",
                context=Context(rank=place[2], peers=(0,)),
            ) from error
        except BaseException:
            store.close()
            raise
        store.close()
        if deadline.expired():
            raise RendezvousError(
                f"rank {place[2]} waited {deadline.timeout_s:g} s at "
                f"{format_address(*place[:2])} for rank 0, which did not leave the world before",
                context=Context(rank=place[2], peers=(0,)),
            )
        time.sleep(min(_PAUSE_S, deadline.remaining()))


def _from_query_or_variable(query: dict[str, str], name: str, variable: str) -> int:
    if name in query:
        return parse_integer(query[name], f"env:// rendezvous: {name}")
    return _integer_variable(variable)


def _integer_variable(name: str) -> int:
    return parse_integer(_variable(name), f"env:// rendezvous: environment variable {name}")


def _variable(name: str) -> str:
    environment = config.environ()
    if text := environment.get(name, ""):
        return text
    present = [f"{each}={environment[each]}" for each in GIVEN if environment.get(each)]
    missing = [each for each in GIVEN if not environment.get(each)]
    raise RendezvousError(
        f"env:// rendezvous: environment variable {name} expected, but not set "
        f"(set: {', '.join(present) or 'none'}; not set: {', '.join(missing)})",
        hint="start the script with `unisono run` or torchrun, or set the variables on every rank",
    )
