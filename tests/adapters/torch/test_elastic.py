"""torch's default group over ranks that come and go, with torch's DistributedDataParallel."""

import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as torch_dist  # noqa: E402  needs torch
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import unisono  # noqa: E402
import unisono.torch  # noqa: E402
from tests.beyond.parallel import test_elastic as faults  # noqa: E402
from unisono.errors import (  # noqa: E402
    ClosedError,
    CollectiveTimeoutError,
    NotInitializedError,
    PeerError,
    StepAborted,
)

pytestmark = pytest.mark.usefixtures("forked_with_torch")

RATE, MOMENTUM, STEPS = 0.125, 0.5, 24


def start(number, port):
    """Make torch's default group of 3 ranks; number 9 joins it later."""
    torch.set_num_threads(1)
    if number == 9:
        os.environ["UNISONO_JOIN"] = "1"
    rank, size = (0, 1) if number == 9 else (number, 3)
    store = torch_dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=60)
    torch_dist.init_process_group("unisono", store=store, rank=rank, world_size=size, timeout=limit)


def linear(number):
    torch.manual_seed(number)
    return torch.nn.Linear(4, 1, bias=False, dtype=torch.float64)


def check_groups(old):
    """Check that torch's functions know the new ranks, and that the old group is closed."""
    size, rank = torch_dist.get_world_size(), torch_dist.get_rank()
    assert torch_dist.get_process_group_ranks(None) == list(range(size))
    assert torch_dist.get_backend() == "unisono"
    pair = torch_dist.new_group([0, size - 1])
    x = torch.ones(1)
    if rank in (0, size - 1):
        torch_dist.all_reduce(x, group=pair)
        assert x.item() == 2
    # The members of a group of Gloo find each other in torch's store of the default group.
    gloo = torch_dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    torch_dist.all_reduce(x := torch.ones(1), group=gloo)
    assert x.item() == size
    torch_dist.barrier()
    if old is not None:
        with pytest.raises(ClosedError):
            old.unisono.barrier()


def train(number, port, link, barrier):
    """Train `STEPS` steps. Number 1 dies in backward of step 8; number 9 joins in step 16."""
    os.environ["TORCH_DIST_INIT_BARRIER"] = barrier
    start(number, port)
    net, joined = linear(number), number == 9
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    step, history, is_new, old = 0, [], True, None
    while step < STEPS:
        try:
            if is_new:
                state = {"step": step, "optimizer": optimizer.state_dict()}
                unisono.sync_state(state)
                if joined:
                    step, joined = state["step"], False
                    optimizer.load_state_dict(state["optimizer"])
                ddp = DistributedDataParallel(net)
                check_groups(old)
            if step == 8 and number == 1:
                net.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            with unisono.step() as s:
                optimizer.zero_grad()
                ddp(torch.full((1, 4), number + 1.0, dtype=torch.float64)).sum().backward()
                s.commit()
            optimizer.step()
            step += 1
            history.append((step, torch_dist.get_world_size(), net.weight[0, 0].item()))
            is_new = s.changed
        except (StepAborted, PeerError, CollectiveTimeoutError):
            is_new = True
        if step == 16 and torch_dist.get_world_size() == 2:
            link.send("ready")
            while not unisono.membership_changed():
                time.sleep(0.01)
            is_new = True
        if is_new and step < STEPS:
            old, hook = torch_dist.group.WORLD, sys.excepthook
            assert unisono.torch.reconfigure() is torch_dist.group.WORLD
            assert sys.excepthook is hook
    link.send((torch_dist.get_rank(), old.unisono.name if old else "", history))
    torch_dist.destroy_process_group()
    assert not unisono.is_initialized()


def expected():
    """Return the first weight after each step of the ranks that were there."""
    weight, velocity, after = linear(0).weight[0, 0].item(), 0.0, []
    for step in range(STEPS):
        numbers = [0, 1, 2] if step < 8 else [0, 2] if step < 16 else [0, 2, 9]
        velocity = MOMENTUM * velocity + sum(n + 1.0 for n in numbers) / len(numbers)
        weight -= RATE * velocity
        after.append((step + 1, len(numbers), pytest.approx(weight, rel=1e-12)))
    return after


@pytest.mark.linux("forks from a server")
@pytest.mark.sweep(1)
@pytest.mark.parametrize("barrier", ["0", "1"])
def test_ddp_goes_on_without_a_killed_rank_and_with_a_newcomer(barrier):
    # With "1" all ranks of a new group meet in torch's store, also those of an older generation.
    context = multiprocessing.get_context("forkserver")
    store = unisono.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    links, ranks = {}, {}

    def launch(number):
        links[number], theirs = context.Pipe()
        ranks[number] = context.Process(target=train, args=(number, store.port, theirs, barrier))
        ranks[number].start()
        theirs.close()

    def heard(number):
        assert links[number].poll(60)
        return links[number].recv()

    try:
        for number in (0, 1, 2):
            launch(number)
        assert [heard(0), heard(2)] == ["ready"] * 2
        launch(9)
        found = [heard(number) for number in (0, 2, 9)]
        for each in ranks.values():
            each.join(60)
    finally:
        for each in ranks.values():
            each.kill()
            each.join()
        for each in (*links.values(), store):
            each.close()
    assert [each.exitcode for each in ranks.values()] == [0, -signal.SIGKILL, 0, 0]
    want = expected()
    assert [history for _, _, history in found] == [want, want, want[16:]]
    first = "default:generation-2 (generation 2, which generation 3 succeeded)"
    assert [(rank, name) for rank, name, _ in found] == [(0, first), (1, first), (2, "")]


def outcome(body):
    """Return what a function sends from a process of its own."""
    context = multiprocessing.get_context("forkserver")
    link, theirs = context.Pipe()
    process = context.Process(target=body, args=(theirs,))
    process.start()
    theirs.close()
    try:
        return link.recv()
    finally:
        process.join()
        link.close()


def borrowing(link):
    torch_dist.init_process_group("unisono", store=torch_dist.HashStore(), rank=0, world_size=1)
    unisono.reconfigure()
    found = []
    for call in (lambda: torch_dist.all_reduce(torch.ones(1)), lambda: torch_dist.new_group([0])):
        try:
            call()
        except ClosedError as error:
            found.append(error.what)
    link.send((found, unisono.get_world_size()))


def test_reconfigure_of_unisono_closes_the_group_that_it_borrowed():
    found, size = outcome(borrowing)
    name = "default (generation 1, which generation 2 succeeded)"
    calls = ["all_reduce", "new_group"]
    assert found == [f"{call} on group '{name}', which was destroyed" for call in calls]
    assert size == 1


def alone(link):
    problems = []
    try:
        unisono.torch.reconfigure()
    except NotInitializedError as error:
        problems.append(error.what)
    torch_dist.init_process_group("unisono", store=torch_dist.HashStore(), rank=0, world_size=1)
    lent = unisono.is_initialized()
    with unisono.step() as s:
        s.commit()
    now = unisono.group.WORLD is torch_dist.group.WORLD.unisono
    torch_dist.destroy_process_group()
    link.send((problems, lent, now, unisono.is_initialized()))


def test_unisono_borrows_the_group_of_torch_when_a_call_needs_it():
    problems, *states = outcome(alone)
    assert problems == ["reconfigure needs torch's default group on unisono, got None"]
    assert states == [False, True, False]


# A module with statistics of its batches. Rank 1 dies in the backward pass of step 10.
MODULE = (
    faults.PROLOGUE
    + f"""
import torch
from unisono.parallel import DistributedDataParallel, all_reduce_hook
torch.set_num_threads(1)
torch.manual_seed(me)
net = torch.nn.Sequential(
    torch.nn.Linear(5, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
)
model = DistributedDataParallel(net)
if os.environ["HOOK"] == "1":
    model.register_comm_hook(dist.group.WORLD, all_reduce_hook)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
data = torch.randn({faults.LENGTH}, 5, generator=torch.Generator().manual_seed(0))
job = ElasticJob({{"net": net, "optimizer": optimizer, "note": me}}, min_size=2)

def all_bits():
    state = [each for slot in optimizer.state_dict()["state"].values() for each in slot.values()]
    return digest([*net.state_dict().values(), *state])

def die(gradient):
    os.kill(os.getpid(), signal.SIGKILL)

while job.global_step < {faults.STEPS}:
    if job.global_step == 10 and me == 1:
        net[0].weight.register_hook(die)
    if job.global_step == 20 and shared is not None:
        shared.set(f"ready/{{me}}", "yes")
        shared.wait(["waits"], 60)
        while not dist.membership_changed():
            time.sleep(0.01)
    before = all_bits()
    with job.step() as s:
        mine, weight = sampler.share(job.global_step)
        x = data[torch.from_numpy(mine)]
        loss = weight * (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        s.commit()
        optimizer.step()
        optimizer.zero_grad()
    if s.committed:
        # The statistics are each rank's own until the next forward pass.
        parts = [*net.parameters(), *optimizer.state_dict()["state"][0].values()]
        bits = digest([each.detach() for each in parts])
        history.append((job.global_step, dist.get_world_size(), bits))
    else:
        assert all_bits() == before
        assert all(each.grad is None for each in net.parameters())
        aborted.append(job.global_step)
with torch.no_grad():
    model(data)  # copies the statistics of rank 0
error = (net.eval()(data) - data.sum(1, keepdim=True)).square().mean().item()
ended([all_bits(), error, job.state["note"], net[1].num_batches_tracked.item()])
"""
)


@pytest.mark.parametrize("hook", ["0", "1"])
def test_a_module_is_unchanged_by_a_step_in_which_a_rank_is_lost(hook):
    told = faults.play(MODULE, 3, HOOK=hook)
    faults.check(told, 3)
    finals = [each["final"] for each in told]
    assert finals == finals[:1] * 3
    _, error, note, batches = finals[0]
    assert note == 0
    assert batches == faults.STEPS + 1
    assert error < 4
