"""`unisono top` and `unisono stacks`: jobs that were not prepared, and clients without a right."""

import contextlib
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from unittest import mock

import pytest

from tests.core.transports.test_tls_hosts import certificates
from tests.faults.scripts import ranks_of, started
from tests.support import netns
from unisono.core.base.deadline import Deadline
from unisono.core.base.net.tls import why_no_tls
from unisono.core.base.source.where import stack_of
from unisono.core.platform.network import listeners
from unisono.core.platform.peer_user import user_of_peer
from unisono.core.stores import HashStore, TCPStore
from unisono.core.transports.connect import connect
from unisono.core.transports.tcp import status
from unisono.core.transports.tcp.address import (
    TCPAddress,
    is_loopback,
    local_hosts,
)
from unisono.core.transports.tcp.transport import TCPTransport
from unisono.core.transports.tcp.viewer import (
    NO_KEY,
    VIEWERS,
    key_of,
    key_shown,
    opened,
    question,
    sealed,
)
from unisono.core.transports.tcp.wire import ACCEPT, CLOCK, HELLO, INSPECT, RECORDS, REFUSE, Hello
from unisono.errors import LaunchError, UnisonoError
from unisono.workbench.cli.look import ask, verdict
from unisono.workbench.cli.look import look as command
from unisono.workbench.cli.look.ask import ask_job
from unisono.workbench.cli.look.verdict import JobView, jobs_of, verdict_of
from unisono.workbench.cli.main import main

SCRIPT = """
def load():
    WAIT
dist.init_process_group(timeout=60)
for _ in range(7):
    dist.all_reduce(np.ones(3))
if rank == 1:
    load()
dist.all_reduce(np.ones(3))
"""

LIMIT_S = 60.0
TOKEN = "the token of this job"
TOKENS = ("", "another", TOKEN)


def verdict_when(processes, right, where=None):
    """Return the job when its verdict is right; it is found by a process, or by its store."""
    limit_s = time.monotonic() + LIMIT_S
    while True:
        jobs = jobs_of(ask_job(where or str(processes[0].pid), TOKEN))
        text = verdict_of(jobs[0]) if jobs else []
        if right(text):
            return jobs[0]
        assert time.monotonic() < limit_s, text
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, ended[0].stderr.read()


@pytest.mark.parametrize("name", ["top", "stacks"])
def test_help_fits_a_narrow_terminal(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80


@pytest.mark.linux("finds a job by a process")
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_top_names_the_rank_for_which_the_others_wait(capsys, engine):
    script = SCRIPT.replace("WAIT", "time.sleep(60)")
    with ranks_of(script, 3, UNISONO_ENGINE=engine) as (processes, _):
        named = (
            r"ranks 0 and 2 wait in all_reduce #8 for \d+\.\d s for rank 1, which is in load "
            r"\(<string>:12\)"
        )
        job = verdict_when(processes, lambda text: text and re.match(named, text[0]))
        assert {rank: state["pid"] for rank, state in job.states.items()} == {
            rank: process.pid for rank, process in enumerate(processes)
        }
        pid = str(processes[2].pid)
        assert main(["top", "--once", pid]) == 0
        top = capsys.readouterr().out.splitlines()
        assert re.match(named, top[1])
        assert [line.split()[0] for line in top[3:]] == ["0", "1", "2"]
        assert all(re.search(r"  \d plain  ", line) for line in top[3:]), top
        assert main(["top", "--json", pid]) == 0
        (found,) = json.loads(capsys.readouterr().out)["jobs"]
        assert re.match(named, found["verdict"][0])
        # The addresses have the tokens of the job.
        assert all(not {"addresses", "endpoint"} & state.keys() for state in found["ranks"])
        assert main(["stacks", pid]) == 0
        stacks = capsys.readouterr().out
        assert "\nranks 0,2, thread MainThread:\n" in stacks
        assert "line 12, in load\n" in stacks.partition("\nrank 1, thread MainThread:\n")[2]


@pytest.mark.linux("finds a job by a process")
def test_top_shows_receives_that_wait_for_one_another():
    script = "dist.init_process_group(timeout=60); dist.recv(np.ones(1), (rank + 1) % 3)"
    with ranks_of(script, 3) as (processes, _):
        job = verdict_when(processes, lambda text: len(text) == 3)
        for rank, line in enumerate(verdict_of(job)):
            named = rf"rank {rank} waits in recv #1 for \d+\.\d s for rank {(rank + 1) % 3}, which"
            assert re.match(named, line), line


@pytest.mark.linux("finds a job by a process")
def test_top_shows_a_stopped_rank():
    with ranks_of(SCRIPT.replace("WAIT", "os.kill(os.getpid(), signal.SIGSTOP)"), 3) as (
        processes,
        _,
    ):
        named = f"rank 1 (process {processes[1].pid}) is stopped"
        job = verdict_when(processes, lambda text: text and text[0].endswith(named))
        assert set(job.states) == {0, 2}
        os.kill(processes[1].pid, signal.SIGCONT)


STRAGGLER = """
def compute():
    time.sleep(0.05)
dist.init_process_group(timeout=60)
while True:
    if rank == 1:
        compute()
    dist.all_reduce(np.ones(3))
"""


@pytest.mark.linux("finds a job by a process")
@pytest.mark.sweep(1)
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_top_names_a_slow_rank_and_the_share_of_waiting(engine):
    with ranks_of(STRAGGLER, 3, UNISONO_ENGINE=engine) as (processes, _):
        named = (
            r"rank 1, which is in compute \(<string>:12\), called from <string>:16, slows the job "
            r"down: it has waited (\d+)% of its time, the other ranks (\d+)%"
        )
        job = verdict_when(processes, lambda text: text and re.match(named, text[-1]))
        mine, others = map(int, re.match(named, verdict_of(job)[-1]).groups())
        assert mine + 10 <= others <= 100


@contextlib.contextmanager
def a_job_with_a_token(monkeypatch):
    """Yield the address of the store of a job with a token, whose rank 1 is in load."""
    monkeypatch.setenv("UNISONO_TOKEN", TOKEN)
    script = SCRIPT.replace("WAIT", "time.sleep(60)")
    with ranks_of(script, 3, UNISONO_HOST=_address(), UNISONO_TOKEN=TOKEN) as (processes, store):
        where = f"127.0.0.1:{store.port}"
        verdict_when(processes, lambda text: text and "rank 1, which is in load" in text[0], where)
        monkeypatch.delenv("UNISONO_TOKEN")
        yield where


def _address():
    """Return an address of this host that is not its loopback address."""
    return next(host for host in local_hosts("192.0.2.1") if not is_loopback(host))


def test_top_finds_a_job_by_its_store_and_token(monkeypatch, tmp_path, capsys):
    (tmp_path / "token").write_text(TOKEN + "\n")
    with a_job_with_a_token(monkeypatch) as where:
        # No process of this host is looked at.
        monkeypatch.setattr(ask, "_candidates", None)
        assert main(["top", "--once", where, "--token-file", str(tmp_path / "token")]) == 0
        top = capsys.readouterr().out.splitlines()
        assert "ranks 0 and 2 wait in all_reduce #8" in top[1]
        assert "for rank 1, which is in load (<string>:12)" in top[1]
        assert [line.split()[0] for line in top[3:]] == ["0", "1", "2"]
        assert main(["top", "--once", where, "--token-file", str(tmp_path / "none")]) == 1
        assert "cannot read the token" in capsys.readouterr().err


@pytest.mark.linux("the kernel names the user of a connection")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_other_user_and_wrong_token_learn_nothing_from_the_store(monkeypatch):
    with a_job_with_a_token(monkeypatch) as where:
        found = json.loads(by_other_user(lambda: json.dumps([looked(where, t) for t in TOKENS])))
        assert [answer[0] for answer in found] == ["HandshakeError", "HandshakeError", "0 1 2"]
        with closing(TCPStore("127.0.0.1", int(where.partition(":")[2]), token=TOKEN)) as store:
            key = next(key for key in store.list_keys() if key.endswith(VIEWERS))
            shown = [TCPAddress.unpack(line) for line in store.get(key).decode().splitlines()]
        # Not even what the store has opens a rank: neither the digest nor another token's key.
        # (This user would get an answer without a key.)
        for key in (shown[0].token, key_of("another", shown[0]), NO_KEY):
            assert by_other_user(lambda key=key: answer_to(shown[0], key)) == REFUSE
        key = key_of(TOKEN, shown[0])
        assert by_other_user(lambda: answer_to(shown[0], key)).startswith(ACCEPT)


def looked(where, token):
    try:
        return [" ".join(str(state["rank"]) for state in ask_job(where, token))]
    except UnisonoError as error:
        return [type(error).__name__]


def by_other_user(call):
    """Return the bytes or the text that a call returns to a process of another user."""
    source, out = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setuid(65534)
            answer = call()
            with open(out, "wb") as file:
                file.write(answer if isinstance(answer, bytes) else answer.encode())
        finally:
            os._exit(0)
    os.close(out)
    with open(source, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return data


@pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))
def test_top_on_a_host_without_a_rank():
    script = SCRIPT.replace("WAIT", "time.sleep(60)")
    with netns.Network(4) as network:
        *members, viewer = network.hosts
        variables = {"MASTER_ADDR": members[0].v4, "MASTER_PORT": "29500"}
        variables["TORCHELASTIC_USE_AGENT_STORE"] = ""
        with started([host.inside() for host in members], script, variables) as processes:
            named = "for rank 1, which is in load (<string>:12)"
            limit_s = time.monotonic() + LIMIT_S
            while named not in (text := top_on(viewer, members[0]).stdout):
                assert time.monotonic() < limit_s, text
                assert all(process.poll() is None for process in processes)
            for rank, host in enumerate(members):
                assert re.search(rf"^{rank} +{host.name} +{processes[rank].pid} ", text, re.M), text
            # The connections between hosts, each of which counts on both of its ends.
            links = [
                re.search(r"  (\d) TLS 1\.3 \(token\)  ", row) for row in text.splitlines()[3:]
            ]
            assert all(links), text
            assert sum(int(found[1]) for found in links) in (4, 6), text
            assert "plain" not in text
            for words in (["UNISONO_TOKEN=wrong"], ["-u", "UNISONO_TOKEN"]):
                refused = top_on(viewer, members[0], "env", *words)
                assert (refused.returncode, refused.stdout) == (1, "")
                assert "load" not in refused.stderr


@pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))
@pytest.mark.skipif(bool(why_no_tls()), reason=str(why_no_tls()))
def test_top_with_certificates(tmp_path):
    script = SCRIPT.replace("WAIT", "time.sleep(60)")
    with netns.Network(2) as network:
        first, second = network.hosts
        inside = [
            host.inside("env", *(f"{name}={value}" for name, value in files.items()))
            for host, files in zip(
                network.hosts, certificates(tmp_path, network.hosts), strict=True
            )
        ]
        variables = {"MASTER_ADDR": first.v4, "MASTER_PORT": "29500"}
        variables["TORCHELASTIC_USE_AGENT_STORE"] = ""
        words = [sys.executable, "-m", "unisono", "top", "--once", f"{first.v4}:29500"]
        with started(inside, script, variables) as processes:
            limit_s, text = time.monotonic() + LIMIT_S, ""
            while "for rank 1, which is in load (<string>:12)" not in text:
                assert time.monotonic() < limit_s, text
                assert all(process.poll() is None for process in processes)
                shown = subprocess.run(
                    [*inside[1], *words],
                    check=False,
                    capture_output=True,
                    text=True,
                    timeout=LIMIT_S,
                )
                text = shown.stdout
            assert text.count("TLS 1.3 (certificates)") == 2, text
            assert "plain" not in text
            # Without a certificate nothing is shown.
            refused = top_on(second, first, "env", "UNISONO_TLS=auto")
            assert (refused.returncode, refused.stdout) == (1, "")
            assert "load" not in refused.stderr


def top_on(viewer, host, *prefix):
    command = [*prefix, sys.executable, "-m", "unisono", "top", "--once", f"{host.v4}:29500"]
    return subprocess.run(
        viewer.inside(*command), check=False, capture_output=True, text=True, timeout=LIMIT_S
    )


@contextlib.contextmanager
def transports():
    """Yield the transports of 2 ranks of this process, over TCP."""
    store, made = HashStore(), {}

    def make(rank):
        made[rank] = connect(store, rank, 2, Deadline(LIMIT_S), "tcp")

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        yield made
    finally:
        # Both at the same time, because each waits for the good-bye of the other.
        threads = [threading.Thread(target=made[rank].close) for rank in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def answer_to(address, key, channel=INSPECT):
    hello = question(channel, key)
    with socket.create_connection((address.hosts[0], address.port), LIMIT_S) as sock:
        sock.sendall(hello.pack())
        data = b""
        while chunk := sock.recv(1 << 16):
            data += chunk
    return data if data == REFUSE else ACCEPT + opened(hello, key, data)


@contextlib.contextmanager
def stranger():
    """Listen as a process that took the port of an ended rank; yield the port and what it gets.

    It answers as a rank does, but knows no key.
    """
    got = []

    def serve():
        with contextlib.suppress(OSError):  # shut down
            while True:
                sock, _ = server.accept()
                with sock:
                    got.append(Hello.parse(sock.recv(HELLO.size, socket.MSG_WAITALL)))
                    sock.sendall(sealed(got[-1], NO_KEY, json.dumps(FAKED).encode()))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], got
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


FAKED = {"job": "faked", "rank": 0, "world_size": 1, "pids": {}, "addresses": ["tcp|1|00|::1"]}


def test_stranger_on_the_port_of_an_ended_rank_cannot_answer():
    """Neither with the job's token in its store, nor without a token in a store of its own."""
    with stranger() as (port, got):
        shown = TCPAddress(("127.0.0.1",), port, bytes(16)).without_token()
        for token in (TOKEN, ""):
            with TCPStore("127.0.0.1", 0, is_master=True, token=token) as store:
                store.set(VIEWERS, shown.pack())
                assert ask_job(f"127.0.0.1:{store.port}", token) == []
        (hello,) = got
        # What the viewer has sent is no proof for another rank.
        other = TCPAddress(("127.0.0.1",), port, bytes(range(16))).without_token()
        assert key_shown(hello, [key_of(TOKEN, other), shown.token]) == NO_KEY
        assert key_shown(hello, [key_of(TOKEN, shown)]) == key_of(TOKEN, shown)


@pytest.mark.linux("lists the descriptors of a process")
def test_listener_of_another_user_is_not_asked(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listeners(os.getpid())[port] == "127.0.0.1"
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert port not in listeners(os.getpid())


def test_answer_is_for_one_question():
    key, data = bytes(range(16)), b"{}"
    hello = question(INSPECT, key)
    answer = sealed(hello, key, data)
    assert opened(hello, key, answer) == data
    for other in (question(INSPECT, key), hello._replace(channel=RECORDS)):
        assert opened(other, key, answer) is None
    for changed in (answer + b" ", answer[:-1], REFUSE, b"", ACCEPT + data):
        assert opened(hello, key, changed) is None


@pytest.mark.parametrize("user", [os.geteuid() + 1, -1, None])
def test_stranger_without_the_token_learns_nothing(monkeypatch, user):
    monkeypatch.setattr(status, "user_of_peer", lambda sock: user)
    with transports() as made:
        address = TCPAddress.unpack(made[0].address)
        for key in (NO_KEY, TCPAddress.unpack(made[1].address).token):
            for channel in (INSPECT, RECORDS, CLOCK):
                assert answer_to(address, key, channel) == REFUSE
        answer = answer_to(address, address.token)
    assert answer.startswith(ACCEPT)
    assert json.loads(answer[1:])["rank"] == 0


def test_look_before_the_ranks_have_met_breaks_nothing():
    def find(rank):
        return made[rank].address

    made = {0: TCPTransport(0, 2, find)}
    address = TCPAddress.unpack(made[0].address)
    assert answer_to(address, address.token) == REFUSE
    made[1] = TCPTransport(1, 2, find)
    assert answer_to(address, address.token).startswith(ACCEPT)
    for transport in made.values():
        transport.close()


@pytest.mark.linux("the kernel names the user of a connection")
def test_same_user_of_this_host_gets_an_answer():
    with transports() as made:
        answer = json.loads(answer_to(TCPAddress.unpack(made[1].address), NO_KEY)[1:])
        assert (answer["rank"], answer["host"]) == (1, platform.node())
        assert answer["addresses"] == [made[0].address, made[1].address]
        found = [state["rank"] for state in ask_job(str(os.getpid()))]
        assert found == [0, 1]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_other_user_of_this_host_learns_nothing():
    with transports() as made:
        address = TCPAddress.unpack(made[0].address)
        assert by_other_user(lambda: answer_to(address, NO_KEY)) == REFUSE


@pytest.mark.linux("the kernel names the user of a connection")
def test_user_of_a_connection_is_found():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        accepted, _ = server.accept()
        with accepted:
            assert user_of_peer(accepted) == os.geteuid()


@pytest.mark.parametrize(("any_host", "peer"), [("0.0.0.0", "198.51.100.7"), ("::", "2001:db8::7")])
@pytest.mark.linux("the kernel names the user of a connection")
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_listening_socket_is_not_taken_for_the_peer(any_host, peer):
    # A client on another host may connect from any port, and the job's store listens on a known
    # one. Without an established connection the kernel reports the listening socket.
    here = "127.0.0.1" if "." in peer else "::1"
    with socket.socket(socket.AF_INET6 if ":" in any_host else socket.AF_INET) as store:
        store.bind((any_host, 0))
        store.listen()
        sock = mock.Mock(spec=socket.socket)
        sock.getsockname.return_value = here, 4242
        sock.getpeername.return_value = peer, store.getsockname()[1]
        assert user_of_peer(sock) == -1


def test_deep_stack_is_cut_at_its_outer_end():
    def recurse(depth):
        return recurse(depth - 1) if depth else stack_of(sys._getframe())

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(5000)
    try:
        frames = recurse(3000)
    finally:
        sys.setrecursionlimit(limit)
    line = recurse.__code__.co_firstlineno + 1
    assert frames == [(__file__, line, "recurse", True)] * 1000


def test_live_table_counts_the_time_of_a_call():
    def look(seq, now_s, seen):
        job = JobView("j", 2, {0: state(0, group("a", [0, 1], seq, runs=True))})
        seen = command._note_times([job], seen, now_s)
        return verdict_of(job)[0].partition(" for rank")[0], seen

    first, seen = look(5, 10.0, {})
    second, seen = look(5, 12.5, seen)
    third, seen = look(6, 14.0, seen)
    assert first == "rank 0 waits in barrier #5 for 0.0 s"
    assert second == "rank 0 waits in barrier #5 for 2.5 s"
    assert third == "rank 0 waits in barrier #6 for 0.0 s"
    assert len(seen) == 1


def test_no_rank_answers(capsys):
    assert main(["top", "--once", "999999999"]) == 1
    assert "no rank of '999999999' answers" in capsys.readouterr().err


def test_a_store_without_ranks_says_which_address_is_meant(capsys):
    """As that of the agents' rendezvous."""
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        where = f"127.0.0.1:{store.port}"
        assert main(["top", "--once", where]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert f"no rank of '{where}' answers" in shown
    assert "MASTER_ADDR:MASTER_PORT in their environment and not --rdzv-endpoint" in shown


def test_live_table_needs_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.live", None)
    with pytest.raises(LaunchError, match="a live table needs rich"):
        command._live(None, "", [])


def test_text_of_a_job_cannot_control_the_terminal(monkeypatch, capsys):
    evil = state(0, group("a", [0, 1], 5, runs=True)) | {"place": "in f (\x1b[2J\r\n[red]é.py:1)"}
    evil |= {"pid": 1, "rss_bytes": 1, "world_size": 3}
    evil |= {"job": "\x1b[2J", "host": platform.node(), "pids": {"1": 1}}
    monkeypatch.setattr(verdict, "states_of", lambda pids: dict.fromkeys(pids, "sleeps (\x1b[2J)"))
    evil["stacks"] = [{"thread": "\x07", "calls": True, "frames": [["\x1b]0;x\x07", 1, "f", True]]}]
    monkeypatch.setattr(ask, "ask_job", lambda which, token: [evil])
    assert main(["top", "--once"]) == 0
    assert main(["stacks"]) == 0
    out = capsys.readouterr().out
    assert "in f (?[2J??[red]é.py:1)" in out
    assert all(each.isprintable() or each == "\n" for each in out)


def group(name, ranks, seq, *, runs):
    return {"group": name, "ranks": ranks, "seq": seq, "call": "barrier()", "runs": runs}


def state(rank, *groups):
    place = f"in f (a.py:{rank})"
    shared = {"pids": {}, "host": "h", "stacks": []}
    return {"rank": rank, "place": place, "groups": groups, **shared}


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (
            # Groups in different orders: each rank waits for the other.
            [
                state(0, group("a", [0, 1], 1, runs=True), group("b", [0, 1], 0, runs=False)),
                state(1, group("a", [0, 1], 0, runs=False), group("b", [0, 1], 1, runs=True)),
            ],
            [
                "rank 0 waits in barrier #1 for rank 1, which is in f (a.py:1)",
                "rank 1 waits in barrier #1 for rank 0, which is in f (a.py:0)",
            ],
        ),
        (
            [state(rank, group("a", [0, 1], 5, runs=True)) for rank in range(2)],
            ["ranks 0 and 1 are in barrier #5"],
        ),
        (
            [
                state(0, group("a", [0, 1], 5, runs=True)),
                state(1, group("a", [0, 1], 5, runs=False)),
            ],
            ["rank 0 is in barrier #5"],
        ),
        (
            [state(0, group("a", [0, 1], 5, runs=True))],
            ["rank 0 waits in barrier #5 for rank 1 does not answer"],
        ),
        ([state(0, group("a", [0, 1], 5, runs=False))], ["no rank is in a collective call"]),
    ],
)
def test_verdict(states, expected):
    assert verdict_of(JobView("j", 2, {each["rank"]: each for each in states})) == expected


def test_silent_ranks_are_observed_together(monkeypatch):
    """An observation takes 50 ms, which would be 6 s for 64 ranks of two texts."""
    observed = mock.Mock(side_effect=lambda pids: dict.fromkeys(pids, "is running"))
    monkeypatch.setattr(verdict, "states_of", observed)
    first = state(0, group("a", list(range(64)), 5, runs=True))
    first |= {"job": "j", "world_size": 64, "host": platform.node(), "pid": 100, "rss_bytes": 1}
    first["pids"] = {str(rank): 100 + rank for rank in range(64)}
    [job] = jobs_of([first])
    lines = list(command._text(job))
    assert lines[1].startswith("rank 0 waits in barrier #5 for rank 1 (process 101) is running; ")
    assert lines[-1].endswith("(process 163) is running")
    assert observed.call_count == 1


def test_token_of_another_host_is_not_sent_to_loopback(monkeypatch):
    token = bytes(range(16))
    addresses = [TCPAddress((host, "127.0.0.1"), 7, token).pack() for host in ("10.0.0.1", "::2")]
    asked = []

    def answer(endpoint):
        asked.append(endpoint)
        if endpoint != local:
            return None
        return {"job": "a", "rank": 0, "pids": {"0": os.getpid()}, "addresses": addresses}

    local = ("127.0.0.1", 9, NO_KEY)
    monkeypatch.setattr(ask, "_listening", lambda pids: [local])
    monkeypatch.setattr(ask, "_ask", answer)
    assert [state["rank"] for state in ask_job(str(os.getpid()))] == [0]
    assert asked == [local, ("::2", 7, token)]
