"""Start the ranks of `unisono bench` and yield their messages."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from statistics import median
from typing import Any

from unisono.core.base.config import environ
from unisono.core.base.deadline import Deadline
from unisono.core.platform.posix import blocked
from unisono.core.platform.processes import parent_death_hook
from unisono.core.stores import TCPStore
from unisono.errors import (
    Context,
    InvalidArgumentError,
    LaunchError,
    StoreTimeoutError,
    WorkerFailedError,
)
from unisono.launcher.environment import LOOPBACK
from unisono.launcher.spawn import SpawnContext
from unisono.testing.hosts import Host, Network, why_no_hosts
from unisono.workbench.bench.peers import how_to_install, mpiexec, peer_file, variables
from unisono.workbench.bench.plan import COPY, MPI_PEERS, BenchPlan
from unisono.workbench.bench.worker import QUEUE, TURN, work, worker_command

_MODULES = {
    **{"gloo": ("torch",), "mpi": ("mpi4py",), "plot": ("matplotlib",)},
    **{"nccl": ("torch",), "nccl4py": ("torch", "nccl"), "cuda": ("torch", "nccl")},
    **{"bfloat16": ("ml_dtypes",), COPY: ()},
    **{"intel-mpi": ("mpi4py",), "open-mpi": ("mpi4py",), "deepspeed": ("torch",)},
}
_EXTRAS = {
    **{"gloo": "torch", "mpi": "bench", "plot": "plot"},
    **{"nccl": "torch", "nccl4py": "nccl", "cuda": "nccl"},
    **{"intel-mpi": "bench", "open-mpi": "bench", "deepspeed": "torch"},
}
_FLAGS = {"cuda": "--device cuda", "bfloat16": "-d bfloat16"}
_POLL_S = 0.5
_STOP_S = 10.0


def check_installed(feature: str, flag: str = "") -> None:
    """Check that the packages and programs that a flag needs are installed.

    Args:
        feature: A peer, "cuda", "plot" or "bfloat16".
        flag: What needs it; "" if that follows from the feature.

    Raises:
        InvalidArgumentError: Names the missing package or program and how to install it.
    """
    missing = [name for name in _MODULES[feature] if importlib.util.find_spec(name) is None]
    if feature == "mpi" and mpiexec() is None:
        missing.append("the program mpiexec")
    if missing:
        flag = flag or _FLAGS.get(feature, f"--peer {feature}")
        package = f"'unisono[{_EXTRAS[feature]}]'" if feature in _EXTRAS else missing[0]
        raise InvalidArgumentError(
            f"{flag} needs {' and '.join(missing)}, not found beside {sys.executable}",
            hint=f"pip install {package}",
        )
    file = peer_file(feature)
    if file and not os.path.exists(file):
        raise InvalidArgumentError(
            f"--peer {feature} needs {file}, which is not there", hint=how_to_install(feature)
        )
    if feature == "cuda" and not importlib.import_module("torch").cuda.is_available():
        raise InvalidArgumentError("--device cuda: torch finds no GPU here")


def run_ranks(plan: BenchPlan) -> Iterator[dict[str, Any]]:
    """Start the ranks and yield their messages until all have ended.

    Each MPI library has a set of ranks. The rows of the sets become one.

    Raises:
        WorkerFailedError: A rank failed; the text ends with its traceback.
        LaunchError: No message came for twice `plan.loop.timeout_s`: a peer library hangs.
            unisono's own time-out is shorter, and its error names the ranks to blame.
    """
    last = "setting up"
    limit = Deadline(2 * plan.loop.timeout_s)
    with contextlib.ExitStack() as stack:
        hosts = _hosts(plan, stack)
        address = hosts[0].v4 if hosts else LOOPBACK
        store = stack.enter_context(TCPStore(address, 0, is_master=True, wait_for_workers=False))
        ranks = []
        for each in plan.worlds():
            ranks.append(_started(each, hosts, store.port))
            stack.callback(ranks[-1].stop)
        waiting: list[list[dict[str, Any]]] = [[] for _ in ranks]
        ended = [False]
        while not all(ended):
            ended = [each.wait(_POLL_S / len(ranks)) for each in ranks]
            for message in _messages(store):
                limit = Deadline(2 * plan.loop.timeout_s)
                if message["kind"] == "failure":
                    raise _worker_failed(plan, message)
                if message["kind"] != "note":
                    waiting[message["world"]].append(message)
                    if not all(waiting):
                        continue
                    message = _merged([each.pop(0) for each in waiting])
                if message["kind"] == "start":
                    for process in _busy(plan.loop.load):
                        stack.callback(process.wait)
                        stack.callback(process.kill)
                    store.queue_push(f"{TURN}/0", "")
                elif message["kind"] == "row":
                    last = f"{message['op']} of {message['size_bytes']} bytes"
                yield message
            for one_set, has_ended in zip(ranks, ended, strict=True):
                if has_ended:
                    one_set.check()
            if not all(ended) and limit.expired():
                raise LaunchError(
                    f"no rank of {plan.nprocs} sent a message for {2 * plan.loop.timeout_s:g} s; "
                    f"the last was: {last}",
                    hint="fewer calls (-n) or rounds (--rounds), or more time (--timeout)",
                )


def _started(plan: BenchPlan, hosts: list[Host], port: int) -> _Spawned | _Processes:
    """Start one set of ranks."""
    if hosts:
        return _on_hosts(plan, hosts, port)
    mpi = next((peer for peer in plan.peers if peer in MPI_PEERS), None)
    return _under_mpiexec(plan, port, mpi) if mpi else _Spawned(plan, port)


def _busy(count: int) -> list[subprocess.Popen[bytes]]:
    """Start processes that compute until they are killed."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    hook = parent_death_hook()
    return [subprocess.Popen(command, preexec_fn=hook) for _ in range(count)]


def _add_own_times(results: dict[str, Any]) -> None:
    """Add unisono's times to each peer's: the ranks of another set lie on other cores."""
    own = results["unisono"]
    for name, each in results.items():
        if each and name != "unisono":
            each |= {"unisono_time_us": own["time_us"], "unisono_best_us": own["best_us"]}


def _merged(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one message in place of those that the sets of ranks sent at the same point."""
    first, *others = messages
    if others and first["kind"] == "row":
        for message in messages:
            _add_own_times(message["results"])
    for message in others:
        for name in {"versions", "results"} & message.keys():
            first[name] = {**message[name], **first[name]}
    if others and first["kind"] == "row":
        own = [message["results"]["unisono"] for message in messages]
        rounds_us = [us for each in own for us in each["rounds_us"]]
        wrong = [each["wrong"] for each in own]
        first["results"]["unisono"] = {
            "time_us": median(rounds_us),
            "best_us": min(rounds_us),
            "rounds_us": rounds_us,
            "iters": own[0]["iters"],
            "wrong": None if None in wrong else sum(wrong),
        }
    return first


def _hosts(plan: BenchPlan, stack: contextlib.ExitStack) -> list[Host]:
    """Make the hosts of the plan, and move this process to the first of them."""
    if not plan.hosts:
        return []
    if reason := why_no_hosts():
        raise InvalidArgumentError(f"--hosts {plan.hosts}: {reason}")
    hosts = stack.enter_context(Network(plan.hosts)).hosts
    hosts[0].enter()
    # The network is private, and torch's client cannot send a token.
    os.environ["UNISONO_INSECURE"] = "1"
    return hosts


def _messages(store: TCPStore) -> Iterator[dict[str, Any]]:
    while store.queue_len(QUEUE):
        with contextlib.suppress(StoreTimeoutError):
            yield json.loads(store.queue_pop(QUEUE, block=False))


def _worker_failed(plan: BenchPlan, message: dict[str, Any]) -> WorkerFailedError:
    rank, text = message["rank"], message["text"]
    return WorkerFailedError(
        f"rank {rank} of {plan.nprocs} failed: {text.splitlines()[-1]}\n{text}",
        context=Context(rank=rank if rank >= 0 else None, world_size=plan.nprocs),
    )


class _Spawned:
    """Ranks as children of this process."""

    def __init__(self, plan: BenchPlan, port: int) -> None:
        # Ctrl-C thus reaches this process only, which stops the ranks. A rank that starts would
        # print a traceback. The resource tracker would unblock the signal, so it starts before.
        resource_tracker.ensure_running()
        with blocked({signal.SIGINT}):
            self._context = SpawnContext(work, (plan, port), plan.nprocs, start_method="spawn")

    def wait(self, limit_s: float) -> bool:
        """Wait at most `limit_s`; return whether all ranks have ended."""
        return self._context.join(limit_s)

    def check(self) -> None:
        """Do nothing: `wait` has raised the error."""

    def stop(self) -> None:
        """Stop all ranks that still run."""
        self._context.kill()
        for process in self._context.processes:
            with contextlib.suppress(ValueError):
                process.close()


class _Processes:
    """Ranks as programs: one program per rank on hosts, one mpiexec for all ranks with MPI.

    Args:
        commands: Command lines by the program's name in errors.
        defaults: Variables of the environment, unless the user has set them.
    """

    def __init__(self, commands: dict[str, list[str]], **defaults: str) -> None:
        env = {"OMP_NUM_THREADS": "1", **defaults, **environ()}
        self._processes = {
            name: subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                # The ranks print nothing to standard output; mpiexec reports how a rank died.
                stdout=2,
                env=env,
                # Ctrl-C thus reaches this process only, which stops the ranks.
                start_new_session=True,
                preexec_fn=parent_death_hook(),
            )
            for name, command in commands.items()
        }

    def wait(self, limit_s: float) -> bool:
        """Wait at most `limit_s`; return whether all ranks have ended."""
        deadline = Deadline(limit_s)
        for process in self._processes.values():
            try:
                process.wait(deadline.remaining())
            except subprocess.TimeoutExpired:
                return False
        return True

    def check(self) -> None:
        """Raise an error if a rank failed."""
        for name, process in self._processes.items():
            if code := process.returncode:
                raise LaunchError(f"{name} ended with exit code {code}; see its standard error")

    def stop(self) -> None:
        """Stop all ranks that still run."""
        for process in self._processes.values():
            process.terminate()
        if not self.wait(_STOP_S):
            for process in self._processes.values():
                process.kill()
                process.wait()


def _on_hosts(plan: BenchPlan, hosts: list[Host], port: int) -> _Processes:
    """Start the same number of ranks on each host (network namespace)."""
    commands = {}
    for rank in range(plan.nprocs):
        words = worker_command(plan, port, hosts[0].v4, rank)
        commands[f"rank {rank}"] = hosts[rank * plan.hosts // plan.nprocs].inside(*words)
    return _Processes(commands, GLOO_SOCKET_IFNAME="eth0")


def _under_mpiexec(plan: BenchPlan, port: int, peer: str) -> _Processes:
    """Start the ranks by the mpiexec of a peer."""
    program = mpiexec(peer)
    assert program is not None
    command = [program, "-n", str(plan.nprocs), *worker_command(plan, port, LOOPBACK)]
    return _Processes({f"mpiexec of --peer {peer}": command}, **variables(peer))
