"""Which tests run: `make test` takes a sample of the sweeps, `make test-all` takes everything.

Markers:
    sweep(keep): Of all parameter sets of this test function, `keep` run. They are drawn anew with
        each commit, so that over time all of them run. They have as many values of each parameter
        among them as can be.
    whole(reason): Runs in `make test-all` only.
    alone: Bounds a time, so that no other test must run beside it.

The fixture `drawn` does the same for a loop inside a test, and `examples` for Hypothesis. A test
that is named with its parameters on the command line always runs. The end of a run says what did
not run, and why.
"""

import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[2]
MARKERS = (
    "sweep(keep): only this number of the function's parameter sets run without --all",
    "whole(reason): runs with --all only",
    "alone: bounds a time; no other test may run beside it",
)
LEFT_OUT = pytest.StashKey[Counter]()
# The most lines; a machine without torch and servers has fewer reasons.
REASONS = 10
# Whether --all is given, for what is decided when a module of tests is imported.
ALL = []


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="run every test, and every case of every sweep"
    )
    parser.addoption("--sample", help="a text that draws the sample; by default the commit")


# On a busy machine an example, or making one, may take seconds.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])


def pytest_configure(config):
    settings.load_profile("busy")
    config.stash[LEFT_OUT] = Counter()
    seed(config)  # Now, because a commit may come before the end of the run.
    ALL[:] = [config.option.all]
    for line in MARKERS:
        config.addinivalue_line("markers", line)


def pytest_ignore_collect(collection_path, config):
    """Skip files without such a test for `-m alone`: importing all files takes seconds."""
    is_file = config.option.markexpr == "alone" and collection_path.suffix == ".py"
    if is_file and "mark.alone" not in collection_path.read_text(encoding="utf-8"):
        return True
    return None


def pytest_report_header(config):
    if not config.option.all:
        return f"sample of the sweeps: {seed(config)}"
    return None


def seed(config):
    """Return the text that draws the sample: the commit, or "" outside a repository."""
    if config.option.sample is None:
        config.option.sample = ""
        command = ["git", "rev-parse", "--short=12", "HEAD"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        config.option.sample = done.stdout.strip()
    return config.option.sample


# After `-m` and `-k`, so that only tests that they ask for are counted.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if config.option.all:
        return
    named = [arg for arg in config.args if "[" in arg]
    kept, left = [], []
    drawn = sample(items, seed(config))
    for item in items:
        out = item.get_closest_marker("whole") or item.nodeid not in drawn
        (left if out and item.nodeid not in named else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
    whole = sum(item.get_closest_marker("whole") is not None for item in left)
    config.stash[LEFT_OUT] = Counter(whole=whole, sweep=len(left) - whole)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = dict(config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take what one worker has left out: the controller collects nothing, the workers the same."""
    # A worker that died has no output.
    if told := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[LEFT_OUT] = Counter(told)


@pytest.fixture
def drawn(request):
    """Return a function that draws `keep` of the values, and all of `always`; all with --all."""

    def draw(values, keep, always=()):
        if request.config.option.all:
            return list(values)
        others = [value for value in values if value not in always]
        source = random.Random(seed(request.config) + request.node.nodeid)
        chosen = [*always, *source.sample(others, min(keep, len(others)))]
        return [value for value in values if value in chosen]

    return draw


def examples(number, sampled):
    """Return settings of Hypothesis: the number of examples with --all, and without."""
    return settings(max_examples=number if any(ALL) else sampled)


def sample(items, text):
    """Return the names of all tests but those that the sample of a sweep leaves out."""
    functions = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    drawn = set()
    for name, cases in functions.items():
        mark = cases[0].get_closest_marker("sweep")
        names = [item.nodeid for item in cases]
        if mark is not None and len(names) > mark.args[0]:
            shuffled = random.Random(text + name).sample(names, len(names))
            names = spread(shuffled, mark.args[0])
        drawn.update(names)
    return drawn


def spread(names, keep):
    """Return the first name, then those that add most values of parameters to the names before.

    Otherwise a fault of one engine would escape a sample that happens to leave that engine out.
    """
    values = {name: set(name.partition("[")[2].rstrip("]").split("-")) for name in names}
    chosen, others = names[:1], names[1:]
    seen = set(values[names[0]])
    while len(chosen) < keep:
        chosen.append(max(others, key=lambda name: len(values[name] - seen)))
        others.remove(chosen[-1])
        seen |= values[chosen[-1]]
    return chosen


def pytest_terminal_summary(terminalreporter, config):
    write = terminalreporter.write_line
    reports = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common(REASONS):
        write(f"skipped: {count}, {reason}")
    if len(reasons) > REASONS:
        write(f"skipped: others, for {len(reasons) - REASONS} more reasons; -rs shows them")
    left = config.stash[LEFT_OUT]
    if left.total():
        write(
            f"not run: {left['sweep']} cases of sweeps and {left['whole']} tests marked `whole`; "
            f"`make test-all` runs them, --sample={seed(config)} draws the same sweeps"
        )
