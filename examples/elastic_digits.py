"""Train on handwritten digits while workers are killed and others join.

    unisono run --restart worker --max-restarts 2 --nproc-per-node 4 examples/elastic_digits.py

Two workers kill themselves by SIGKILL at random moments. The others repeat the step under way, go
on without them, and take the launcher's replacements in. Later one more worker joins. At the end
rank 0 trains the same network alone and compares the weights: they differ by rounding only. The
picture shows which worker was there when.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from perceptron import Images, Perceptron, load_images
from timeline import Moment, draw

import unisono as dist
from unisono.parallel import ElasticJob, ElasticSampler

# Steps that the ranks make without a lost worker before they wait for its replacement.
ALONE = 12


class Plan(NamedTuple):
    """Events of the workers; drawn by rank 0, and part of the state.

    Attributes:
        size: Number of workers at the start.
        kills: Step in which a worker of the start is killed.
        joins: Step after which one more worker is started.
    """

    size: int
    kills: dict[str, int]
    joins: int


def draw_plan(options: argparse.Namespace, size: int, steps: int) -> Plan:
    """Draw the workers that are killed, and the steps, which are among the first 60%."""
    victims = random.sample(range(size), min(options.kills, size - 1))
    part = int(0.6 * steps) // max(1, len(victims))
    kills = {
        f"worker {victim}": part * number + random.randint(1, max(1, part - ALONE))
        for number, victim in enumerate(victims)
    }
    return Plan(size, kills, int(0.75 * steps))


def kill_soon() -> None:
    """Kill this process as `kill -9` does, at a moment of this step or of a later step."""
    timer = threading.Timer(0.02 * random.random(), os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def start_one_more(plan: Plan) -> subprocess.Popen[bytes]:
    """Start a worker that joins the job, with the environment of this worker."""
    changes = {"UNISONO_JOIN": "1", "RANK": str(plan.size)}
    return subprocess.Popen([sys.executable, *sys.argv], env=os.environ | changes)


def wait_for_newcomer(plan: Plan, step: int) -> None:
    """Wait until a worker that should be there again is about to join."""
    wanted = plan.size + (step > plan.joins + ALONE)
    late = any(kill <= step < kill + ALONE for kill in plan.kills.values())
    while dist.get_world_size() < wanted and not late and not dist.membership_changed():
        time.sleep(0.01)


def gather(name: str) -> tuple[float, list[str]]:
    """Return the time on rank 0, and the names of all workers by rank."""
    found: list[tuple[float, str]] = [(0.0, "")] * dist.get_world_size()
    dist.all_gather_object(found, (time.time(), name))
    return found[0][0], [each for _, each in found]


def accuracy(net: Perceptron, images: Images) -> float:
    """Return the share of the images that the network reads right."""
    return float(np.mean(net.read(images) == images.digits))


def train_alone(net: Perceptron, images: Images, sampler: ElasticSampler, steps: int) -> None:
    """Train as one process does that no other process joins or leaves."""
    for step in range(steps):
        batch = sampler.batch(step)
        net.step([gradient / len(batch) for gradient in net.backward(images[batch])])


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=150, help="images in a step")
    parser.add_argument("--kills", type=int, default=2, help="workers that are killed")
    parser.add_argument("--min-accuracy", type=float, default=0.9, help="fail below this")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the picture (SVG)")
    return parser.parse_args()


def main() -> None:
    """Train, and compare with a training alone; exit with an error if something is wrong."""
    options = parse_options()
    images, held_out = load_images()
    dist.init_process_group()
    joined = os.environ.get("UNISONO_JOIN") == "1"
    again = joined and int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"])
    name = f"worker {os.environ['RANK']}" + " again" * again
    sampler = ElasticSampler(len(images), options.batch)
    steps = options.epochs * sampler.steps_per_epoch

    net = Perceptron(np.random.default_rng(0))
    plan = draw_plan(options, dist.get_world_size(), steps)
    record: list[Moment] = []
    job = ElasticJob(
        {"weights": net.weights, "velocities": net.velocities, "plan": plan, "record": record}
    )
    one_more = None
    while job.global_step < steps:
        plan, record = job.state["plan"], job.state["record"]
        if job.global_step > 0:
            wait_for_newcomer(plan, job.global_step)
            if not joined and job.global_step == plan.kills.get(name):
                kill_soon()
        with job.step() as s:
            indices, weight = sampler.share(job.global_step)
            works = []
            for gradient in net.backward(images[indices]):
                gradient *= weight / len(indices)
                works.append(
                    (gradient, dist.all_reduce(gradient, dist.ReduceOp.AVG, async_op=True))
                )
            moment, workers = gather(name)
            for _, work in works:
                work.wait()
            s.commit()
            net.step([gradient for gradient, _ in works])
            job.state["record"].append(Moment(moment, workers, accuracy(net, held_out)))
        if not s.committed:
            continue
        record = job.state["record"]
        if dist.get_rank() == 0:
            if len(record) == 1 or record[-1].workers != record[-2].workers:
                print(f"step {job.global_step:3}: {', '.join(workers)}", flush=True)
            if job.global_step % (steps // 4) == 0:
                print(f"step {job.global_step:3}: test accuracy {record[-1].accuracy:.1%}")
            if job.global_step == job.state["plan"].joins:
                one_more = start_one_more(job.state["plan"])
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        report(options, net, job, sampler)
    if one_more is not None and one_more.wait() != 0:
        sys.exit("FAILED: the worker that joined")


def report(
    options: argparse.Namespace, net: Perceptron, job: ElasticJob, sampler: ElasticSampler
) -> None:
    """Print the results, draw the picture, and exit with an error if something is wrong."""
    images, _ = load_images()
    alone = Perceptron(np.random.default_rng(0))
    train_alone(alone, images, sampler, job.global_step)
    difference = np.abs(net.flat() - alone.flat()).max()
    record = job.state["record"]
    if options.plot:
        options.plot.write_text(draw(record), encoding="utf-8")
    # A gradient that is lost or counted twice is visible in the second digit.
    right = len(record) == job.global_step and difference < 1e-9
    print(f"{len(record)} steps count, {len({w for m in record for w in m.workers})} workers")
    print(f"same weights as without faults, but for rounding: {'yes' if right else 'NO'}")
    if not right or record[-1].accuracy < options.min_accuracy:
        sys.exit(f"FAILED: difference {difference:.1e}, accuracy {record[-1].accuracy:.1%}")


if __name__ == "__main__":
    main()
