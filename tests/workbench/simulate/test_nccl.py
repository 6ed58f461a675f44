"""NCCL's model against the table that NCCL's formulas give."""

import pytest

from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate.nccl import PROTOCOLS, latency_us

COLUMNS = [("all_reduce", "tree"), ("all_reduce", "ring"), ("all_gather", "ring")]
TABLE = {
    (8, 1): "15.2 31.5 64.4 15.0 40.6 56.0 10.8 27.3 32.2 7.2 15.9 11.8",
    (16, 2): "25.2 48.5 92.4 40.0 75.2 131.6 23.3 44.6 70.0 9.3 18.0 22.4",
    (32, 4): "35.2 65.5 120.4 78.8 144.4 282.8 42.7 79.2 145.6 9.3 18.0 22.4",
    (64, 8): "45.2 82.5 148.4 156.4 282.8 585.2 81.5 148.4 296.8 9.3 18.0 22.4",
    (1024, 128): "85.2 150.5 260.4 2484.4 4434.8 9657.2 1245.5 2224.4 4832.8 9.3 18.0 22.4",
}


@pytest.mark.parametrize(("ranks", "nodes"), TABLE)
def test_latencies(ranks, nodes):
    columns = [(*column, p) for column in [*COLUMNS, ("broadcast", "ring")] for p in PROTOCOLS]
    found = [latency_us(*column, ranks, nodes) for column in columns]
    expected = [float(text) for text in TABLE[ranks, nodes].split()]
    assert [round(us, 1) for us in found] == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (("broadcast", "tree", "LL", 8, 1), "NCCL's model has no"),
        (("all_reduce", "ring", "ll", 8, 1), "NCCL's model has no"),
        (("all_reduce", "ring", "LL", 9, 2), "ranks do not fill"),
    ],
)
def test_calls_that_nccl_lacks_are_refused(call, expected):
    with pytest.raises(InvalidArgumentError, match=expected):
        latency_us(*call)
