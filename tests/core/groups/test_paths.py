"""torch.distributed's import paths without torch; value-returning collectives; uneven loops."""

import dataclasses
import json
import os
import pkgutil
from importlib import import_module

import numpy as np
import pytest

import unisono as dist
from tests.support.programs import python
from unisono.algorithms.join import Join, Joinable, JoinHook
from unisono.elastic.multiprocessing.errors import ChildFailedError, record
from unisono.errors import (
    ArgumentTypeError,
    CollectiveError,
    CollectiveMismatchError,
    InvalidArgumentError,
    RefusedModuleError,
    UnsupportedError,
)
from unisono.launcher.api import LaunchConfig, elastic_launch
from unisono.launcher.spawn import SpawnContext
from unisono.refused import REFUSED_MODULES


@pytest.mark.parametrize("name", sorted(REFUSED_MODULES))
def test_a_refused_module_says_why(name):
    with pytest.raises(ImportError, match=rf"there is no module unisono\.{name}: ") as caught:
        import_module(f"unisono.{name}")
    assert isinstance(caught.value, (RefusedModuleError, UnsupportedError))
    assert REFUSED_MODULES[name] in str(caught.value)


def test_an_unknown_module_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'unisono\.nonesuch'"):
        import_module("unisono.nonesuch")


def test_modules_of_torch_are_here_or_refused():
    theirs = pytest.importorskip("torch.distributed")
    here = {module.name for module in pkgutil.iter_modules(dist.__path__)}
    for module in pkgutil.iter_modules(theirs.__path__):
        if not module.name.startswith("_"):
            assert (module.name in here) != (module.name in REFUSED_MODULES), module.name


def test_paths_below_the_package_need_no_import_of_their_own():
    assert dist.device_mesh.init_device_mesh is dist.init_device_mesh
    assert dist.distributed_c10d.all_reduce is dist.all_reduce
    assert dist.algorithms.join.Join is Join


def test_python_m_unisono_run_is_unisono_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import unisono as dist; dist.init_process_group(); print(dist.get_rank())")
    done = python("-m", "unisono.run", "--nproc-per-node=2", str(script), check=True)
    assert sorted(done.stdout.split()) == ["0", "1"]
    assert python("-m", "unisono.run", "--nonesuch").returncode != 0


def test_record_writes_the_exception_for_another_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    @record
    def main(value):
        if value < 0:
            raise ValueError("too small")
        raise SystemExit(value)

    assert main(0) is None
    with pytest.raises(SystemExit):
        main(3)
    assert not (tmp_path / "error.json").exists()
    with pytest.raises(ValueError, match="too small"):
        main(-1)
    written = json.loads((tmp_path / "error.json").read_text())["message"]
    assert written["message"] == "ValueError: too small"
    assert "in main" in written["extraInfo"]["py_callstack"]


def test_expires_ends_a_process_and_shows_where_it_was():
    program = """
from time import sleep
from unisono.elastic.timer import expires
with expires(after=60):
    with expires(after=60):
        pass
    with expires(after=0.2):
        sleep(60)
"""
    done = python("-c", program)
    assert done.returncode == 1
    assert "line 8 in <module>" in done.stderr
    program = "from unisono.elastic.timer import expires\nwith expires(60): print('in time')"
    assert python("-c", program, check=True).stdout == "in time\n"
    from unisono.elastic.timer import expires

    with pytest.raises(InvalidArgumentError, match="expires takes a positive number of seconds"):
        expires(0).__enter__()
    with pytest.raises(InvalidArgumentError, match=r"expires takes at most \d+ seconds, got 1"):
        expires(1e12).__enter__()
    with expires(60):  # the one before has left nothing
        pass


def test_expires_needs_no_file_as_standard_error():
    program = """
import io, sys
from time import sleep
from unisono.elastic.timer import expires
sys.stderr = io.StringIO()
with expires(after=60), expires(after=60):
    pass
with expires(after=0.2):
    sleep(60)
"""
    done = python("-c", program)
    assert done.returncode == 1
    assert "line 9 in <module>" in done.stderr


def summed(x, path):
    """Sum over the ranks of a launch; the first attempt fails on rank 1."""
    dist.init_process_group()
    dist.all_reduce(y := np.array([x + dist.get_rank()]))
    if path is not None and dist.get_rank() == 1 and not path.exists():
        path.write_text("failed once")
        raise ValueError("in the first attempt")
    return y.item()


def test_elastic_launch_calls_a_function_and_starts_again(tmp_path):
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1)
    assert elastic_launch(config, summed)(5, tmp_path / "one") == {0: 11, 1: 11}
    config.max_restarts = 0
    with pytest.raises(ChildFailedError, match="in the first attempt"):
        elastic_launch(config, summed)(5, tmp_path / "two")
    with pytest.raises(UnsupportedError, match=r"elastic_launch calls functions, got 'train\.py'"):
        elastic_launch(config, "train.py")()
    with pytest.raises(UnsupportedError, match="starts processes on one host only, got max_nodes"):
        LaunchConfig(1, 4, 2)


def on_one_gpu():
    return os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"], os.environ["RANK"]


def test_launch_config_has_the_fields_of_torch(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    config = LaunchConfig(1, 1, 2, max_restarts=0, virtual_local_rank=True, shutdown_timeout=60)
    join, seen = SpawnContext.join, []

    def recorded(self, *args, **how):
        seen.append(how)
        return join(self, *args, **how)

    monkeypatch.setattr(SpawnContext, "join", recorded)
    found = elastic_launch(config, on_one_gpu)()
    assert seen == [{"grace_period": 60}]
    assert found == {0: ("0", "5", "0"), 1: ("0", "3", "1")}
    for name, value in (
        ("event_log_handler", "console"),
        ("numa_options", object()),
        ("signals_to_handle", "SIGTERM"),
        ("duplicate_stdout_filters", ["x"]),
        ("duplicate_stderr_filters", ["x"]),
    ):
        with pytest.warns(UserWarning, match=f"LaunchConfig: {name} has no effect"):
            LaunchConfig(1, 1, 2, **{name: value})
    theirs = pytest.importorskip("torch.distributed.launcher.api").LaunchConfig
    names = [[each.name for each in dataclasses.fields(kind)] for kind in (LaunchConfig, theirs)]
    assert names[0] == names[1]


# ---- value-returning collectives ---------------------------------------------------------------


@pytest.mark.ranks(3, kind="both")
def test_functional_forms_return_what_numpy_does_and_change_nothing(rank):
    f, all_x = dist.functional, [np.arange(6.0).reshape(3, 2) * 2 + r for r in range(3)]
    x = all_x[rank].T.copy().T  # not contiguous
    root = rank == 1
    expected = {
        "all_reduce": (f.all_reduce(x), sum(all_x)),
        "max": (f.all_reduce(x, dist.ReduceOp.MAX), np.max(all_x, axis=0)),
        "broadcast": (f.broadcast(x, 2), all_x[2]),
        "reduce": (f.reduce(x, 1), sum(all_x) if root else None),
        "all_gather": (f.all_gather(x), np.stack(all_x)),
        "gather": (f.gather(x, 1), np.stack(all_x) if root else None),
        "reduce_scatter": (f.reduce_scatter(x), sum(all_x)[rank : rank + 1]),
        "all_to_all": (f.all_to_all(x), np.stack([each[rank] for each in all_x])),
        "scan": (f.scan(x), sum(all_x[: rank + 1])),
        "exscan": (f.exscan(x), sum(all_x[:rank]) if rank else x),
    }
    for name, (found, value) in expected.items():
        np.testing.assert_array_equal(found, value, err_msg=name)
    np.testing.assert_array_equal(x, all_x[rank])


@pytest.mark.ranks(2)
def test_functional_forms_refuse_what_they_cannot_return(rank):
    f, x = dist.functional, np.ones(4)
    for name in f.__all__:
        expected = UnsupportedError if rank == 0 else CollectiveMismatchError
        how = {"async_op": True} if rank == 0 else {}
        with pytest.raises(
            expected, match=rf"functional.{name} returns its result, so it takes no async_op"
        ):
            getattr(f, name)(x, **how)
        getattr(f, name)(x, async_op=False)
    cases = [
        (f.reduce_scatter, (np.ones(()),), "functional.reduce_scatter takes an array with rows"),
        (f.gather, (x, 7), "7"),
        (f.reduce, (x, 7), "7"),
    ]
    for function, wrong, text in cases:
        expected = InvalidArgumentError if rank == 0 else CollectiveMismatchError
        with pytest.raises(expected, match=text):
            function(*(wrong if rank == 0 else (x,)))
    group = dist.new_group([1])
    if rank == 0:
        with (
            pytest.warns(UserWarning, match="does not belong"),
            pytest.raises(InvalidArgumentError, match="does not belong to the given group"),
        ):
            f.all_reduce(x, group=group)
    assert f.all_reduce(x).tolist() == [2.0] * 4


@pytest.mark.ranks(2)
def test_gather_into_tensor_stacks_or_concatenates(rank):
    for shape in ((4, 3), (2, 2, 3)):
        y = np.zeros(shape) if rank == 0 else None
        dist.gather_into_tensor(y, np.full((2, 3), rank + 1.0))
        if rank == 0:
            assert y.reshape(2, 6).tolist() == [[1.0] * 6, [2.0] * 6]
    work = dist.gather_single(y, np.full((2, 3), 7.0), async_op=True, group_dst=0)
    assert work.wait()
    group, options = dist.group.WORLD, dist.GatherOptions()
    options.rootRank = 1
    for method in (group.gather_single, group.gather_into_tensor):
        z = np.zeros((4, 3))
        work = method(z, np.full((2, 3), rank + 1.0), options)
        assert work.wait()
        assert z.reshape(2, 6).tolist() == [[rank * 1.0] * 6, [rank * 2.0] * 6]
    method(output=z if rank == 0 else None, input=np.full(6, 5.0)).wait()
    assert z[0, 0] == (5.0 if rank == 0 else 1.0)
    for wrong, text in (
        (bytearray(12), "output_tensor must be an array with rows, got bytearray"),
        (np.zeros(3), "output_tensor has 3 rows, which 2 ranks cannot share equally"),
    ):
        kind = (ArgumentTypeError, InvalidArgumentError) if rank == 0 else CollectiveError
        with pytest.raises(kind, match=text):
            dist.gather_into_tensor(wrong if rank == 0 else None, np.ones(6))
        with pytest.raises(kind, match=text):
            group.gather_single(wrong, np.ones(6)).wait()
    dist.barrier()
    # The function and the method are the same call.
    z, x = np.zeros(2), np.full(1, rank + 1.0)
    dist.gather_single(z, x) if rank == 0 else group.gather_single(z, x).wait()
    assert z.tolist() == ([1.0, 2.0] if rank == 0 else [0.0, 0.0])
    # What only rank 1 does wrong, and its error; rank 0 gets a report of it.
    for arguments, how, error, text in (
        ((z,), {}, ArgumentTypeError, ": missing argument input"),
        ((z, x), {"wrong": 1}, TypeError, "wrong"),
        ((z, x, dist.BarrierOptions()), {}, ArgumentTypeError, "have no rootRank"),
        ((z, x, 5), {}, InvalidArgumentError, "root"),
        ((z, x), {"opts": 5}, ArgumentTypeError, "the options of gather have no asyncOp"),
    ):
        with pytest.raises(error if rank else CollectiveMismatchError, match=text):
            group.gather_single(*(arguments if rank else (z, x)), **(how if rank else {})).wait()
    dist.barrier()


# ---- loops of different length -----------------------------------------------------------------


class Summer(Joinable):
    """Sums a number over the ranks in each step."""

    def __init__(self):
        super().__init__()
        self.sums, self.last = [], None

    def step(self, number):
        Join.notify_join_context(self)
        self.sums.append(float(dist.functional.all_reduce(np.array([number]))[0]))

    def join_hook(self, **kwargs):
        summer = self

        class Hook(JoinHook):
            def main_hook(self):
                dist.functional.all_reduce(np.array([0.0]))

            def post_hook(self, is_last_joiner):
                summer.last = is_last_joiner

        return Hook()

    join_device = "cpu"
    join_process_group = None


class Idle(Summer):
    """Makes no calls, so that its hook shadows none."""

    def join_hook(self, **kwargs):
        return JoinHook()


@pytest.mark.ranks(3)
def test_join_shadows_the_calls_of_ranks_with_more_data(rank):
    summer, idle = Summer(), Idle()
    with Join([summer, idle]):
        for _ in range(rank + 1):
            summer.step(rank + 1.0)
            assert Join.notify_join_context(idle) is None
    assert summer.sums == [6.0, 5.0, 3.0][: rank + 1]
    assert summer.last == (rank == 2)
    early = Join([summer], throw_on_early_termination=True)
    with pytest.raises(CollectiveError) as caught, early:
        [summer.step(1.0) for _ in range(rank + 1)]
    text = f"rank {rank} has no data left for its loop"
    assert (text if rank == 0 else f"a rank has no data left for the loop of rank {rank}") in str(
        caught.value
    )
    with Join([summer], enable=False):
        summer.step(1.0)
    with pytest.raises(InvalidArgumentError, match="joinables of 0 groups, expected one"):
        Join([])
