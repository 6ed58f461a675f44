"""Run the bodies of other tests on the MPI engine, under any launcher.

python -m tests.adapters.mpi.runner module ... calls every test function of the module
(test_matrix, ...) that has the marker `ranks` with this number of ranks and no fixtures. Each body
gets a new default group. The last line of rank 0 gives their number.
"""

import importlib
import inspect
import itertools
import os
import sys
import traceback
from pathlib import Path

import pytest

import unisono as dist
from unisono.lowlevel import CPUOptions

TESTS = Path(__file__).parents[2]

# Tests that the MPI engine does not pass, with the reasons. docs/reference/promises.md has them.
OTHERWISE = {
    "test_all_reduce_has_the_same_bits_everywhere_for_awkward_floats": "sums of NaNs, see above.",
    "test_ctrl_c_while_a_call_is_queued_frees_no_memory_in_use": "of the queue in C++.",
    "test_a_callback_runs_outside_the_lock": "of the queue in C++.",
    "test_engines_whose_names_end_differently": "of the reference engine.",
}


def cases(fn):
    """Return the keyword arguments of each case of a function with `parametrize`."""
    tables = [
        [dict(zip(names.split(","), row if "," in names else (row,), strict=True)) for row in rows]
        for mark in fn.pytestmark
        if mark.name == "parametrize"
        for names, rows in [mark.args[:2]]
    ]
    for parts in itertools.product(*tables):
        yield {name.strip(): value for part in parts for name, value in part.items()}


def module_named(name):
    """Import the module of tests of the core or the beyond whose file has this name."""
    (path,) = [path for shelf in ("core", "beyond") for path in TESTS.glob(f"{shelf}/**/{name}.py")]
    return importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))


def bodies(module, size):
    """Return the test functions that run on this number of ranks."""
    for name, fn in inspect.getmembers(module, inspect.isfunction):
        marks = {mark.name: mark for mark in getattr(fn, "pytestmark", ())}
        ranks = marks.get("ranks")
        if ranks is None or size not in ranks.args or name in OTHERWISE:
            continue
        if ranks.kwargs.get("engine") == "native" or "native" in marks:
            continue
        found = list(cases(fn))
        if set(inspect.signature(fn).parameters) == {"rank", *found[0]}:
            yield from ((name, fn, case) for case in found)


def start():
    # By options, because the names of backends are those of other engines then.
    dist.init_process_group(timeout=60, pg_options=CPUOptions(engine="mpi"))


def main(names):
    # The tests have no launcher, whose variable this is.
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    start()
    rank, size = dist.get_rank(), dist.get_world_size()
    assert "engine=mpi" in repr(dist.group.WORLD)
    count = 0
    for module in names:
        for name, fn, case in bodies(module_named(module), size):
            if dist.is_initialized():
                dist.destroy_process_group()
            start()
            try:
                fn(rank, **case)
            except pytest.skip.Exception:
                continue
            except BaseException:
                print(f"rank {rank}: {module}.{name}{case or ''} failed", file=sys.stderr)
                traceback.print_exc()
                raise SystemExit(1) from None
            count += 1
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0:
        print(f"{count} bodies")


if __name__ == "__main__":
    main(sys.argv[1:])
