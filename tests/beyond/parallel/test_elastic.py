"""Elastic training as processes: killed ranks, newcomers, the model and the samples they used."""

import contextlib
import signal
import time

import numpy as np
import pytest

import unisono as dist
from tests.beyond.test_membership import keys, newcomer
from tests.faults.scripts import Forked, outcome, ranks_of
from tests.support.calls import wait_until
from unisono.beyond import steps
from unisono.core.base.process_identity import new_user
from unisono.core.groups.membership import Document
from unisono.core.groups.membership_store import first_proposal
from unisono.core.groups.world import current
from unisono.core.rendezvous.membership import JoinRequest, Member, WaitingMember
from unisono.core.stores import PrefixStore
from unisono.errors import (
    ArgumentTypeError,
    CollectiveError,
    InvalidArgumentError,
    PeerLostError,
    StoreTimeoutError,
)
from unisono.parallel import ElasticJob
from unisono.testing import run

LENGTH, BATCH, STEPS = 60, 12, 30

PROLOGUE = f"""
import hashlib, logging
from unisono.parallel import ElasticJob, ElasticSampler
logging.basicConfig()
dist.init_process_group(timeout=60)
joined = os.environ.get("UNISONO_JOIN") == "1"
me = int(os.environ["NUMBER"]) if joined else rank
shared = None if joined else store()
sampler = ElasticSampler({LENGTH}, {BATCH}, seed=3)
history, aborted = [], []

def digest(arrays):
    return hashlib.sha256(b"".join(np.asarray(each).tobytes() for each in arrays)).hexdigest()

def ended(final):
    print(json.dumps({{
        "me": me, "rank": dist.get_rank(), "size": dist.get_world_size(), "step": job.global_step,
        "history": history, "aborted": aborted, "final": final,
    }}), flush=True)
    dist.barrier()
"""

DATA = f"""
draw = np.random.default_rng(0)
inputs, wanted = draw.normal(size=({LENGTH}, 5)), draw.normal(size={LENGTH})
"""

# Least squares by momentum. Rank 1 dies in step 10 after its gradient was added on no rank.
NUMPY = (
    PROLOGUE
    + DATA
    + f"""
# Other weights on each rank, on purpose.
state = {{"weights": np.full(5, float(me)), "velocity": np.zeros(5), "sizes": []}}
job = ElasticJob(state, min_size=2)
while job.global_step < {STEPS}:
    if job.global_step == 10 and me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if job.global_step == 20 and shared is not None and not history[-1][1] == 3:
        shared.set(f"ready/{{me}}", "yes")
        shared.wait(["waits"], 60)
        while not dist.membership_changed():  # it looks every 50 ms
            time.sleep(0.01)
    before = digest([state["weights"], state["velocity"]])
    with job.step() as s:
        mine, weight = sampler.share(job.global_step)
        errors = inputs[mine] @ state["weights"] - wanted[mine]
        gradient = weight * inputs[mine].T @ errors / len(mine)
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
        s.commit()
        state["velocity"] *= 0.9
        state["velocity"] -= 0.05 * gradient
        state["weights"] += state["velocity"]
        state["sizes"].append(dist.get_world_size())
    if s.committed:
        after = digest([state["weights"], state["velocity"]])
        history.append((job.global_step, dist.get_world_size(), after))
    else:
        assert digest([state["weights"], state["velocity"]]) == before
        aborted.append(job.global_step)
ended(state["weights"].tolist() + state["sizes"])
"""
)


def alone():
    """Train as a single process does that never fails."""
    from unisono.parallel import ElasticSampler

    scope = {"np": np}
    exec(DATA, scope)  # the same data as in the script
    inputs, wanted = scope["inputs"], scope["wanted"]
    sampler, weights, velocity = ElasticSampler(LENGTH, BATCH, seed=3), np.zeros(5), np.zeros(5)
    for step in range(STEPS):
        batch = sampler.batch(step)
        errors = inputs[batch] @ weights - wanted[batch]
        velocity = 0.9 * velocity - 0.05 * inputs[batch].T @ errors / len(batch)
        weights = weights + velocity
    return weights


def play(body, size, **variables):
    """Run a job that loses rank 1 and takes a newcomer in; return what its ranks report."""
    with contextlib.ExitStack() as stack:
        processes, shared = stack.enter_context(ranks_of(body, size, Forked, **variables))
        keys(shared, "ready", [each for each in range(size) if each != 1])
        late = stack.enter_context(newcomer(body, shared, 9, **variables))
        job = Document(PrefixStore("worker/attempt_0", shared))
        assert wait_until(lambda: job.read().waiting)
        shared.set("worker/attempt_0/default_pg/0/waits", "yes")
        found = [outcome(each) for each in (*processes, late)]
    assert [code for _, code, _ in found] == [0, -signal.SIGKILL] + [0] * (size - 1), found
    for _, code, err in found[:-1]:
        assert code or "step 10 is repeated: the step does not count" in err
    return [each for each, _, _ in found if each]


def check(told, size):
    """Check that all ranks counted the same steps, with the same bits after each of them."""
    assert [each["me"] for each in sorted(told, key=lambda each: each["rank"])][-1] == 9
    assert {(each["size"], each["step"]) for each in told} == {(size, STEPS)}
    bits = {}
    for each in told:
        steps = [step for step, _, _ in each["history"]]
        assert steps == list(range(1 if each["me"] != 9 else steps[0], STEPS + 1))
        for step, members, digest in each["history"]:
            assert bits.setdefault(step, (members, digest)) == (members, digest)
        assert each["aborted"] == ([10] if each["me"] != 9 else [])
    assert [bits[step][0] for step in (10, 11, STEPS)] == [size, size - 1, size]


def test_a_lost_rank_and_a_newcomer_change_a_training_by_rounding_only():
    told = play(NUMPY, 3)
    check(told, 3)
    finals = [each["final"] for each in told]
    assert finals == finals[:1] * 3
    np.testing.assert_allclose(finals[0][:5], alone(), rtol=1e-12)
    # The history of sizes came to the newcomer with the state.
    assert finals[0][5:] == [3] * 10 + [2] * 11 + [3] * 9


# ---- with threads as ranks ----------------------------------------------------------------------


def start_differently(rank):
    state = {"x": np.full(3, float(rank)), "word": f"of rank {rank}"}
    x, job = state["x"], ElasticJob(state)
    with job.step() as s:
        got = x.tolist()
        s.commit()
    with job.step():
        pass  # no commit
    return got, state["word"], job.global_step


def test_the_first_rank_gives_its_state_to_the_others():
    assert run(start_differently, 3) == [([0.0] * 3, "of rank 0", 1)] * 3


def structures_differ(rank):
    job = ElasticJob({"x": np.zeros(3 + rank)})
    text = r"rank 1: state\['state'\]\['x'\] is numpy"
    with pytest.raises(InvalidArgumentError, match=text), job.step():
        pass
    with pytest.raises(ArgumentTypeError, match="ElasticJob: state must be a dict, got list"):
        ElasticJob([])


def test_states_of_different_structure_end_the_job():
    run(structures_differ, 2)


def lose_the_only_holder(rank):
    job = ElasticJob({"x": np.full(1, float(rank))})
    if rank == 0:
        dist.destroy_process_group()
        return
    text = "no rank of generation 2 holds the state"
    with pytest.raises(CollectiveError, match=text), job.step():
        pass


def test_without_the_rank_that_has_the_first_state_the_job_ends():
    run(lose_the_only_holder, 3)


def look_before_the_commit(rank):
    document = current().membership.document
    if rank == 0:
        assert not dist.membership_changed()
        # A process of this host that lives: this process.
        waits = Member(id="late", user=new_user(), current=False)
        document.change(JoinRequest(WaitingMember(member=waits)))
    dist.barrier()
    while not dist.membership_changed():
        time.sleep(0.001)
    with dist.step() as s:
        s.commit()
    return s.changed


def test_a_commit_reports_the_change_that_the_program_has_seen():
    assert run(look_before_the_commit, 2) == [True, True]


def miss_the_answer_of_the_store(rank, counts, without_answer):
    """Rank 2 leaves in the commit of step 1. The store gives rank 0 no answer then."""
    group, state = dist.group.WORLD, {"model": np.zeros(4), "numbers": []}
    job = ElasticJob(state)
    while job.global_step < 3:
        with job.step() as s:
            if rank == 0 and job.global_step == 1:
                without_answer.append(group.store)
            if rank == 2 and job.global_step == 1:
                if counts:
                    group.all_reduce(np.zeros(1, np.int64), dist.ReduceOp.MAX, _label="commit")
                dist.destroy_process_group()
                return None
            s.commit()
            state["model"] += 1
            state["numbers"].append(job.global_step)
    return dist.get_world_size(), state["model"].tolist(), state["numbers"]


@pytest.mark.parametrize("counts", [True, False])
def test_a_rank_that_got_no_answer_from_the_store_is_filled_if_the_step_counts(monkeypatch, counts):
    def answer(store, *question):
        if store in without_answer:
            raise StoreTimeoutError("the store server did not answer")
        return first_proposal(store, *question)

    monkeypatch.setattr(steps, "first_proposal", answer)
    without_answer = []
    found = run(miss_the_answer_of_the_store, 3, args=(counts, without_answer))
    assert found == [(2, [3.0] * 4, [0, 1, 2])] * 2 + [None]


def communicate_after_the_commit(rank):
    job = ElasticJob({})
    steps = []

    def go_on():
        with job.step() as s:
            steps.append(s)
            s.commit()
            if rank == 1:
                dist.destroy_process_group()
                raise PeerLostError("as on rank 0")
            dist.barrier()

    with pytest.raises(PeerLostError):
        go_on()
    return steps[0].committed


def test_an_error_after_the_commit_is_raised():
    assert run(communicate_after_the_commit, 2) == [True, True]
