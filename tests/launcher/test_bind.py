"""Binding: shares of made-up machines, and what this one says about itself."""

import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import InvalidArgumentError
from unisono.launcher.ranges import format_ranges, parse_ranges
from unisono.launcher.workers.cpu_binding import MODES, Binding, HostCPUs

# Two NUMA nodes of four cores with two hardware threads each, as Linux numbers them.
BIG = HostCPUs([[[i, i + 8] for i in range(4)], [[i, i + 8] for i in range(4, 8)]])


@pytest.mark.linux("binds processes")
@pytest.mark.parametrize(
    ("mode", "nprocs", "shares", "threads"),
    [
        ("core", 2, ["0-3,8-11", "4-7,12-15"], [4, 4]),
        ("core", 8, [f"{i},{i + 8}" for i in range(8)], [1] * 8),
        ("core", 3, ["0-1,8-9", "2-4,10-12", "5-7,13-15"], [2, 3, 3]),
        ("auto", 4, ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"], [2] * 4),
        ("numa", 1, ["0-3,8-11"], [4]),
        ("numa", 3, ["0-3,8-11", "0-3,8-11", "4-7,12-15"], [2, 2, 4]),
        ("numa", 16, ["0-3,8-11"] * 8 + ["4-7,12-15"] * 8, [1] * 16),
    ],
)
def test_shares(mode, nprocs, shares, threads):
    binding = Binding.make(mode, nprocs, BIG)
    assert [format_ranges(cpus) for cpus in binding.shares] == shares
    assert list(binding.threads) == threads
    ranks = " ".join(f"{rank}:{share}" for rank, share in enumerate(shares))
    kind = "core" if mode == "auto" else mode
    assert binding.report == f"bind: {kind} (local rank:CPUs {ranks})"
    assert binding.environment(0, {}) == {"OMP_NUM_THREADS": str(threads[0])}
    assert binding.environment(0, {"OMP_NUM_THREADS": "7"}) == {}


@pytest.mark.linux("binds processes")
def test_time_limit_of_the_cgroup_lowers_the_threads_only():
    binding = Binding.make("core", 2, HostCPUs(BIG.nodes, quota_cpus=3.0))
    assert [len(cpus) for cpus in binding.shares] == [8, 8]
    assert list(binding.threads) == [1, 1]
    assert binding.report.endswith(", cgroup limit 3 CPUs)")


def test_none_binds_nothing_and_says_nothing():
    assert Binding.make("none", 99, BIG) == Binding()
    assert Binding().cpus(5) == ()
    assert Binding().environment(5, {}) == {}


def test_more_workers_than_cores():
    binding = Binding.make("auto", 9, BIG)
    assert (binding.shares, binding.report) == ((), "bind: none (9 workers, 8 cores)")


@pytest.mark.linux("binds processes")
@given(st.integers(1, 8))
def test_shares_are_disjoint_and_cover_all(nprocs):
    cpus = [cpu for share in Binding.make("core", nprocs, BIG).shares for cpu in share]
    assert sorted(cpus) == list(range(16))


@pytest.mark.linux("binds processes")
def test_this_host():
    here = HostCPUs.here()
    assert {cpu for core in here.cores for cpu in core} == os.sched_getaffinity(0)
    assert 0 < here.quota_cpus <= math.inf
    assert all(len(Binding.make(mode, 1).report) > 0 for mode in MODES if mode != "none")


@pytest.mark.parametrize("text", ["", "0", "0-3", "0-3,8", "1,3,5-6"])
def test_ranges_there_and_back(text):
    assert format_ranges(parse_ranges(text)) == text


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1-2-3", "1;2"])
def test_bad_ranges(text):
    with pytest.raises(InvalidArgumentError, match="is not a list of numbers such as 0-3,8"):
        parse_ranges(text)
