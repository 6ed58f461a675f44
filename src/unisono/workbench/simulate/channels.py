"""Channels: copies of an algorithm that run side by side, each with a part of the data, as in NCCL.

A channel of NCCL is a block of threads on each GPU. NCCL_MAX_NCHANNELS limits their number. Here
each channel of each rank is simulated as a rank of its own, and all share the rank's links. The
ranks of a host are in another order in each channel. So each channel enters and leaves a host
through other ranks, and uses other network interfaces.

Source: NCCL 2.30.7, src/graph/connect.cc: connectRings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from unisono.core.schedules.ir import Buf, IntArray, Op, Schedule
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate.networks import LinkGroup, LinkSpec, Network

# NCCL's rings and trees. It makes the other operations of single messages, over the interface of
# each rank.
CHANNELLED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


class Channels(Network):
    """A network of channels: channel c of rank r is rank r * channels + c.

    Args:
        network: The network of the ranks.
        channels: Channels per rank.
        spec: The link of each channel to its rank: the most that a channel can send.
    """

    flips = False

    def __init__(self, network: Network, channels: int, spec: LinkSpec) -> None:
        size = network.size * channels
        shared = [group._replace(own=False) for group in network.groups]
        own = LinkGroup("channel {} out", size, spec, own=True)
        period = network.period * channels
        super().__init__(size, [*shared, own], cut_through=network.cut_through, period=period)
        self.ranks, self.channels = network, channels

    def cuts(self) -> list[tuple[int, float]]:
        """Return those of the ranks, and each rank with its channels."""
        return [*self.ranks.cuts(), (1, self.channels * self.groups[-1].spec.gbps)]

    def routes(self, source: IntArray, target: IntArray) -> IntArray:
        """Return the channel's own link, then the links of the ranks."""
        links = self.ranks.routes(source // self.channels, target // self.channels)
        return np.concatenate([(self.first[-1] + source)[:, None], links], axis=1)


def in_channels(schedule: Schedule, channels: int, per_host: int) -> Schedule:
    """Return the schedule of all channels, for `Channels`.

    In channel c each place of a host is held by the rank that is c places higher; a root keeps its
    place, and the others of its host turn. The schedule is only to be simulated: each channel moves
    its part of the vector, or of each block.

    Raises:
        InvalidArgumentError: The collective has no channels, ranks post to all ranks, there is no
            channel, or the ranks do not fill the hosts.
    """
    p, name, collective = schedule.world_size, schedule.algorithm, schedule.collective
    # What all channels have together of INPUT, OUTPUT and SCRATCH; a block is a channel's own.
    chunks = [schedule.input_chunks, schedule.output_chunks, schedule.scratch_chunks]
    own = {"all_gather": Buf.INPUT, "reduce_scatter": Buf.OUTPUT}.get(collective)
    offset = np.array([0 if buf == own else each for buf, each in enumerate(chunks)])

    def checked(rows: IntArray) -> IntArray:
        posts = ((rows[:, 1] == Op.POST) & (rows[:, 2] < 0)).any()
        if collective not in CHANNELLED or posts or channels < 1 or p % per_host:
            raise InvalidArgumentError(
                f"{channels} channels of {collective} ({name}) on {p} ranks, {per_host} per "
                f"host: expected {', '.join(CHANNELLED[:-1])} or {CHANNELLED[-1]} without posts to "
                "all, whole hosts, and 1 channel or more"
            )
        return rows

    checked(schedule.steps(0, np.arange(p)))
    for k in range(1, schedule.stages):
        checked(schedule.steps(k, np.array([max(schedule.root, 0)])))

    def moved(ranks: IntArray, by: int) -> IntArray:
        within, root = ranks % per_host, schedule.root
        turned = (within + by) % per_host
        if root >= 0:
            after = (within - root) % per_host
            others = (after - 1 + by) % max(per_host - 1, 1) + 1
            near = (np.where(after == 0, 0, others) + root) % per_host
            turned = np.where(ranks // per_host == root // per_host, near, turned)
        return ranks - within + turned

    def exchange(k: int, ranks: IntArray) -> Iterable[IntArray]:
        for c in range(channels):
            mine = moved(ranks[ranks % channels == c] // channels, -c)
            rows = checked(schedule.steps(k, mine)).copy()
            for column in (0, 2):
                known = rows[:, column] >= 0
                rows[known, column] = moved(rows[known, column], c) * channels + c
            for buf, chunk in ((3, 4), (5, 6)):
                rows[:, chunk] += np.where(rows[:, chunk] < 0, 0, c * offset[rows[:, buf]])
            yield rows

    return replace(
        schedule, algorithm=f"{name}, {channels} channels", world_size=p * channels,
        exchange=exchange, before=_nothing, after=_nothing,
        root=schedule.root if schedule.root < 0 else schedule.root * channels,
        input_chunks=chunks[0] + (channels - 1) * int(offset[0]),
        output_chunks=chunks[1] + (channels - 1) * int(offset[1]),
        scratch_chunks=channels * chunks[2],
    )  # fmt: skip


def _nothing(ranks: IntArray) -> Iterable[IntArray]:
    # The steps of the exchange have the local steps, too.
    return ()
