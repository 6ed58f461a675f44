"""From a store to a transport: publish this rank's address, wait for those of all ranks."""

from __future__ import annotations

import contextlib
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from unisono.core.base import config
from unisono.core.base.deadline import Deadline
from unisono.core.base.host import GUARD_HINT, is_importing_main
from unisono.core.base.log import get_logger
from unisono.core.base.net.unencrypted import check_unencrypted
from unisono.core.base.process_identity import Life, describe, life_of, new_user
from unisono.core.base.text import by_rank, name_ranks
from unisono.core.platform.machine import usable_cores
from unisono.core.schedules.choice.far import NEAR_US, far_apart, round_trip_class
from unisono.core.stores import Store
from unisono.core.stores.api import changed_too_often
from unisono.core.stores.prefix import innermost
from unisono.core.stores.tcp.client import RefusalGrace
from unisono.core.stores.tcp.handshake import TOKEN_HINT
from unisono.core.stores.tcp.refusals import forget_refused, may_refuse, refusal, refused_client
from unisono.core.transports.api import Transport, on_one_host
from unisono.core.transports.native_messages import NativeMessages
from unisono.core.transports.nodes import nodes_of, published
from unisono.core.transports.registry import make_transport
from unisono.core.transports.threads import sharers_of, threads_of, wanted_threads
from unisono.errors import (
    Context,
    RendezvousError,
    StoreError,
    StoreTimeoutError,
    UnisonoError,
    UnsupportedError,
)

_LOG = get_logger("transports")
_UNKNOWN = "-"
_OURS = ("tcp", "inproc")
_BETWEEN_HOSTS = re.compile(r"\+TLS-by-(token|certificate)$")

# Begins what a rank publishes that cannot listen: an error, not an address.
_FAILED = "! "

# How often ranks look for a refused host while they wait for other ranks.
_LOOK_S = 1.0

# How long a rank whose wait has timed out stays for ranks that came later and wait longer. This
# rank may host the store, and without the store they cannot name the missing ranks.
_STAY_S = 2.0

# How long the rank that hosts the store stays after a refusal. Ranks of its host that come later
# would wait until their time-out without the store.
_LATE_S = 5.0


def connect(
    store: Store,
    rank: int,
    world_size: int,
    deadline: Deadline,
    kind: str | None = None,
    host_of: Callable[[], str] = str,
    word: str = "",
) -> Transport:
    """Return this rank's transport once every rank has published its address.

    Args:
        store: Shared by exactly these ranks (a PrefixStore does that).
        rank: This rank.
        world_size: Number of ranks.
        deadline: For the slowest rank to come.
        kind: "inproc", "tcp", "auto" (inproc if the store cannot leave the process), or a name of
            `register_transport`; None: the value of UNISONO_TRANSPORT.
        host_of: Returns this rank's host id, equal on ranks that may share memory; see `host_id`.
            `Transport.hosts` holds the host ids of all ranks, "" for a rank without C++. The
            other ranks learn of its error.
        word: Text without spaces to publish; `Transport.words` holds those of all ranks.

    Raises:
        RendezvousError: Some ranks never came, or cannot listen; names them.
        UnsupportedError: Some ranks have the C++ engine, others not, or another version, or some
            have another transport, or one that does not encrypt although UNISONO_TLS asks for it.
    """
    addresses: list[str] = []
    try:
        wanted_threads()
        host, place, kind = host_of(), published(), kind or config.get("UNISONO_TRANSPORT")
        transport = make_transport(kind, store, rank, world_size, addresses.__getitem__)
    except Exception as error:
        # The other ranks need not wait for this rank, which waits until they know.
        what = error.what if isinstance(error, UnisonoError) else repr(error)
        line = what.partition("\n")[0]
        _LOG.error("rank %d cannot meet the other ranks: %s", rank, line)
        with contextlib.suppress(UnisonoError):
            _publish(store, rank, world_size, deadline, f"{_FAILED}{line}")
        raise
    try:
        # Without wires C++ reaches the memory of ranks, and of no process that hides it.
        is_reached = transport.wires is not None or config.get_flag("UNISONO_SHARED_MEMORY")
        is_native = "/" in host and world_size > 1 and transport.allows_cpp and is_reached
        messages, endpoint = NativeMessages.make(transport) if is_native else (None, "")
        if messages is not None:
            # Before the addresses are published: a faster rank may send before this rank returns.
            transport.messages = messages
        elif world_size > 1 or "/" not in host:
            # The others compare also the engine of another package, which may not need C++.
            endpoint += "".join(host.partition("/")[0].partition("+")[1:])
            host = ""
        trip = getattr(innermost(store), "round_trip_us", None)
        mine = f"{host} {place} {endpoint} {word} {_UNKNOWN if trip is None else trip} "
        protection = transport.protection and f"+{transport.protection}"
        mine += f"{transport.name}{protection}\t{transport.address}"
        number, texts = _publish(store, rank, world_size, deadline, mine)
        hosts, places, endpoints, words, trips, found = texts
        named = [text.split("\t", 1) for text in found]
        trips_us = tuple(None if trip == _UNKNOWN else int(trip) for trip in trips)
        _check_transports([n for n, _ in named], transport, is_near=on_one_host(hosts, trips_us))
        _check_engines(hosts, endpoints, rank)
        addresses += (address for _, address in named)
        transport.world_number = number
        transport.hosts = _placed(hosts)
        transport.nodes = nodes_of(transport.hosts, places)
        transport.words, transport.trips_us = tuple(words), trips_us
        transport.round_trip_us = round_trip_us(transport.hosts, transport.trips_us)
        if messages is not None:
            _introduce(messages, hosts, endpoints, transport)
        transport.watch_neighbours()
        if rank == 0:
            transport._show(store, addresses)
    except BaseException:
        transport.close()
        raise
    return transport


def _introduce(
    messages: NativeMessages, hosts: Sequence[str], endpoints: Sequence[str], transport: Transport
) -> None:
    """Tell C++ how to reach the other ranks, and how many threads a large call may have."""
    rank, size = transport.rank, transport.world_size
    near = [other == hosts[rank] for other in hosts]
    far = far_apart(size, transport.round_trip_us)
    pids = [int(endpoint.partition(":")[0]) for endpoint in endpoints]
    sharers = sharers_of(rank, hosts, pids)
    transport.is_crowded = sharers > usable_cores()
    messages.introduce(endpoints, near, crowded=transport.is_crowded, far=far)
    messages.make_team(threads_of(rank, hosts, sharers))


def _publish(
    store: Store, rank: int, world_size: int, deadline: Deadline, mine: str
) -> tuple[int, list[list[str]]]:
    """Publish 6 texts, separated by spaces; only the last may have spaces.

    Returns:
        The number of the world in this store, and for each text the texts of all ranks.
    """
    with _claimed(store, rank, world_size, deadline) as number:
        keys = [f"{number}/address/{other}" for other in range(world_size)]
        store.set(keys[rank], f"{world_size} {mine}")
        texts = [text.partition(" ")[2] for text in _gather(store, keys, rank, deadline)]
    failed = {other: text for other, text in enumerate(texts) if text.startswith(_FAILED)}
    if failed and rank not in failed:
        blamed, reasons = tuple(failed), "; ".join(text[len(_FAILED) :] for text in failed.values())
        raise RendezvousError(
            f"rank {rank} of {world_size} cannot meet {name_ranks(blamed)}: {reasons}",
            context=Context(rank=rank, world_size=world_size, peers=blamed),
            hint="look at the output of those ranks",
        )
    rows = [text.split(" ", 5) for text in texts]
    foreign = tuple(at for at, row in enumerate(rows) if "\t" not in "".join(row[5:]).split(" ")[0])
    if foreign and not failed:
        raise UnsupportedError(
            f"rank {rank} of {world_size} does not understand {name_ranks(foreign)}, whose version "
            "of unisono is another",
            context=Context(rank=rank, world_size=world_size, peers=foreign),
            hint="install the same unisono for all ranks",
        )
    return number, [] if failed else [list(column) for column in zip(*rows, strict=True)]


def _check_transports(names: Sequence[str], mine: Transport, *, is_near: bool) -> None:
    """Check that all ranks have transports of one name, and that it may leave the host."""
    if is_near:  # nothing goes to another host
        names = [_BETWEEN_HOSTS.sub("", name) for name in names]
    if len(set(names)) > 1:
        shown = by_rank(enumerate(names))
        raise UnsupportedError(
            f"the ranks of a world must have one transport, but they have {shown}",
            context=Context(rank=mine.rank, world_size=len(names)),
            hint="give all ranks the same UNISONO_TRANSPORT, UNISONO_TLS, UNISONO_TOKEN and "
            "CPUOptions.transport",
        )
    if not (is_near or mine.protection or mine.name in _OURS):
        what = f"what the transport {mine.name!r} sends between hosts"
        check_unencrypted(what, "use UNISONO_TRANSPORT=tcp", warns=mine.rank == 0)


def _check_engines(hosts: Sequence[str], endpoints: Sequence[str], rank: int) -> None:
    """Check that all ranks move their data in C++, in one version, or all in Python."""
    # The version in C++, "12+mpi", and the name in Python, where the reference engine has none.
    names = [end.partition("+")[2] for end in endpoints]
    kinds = [host.partition("/")[0] for host in hosts]
    if len(set(zip(kinds, names, strict=True))) > 1:
        reasons = [end.lstrip("+") for end in endpoints]
        engines = [
            f"C++ (version {kind})" if kind else f"Python{reason and f' ({reason})'}"
            for kind, reason in zip(kinds, reasons, strict=True)
        ]
        shown = by_rank(enumerate(engines))
        raise UnsupportedError(
            f"the ranks of a world must have one engine, but they have {shown}",
            context=Context(
                rank=rank,
                world_size=len(hosts),
                peers=tuple(at for at, kind in enumerate(kinds) if not kind),
            ),
            hint="unisono.engine_info() gives on each rank the reason for its engine; install the "
            "same unisono for all ranks, or give all of them UNISONO_ENGINE=reference",
        )


def round_trip_us(hosts: Sequence[str], trips_us: Sequence[int | None]) -> int:
    """Return the class of the longest round trip between the hosts of ranks; 0 if there is one.

    The ranks know their round trips to the store. The difference of two of them is a lower bound,
    and exact if the store is on one of the two hosts.

    Args:
        hosts: Host id of each rank.
        trips_us: Round trip to the store of each rank; None if it is unknown.
    """
    if len(set(hosts)) <= 1 or set(trips_us) == {0}:
        return 0
    # The shortest of a host: a rank may have been busy when it was measured.
    known: dict[str, int] = {}
    for host, trip_us in zip(hosts, trips_us, strict=True):
        if trip_us is not None:
            known[host] = min(trip_us, known.get(host, trip_us))
    if len(known) < len(set(hosts)):
        return NEAR_US
    return round_trip_class(max(known.values()) - min(known.values()))


def _placed(hosts: list[str]) -> tuple[str, ...]:
    """Return the host ids, replaced according to UNISONO_RANKS_PER_HOST."""
    per_host = int(config.get_float("UNISONO_RANKS_PER_HOST"))
    if not per_host:
        return tuple(hosts)
    return tuple(host and f"{host}/{rank // per_host}" for rank, host in enumerate(hosts))


@contextlib.contextmanager
def _claimed(store: Store, rank: int, world_size: int, deadline: Deadline) -> Iterator[int]:
    """Claim this rank while the ranks meet; yield the number of the world in this store.

    A rank counts the worlds in which it has met the others. The count is equal on all ranks, so it
    numbers the world. It separates the addresses from those of the world before, which a slower
    rank may not have deleted yet.

    Raises:
        RendezvousError: Another process has this rank.
        StoreTimeoutError: Other processes claim it again and again.
    """
    key, me = f"rank/{rank}", new_user()
    found, before = b"", 0
    while True:
        claim = f"{before + 1} {me}"
        if (answer := store.compare_set(key, found, claim)) == claim.encode():
            break
        if deadline.expired():
            raise changed_too_often(store, key, deadline)
        # A store answers with the expected value if the key was deleted.
        found = b"" if answer == found else answer
        if not found:
            before = 0
            continue
        number, _, holder = found.decode().partition(" ")
        before = int(number) - (1 if holder else 0)
        if holder and not _is_replaced(holder):
            raise RendezvousError(
                f"rank {rank} of {world_size} is {describe(holder)} already, so it cannot be "
                f"{describe(me)}",
                context=Context(rank=rank, world_size=world_size, peers=(rank,)),
                hint=GUARD_HINT
                if is_importing_main()
                else "give every process a rank of its own; if that process is dead, start again "
                "with a new store",
            )
    met = before
    try:
        yield before + 1
        met = before + 1
    finally:
        # The host of the store may have closed it already. Then it serves no later world.
        # A store of the user may have some operations only.
        with contextlib.suppress(StoreError, UnsupportedError):
            store.set(key, f"{met}")
            store.delete_key(f"{before + 1}/address/{rank}")


def _is_replaced(holder: str) -> bool:
    """Whether a process died while the ranks met, so that this process takes its place."""
    life = life_of(holder)
    # A restarted container has the host name of the earlier one, and another process namespace.
    return life is Life.DEAD or (life is Life.UNKNOWN and holder.split("~")[0] == platform.node())


def _gather(store: Store, keys: list[str], rank: int, deadline: Deadline) -> list[str]:
    world_size = len(keys)
    number = keys[0].partition("/")[0]
    try:
        # First, because rank 0 may know that some of the ranks do not exist.
        _wait(store, keys[:1], deadline)
        _check_world_size(store, store.get(keys[0]), 0, rank, world_size)
        _wait(store, keys, deadline)
    except StoreTimeoutError as error:
        missing = tuple(r for r in range(world_size) if not store.check([keys[r]]))
        context = Context(rank=rank, world_size=world_size, peers=missing)
        if client := refused_client(store):
            if getattr(innermost(store), "is_master", False):
                time.sleep(_LATE_S)
            absent = name_ranks(missing) if missing else "other ranks"
            raise RendezvousError(
                f"rank {rank} of {world_size} waits no longer for {absent}: the store refused "
                f"{client}, which is on another machine, because there is no token",
                context=context,
                hint=TOKEN_HINT,
            ) from None
        with contextlib.suppress(StoreError, UnsupportedError):
            store.barrier(f"{number}/gave up", world_size - len(missing), _STAY_S)
        names = (", ".join(map(str, missing)) or "none now") + refusal(store)
        raise RendezvousError(
            f"rank {rank} of {world_size} waited {deadline.timeout_s:g} s for ranks that never "
            f"came: {names}",
            context=context,
            hint="look at the logs of those ranks; raise timeout= if they are only slow",
        ) from error
    values = store.multi_get(keys)
    for other, value in enumerate(values):
        _check_world_size(store, value, other, rank, world_size)
    if rank == 0:
        forget_refused(store)
    # No rank returns before all ranks have read, because the host of the store may close it then.
    with contextlib.suppress(UnsupportedError):
        store.barrier(f"{number}/connected", world_size, deadline.remaining())
    return [value.decode() for value in values]


def _wait(store: Store, keys: list[str], deadline: Deadline) -> None:
    """Wait for keys, but not for a host that the store of the job has refused.

    Raises:
        StoreTimeoutError: The deadline has passed, or the store has refused a host.
    """
    limit_s = 0.0 if may_refuse(store) else deadline.remaining()
    grace = RefusalGrace()
    while True:
        try:
            return store.wait(keys, limit_s)
        except StoreTimeoutError:
            if deadline.expired() or grace.over(partial(refused_client, store)):
                raise
        limit_s = min(_LOOK_S, deadline.remaining())


def _check_world_size(
    store: Store, published: bytes, other: int, rank: int, world_size: int
) -> None:
    there = int(published.partition(b" ")[0])
    if there != world_size:
        # The other rank must read what this rank has published before this rank deletes it.
        with contextlib.suppress(StoreError, UnsupportedError):
            store.barrier("disagree", 2, _STAY_S)
        raise RendezvousError(
            f"rank {rank} has world_size={world_size}, rank {other} has world_size={there}",
            context=Context(rank=rank, world_size=world_size, peers=(other,)),
            hint="give all ranks the same world_size",
        )
