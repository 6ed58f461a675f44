"""DistributedDataParallel against torch's own, against formulas, and in its corners."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

import unisono as dist  # noqa: E402
from tests.torch import ddp_bodies as bodies  # noqa: E402  needs torch
from tests.torch import shape_bodies  # noqa: E402
from unisono.errors import ArgumentTypeError, InvalidArgumentError  # noqa: E402
from unisono.parallel import DistributedDataParallel, PowerSGDState  # noqa: E402
from unisono.parallel.buckets import assign_buckets  # noqa: E402
from unisono.testing import run  # noqa: E402


def test_two_ranks_have_the_bits_of_torch_on_gloo(tmp_path):
    results = run(bodies.against_torch, 2, ranks="processes", args=(str(tmp_path / "gloo"),))
    assert results == [(0.0, 43)] * 2


def test_models_of_many_shapes_have_the_bits_of_torch_on_gloo(tmp_path):
    path = str(tmp_path / "gloo")
    for found in run(shape_bodies.shapes, 2, ranks="processes", args=(path,), timeout=120):
        assert found.keys() == shape_bodies.SHAPES.keys()
        for name, (different, compared) in found.items():
            assert (different, compared > 6) == (0, True), name


def test_three_ranks_differ_from_torch_by_rounding(tmp_path):
    results = run(bodies.against_torch, 3, ranks="processes", args=(str(tmp_path / "gloo"),))
    # Sums of three in another order, over three steps; the values are below 4.
    assert all(worst < 1e-5 and n == 43 for worst, n in results)


@pytest.fixture(scope="module", params=["threads", "processes"])
def results(request):
    """What every body returned on each of three ranks, by name."""
    ranks = run(bodies.everything, 3, ranks=request.param)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def test_gradients_are_the_average_of_local_ones(results):
    answers = results["average_of_local"]
    assert all(worst < 1e-6 for worst, _ in answers)
    assert all(bits == answers[0][1] for _, bits in answers)


def test_no_sync_adds_up(results):
    for seen in results["without_sync"]:
        assert seen == pytest.approx([0, 0, 0, 0], abs=1e-6)


@pytest.mark.parametrize("body", ["unused", "unused_alone"])
def test_unused_parameters(results, body):
    third, two_thirds = [[np.float32(1 / 3).item()] * 2] * 2, [[2 / 3] * 2] * 2
    for seen in results[body]:
        for first, second, nowhere in seen:
            assert first == third
            assert np.allclose(second, two_thirds)
            assert nowhere is None


def test_unused_by_mistake_is_named(results):
    for told in results["unused_by_mistake"]:
        assert "1 of 3 parameters got no gradient: layers.1.weight" in told
        assert "find_unused_parameters=True" in told


def test_large_gradients_are_reduced_where_they_are(results):
    for worst, uses, fresh in results["large"]:
        assert worst < 1e-5
        assert uses == [fresh] * 2


def test_large_gradients_in_memory_of_others(results):
    for scale, first, second in results["lent"]:
        assert scale == pytest.approx(1040 * 1041)
        assert (first, second) == (pytest.approx(1), pytest.approx(1))


def test_state_comes_from_rank_0(results):
    answers = results["state_of_rank_0"]
    assert all(answer == answers[0] for answer in answers)
    first, later, entries = answers[0]
    assert (first[1], later) == (5.0, 7.0)
    assert entries == len(bodies.make_model(0).state_dict())


@pytest.mark.parametrize(("name", "digits"), [("plain", 24), ("fp16", 11), ("bf16", 8)])
def test_hooks(results, name, digits):
    exact = np.arange(50) / 7 + 1
    for got, told in results[name]:
        error = np.abs(np.array(got) - exact) / exact
        # Each share is rounded, and so are the sums.
        assert error.max() <= 3 * 2.0**-digits
        assert name == "plain" or error.max() > 2.0**-22
        assert "registered already" in told


def test_power_sgd(results):
    answers = results["power_sgd"]
    assert all(bits == answers[0][1] for _, bits in answers)
    for answer, _ in answers:
        assert answer["low rank"] < 1e-5
        assert answer["bias"] == 0
        assert answer["sent"] == [(40, 4)]
        # One approximation of rank 4 is far off, but what it lacks is made up for.
        assert answer["distance"][0] > 0.4
        assert answer["distance"][-1] < 0.25 * answer["distance"][0]


def test_power_sgd_arguments():
    with pytest.raises(InvalidArgumentError, match="matrix_approximation_rank=0"):
        PowerSGDState(None, 0)
    assert not PowerSGDState(None, 4).compresses(1, 1000)


def test_reductions_begin_while_backward_runs(results):
    for events in results["order_of_buckets"]:
        assert [e for e in events if e != "first layer"] == [0, 1, 2, 3]
        assert events.index("first layer") > events.index(1)


def test_a_failing_hook_fails_backward(results):
    unfinished = "the last backward pass of DistributedDataParallel was not finished: "
    told = ["the hook failed", unfinished + "its reduction failed"]
    assert results["failing_hook"] == [told] * 3


def test_different_modules_are_a_mismatch(results):
    for told in results["other_model"]:
        assert "float32[2, 2]" in told
        assert "float32[3, 2]" in told


def test_sparse_gradients_are_refused(results):
    for told in results["sparse"]:
        assert told.startswith("the gradient of 'weight' is torch.sparse_coo; ")
        assert "; DistributedDataParallel reduces dense gradients" in told
        assert "sparse=False" in told


def test_gradients_whenever_calls_are_made(results):
    for wrong in results["moments"]:
        assert {name: by for name, by in wrong.items() if by > 1e-6} == {}


def test_a_changed_module_is_refused(results):
    told = "parameters changed after DistributedDataParallel was made: "
    for found in itertools.chain.from_iterable(results["refused"]):
        assert found == {
            "frozen": told + "first (frozen or gone)",
            "gone": told + "first (new, or frozen before); first (frozen or gone)",
            "added": told + "third (new, or frozen before)",
            "thawed": told + "fixed (new, or frozen before)",
            "other_type": told + "first, second (of another dtype or shape)",
            "error_in_backward": "the last backward pass of DistributedDataParallel was not "
            "finished: 1 of 2 parameters got no gradient: first",
        }


def test_a_frozen_module_passes_gradients_on(results):
    found = results["frozen_for_a_while"]
    p = len(found)
    assert found == [([7.0, [None, None]], [(p + 1) / 2] * 2)] * p


def test_a_scripted_module_is_averaged(results):
    p = len(results["scripted"])
    assert results["scripted"] == [(p + 1) / 2] * p


def test_a_hook_in_backward_is_refused(results):
    assert all("during a backward pass" in told for told in results["hook_in_backward"])


def test_buckets_close_when_full_and_follow_backward():
    sizes = [100, 10, 300, 10, 10]
    parameters = [torch.zeros(n) for n in sizes]
    parameters[1] = parameters[1].double()
    assert assign_buckets(parameters, [4 * 20, 4 * 400]) == [[4, 3], [1], [2, 0]]
    assert assign_buckets(parameters, [1]) == [[4], [3], [2], [1], [0]]
    # Large ones by themselves; the others as soon as the last of them is there.
    assert assign_buckets(parameters, [4 * 900], 4 * 300) == [[2], [1], [4, 3, 0]]


def test_arguments():
    with pytest.raises(ArgumentTypeError, match="must be a torch"):
        DistributedDataParallel(torch.zeros(1))
    with pytest.raises(dist.errors.NotInitializedError):
        DistributedDataParallel(torch.nn.Linear(1, 1))
