"""`unisono doctor`: findings from tables of facts, and hosts with one fault each."""

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import re
import socket
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.core.transports.test_tls_hosts import certificates
from tests.support import netns
from tests.support.launches import Launch
from unisono.core.base import document
from unisono.core.base.net import tls
from unisono.core.platform.processes import IS_LINUX
from unisono.core.rendezvous.agents import state
from unisono.core.rendezvous.agents.member import Timing
from unisono.core.stores import HashStore, PrefixStore, TCPStore
from unisono.core.stores.tcp.refusals import refused_client
from unisono.core.stores.tcp.token import REFUSED_KEY
from unisono.core.stores.tcp.wire import RequestOp
from unisono.errors import HandshakeError, InvalidArgumentError, RendezvousError
from unisono.launcher.spec import NodeMeeting
from unisono.workbench.cli.doctor import examine, links, picture
from unisono.workbench.cli.doctor.facts import (
    Examination,
    HostFacts,
    HostLink,
    Sharing,
    SystemLimits,
)
from unisono.workbench.cli.doctor.findings import endpoint_fault, findings
from unisono.workbench.cli.doctor.host import protection, why_not_readable
from unisono.workbench.cli.doctor.links import _SIZES, Peer, Probe, Responder
from unisono.workbench.cli.doctor.session import Session
from unisono.workbench.cli.main import main
from unisono.workbench.cli.nodes import add_node_flags

needs_hosts = pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))

# ---- from facts to findings ----------------------------------------------------------------


def host(number, **changes):
    address = f"10.0.0.{number}"
    names = {f"h{other}": (f"10.0.0.{other}",) for other in (1, 2, 3)}
    fields = {
        "name": f"h{number}",
        "addresses": (address,),
        "names": names,
        "versions": {"unisono": "1"},
    }
    return HostFacts(**fields | {"limits": SystemLimits(cores=8)} | changes)


def facts(count=2, changes=None, links=None, **fields):
    """Return facts without a fault, apart from `changes` of hosts and of links by number."""
    changes, links = changes or {}, links or {}
    numbers = range(1, count + 1)
    good = {"rtt_s": 1e-4, "rate_bytes_s": 1e9, "resent": 0.0}
    ways = [(a, b) for a in numbers for b in numbers if a != b]
    return Examination(
        hosts=[host(number, **changes.get(number, {})) for number in numbers],
        links=[
            HostLink(
                source=f"h{a}",
                target=f"h{b}",
                **{"address": f"10.0.0.{b}"} | good | links.get((a, b), {}),
            )
            for a, b in ways
        ],
        **{"expected": count, "endpoint": "h1" if count > 1 else ""} | fields,
    )


BROKEN = {"address": "", "failures": ("10.0.0.2:4000: timed out",), "rtt_s": None}
FAULTS = {
    "absent": (
        facts(2, expected=3, wanted=("h1", "h2", "h3")),
        ("hosts", "error", "2 of 3 hosts came (h1, h2); absent: h3"),
    ),
    "absent, others by alias": (
        facts(2, changes={2: {"names": {"b": ("10.0.0.2",)}}}, expected=3, wanted=("h1", "b", "c")),
        ("hosts", "error", "2 of 3 hosts came (h1, h2); absent: c"),
    ),
    "another host than wanted": (
        facts(2, wanted=("h1", "h3")),
        ("hosts", "warning", "2 of 2 hosts came (h1, h2); none of them has the name h3"),
    ),
    "slow name server about the endpoint": (
        facts(changes={1: {"names": {"e.domain": None}}}, endpoint="e.domain"),
        ("names", "warning", "h1 got no answer about e.domain"),
    ),
    "own name": (
        facts(changes={2: {"names": {"h1": ("10.0.0.1",), "h2": ("127.0.1.1",)}}}),
        ("names", "warning", "h2: the own name leads to 127.0.1.1"),
    ),
    "unknown name": (
        facts(changes={1: {"names": {"h1": ("10.0.0.1",), "h2": ()}}}),
        ("names", "warning", "h1 cannot resolve h2"),
    ),
    "slow name server": (
        facts(changes={1: {"names": {"h1": ("10.0.0.1",), "h2": None}}}),
        ("names", "warning", "h1 got no answer about h2"),
    ),
    "no token": (
        facts(changes={2: {"admits": "local"}}),
        ("token", "error", "UNISONO_TOKEN is not set on h2"),
    ),
    "no encryption": (
        facts(changes={2: {"protection": "none: no libssl"}}),
        ("token", "warning", "h2: connections to other hosts are not encrypted (no libssl)"),
    ),
    "insecure": (
        facts(changes={1: {"admits": "any"}}),
        ("token", "warning", "UNISONO_INSECURE=1 on h1"),
    ),
    "other unisono": (
        facts(3, changes={3: {"versions": {"unisono": "2"}}}),
        ("versions", "error", "unisono: 1 on h1, h2, 2 on h3"),
    ),
    "other torch": (
        facts(changes={n: {"versions": {"torch": v}} for n, v in ((1, "2.13"), (2, ""))}),
        ("versions", "warning", "torch: 2.13 on h1, none on h2"),
    ),
    "unreachable": (
        facts(3, links={(1, 2): BROKEN, (3, 2): BROKEN}),
        ("reach", "error", "h1, h3 cannot connect to h2 (10.0.0.2:4000: timed out)"),
    ),
    "silent address": (
        facts(links={(1, 2): {"failures": ("10.9.0.2:4000: timed out",)}}),
        ("reach", "warning", "h1 reached h2 at 10.0.0.2 only after 10.9.0.2:4000: timed out"),
    ),
    "black hole": (
        facts(links={(2, 1): {"is_stuck": True, "fits_bytes": 1280}}),
        ("packets", "error", "full packets from h2 to h1 disappear, packets of 1280 bytes arrive"),
    ),
    "loss of many": (
        facts(3, links={(1, 3): {"resent": 0.02}, (2, 3): {"resent": 0.07}}),
        ("packets", "warning", "7.0% of the packets from h1, h2 to h3 were sent again"),
    ),
    "stuck": (
        facts(links={(2, 1): {"is_stuck": True}}),
        ("packets", "error", "32 KiB from h2 to h1 did not arrive"),
    ),
    "loss": (
        facts(links={(1, 2): {"resent": 0.031}}),
        ("packets", "warning", "3.1% of the packets from h1 to h2 were sent again"),
    ),
    "connection that stops": (
        facts(links={(1, 2): {"rate_bytes_s": None}}),
        ("speed", "warning", "the connection from h1 to h2 stopped in a measurement"),
    ),
    "no round trips": (
        facts(links={(1, 2): {"rtt_s": None}}),
        ("speed", "warning", "the connection from h1 to h2 stopped in a measurement"),
    ),
    "slow link": (
        facts(3, links={(3, 1): {"rate_bytes_s": 1e8}}),
        ("speed", "warning", "100 MB/s from h3 to h1; the median of all pairs is 1000 MB/s"),
    ),
    "clock": (
        facts(links={(1, 2): {"ahead_s": -7.0}}),
        ("clocks", "warning", "the clock of h2 is 7.0 s behind that of h1"),
    ),
    "few cores": (
        facts(1, changes={1: {"nprocs": 9}}),
        ("cores", "warning", "h1: 9 ranks share 8 cores"),
    ),
    "quota": (
        facts(1, changes={1: {"nprocs": 4, "limits": SystemLimits(cores=8, cpu_quota=1.5)}}),
        ("cores", "warning", "h1: the cgroup has the time of 1.5 cores for 4 ranks"),
    ),
    "little memory": (
        facts(1, changes={1: {"limits": SystemLimits(memory_bytes=5 << 20)}}),
        ("memory", "warning", "h1: 5 MiB of memory are left for 1 ranks"),
    ),
    "no descriptors": (
        facts(1, changes={1: {"limits": SystemLimits(descriptors=20)}}),
        ("descriptors", "error", "h1: a rank needs 25 file descriptors and may have 20"),
    ),
    "few descriptors": (
        facts(
            changes={
                n: {"nprocs": 8, "limits": SystemLimits(cores=8, descriptors=40)} for n in (1, 2)
            }
        ),
        ("descriptors", "warning", "h1, h2: a rank needs up to 56 file descriptors"),
    ),
    "no memfd": (
        facts(1, changes={1: {"nprocs": 2, "sharing": Sharing(shared_memory="no memfd")}}),
        ("sharing", "warning", "h1: ranks cannot share memory: no memfd"),
    ),
    "ptrace scope": (
        facts(1, changes={1: {"nprocs": 2, "sharing": Sharing(remote_read="not permitted")}}),
        ("sharing", "warning", "h1: process_vm_readv fails (not permitted)"),
    ),
    "no huge pages": (
        facts(1, changes={1: {"nprocs": 2, "sharing": Sharing(huge_pages="never")}}),
        ("sharing", "warning", "h1: huge pages are off"),
    ),
    "reference": (
        facts(1, changes={1: {"sharing": Sharing(engine="reference engine (why)")}}),
        ("sharing", "warning", "h1: reference engine (why)"),
    ),
    "broken installation": (
        facts(1, changes={1: {"sharing": Sharing(engine="", shared_memory="ImportError: x")}}),
        ("sharing", "error", "h1: a second process fails: ImportError: x"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_the_only_finding_that_is_not_ok(fault):
    given, (topic, severity, text) = FAULTS[fault]
    found = findings(given)
    [finding] = [finding for finding in found if finding.severity != "ok"]
    assert (finding.topic, finding.severity) == (topic, severity)
    assert finding.fact.startswith(text)
    assert finding.fix
    assert found[0] is finding, "faults come first"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_hosts_without_a_fault(count):
    assert {finding.severity for finding in findings(facts(count))} == {"ok"}


@pytest.mark.parametrize(
    ("reason", "fix"), [("timed out", "let the firewall"), ("connection refused", "read what")]
)
def test_the_fix_of_a_silent_host_and_of_one_that_refuses(reason, fix):
    given = facts(links={(1, 2): BROKEN | {"failures": (f"10.0.0.2:4000: {reason}",)}})
    [finding] = [finding for finding in findings(given) if finding.severity == "error"]
    assert finding.fix.startswith(fix)


def test_memory_that_a_second_process_cannot_read():
    proof = ctypes.create_string_buffer(b"proof", 5)
    own, address = os.getpid(), ctypes.addressof(proof)
    assert why_not_readable(own, address, proof.raw) == ""
    assert why_not_readable(own, 16, proof.raw) == "Bad address"
    assert why_not_readable(own, address, b"other") == "the process number is another's"


def test_a_host_that_does_not_report_its_links_is_an_error():
    given = facts(3)
    given = replace(given, links=[link for link in given.links if link.source != "h2"])
    assert [f.fact for f in findings(given) if f.severity == "error"] == [
        "h2 did not report its connections in time"
    ]


def test_links_that_were_not_measured_are_not_called_fine():
    alone = facts(2, expected=3)
    alone = replace(alone, hosts=alone.hosts[:1], links=())
    broken = facts(links={(1, 2): BROKEN | {"rate_bytes_s": None, "resent": None}})
    for given in (alone, broken, facts(1)):
        fine = [found.topic for found in findings(given) if found.severity == "ok"]
        assert not {"reach", "packets", "speed", "clocks"} & set(fine)


def test_nodes_on_one_machine_need_neither_names_nor_a_token():
    names = {n: {"names": {f"h{n}": ("127.0.0.1",)}, "admits": "local"} for n in (1, 2)}
    given = facts(2, changes=names, endpoint="localhost")
    assert {finding.severity for finding in findings(given)} == {"ok"}
    # A file is their store: they have one name and one address.
    twins = {
        n: {"name": name, "addresses": ("10.0.0.1",), "admits": "local"}
        for n, name in ((1, "h1"), (2, "h1#2"))
    }
    given = replace(facts(2, changes=twins, endpoint=""), links=())
    assert [f.topic for f in findings(given) if f.topic in ("names", "token")] == []


@pytest.mark.parametrize(
    ("endpoint", "addresses", "text"),
    [
        ("h1", ("127.0.1.1",), "h2 resolves h1 to 127.0.1.1, which is h2 itself"),
        ("h1", (), "h2 cannot resolve h1"),
        # A job may start after a slow look-up.
        ("h1", None, ""),
        ("h1", ("10.0.0.1",), ""),
        ("alias", ("127.0.0.1",), "h2 resolves alias to 127.0.0.1, which is h2 itself"),
        # Names of h2, which is to serve the store.
        ("h2.domain", ("127.0.1.1",), ""),
        ("alias", ("10.0.0.2",), ""),
        ("localhost", ("127.0.0.1",), ""),
    ],
)
def test_an_endpoint_that_a_host_cannot_find(endpoint, addresses, text):
    own = ("10.0.0.2", "127.0.0.1")
    fault = endpoint_fault(host(2, names={endpoint: addresses}, addresses=own), endpoint)
    assert (fault.fact if fault else "").startswith(text)
    assert bool(fault) == bool(text)


def test_facts_survive_their_way_through_the_store():
    given = host(1, limits=SystemLimits(cpu_quota=2.5), sharing=Sharing(remote_read="x"))
    again = document.loads(HostFacts, document.dumps(given))
    assert (again.limits, again.sharing) == (given.limits, given.sharing)
    assert findings(Examination(hosts=[again])) == findings(Examination(hosts=[given]))


def test_facts_of_another_version_are_read():
    values = document.plain(host(1, limits=SystemLimits(cores=3)))
    del values["sharing"]["huge_pages"], values["admits"]
    values["limits"]["added"] = values["added"] = 1
    again = document.parse(HostFacts, values)
    assert again.limits == SystemLimits(cores=3)
    assert (again.name, again.admits, again.sharing) == ("h1", "token", Sharing())


def test_names_of_hosts_are_ordered_and_unique():
    names = sorted(["host10", "host2", "host2", "a"], key=examine._natural)
    assert examine._unique(names) == ["a", "host2", "host2#2", "host10"]


# ---- probes --------------------------------------------------------------------------------


@pytest.fixture
def responder():
    opened = Responder(("127.0.0.1",))
    yield opened
    opened.close()


def test_a_probe_measures_and_answers_in_time_of_its_clock(responder):
    probe = Probe("here", Peer("there", *responder.place))
    try:
        probe.open()
        probe.ping()
        probe.send_burst()
        probe.measure_rate(0.05)
    finally:
        probe.close()
    link = probe.link
    assert (link.source, link.target, link.address) == ("here", "there", "127.0.0.1")
    assert list(link.failures) == []
    assert not link.is_stuck
    # Both ends have one clock.
    assert link.rtt_s > 0
    assert abs(link.ahead_s) <= link.rtt_s + 0.01
    assert link.rate_bytes_s > 0
    assert (link.resent is not None) is IS_LINUX


def test_a_responder_answers_only_those_that_have_its_key(responder):
    addresses, port, key = responder.place
    probe = Probe("here", Peer("there", addresses, port, "00" * (len(key) // 2)))
    probe.open()
    assert probe.link.address == ""
    assert "no answer" in probe.link.failures[0]


def test_a_key_is_not_taken_for_tls(monkeypatch):
    monkeypatch.setattr(links.secrets, "token_bytes", lambda nbytes: b"\x16" * nbytes)
    responder = Responder(("127.0.0.1",))
    probe = Probe("here", Peer("there", *responder.place))
    try:
        probe.open()
        assert probe.link.failures == []
    finally:
        probe.close()
        responder.close()


def test_a_responder_ends_calls_without_a_key(monkeypatch):
    monkeypatch.setattr(links, "_CONNECT_S", 0.01)
    responder = Responder(("127.0.0.1",))
    try:
        addresses, port, _ = responder.place
        with socket.create_connection((addresses[0], port), 60) as stranger:
            assert stranger.recv(1) == b""
    finally:
        responder.close()


def test_a_responder_limits_its_callers(monkeypatch):
    monkeypatch.setattr(links, "_MOST_CALLERS", 2)
    responder = Responder(("127.0.0.1",))
    try:
        addresses, port, _ = responder.place
        with contextlib.ExitStack() as stack:
            # The thread that accepts counts, too.
            callers = [
                stack.enter_context(socket.create_connection((addresses[0], port), 60))
                for _ in range(4)
            ]
            assert [caller.recv(1) for caller in callers[2:]] == [b"", b""]
            assert len(responder._connections) == 2
    finally:
        responder.close()


def test_a_probe_names_the_address_that_refuses(responder):
    addresses, port, key = responder.place
    responder.close()
    probe = Probe("here", Peer("there", addresses, port, key))
    probe.open()
    assert probe.link.failures == [f"127.0.0.1:{port}: connection refused"]


# ---- hosts that are threads ----------------------------------------------------------------


@pytest.fixture
def examiners(monkeypatch):
    """Return a function that makes examiners whose hosts have one name, on this machine."""
    monkeypatch.setattr(examine, "_RATES_S", 0.1)

    def make(count, join_timeout_s=60.0):
        plan = examine.ExamPlan(
            nprocs=1,
            limits=state.JobLimits(min_nodes=count, max_nodes=count, max_restarts=0),
            meeting=NodeMeeting(timing=Timing(join_timeout_s=join_timeout_s)),
            show=lambda line: None,
        )
        return [examine.Examiner(plan) for _ in range(count)]

    monkeypatch.setattr(examine, "examine_host", lambda *_: host(1, addresses=("127.0.0.1",)))
    return make


def test_refused_stranger_does_not_end_an_examination_whose_hosts_come(examiners, monkeypatch):
    monkeypatch.delenv("UNISONO_TOKEN", raising=False)
    looks = threading.Semaphore(0)

    def look(store):
        looks.release()
        return refused_client(store)

    monkeypatch.setattr(examine, "refused_client", look)
    first, second = examiners(2)
    with TCPStore("127.0.0.1", 0, is_master=True) as server, ThreadPoolExecutor(2) as pool:
        server._call(RequestOp.COMPARE_SET, REFUSED_KEY, b"", b"10.0.0.9:4242")
        jobs = [pool.submit(first.examine, PrefixStore("x", server), lambda: False)]
        for _ in range(3):
            assert looks.acquire(timeout=20)
        jobs.append(pool.submit(second.examine, PrefixStore("x", server), lambda: False))
        assert [len(job.result(60).hosts) for job in jobs] == [2, 2]
        monkeypatch.setattr("unisono.core.stores.tcp.client._REFUSAL_GRACE_S", 0.05)
        line = r"the store refused 10\.0\.0\.9:4242, which is on another machine"
        with pytest.raises(RendezvousError, match=line):
            examiners(2)[0].examine(PrefixStore("y", server), lambda: False)


def test_three_hosts_probe_each_other_and_a_late_host_is_examined_alone(examiners):
    store = PrefixStore("x", HashStore())
    members, [late, *_] = examiners(3), examiners(3)
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(member.examine, store, lambda: False) for member in members]
        found = [job.result(60) for job in jobs]
    assert found[0] == found[1] == found[2]
    assert [host.name for host in found[0].hosts] == ["h1", "h1#2", "h1#3"]
    assert len({(link.source, link.target) for link in found[0].links}) == 6
    assert all(link.address == "127.0.0.1" for link in found[0].links)
    assert sum(member.is_first for member in members) == 1
    alone = late.examine(store, lambda: False)
    assert (len(alone.hosts), alone.expected, alone.links) == (1, 1, ())


def test_a_wait_for_hosts_ends(examiners, monkeypatch):
    [examiner, _] = examiners(2)
    with pytest.raises(RendezvousError, match="the examination of the hosts was canceled"):
        examiner.examine(PrefixStore("x", HashStore()), lambda: True)
    # This host came second, and the first host never decides.
    store = PrefixStore("y", HashStore())
    store.add("came", 1)
    monkeypatch.setattr(examine, "_STEP_S", 0.0)
    [examiner, _] = examiners(2, join_timeout_s=0.0)
    text = "the host that began the examination has ended"
    with pytest.raises(RendezvousError, match=text) as raised:
        examiner.examine(store, lambda: False)
    assert "another --rdzv-id" in raised.value.hint


FACTS = zlib.compress(document.dumps({"host": host(1), "peer": [["127.0.0.1"], 1, "ab"]}).encode())
OTHER_PEER = zlib.compress(document.dumps({"host": host(1), "peer": [["127.0.0.1"], 1]}).encode())


@pytest.mark.parametrize(
    ("count", "data", "reason"),
    [
        (b"1", b"facts", "Error -3 while decompressing data: incorrect header check"),
        (b"1", FACTS[:-1], "its end is missing"),
        (b"1", zlib.compress(b"[]"), "the document is [], expected _Facts"),
        (b"1", OTHER_PEER, "not enough values to unpack (expected 3, got 2)"),
        (b"x", FACTS, "invalid literal for int() with base 10: b'x'"),
    ],
)
def test_published_facts_that_cannot_be_read_name_their_host(examiners, count, data, reason):
    store = PrefixStore("x", HashStore())
    store.add("came", 1)
    store.set("host/0", count)
    store.set("host/0/0", data)
    examine._publish(store, "members", [0, 1])
    [examiner, _] = examiners(2)
    text = f"what host number 0 stored as 'host/0' cannot be read: {reason}"
    with pytest.raises(RendezvousError, match=re.escape(text)):
        examiner.examine(store, lambda: False)


def session_of_two():
    parser = argparse.ArgumentParser()
    add_node_flags(parser)
    flags = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h2")
    return Session(parser.parse_args(flags), 1, lambda line: None)


def test_a_token_that_the_store_refuses_is_not_called_fine(examiners, monkeypatch):
    def refuse(*_):
        raise HandshakeError("it has another token than this client", hint="set the token")

    monkeypatch.setattr(examine.Examiner, "examine", refuse)
    session = session_of_two()
    session.examine(PrefixStore("x", HashStore()))
    [finding] = [finding for finding in session.found if finding.topic == "token"]
    assert (finding.severity, finding.fix) == ("error", "set the token")
    assert session.exit_code == 1


def test_a_host_that_is_examined_alone_shows_all_its_findings(examiners):
    session = session_of_two()
    store = PrefixStore("x", HashStore())
    # The other hosts have begun.
    store.add("came", 2)
    examine._publish(store, "members", [0, 1])
    session.examine(store)
    assert any(line.startswith("ok:") for line in session.lines())


def test_one_host_has_no_picture(tmp_path):
    with pytest.raises(InvalidArgumentError, match="--plot needs two hosts or more"):
        picture.plot(facts(1), str(tmp_path / "x.png"))


# ---- the command ---------------------------------------------------------------------------


def test_one_host(capfd, tmp_path):
    path = tmp_path / "facts.json"
    code = main(["doctor", "-n", "1", "--json", str(path)])
    document = json.loads(path.read_text())
    shown = capfd.readouterr().out
    # This machine may have a fault; the exit code must agree with the findings.
    errors = [found for found in document["findings"] if found["severity"] == "error"]
    assert code == document["exit_code"] == bool(errors)
    assert [found["fact"] for found in document["findings"] if found["fact"] not in shown] == []
    [facts] = document["hosts"]
    assert facts["versions"]["unisono"]
    assert facts["limits"]["cores"] >= 1
    # The second process has run.
    assert facts["sharing"]["engine"].partition(" ")[0] in ("native", "reference")


def test_wrong_flags(capfd, tmp_path):
    with pytest.raises(SystemExit):
        main(["doctor", "--hosts", "a,,b"])
    assert "must be different names" in capfd.readouterr().err
    assert main(["doctor", "--json", str(tmp_path / "no" / "file")]) == 1
    assert "cannot write" in capfd.readouterr().err
    assert main(["doctor", "--plot", str(tmp_path / "x.png")]) == 1
    shown = capfd.readouterr()
    assert "--plot needs two hosts or more" in shown.err
    assert shown.out == "", "the examination has not begun"


ENDPOINT = ("--nnodes=2", "--rdzv-backend=c10d")
# The second process, which needs 0.5 s, is tried by `test_one_host`.
QUICK = {"unisono.workbench.cli.doctor.host._sharing": Sharing}


def run_on_all(tmp_path, network, *flags, command="doctor", each=lambda host: {}, words=()):
    """Run a command on all hosts of a network; return exit codes and outputs."""
    with contextlib.ExitStack() as stack:
        launches = []
        for member in network.hosts:
            options = {"UNISONO_TOKEN": netns.TOKEN, "patches": QUICK} | each(member)
            launch = Launch(*flags, *words, command=command, cwd=tmp_path, host=member, **options)
            stack.callback(launch.close)
            launches.append(launch)
        ends = [launch.finish() for launch in launches]
    return [code for code, _, _ in ends], [out + err for _, out, err in ends]


def over_wire(network, **faults):
    """Join two hosts by one more wire with faults; return its context and settings."""
    first, second = network.hosts
    wire = netns.bad_wire(first, second, **faults)
    return wire, lambda host: {"UNISONO_HOST": f"10.78.0.{host.index}"}


@needs_hosts
def test_hosts_without_a_fault_have_no_error(tmp_path):
    drawn = ["--plot", "pairs.png"] if importlib.util.find_spec("matplotlib") else []
    with netns.Network(2) as network:
        names = ",".join(host.name for host in network.hosts)
        codes, shown = run_on_all(
            tmp_path, network, "--hosts", names, "--json", "facts.json", *drawn
        )
        assert codes == [0, 0], shown
    assert sum("every host reaches every other host" in text for text in shown) == 1, shown
    document = json.loads((tmp_path / "facts.json").read_text())
    ways = {(link["source"], link["target"]) for link in document["links"]}
    assert ways == {("host1", "host2"), ("host2", "host1")}
    assert all(link["rtt_s"] > 0 and link["rate_bytes_s"] > 0 for link in document["links"])
    # As on Debian, each host has its own name at 127.0.1.1.
    names = [found["fact"] for found in document["findings"] if found["topic"] == "names"]
    text = "host1, host2: the own name leads to 127.0.1.1; unisono copes, Gloo and MPI may not"
    assert names == [text]
    if drawn:
        assert (tmp_path / "pairs.png").read_bytes()[:4] == b"\x89PNG"


def lossy(network):
    wire, each = over_wire(network, loss=0.04)
    return wire, each, "10.78.0.1", 0, "were sent again"


def black_hole(network):
    wire, each = over_wire(network, most_bytes=1300)
    text = "from host1 to host2 disappear, packets of 1280 bytes arrive"
    return wire, each, "10.78.0.1", 1, text


def unreachable(network):
    network.hosts[0].ip("rule add pref 10 to 10.77.0.2 unreachable")

    def each(host):
        return {"UNISONO_HOST": host.v4}

    # The store is found over IPv6.
    text = "host1 cannot connect to host2 (10.77.0.2:"
    return contextlib.nullcontext(), each, f"[{network.hosts[0].v6}]:29400", 1, text


def other_version(network):
    def each(host):
        changed = (
            {"unisono.workbench.cli.doctor.host.__version__": "0.0.9"} if host.index == 2 else {}
        )
        return {"patches": QUICK | changed}

    return contextlib.nullcontext(), each, "host1", 1, "unisono: 0.1.0 on host1, 0.0.9 on host2"


@needs_hosts
@pytest.mark.sweep(2)
@pytest.mark.parametrize("make", [lossy, black_hole, unreachable, other_version])
def test_hosts_with_a_fault_find_it(tmp_path, make):
    with netns.Network(2) as network:
        wire, each, endpoint, code, text = make(network)
        with wire:
            codes, shown = run_on_all(
                tmp_path, network, *ENDPOINT, "--rdzv-endpoint", endpoint, each=each
            )
    assert codes == [code, code], shown
    assert any(text in out for out in shown), shown


@needs_hosts
@pytest.mark.skipif(bool(tls.why_no_tls()), reason=str(tls.why_no_tls()))
def test_hosts_with_certificates(tmp_path):
    with netns.Network(2) as network:
        files = certificates(tmp_path, network.hosts)
        flags = (*ENDPOINT, "--rdzv-endpoint", network.hosts[0].v4)
        codes, shown = run_on_all(
            tmp_path, network, *flags, each=lambda host: {"patches": QUICK, **files[host.index - 1]}
        )
    assert codes == [0, 0], shown
    assert any("TLS 1.3 (certificates)" in text for text in shown), shown


@needs_hosts
def test_a_name_that_leads_a_host_to_itself(tmp_path):
    with netns.Network(2) as network:
        second = network.hosts[1]
        second.run("sh", "-c", "cat > /etc/hosts", text="127.0.1.1 host2 host1\n")
        flags = ("--hosts", "host1,host2", "--rdzv-conf=join_timeout=1")
        codes, shown = run_on_all(tmp_path, network, *flags)
    assert codes == [1, 1], shown
    assert "host2 resolves host1 to 127.0.1.1, which is host2 itself" in shown[1]
    assert "1 of 2 hosts came (host1); absent: host2" in shown[0]


@needs_hosts
def test_a_host_without_the_token(tmp_path):
    def each(host):
        return {"UNISONO_TOKEN": ""} if host.index == 2 else {}

    with netns.Network(2) as network:
        flags = ("--hosts", "host1,host2", "--rdzv-conf=join_timeout=3")
        codes, shown = run_on_all(tmp_path, network, *flags, each=each)
    assert codes == [1, 1], shown
    assert "UNISONO_TOKEN is not set on host2" in shown[1]
    assert "absent: host2" in shown[0]


@needs_hosts
def test_run_starts_workers_only_if_the_doctor_finds_no_error(tmp_path):
    (tmp_path / "up.py").write_text("import os; print('up', os.environ['RANK'])")
    flags = (*ENDPOINT, "--rdzv-endpoint=host1", "--doctor")
    with netns.Network(2) as network:
        codes, shown = run_on_all(tmp_path, network, *flags, command="run", words=["up.py"])
        assert codes == [0, 0], shown
        ups = sorted(line for text in shown for line in text.splitlines() if "up" in line[-5:])
        assert [line[-4:] for line in ups] == ["up 0", "up 1"], shown
        _, each, _, _, text = other_version(network)
        codes, shown = run_on_all(
            tmp_path, network, *flags, command="run", words=["up.py"], each=each
        )
    assert codes == [1, 1], shown
    assert all(text in out and "no worker was started" in out for out in shown), shown
    assert not any("up 0" in out for out in shown)


def test_sizes_of_packets_are_tried_from_small_to_large():
    # The first size that does not arrive costs 1.5 s and ends the trials.
    assert list(_SIZES) == sorted(_SIZES)


def test_protection_of_a_host(monkeypatch):
    def shown(mode, token):
        monkeypatch.setenv("UNISONO_TLS", mode)
        monkeypatch.setenv("UNISONO_TOKEN", token)
        return protection()

    monkeypatch.setattr(tls, "why_no_tls", lambda: "")
    assert (shown("auto", ""), shown("off", "t")) == ("none", "none")
    assert shown("auto", "t") == "TLS 1.3 (token)"
    assert shown("on", "").startswith("none: UNISONO_TLS=on encrypts with keys")
    monkeypatch.setattr(tls, "why_no_tls", lambda: "no libssl")
    assert shown("auto", "t") == "none: no libssl"
