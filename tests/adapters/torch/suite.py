"""torch's own tests of a backend (DistributedTest, in torch's wheel), run on unisono or on Gloo.

    python tests/adapters/torch/suite.py --backend unisono --world-size 3 [name or pattern ...]

Prints what fails and how many pass; `--save` writes {test: outcome}, `--like` compares with such a
file: every test that passed there must pass here. Processes are forked, so that torch is loaded
once and not for each of some hundred tests and ranks.

What is changed of torch's tests: Gloo's rights (some tests name the backends they are for), the
comparison that torch 2.13 forgot in its all_reduce helper, and a longer wait in its file barrier,
which gives a loaded machine 10 s.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from pathlib import Path

# torch's function is for the backend of the name "gloo" only, whatever the backend can do.
RESERVED = "*monitored_barrier*"

BARRIER_S = 120.0


class AsGloo(str):
    """A backend's name that tests take for Gloo's where they ask."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    __hash__ = str.__hash__


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="unisono")
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--timeout", type=int, default=120, help="of one test, in seconds")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--like", type=Path)
    parser.add_argument("--exact", action="store_true", help="patterns are whole names")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("patterns", nargs="*")
    return parser.parse_args(arguments)


def prepare(backend: str, world_size: int, timeout_s: int, folder: str) -> type[unittest.TestCase]:
    """Import torch's tests, which read the environment at that time, and return the test case."""
    os.environ |= {
        # As Gloo while the module is loaded: the decorators of its tests are evaluated then.
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "TEMP_DIR": folder,
        "INIT_METHOD": f"file://{folder}/init",
        "GLOO_SOCKET_IFNAME": "lo",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(timeout_s),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }
    for name in ("barrier", "test_dir", "init_dir"):
        Path(folder, name).mkdir()

    import torch
    from torch.testing._internal.distributed import distributed_test as theirs

    torch.set_num_threads(1)
    if backend != "gloo":
        __import__(f"{backend}.torch")
        for feature in ("ddp", "subgroup"):
            theirs.DistTestCases.backend_feature[feature].add(backend)
        theirs.BACKEND = AsGloo(backend)
    theirs.TIMEOUT_OVERRIDE = {}
    file_barrier = theirs.Barrier.sync
    theirs.Barrier.sync = lambda wait_for=None, timeout=BARRIER_S: file_barrier(wait_for, timeout)

    class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _test_all_reduce_helper(
            self, group, group_id, rank, op, master_value, worker_value, expected_value,
            cuda=False, rank_to_GPU=None, dtype=torch.float, async_op=False,
        ):  # fmt: skip
            for src in group:
                value = master_value if rank == src else worker_value
                tensor = theirs._build_tensor(src + 1, dtype=dtype).fill_(value)
                work = theirs.dist.all_reduce(tensor, op, group_id, async_op=async_op)
                if async_op:
                    work.wait()
                expected = theirs._build_tensor(src + 1, dtype=dtype).fill_(expected_value)
                torch.testing.assert_close(tensor, expected)
            self._barrier()

    return Suite


def is_cpu_only() -> bool:
    """Whether tests for CUDA would start their processes only to skip."""
    import torch

    return not torch.cuda.is_available()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what this process and those it starts print."""
    streams = {stream: os.dup(stream.fileno()) for stream in (sys.stdout, sys.stderr)}
    with open(os.devnull, "w") as nowhere:
        for stream in streams:
            stream.flush()
            os.dup2(nowhere.fileno(), stream.fileno())
    try:
        yield
    finally:
        for stream, copy in streams.items():
            stream.flush()
            os.dup2(copy, stream.fileno())
            os.close(copy)


def outcome_of(case: unittest.TestCase, verbose: bool) -> str:
    """Run one test; return "passed", "skipped: why" or "failed: why"."""
    result = unittest.TestResult()
    with contextlib.nullcontext() if verbose else silence():
        case.run(result)
    if result.skipped:
        return f"skipped: {result.skipped[0][1]}"
    if result.errors or result.failures:
        return f"failed: {(result.errors or result.failures)[0][1]}"
    return "passed"


def main() -> int:
    given = parse()
    with tempfile.TemporaryDirectory() as folder:
        suite = prepare(given.backend, given.world_size, given.timeout, folder)
        around = "" if given.exact else "*"
        wanted = [f"{around}{pattern}{around}" for pattern in given.patterns] or ["*"]
        names = [
            name
            for name in unittest.defaultTestLoader.getTestCaseNames(suite)
            if any(fnmatch.fnmatch(name, pattern) for pattern in wanted)
            and not (fnmatch.fnmatch(name, "*cuda*") and is_cpu_only())
        ]
        outcomes: dict[str, str] = {}
        for name in names:
            begin = time.monotonic()
            outcomes[name] = said = outcome_of(suite(name), given.verbose)
            took = f"{time.monotonic() - begin:.1f} s"
            if fnmatch.fnmatch(name, RESERVED) and given.backend != "gloo":
                said = said.partition(":")[0]
            if given.verbose or said.startswith("failed"):
                print(f"{name} ({took}): {said}", flush=True)
    if given.save:
        given.save.write_text(json.dumps(outcomes, indent=1))
    kinds = [said.partition(":")[0] for said in outcomes.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
    print(f"{given.backend}, {given.world_size} ranks: {counts}")
    if given.like is None:
        return int("failed" in kinds)
    passed_there = {n for n, said in json.loads(given.like.read_text()).items() if said == "passed"}
    worse = sorted(
        name
        for name in passed_there & outcomes.keys()
        if outcomes[name] != "passed" and not fnmatch.fnmatch(name, RESERVED)
    )
    print(f"passes there and not here: {', '.join(worse) or 'none'}")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
