"""A few rounds of tests/fuzz/fuzzer.py, and proof that it finds what is wrong."""

import numpy as np
import pytest

from tests.fuzz import fuzzer, kinds
from unisono.core.engines import is_native_built

needs_native = pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built")


@pytest.mark.parametrize("engine", [pytest.param("native", marks=needs_native), "reference"])
@pytest.mark.parametrize("seed", [1, 101])
def test_random_calls_on_threads_are_right(capsys, engine, seed):
    rounds = ["--ranks", "threads", "--engine", engine, "--steps", "30"]
    assert fuzzer.main([str(seed), "5", *rounds]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_random_calls_on_processes_are_right(capsys, transport):
    fixed = ["--transport", "tcp"] if transport == "tcp" else []
    rounds = ["--ranks", "processes", "--size", "3", *fixed]
    assert fuzzer.main(["3", "1", *rounds]) == 0, capsys.readouterr().out


def test_a_wrong_answer_is_told_with_its_seed_and_the_fewest_steps(monkeypatch, capsys):
    world = fuzzer.world_of(7, native=False, ranks="threads", size=2)
    steps = fuzzer.steps_of(world, 40)
    first = next(k for k, step in enumerate(steps) if step.kind == "scan" and not step.group)

    def wrong(call):
        raise AssertionError("these numbers are wrong")

    monkeypatch.setattr(kinds.Call, "scan", wrong)
    assert fuzzer.main(["7", "1", "--ranks", "threads", "--size", "2"]) == 1
    text = capsys.readouterr().out
    assert f"seed 7 fails with {first + 1} steps: AssertionError: these numbers" in text
    assert f"tests.fuzz.fuzzer 7 1 --steps {first + 1} --ranks threads --size 2" in text


@pytest.mark.parametrize("what", ["an element", "a byte beside the array"])
def test_every_byte_is_compared(what):
    draw = np.random.default_rng(1)
    for _ in range(30):
        memory = kinds.Memory(draw, np.arange(6.0), np.arange(6.0) + 1, "2d")
        memory.memory[:] = memory.wanted
        memory.check()
        at = -1 if what != "an element" else memory.offset
        memory.memory[at] ^= 1
        with pytest.raises(AssertionError, match="differ" if at >= 0 else "around"):
            memory.check()
