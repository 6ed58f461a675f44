"""Which stream goes where: the options' grammar and torchrun's rules."""

import pytest

from unisono.errors import InvalidArgumentError
from unisono.launcher.output.files import LogOptions, Std, StdChoice


@pytest.mark.whole("loads torch")
@pytest.mark.parametrize("text", ["0", "1", "2", "3", "0:3", "0:3,1:0", "0:1,3:2"])
def test_same_streams_as_torch(text):
    multiprocessing = pytest.importorskip("torch.distributed.elastic.multiprocessing")
    theirs = multiprocessing.Std.from_str(text)
    ours = StdChoice.parse(text)
    for rank in range(4):
        single = theirs.get(rank, multiprocessing.Std.NONE) if isinstance(theirs, dict) else theirs
        assert ours.of(rank) == single.value
    assert bool(ours) == (text != "0")


@pytest.mark.parametrize("text", ["", "4", "a", "0:4", "0:1,", "0:1;1:2", ":1", "-1"])
def test_bad_choice(text):
    with pytest.raises(InvalidArgumentError, match=f"^'{text}' is neither 0, 1, 2, 3"):
        StdChoice.parse(text)


@pytest.mark.parametrize(
    ("options", "files", "console"),
    [
        ({}, "", "oe"),
        ({"redirects": "3"}, "oe", ""),
        ({"redirects": "1"}, "o", "e"),
        ({"tee": "3"}, "oe", "oe"),
        ({"tee": "2", "redirects": "1"}, "oe", "e"),
        ({"tee": "1", "redirects": "3"}, "oe", "o"),
        ({"redirects": "1:3"}, "", "oe"),
        ({"redirects": "0:2,1:3"}, "e", "o"),
        ({"log_dir": "x"}, "oe", "oe"),
        ({"log_dir": "x", "redirects": "0"}, "", "oe"),
        ({"local_ranks": [1]}, "", ""),
        ({"local_ranks": [0]}, "", "oe"),
        ({"local_ranks": [1], "tee": "3"}, "oe", ""),
    ],
)
def test_where_the_streams_of_local_rank_0_go(options, files, console):
    choices = {n: StdChoice.parse(options[n]) for n in ("redirects", "tee") if n in options}
    logs = LogOptions(**options | choices)
    streams = {"o": Std.OUT, "e": Std.ERR}
    assert "".join(n for n, std in streams.items() if logs.to_file(std, 0)) == files
    assert "".join(n for n, std in streams.items() if logs.to_console(std, 0)) == console


@pytest.mark.parametrize(
    ("options", "nprocs", "terminal", "expected"),
    [
        ({}, 1, True, "inherited"),
        ({}, 1, False, "inherited"),
        ({}, 2, True, "terminal"),
        ({}, 2, False, "pipe"),
        ({"fold": False}, 2, True, "inherited"),
        ({"prefix": "{rank} "}, 1, True, "terminal"),
        ({"log_dir": "x"}, 1, True, "pipe"),
        ({"local_ranks": []}, 1, True, "terminal"),
        ({"local_ranks": []}, 1, False, "pipe"),
    ],
)
def test_what_a_worker_has_for_standard_output(options, nprocs, terminal, expected):
    assert LogOptions(**options).stdout(nprocs, terminal) == expected
