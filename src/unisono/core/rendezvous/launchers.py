"""Find the launcher of this process from the environment variables that launchers set.

Pure: the functions read a mapping. `meeting` opens the store of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from unisono.core.rendezvous.url import parse_integer, ranks_of
from unisono.errors import RendezvousError

VariableNames = tuple[str, ...]

GIVEN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables of env://, set by unisono's and torch's launchers or by users."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The variables of one launcher; of several names the first that is set counts.

    A name may have a `*`. It counts if exactly one variable that is set matches it.

    Attributes:
        name: Name of the launcher in texts.
        rank: Rank of this process. If it is set, this launcher started the process.
        world_size: Number of processes.
        local_rank: Number of this process on its host.
        local_size: Number of processes on this host.
        nodes: Number of hosts.
        job: Parts of the job's name. Without them the job is named after the launcher's process.
        needs: Prefix of variables, of which at least 1 must be set. If none is, ignore `rank`.
        first_host: The host of rank 0, alone or as the first of a list with commas.
        is_pod: Whether each process has an address of its own, at which any fixed port is free.
        same: Pairs of variables. If each pair is equal, a later row of the table has the same
            values and more.
    """

    name: str
    rank: str
    world_size: VariableNames
    local_rank: VariableNames = ()
    local_size: VariableNames = ()
    nodes: VariableNames = ()
    job: VariableNames = ()
    needs: str = ""
    first_host: VariableNames = ()
    is_pod: bool = False
    same: tuple[tuple[str, str], ...] = ()


_SLURM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")

LAUNCHERS = (
    Launcher(
        name="unisono run, torchrun",
        rank="RANK",
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        nodes=("GROUP_WORLD_SIZE",),
    ),
    Launcher(
        name="mpiexec (Open MPI)",
        rank="OMPI_COMM_WORLD_RANK",
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        name="mpiexec (MVAPICH)",
        rank="MV2_COMM_WORLD_RANK",
        world_size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    # Before srun: mpiexec starts its helpers with srun, and their SLURM_PROCID counts hosts.
    Launcher(
        name="mpiexec (MPICH, Intel MPI: PMI)",
        rank="PMI_RANK",
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "SLURM_LOCALID"),
        local_size=("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"),
        # srun --mpi=pmi2 sets PMI's variables, too, but not the variables about the host.
        same=(("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS")),
    ),
    Launcher(
        name="srun (Slurm)",
        rank="SLURM_PROCID",
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        nodes=_SLURM_NODES,
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        # A batch script outside of srun has SLURM_PROCID=0, too, but there are no other ranks.
        needs="SLURM_STEP",
    ),
    # After Open MPI and PMI, because jsrun starts MPI programs with their variables, too.
    Launcher(
        name="jsrun (LSF)",
        rank="JSM_NAMESPACE_RANK",
        world_size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        job=("LSB_JOBID", "PMIX_NAMESPACE"),
    ),
    Launcher(
        name="Kubernetes Indexed Job",
        rank="JOB_COMPLETION_INDEX",
        world_size=("WORLD_SIZE",),
        is_pod=True,
    ),
    Launcher(
        name="Kubernetes LeaderWorkerSet",
        rank="LWS_WORKER_INDEX",
        world_size=("LWS_GROUP_SIZE",),
        first_host=("LWS_LEADER_ADDRESS",),
        is_pod=True,
    ),
    # The number counts the pods of one task only, so a job of several tasks needs RANK.
    Launcher(
        name="Volcano job of one task",
        rank="VC_TASK_INDEX",
        world_size=("VC_*_NUM",),
        first_host=("VC_*_HOSTS",),
        is_pod=True,
    ),
)

# These are set for several processes, even if no launcher of the table started this process.
_ALLOCATIONS = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "PMI_SIZE")


@dataclass(frozen=True, kw_only=True)
class LauncherPlace:
    """The place of this process among the processes that a launcher started.

    Attributes:
        launcher: The launcher.
        rank: Rank of this process.
        world_size: Number of processes.
        local_rank: Number of this process on its host; None if unknown.
        one_host: Whether all processes are certainly on one host.
        job: Name of the job, unique among jobs that run at the same time; "" if unknown.
    """

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int | None = None
    one_host: bool = False
    job: str = ""


def find_place(env: Mapping[str, str]) -> LauncherPlace | None:
    """Return the place that the first launcher in the table with variables in `env` gave.

    Raises:
        RendezvousError: The launcher's variables are incomplete, no numbers, or out of range. Or
            a launcher started several processes, while WORLD_SIZE is 1.
    """
    for launcher in LAUNCHERS:
        if not env.get(launcher.rank) or not _believable(launcher, env):
            continue
        if launcher is LAUNCHERS[0] and not env.get("WORLD_SIZE"):
            continue  # env:// reports the missing variable
        place = _place(launcher, env)
        if launcher is LAUNCHERS[0] and place.world_size == 1:
            _check_really_alone(env)
        return place
    return None


def local_rank(env: Mapping[str, str]) -> int | None:
    """Return the number of this process on its host; None if no launcher has set it.

    Raises:
        RendezvousError: As `find_place`.
    """
    if text := env.get("LOCAL_RANK"):
        return parse_integer(text, "environment variable LOCAL_RANK")
    place = find_place(env)
    return None if place is None else place.local_rank


def is_alone(env: Mapping[str, str], rank: int = -1, world_size: int = -1) -> bool:
    """Return whether neither the user nor the environment indicates other ranks.

    Args:
        env: The environment.
        rank: As passed by the user; -1 if not passed.
        world_size: As passed by the user; -1 if not passed.

    Raises:
        RendezvousError: A variable indicates several processes, but no launcher started them. Each
            process would make a world of its own.
    """
    if world_size == 1 and rank in (-1, 0):
        return True
    if world_size != -1 or rank != -1 or find_place(env) is not None:
        return False
    if any(env.get(name) for name in GIVEN):
        return False
    for name in _ALLOCATIONS:
        if env.get(name, "1") != "1":
            raise RendezvousError(
                f"{name}={env[name]} means several processes, but no launcher started this "
                "process: this would make a world of one in each",
                hint="start the script with srun, mpiexec or `unisono run`; for one process alone "
                "pass rank=0, world_size=1",
            )
    return True


def _believable(launcher: Launcher, env: Mapping[str, str]) -> bool:
    if launcher.same and all(env.get(one) == env.get(other) for one, other in launcher.same):
        return False
    return not launcher.needs or any(name.startswith(launcher.needs) for name in env)


def _place(launcher: Launcher, env: Mapping[str, str]) -> LauncherPlace:
    size_text = first_value(launcher.world_size, env)
    if not size_text:
        names = " or ".join(launcher.world_size)
        raise RendezvousError(
            f"{launcher.rank}={env[launcher.rank]} was set by {launcher.name}, but {names} is not "
            "set: this would make a world of one in each process",
            hint=f"set {launcher.world_size[0]} to the number of processes",
        )
    size_name = next(_present(launcher.world_size, env))
    rank, world_size = ranks_of(
        parse_integer(env[launcher.rank], f"environment variable {launcher.rank}"),
        parse_integer(size_text, f"environment variable {size_name}"),
        f"{launcher.name} ({launcher.rank}, {size_name})",
    )
    local_rank = first_value(launcher.local_rank, env)
    return LauncherPlace(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=int(local_rank) if local_rank.isdecimal() else None,
        one_host=first_value(launcher.local_size, env) == str(world_size)
        or first_value(launcher.nodes, env) == "1",
        job=_job(launcher, env),
    )


def job_of(env: Mapping[str, str]) -> str:
    """Return a name that all processes of this run and no other run have; "" if unknown."""
    run_id = env.get("TORCHELASTIC_RUN_ID", "none")
    if run_id not in ("", "none"):
        return f"{run_id}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    for launcher in LAUNCHERS[1:]:
        if env.get(launcher.rank) and _believable(launcher, env):
            return _job(launcher, env)
    return ""


def _job(launcher: Launcher, env: Mapping[str, str]) -> str:
    words = [env.get(name, "") for name in launcher.job]
    return "/".join(words) if any(words) else ""


def first_value(names: VariableNames, env: Mapping[str, str]) -> str:
    """Return the value of the first variable of `names` that is set; "" if none is."""
    return next((env[name] for name in _present(names, env)), "")


def _present(names: VariableNames, env: Mapping[str, str]) -> Iterator[str]:
    """Yield the variables that `names` mean, as far as they are set."""
    for name in names:
        found = [each for each in env if fnmatchcase(each, name)] if "*" in name else [name]
        if len(found) == 1 and env.get(found[0]):
            yield found[0]


def _check_really_alone(env: Mapping[str, str]) -> None:
    """Refuse an inherited WORLD_SIZE=1 if a launcher started several processes."""
    if env.get("TORCHELASTIC_RUN_ID"):
        return  # set by a launch inside the other launcher's process, so it is intended
    for launcher in LAUNCHERS[1:]:
        if not env.get(launcher.rank) or not _believable(launcher, env):
            continue
        size = first_value(launcher.world_size, env)
        if size and size != "1":
            raise RendezvousError(
                f"RANK={env['RANK']} and WORLD_SIZE=1 are set, but {launcher.name} started {size} "
                f"processes ({launcher.rank}={env[launcher.rank]}): this would make a world of one "
                "in each",
                hint="unset RANK and WORLD_SIZE; if that is meant, pass rank=0, world_size=1",
            )
