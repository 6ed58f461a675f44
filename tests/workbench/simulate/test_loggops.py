"""LogGOPS against the results of the LogGOPSim program, and GOAL texts read back."""

import re

import pytest

from tests.support.tools import tool
from unisono.core.schedules import build
from unisono.core.schedules.registry import _TABLE
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate import LogGOPS, Program, Traffic, from_goal, program_of, to_goal
from unisono.workbench.simulate.evaluators.loggops import run
from unisono.workbench.simulate.evaluators.traffic import RECV, SEND, WORK

NS = 1000

loggopsim = tool("loggopsim", "benchmarks")


@pytest.mark.golden("loggopsim")
def test_every_rank_ends_as_in_loggopsim(case):
    assert loggopsim.result(case) == {name: case[name] for name in ("finish", "events")}


@pytest.mark.golden("loggopsim")
def test_goal_text_read_back_is_the_same_program(case):
    written = loggopsim.program(case)
    read = from_goal(to_goal(written))
    assert to_goal(read) == to_goal(written)
    if case["finish"]:
        times = run(read, loggopsim.model(case)).finish_ps
        assert times == [ns * NS for ns in case["finish"]]


def test_random_cases_take_every_family():
    built_in = {
        (collective, algorithm)
        for collective, table in _TABLE.items()
        for algorithm, entry in table.items()
        if not entry.registered
    }
    drawn = loggopsim.cases(1, range(len(loggopsim.FAMILIES)))
    assert {(case["collective"], case["algorithm"]) for case in drawn} >= built_in


def test_readme_of_loggopsim():
    schedule = build("reduce", "binomial", 8, 0)
    result = run(program_of(Traffic(schedule, 1024).all_rows(), 8), LogGOPS())
    assert sorted(result.finish_ps, reverse=True) == [
        ns * NS for ns in (34914, 24776, 13138, 13138, 1500, 1500, 1500, 1500)
    ]
    assert (result.events, result.messages) == (21, 7)


def test_goal_rounds_work_up_to_nanoseconds():
    graph = Program(1)
    for picoseconds in (0, 1, 1000, 1001):
        graph.add(0, WORK, picoseconds)
    assert re.findall(r"calc (\d+)", to_goal(graph)) == ["0", "1", "1", "2"]


def test_goal_with_comments_calc_and_both_edges():
    text = """
    num_ranks 2  // two
    rank 0 {
    l1: calc 100
    l2: send 11b to 1 tag 7 cpu 0 nic 0
    l2 requires l1
    l3: calc 50
    l3 irequires l2 /* begins
    with it */
    }
    rank 1 {
    recv 11b from 0 tag 7
    }
    """
    result = run(from_goal(text), LogGOPS(1000, 200, 0, 3, 0, 65535))
    # calc, then the send's overhead, then calc; o + L + o and 10 bytes of 3 ps.
    assert result.finish_ps == [100 * NS + 200 + 50 * NS, 100 * NS + 200 + 1000 + 200 + 10 * 3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the text is empty"),
        ("rank 0 {\n}", "line 1: expected 'num_ranks N' first"),
        ("num_ranks 2\nrank 2 {\n}", "line 2: expected a rank below 2"),
        ("num_ranks 1\nsend 1b to 0", "line 2: expected 'rank R {'"),
        ("num_ranks 2\nrank 0 {\nsend 1b from 1\n}", "line 3: expected 'send Sb to R'"),
        ("num_ranks 2\nrank 0 {\nsend 1b to 2\n}", "R < 2, got 'send 1b to 2'"),
        ("num_ranks 2\nrank 0 {\nl1: calc 5\nl1 requires l2\n}", "a label of rank 0, not 'l2'"),
        ("num_ranks 2\nrank 0 {\nl1: calc 5 cpu 1\n}", "cpu 0 and nic 0"),
        ("num_ranks 2\nrank 0 {\nreceive 5\n}", "line 3: expected send, recv, calc"),
    ],
)
def test_bad_goal_is_refused_with_its_line(text, expected):
    with pytest.raises(InvalidArgumentError, match=r"^GOAL") as caught:
        from_goal(text)
    if text:
        assert "GOAL, line " in str(caught.value)
    assert expected in str(caught.value)


def test_programs_that_never_end_are_errors():
    lost = Program(2)
    lost.add(0, SEND, 8, peer=1)
    with pytest.raises(InvalidArgumentError, match="never received, the first from rank 0 to rank"):
        run(lost, LogGOPS())
    waiting = Program(2)
    waiting.add(1, RECV, 8, peer=0)
    with pytest.raises(InvalidArgumentError, match="rank 1 waits for a message from rank 0"):
        run(waiting, LogGOPS())
    circle = Program(1)
    first, second = circle.add(0, WORK, 1), circle.add(0, WORK, 1)
    circle.wait(first, second)
    circle.wait(second, first)
    with pytest.raises(InvalidArgumentError, match="2 operations never end, because they wait"):
        run(circle, LogGOPS())
