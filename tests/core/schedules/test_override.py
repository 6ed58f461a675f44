import pytest

from unisono.core.schedules.choice.override import EVERY, Permission, parse_override
from unisono.core.schedules.registry import ALGORITHMS
from unisono.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("", {}),
        ("  ", {}),
        ("ring", {EVERY: Permission(("ring",))}),
        ("^ring", {EVERY: Permission(("ring",), inverted=True)}),
        ("Ring, TREE", {EVERY: Permission(("ring", "tree"))}),
        ("AllReduce:Tree", {"all_reduce": Permission(("tree",))}),
        ("all_reduce:double-tree", {"all_reduce": Permission(("double_tree",))}),
        ("BROADCAST:^linear,ring", {"broadcast": Permission(("linear", "ring"), inverted=True)}),
        (
            "ring,two_shot;allreduce:tree,one_shot;broadcast:ring",
            {
                EVERY: Permission(("ring", "two_shot")),
                "all_reduce": Permission(("tree", "one_shot")),
                "broadcast": Permission(("ring",)),
            },
        ),
        ("reduce:ring;reduce:tree", {"reduce": Permission(("tree",))}),
    ],
)
def test_grammar(text, parsed):
    assert dict(parse_override(text)) == parsed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rign", ["unknown algorithm 'rign'", *ALGORITHMS]),
        ("allredcue:ring", ["unknown collective 'allredcue'", "all_reduce", "barrier"]),
        ("ring;tree", ["'tree' names no collective", "first entry"]),
        ("ring,", ["unknown algorithm ''"]),
        ("ring,^tree", ["unknown algorithm '^tree'"]),
        ("ring;", ["names no collective"]),
        (":ring", ["unknown collective ''"]),
        ("reduce:", ["unknown algorithm ''"]),
        ("a:b:ring", ["unknown collective 'a:b'"]),
    ],
)
def test_mistakes_are_named(text, words):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_override(text)
    for word in words:
        assert word in caught.value.what
    assert repr(text) in caught.value.what
    assert "UNISONO_ALGO" in caught.value.hint


def test_permission_among():
    names = ("linear", "ring", "tree")
    assert Permission(("tree", "bruck", "ring")).among(names) == ["tree", "ring"]
    assert Permission(("tree", "bruck"), inverted=True).among(names) == ["linear", "ring"]
    assert str(Permission(("tree", "ring"), inverted=True)) == "^tree,ring"
