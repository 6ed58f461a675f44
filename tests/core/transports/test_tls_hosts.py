"""Jobs on two hosts, with a stranger who reads every packet between them."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from tests.faults.scripts import outcome, started
from tests.support import netns
from unisono.core.base.net.tls import why_no_tls
from unisono.core.engines import is_native_built

pytestmark = [
    pytest.mark.whole("a job of 4 ranks on 2 hosts, three times"),
    pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not())),
    pytest.mark.skipif(bool(why_no_tls()), reason=str(why_no_tls())),
]

LIMIT_S = 60
NATIVE = "native" if is_native_built() else "reference"

# Prints what it has seen of these words when its input ends.
READER = """
import select, socket, sys
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as sock:
    sock.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
    sock.bind(("eth0", 0))
    print("ready", flush=True)
    words, seen, nbytes = [w.encode() for w in sys.argv[1:]], set(), 0
    while True:
        ready, _, _ = select.select([sock, sys.stdin], [], [])
        if sock in ready:
            data = sock.recv(1 << 17)
            nbytes += len(data)
            seen |= {w.decode() for w in words if w in data}
        elif sys.stdin in ready:
            break
print(nbytes, *sorted(seen), sep=",", flush=True)
"""

# Every way of bytes between hosts: store, links, wires, objects, files of a restart.
JOB = """
import numpy as np, unisono as dist
dist.init_process_group(timeout=40)
rank, size = dist.get_rank(), dist.get_world_size()
dist.distributed_c10d._get_default_store().set(f"KEYWORD{rank}", "VALUEWORD")
word = np.frombuffer(b"ARRAYWORD" * 7282, np.uint8)
for nbytes in (9, 4096, 65538):
    x = word[:nbytes].copy() if rank == 0 else np.zeros(nbytes, np.uint8)
    dist.broadcast(x, 0)
    assert (x == word[:nbytes]).all()
x = np.full(1 << 20, rank + 1.0)
dist.all_reduce(x)
assert (x == size * (size + 1) / 2).all()
found = [None] * size
dist.all_gather_object(found, f"OBJECTWORD{rank}")
assert found == [f"OBJECTWORD{each}" for each in range(size)]
out = np.zeros(3 * size)
dist.all_gather_into_tensor(out, np.full(3, float(rank)))
assert (out == np.repeat(np.arange(size), 3)).all()
ring = np.full(300_000, float(rank))
got = np.zeros(300_000)
work = dist.isend(ring, (rank + 1) % size)
dist.recv(got, (rank - 1) % size)
work.wait()
assert (got == (rank - 1) % size).all()
dist.barrier()
print(repr(dist.distributed_c10d._get_default_group()), flush=True)
dist.destroy_process_group()
"""
WORDS = ("KEYWORD", "VALUEWORD", "ARRAYWORD", "OBJECTWORD", netns.TOKEN)


@contextlib.contextmanager
def reader(host, found):
    """Somebody who reads the packets of a host; what was seen comes into `found`."""
    process = subprocess.Popen(
        host.inside(sys.executable, "-c", READER, *WORDS),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        found += process.communicate(timeout=20)[0].strip().split(",")


# As where nothing could be compiled.
NO_EXTENSION = "import sys; sys.modules['unisono._engine'] = None"


def run_job(network, *, environments, engine=NATIVE, before=""):
    """Run JOB on two ranks of each host; return the exit codes and the output."""
    ranks = []
    for at, (host, more) in enumerate(zip(network.hosts, environments, strict=True)):
        for rank in (2 * at, 2 * at + 1):
            world = {"RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": network.hosts[0].v4}
            world |= {"MASTER_PORT": 29655, "UNISONO_ENGINE": engine} | more
            ranks.append(
                subprocess.Popen(
                    host.inside(sys.executable, "-c", before + JOB),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=os.environ
                    | {"UNISONO_TLS": "auto"}
                    | {name: str(value) for name, value in world.items()},
                )
            )
    try:
        output = "".join(rank.communicate(timeout=LIMIT_S)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return [rank.returncode for rank in ranks], output


@pytest.mark.parametrize("engine", sorted({NATIVE, "reference"}))
def test_a_job_with_a_token_is_not_read(engine):
    with netns.Network(2) as network:
        seen = []
        with reader(network.hosts[1], seen):
            codes, output = run_job(network, environments=[{}, {}], engine=engine)
        assert codes == [0] * 4, output
        assert output.count("between_hosts=TLS-by-token") == 4, output
        assert int(seen[0]) > 1 << 20
        assert seen[1:] == []
        assert netns.TOKEN not in output


def test_without_encryption_everything_is_read():
    # Otherwise the test above would prove nothing.
    with netns.Network(2) as network:
        seen = []
        with reader(network.hosts[1], seen):
            codes, output = run_job(network, environments=[{"UNISONO_TLS": "off"}] * 2)
        assert codes == [0] * 4, output
        assert {"KEYWORD", "VALUEWORD", "ARRAYWORD", "OBJECTWORD"} <= set(seen[1:]), seen
        assert netns.TOKEN not in seen


def certificates(folder, hosts):
    """Make a certificate for each host; return the variables that name its files."""

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    found = []
    for host in hosts:
        openssl("req", *key, "-keyout", f"{host.name}.key", "-out", "request", "-subj", "/CN=rank")
        (folder / "names").write_text(f"subjectAltName=IP:{host.v4},IP:{host.v6}")
        signs = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names"]
        openssl("x509", "-req", "-in", "request", *signs, "-out", f"{host.name}.pem")
        files = {"CERT": f"{host.name}.pem", "PKEY": f"{host.name}.key", "CA_FILE": "ca.pem"}
        named = {f"UNISONO_TLS_{name}": str(folder / file) for name, file in files.items()}
        found.append({"UNISONO_TLS": "cert"} | named)
    return found


@pytest.mark.parametrize("before", ["", NO_EXTENSION], ids=["C++", "Python"])
def test_a_job_with_certificates_is_not_read(before, tmp_path):
    engine = "auto" if before else NATIVE
    with netns.Network(2) as network:
        seen = []
        files = certificates(tmp_path, network.hosts)
        with reader(network.hosts[1], seen):
            codes, output = run_job(network, environments=files, engine=engine, before=before)
        assert codes == [0] * 4, output
        assert output.count("between_hosts=TLS-by-certificate") == 4, output
        assert seen[1:] == []


# As torch's clients, which know neither tokens nor TLS.
SERVES = """
import sys
from unisono import TCPStore
with TCPStore(sys.argv[1], 29658, is_master=True, wait_for_workers=False, token="") as store:
    print("ready", flush=True)
    sys.stdin.readline()
"""
CALLS = """
import sys
from unisono import TCPStore
from unisono.errors import HandshakeError
try:
    TCPStore(sys.argv[1], 29658, timeout=20, token="").set("k", "v")
except HandshakeError as error:
    print(error.what)
else:
    print("admitted")
"""


@pytest.mark.parametrize("before", ["", NO_EXTENSION], ids=["C++", "Python"])
@pytest.mark.parametrize("mode", ["cert", "auto"])
def test_a_client_of_torch_on_another_host(before, mode, tmp_path):
    with netns.Network(2) as network:
        first, second = network.hosts
        files = certificates(tmp_path, network.hosts)[0] if mode == "cert" else {}
        settings = os.environ | files | {"UNISONO_TLS": mode, "UNISONO_INSECURE": "1"}
        with subprocess.Popen(
            first.inside(sys.executable, "-c", f"{before}\n{SERVES}", first.v4),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=settings,
        ) as server:
            try:
                assert server.stdout.readline() == "ready\n"
                call = second.inside(sys.executable, "-c", CALLS, first.v4)
                plain = os.environ | {"UNISONO_TLS": "off"}
                found = subprocess.run(call, capture_output=True, text=True, env=plain, timeout=60)
            finally:
                server.communicate("\n", timeout=20)
    assert found.returncode == 0, found.stderr
    if mode == "auto":
        assert found.stdout == "admitted\n"
    else:
        assert "it encrypts its connections, and this client does not" in found.stdout


def test_a_job_without_the_extension_is_not_read_or_says_so():
    with netns.Network(2) as network:
        seen = []
        with reader(network.hosts[1], seen):
            codes, output = run_job(
                network, environments=[{}, {}], engine="auto", before=NO_EXTENSION
            )
        assert codes == [0] * 4, output
        # A rank warns when it calls another host. Rank 0 calls none: it has the store.
        warnings = output.count("connections to other hosts are not encrypted: the C++ engine")
        if sys.version_info >= (3, 13):
            assert output.count("between_hosts=TLS-by-token") == 4, output
            assert (warnings, seen[1:]) == (0, []), output
        else:
            assert "between_hosts" not in output
            assert 2 <= warnings <= 4, output
            assert "ARRAYWORD" in seen


# Rank 1 is killed, the others go on, and a newcomer takes its place.
MEMBERS = """
from unisono import errors
joined = os.environ.get("UNISONO_JOIN") == "1"
dist.init_process_group(timeout=40)
def check(size):
    assert dist.get_world_size() == size
    x = np.frombuffer(b"ARRAYWORD" * 7282, np.uint8).copy()
    if dist.get_rank():
        x[:] = 0
    dist.broadcast(x, 0)
    assert bytes(x) == b"ARRAYWORD" * 7282
    y = np.full(1 << 16, 1.0)
    dist.all_reduce(y)
    assert (y == size).all()
if not joined:
    check(3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(np.zeros(1))
    except errors.PeerLostError:
        pass
    dist.reconfigure(min_size=2)
    check(2)
    if rank == 0:
        print("ready", flush=True)
    dist.reconfigure(min_size=3, max_size=3)
check(3)
state = {"word": np.frombuffer(b"VALUEWORD" * 100, np.uint8).copy()}
if joined:
    state["word"][:] = 0
dist.sync_state(state)
assert bytes(state["word"]) == b"VALUEWORD" * 100
print(json.dumps(repr(dist.group.WORLD)), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_change_of_members_is_not_read():
    with netns.Network(2) as network:
        first, second = network.hosts
        place = {"MASTER_ADDR": first.v4, "MASTER_PORT": "29656", "UNISONO_TLS": "auto"}
        place |= {"TORCHELASTIC_USE_AGENT_STORE": "", "UNISONO_ENGINE": NATIVE}
        seen = []
        with (
            reader(second, seen),
            started([h.inside() for h in (first, second, second)], MEMBERS, place) as ranks,
        ):
            assert ranks[0].stdout.readline() == "ready\n", ranks[0].stderr.read()
            joins = place | {"UNISONO_JOIN": "1"}
            with started([second.inside()], MEMBERS, joins) as [newcomer]:
                found = [outcome(each) for each in (*ranks, newcomer)]
        assert [code for _, code, _ in found] == [0, -signal.SIGKILL, 0, 0], "".join(
            e for *_, e in found
        )
        told = [text for text, _, _ in found if text]
        assert all("size=3" in text and "between_hosts=TLS-by-token>" in text for text in told), (
            told
        )
        assert int(seen[0]) > 1 << 20
        assert seen[1:] == []


ELASTIC = """
import os, sys
import numpy as np, unisono as dist
dist.init_process_group(timeout=40)
rank, again = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
x = np.frombuffer(b"ARRAYWORD" * 7282, np.uint8).copy() if rank == 0 else np.zeros(65538, np.uint8)
dist.broadcast(x, 0)
assert bytes(x) == b"ARRAYWORD" * 7282
dist.distributed_c10d._get_default_store().set(f"KEYWORD{rank}", "VALUEWORD")
dist.barrier()
if rank == 3 and not again:
    os._exit(3)
dist.all_reduce(np.zeros(1))
print("again", again, repr(dist.group.WORLD), flush=True)
dist.destroy_process_group()
"""


def test_a_launch_that_restarts_is_not_read(tmp_path):
    (tmp_path / "job.py").write_text(ELASTIC)
    with netns.Network(2) as network:
        seen = []
        words = ["-m", "unisono", "run", "--nnodes=2", "--nproc-per-node=2", "--max-restarts=1"]
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={network.hosts[0].v4}:29657"]
        with reader(network.hosts[1], seen), contextlib.ExitStack() as stack:
            agents = [
                subprocess.Popen(
                    host.inside(sys.executable, *words, str(tmp_path / "job.py")),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=os.environ | {"UNISONO_TLS": "auto"},
                )
                for host in network.hosts
            ]
            for agent in agents:
                stack.callback(agent.communicate)
                stack.callback(agent.kill)
            output = "".join(agent.communicate(timeout=2 * LIMIT_S)[0] for agent in agents)
            assert [agent.returncode for agent in agents] == [0, 0], output
        assert output.count("again 1") == output.count("between_hosts=TLS-by-token>") == 4, output
        assert int(seen[0]) > 1 << 16
        assert seen[1:] == []
        assert netns.TOKEN not in output
