"""Tee: whole lines from many pipes into one sink, and the last of each."""

import contextlib
import io
import os
import time

import pytest

from unisono.elastic.tee import Tee

LIMIT_S = 10.0


class Sink(io.BytesIO):
    """Remembers the single writes."""

    def __init__(self):
        super().__init__()
        self.writes = []

    def write(self, data):
        self.writes.append(bytes(data))
        return super().write(data)


@contextlib.contextmanager
def pipe():
    receiver, sender = os.pipe()
    with open(sender, "wb", buffering=0) as writer:
        source = os.fdopen(receiver, "rb")  # the tee closes it
        yield source, writer


def test_everything_arrives_in_whole_lines():
    sink, tee = Sink(), Tee()
    with pipe() as (source, writer):
        stream = tee.add(source, sink, keep_tail=True)
        tee.start()
        for piece in (b"one\ntw", b"o\nthr", b"ee\nrest"):
            writer.write(piece)
    assert stream.ended.wait(LIMIT_S)
    tee.close(LIMIT_S)
    assert sink.getvalue() == b"one\ntwo\nthree\nrest"
    assert stream.tail() == "one\ntwo\nthree\nrest"


@pytest.mark.parametrize("end", [b"\n", b"\r"])
def test_pieces_are_joined_before_they_are_written(end):
    sink, tee = Sink(), Tee()
    with pipe() as (source, writer):
        stream = tee.add(source, sink)
        for piece in (b"a", b"b" + end, b"c"):
            writer.write(piece)
            stream.pump()
        assert sink.writes == [b"ab" + end]
        tee.close(LIMIT_S)
    assert sink.getvalue() == b"ab" + end + b"c"


def test_tail_is_bounded_and_a_long_line_is_not_held_back():
    sink, tee = Sink(), Tee()
    with pipe() as (source, writer):
        stream = tee.add(source, sink, keep_tail=True)
        tee.start()
        for _ in range(4):
            writer.write(b"x" * 65536)
        writer.write(b"end")
    assert stream.ended.wait(LIMIT_S)
    tee.close(LIMIT_S)
    assert sink.getvalue() == b"x" * (4 * 65536) + b"end"
    assert stream.tail() == "x" * (65536 - 3) + "end"


@pytest.mark.parametrize("started", [True, False])
def test_close_drains_but_does_not_wait_for_the_end_of_file(started):
    sink, tee = Sink(), Tee()
    with pipe() as (source, writer):
        stream = tee.add(source, sink)
        if started:
            tee.start()
        writer.write(b"line\npart")
        begin = time.monotonic()
        tee.close(LIMIT_S)
        assert time.monotonic() - begin < LIMIT_S
    assert stream.ended.is_set()
    assert source.closed
    assert sink.getvalue() == b"line\npart"


def test_reader_that_left_does_not_stop_the_workers():
    receiver, sender = os.pipe()
    os.close(receiver)
    tee = Tee()
    with open(sender, "wb", buffering=0) as broken, pipe() as (source, writer):
        stream = tee.add(source, broken, keep_tail=True)
        tee.start()
        writer.write(b"one\n")
        writer.write(b"two\n")
        writer.close()
        assert stream.ended.wait(LIMIT_S)
        tee.close(LIMIT_S)
    assert stream.tail() == "one\ntwo\n"
