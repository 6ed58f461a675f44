"""What unisono.ray must do, in a Ray cluster of this host."""

import importlib.util
import os
import sys

import numpy as np
import ray

import unisono.ray
from tests.integrations import program, ranks
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    CollectiveMismatchError,
    InvalidArgumentError,
    NotInitializedError,
    PeerLostError,
    RendezvousError,
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
    with program.error(NotInitializedError, "rank 0 is no longer in this group", rank=0):
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
    with program.error(PeerLostError, "rank 1 of 2 (Actor(Worker", "was lost: The actor") as found:
        unisono.ray.init_group([actors[0], actor])
    # The other rank waited at the store, which was closed.
    assert "had not ended" not in str(getattr(found.value, "__notes__", ""))


def lost_rank_is_named(actors):
    group = unisono.ray.init_group(actors)
    with program.error(PeerLostError, "all_reduce #8", "rank 1 was lost", peers=(1,)):
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


CASES = [
    groups_of_2_and_3,
    order_of_the_actors_is_the_order_of_ranks,
    token_is_not_in_the_environment,
    former_group_is_replaced,
    mismatch_leaves_the_group_usable,
    first_error_is_raised,
    start_fails_on_one_rank,
    lost_rank_is_named,
    actor_without_resources_is_named,
    arguments_are_checked,
    modules_train,
]

if __name__ == "__main__":
    ray.init(
        num_cpus=5,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=sys.argv[1],
    )
    try:
        program.main(CASES, [Worker.remote() for _ in range(3)])
    finally:
        ray.shutdown()
