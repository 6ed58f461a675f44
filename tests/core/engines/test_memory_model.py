"""The checker of memory orders agrees with the litmus tests that everybody knows."""

import pytest

from tests.support.memory_model import (
    ACQ_REL,
    ACQUIRE,
    PLAIN,
    RELAXED,
    RELEASE,
    SEQ_CST,
    Broken,
    Explorer,
    Fence,
    Read,
    Update,
    Write,
    sleep,
    wake,
)


def allows(*threads):
    """Whether some execution of the threads, which then fails an assertion, is allowed."""
    try:
        Explorer(list(threads), {"left": None, "right": None}).explore()
    except Broken:
        return True
    return False


def reporter(holds):
    """A thread that checks what two other threads have read."""

    def body():
        left = yield Read("left", RELAXED, lambda value: value is not None)
        right = yield Read("right", RELAXED, lambda value: value is not None)
        assert holds(left, right)

    return body


@pytest.mark.parametrize(
    ("data", "store", "load", "allowed"),
    [
        (PLAIN, RELEASE, ACQUIRE, False),
        (PLAIN, RELAXED, ACQUIRE, True),
        (PLAIN, RELEASE, RELAXED, True),
        (RELAXED, RELAXED, SEQ_CST, True),
    ],
)
def test_message_passing(data, store, load, allowed):
    def writer():
        yield Write("data", 1, data)
        yield Write("flag", 1, store)

    def reader():
        if (yield Read("flag", load)):
            assert (yield Read("data", data)) == 1

    assert allows(writer, reader) == allowed


@pytest.mark.parametrize(
    ("first", "second", "allowed"),
    [(RELEASE, ACQUIRE, False), (ACQUIRE, ACQUIRE, True), (RELEASE, RELEASE, True)],
)
def test_message_passing_with_fences(first, second, allowed):
    def writer():
        yield Write("data", 1, PLAIN)
        yield Fence(first)
        yield Write("flag", 1, RELAXED)

    def reader():
        if (yield Read("flag", RELAXED)):
            yield Fence(second)
            yield Read("data", PLAIN)

    assert allows(writer, reader) == allowed


@pytest.mark.parametrize(
    ("store", "load", "fence", "allowed"),
    [
        (SEQ_CST, SEQ_CST, None, False),
        (RELEASE, ACQUIRE, None, True),
        (RELEASE, SEQ_CST, None, True),
        (RELAXED, RELAXED, SEQ_CST, False),
        (RELAXED, RELAXED, ACQ_REL, True),
    ],
)
def test_store_buffering(store, load, fence, allowed):
    def thread(own, other, out):
        def body():
            yield Write(own, 1, store)
            if fence:
                yield Fence(fence)
            yield Write(out, (yield Read(other, load)), RELAXED)

        return body

    threads = thread("x", "y", "left"), thread("y", "x", "right")
    assert allows(*threads, reporter(lambda left, right: left or right)) == allowed


@pytest.mark.parametrize(
    ("store", "load", "allowed"), [(SEQ_CST, SEQ_CST, False), (RELEASE, ACQUIRE, True)]
)
def test_independent_reads_of_independent_writes(store, load, allowed):
    def writer(place):
        def body():
            yield Write(place, 1, store)

        return body

    def reader(first, second, out):
        def body():
            found = (yield Read(first, load)), (yield Read(second, load))
            yield Write(out, found, RELAXED)

        return body

    threads = writer("x"), writer("y"), reader("x", "y", "left"), reader("y", "x", "right")
    found = allows(*threads, reporter(lambda left, right: not left == right == (1, 0)))
    assert found == allowed


def test_coherence_of_one_location():
    def writer():
        yield Write("x", 1, RELAXED)

    def reader():
        first, second = (yield Read("x", RELAXED)), (yield Read("x", RELAXED))
        assert first <= second

    assert not allows(writer, reader)


@pytest.mark.parametrize(("order", "allowed"), [(RELEASE, False), (RELAXED, True)])
def test_a_release_sequence_goes_on_through_an_update(order, allowed):
    def writer():
        yield Write("data", 1, PLAIN)
        yield Update("count", lambda value: value + 1, order)

    def other():
        yield Update("count", lambda value: value + 1, RELAXED)

    def reader():
        yield Read("count", ACQUIRE, lambda value: value == 2)
        yield Read("data", PLAIN)

    assert allows(writer, other, reader) == allowed


def test_a_release_sequence_ends_at_a_store():
    def writer():
        yield Write("data", 1, PLAIN)
        yield Write("flag", 1, RELEASE)
        yield Write("flag", 2, RELAXED)

    def reader():
        yield Read("flag", ACQUIRE, lambda value: value == 2)
        yield Read("data", PLAIN)

    assert allows(writer, reader)


@pytest.mark.parametrize("looks_again", [True, False])
def test_a_wake_up_before_the_sleep_is_lost_unless_the_word_has_changed(looks_again):
    def waker():
        yield Write("word", 1, RELAXED)
        yield from wake("word")

    def sleeper():
        seen = (yield Read("word", RELAXED)) if looks_again else 1
        if seen == 0 or not looks_again:
            yield from sleep("word", seen)

    assert allows(waker, sleeper) != looks_again
