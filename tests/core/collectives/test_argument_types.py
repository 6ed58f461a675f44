"""Arguments of strange types on one rank: an error on all ranks at once, or the right result."""

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable, finish
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    PeerLostError,
    UnisonoError,
)


class Named:
    """Looks like an array in one respect."""

    shape = (2,)
    dtype = "float64"


def strange():
    """Return values of many types, new ones because some are used up."""
    return [
        None,
        True,
        1.5,
        -1,
        2**70,
        "x",
        b"\1\1",
        object(),
        Named(),
        Named,
        [],
        [None, None],
        [0.5, 1.5],
        [True, True],
        ["1", "1"],
        [-1, 3],
        [[1], [1]],
        {0: 1, 1: 1},
        {1, 2},
        (number for number in (1, "x")),
        np.float64(1.5),
        np.array([0.5, 1.5], np.float32),
        np.array([True, True]),
        np.array([[1, 1]]),
        np.array("x"),
        np.array([None, None]),
        np.zeros(0),
    ]


def a(*values):
    return np.array(values, float)


def pair():
    return [a(1, 2), a(3, 4)]


def on_root(value):
    return value if dist.get_rank() == 0 else None


# name -> its good arguments, new for each call
CALLS = {
    "broadcast": lambda: {"tensor": a(1, 2), "src": 0},
    "all_reduce": lambda: {"tensor": a(1, 2), "op": dist.ReduceOp.SUM},
    "all_reduce_coalesced": lambda: {"tensors": pair(), "op": dist.ReduceOp.SUM},
    "reduce": lambda: {"tensor": a(1, 2), "dst": 0, "op": dist.ReduceOp.SUM},
    "all_gather": lambda: {"tensor_list": pair(), "tensor": a(1, 2)},
    "all_gather_into_tensor": lambda: {
        "output_tensor": a(0, 0),
        "input_tensor": a(5),
        "output_split_sizes": [1, 1],
    },
    "gather": lambda: {"tensor": a(1, 2), "gather_list": on_root(pair()), "dst": 0},
    "scatter": lambda: {"tensor": a(1, 2), "scatter_list": on_root(pair()), "src": 0},
    "reduce_scatter": lambda: {
        "output": a(0, 0),
        "input_list": pair(),
        "op": dist.ReduceOp.SUM,
    },
    "reduce_scatter_tensor": lambda: {
        "output": a(0),
        "input": a(1, 2),
        "op": dist.ReduceOp.SUM,
        "input_split_sizes": [1, 1],
    },
    "all_to_all": lambda: {"output_tensor_list": pair(), "input_tensor_list": pair()},
    "all_to_all_single": lambda: {
        "output": a(0, 0),
        "input": a(1, 2),
        "output_split_sizes": [1, 1],
        "input_split_sizes": [1, 1],
    },
    "scan": lambda: {"tensor": a(1, 2), "op": dist.ReduceOp.SUM},
    "exscan": lambda: {"tensor": a(1, 2), "op": dist.ReduceOp.SUM},
    "barrier": lambda: {},
    "neighbor_all_to_all": lambda: {
        "outputs": pair(),
        "inputs": pair(),
        "neighbors": dist.init_device_mesh("cpu", (2,)),
        "periodic": True,
    },
}
OTHERS = {
    "broadcast_object_list": lambda: {"object_list": [1], "src": 0},
    "all_gather_object": lambda: {"object_list": [None, None]},
    "gather_object": lambda: {"object_gather_list": on_root([None, None]), "dst": 0},
    "scatter_object_list": lambda: {
        "scatter_object_output_list": [None],
        "scatter_object_input_list": on_root([1, 2]),
        "src": 0,
    },
    "all_reduce_object": lambda: {},
    "reduce_object": lambda: {"dst": 0},
    "monitored_barrier": lambda: {"wait_all_ranks": False},
    "new_group": lambda: {"ranks": [0, 1], "backend": "unisono"},
    "new_subgroups": lambda: {"group_size": 2},
    "split_group": lambda: {"split_ranks": [[0, 1]]},
    "shared_array": lambda: {"shape": (2,), "dtype": np.float64},
    "Neighbors": lambda: {"sources": [0, 1], "destinations": [0, 1]},
    "open_file": lambda: {"path": "/dev/null", "mode": "r"},
    "should_stop": lambda: {},
}
EXTRA = {
    "all_gather_object": {"obj": 1},
    "gather_object": {"obj": 1},
    "all_reduce_object": {"obj": 1, "op": max},
    "reduce_object": {"obj": 1, "op": max},
}


def arrays_in(value):
    if isinstance(value, np.ndarray):
        return [value.tolist()]
    if isinstance(value, (list, tuple)):
        return [each for part in value for each in arrays_in(part)]
    return []


def outcome(name, given):
    """Return the class of the call's error, or the values of its arrays."""
    try:
        result = getattr(dist, name)(**given, **EXTRA.get(name, {}))
        if isinstance(result, dist.Work):
            finish(result)
        if hasattr(result, "close"):
            result.close()
    except (CollectiveTimeoutError, PeerLostError) as error:
        return f"hung: {error}"
    except UnisonoError as error:
        return f"raised: {type(error).__name__}: {error}"
    except TypeError as error:
        # The op may be a function, and what a function raises comes through on its rank.
        if not isinstance(given.get("op"), type):
            raise
        return f"raised: {error}"
    return "ended", repr(arrays_in(list(given.values())))


def try_every_type(rank, name, arguments, commons):
    """Replace each argument of rank 1 by each strange value."""
    expected = outcome(name, arguments())
    for place in [*arguments(), *commons]:
        for at in range(len(strange())):
            given = arguments()
            if rank == 1:
                given[place] = strange()[at]
            found = [None, None]
            dist.all_gather_object(found, outcome(name, given), timeout=60)
            case = name, place, repr(strange()[at]), found
            assert not any(each[0] == "h" or str(each).startswith("hung") for each in found), case
            if not all(str(each).startswith("raised") for each in found):
                # Both ranks have ended the call, and rank 0 has its result.
                assert [each[0] for each in found] == ["ended", "ended"], case
                assert rank == 1 or found[0] == expected, case
    check_usable()


COMMON = ("timeout", "algorithm", "async_op", "deterministic")

# Split sizes of 2 rows, one for each of 2 ranks.
FORMS = {
    "list": lambda: [1, 1],
    "tuple": lambda: (1, 1),
    "array": lambda: np.array([1, 1]),
    "small integers": lambda: np.array([1, 1], np.uint8),
    "NumPy's integers": lambda: [np.int32(1), np.int64(1)],
    "generator": lambda: (1 for _ in range(2)),
    "map": lambda: map(int, "11"),
}
WRONG = {
    "fractions": [0.5, 1.5],
    "floats": np.array([1.0, 1.0]),
    "text": "11",
    "bytes": b"\1\1",
    "texts": ["1", "1"],
    "flags": [True, True],
    "array of flags": np.array([True, True]),
    "None": [None, 2],
    "one integer": 2,
    "array of no dimension": np.array(2),
    "table": np.array([[1, 1]]),
    "negative": [-1, 3],
    "too few": [2],
    "too many": [1, 1, 0],
    "wrong sum": [1, 2],
}


def with_splits(sizes):
    """Return the calls that take split sizes, each with its array, and the right result."""
    gathered, scattered, sent = a(0, 0), a(0), a(0, 0)
    return {
        "all_gather_into_tensor": (
            lambda: dist.all_gather_into_tensor(gathered, a(5), output_split_sizes=sizes()),
            (gathered, [5, 5]),
        ),
        "reduce_scatter_tensor": (
            lambda: dist.reduce_scatter_tensor(scattered, a(1, 1), input_split_sizes=sizes()),
            (scattered, [2]),
        ),
        "all_to_all_single": (
            lambda: dist.all_to_all_single(sent, a(7, 7), sizes(), sizes()),
            (sent, [7, 7]),
        ),
        "alltoall_base": (
            lambda: finish(dist.group.WORLD.alltoall_base(sent, a(7, 7), sizes(), sizes())),
            (sent, [7, 7]),
        ),
    }


@pytest.mark.ranks(2, engine="both")
def test_split_sizes_of_every_form_are_right(rank):
    for form, sizes in FORMS.items():
        # The other rank's sizes are a list.
        calls = with_splits(sizes if rank == 1 else FORMS["list"])
        for name, (call, (result, expected)) in calls.items():
            result[:] = -1
            call()
            assert result.tolist() == expected, (form, name)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    with pytest.raises(InvalidArgumentError):
        # Not "no split sizes".
        dist.all_to_all_single(a(0, 0), a(1, 2), np.array([0]), np.array([0]), group=alone)


@pytest.mark.ranks(2, engine="both")
def test_wrong_split_sizes_are_an_error_on_all_ranks(rank):
    for form, sizes in WRONG.items():
        calls = with_splits((lambda each: lambda: each)(sizes) if rank == 1 else FORMS["list"])
        for name, (call, (result, _)) in calls.items():
            before = result.tolist()
            mine = (ArgumentTypeError, InvalidArgumentError)
            with pytest.raises(mine if rank == 1 else CollectiveMismatchError) as caught:
                call()
            for words in ("rank 1 called", "but refused it"):
                assert rank == 1 or words in caught.value.what, (form, name)
            assert result.tolist() == before, (form, name)
    check_usable()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.ranks(2)
def test_collectives_take_no_strange_argument_on_one_rank(rank, name):
    try_every_type(rank, name, CALLS[name], COMMON)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.ranks(2)
def test_other_calls_take_no_strange_argument_on_one_rank(rank, name):
    commons = () if name in ("new_subgroups", "split_group") else ("timeout",)
    try_every_type(rank, name, OTHERS[name], commons)
