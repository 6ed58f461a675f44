"""Hand weights from a training job to an inference job; either may crash and start again.

    python examples/torch_handover.py

The script serves a store, launches both jobs, and launches a job again if it crashes. Each job
crashes once. The jobs know only the store. Inference asks for weights by a ticket, a number that is
never used again. Between two steps the trainer looks for the next ticket and makes a process group
of that name. Its members are rank 0 of training and every rank of inference. If the group of a
ticket fails, inference asks again with a new ticket.
"""

import hashlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono as dist
import unisono.torch  # not needed where unisono is installed: torch finds it
from unisono.errors import UnisonoError

RANKS = 2
HANDOVERS = 3
# The asking ranks join at once. The trainer may have to start again first.
ASKERS_S, TRAINER_S = 5, 20


def main() -> int:
    """Launch both jobs until both have ended well."""
    # One secret for both jobs and their common store. Without it each launch makes its own.
    os.environ.setdefault("UNISONO_TOKEN", secrets.token_hex())
    with (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store,
        tempfile.TemporaryDirectory() as folder,
    ):

        def start(job: str) -> subprocess.Popen[bytes]:
            launcher = [sys.executable, "-m", "unisono", "run", "--nproc-per-node", str(RANKS)]
            place = [store.host, str(store.port), folder]
            return subprocess.Popen([*launcher, __file__, job, *place])

        jobs = {job: start(job) for job in ("training", "inference")}
        lives = dict.fromkeys(jobs, 1)
        while jobs:
            for job, process in list(jobs.items()):
                if (code := process.poll()) is None:
                    continue
                del jobs[job]
                if code and lives[job] < 3:
                    lives[job] += 1
                    jobs[job] = start(job)
            time.sleep(0.05)
        crashed = ", ".join(f"{job} {count - 1}" for job, count in lives.items())
        print(f"crashes survived: {crashed}")
        return 0 if store.check(["done"]) else 1


def model() -> nn.Module:
    """Return an untrained model."""
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def digest(module: nn.Module) -> str:
    """Return a short digest of the bits of all parameters."""
    content = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
    return hashlib.sha256(content).hexdigest()[:12]


def hand_over(
    store: dist.Store, ticket: int, rank: int, module: nn.Module, timeout_s: float
) -> str:
    """Copy rank 0's parameters to all ranks of the ticket's group; return rank 0's digest."""
    # Not through the store: a trainer that starts again would replace the digest there.
    sent = torch.frombuffer(bytearray(digest(module).encode()), dtype=torch.uint8)
    meeting = dist.PrefixStore(f"handover {ticket}", store)
    name = f"handover {ticket}"
    group = dist.ProcessGroup(meeting, rank, 1 + RANKS, timeout=timeout_s, name=name)
    try:
        for tensor in (*module.parameters(), sent):
            group.broadcast(tensor, 0)
        group.barrier()
    finally:
        group.close()
    return sent.numpy().tobytes().decode()


def crash_once(folder: str, job: str) -> None:
    """End this job as a fault would, the first time."""
    try:
        # Only one rank of the job can create the file. The launcher ends the other rank.
        Path(folder, f"{job} has crashed").touch(exist_ok=False)
    except FileExistsError:
        return
    print(f"{job}: crashes", flush=True)
    os._exit(1)


def train(store: dist.Store, folder: str) -> None:
    """Train until all handovers are done; rank 0 serves tickets between steps."""
    torch_dist.init_process_group("unisono")
    rank = torch_dist.get_rank()
    saved = Path(folder, "weights.pt")
    module = model()
    if saved.exists():
        module.load_state_dict(torch.load(saved))
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    more = torch.ones(1)
    while more.item():
        optimizer.zero_grad()
        ddp(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        if rank == 0:
            # By renaming: if this process is killed halfway, the old file stays.
            torch.save(module.state_dict(), new := saved.with_suffix(".new"))
            new.replace(saved)
            serve(store, folder, module)
            more.fill_(0 if store.check(["done"]) else 1)
        torch_dist.broadcast(more, 0)
    torch_dist.destroy_process_group()


def serve(store: dist.Store, folder: str, module: nn.Module) -> None:
    """Serve the next ticket, if there is one."""
    ticket = store.add("tickets served", 0) + 1
    if not store.check([f"ticket {ticket}"]):
        return
    try:
        hand_over(store, ticket, 0, module, ASKERS_S)
    except UnisonoError as error:
        print(f"training: ticket {ticket} failed: {error.what}", flush=True)
    store.add("tickets served", 1)
    if ticket == 2:
        crash_once(folder, "training")


def infer(store: dist.Store, folder: str) -> None:
    """Get weights several times, and use them."""
    torch_dist.init_process_group("unisono")
    rank, module = torch_dist.get_rank(), model()
    while (done := store.add("handovers", 0)) < HANDOVERS:
        asked = [store.add("tickets", 1) if rank == 0 else 0]
        torch_dist.broadcast_object_list(asked, 0)
        (ticket,) = asked
        if rank == 0:
            store.set(f"ticket {ticket}", "asked")
        if done == 1:
            # In the middle: the trainer waits for a group that never becomes complete.
            crash_once(folder, "inference")
        try:
            sent = hand_over(store, ticket, 1 + rank, module, TRAINER_S)
        except UnisonoError as error:
            # If the other rank has got the weights, its next call does not match. The job then ends
            # and starts again.
            print(f"inference: ticket {ticket} failed: {error.what}", flush=True)
            continue
        if digest(module) != sent:
            sys.exit(f"WRONG: the weights of ticket {ticket} are not the trainer's")
        if rank == 0:
            store.add("handovers", 1)
            print(f"inference: has the trainer's weights by ticket {ticket}", flush=True)
        torch_dist.barrier()
    if rank == 0:
        store.set("done", "1")
    torch_dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    job, host, port, place = sys.argv[1:]
    with dist.TCPStore(host, int(port)) as common:
        (train if job == "training" else infer)(common, place)
