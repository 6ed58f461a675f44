"""Registration, names, errors and callbacks: what one process can show."""

import os
import pickle
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from tests.support.calls import wait_until
from tests.support.programs import python
from unisono import errors

torch = pytest.importorskip("torch")
torch_dist = pytest.importorskip("torch.distributed")

import unisono.torch  # noqa: E402  needs torch
from unisono.adapters.torch.arguments import reduce_op  # noqa: E402
from unisono.adapters.torch.callbacks import CallbackThreads  # noqa: E402
from unisono.adapters.torch.errors import for_torch  # noqa: E402
from unisono.adapters.torch.operations import TorchOperations  # noqa: E402
from unisono.core.operations.methods import OPS  # noqa: E402

PATIENCE_S = 60


@pytest.fixture
def alone():
    """A world of one rank, whose default group is ours; returned."""
    torch_dist.init_process_group("unisono", store=torch_dist.HashStore(), rank=0, world_size=1)
    yield torch_dist.distributed_c10d._get_default_group()
    torch_dist.destroy_process_group()


def test_torchs_refusal_of_monitored_barrier_is_on_the_page_on_trouble(alone):
    page = Path(__file__).parents[3] / "docs/howto/troubleshooting.md"
    with pytest.raises(ValueError, match="GLOO") as caught:
        torch_dist.monitored_barrier()
    assert f"torch's `{str(caught.value).rstrip('.')}`" in page.read_text()


def test_registering_twice_is_fine():
    unisono.torch.register()
    assert torch_dist.is_backend_available("unisono")
    assert torch_dist.Backend("UNISONO") == "unisono"
    assert torch_dist.Backend.default_device_backend_map["cpu"] == "gloo"


# The entry point of an installed unisono calls the function when torch ends its import. A child for
# each case, because importing torch takes 2 s.
AUTOLOAD = """
import os, sys, warnings

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in broken:
            raise ModuleNotFoundError("sabotage")

broken = {"numpy"}
sys.meta_path.insert(0, Finder())
warnings.simplefilter("ignore")
import torch

for module, setting in [("", ""), ("unisono._engine", ""), ("unisono.errors", ""), ("", "odd")]:
    if os.fork() == 0:
        broken.add(module)
        os.environ["UNISONO_LOG"] = setting
        from unisono.autoload import torch_backend

        torch_backend()
        known = torch.distributed.is_backend_available("unisono")
        heavy = ("unisono.core.engines", "unisono.core.groups")
        loaded = [m for m in sys.modules if m.startswith(heavy)]
        print([module, setting], torch.ones(2).sum().item(), known, loaded, flush=True)
        os._exit(0)
    os.wait()
"""


def test_nothing_about_unisono_breaks_import_torch():
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    lines = python("-c", AUTOLOAD, check=True, env=env, limit_s=300.0).stdout.splitlines()
    assert lines == [
        "['', ''] 2.0 True []",
        "['unisono._engine', ''] 2.0 True []",
        "['unisono.errors', ''] 2.0 False []",
        "['', 'odd'] 2.0 True []",
    ]


@pytest.mark.parametrize("what", ["old", "without torch.distributed"])
def test_a_torch_that_does_not_fit_is_logged(what, monkeypatch, caplog):
    from unisono.autoload import torch_backend

    monkeypatch.delitem(sys.modules, "unisono.adapters.torch")
    monkeypatch.delitem(torch_dist.Backend._plugins, "UNISONO")
    if what == "old":
        monkeypatch.delattr(torch_dist.Backend, "register_backend")
    else:
        monkeypatch.setattr(torch_dist, "is_available", lambda: False)
    torch_backend()
    assert "no backend 'unisono' for torch" in caplog.text
    assert ("register_backend" if what == "old" else "lacks") in caplog.text


def test_the_entry_point_names_the_function():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    points = tomllib.loads(text)["project"]["entry-points"]["torch.backends"]
    assert points == {"unisono": "unisono.autoload:torch_backend"}


def test_names_and_numbers_of_a_group(alone):
    assert isinstance(alone, unisono.torch.ProcessGroup)
    assert isinstance(alone, torch_dist.ProcessGroup)
    assert (alone.name(), alone.rank(), alone.size()) == ("unisono", 0, 1)
    assert torch_dist.get_backend() == "unisono"
    assert alone.group_name == "0"
    assert alone.group_desc == "default_pg"
    assert alone._device_types == [torch.device("cpu")]
    assert repr(alone).startswith("<unisono.torch.ProcessGroup <ProcessGroup 'default' rank=0")
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(alone)


def test_short_forms_of_the_methods(alone):
    x = torch.ones(3)
    alone.allreduce(x).wait()
    alone.allreduce([x], torch_dist.ReduceOp.MAX).wait()
    alone.allreduce(x, op=torch_dist.ReduceOp.SUM).wait()
    alone.broadcast(x, root=0).wait()
    alone.reduce(x, 0, torch_dist.ReduceOp.SUM).wait()
    outs = [torch.zeros(3)]
    alone.allgather(outs, x).wait()
    alone.gather(outs, x, 0).wait()
    alone.scatter(outs[0], [2 * x], root=0).wait()
    alone.alltoall([outs[0]], [3 * x]).wait()
    assert outs[0].tolist() == [3.0] * 3
    alone.barrier().wait()


def test_plain_calls_with_odd_arguments_are_refused(alone):
    c10d, x = torch._C._distributed_c10d, torch.ones(2)
    options = c10d.ReduceOptions()
    options.asyncOp = False
    with pytest.raises(TypeError, match="list of 2"):
        alone.reduce([x, x], options)
    for root in (-1, 1):
        options = c10d.BroadcastOptions()
        options.rootRank, options.asyncOp = root, False
        with pytest.raises(ValueError, match=f"={root} is not a rank|rank {root}"):
            alone.broadcast([x], opts=options)
    for peer in (-1, 1):
        with pytest.raises(ValueError, match=f"dst={peer} is not a rank"):
            alone.send([x], peer, 0)
    with pytest.raises(TypeError, match="list of 2"):
        alone.recv_anysource([x, x], 0)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_products_of_complex_halves_are_refused(alone):
    pairs = torch.ones(2, dtype=torch.complex32)
    with pytest.raises(NotImplementedError, match="PRODUCT is not defined on complex32"):
        torch_dist.reduce(pairs, 0, torch_dist.ReduceOp.PRODUCT)


def test_timeouts_of_short_forms_reach_the_call(alone):
    with pytest.raises(TypeError, match=r"timeout must be .* got str"):
        alone.allreduce(torch.ones(1), timeout="soon")


def test_a_factor_of_torch():
    premul = torch_dist._make_nccl_premul_sum(0.5)
    assert (reduce_op(premul).name, reduce_op(premul).factor) == ("PREMUL_SUM", 0.5)


def test_options_of_another_backend_reach_it_and_no_other():
    from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

    options = FakeProcessGroup.Options()
    torch_dist.init_process_group(
        "cpu:unisono,meta:fake",
        store=torch_dist.HashStore(),
        rank=0,
        world_size=1,
        pg_options=options,
    )
    try:
        for group in (torch_dist.group.WORLD, torch_dist.new_group([0], pg_options=options)):
            torch_dist.all_reduce(torch.ones(2), group=group)
            torch_dist.all_reduce(torch.ones(2, device="meta"), group=group)
            backend = group._devices["meta"]._get_backend(torch.device("meta"))
            assert (backend.name(), backend.options is options) == ("fake", True)
            assert {d.type for d in group._device_types} == {"cpu", "meta"}
    finally:
        torch_dist.destroy_process_group()


def test_options_of_a_backend_that_is_not_there_are_refused(alone):
    group = torch_dist.new_group([0], pg_options=torch_dist.ProcessGroupGloo._Options())
    for _ in range(2):
        with pytest.raises(
            TypeError, match=r"backend 'unisono' must be unisono.lowlevel.CPUOptions, got "
        ):
            torch_dist.all_reduce(torch.ones(2), group=group)
    with pytest.raises(TypeError, match="CPUOptions, got 7"):
        torch_dist.new_group([0], pg_options=7)


class Recorder:
    """In place of torch's process group of a device: notes the names of what it is asked for."""

    def __init__(self):
        self.names = []

    def __getattr__(self, name):
        def called(*args, **kwargs):
            self.names.append(name)
            done = torch.futures.Future()
            done.set_result(None)
            return torch._C._distributed_c10d._create_work_from_future(done)

        return called


def test_every_operation_goes_to_the_backend_of_its_device():
    dist, meta = torch_dist, torch.device("meta")
    x, y = torch.ones(2, device="meta"), torch.ones(2, device="meta")
    # torch on the CPU has no nccl: it must not be needed before a tensor on a GPU comes.
    store = dist.HashStore()
    dist.init_process_group("cpu:unisono,meta:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        group = dist.distributed_c10d._get_default_group()
        group._devices["meta"] = asked = Recorder()
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather([y], x)
        dist.all_gather_single(y, x)
        dist.gather(x, [y])
        dist.scatter(x, [y])
        dist.reduce_scatter(x, [y])
        dist.reduce_scatter_single(x, y)
        dist.all_to_all([y], [x])
        dist.all_to_all_single(y, x)
        dist.isend(x, 0)
        dist.irecv(x, 0)
        dist.irecv(x)
        dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, y, 0)])
        with dist._coalescing_manager(group, meta):
            dist.all_reduce(x)
            dist.all_reduce(y)
        group.abort()
    finally:
        dist.destroy_process_group()
    assert asked.names == [
        "allreduce", "allreduce", "broadcast", "reduce", "allgather", "all_gather_single", "gather",
        "scatter", "reduce_scatter", "reduce_scatter_single", "alltoall", "all_to_all_single",
        "send", "recv", "recv_anysource", "send", "recv",
        "_start_coalescing", "allreduce_coalesced", "_end_coalescing", "abort",
    ]  # fmt: skip


@pytest.mark.parametrize("devices", ["cpu:gloo,meta:unisono", "meta:unisono,cpu:gloo"])
def test_unisono_for_another_device_is_refused(devices):
    # torch would send the CPU's tensors here, whatever was named for them.
    torch_dist.init_process_group(devices, store=torch_dist.HashStore(), rank=0, world_size=1)
    try:
        line = "backend 'unisono' is for tensors on the CPU; group"
        with pytest.raises(NotImplementedError, match=f"{line} .*meta:unisono"):
            torch_dist.all_reduce(torch.ones(2))
    finally:
        torch_dist.destroy_process_group()


def test_nothing_of_another_device_is_loaded_before_its_first_tensor():
    # This torch has no NCCL: the error of torch comes with the first tensor, and calls on
    # the CPU go on.
    store = torch_dist.HashStore()
    torch_dist.init_process_group("cpu:unisono,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        group = torch_dist.distributed_c10d._get_default_group()
        for _ in range(2):
            torch_dist.barrier()
            if not torch.cuda.is_available():
                with pytest.raises(RuntimeError, match="NCCL"):
                    group.on_device("cuda")
        torch_dist.all_reduce(torch.ones(2))
    finally:
        torch_dist.destroy_process_group()


def test_a_device_without_backend_is_an_error_that_says_how(alone):
    with pytest.raises(NotImplementedError, match=r"'meta'.*cpu"):
        torch_dist.all_reduce(torch.ones(2, device="meta"))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (errors.CollectiveMismatchError, torch_dist.DistBackendError),
        (errors.CollectiveTimeoutError, torch_dist.DistBackendError),
        (errors.CollectiveAbortedError, torch_dist.DistBackendError),
        (errors.PeerLostError, torch_dist.DistBackendError),
        (errors.PeerFailedError, torch_dist.DistBackendError),
        (errors.TransportError, torch_dist.DistNetworkError),
        (errors.RendezvousError, torch_dist.DistNetworkError),
        (errors.StoreTimeoutError, torch_dist.DistStoreError),
        (errors.UsageError, torch_dist.DistBackendError),
        (errors.ClosedError, torch_dist.DistBackendError),
    ],
)
def test_errors_are_torchs_and_ours(ours, theirs):
    error = ours("text", context=errors.Context(rank=1, peers=(2,)), hint="do")
    seen = for_torch(error)
    assert isinstance(seen, ours)
    assert isinstance(seen, theirs)
    assert str(seen) == str(error)
    again = pickle.loads(pickle.dumps(seen))
    assert (type(again), str(again)) == (type(seen), str(seen))


def test_usage_errors_stay_what_they_are():
    for error in (errors.InvalidArgumentError("x"), errors.UnsupportedError("x"), KeyError("x")):
        assert for_torch(error) is error


def test_callbacks_that_wait_for_one_another():
    threads, met, order = CallbackThreads("g"), threading.Barrier(3), []

    def wait(number):
        met.wait(PATIENCE_S)
        order.append(number)

    for number in range(3):
        threads.run(lambda number=number: wait(number))
    threads.close()
    assert sorted(order) == [0, 1, 2]
    threads.run(lambda: order.append("late"))
    assert order[-1] == "late"


def test_idle_callback_threads_are_used_again():
    threads, names = CallbackThreads("g"), []
    for _ in range(50):
        done = threading.Event()
        threads.run(lambda done=done: (names.append(threading.current_thread().name), done.set()))
        assert done.wait(PATIENCE_S)
        # A thread counts as idle a moment after its task is done.
        wait_until(lambda: threads._idle)
    threads.close()
    assert len(set(names)) == 1


def test_every_operation_that_torch_calls_is_a_method():
    names = {name for schema in OPS.values() for name in (schema.name, *schema.c10d_methods)}
    names = {name for name in names if hasattr(torch_dist.ProcessGroup, name)}
    assert len(names) > 20
    assert names <= vars(TorchOperations).keys()
    assert {name for name in names if getattr(TorchOperations, name).__name__ != name} == set()
