"""OutputReader: whole lines from many pipes into one sink, and the last of each."""

import contextlib
import errno
import io
import os
import threading
import time

import pytest

import unisono.launcher.output.reader
from unisono.launcher.output.reader import TRACEBACK, OutputReader, WorkerStream

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
        source = os.fdopen(receiver, "rb")  # the reader closes it
        yield source, writer


def passed_on(reader, pieces, *sinks, **options):
    """Pass the pieces of a stream on to the sinks; return the stream, which has ended."""
    with pipe() as (source, writer):
        stream = reader.add(source, *sinks, **options)
        for piece in pieces:
            writer.write(piece)
    assert stream.ended.wait(LIMIT_S)
    return stream


@contextlib.contextmanager
def stream_to(sink):
    """Yield a stream without a thread, and a function that adds to it; the stream ends then."""
    with pipe() as (source, writer):
        stream = WorkerStream(source, [sink])

        def add(data):
            writer.write(data)
            stream.pump()

        yield stream, add
        stream.finish()


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        ([b"one\ntw", b"o\nthr", b"ee\nrest"], b"one\ntwo\nthree\nrest"),
        # The tail is bounded, and a long line is not held back.
        ([b"x" * 65536] * 4 + [b"end"], b"x" * (4 * 65536) + b"end"),
    ],
    ids=["lines", "a long line"],
)
def test_everything_arrives_in_whole_lines(pieces, whole):
    sink, reader = Sink(), OutputReader()
    stream = passed_on(reader, pieces, sink, keep_tail=True)
    reader.close(LIMIT_S)
    assert sink.getvalue() == whole
    assert stream.tail() == whole[-65536:].decode()


@pytest.mark.parametrize("end", [b"\n", b"\r"])
def test_pieces_are_joined_before_they_are_written(end):
    sink = Sink()
    with stream_to(sink) as (_, add):
        for piece in (b"a", b"b" + end, b"c"):
            add(piece)
        assert sink.writes == [b"ab" + end]
    assert sink.getvalue() == b"ab" + end + b"c"


def test_close_drains_but_does_not_wait_for_the_end_of_file():
    sink, reader = Sink(), OutputReader()
    with pipe() as (source, writer):
        stream = reader.add(source, sink)
        writer.write(b"line\npart")
        begin = time.monotonic()
        reader.close(LIMIT_S)
        assert time.monotonic() - begin < LIMIT_S
    assert stream.ended.is_set()
    assert source.closed
    assert sink.getvalue() == b"line\npart"


def test_reader_that_left_does_not_stop_the_workers():
    receiver, sender = os.pipe()
    os.close(receiver)
    reader = OutputReader()
    with open(sender, "wb", buffering=0) as broken:
        stream = passed_on(reader, [b"one\n", b"two\n"], broken, keep_tail=True)
        reader.close(LIMIT_S)
    assert stream.tail() == "one\ntwo\n"


def test_tee_without_streams_can_be_closed():
    OutputReader().close(LIMIT_S)


def test_streams_may_come_later_and_write_to_several_sinks(tmp_path):
    sinks, path, reader = (Sink(), Sink()), tmp_path / "log", OutputReader()
    for text in (b"first\n", b"second\n"):
        passed_on(reader, [text], *sinks, files=[path.open("ab")])
    reader.close(LIMIT_S)
    assert [sink.getvalue() for sink in sinks] == [b"first\nsecond\n"] * 2
    assert path.read_bytes() == b"first\nsecond\n"


def test_unfinished_line_shows_after_a_while_without_its_end():
    shown, reader = threading.Event(), OutputReader()

    class Eager(Sink):
        def write(self, data):
            shown.set()
            return super().write(data)

    sink = Eager()
    with pipe() as (source, writer):
        reader.add(source, sink)
        writer.write(b"name? ")
        assert shown.wait(LIMIT_S)
        assert sink.writes == [b"name? "]
    reader.close(LIMIT_S)


def test_tick_is_called_when_it_asks_for_it():
    called = threading.Semaphore(0)

    def tick():
        called.release()
        return 0.001

    reader = OutputReader(tick)
    with pipe() as (source, _):
        reader.add(source)
        assert all(called.acquire(timeout=LIMIT_S) for _ in range(3))
    reader.close(LIMIT_S)


def test_tracebacks_of_several_workers_do_not_mix(monkeypatch):
    monkeypatch.setattr(unisono.launcher.output.reader, "_IDLE_S", LIMIT_S)
    sink, reader = Sink(), OutputReader()
    head = b"Traceback (most recent call last):\n"
    with contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(pipe()) for _ in range(2)]
        streams = [reader.add(source, sink) for source, _ in pipes]
        for _, writer in pipes:
            writer.write(b"before\n[rank0]: " + head)
        for line in range(20):
            for number, (_, writer) in enumerate(pipes):
                writer.write(b"%d %d\n" % (number, line))
    assert all(stream.ended.wait(LIMIT_S) for stream in streams)
    reader.close(LIMIT_S)
    expected = [b"".join(b"%d %d\n" % (n, line) for line in range(20)) for n in range(2)]
    assert (
        sorted(sink.writes)
        == [*(b"[rank0]: " + head + text for text in expected)] + [b"before\n"] * 2
    )


def test_traceback_is_passed_on_after_a_pause():
    sink = Sink()
    with stream_to(sink) as (stream, add):
        add(b"Traceback (most recent call last):\n  File\n")
        assert sink.writes == []
        assert stream.flush_partial(idle_s=LIMIT_S) > 0
        assert stream.flush_partial() is None
        assert sink.writes == [b"Traceback (most recent call last):\n  File\n"]
        add(b"next\n")
        assert sink.writes[1:] == [b"next\n"]


def test_lines_after_a_traceback_do_not_wait_for_a_pause(monkeypatch):
    monkeypatch.setattr(unisono.launcher.output.reader, "_TRACEBACK_S", 1e-9)
    sink, head = Sink(), b"Traceback (most recent call last):\n"
    with stream_to(sink) as (_, add):
        add(head)
        time.sleep(1e-6)
        add(b"a\nb")
        assert sink.writes == [head + b"a\n"]
    assert sink.getvalue() == head + b"a\nb"


def test_control_sequence_alone_is_kept_for_the_line_it_belongs_to():
    sink = Sink()
    with stream_to(sink) as (stream, add):
        add(b"\x1b[?25h\x1b[0m")
        assert stream.flush_partial(idle_s=1e-9) is None
        add(b"table\n\x1b[0m")
        assert sink.writes == [b"\x1b[?25h\x1b[0mtable\n"]
    assert sink.writes[1:] == [b"\x1b[0m"]


def test_what_follows_a_traceback_that_was_cut_off_begins_a_line():
    sink = Sink()
    with stream_to(sink) as (_, add):
        add(TRACEBACK + b"\n  File")
    assert sink.getvalue() == TRACEBACK + b"\n  File\n"


def test_output_that_nobody_takes_is_not_lost_in_silence(caplog):
    class Stalled(Sink):
        going_on = threading.Event()

        def write(self, data):
            assert self.going_on.wait(60)
            return super().write(data)

    sink, reader = Stalled(), OutputReader()
    with pipe() as (source, writer):
        reader.add(source, sink)
        writer.write(b"one line\n")
    reader.close(0.1)
    assert "output is lost: it was not read for " in caplog.text
    # A caller that shows a line of its own does not wait, either.
    reader.do(lambda: sink.write(b"another\n"))
    sink.going_on.set()
    reader.close(LIMIT_S)
    assert sink.getvalue() == b"one line\nanother\n"
    reader.do(lambda: sink.write(b"late\n"))
    assert sink.writes[2:] == [b"late\n"]


def test_tasks_come_between_the_lines_and_may_fail():
    sink, reader = Sink(), OutputReader()

    def fail():
        raise OSError(errno.EIO, "the terminal is gone")

    reader.do(fail)
    reader.do(lambda: sink.write(b"first\n"))
    passed_on(reader, [b"second\n"], sink)
    reader.do(lambda: sink.write(b"third\n"))
    reader.close(LIMIT_S)
    assert sink.writes == [b"first\n", b"second\n", b"third\n"]


@pytest.mark.parametrize(("timeout_s", "canceled"), [(0.1, False), (60.0, True)])
def test_source_that_never_runs_dry_is_left_with_a_warning(
    monkeypatch, caplog, timeout_s, canceled
):
    monkeypatch.setattr(unisono.launcher.output.reader, "_STOP_S", LIMIT_S)

    class Refilling(Sink):
        def write(self, data):
            writer.write(data)

    reader = OutputReader()
    with pipe() as (source, writer):
        stream = reader.add(source, Refilling())
        writer.write(b"one line\n")
        reader.close(timeout_s, lambda: canceled)
        assert stream.ended.is_set()
    (record,) = caplog.records
    assert "output is lost: after " in record.message
    assert record.message.endswith("there was still more")


class Full(io.BytesIO):
    """A file on a full disk."""

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_output_that_cannot_be_written_is_not_lost_in_silence(caplog):
    reader, rest = OutputReader(), Sink()
    passed_on(reader, [b"one\n", b"two\n"], Full(), rest)
    reader.close(LIMIT_S)
    assert rest.getvalue() == b"one\ntwo\n"
    said = [record.message for record in caplog.records]
    assert said == ["workers' output is lost, as it cannot be written: No space left on device"]
