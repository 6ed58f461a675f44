"""The table of launchers, with the environments that they make."""

import os
from functools import partial
from types import SimpleNamespace

import pytest

from tests.support.together import on_threads
from unisono.core.base.net.sockets import listen
from unisono.core.platform import processes
from unisono.core.rendezvous import meeting, rendezvous
from unisono.core.rendezvous.launchers import GIVEN, LAUNCHERS, find_place, is_alone, local_rank
from unisono.core.rendezvous.meeting import host_of_mpiexec, hosts_of_rank_0, job_ports
from unisono.core.stores import FileStore, TCPStore
from unisono.errors import RendezvousError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "PMIX_NAMESPACE": "prterun-host-17@1",
    "PMIX_RANK": "3",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "4711"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "5",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "LSB_JOBID": "815",
    "PMIX_NAMESPACE": "2",
}
LEADER_WORKER_SET = {
    "LWS_WORKER_INDEX": "1",
    "LWS_GROUP_SIZE": "3",
    "LWS_LEADER_ADDRESS": "serve-0.serve.default",
}
VOLCANO = {
    "VC_TASK_INDEX": "1",
    "VK_TASK_INDEX": "1",
    "VC_WORKER_NUM": "2",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
}
ONE_NODE_SRUN = SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu007"}

VARIABLES = {
    name
    for env in (
        *(TORCHRUN, OPEN_MPI, MVAPICH, HYDRA, SRUN, INDEXED_JOB),
        *(JSRUN, LEADER_WORKER_SET, VOLCANO),
    )
    for name in (*env, *GIVEN)
}


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Return a function that makes the environment say exactly this."""

    def change(variables):
        for name in VARIABLES | {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}:
            monkeypatch.delenv(name, raising=False)
        for name, text in variables.items():
            monkeypatch.setenv(name, text)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    change({})
    return change


@pytest.mark.parametrize(
    ("env", "name", "expected"),
    [
        (TORCHRUN, "unisono run, torchrun", (3, 8, 1, False, "")),
        (OPEN_MPI, "mpiexec (Open MPI)", (3, 8, 3, True, "prterun-host-17@1/")),
        (MVAPICH, "mpiexec (MVAPICH)", (1, 2, 0, False, "")),
        (HYDRA, "mpiexec (MPICH, Intel MPI: PMI)", (1, 2, 1, True, "")),
        (SRUN, "srun (Slurm)", (5, 8, 1, False, "4711/0/")),
        (ONE_NODE_SRUN, "srun (Slurm)", (5, 8, 1, True, "4711/0/")),
        (INDEXED_JOB, "Kubernetes Indexed Job", (2, 4, None, False, "")),
        (JSRUN, "jsrun (LSF)", (5, 12, 5, False, "815/2")),
        (JSRUN | {"JSM_NAMESPACE_SIZE": "6"}, "jsrun (LSF)", (5, 6, 5, True, "815/2")),
        # MPI under jsrun is Open MPI's.
        (JSRUN | OPEN_MPI, "mpiexec (Open MPI)", (3, 8, 3, True, "prterun-host-17@1/")),
        (LEADER_WORKER_SET, "Kubernetes LeaderWorkerSet", (1, 3, None, False, "")),
        (VOLCANO, "Volcano job of one task", (1, 2, None, False, "")),
        # unisono run and torchrun inside of the others
        (SRUN | TORCHRUN, "unisono run, torchrun", (3, 8, 1, False, "")),
        # Hydra starts its helpers with srun: there, Slurm's numbers are those of the helpers.
        (SRUN | HYDRA, "mpiexec (MPICH, Intel MPI: PMI)", (1, 2, 1, True, "")),
        # srun --mpi=pmi2
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, "srun (Slurm)", (5, 8, 1, False, "4711/0/")),
    ],
)
def test_place(env, name, expected):
    place = find_place(env)
    found = (place.rank, place.world_size, place.local_rank, place.one_host, place.job)
    assert (place.launcher.name, found) == (name, expected)
    assert local_rank(env) == expected[2]
    assert not is_alone(env)


@pytest.mark.parametrize("env", [{}, {"PATH": "/bin"}, {"SLURM_NTASKS": "1"}, {"RANK": ""}])
def test_nobody_says_anything(env):
    assert find_place(env) is None
    assert is_alone(env)


@pytest.mark.parametrize("env", [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"MASTER_PORT": "1"}])
def test_incomplete_variables_are_left_to_env(env):
    assert find_place(env) is None
    assert not is_alone(env)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (BATCH_SCRIPT, "SLURM_NTASKS=8 means several processes"),
        ({"SLURM_NNODES": "2"}, "SLURM_NNODES=2 means several"),
        ({"JOB_COMPLETION_INDEX": "0"}, "WORLD_SIZE is not set: this would make a world of one"),
        ({"PMI_RANK": "0"}, "PMI_SIZE is not set: this would make a world of one"),
        ({"LWS_WORKER_INDEX": "0"}, "LWS_GROUP_SIZE is not set: this would make a world of one"),
        # The index counts the pods of one task, so with two tasks it is no rank.
        (VOLCANO | {"VC_PS_NUM": "1"}, r"VC_\*_NUM is not set: this would make a world of one"),
        (HYDRA | {"RANK": "0", "WORLD_SIZE": "1"}, "started 2 processes"),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "1"}, "started 8 processes"),
        (HYDRA | {"PMI_RANK": "x"}, "PMI_RANK must be an integer, got 'x'"),
        (HYDRA | {"PMI_RANK": "2"}, r"\(PMI_RANK, PMI_SIZE\): rank must be 0 to 1, got 2"),
        (
            SRUN | {"SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": "x"},
            "SLURM_NTASKS must be an integer, got 'x'",
        ),
    ],
)
def test_refuses_and_says_why(env, message):
    with pytest.raises(RendezvousError, match=message):
        is_alone(env)


@pytest.mark.parametrize(
    "env",
    [
        BATCH_SCRIPT | {"RANK": "0", "WORLD_SIZE": "1"},
        HYDRA | {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"},
    ],
)
def test_a_world_of_one_that_is_meant(env):
    assert find_place(env).world_size == 1
    assert is_alone(BATCH_SCRIPT, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu007", "gpu007"),
        ("gpu[007-010,12],cpu3", "gpu007"),
        ("gpu[3,5-6]", "gpu3"),
        ("a,b", "a"),
        ("n[1-2]-ib", "n1-ib"),
        ("login-1,gpu[1-2]", "login-1"),
    ],
)
def test_first_host_of_slurms_list(nodes, first):
    env = SRUN | {"SLURM_STEP_NODELIST": nodes}
    assert hosts_of_rank_0(find_place(env), env) == [first]


def test_rank_0_may_be_on_any_host_of_an_arbitrary_distribution():
    env = SRUN | {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_STEP_NODELIST": "a[1-2]-b[8-10],c3"}
    found = hosts_of_rank_0(find_place(env), env)
    assert found == ["a1-b8", "a1-b9", "a1-b10", "a2-b8", "a2-b9", "a2-b10", "c3"]


def test_rank_0_that_is_not_where_the_others_look_for_it():
    env = SRUN | {"SLURM_PROCID": "0", "SLURMD_NODENAME": "gpu008"}
    line = "rank 0 is on gpu008, but the other ranks look for it on gpu007"
    with pytest.raises(RendezvousError, match=line) as caught:
        hosts_of_rank_0(find_place(env), env)
    assert caught.value.hint == "set MASTER_ADDR=gpu008 for all processes"


@pytest.mark.parametrize(
    ("fqdn", "expected"),
    [("train-2.svc.ns.svc.cluster.local", "train-0.svc.ns.svc.cluster.local"), ("a-b-2", "a-b-0")],
)
def test_first_pod_of_an_indexed_job(monkeypatch, fqdn, expected):
    monkeypatch.setattr("socket.getfqdn", lambda: fqdn)
    place = find_place(INDEXED_JOB)
    assert (hosts_of_rank_0(place, INDEXED_JOB), job_ports(place)) == ([expected], [29500])


@pytest.mark.parametrize(
    ("env", "expected"),
    [(LEADER_WORKER_SET, "serve-0.serve.default"), (VOLCANO, "job-worker-0.job")],
)
def test_first_pod_that_a_variable_names(env, expected):
    place = find_place(env)
    assert (hosts_of_rank_0(place, env), job_ports(place)) == ([expected], [29500])
    assert job_ports(place, 2) == [29502]


OPEN_MPI_4 = OPEN_MPI | {
    "PMIX_NAMESPACE": "1764884481",
    "OMPI_MCA_orte_hnp_uri": "1764884480.0;tcp://10.77.0.1,10.78.0.1:54881;tcp6://[fd77::1]:57927",
}


@pytest.mark.parametrize(
    ("env", "host"),
    [
        (OPEN_MPI | {"PMIX_NAMESPACE": "prterun-gpu-7-4711@1"}, "gpu-7"),
        (OPEN_MPI_4, "10.77.0.1"),
        (OPEN_MPI | {"PMIX_NAMESPACE": "slurm.pmix.9.0"}, ""),
        (HYDRA, ""),
    ],
)
def test_host_of_open_mpis_mpiexec(env, host):
    assert host_of_mpiexec(find_place(env), env) == host
    if host:
        env = env | {"OMPI_COMM_WORLD_RANK": "0", "PMIX_SERVER_URI2": "job@0.0;tcp4://127.0.0.1:1"}
        assert host_of_mpiexec(find_place(env), env) == host
        env |= {"PMIX_SERVER_URI2": "job@0.1;tcp4://127.0.0.1:1"}
        with pytest.raises(RendezvousError, match=f"look for it on {host}"):
            host_of_mpiexec(find_place(env), env)


def test_rank_0s_host_is_asked_for_where_nothing_says_it(monkeypatch):
    with pytest.raises(RendezvousError, match="MASTER_ADDR is not set") as caught:
        hosts_of_rank_0(find_place(MVAPICH), MVAPICH)
    assert "mpiexec -genv" in caught.value.hint
    monkeypatch.setattr("socket.getfqdn", lambda: "pod-7.svc")  # not this pod's index
    with pytest.raises(RendezvousError, match="MASTER_ADDR is not set"):
        hosts_of_rank_0(find_place(INDEXED_JOB), INDEXED_JOB)


def test_ports_follow_from_the_job(monkeypatch):
    monkeypatch.delenv("UNISONO_PORTS", raising=False)
    ports = [job_ports(find_place(SRUN | {"SLURM_JOB_ID": str(job)})) for job in range(100)]
    assert len({each[0] for each in ports}) > 90
    assert all(16384 <= port < 32768 for each in ports for port in each)
    assert len({tuple(job_ports(find_place(SRUN | {"SLURM_PROCID": str(r)}))) for r in (0, 7)}) == 1
    first, second = (job_ports(find_place(SRUN), meeting) for meeting in (0, 1))
    assert second[:7] == first[1:]
    with pytest.raises(RendezvousError, match="MASTER_PORT is not set"):
        job_ports(find_place(MVAPICH))
    monkeypatch.setenv("UNISONO_PORTS", "7000-7002")
    assert job_ports(find_place(SRUN), 4) == [7001, 7002, 7000]
    assert job_ports(find_place(INDEXED_JOB), 4) == [7001]


def meet_all(environment, env, launcher, world_size):
    """Let each rank of a launcher meet in turn; the store's client side waits for nobody."""
    met = []
    for rank in range(world_size):
        environment(env | {launcher.rank: str(rank)})
        store, got_rank, got_size = next(rendezvous("env://", timeout=10))
        assert (got_rank, got_size) == (rank, world_size)
        met.append(store)
    return met


def test_an_invented_line_about_oneself_names_no_other_launcher(monkeypatch):
    """Under qemu-user a process reads in /proc/PID/stat of itself what no other process reads."""
    me, own, real = os.getpid(), f"/proc/{os.getpid()}/stat", processes.read_text
    found = meeting._launcher_process("NO_SUCH_VARIABLE"), processes.entry_of(me)
    assert found[1].parent == os.getppid()
    invented = "1 (python) R 0 1" + " 0" * 50
    monkeypatch.setattr(processes, "read_text", lambda at: invented if at == own else real(at))
    assert (meeting._launcher_process("NO_SUCH_VARIABLE"), processes.entry_of(me)) == found


def test_ranks_of_one_host_meet_in_a_file(environment, monkeypatch, tmp_path):
    launcher = next(launcher for launcher in LAUNCHERS if launcher.rank == "SLURM_PROCID")
    env = ONE_NODE_SRUN | {"SLURM_STEP_NUM_TASKS": "3"}
    monkeypatch.setattr(meeting, "_meetings", iter([0, 0, 0]))
    stores = meet_all(environment, env, launcher, 3)
    assert all(isinstance(store, FileStore) for store in stores)
    stores[0].set("k", "v")
    assert stores[2].get("k") == b"v"
    for store in stores:
        store.close()
    [folder] = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []


def test_ranks_of_several_hosts_meet_at_the_derived_place(environment, monkeypatch):
    """The first node of the list is this host; its ranks 0 and 1 meet from two threads."""
    (listener,) = listen("127.0.0.1", 0)
    with listener:
        port = listener.getsockname()[1]
    monkeypatch.setattr(meeting, "job_ports", lambda place, meeting: [port])
    monkeypatch.setattr(meeting, "_meetings", iter([0, 0]))
    env = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1,other"}

    def meet(rank):
        place = find_place(env | {"SLURM_PROCID": str(rank)})
        return meeting.open_store(place, env, 20)

    stores = on_threads(partial(meet, 0), partial(meet, 1))
    stores[0].set("k", "v")
    assert stores[1].get("k") == b"v"
    # Another job that came to the same port by chance does not see it.
    assert stores[0].prefix == "4711/0//0"
    stores[1].close()
    stores[0].close()


def test_time_out_of_a_store_that_mpiexec_names_is_that_of_the_user(monkeypatch):
    monkeypatch.setattr(meeting, "Deadline", lambda limit: SimpleNamespace(remaining=lambda: 13.0))
    env = HYDRA | {"MPI_LOCALNRANKS": "1", "PMI_FD": "0"}
    with TCPStore("127.0.0.1", 0, is_master=True) as server:
        monkeypatch.setattr(meeting, "carry", lambda *_: f"{server.port},127.0.0.1")
        with meeting.open_store(find_place(env), env, 20) as store:
            assert store.timeout.total_seconds() == 20


def test_addresses_of_rank_0_that_do_not_answer(monkeypatch):
    (listener,) = listen("127.0.0.1", 0)
    with listener:
        port = listener.getsockname()[1]
    monkeypatch.setattr(meeting, "carry", lambda *_: f"{port},127.0.0.1,127.0.0.2")
    env = HYDRA | {"MPI_LOCALNRANKS": "1", "PMI_FD": "0"}
    line = rf"rank 1 cannot reach rank 0 at port {port} of 127\.0\.0\.1 \(.*\), 127\.0\.0\.2 \("
    with pytest.raises(RendezvousError, match=line) as caught:
        meeting.open_store(find_place(env), env, 20)
    assert "UNISONO_HOST" in caught.value.hint


def test_explicit_address_wins(environment):
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as server:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
        environment(SRUN | {"SLURM_STEP_NODELIST": "nowhere.invalid"} | address)
        server.set("unisono/world", "1")  # as rank 0 does
        store, rank, world_size = next(rendezvous("env://", timeout=10))
        assert (rank, world_size) == (5, 8)
        server.set("k", "v")
        assert store.get("k") == b"v"
        store.close()


def test_folder_of_somebody_else_is_not_used(environment, tmp_path, monkeypatch):
    monkeypatch.setattr("os.getuid", lambda: 12345)
    environment(ONE_NODE_SRUN)
    with pytest.raises(RendezvousError, match="is not a folder of this user alone"):
        next(rendezvous("env://", timeout=10))
