"""Thread rules: overlapping calls on one group are refused, with both call sites."""

import re

import pytest

from tests.worlds import thread_bodies


def assert_names_both(line, refused, under_way):
    here = r"\S*thread_bodies\.py:\d+"
    assert re.fullmatch(
        rf"{refused} on group 'default' at {here} \(thread '[^']+'\) overlaps {under_way} at "
        rf"{here} \(thread 'first'\)",
        line,
    ), line


def test_an_overlapping_call_is_refused_and_both_call_sites_are_named(world):
    text, usable = world(thread_bodies.overlapping, 2)[0]
    line, where, hint = text.splitlines()
    assert_names_both(line, "broadcast", "all_reduce")
    assert where.strip() == "where: rank=0 group=default op=broadcast group_usable=yes"
    assert "new_group" in hint
    assert usable


def test_an_object_call_keeps_other_threads_out_between_its_messages(world):
    line = world(thread_bodies.overlapping_objects, 2)[1].partition("\n")[0]
    assert_names_both(line, "gather_object", "gather_object")


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_a_repeated_call_stays_out_of_an_object_call(world, engine, monkeypatch):
    monkeypatch.setenv("UNISONO_ENGINE", engine)
    line = world(thread_bodies.overlapping_repeated, 2)[0].partition("\n")[0]
    assert_names_both(line, "all_reduce", "all_reduce_object")


def test_threads_may_take_turns(world):
    world(thread_bodies.one_after_another, 3)


def test_a_callback_may_make_the_next_call(world):
    world(thread_bodies.from_a_callback, 2)
