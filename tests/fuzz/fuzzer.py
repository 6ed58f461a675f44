"""Random calls of random worlds against NumPy; the same seed makes the same calls.

usage: fuzzer.py [SEED] [ROUNDS] [--steps N] [--seconds S] [--ranks threads|processes]
                 [--engine native|reference] [--transport inproc|tcp] [--size N]

Round k uses SEED + k. A failure is told with its seed and the least number of first steps with
which it was seen again; `fuzzer.py SEED 1 --steps N` repeats that.
"""

import argparse
import contextvars
import faulthandler
import multiprocessing
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import unisono as dist
from tests.fuzz.kinds import Call
from tests.fuzz.steps import Step, World, steps_of, world_of
from unisono.core.engines import is_native_built
from unisono.errors import LaunchError, PeerError
from unisono.testing import run

STEPS = 40
TIMEOUT_S = 30.0
TRIES = 2
"""How often a shorter program may pass before it counts as good: many faults depend on time."""


def play(rank: int, world: World, count: int) -> None:
    """Make the calls of one rank."""
    groups = [dist.group.WORLD]
    groups += [dist.new_group(ranks, sort_ranks=False) for ranks in world.groups[1:]]
    steps = [step for step in steps_of(world, count) if rank in world.groups[step.group]]
    errors: list[BaseException] = []
    lanes = [steps]
    if world.threaded:
        lanes = [[step for step in steps if step.group == k] for k in range(len(groups))]
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(_lane, *lane))
        for lane in ((world, groups, each, errors) for each in lanes[1:])
    ]
    for thread in threads:
        thread.start()
    _lane(world, groups, lanes[0], errors)
    for thread in threads:
        thread.join()
    if errors:
        # What a rank hears of another is less than what it saw itself.
        raise min(errors, key=lambda error: isinstance(error, PeerError))
    for members, group in zip(world.groups[1:], groups[1:], strict=True):
        if rank in members:
            dist.destroy_process_group(group)


def _lane(
    world: World, groups: Sequence[Any], steps: Sequence[Step], errors: list[BaseException]
) -> None:
    pending: list[Call] = []
    draw = np.random.default_rng((world.seed, 5, dist.get_rank()))
    try:
        for step in steps:
            call = Call(world, step, groups[step.group])
            is_done = _tried(call, call.start)
            if not step.is_async and not is_done:
                _finish(call)
            elif (not is_done and draw.random() < 0.9) or step.kind in ("ring", "messages"):
                pending.append(call)
            # Else it is dropped: its works and its memory, while it may be running.
            keep = int(draw.choice([0, 2, 5]))
            while len(pending) > keep:
                _finish(pending.pop(draw.integers(len(pending))))
        while pending:
            _finish(pending.pop())
        # Nobody may leave a group whose dropped calls still run.
        for index in {step.group for step in steps}:
            dist.barrier(groups[index])
    except BaseException as error:
        errors.append(error)
        for group in groups:
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                group.report_failure(repr(error))


def _finish(call: Call) -> None:
    if not _tried(call, call.finish) and call.must_fail:
        raise AssertionError(f"no error in {call.step}, expected {call.must_fail}")


def _tried(call: Call, what: Any) -> bool:
    """Do a part of a call; return whether it failed as it must."""
    try:
        what()
    except call.must_fail:
        for memory in call.memories:
            memory.check()
        return True
    except BaseException as error:
        error.add_note(f"rank {dist.get_rank()}, {call.step}")
        raise
    return False


def failure_of(world: World, count: int) -> BaseException | None:
    """Play the first `count` steps on all ranks; return how that failed."""
    how: Any = {"ranks": world.ranks, "engine": world.engine, "transport": world.transport}
    try:
        run(play, world.size, args=(world, count), timeout=TIMEOUT_S, **how)
    except Exception as error:
        if isinstance(error, LaunchError):
            # Ranks that are threads and hang are still there.
            faulthandler.dump_traceback()
        return error
    return None


def shortest(world: World, count: int, error: BaseException) -> tuple[int, BaseException]:
    """Return with how few of the first steps the failure was seen, and the failure then."""
    good = 0
    while count - good > 1:
        middle = (good + count) // 2
        for _ in range(TRIES):
            if (seen := failure_of(world, middle)) is not None:
                count, error = middle, seen
                break
        else:
            good = middle
    return count, error


def told(world: World, count: int, error: BaseException, fixed: dict[str, Any]) -> str:
    """Return a failure as text, with the command that repeats it."""
    given = "".join(f" --{name} {value}" for name, value in fixed.items() if value is not None)
    notes = "\n".join(getattr(error, "__notes__", ()))
    return (
        f"seed {world.seed} fails with {count} steps: {type(error).__name__}: {error}\n{notes}\n"
        f"{error.__cause__ or ''}\n{world}\nlast: {steps_of(world, count)[-1]}\n"
        f"again: {sys.executable} -m tests.fuzz.fuzzer {world.seed} 1 --steps {count}{given}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Play rounds until one fails; return the number of failed ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=1)
    parser.add_argument("rounds", type=int, nargs="?", default=100)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    for name in ("ranks", "engine", "transport", "size"):
        parser.add_argument(f"--{name}")
    options = vars(parser.parse_args(arguments))
    fixed = {name: options[name] for name in ("ranks", "engine", "transport", "size")}
    begin_s, played = time.monotonic(), 0
    for seed in range(options["seed"], options["seed"] + options["rounds"]):
        if time.monotonic() - begin_s > options["seconds"]:
            break
        world = world_of(seed, native=is_native_built(), **fixed)
        if (error := failure_of(world, options["steps"])) is not None:
            print(told(world, options["steps"], error, fixed), "\nwith fewer steps:", flush=True)
            print(told(world, *shortest(world, options["steps"], error), fixed), flush=True)
            return 1
        played += 1
    print(f"{played} rounds of {options['steps']} steps are right")
    return 0


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["unisono", "unisono.testing"])
    sys.exit(main())
