"""What unisono.ray must do, in a Ray cluster of this host."""

import contextlib
import gc
import importlib.util
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray
import ray.util.client
from ray.experimental import internal_kv
from ray.util import collective
from ray.util.collective import types

import unisono as dist
import unisono.ray
from tests.adapters.clusters import program, ranks
from unisono.adapters.clusters import ray_collective
from unisono.adapters.clusters.member import Transfers
from unisono.adapters.mpi import library as mpi_library
from unisono.core.base.deadline import Deadline
from unisono.core.groups.process_group import group_timeout_s
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    InvalidArgumentError,
    NotInitializedError,
    PeerLostError,
    RendezvousError,
    UnsupportedError,
    UsageError,
    WorkerFailedError,
)


@ray.remote(num_cpus=1)
class Worker:
    """An actor that knows nothing of unisono until `init_group`."""

    def pid(self):
        return os.getpid()

    def method(self, scale):
        return ranks.summed(scale)

    def left_over(self):
        ranks.left_over()

    def is_held(self):
        return ranks.is_held()

    def release(self):
        ranks.release()


def on(function):
    """Return a function for `Group.run`, which ignores the actor."""
    return lambda actor, *args: function(*args)


def new(actors, *ranks_):
    """Replace actors."""
    for rank in ranks_:
        ray.kill(actors[rank])
        actors[rank] = Worker.remote()


def groups_of_2_and_3(actors):
    pids = ray.get([actor.pid.remote() for actor in actors])
    for size in (2, 3):
        with unisono.ray.init_group(actors[:size]) as group:
            assert repr(group) == f"<Group of {size} Ray actors>"
            assert group.size == size
            assert group.run(on(ranks.summed), 2.0) == ranks.expected(size, 2.0)
            # Methods of the actor use the same group.
            found = ray.get([actor.method.remote(3.0) for actor in actors[:size]])
            assert found == ranks.expected(size, 3.0)
            # `fn` gets the actor's instance, and an ObjectRef becomes its object.
            ref = ray.put(np.arange(5))
            found = group.run(lambda actor, x: (actor.pid(), x.sum()), ref)
            assert found == [(pid, 10) for pid in pids[:size]]
    with program.error(ClosedError, "the group of Ray actors is closed"):
        group.run(on(ranks.summed), 2.0)


def order_of_the_actors_is_the_order_of_ranks(actors):
    pids = ray.get([actor.pid.remote() for actor in actors])
    with unisono.ray.init_group(actors[::-1]) as group:
        assert group.run(lambda actor: actor.pid()) == pids[::-1]


def token_is_not_in_the_environment(actors):
    with unisono.ray.init_group(actors[:2], timeout=50) as group:
        # The time-out is that of the start; calls have the default.
        assert group.run(on(ranks.token)) == [("", 1800.0)] * 2


def former_group_is_replaced(actors):
    ray.get(actors[0].left_over.remote())
    first = unisono.ray.init_group(actors[:2])
    second = unisono.ray.init_group(actors)
    assert second.run(on(ranks.summed), 1.0) == ranks.expected(3, 1.0)
    with program.error(NotInitializedError, "is no longer in this group: it raised an error in"):
        first.run(on(ranks.summed), 1.0)
    first.close()  # The actors are in the second group, which stays.
    assert second.run(on(ranks.summed), 1.0) == ranks.expected(3, 1.0)
    second.close()


def mismatch_leaves_the_group_usable(actors):
    with unisono.ray.init_group(actors) as group:
        with program.error(CollectiveMismatchError, "all_reduce #1", "float64[4]"):
            group.run(on(ranks.mismatched))
        assert group.run(on(ranks.summed), 1.0) == ranks.expected(3, 1.0)


def first_error_is_raised(actors):
    group = unisono.ray.init_group(actors, name="mine")
    with program.error(KeyError, "of rank 1", "of group 'mine'", rank=1):
        group.run(on(ranks.raising), 1)
    # The ranks that were left alone have ended the group, too; the first answer counts.
    with program.error(NotInitializedError, "is no longer in this group"):
        group.run(on(ranks.summed), 1.0)
    group = unisono.ray.init_group(actors)
    with program.error(KeyError, "of rank 2", "ranks [0, 1] had not ended 2 s later", rank=2):
        group.run(on(ranks.working), 5, 2)


def start_fails_on_one_rank(actors):
    """The others wait at the store, which closes."""
    with program.error(InvalidArgumentError, "unknown backend 'none'"):
        unisono.ray.init_group(actors, backend="none")
    actor = Worker.remote()
    pid = ray.get(actor.pid.remote())
    os.kill(pid, 9)
    with program.error(PeerLostError, "rank 1 of 2 (Actor(Worker", "was lost: The actor"):
        unisono.ray.init_group([actors[0], actor])
    # The other rank waited at the store, which was closed. The time-out of the start is 60 s.
    ray.get(actors[0].pid.remote(), timeout=30)


def second_call_at_once_is_refused(actors):
    """Two calls could reach the actors in different orders, and mix their data."""
    threaded = [Worker.options(num_cpus=0.1, max_concurrency=2).remote() for _ in range(2)]
    with unisono.ray.init_group(threaded) as group, ThreadPoolExecutor(1) as pool:
        first = pool.submit(group.run, on(ranks.hold))
        while not all(ray.get([actor.is_held.remote() for actor in threaded])):
            ranks.time.sleep(0.05)
        with program.error(UsageError, "run: another thread is in a call of run of this group"):
            group.run(on(ranks.summed), 1.0)
        with program.error(UsageError, " cannot start: process ", " still runs an earlier call as"):
            unisono.ray.init_group(threaded)
        ray.get([actor.release.remote() for actor in threaded])
        first.result()
        assert group.run(on(ranks.summed), 1.0) == ranks.expected(2, 1.0)


def end_of_a_rank_does_not_end_the_caller(actors):
    group = unisono.ray.init_group(actors[:2])
    with program.error(WorkerFailedError, "rank 1 of 2 raised SystemExit: 0", rank=1):
        group.run(lambda actor: sys.exit(0) if dist.get_rank() else dist.barrier())


def restarted_actor_does_not_repeat_a_call(actors):
    lasting = Worker.options(num_cpus=0.1, max_restarts=1, max_task_retries=1).remote()
    group = unisono.ray.init_group([actors[0], lasting])
    with program.error(PeerLostError, peers=(1,)):
        group.run(on(ranks.dying), 1, 7)
    ray.get(lasting.pid.remote())
    with unisono.ray.init_group([actors[0], lasting]) as group:
        assert group.run(on(ranks.summed), 1.0) == ranks.expected(2, 1.0)


def restarting_actor_is_waited_for(actors):
    lasting = Worker.options(num_cpus=0.1, max_restarts=1).remote()
    pid = ray.get(lasting.pid.remote())
    os.kill(pid, signal.SIGKILL)
    with unisono.ray.init_group([actors[0], lasting]) as group:
        assert group.run(on(ranks.summed), 1.0) == ranks.expected(2, 1.0)
        assert ray.get(lasting.pid.remote()) != pid


def lost_rank_is_named(actors):
    group = unisono.ray.init_group(actors)
    with program.error(PeerLostError, "rank 1", peers=(1,)):
        group.run(on(ranks.dying), 1, 7)
    with program.error(NotInitializedError, "is no longer in this group", "rank 1 (Actor"):
        group.run(on(ranks.summed), 1.0)
    new(actors, 1)
    group = unisono.ray.init_group(actors)
    assert group.run(on(ranks.summed), 1.0) == ranks.expected(3, 1.0)
    with program.error(PeerLostError, "rank 0 of 3", "The actor died", "had not ended", peers=(0,)):
        group.run(on(ranks.dying_alone), 0)
    new(actors, 0)
    with unisono.ray.init_group(actors) as group:
        assert group.run(on(ranks.summed), 1.0) == ranks.expected(3, 1.0)


def actor_without_resources_is_named(actors):
    waiting = Worker.options(num_cpus=64).remote()
    with program.error(
        RendezvousError, "1 of 2 ranks had not started after 1 s: rank 1 (Actor(Worker", peers=(1,)
    ):
        unisono.ray.init_group([actors[0], waiting], timeout=1)
    ray.kill(waiting)
    with unisono.ray.init_group(actors) as group:
        assert group.run(on(ranks.summed), 1.0) == ranks.expected(3, 1.0)


def arguments_are_checked(actors):
    with program.error(InvalidArgumentError, "actors 0 and 1 are the same actor: each rank"):
        unisono.ray.init_group([actors[0], actors[0]])
    with program.error(ArgumentTypeError, "actors must be actor handles, got str"):
        unisono.ray.init_group(["actor"])
    with program.error(InvalidArgumentError, "a group needs at least 1 rank, got 0"):
        unisono.ray.init_group([])


def modules_train(actors):
    if importlib.util.find_spec("torch"):
        with unisono.ray.init_group(actors[:2]) as group:
            for found in group.run(on(ranks.trained), 2):
                for ours, numpy in zip(found, ranks.expected_training(2), strict=True):
                    np.testing.assert_allclose(ours, numpy, rtol=1e-5)


def mpi_in_actors(actors):
    """The actors become an MPI world at the first group, and stay it."""
    if mpi_library.why_absent() or mpi_library.library().is_openmpi:
        return
    fresh = [Worker.options(num_cpus=0.1).remote() for _ in range(3)]
    for chosen in (fresh, fresh[:2], fresh[::-1]):
        with unisono.ray.init_group(chosen, backend="mpi") as group:
            assert group.run(on(ranks.summed), 1.0) == ranks.expected(len(chosen), 1.0)
            assert group.run(on(ranks.engine)) == ["mpi"] * len(chosen)
    group = unisono.ray.init_group(fresh, backend="mpi")
    with program.error(PeerLostError, peers=(1,)):
        group.run(on(ranks.dying), 1, 7)
    fresh[1] = Worker.options(num_cpus=0.1).remote()
    with program.error(UnsupportedError, "all ranks but rank 1 initialised MPI already"):
        unisono.ray.init_group(fresh, backend="mpi")
    with unisono.ray.init_group(fresh) as group:
        assert group.run(on(ranks.summed), 1.0) == ranks.expected(3, 1.0)


@ray.remote(num_cpus=0.1)
class Member:
    """An actor that uses ray.util.collective."""

    def __init__(self):
        unisono.ray.register_collective()

    def pid(self):
        return os.getpid()

    def init(self, size, rank, group):
        collective.init_collective_group(size, rank, "UNISONO", group)

    def destroy(self, group):
        collective.destroy_collective_group(group)

    def everything(self, group):
        """Return the results of all operations of ray.util.collective."""
        collective.barrier(group)  # A declared group is made at the first call.
        rank, op = collective.get_rank(group), types.ReduceOp
        mine = np.full(2, rank + 2.0)
        total, product, root, copy = mine.copy(), mine.copy(), mine.copy(), mine.copy()
        collective.allreduce(total, group)
        collective.allreduce(product, group, op.PRODUCT)
        collective.reduce(root, 1, group, op.MAX)
        collective.broadcast(copy, 1, group)
        every = [np.zeros(2) for _ in range(2)]
        collective.allgather(every, mine, group)
        part = np.zeros(2)
        collective.reducescatter(part, [mine, 10 * mine], group)
        if rank == 0:
            collective.send(mine, 1, group)
        else:
            collective.recv(mine, 0, group)
        collective.barrier(group)
        found = [total, product, root, copy, *every, part, mine]
        return [array[0] for array in found]

    def mismatched(self, group):
        collective.allreduce(np.zeros(3 + collective.get_rank(group)), group)


EVERYTHING = [[5, 6, 2, 3, 2, 3, 5, 2], [5, 6, 3, 3, 2, 3, 50, 2]]


def on_members(members, method, *args):
    return ray.get([getattr(each, method).remote(*args) for each in members])


def ray_util_collective(actors):
    unisono.ray.register_collective()
    unisono.ray.register_collective()
    members = [Member.remote() for _ in range(2)]
    for group in ("one", "two"):
        ray.get([each.init.remote(2, rank, group) for rank, each in enumerate(members)])
    assert on_members(members, "everything", "one") == EVERYTHING
    with pytest.raises(CollectiveMismatchError, match="in group 'two' does not match"):
        on_members(members, "mismatched", "two")
    assert on_members(members, "everything", "two") == EVERYTHING
    collective.create_collective_group(members, 2, [0, 1], "UNISONO", "declared")
    assert on_members(members, "everything", "declared") == EVERYTHING
    on_members(members, "destroy", "one")
    ray.get([each.init.remote(2, rank, "one") for rank, each in enumerate(members)])
    assert on_members(members, "everything", "one") == EVERYTHING
    for each in members:
        ray.kill(each)


def address_of_a_dead_rank_0_is_passed_over(actors):
    """Rank 0 publishes its address and dies before rank 1 comes; a new rank 0 replaces it."""
    first, second, third = (Member.remote() for _ in range(3))
    pid = ray.get(first.pid.remote())
    first.init.remote(2, 0, "late")
    # Another job of the cluster has another namespace.
    key = f"unisono/{ray.get_runtime_context().namespace}/late"
    while not internal_kv._internal_kv_get(key.encode()):
        ranks.time.sleep(0.05)
    os.kill(pid, 9)
    waiting = second.init.remote(2, 1, "late")
    assert ray.wait([waiting], timeout=1)[0] == []
    ray.get([waiting, third.init.remote(2, 0, "late")])
    assert on_members([third, second], "everything", "late") == EVERYTHING
    for each in (second, third):
        ray.kill(each)


def collective_without_rank_0_names_it(actors):
    with pytest.raises(
        RendezvousError, match=r"rank 1 of the collective group .none. waited 0\.3 s"
    ):
        ray_collective._look_up(b"unisono/none", "none", 1, Deadline(0.3))


def ray_client_is_refused(actors):
    client = ray.util.client.ray
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "is_connected", lambda: True)
        with program.error(UnsupportedError, "unisono.ray.init_group through Ray Client: the"):
            unisono.ray.init_group(actors)


@ray.remote(num_cpus=0.1, enable_tensor_transport=True)
class Holder:
    """An actor whose methods return arrays, which stay in its process."""

    def numpy(self, n):
        return [np.arange(n) * 1.5, {"odd": np.arange(6.0).reshape(2, 3).T, "scalar": np.array(7)}]

    def more(self):
        return np.zeros(0, "f4"), np.arange(5).astype("datetime64[s]"), 1j * np.ones((2, 0, 3))

    def tensors(self, n):
        import torch

        return [torch.arange(n).to(torch.bfloat16), torch.arange(6.0).reshape(2, 3).T]

    def objects(self):
        return np.array([None, "text"])

    def same(self, value):
        return value

    def hand_over(self, maker, user):
        return ray.get(user.same.remote(made(maker, "numpy", 9)))


@contextlib.contextmanager
def holders(count=3):
    unisono.ray.register_tensor_transport()
    members = [Holder.remote() for _ in range(count)]
    with unisono.ray.init_group(members) as group:
        yield members, group
    for each in members:
        ray.kill(each)


def made(actor, method, *args, name="unisono_numpy"):
    """Return the reference of an object that stays in the actor."""
    return getattr(actor, method).options(tensor_transport=name).remote(*args)


def arrays_go_from_actor_to_actor(actors):
    here = Holder.__ray_metadata__.modified_class()
    with holders() as (members, group):
        for method, args in (("numpy", (5,)), ("numpy", (300_000,)), ("more", ())):
            ref, expected = made(members[2], method, *args), getattr(here, method)(*args)
            for found in ray.get([each.same.remote(ref) for each in members]):
                np.testing.assert_equal(found, expected)
        # Several objects on their way between two actors, in both directions, beside collectives.
        refs = [made(members[k % 2], "numpy", k) for k in range(40)]
        found = [members[1 - k % 2].same.remote(ref) for k, ref in enumerate(refs)]
        assert group.run(on(ranks.summed), 1.0) == ranks.expected(3, 1.0)
        for k, each in enumerate(ray.get(found)):
            np.testing.assert_equal(each, here.numpy(k))
        # An actor calls the two others.
        found = ray.get(members[1].hand_over.remote(members[0], members[2]))
        np.testing.assert_equal(found, here.numpy(9))
        if importlib.util.find_spec("torch"):
            found = ray.get(members[1].same.remote(made(members[0], "tensors", 9, name="unisono")))
            for one, other in zip(found, here.tensors(9), strict=True):
                assert one.dtype == other.dtype
                assert one.tolist() == other.tolist()
        with pytest.raises(UnsupportedError, match=r"dtype .object. is not supported"):
            ray.get(members[1].same.remote(made(members[0], "objects")))


def actor_that_dies_is_named_by_a_transfer(actors):
    with holders() as (members, _):
        ref = made(members[1], "numpy", 1000)
        ray.get(members[0].same.remote(ref))
        pid = ray.get(members[1].__ray_call__.remote(lambda actor: os.getpid()))
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(PeerLostError, match=r"recv.* on rank 2 of 3: rank 1 was lost"):
                ray.get(members[2].same.remote(ref), timeout=60)
        # The others live on, and make a new group with a new actor.
        members[1] = Holder.remote()
        with unisono.ray.init_group(members):
            found = ray.get(members[2].same.remote(made(members[1], "numpy", 4)), timeout=60)
            np.testing.assert_equal(found[0], np.arange(4) * 1.5)


def receiver_that_dies_leaves_the_sender_alive(actors):
    with holders(2) as (members, _):
        ref = made(members[0], "numpy", 10**6)
        members[1].__ray_call__.remote(lambda actor: os._exit(1))
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(members[1].same.remote(ref), timeout=60)
        assert ray.get(members[0].same.remote(3), timeout=60) == 3


def transfer_without_a_group_is_refused(actors):
    with holders(2) as (members, group):
        ref = made(members[0], "numpy", 4)
        ray.get(members[1].same.remote(ref))
        limits = group.run(lambda actor: (Transfers.group.timeout_s, group_timeout_s(None)))
        assert all(transfers_s == usual_s for transfers_s, usual_s in limits)
        group.close()
        with pytest.raises(NotInitializedError, match="a transfer between Ray actors that are in"):
            ray.get(members[1].same.remote(ref), timeout=60)
        with pytest.raises(ValueError, match="does not have tensor transport UNISONO_NUMPY"):
            made(members[0], "numpy", 4)
        dropped = unisono.ray.init_group(members)
        token = dropped._meeting.token
        assert token in Transfers.actors
        del dropped
        gc.collect()
        assert token not in Transfers.actors


def transfer_that_ray_ends_wakes_the_other_actor(actors):
    from unisono.adapters.clusters.ray_transport import NumpyTransport

    with holders(2) as (members, group):
        others = members[::-1]

        def end(actor):
            transport = NumpyTransport()
            ranks_of = transport.get_communicator_metadata(*others)
            if dist.get_rank() == 0:
                transport.abort_transport("00", ranks_of)
                return ""
            meta = transport.extract_tensor_transport_metadata("00", [np.zeros(3)])
            to_me = transport.get_communicator_metadata(*members)
            with pytest.raises(CollectiveAbortedError) as caught:
                transport.recv_multiple_tensors("00", meta, to_me)
            return str(caught.value)

        assert "Ray ended the transfer from rank 1 to rank 0 on rank 0" in group.run(end)[1]


def close_after_shutdown_starts_no_other_ray(actors):
    group = unisono.ray.init_group(actors)
    ray.shutdown()
    group.close()
    assert not ray.is_initialized()


CASES = [
    groups_of_2_and_3,
    order_of_the_actors_is_the_order_of_ranks,
    token_is_not_in_the_environment,
    former_group_is_replaced,
    mismatch_leaves_the_group_usable,
    first_error_is_raised,
    start_fails_on_one_rank,
    second_call_at_once_is_refused,
    end_of_a_rank_does_not_end_the_caller,
    restarted_actor_does_not_repeat_a_call,
    restarting_actor_is_waited_for,
    lost_rank_is_named,
    actor_without_resources_is_named,
    arguments_are_checked,
    modules_train,
    mpi_in_actors,
    ray_util_collective,
    address_of_a_dead_rank_0_is_passed_over,
    collective_without_rank_0_names_it,
    ray_client_is_refused,
    arrays_go_from_actor_to_actor,
    actor_that_dies_is_named_by_a_transfer,
    receiver_that_dies_leaves_the_sender_alive,
    transfer_without_a_group_is_refused,
    transfer_that_ray_ends_wakes_the_other_actor,
    close_after_shutdown_starts_no_other_ray,
]

if __name__ == "__main__":
    ray.init(
        num_cpus=5,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        program.main(CASES, [Worker.remote() for _ in range(3)])
    finally:
        ray.shutdown()
