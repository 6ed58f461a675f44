"""The map of nodes that all ranks derive from what each has published."""

import pytest

from unisono.core.transports import nodes
from unisono.core.transports.nodes import nodes_of, published, virtual_size
from unisono.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("hosts", "places", "expected"),
    [
        ("aaaa", "numa=0 numa=0 numa=1 numa=1", (0, 0, 1, 1)),
        ("aaaa", "numa=3 numa=0 numa=3 numa=0", (3, 0, 3, 0)),
        ("aaaa", "numa=0 numa=0 numa=- numa=1", (0, 0, 0, 0)),  # a rank is not bound
        ("aabb", "numa=0 numa=1 numa=1 numa=-", (0, 1, 0, 0)),  # on one of two hosts
        ("aaaa", "cache=0 cache=0 cache=8 cache=8", (0, 0, 8, 8)),
        ("aaaa", "cache=0 cache=0 numa=1 numa=1", (0, 0, 0, 0)),
        ("aaaa", "each=2 each=2 each=2 each=2", (0, 0, 1, 1)),
        ("aaaa", "each=3 each=3 each=3 each=3", (0, 0, 0, 1)),
        ("aaaa", "each=2 each=2 each=3 each=2", (0, 0, 0, 0)),
        ("aaaaaabb", "each=2 " * 8, (0, 0, 1, 1, 2, 2, 0, 0)),
        ("abab", "each=1 " * 4, (0, 0, 1, 1)),  # counted on each host
    ],
)
def test_the_map(hosts, places, expected):
    assert nodes_of([*hosts], places.split()) == expected


@pytest.mark.parametrize(
    ("wish", "numa", "cache", "place"),
    [
        ("", 1, 8, "numa=1"), ("numa", 0, 8, "numa=0"), ("numa", None, 8, "numa=-"),
        ("cache", 0, 8, "cache=8"), ("cache", 0, None, "cache=-"), ("0", 1, 8, "numa=-"),
        ("4", 1, 8, "each=4"), ("1", 1, 8, "each=1"),
    ],
)  # fmt: skip
def test_what_a_rank_publishes(monkeypatch, wish, numa, cache, place):
    monkeypatch.setenv("UNISONO_NODES", wish)
    monkeypatch.setattr(nodes, "numa_node", lambda cpus: numa)
    monkeypatch.setattr(nodes, "shared_cache", lambda cpus: cache)
    assert published() == place


@pytest.mark.parametrize("wish", ["x", "-1", "2.5", "0,1|2,3", "1000001", "NUMA"])
def test_a_value_that_is_none(monkeypatch, wish):
    monkeypatch.setenv("UNISONO_NODES", wish)
    line = f"environment variable UNISONO_NODES='{wish}' is neither numa nor cache, nor a number"
    with pytest.raises(InvalidArgumentError) as caught:
        published()
    assert caught.value.what.startswith(line)


def test_the_size_of_virtual_nodes():
    assert [virtual_size(wish) for wish in ("numa", "cache", "0", "1", "12")] == [0, 0, 0, 1, 12]
