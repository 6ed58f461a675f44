"""`unisono draw`: its files, and what it refuses."""

import re
import shutil
import subprocess

import pytest

from unisono.core.schedules import build, registry
from unisono.workbench.cli.main import main
from unisono.workbench.simulate.pictures.diagrams import columns, diagram
from unisono.workbench.simulate.pictures.timeline import in_rounds


def draw(*words):
    assert main(["draw", *map(str, words)]) == 0


def test_svg_of_a_schedule(tmp_path):
    file = tmp_path / "a.svg"
    draw("broadcast", "-p", 6, "--root", 2, "--algorithm", "binomial", "-o", file)
    assert file.read_text() == diagram(in_rounds(build("broadcast", "binomial", 6, 2))).svg()


def test_svg_of_a_run_has_the_time_of_simulate(tmp_path, capsys):
    file = tmp_path / "a.svg"
    what = ("all_reduce", "-p", 16, "--hosts", 4, "--net", "fat-tree", "--algorithm", "ring")
    draw(*what, "-b", "1M", "-o", file)
    assert main(["simulate", *map(str, what), "-b", "1M"]) == 0
    time = capsys.readouterr().out.splitlines()[-1].split()[3]
    title = f"all_reduce, ring: {time} µs on 16 ranks, 480 messages; "
    title += "1 MiB on net fat-tree of 4 hosts<"
    assert title in file.read_text()
    # The parts have the names of the columns.
    assert re.search("critical path: latency .* %, sending .* %, busy .* %, ends", file.read_text())


def test_the_pieces_of_a_run_are_those_of_simulate(tmp_path, capsys):
    file = tmp_path / "a.svg"
    what = ("all_reduce", "-n", 8, "--net", "switch", "--algorithm", "tree", "-b", "1M")
    for more, pieces in (((), 4), (("--pipeline", "auto"), 4), (("--pipeline", 2), 2)):
        draw(*what, *more, "-o", file)
        assert main(["simulate", *map(str, (*what, *more))]) == 0
        cells = capsys.readouterr().out.splitlines()[-1].split()
        assert cells[8] == str(pieces)
        assert f"tree: {cells[3]} µs on 8 ranks" in file.read_text()
        assert f"; 1 MiB on net switch, {pieces} pieces<" in file.read_text()
    # Of a network with channels, which a picture has not.
    draw("all_reduce", "-n", 8, "--net", "dgx-a100", "--algorithm", "ring", "-o", file)
    assert "on net dgx-a100, without its 8 channels<" in file.read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--algorithm", "tree", "--pipeline", "auto"], "rounds have no size, which decides"),
        (["--algorithm", "ring", "-r", "3"], "-r 3: all_reduce has no root"),
        (["--algorithm", "two_level", "--nodes", "3"], "equally many ranks on each node; 8 ranks"),
        (["--algorithm", "ring", "--nodes", "2", "--hosts", "2"], "levels are hosts, or nodes of"),
        (["--algorithm", "two_level"], "8 ranks are 8 hosts here\n  hint: --hosts 2 makes two"),
        (
            ["--algorithm", "two_level", "--net", "fat-tree"],
            "needs several hosts with 2 ranks or more; 8 ranks are 1 host here",
        ),
    ],
)
def test_what_a_flag_cannot_do_is_told(tmp_path, capsys, words, expected):
    assert main(["draw", "all_reduce", *words, "-o", str(tmp_path / "a.svg")]) == 1
    assert expected in capsys.readouterr().err


def test_nodes_are_drawn_as_hosts_are(tmp_path):
    file, nodes, hosts = tmp_path / "a.svg", tmp_path / "n.json", tmp_path / "h.json"
    what = ("all_reduce", "-n", 8, "--algorithm", "two_level")
    draw(*what, "--nodes", 2, "--json", nodes)
    draw(*what, "--hosts", 2, "--json", hosts)
    assert nodes.read_text() == hosts.read_text() != ""
    draw(*what, "--nodes", 2, "--net", "two-socket", "-o", file)
    assert "1 MiB on net two-socket of 2 nodes<" in file.read_text()


def test_lanes_and_the_heat_map_have_one_axis_of_time(tmp_path):
    file = tmp_path / "a.svg"
    draw("all_reduce", "-p", 4, "--net", "switch", "--algorithm", "ring", "-o", file)
    text = file.read_text()
    boxes = [
        [tuple(map(float, point.split(","))) for point in points.split()]
        for points in re.findall("<polygon points='([^']*)'", text)
    ]
    lanes = [box for box in boxes if round(box[2][1] - box[0][1], 1) == 1.2]
    slices = [box for box in boxes if round(box[2][1] - box[0][1], 1) == 12]
    assert len(lanes) == 4
    assert len(slices) > 8
    first, last = ({box[corner][0] for box in lanes} for corner in (0, 2))
    assert {min(box[0][0] for box in slices)} == first
    assert max(box[2][0] for box in slices) == pytest.approx(last.pop(), abs=0.3)


def test_page(tmp_path):
    file = tmp_path / "a.html"
    draw("all_gather", "-p", 4, "--algorithm", "ring", "-o", file)
    text = file.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "<title>all_gather, ring, 4 ranks</title>" in text
    assert re.search(r'"stages":[34],', text)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_keys_step_through_a_page(tmp_path):
    """A real browser gets the keys; the slider has the focus, and would step, too."""
    file = tmp_path / "a.html"
    draw("all_reduce", "-p", 4, "--algorithm", "ring", "-o", file)
    keys = """<script>
    const seen = [];
    slider.focus();
    for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home", "x", " ", " "]) {
      const free = slider.dispatchEvent(
        new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
      seen.push(step + (free ? "" : "!") + (timer === null ? "" : "p"));
    }
    ring.onpointerdown({ clientX: 200 });
    ring.onpointerup({ clientX: 100 });
    document.title = seen.join() + ";" + step + ";" + slider.value;
    </script></body>"""
    file.write_text(file.read_text().replace("</body>", keys))
    words = ("--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", file.as_uri())
    folder = f"--user-data-dir={tmp_path / 'profile'}"
    run = subprocess.run(["chromium", folder, *words], capture_output=True, text=True, timeout=60)
    assert "<title>1!,2!,1!,6!,0!,0,0!p,0!;1;1</title>" in run.stdout


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_message_that_has_arrived_is_seen_at_its_target(tmp_path):
    file = tmp_path / "a.html"
    draw("all_reduce", "-p", 4, "--algorithm", "ring", "-o", file)
    ends = """<script>
    show(1);
    const at = (each) => [Number(each.getAttribute("cx")), Number(each.getAttribute("cy"))];
    const ranks = [...ring.querySelectorAll("circle.rank")].map(at);
    const near = [...ring.querySelectorAll("circle:not(.rank)")].map(at).map(([x, y]) => {
      const away = ranks.map(([a, b]) => Math.hypot(a - x, b - y));
      return away.indexOf(Math.min(...away)) + (Math.min(...away) >= 18 ? "seen" : "hidden");
    });
    document.title = near.sort().join();
    </script></body>"""
    file.write_text(file.read_text().replace("</body>", ends))
    words = ("--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", file.as_uri())
    folder = f"--user-data-dir={tmp_path / 'profile'}"
    command = ["chromium", folder, "--force-prefers-reduced-motion", *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "<title>0seen,1seen,2seen,3seen</title>" in run.stdout


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_page_of_many_ranks_has_no_circles_that_overlap_and_marks_its_round(tmp_path):
    file = tmp_path / "a.html"
    draw("all_reduce", "-p", 64, "--algorithm", "ring", "-o", file)
    left, width, top, height = columns(build("all_reduce", "ring", 64))
    ends = """<script>
    show(3);
    const at = (each) => ["cx", "cy", "r"].map((name) => Number(each.getAttribute(name)));
    const all = [...ring.querySelectorAll("circle")].map(at);
    const apart = all.every(([x, y, r], i) => all.every(
      ([a, b, s], j) => i <= j || Math.hypot(x - a, y - b) >= r + s));
    const found = ["x", "y", "width", "height"].map((name) => get("round").getAttribute(name));
    show(0);
    document.title = [all.length, apart, ...found, get("round")].join();
    </script></body>"""
    file.write_text(file.read_text().replace("</body>", ends))
    words = ("--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", file.as_uri())
    folder = f"--user-data-dir={tmp_path / 'profile'}"
    command = ["chromium", folder, "--force-prefers-reduced-motion", *words]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    frame = f"{left + 2 * width:g},{top:g},{width:g},{height:g}"
    assert f"<title>128,true,{frame},</title>" in run.stdout
    # A box of a round in the diagram is where the frame is.
    box = f"{left + 2 * width:g},{top:g} {left + 3 * width:g},{top:g} "
    assert f"<polygon points='{box}" in run.stdout.replace('"', "'")


def test_a_page_fits_phones_and_dark_rooms(tmp_path):
    file = tmp_path / "a.html"
    draw("all_reduce", "-p", 4, "--algorithm", "ring", "-o", file)
    text = file.read_text()
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in text
    assert "prefers-color-scheme: dark" in text
    assert "prefers-reduced-motion" in text
    assert "Its colour is that of its first chunk." in text
    draw("all_reduce", "-p", 4, "--algorithm", "ring", "--net", "switch", "-o", file)
    assert "Red is the critical path." in file.read_text()


@pytest.mark.parametrize(
    ("words", "expected", "absent"),
    [
        (["all_reduce", "--algorithm", "ring"], ["reduces", "stores", "first chunk"], ["work of"]),
        (["all_gather", "--algorithm", "ring"], ["the receiver stores"], ["the receiver reduces"]),
        (["reduce", "--algorithm", "linear"], ["the receiver reduces"], ["the receiver stores"]),
        (
            ["all_reduce", "--algorithm", "ring", "--net", "switch"],
            ["critical path<", "work of a rank", "100 %"],
            ["first chunk"],
        ),
    ],
)
def test_pictures_have_a_legend_of_what_they_show(tmp_path, words, expected, absent):
    file = tmp_path / "a.svg"
    draw(*words, "-p", 4, "-o", file)
    text = file.read_text()
    assert [each in text for each in expected] == [True] * len(expected)
    assert [each in text for each in absent] == [False] * len(absent)


@pytest.fixture
def own_table(monkeypatch):
    table = {op: dict(names) for op, names in registry._TABLE.items()}
    monkeypatch.setattr(registry, "_TABLE", table)
    yield
    build.cache_clear()


WRONG = """
import numpy as np
from unisono.lowlevel import Buf, Schedule, recv, recv_reduce, send

def own_ring(p, fault=""):
    def exchange(k, r):
        first = (r - k if k < p - 1 else r - k + p) % p
        to = np.where(r == 2, p, (r + 1) % p) if fault == "to" and k == 3 else (r + 1) % p
        take = recv_reduce if k < p - 1 else recv
        rows = [send(r, to, Buf.OUTPUT, first), take(r, (r - 1) % p, Buf.OUTPUT, (first - 1) % p)]
        return rows[1:] if fault == "waits" and k == 1 else rows
    rounds = 2 * (p - 1) - (fault == "short")
    return Schedule("all_reduce", "x", p, rounds, exchange, output_chunks=p)

def to(p): return own_ring(p, "to")
def waits(p): return own_ring(p, "waits")
def short(p): return own_ring(p, "short")
"""


@pytest.mark.parametrize(
    ("fault", "text", "messages", "column", "rank"),
    [
        ("to", "rank 2, round 4 (k=3), step 6: SEND to rank 4, expected 0..3 without 2", 23, 3, 2),
        ("waits", "deadlock: ranks wait for messages that never come", 20, 1, 0),
        ("short", "at the end OUTPUT[2] of rank 0 has contributions of 0,2,3", 20, 5, 0),
    ],
)
@pytest.mark.usefixtures("own_table")
def test_a_wrong_algorithm_is_drawn_with_the_step_that_fails(
    tmp_path, capsys, fault, text, messages, column, rank
):
    (tmp_path / "own.py").write_text(WRONG)
    what = ("all_reduce", "-n", "4", "--algorithm", f"{tmp_path}/own.py:{fault}")
    file = tmp_path / "a.svg"
    assert main(["draw", *what, "-o", str(file)]) == 1
    assert not file.exists()
    draw(*what, "--unproved", "-o", file)
    assert "own.py:" + fault + " is WRONG: " in (err := capsys.readouterr().err)
    assert text in err
    drawn = file.read_text()
    assert f"WRONG: all_reduce ({fault}): " in drawn
    assert text in drawn.replace("&gt;", ">")
    [mark] = re.findall("points='([^']*)' fill='#ffd9d9'", drawn)
    left, top = map(float, mark.split()[0].split(","))
    heads = drawn.count("<polygon ") - drawn.count("#f5f5f5") - drawn.count("#ffd9d9")
    assert heads - 2 - 4 == messages  # two are in the legend, four are the lanes
    rounds = 5 if fault == "short" else 6
    wide = max(64, min(110, 420 // rounds))
    assert (left - 58) // wide == column - (fault == "short")
    assert (top - 46) // 24 == rank
    # As in the text and in other pictures, from 1.
    assert f">{rounds}</text>" in drawn
    assert ">0</text>" not in drawn


@pytest.mark.usefixtures("own_table")
def test_a_right_algorithm_has_no_mark_and_a_shipped_one_is_proved(tmp_path, capsys):
    (tmp_path / "own.py").write_text(WRONG)
    own, file = f"{tmp_path}/own.py:own_ring", tmp_path / "a.svg"
    draw("all_reduce", "-n", 4, "--algorithm", own, "-o", file)
    right = file.read_text()
    draw("all_reduce", "-n", 4, "--algorithm", own, "--unproved", "-o", file)
    assert file.read_text() == right
    for words, error in (
        (
            ["--algorithm", "ring", "-o", str(file)],
            "all_reduce (ring) is proved: it is no user's function",
        ),
        (["--algorithm", own, "-o", str(tmp_path / "a.html")], "--unproved draws rounds as .svg"),
        (["--algorithm", own, "-o", str(file), "--net", "switch"], "--unproved draws rounds as"),
    ):
        assert main(["draw", "all_reduce", "--unproved", *words]) == 1
        assert error in capsys.readouterr().err


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "a.png"
    draw("all_reduce", "-p", 4, "--algorithm", "tree", "--net", "switch", "-o", file)
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-o", "x.gif"], "-o x.gif: expected one of .svg, .html, .png, .pdf at its end"),
        (["-o", "/no/such/x.svg"], "cannot write /no/such/x.svg"),
        (["-o", "x.svg", "-p", "129"], "-n 129: a picture has at most 128 ranks"),
        (["-o", "x.svg", "-p", "9", "--hosts", "4"], "-n 9 does not fill 4 hosts"),
        (["-o", "x.svg", "--net", "nowhere"], "no network 'nowhere'"),
        (["-o", "x.svg", "-b", "1M"], "-b 1048576: rounds have no size; it needs a network"),
        (["-o", "x.svg", "--algorithm", "ring,tree"], "ring,tree: a picture has one algorithm"),
        (
            ["-o", "x.svg", "--algorithm", "ring", "--algorithm", "tree"],
            "ring,tree: a picture has one algorithm",
        ),
        (["-o", "x.svg", "--algorithm", "rign"], "hint: is 'ring' meant?"),
        # Of p ranks 2 p (p - 1).
        (["-o", "x.svg", "-n", "128"], "more than 20,000 messages; -n 100 is drawn"),
        (
            ["-o", "x.svg", "-n", "8", "--hosts", "3", "--algorithm", "two_level"],
            "8 ranks on 3 hosts are 3 per host, and 2 on the last",
        ),
    ],
)
def test_bad_words_are_refused(capsys, monkeypatch, tmp_path, words, expected):
    monkeypatch.chdir(tmp_path)
    given = [] if "--algorithm" in words else ["--algorithm", "ring"]
    assert main(["draw", "all_reduce", *given, *words]) == 1
    assert expected in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_loggops_is_not_drawn(capsys, tmp_path):
    net, output = tmp_path / "lg.toml", tmp_path / "a.svg"
    net.write_text('model = "loggops"')
    words = ("--algorithm", "ring", "--net", str(net), "-o", str(output))
    assert main(["draw", "all_reduce", *words]) == 1
    expected = f"--net {net} is for the model loggops, which is not drawn"
    assert expected in capsys.readouterr().err


def test_a_name_may_have_hyphens_and_one_rank_no_column(tmp_path):
    file, other = tmp_path / "a.svg", tmp_path / "b.svg"
    draw("all_reduce", "--algorithm", "recursive-doubling", "-o", file)
    draw("all_reduce", "--algorithm", "recursive_doubling", "-o", other)
    assert file.read_text() == other.read_text()
    draw("all_reduce", "-n", 1, "--algorithm", "ring", "-o", file)
    assert ">1</text>" not in file.read_text()


def test_the_circle_of_a_dark_page_has_the_colours_of_its_diagram(tmp_path):
    file = tmp_path / "a.html"
    draw("all_reduce", "-p", 4, "--algorithm", "ring", "-o", file)
    assert ".diagram svg, #ring { filter: invert" in file.read_text()
