"""Mistakes, time-outs and lost ranks reach torch's users as torch's errors that name ranks."""

import importlib.util
import re

import pytest

from tests.torch.entries import run_body

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

RANKS = 3


def test_a_mistake_is_an_error_on_all_ranks_and_the_group_goes_on(tmp_path):
    results = run_body("tests.torch.failure_bodies", "mistakes", RANKS, str(tmp_path / "s"))
    for heard in results:
        assert re.search(r"float32\[2\].*float32\[3\]|float32\[3\].*float32\[2\]", heard["shape"])
        assert "int64[2]" in heard["dtype"]
        assert "broadcast(" in heard["op"]
        assert "expected one for each of 3 ranks" in heard["list"]
        assert "10 rows" in heard["divide"]
        assert "BAND is not defined on float32" in heard["dtype none has"]
        for name in ("async", "again", "functional"):
            assert re.match(r"all_reduce #\d+ in group 'default'", heard[name]), heard[name]
        for name in ("future", "then"):
            assert "CollectiveMismatchError: all_reduce #" in heard[name], heard[name]
        assert "all_reduce(float32[3], SUM)" in heard["ddp"]


def test_waits_end_with_errors_that_say_who_is_late(tmp_path):
    results = run_body("tests.torch.failure_bodies", "waits", RANKS, str(tmp_path / "s"))
    assert "was not done after 0.05 s of waiting; it goes on" in results[0]["wait"]
    for rank, heard in enumerate(results):
        assert heard["chain"][0] == heard["chain"][1]
        assert "destroyed" in heard["closed"]
        if rank != 2:
            assert re.search("ranks? [^:]*2 (never entered it|.*did not answer)", heard["late"])
            # On a busy machine rank 0 may be late to say who was.
            assert re.search("ranks? [^:]*[02] never entered it", heard["monitored"])
        if rank != 0:
            assert "abort() was called on rank 0" in heard["abort"]


def test_a_rank_killed_in_training_is_named(tmp_path):
    path = str(tmp_path / "s")
    results = run_body("tests.torch.failure_bodies", "killed", RANKS, path, dead=[1])
    for text, took_s in (results[0], results[2]):
        assert "PeerLostError: " in text
        assert "rank 1 was lost" in text
        assert took_s < 20  # of a time-out of 60 s
