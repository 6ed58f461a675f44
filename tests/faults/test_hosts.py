"""Worlds across hosts, each a network namespace."""

import json
import re
import signal
import subprocess
import sys

import pytest

from tests.faults.fault_calls import BUSY_S, NOTICE_S
from tests.faults.scripts import outcome, started
from tests.support import netns
from tests.support.lateness import best_s
from unisono.core.base.net.tls import why_no_tls
from unisono.core.engines import is_native_built

pytestmark = pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))

# Nobody else can take it: each world has its own network.
PORT = 29500
TIMEOUT_S = 2.0

COMPUTES = """
method = os.environ.get("METHOD")
dist.init_process_group(init_method=method, rank=rank if method else -1,
                        world_size=world_size if method else -1, timeout=60)
def check():
    for count in (1, 1000, 100_000):
        x = np.full(count, rank + 1.0)
        dist.all_reduce(x)
        assert (x == world_size * (world_size + 1) / 2).all(), x
        all_x = np.zeros(count * world_size)
        dist.all_gather_into_tensor(all_x, np.full(count, float(rank)))
        assert (all_x == np.repeat(np.arange(world_size), count)).all(), all_x
    box = np.zeros(3)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    work = dist.isend(np.full(3, float(rank)), right)
    dist.recv(box, left)
    work.wait()
    assert (box == left).all(), box
tell(attempt(check))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def network():
    with netns.Network(3) as network:
        yield network


def on(hosts, script, **variables):
    """Start a script as a rank on each of the hosts; its store is at MASTER_ADDR."""
    variables = {"MASTER_PORT": str(PORT), "TORCHELASTIC_USE_AGENT_STORE": "", **variables}
    return started([host.inside() for host in hosts], script, variables)


def compute(hosts, script=COMPUTES, **variables):
    with on(hosts, script, **variables) as processes:
        ends = [outcome(process) for process in processes]
    for told, returncode, err in ends:
        assert returncode == 0, err
        assert told["kind"] == "", told
        assert err == ""


@pytest.mark.sweep(3)
@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("family", ["v4", "v6"])
@pytest.mark.parametrize("method", ["env", "tcp"])
def test_hosts_compute(network, method, family, hosts):
    members = network.hosts[:hosts]
    address = getattr(members[0], family)
    if method == "env":
        compute(members, MASTER_ADDR=address)
    else:
        shown = f"[{address}]" if family == "v6" else address
        compute(members, METHOD=f"tcp://{shown}:{PORT}")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", ["v4", "v6"])
def test_several_connections_between_hosts(network, family):
    compute(network.hosts, MASTER_ADDR=getattr(network.hosts[0], family), UNISONO_CHANNELS="4")


@pytest.mark.parametrize("tls", ["off", "auto", "on"])
def test_two_ranks_on_each_host(network, tls):
    first, second = network.hosts[:2]
    compute([first, second, first, second], MASTER_ADDR=first.v4, UNISONO_TLS=tls)


ASKS = """
tell(attempt(lambda: dist.init_process_group(timeout=4)))
"""


@pytest.mark.skipif(bool(why_no_tls()), reason=str(why_no_tls()))
@pytest.mark.parametrize("encrypts", [0, 1])
def test_a_host_that_does_not_encrypt_is_refused(network, encrypts):
    """Its link to the store is the first; neither end goes on without encryption."""
    modes = ["off", "off"]
    modes[encrypts] = "auto"
    members = network.hosts[:2]
    prefixes = [
        host.inside("env", f"UNISONO_TLS={mode}") for host, mode in zip(members, modes, strict=True)
    ]
    place = {"MASTER_PORT": str(PORT), "MASTER_ADDR": members[0].v4}
    with started(prefixes, ASKS, place | {"TORCHELASTIC_USE_AGENT_STORE": ""}) as processes:
        (first, _, log), (told, _, _) = (outcome(process) for process in processes)
    # The server's log has the reason, and its rank waits for its whole time-out.
    refused = ("it encrypts, and this server does not", "it does not encrypt; give it")
    named = "rank 0 of 2 waited 4 s for ranks that never came: 1; the store at "
    named += f"{re.escape(members[0].v4)}:{PORT} refused {re.escape(members[1].v4)}:\\d+: "
    assert re.match(named + refused[encrypts == 0], first["text"]), first
    assert refused[encrypts == 0] in log
    assert told["kind"] == "HandshakeError", told
    one, other = ("it encrypts its connections", "this client does not")
    if encrypts == 1:
        one, other = ("this client encrypts its connections", "the server does not")
    assert f"at {members[0].v4}:{PORT}" in told["text"]
    assert one in told["text"]
    assert other in told["text"]


LEVELS = """
dist.init_process_group(timeout=60)
shown = repr(dist.group.WORLD)
def check():
    for count in (1, 3, 10_000, 700_000):
        for root in range(world_size):
            x = np.full(count, rank + 1.0)
            dist.broadcast(x, root, algorithm="two_level")
            assert (x == root + 1).all(), x
        x = np.full(count, rank + 1.0)
        dist.all_reduce(x, algorithm="two_level")
        assert (x == world_size * (world_size + 1) / 2).all(), x
    assert "engine=native over=messages" in shown, shown
tell(attempt(check))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built")
def test_two_levels_on_two_hosts(network):
    first, second = network.hosts[:2]
    hosts = [first, first, second, second]
    compute(hosts, LEVELS, MASTER_ADDR=first.v4, UNISONO_ENGINE="native")


KILLED = """
dist.init_process_group(timeout=60)
def work():
    for turn in range(10_000):
        if rank == 3 and turn == 7:
            tell(attempt(lambda: None))
            os.kill(os.getpid(), signal.SIGKILL)
        x = np.full(200_000, 1.0)
        dist.all_reduce(x)
        assert (x == 4).all(), x
tell(attempt(work))
sys.stdin.readline()
"""


@pytest.mark.alone
def test_killed_rank_is_named_on_every_host_within_a_second(network):
    first, second = network.hosts[:2]

    def late_s():
        hosts = [first, first, second, second]
        with on(hosts, KILLED, MASTER_ADDR=first.v4) as processes:
            told = [json.loads(process.stdout.readline()) for process in processes]
        died_s = told.pop()["ended_s"]
        for rank, caught in enumerate(told):
            assert (caught["kind"], caught["peers"]) == ("PeerLostError", [3]), (rank, caught)
        return max(caught["ended_s"] for caught in told) - died_s

    assert best_s(late_s, NOTICE_S) < NOTICE_S


def test_host_whose_own_name_is_at_127_0_1_1(network):
    compute(network.hosts, MASTER_ADDR=network.hosts[0].name)


def test_name_with_an_address_in_each_family(network):
    compute(network.hosts, MASTER_ADDR="first")


def test_store_on_another_host_than_rank_0(network):
    # Rank 0 serves the store under a name that only the others see at a real address.
    hosts = network.hosts
    compute([hosts[1], hosts[0], hosts[2]], MASTER_ADDR=hosts[1].name)


# What the operators of PyTorchJob write: the host of rank 0 is localhost in its own pod alone.
OPERATOR = """
if rank == 0:
    os.environ["MASTER_ADDR"] = os.environ.pop("HERE")
"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("here", ["localhost", "127.0.0.1", "::"])
def test_host_of_rank_0_that_is_localhost_there_alone(network, here):
    hosts = network.hosts
    compute(hosts, OPERATOR + COMPUTES, MASTER_ADDR=hosts[0].name, HERE=here)


@pytest.mark.parametrize("known", ["token", "sizes"])
def test_url_that_is_localhost_on_rank_0_alone(network, known):
    """Scripts make a URL of MASTER_ADDR. The job has a token, or says that it spans hosts."""
    first, second = network.hosts[:2]
    script = (
        OPERATOR
        + """
os.environ["METHOD"] = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
"""
    )
    here = {"UNISONO_TOKEN": "", "UNISONO_INSECURE": "1", "LOCAL_WORLD_SIZE": "1"}
    variables = here if known == "sizes" else {}
    if known == "sizes":
        # The hosts of the tests have a token of their own.
        script = "os.environ['UNISONO_TOKEN'] = ''\n" + script
    compute(
        [first, second], script + COMPUTES, MASTER_ADDR=first.name, HERE="localhost", **variables
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("here", ["localhost", "127.0.0.1"])
def test_torchs_store_that_is_localhost_on_rank_0_alone(network, here):
    pytest.importorskip("torch")
    script = (
        OPERATOR
        + """
import torch, torch.distributed, unisono.torch
torch.distributed.init_process_group("unisono")
x = torch.full([1000], rank + 1.0)
def check():
    torch.distributed.all_reduce(x)
    assert (x == 6).all(), x
    torch.distributed.barrier()
tell(attempt(check))
torch.distributed.destroy_process_group()
"""
    )
    hosts = network.hosts
    variables = {"MASTER_ADDR": hosts[0].name, "HERE": here, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    # torch's store is plain, which is logged otherwise.
    compute(hosts, script, UNISONO_TLS="off", **variables)


def test_both_families_reach_a_store_at_any_address(network):
    hosts = network.hosts
    script = "os.environ['MASTER_ADDR'] = ['::', '10.77.0.1', 'fd77::1'][rank]\n" + COMPUTES
    compute(hosts, script, MASTER_ADDR="")


LISTENS = """
from unisono.core.transports.tcp.transport import _transports
os.environ.update(json.loads(os.environ["OF_RANK"])[rank])
dist.init_process_group(timeout=60)
def check():
    x = np.ones(1000)
    dist.all_reduce(x)
    assert (x == world_size).all(), x
    at = [s.getsockname()[0] for each in _transports for s in each._listeners]
    assert at == json.loads(os.environ["EXPECTED"])[rank], at
tell(attempt(check))
dist.barrier()
dist.destroy_process_group()
"""


def test_interfaces_that_gloo_and_nccl_are_told():
    of_rank = [
        {"GLOO_SOCKET_IFNAME": "eth1,eth0", "NCCL_SOCKET_IFNAME": "lo"},
        {"NCCL_SOCKET_IFNAME": "^eth1,lo"},
        {"UNISONO_HOST": "10.77.0.3", "GLOO_SOCKET_IFNAME": "eth1"},
    ]
    expected = [["10.79.0.1", "10.77.0.1", "fd77::1"], ["10.77.0.2", "fd77::2"], ["10.77.0.3"]]
    with netns.Network(3) as network:
        for host in network.hosts:
            # An interface that leads nowhere.
            host.ip("link add eth1 type veth peer name other")
            host.ip(f"addr add 10.79.0.{host.index}/32 dev eth1", "link set eth1 up")
        compute(
            network.hosts,
            LISTENS,
            MASTER_ADDR=network.hosts[0].v4,
            OF_RANK=json.dumps(of_rank),
            EXPECTED=json.dumps(expected),
        )


APART = """
os.environ["UNISONO_HOST"] = f"10.77.0.{rank + 1}"
dist.init_process_group(timeout=60)
x = np.ones(3)
caught = attempt(dist.all_reduce, x, timeout=TIMEOUT)
tell(caught)
sys.stdin.readline()
os._exit(0)
"""


def test_hosts_that_cannot_reach_each_other_are_told_in_a_table():
    """The store is reached over IPv6; of the links over IPv4 one host is cut off by its peers."""
    script = APART.replace("TIMEOUT", repr(TIMEOUT_S))
    with netns.Network(3) as network:
        first, second, third = network.hosts
        first.ip(f"route add unreachable {third.v4}/32")
        second.ip(f"route add prohibit {third.v4}/32")
        for port in range(PORT, PORT + 5):
            where = {"MASTER_ADDR": first.v6, "MASTER_PORT": str(port)}
            with on(network.hosts, script, **where) as processes:
                told = ask(processes)
            # On a busy machine a rank may not have answered in the tenth of a second it has.
            texts = [caught["text"] for caught in told[:2]]
            if all(f"rank {rank} -> rank 2" in text for text in texts for rank in (0, 1)):
                break
    for rank, caught in enumerate(told):
        first_line, head, *rest = caught["text"].splitlines()
        table = [line.strip() for line in rest if line.startswith("    rank ")]
        assert head.strip() == "failed connections:", caught
        assert caught["peers"] == ([2] if rank < 2 else [0, 1]), caught
        assert f"on rank {rank} of 3" in first_line
        assert "with unisono doctor, and see UNISONO_HOST" in caught["text"], caught
        for line in table:
            assert re.fullmatch(r"rank \d -> rank \d at 10\.77\.0\.\d:\d+: .+", line), table
        pairs = {line.partition(" at ")[0] for line in table}
        if rank < 2:
            assert {"rank 0 -> rank 2", "rank 1 -> rank 2"} <= pairs, table
            assert any("No route to host" in line for line in table), table
            assert any("Permission denied" in line for line in table), table
        else:
            assert "rank 2 -> rank 0" in pairs, table


def test_store_that_cannot_be_reached_is_told_with_every_address(network):
    script = "from unisono import TCPStore; import sys; TCPStore(sys.argv[1], 29501, timeout=1)"
    host = network.hosts[1]
    process = subprocess.run(
        host.inside(sys.executable, "-c", script, "first"),
        capture_output=True,
        text=True,
        timeout=30,
    )
    lines = [line.strip() for line in process.stderr.splitlines()]
    assert any("StoreConnectionError: cannot connect from host2" in line for line in lines), lines
    table = lines[lines.index("failed connections:") + 1 :]
    for address in ("10.77.0.1:29501", "[fd77::1]:29501"):
        assert f"host2 -> {address}: connection refused" in table


CUT = """
dist.init_process_group(timeout=60)
dist.barrier()
print("ready", flush=True)
sys.stdin.readline()
x = np.ones(100_000)
tell(attempt(dist.all_reduce, x, timeout=TIMEOUT))
sys.stdin.readline()
os._exit(0)
"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("how", ["at the switch", "at the host", "one way", "stopped"])
def test_cut_link_is_a_time_out_that_names_who_is_behind_it(how):
    script = CUT.replace("TIMEOUT", repr(TIMEOUT_S))
    with netns.Network(3) as network:
        hosts = network.hosts
        with on(hosts, script, MASTER_ADDR=hosts[0].v4) as processes:
            for process in processes:
                assert process.stdout.readline() == "ready\n", process.stderr.read()
            if how == "at the switch":
                network.cut(hosts[2])
            elif how == "at the host":
                hosts[2].ip("link set eth0 down")
            elif how == "one way":
                # What host 3 sends goes to an address that no interface has.
                for host in hosts[:2]:
                    nowhere = f"{host.v4} lladdr 02:00:00:00:00:01 dev eth0 nud permanent"
                    hosts[2].ip(f"neigh replace {nowhere}")
            else:
                processes.pop().send_signal(signal.SIGSTOP)
            tell(processes, "go")
            told = ask(processes)
    for rank, caught in enumerate(told):
        assert caught["kind"] == "CollectiveTimeoutError", (rank, caught)
        blamed = [2] if rank < 2 else [0, 1]
        if how == "one way" and rank == 2:
            # The failure of another rank reaches it, but its own packets are lost.
            assert caught["peers"] in ([2], [0, 1]), caught
        else:
            assert caught["peers"] == blamed, (rank, caught)
        silence = r"does not answer: its host \S+ has acknowledged nothing for \d+\.\d s, so the"
        if how == "stopped":
            silence = r"does not answer, but its host \S+ does: the process is stopped or busy"
        for peer in caught["peers"] if rank < 2 else ():
            named = silence.replace(r"\S+", re.escape(hosts[peer].v4), 1)
            assert re.search(rf"rank {peer} {named}", caught["text"]), caught["text"]
        assert caught["ended_s"] - caught["began_s"] < TIMEOUT_S + BUSY_S


def tell(processes, line):
    for process in processes:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()


def ask(processes):
    """Return what each says; none leaves before all have."""
    told = [json.loads(process.stdout.readline()) for process in processes]
    tell(processes, "leave")
    for process in processes:
        process.wait(60.0)
    return told


@pytest.mark.sweep(2)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("delay_s", "loss"), [(0.005, 0.0), (0.002, 0.02)])
def test_numbers_are_right_over_a_bad_wire(network, delay_s, loss, channels):
    first, second = network.hosts[:2]
    with netns.bad_wire(first, second, delay_s=delay_s, loss=loss, seed=1):
        compute([first, second], MASTER_ADDR="10.78.0.1", UNISONO_CHANNELS=str(channels))
