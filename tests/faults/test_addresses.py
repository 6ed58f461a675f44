"""Names that come late, refused hosts, taken ports and NAT, on hosts that are namespaces."""

import contextlib
import json
import re
import subprocess
import sys
import uuid

import pytest

from tests.faults.scripts import outcome, started
from tests.faults.test_hosts import COMPUTES, PORT
from tests.support import netns
from tests.support.nodes import PATIENT, REDUCING, Job
from unisono.core.rendezvous.launchers import find_place
from unisono.core.rendezvous.meeting import job_ports

pytestmark = pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))

# Of a pod's headless service: it appears when the pod is ready, for the others perhaps only.
NAME = "train-0.workers"
UNKNOWN = f"{NAME} does not resolve here"


@pytest.fixture
def pods():
    """Two hosts, train-0 and train-1, which resolve their own names only."""
    with netns.Network(2) as network:
        for index, host in enumerate(network.hosts):
            host.run("hostname", f"train-{index}")
            publish(host, f"{host.v4} train-{index}")
        yield network.hosts


def publish(host, *lines):
    host.run("sh", "-c", "cat > /etc/hosts", text="\n".join(["127.0.0.1 localhost", *lines, ""]))


def ended_well(processes):
    for told, returncode, err in map(outcome, processes):
        assert (told["kind"], returncode) == ("", 0), (told, err)


# --- a name that comes late


def test_rank_0_need_not_resolve_its_own_name(pods):
    variables = {"MASTER_ADDR": NAME, "MASTER_PORT": str(PORT)}
    with started([host.inside() for host in pods], COMPUTES, variables) as processes:
        assert UNKNOWN in processes[0].stderr.readline()
        publish(pods[1], f"{pods[0].v4} {NAME}")
        ended_well(processes)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_first_node_need_not_resolve_its_own_name(tmp_path, pods, backend):
    """The endpoint begins with the name of the first host, which so serves it."""
    with Job(tmp_path, REDUCING, pods) as job:
        agents = []
        for rank in range(2):
            if backend == "static":
                flags = ["--nnodes=2", f"--node-rank={rank}", f"--master-addr={NAME}"]
                agents.append(job.start(*flags, f"--master-port={job.port}"))
            else:
                agents.append(job.node(endpoint=f"{NAME}:{job.port}", conf=PATIENT))
        agents[0].told(UNKNOWN)
        publish(pods[1], f"{pods[0].v4} {NAME}")
        ups = [agent.next_ups(1)[0] for agent in agents]
        assert [(up.node, up.world_size, up.total) for up in ups] == [(0, 2, 2), (1, 2, 2)]
        job.stop()
        assert [agent.ended() for agent in agents] == [0, 0]


def test_node_serves_an_endpoint_whose_name_comes_late(tmp_path, pods):
    quiet = {"unisono.core.rendezvous.endpoint._QUIET_S": 0.0}
    with Job(tmp_path, REDUCING, pods) as job:
        endpoint = f"other.name:{job.port}"
        agents = [job.node(endpoint=endpoint, conf=PATIENT, patches=quiet) for _ in pods]
        for agent in agents:
            agent.told("no rendezvous at other.name")
        for host in pods:
            publish(host, f"{pods[0].v4} other.name")
        ups = [agent.next_ups(1)[0] for agent in agents]
        assert [(up.world_size, up.total) for up in ups] == [(2, 2), (2, 2)]
        job.stop()
        assert [agent.ended() for agent in agents] == [0, 0]


# --- a host that is refused, because the job has no token

# The hosts of these tests have a token of their own.
NO_TOKEN = "os.environ['UNISONO_TOKEN'] = ''\n"
WAITS = f"""
{NO_TOKEN}
print("here", flush=True)
if rank == 2:
    sys.stdin.readline()
def meet():
    dist.init_process_group(timeout=90)
tell(attempt(meet))
sys.stdin.readline()
"""


def test_refused_host_ends_the_wait_of_all_ranks(pods):
    for host in pods:
        publish(host, f"{pods[0].v4} {NAME}")
    variables = {"MASTER_ADDR": NAME, "MASTER_PORT": str(PORT)}
    hosts = [pods[0], pods[0], pods[1]]
    with started([host.inside() for host in hosts], WAITS, variables) as processes:
        assert [process.stdout.readline() for process in processes] == ["here\n"] * 3
        processes[2].stdin.write("\n")
        processes[2].stdin.flush()
        told = [json.loads(process.stdout.readline()) for process in processes]
    for rank, caught in enumerate(told[:2]):
        assert (caught["kind"], 2 in caught["peers"]) == ("RendezvousError", True), caught
        line = rf"rank {rank} of 3 waits no longer for ranks? .*2: the store refused 10\.77\.0\.2:"
        assert re.match(line, caught["text"]), caught
        assert "set UNISONO_TOKEN to the same secret" in caught["text"]
    assert told[2]["kind"] == "HandshakeError"
    assert "set UNISONO_TOKEN to the same secret" in told[2]["text"]


def test_refused_node_ends_the_wait_of_the_first_node(tmp_path, pods):
    for host in pods:
        publish(host, f"{pods[0].v4} {NAME}")
    with Job(tmp_path, hosts=pods, UNISONO_TOKEN="") as job:
        agents = [job.node(endpoint=f"{NAME}:{job.port}", conf=PATIENT) for _ in pods]
        assert [agent.ended() for agent in agents] == [1, 1]
    assert "the rendezvous store refused 10.77.0.2:" in agents[0].err
    assert "1 of 2 nodes came (set UNISONO_TOKEN to the same secret" in agents[0].err
    assert "does not let this client in" in agents[1].err


# --- a place that ranks derive from Slurm's variables

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "train-[0-1]",
}
UNDER_SLURM = f"""
del os.environ["RANK"], os.environ["WORLD_SIZE"]
os.environ |= {SLURM} | {{"SLURM_PROCID": str(rank), "SLURMD_NODENAME": os.uname().nodename}}
"""
OTHERS = {
    "a silent program": "client = listener.accept(); sys.stdin.read()",
    "a program of another kind": """
while True:
    client, _ = listener.accept()
    client.recv(1)
    client.sendall(b"HTTP/1.1 400 Bad Request\\r\\n\\r\\n")
    client.close()
""",
    "the store of another job": """
listener.close()
from unisono.core.stores import TCPStore
store = TCPStore("::", int(sys.argv[1]), is_master=True)
print("ready", flush=True)
sys.stdin.read()
""",
}


@pytest.fixture
def by_name(pods):
    """The two hosts, which resolve both names."""
    for host in pods:
        publish(host, *(f"{each.v4} train-{index}" for index, each in enumerate(pods)))
    return pods


@contextlib.contextmanager
def occupied(host, port, script):
    """Let another program have a port of a host."""
    listens = "import socket, sys; listener = socket.create_server(('', int(sys.argv[1])))\n"
    said = "" if "ready" in script else "print('ready', flush=True)\n"
    command = host.inside(sys.executable, "-c", listens + said + script, str(port))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("other", OTHERS)
def test_derived_port_that_another_program_has(by_name, other):
    port = job_ports(find_place(SLURM | {"SLURM_PROCID": "0"}))[0]
    hosts = [host.inside() for host in by_name]
    foreign = occupied(by_name[0], port, OTHERS[other])
    with foreign, started(hosts, UNDER_SLURM + COMPUTES, {}) as processes:
        ended_well(processes)


def test_rank_0_is_not_on_the_first_host_of_an_arbitrary_distribution(by_name):
    script = UNDER_SLURM + "os.environ['SLURM_DISTRIBUTION'] = 'arbitrary'\n" + COMPUTES
    # Rank 0 is on train-1, and the list is sorted.
    hosts = [host.inside() for host in (*by_name[::-1], by_name[0])]
    script = script.replace("'SLURM_STEP_NUM_TASKS': '2'", "'SLURM_STEP_NUM_TASKS': '3'")
    with started(hosts, script, {}) as processes:
        ended_well(processes)


def test_all_derived_ports_are_taken(pods):
    host = pods[0].inside()
    # One port only, which the script itself has.
    script = f"""
import socket
{UNDER_SLURM}
os.environ["UNISONO_PORTS"] = "7000-7001"
held = [socket.create_server(("", port)) for port in (7000, 7001)]
tell(attempt(dist.init_process_group))
"""
    with started([host], script, {}) as [process]:
        told, _, _ = outcome(process)
    line = "rank 0 cannot listen on train-0: other programs have the ports 7000, 7001"
    assert told["text"].startswith(line)
    assert "MASTER_PORT" in told["text"]


# --- ports of a range, and addresses of a router

LOW, HIGH = 7000, 7007
INSIDE = "172.17.0.2"
# As `docker -p 7000-7007:7000-7007` does without the kernel's help.
FORWARDER = f"""
import asyncio, sys
async def copy(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
def forward(port):
    async def served(reader, writer):
        try:
            there, back = await asyncio.open_connection("{INSIDE}", port)
        except OSError:
            return writer.close()
        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)
    return served
async def main():
    for port in range({LOW}, {HIGH} + 1):
        await asyncio.start_server(forward(port), sys.argv[1], port)
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@contextlib.contextmanager
def containers():
    """Make two hosts with a container each, and a program that forwards some ports to it.

    Both containers have the same address. Their own connections go out by another interface, in
    place of the router's translation; ranks do not listen there (UNISONO_HOST).
    """
    with netns.Network(2) as network, contextlib.ExitStack() as stack:
        made = []
        for host in network.hosts:
            inner = netns.Host(10 + host.index)
            stack.callback(inner.close)
            host.ip(f"link add veth0 type veth peer name eth0 netns {inner.pid}")
            host.ip("address add 172.17.0.1/24 dev veth0", "link set veth0 up")
            network._switch._host.ip(
                f"link add port{inner.index} type veth peer name eth1 netns {inner.pid}",
                f"link set port{inner.index} master sw up",
            )
            inner.ip(
                "link set lo up",
                f"address add {INSIDE}/24 dev eth0",
                "link set eth0 up",
                f"address add {inner.v4}/24 dev eth1",
                "link set eth1 up",
            )
            inner.run("hostname", f"inside-{host.index}")
            inner.put(f"127.0.0.1 localhost\n{INSIDE} inside-{host.index}\n", "/etc/hosts")
            inner.put(f"{uuid.uuid4()}\n", "/proc/sys/kernel/random/boot_id")
            command = host.inside(sys.executable, "-c", FORWARDER, host.v4)
            process = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            assert process.stdout.readline() == "ready\n"
            made.append((inner, host))
        yield made


def forwarded(host):
    return {
        "UNISONO_PORTS": f"{LOW}-{HIGH}",
        "UNISONO_HOST": INSIDE,
        "UNISONO_PUBLISH": host.v4,
    }


def test_ranks_behind_a_forwarder():
    with containers() as [(first, outside), (second, other)]:
        prefixes = [
            inner.inside("env", *(f"{name}={text}" for name, text in forwarded(host).items()))
            for inner, host in ((first, outside), (second, other), (second, other))
        ]
        variables = {"MASTER_ADDR": outside.v4, "MASTER_PORT": str(LOW)}
        with started(prefixes, COMPUTES, variables) as processes:
            ended_well(processes)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_launchers_behind_a_forwarder(tmp_path, backend):
    with containers() as made, Job(tmp_path, REDUCING, [inner for inner, _ in made]) as job:
        agents = []
        for rank, (_, host) in enumerate(made):
            address = made[0][1].v4
            if backend == "static":
                flags = ["--nnodes=2", f"--node-rank={rank}", f"--master-addr={address}"]
                agents.append(job.start(*flags, f"--master-port={LOW}", **forwarded(host)))
            else:
                where = {"endpoint": f"{address}:{LOW}", "conf": PATIENT}
                agents.append(job.node(**where, **forwarded(host)))
        ups = [agent.next_ups(1)[0] for agent in agents]
        assert {(up.world_size, up.total) for up in ups} == {(2, 2)}
        job.stop()
        assert [agent.ended() for agent in agents] == [0, 0]


PORTS_OF_ALL = f"""
{UNDER_SLURM}
dist.init_process_group(timeout=60)
def check():
    x = np.ones(1000)
    dist.all_reduce(x)
    assert (x == world_size).all(), x
    group = dist.new_group(backend="unisono")
    dist.all_reduce(x, group=group)
    rows = [row.split() for name in ("tcp", "tcp6") for row in open(f"/proc/net/{{name}}")]
    ports = sorted({{int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"}})
    assert len(ports) >= 2 - rank, ports
    assert all({LOW} <= port <= {HIGH} for port in ports), ports
tell(attempt(check))
dist.barrier()
dist.destroy_process_group()
"""


def test_every_listener_is_in_the_range(by_name):
    hosts = [host.inside() for host in by_name]
    with started(hosts, PORTS_OF_ALL, {"UNISONO_PORTS": f"{LOW}-{HIGH}"}) as processes:
        ended_well(processes)


def test_range_that_is_too_small_ends_all_ranks(by_name):
    hosts = [host.inside() for host in (by_name[0], by_name[0], by_name[1])]
    variables = {
        "MASTER_ADDR": "train-0",
        "MASTER_PORT": str(LOW),
        "UNISONO_PORTS": f"{LOW}-{LOW + 1}",
        "LOCAL_WORLD_SIZE": "2",
    }
    script = "tell(attempt(dist.init_process_group, timeout=90))"
    with started(hosts, script, variables) as processes:
        ends = [outcome(process)[0] for process in processes]
    # One of the ranks of train-0 got the port beside the store's.
    [failed] = [rank for rank, told in enumerate(ends) if told["kind"] == "TransportError"]
    text = f"none of the 2 ports of UNISONO_PORTS={LOW}-{LOW + 1} is free on train-0"
    assert text in ends[failed]["text"]
    assert "up to 2 for stores (here up to 4)" in ends[failed]["text"]
    for rank in {0, 1, 2} - {failed}:
        assert (ends[rank]["kind"], ends[rank]["peers"]) == ("RendezvousError", [failed])
        assert (
            f"rank {rank} of 3 cannot meet rank {failed}: this rank cannot listen"
            in ends[rank]["text"]
        )
        assert text in ends[rank]["text"]
