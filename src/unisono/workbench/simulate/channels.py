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

    def routes(self, source: IntArray, target: IntArray) -> IntArray:
        """Return the channel's own link, then the links of the ranks."""
        links = self.ranks.routes(source // self.channels, target // self.channels)
        return np.concatenate([(self.first[-1] + source)[:, None], links], axis=1)


def in_channels(schedule: Schedule, channels: int, per_host: int) -> Schedule:
    """Return the schedule of all channels of an all_reduce, for `Channels`.

    In channel c each place of a host is held by the rank that is c places higher. The schedule is
    only to be simulated: each channel reduces its part of the vector.

    Raises:
        InvalidArgumentError: The collective is not all_reduce, ranks post to all ranks, there is no
            channel, or the ranks do not fill the hosts.
    """
    p, name = schedule.world_size, schedule.algorithm
    first = schedule.steps(0, np.arange(p))
    posts = ((first[:, 1] == Op.POST) & (first[:, 2] < 0)).any()
    if schedule.collective != "all_reduce" or posts or channels < 1 or p % per_host:
        raise InvalidArgumentError(
            f"{channels} channels of {schedule.collective} ({name}) on {p} ranks, {per_host} per "
            "host: expected all_reduce without posts to all, whole hosts, and 1 channel or more"
        )

    def moved(ranks: IntArray, by: int) -> IntArray:
        within = ranks % per_host
        return ranks - within + (within + by) % per_host

    def exchange(k: int, ranks: IntArray) -> Iterable[IntArray]:
        for c in range(channels):
            rows = schedule.steps(k, moved(ranks[ranks % channels == c] // channels, -c)).copy()
            for column in (0, 2):
                known = rows[:, column] >= 0
                rows[known, column] = moved(rows[known, column], c) * channels + c
            for buf, chunk in ((3, 4), (5, 6)):
                scratch = rows[:, buf] == Buf.SCRATCH
                chunks = np.where(scratch, schedule.scratch_chunks, schedule.output_chunks)
                rows[:, chunk] += np.where(rows[:, chunk] < 0, 0, c * chunks)
            yield rows

    return replace(
        schedule, algorithm=f"{name}, {channels} channels", world_size=p * channels,
        exchange=exchange, output_chunks=channels * schedule.output_chunks,
        scratch_chunks=channels * schedule.scratch_chunks, before=_nothing, after=_nothing,
    )  # fmt: skip


def _nothing(ranks: IntArray) -> Iterable[IntArray]:
    # The steps of the exchange have the local steps, too.
    return ()
