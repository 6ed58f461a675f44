"""Console: prefixes, folding, unfinished lines; with a clock of its own."""

import io
import os
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import InvalidArgumentError
from unisono.launcher.output.console import HOLD_S, Console, LineFold, WorkerName, check_prefix


class Terminal:
    """A console for a few ranks, its output, and the time."""

    def __init__(self, ranks, *, prefix="[{rank}] ", fold=True):
        self.now_s = 0.0
        self._sink = io.BytesIO()
        self.console = Console(self._sink, prefix=prefix, fold=fold, clock=lambda: self.now_s)
        names = [WorkerName(rank=rank, local_rank=rank, host="h", role="r") for rank in ranks]
        self.voices = {name.rank: self.console.sink_of(name) for name in names}

    def say(self, rank, text):
        self.voices[rank].write(text.encode())

    def wait(self):
        self.now_s += HOLD_S
        self.console.tick()

    @property
    def shown(self):
        return self._sink.getvalue().decode()


def test_equal_lines_of_all_ranks_are_shown_once_and_at_once():
    terminal = Terminal(range(4))
    for rank in range(4):
        assert terminal.shown == ""
        terminal.say(rank, "epoch 1\n")
    assert terminal.shown == "[0-3] epoch 1 ×4\n"  # noqa: RUF001


def test_line_of_some_ranks_is_shown_after_a_while():
    terminal = Terminal(range(4))
    for rank in (0, 1, 3):
        terminal.say(rank, "epoch 1\n")
    terminal.say(2, "warning\n")
    assert terminal.console.tick() == pytest.approx(HOLD_S)
    assert terminal.shown == ""
    terminal.wait()
    assert terminal.shown == "[0-1,3] epoch 1 ×3\n[2] warning\n"  # noqa: RUF001
    assert terminal.console.tick() is None


@pytest.mark.parametrize(
    ("prefix", "shown"),
    [("[{rank}] ", "[0-1] ValueError ×2\n[0] [rank1]: x\n"), ("", "[rank0]: ValueError\n")],  # noqa: RUF001
)
def test_rank_that_torch_writes_before_a_line_is_shown_once(prefix, shown):
    terminal = Terminal([0, 1], prefix=prefix)
    terminal.say(0, "[rank0]: ValueError\n")
    terminal.say(1, "[rank1]: ValueError\n")
    terminal.say(0, "[rank1]: x\n")
    terminal.console.close()
    assert terminal.shown.startswith(shown)


def test_equal_lines_of_one_rank_are_not_joined():
    terminal = Terminal([0, 1])
    terminal.say(0, "a\na\n")
    terminal.say(1, "a\n")
    terminal.console.close()
    assert terminal.shown == "[0-1] a ×2\n[0] a\n"  # noqa: RUF001


def test_unfinished_line_is_ended_before_another_ranks_line():
    terminal = Terminal([0, 1], fold=False)
    terminal.say(0, "name? ")
    terminal.say(1, "x\n")
    terminal.say(0, "Ann\n")
    assert terminal.shown == "[0] name? \n[1] x\n[0] Ann\n"


@pytest.mark.parametrize("fold", [False, True])
def test_unfinished_line_goes_on_without_a_second_prefix(fold):
    terminal = Terminal([0, 1], fold=fold)
    terminal.say(0, "10%")
    terminal.say(0, " 20%")
    terminal.say(0, "\nend\n")
    terminal.console.close()
    assert terminal.shown == "[0] 10% 20%\n[0] end\n"


def test_all_fields_of_a_prefix():
    terminal = Terminal([3], prefix="{host}:{rank}/{local_rank} {role}> ", fold=False)
    terminal.say(3, "x\r\ny\n")
    assert terminal.shown == "h:3/3 r> x\r\nh:3/3 r> y\n"


def test_host_is_this_one_unless_told_otherwise():
    assert WorkerName(rank=0, local_rank=0).host == os.uname().nodename


@pytest.mark.parametrize("template", ["{x}", "{", "{}", "{rank.x}", "{0}"])
def test_bad_prefix(template):
    with pytest.raises(InvalidArgumentError, match=r"is no template of \{rank\}"):
        check_prefix(template)


LINES = st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.floats(0, 0.2)))


@given(LINES)
def test_folding_keeps_each_ranks_lines_and_their_order(lines):
    fold, now_s, taken = LineFold(), 0.0, []
    expected, got = defaultdict(str), defaultdict(str)
    for rank, line, pause_s in lines:
        now_s += pause_s
        fold.add(rank, line.encode(), now_s)
        expected[rank] += line
        taken += fold.take(now_s, 4)
        due_s = fold.due_s(now_s)
        assert due_s is None or 0 < due_s <= HOLD_S + 1e-9
    taken += fold.take(float("inf"), 4)
    for line, ranks in taken:
        assert len(set(ranks)) == len(ranks)
        for rank in ranks:
            got[rank] += line.decode()
    assert got == expected
    assert fold.due_s(now_s) is None


def test_few_lines_are_held_at_a_time():
    fold = LineFold()
    taken = []
    for number in range(5000):
        fold.add(0, b"%d" % number, 0.0)
        taken += fold.take(0.0, 2)
    assert len(taken) >= 4000


def test_tracebacks_are_shown_whole_and_folded_whole():
    terminal = Terminal(range(3))
    head = "Traceback (most recent call last):\n"
    terminal.say(0, f"{head}  a\nKeyboardInterrupt\n")
    terminal.say(1, f"{head}  b\nKeyboardInterrupt")
    terminal.say(2, f"{head}  a\nKeyboardInterrupt\n")
    terminal.wait()
    assert terminal.shown == (
        f"[0,2] {head}[0,2]   a\n[0,2] KeyboardInterrupt ×2\n"  # noqa: RUF001
        f"[1] {head}[1]   b\n[1] KeyboardInterrupt\n"
    )
