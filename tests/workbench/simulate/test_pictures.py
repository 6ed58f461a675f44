"""Timelines, diagrams and pages: what they show is what the schedule does."""

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
from importlib import resources

import numpy as np
import pytest

from unisono.core.schedules import available, build
from unisono.core.schedules.ir import ROOTED
from unisono.core.schedules.verify import contributions
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate import Costs, FullyConnected, Hosts, LinkSpec, Switch, simulate
from unisono.workbench.simulate.pictures.diagrams import CRITICAL, busy_shares, diagram
from unisono.workbench.simulate.pictures.drawing import Label, Line, Polygon, heat
from unisono.workbench.simulate.pictures.pages import page
from unisono.workbench.simulate.pictures.timeline import Span, in_rounds, in_time

INSIDE, BETWEEN = LinkSpec(600_000, 100), LinkSpec(2_200_000, 12.5)
COSTS = Costs(send_ps=300_000, recv_ps=300_000, start_ps=50_000, reduction=LinkSpec(0, 40))
TEMPLATE = (resources.files("unisono.workbench.simulate") / "shipped" / "page.html").read_text(
    "utf-8"
)

KINDS = [
    ("all_reduce", "ring"),
    ("all_reduce", "halving_doubling"),
    ("all_reduce", "double_tree"),
    ("all_gather", "bruck"),
    ("broadcast", "binomial"),
    ("all_to_all", "pairwise"),
]


@pytest.mark.parametrize(("collective", "algorithm"), KINDS)
def test_a_timeline_is_the_simulated_run(collective, algorithm):
    schedule = build(collective, algorithm, 8, 0 if collective in ROOTED else -1)
    network = Hosts(8, 4, INSIDE, BETWEEN)
    expected = simulate(schedule, 1 << 16, network, COSTS, itemsize=4, method="events")
    timeline = in_time(schedule, 1 << 16, network, COSTS, itemsize=4)
    result = timeline.result
    assert (result.finish_ps == expected.finish_ps).all()
    assert (result.causes_ps, result.path) == (expected.causes_ps, expected.path)
    assert timeline.end == expected.last_ps
    assert len(timeline.messages) == expected.messages
    assert sum(message.nbytes for message in timeline.messages) == expected.nbytes
    # The critical messages, in the order of time, go along the path.
    critical = [(m.source, m.target) for m in timeline.messages if m.critical]
    assert critical == list(zip(result.path[:-1], result.path[1:], strict=True))
    # What links serve is how busy they are, and no link serves two messages at once.
    busy = np.zeros(network.links, np.int64)
    for link in range(network.links):
        spans = sorted((s.begin, s.end) for s in timeline.service if s.place == link)
        busy[link] = sum(end - begin for begin, end in spans)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert (busy == expected.link_busy_ps).all()


@pytest.mark.parametrize("cores", [0, 2])
def test_the_work_of_ranks_is_between_messages(cores):
    """A rank does one thing at a time, and a host no more things than it has cores."""
    costs = dataclasses.replace(COSTS, cores=cores)
    schedule = build("all_reduce", "ring", 4)
    timeline = in_time(schedule, 1 << 20, Hosts(4, 4, INSIDE, BETWEEN), costs)
    for time in {span.begin for span in timeline.work}:
        at_once = sum(span.begin <= time < span.end for span in timeline.work)
        assert at_once <= (cores or 4)
    for rank in range(4):
        spans = sorted((s.begin, s.end) for s in timeline.work if s.place == rank)
        assert len(spans) == 2 * 6  # sends and receives
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert max(end for _, end in spans) == timeline.result.finish_ps[rank]


def test_the_agreement_comes_before_the_first_stage():
    costs = dataclasses.replace(COSTS, agreement_bytes=64)
    schedule = build("all_reduce", "ring", 4)
    network = Switch(4, BETWEEN)
    timeline = in_time(schedule, 4096, network, costs)
    assert timeline.end == simulate(schedule, 4096, network, costs).last_ps
    stages = [message.stage for message in timeline.messages]
    assert (stages.count(-1), stages.count(0)) == (2 * 4, 4)


def test_without_contention_there_are_no_links():
    network = FullyConnected(4, BETWEEN)
    timeline = in_time(build("all_reduce", "ring", 4), 4096, network, contended=False)
    assert timeline.service == ()
    assert diagram(timeline).svg().count("<svg") == 1


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather", "reduce_scatter"])
def test_contributions_end_complete(collective):
    for algorithm in available(collective, 8):
        schedule = build(collective, algorithm, 8, 0 if collective in ROOTED else -1)
        states = contributions(schedule)
        assert len(states) == schedule.stages + 1
        counted = 8 if "reduce" in collective else 1
        assert states[-1] == [[counted] * schedule.output_chunks] * 8, algorithm


def test_contributions_of_a_ring_grow_by_one():
    states = np.array(contributions(build("all_reduce", "ring", 4)))
    for stage in range(4):
        assert np.sort(states[stage].ravel()).tolist()[-4:] == [stage + 1] * 4
    # Then the finished chunks go round.
    assert [(states[stage] == 4).sum() for stage in range(3, 7)] == [4, 8, 12, 16]


def test_a_gather_has_a_result_on_its_root_only():
    states = contributions(build("gather", "linear", 4, 2))
    assert [len(row) for row in states[0]] == [0, 0, 4, 0]
    assert states[-1][2] == [1] * 4


def test_the_diagram_of_a_run_marks_the_critical_path():
    timeline = in_time(
        build("all_reduce", "halving_doubling", 16), 1 << 20, Hosts(16, 4, INSIDE, BETWEEN)
    )
    picture = diagram(timeline)
    lines = [shape for shape in picture.shapes if isinstance(shape, Line)]
    # The legend has an arrow for each of the two heads.
    assert len(lines) == timeline.result.messages + 2
    assert sum(line.colour == CRITICAL for line in lines) == timeline.result.hops
    texts = [shape.text for shape in picture.shapes if isinstance(shape, Label)]
    path = " > ".join(map(str, timeline.result.path))
    assert f"over ranks {path}" in texts
    (causes,) = [text for text in texts if text.startswith("critical path: ")]
    shares = [int(share) for share in re.findall(r"(\d+) %", causes)]
    assert sum(shares) == pytest.approx(100, abs=2)
    for shape in picture.shapes:
        points = [shape.at] if isinstance(shape, Label) else shape.points
        assert all(-1 <= x <= picture.width + 1 for x, _ in points)
        assert all(-1 <= y <= picture.height + 1 for _, y in points)


def test_the_heat_map_is_the_busy_share():
    spans = [Span(3, 0, 10), Span(3, 20, 25), Span(5, 0, 100), Span(7, 1, 2)]
    shares = busy_shares(spans, [5, 3], 100, slices=4)
    np.testing.assert_allclose(shares, [[1, 1, 1, 1], [0.6, 0, 0, 0]])
    assert heat(0.0) == "#fff7ec"
    assert heat(1.0) == heat(7.0) == "#7f0000"
    assert len({heat(k / 50) for k in range(51)}) == 51


def test_names_cannot_break_a_picture():
    picture = diagram(in_rounds(build("all_reduce", "ring", 2)))
    picture.label(0, 0, "<script>&")
    assert "&lt;script&gt;&amp;" in picture.svg()
    assert {type(shape) for shape in picture.shapes} == {Line, Polygon, Label}


def data_of(text):
    return json.loads(re.search(r"^const data = (.*);$", text, re.M)[1])


def test_a_page_has_the_messages_and_the_states():
    schedule = build("all_reduce", "double_tree", 8)
    text = page(in_rounds(schedule), TEMPLATE)
    assert "@" not in re.sub(r"@media", "", text)
    data = data_of(text)
    assert (data["ranks"], data["stages"]) == (8, schedule.stages)
    assert data["states"] == contributions(schedule)
    shown = [tuple(message[:3]) for message in data["messages"]]
    assert shown == [(m.source, m.target, m.stage) for m in in_rounds(schedule).messages]
    assert 'count || "\\u00b7"' in text  # an empty cell
    # No other file, host or library.
    assert re.findall(r"(?:src|href)=|https?://(?!www.w3.org/2000/svg)", text) == []


def test_the_script_of_a_page_is_javascript(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine")
    text = page(in_rounds(build("all_gather", "ring", 4)), TEMPLATE)
    file = tmp_path / "page.js"
    file.write_text(re.search(r"<script>\n(.*)</script>", text, re.DOTALL)[1])
    subprocess.run([node, "--check", file], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda: in_rounds(build("all_to_all", "linear", 160)),
            "all_to_all (linear) on 160 ranks has more than 20,000 messages, which no picture "
            "shows",
        ),
        (
            lambda: page(in_rounds(build("all_reduce", "ring", 65)), TEMPLATE),
            "all_reduce, ring, 65 ranks: a page has at most 64 ranks and 64 chunks, got 65 chunks",
        ),
        (
            lambda: in_time(build("all_reduce", "ring", 8), 8, Switch(4, BETWEEN)),
            "the network has 4 ranks, expected 8",
        ),
    ],
)
def test_what_no_picture_shows_is_refused(call, expected):
    with pytest.raises(InvalidArgumentError) as caught:
        call()
    assert caught.value.what == expected
