"""Encrypted sockets, with somebody between the two ends."""

import contextlib
import errno
import os
import socket
import ssl
import struct
import subprocess
import threading
from pathlib import Path

import pytest

from unisono.core.base import log
from unisono.core.base.net import python_tls, python_tls_context, tls
from unisono.core.base.net.tls import SecuredSocket, TlsPolicy, TlsRule, rule_for, secret_of
from unisono.core.base.seam import cpp, is_native_built
from unisono.errors import InvalidArgumentError, UnsupportedError


@pytest.fixture(autouse=True, params=["C++", "Python"])
def maker(request, monkeypatch):
    """What makes sessions."""
    use(monkeypatch, request.param)
    if "authority" in request.fixturenames:
        monkeypatch.setenv("UNISONO_TLS", "cert")
    if why := tls.why_no_tls():
        pytest.skip(why)
    monkeypatch.delenv("UNISONO_TLS", raising=False)
    yield request.param
    tls._context.cache_clear()


def use(monkeypatch, maker):
    if maker == "C++" and not is_native_built():
        pytest.skip("the C++ engine is not built")
    monkeypatch.setattr(tls, "tls_maker", lambda: cpp if maker == "C++" else python_tls)
    tls._context.cache_clear()


SECRET = secret_of(b"token", "rank", b"end")
HEAD_BYTES = 5


class Tap:
    """Two ends and the wire between them, of which the test passes on what it likes."""

    def __init__(self, client=SECRET, server=SECRET):
        ours, self.near = socket.socketpair()
        self.far, theirs = socket.socketpair()
        for sock in (ours, theirs, self.near, self.far):
            sock.setblocking(False)
        self.client = SecuredSocket(ours, [client])
        self.server = SecuredSocket(theirs, [server], is_server=True)
        self.seen = b""

    def close(self):
        for sock in (self.client, self.server, self.near, self.far):
            sock.close()

    def taken(self, sock):
        """The bytes that an end has sent."""
        try:
            data = sock.recv(1 << 20)
        except BlockingIOError:
            return b""
        self.seen += data
        return data

    def pass_on(self):
        self.far.sendall(self.taken(self.near))
        self.near.sendall(self.taken(self.far))

    def shake(self):
        for _ in range(4):
            for end in (self.client, self.server):
                with contextlib.suppress(BlockingIOError):
                    end.send(b"")
                self.pass_on()
        assert self.client.tls.is_ready
        assert self.server.tls.is_ready

    def records(self, *texts):
        """Send texts from the client, a record each; return the records."""
        found = []
        for text in texts:
            assert self.client.send(text) == len(text)
            found.append(self.taken(self.near))
            assert len(found[-1]) > len(text) + HEAD_BYTES
        return found


@pytest.fixture
def tap():
    tap = Tap()
    tap.shake()
    yield tap
    tap.close()


def refused(tap):
    """What the server raises instead of wrong data."""
    with pytest.raises(OSError, match="changed, lost, repeated or reordered") as caught:
        tap.server.recv(100)
    assert caught.value.errno == errno.EBADMSG
    # For good.
    with pytest.raises(OSError, match="changed, lost, repeated or reordered"):
        tap.server.recv(100)


def test_bytes_arrive_and_are_not_seen(tap):
    text = b"the bytes of an array" * 5000
    sent, got = 0, b""
    while len(got) < len(text):
        with contextlib.suppress(BlockingIOError):
            sent += tap.client.send(text[sent:])
        tap.pass_on()
        with contextlib.suppress(BlockingIOError):
            got += tap.server.recv(30_000)
    assert got == text
    assert b"the bytes" not in tap.seen
    assert b"token" not in tap.seen


def test_a_short_read_leaves_the_rest_for_the_next(tap):
    (record,) = tap.records(b"0123456789")
    tap.far.sendall(record)
    assert tap.server.recv(4) == b"0123"
    # No selector reports these.
    assert tls.has_unread(tap.server)
    assert tap.server.recv(100) == b"456789"
    assert not tls.has_unread(tap.server)


@pytest.mark.parametrize("at", [0, 3, HEAD_BYTES, HEAD_BYTES + 4, -1])
def test_a_changed_record_ends_the_connection(tap, at):
    (record,) = tap.records(b"0123456789")
    changed = bytearray(record)
    changed[at] ^= 1
    if at == 3:  # the length: what is missing comes
        changed += bytes(300)
    tap.far.sendall(changed)
    refused(tap)


def test_a_repeated_record_ends_the_connection(tap):
    (record,) = tap.records(b"once")
    tap.far.sendall(record)
    assert tap.server.recv(100) == b"once"
    tap.far.sendall(record)
    refused(tap)


def test_reordered_records_end_the_connection(tap):
    first, second = tap.records(b"first", b"second")
    tap.far.sendall(second + first)
    refused(tap)


def test_a_lost_record_ends_the_connection(tap):
    _, second = tap.records(b"first", b"second")
    tap.far.sendall(second)
    refused(tap)


def test_a_record_of_another_connection_ends_the_connection(tap):
    other = Tap()
    other.shake()
    (record,) = other.records(b"of another")
    tap.far.sendall(record)
    refused(tap)
    other.close()


def test_a_record_sent_back_ends_the_connection(tap):
    (record,) = tap.records(b"there")
    tap.near.sendall(record)
    with pytest.raises(OSError, match="changed, lost, repeated or reordered"):
        tap.client.recv(100)


@pytest.mark.parametrize("nbytes", [1, HEAD_BYTES, HEAD_BYTES + 1, -HEAD_BYTES, -1])
def test_a_cut_record_gives_no_data(tap, nbytes):
    (record,) = tap.records(b"0123456789")
    tap.far.sendall(record[:nbytes])
    with pytest.raises(BlockingIOError):
        tap.server.recv(100)
    tap.far.close()
    with pytest.raises(OSError, match="the connection was cut inside a TLS record") as caught:
        tap.server.recv(100)
    assert caught.value.errno == errno.EBADMSG


def test_an_end_between_records_is_an_end(tap):
    (record,) = tap.records(b"0123456789")
    tap.far.sendall(record)
    tap.far.close()
    assert tap.server.recv(100) == b"0123456789"
    assert tap.server.recv(100) == b""


def test_a_changed_record_behind_a_good_one_is_reported(tap):
    good, other = tap.records(b"good", b"other")
    tap.far.sendall(good + other[:-1] + bytes([other[-1] ^ 1]))
    assert tap.server.recv(100) == b"good"
    # No selector reports it.
    assert tls.has_unread(tap.server)
    refused(tap)


def test_an_error_of_the_system_is_no_changed_record():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for sock in (ours, theirs):
        sock.settimeout(20)
    with SecuredSocket(ours, [SECRET]) as client:
        server = SecuredSocket(theirs, [SECRET], is_server=True)
        thread = threading.Thread(target=client.sendall, args=(b"hi",))
        thread.start()
        assert server.recv(2) == b"hi"
        thread.join()
        server.sendall(b"ok")
        assert client.recv(2) == b"ok"
        assert (server.tls.secret_name, client.tls.secret_name) == ("rank", "")
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.close()
        with pytest.raises(ConnectionResetError, match="reset"):
            client.recv(10)


def test_calls_that_would_pass_by_tls_are_refused(tap):
    calls = (
        lambda: tap.client.sendto(b"plain", ("127.0.0.1", 1)),
        lambda: tap.client.send(b"plain", socket.MSG_OOB),
        lambda: tap.client.sendmsg([b"plain"], [], socket.MSG_OOB),
        lambda: tap.client.recv(1, socket.MSG_PEEK),
        lambda: tap.client.recvmsg(1),
        lambda: tap.client.sendfile(None),
    )
    for call in calls:
        with pytest.raises(OSError, match="not supported"):
            call()
    assert tap.taken(tap.near) == b""


def test_a_closed_socket_touches_no_other_connection(tap):
    tap.client.close()
    for call in (lambda: tap.client.recv(1), lambda: tap.client.send(b"x")):
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            call()
        assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param([b"\x16\x03\x01\x00\x04\x01\x01\xff\x00"], id="at once"),
        pytest.param([b"\x16\x03\x01\x00\x04\x01", b"\x00", b"\x10", b"\x00"], id="in parts"),
        pytest.param([b"\x16\x03\x01\x00\x01\x01"], id="in two records"),
    ],
)
def test_a_stranger_announces_a_large_message(sent):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs, SecuredSocket(ours, [SECRET], is_server=True) as server:
        for part in sent[:-1]:
            theirs.sendall(part)
            with pytest.raises(BlockingIOError):
                server.recv(1)
        theirs.sendall(sent[-1])
        with pytest.raises(OSError, match="the TLS handshake failed: Message too long"):
            server.recv(1)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(secret_of(b"another token", "rank", b"end"), id="token"),
        pytest.param(secret_of(b"token", "store", b"end"), id="purpose"),
        pytest.param(secret_of(b"token", "rank", b"another end"), id="end"),
    ],
)
def test_another_key_is_refused_by_both_ends(other):
    tap = Tap(client=other)
    errors = []
    for _ in range(4):
        for end in (tap.client, tap.server):
            try:
                end.recv(1)
            except BlockingIOError:
                pass
            except OSError as error:
                errors.append(error)
            tap.pass_on()
    assert errors
    assert {each.errno for each in errors} == {errno.EPROTO}
    assert {each.strerror for each in errors} == {"the other end has another token, or none"}
    assert tap.client.tls.is_other_secret
    assert tap.server.tls.is_other_secret
    tap.close()


@pytest.fixture
def certificate(tmp_path):
    words = "req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2"
    openssl(tmp_path, *words.split(), "-subj", "/CN=x")
    return tmp_path


def openssl(folder, *words):
    subprocess.run(["openssl", *words], cwd=folder, check=True, timeout=60, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A folder with certificates of two authorities, `ca` and `foreign`, all with one key."""
    folder = tmp_path_factory.mktemp("authority")
    curve = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    request = ["req", *curve.split(), "-keyout", "key.pem", "-out", "request.pem"]
    for name in ("ca", "foreign"):
        made = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"]
        openssl(folder, "req", "-x509", *curve.split(), *made, "-days", "2")
    openssl(folder, *request, "-subj", "/CN=rank")
    for name, signer, subject, days in (
        ("good", "ca", "DNS:host1,IP:10.0.0.1", 2),
        ("other_name", "ca", "DNS:host2", 2),
        ("expired", "ca", "DNS:host1", -1),
        ("foreign_good", "foreign", "DNS:host1", 2),
    ):
        (folder / "names").write_text(f"subjectAltName={subject}")
        signs = ["-CA", f"{signer}.pem", "-CAkey", f"{signer}.key", "-extfile", "names"]
        made = ["-req", "-in", "request.pem", "-out", f"{name}.pem", "-days", str(days)]
        openssl(folder, "x509", *made, *signs, "-set_serial", "1")
    return folder


def shake_by_certificates(monkeypatch, authority, client, server, name="host1"):
    """Let two ends shake hands; return what the client and the server have raised, or ""."""

    def end(sock, files, **options):
        monkeypatch.setenv("UNISONO_TLS", "cert")
        for variable, file in zip(("CERT", "PKEY", "CA_FILE"), files, strict=True):
            monkeypatch.setenv(f"UNISONO_TLS_{variable}", str(authority / f"{file}.pem"))
        sock.setblocking(False)
        return SecuredSocket(sock, [], **options)

    ours, theirs = socket.socketpair()
    errors = ["", ""]
    with end(ours, client, name=name) as first, end(theirs, server, is_server=True) as second:
        for _ in range(4):
            for at, sock in enumerate((first, second)):
                try:
                    sock.send(b"")
                    sock.recv(1)
                except BlockingIOError:
                    pass
                except OSError as error:
                    errors[at] = errors[at] or str(error.strerror)
    return errors


GOOD = ("good", "key", "ca")


@pytest.mark.parametrize("name", ["host1", "10.0.0.1"])
def test_certificates_of_both_ends(monkeypatch, authority, name):
    assert shake_by_certificates(monkeypatch, authority, GOOD, GOOD, name) == ["", ""]


@pytest.mark.parametrize(
    ("client", "server", "refuser", "reason"),
    [
        (GOOD, ("expired", "key", "ca"), 0, "certificate has expired"),
        (("expired", "key", "ca"), GOOD, 1, "certificate has expired"),
        (GOOD, ("other_name", "key", "ca"), 0, "hostname mismatch"),
        (GOOD, ("foreign_good", "key", "ca"), 0, "unable to get local issuer certificate"),
        (("foreign_good", "key", "ca"), GOOD, 1, "unable to get local issuer certificate"),
    ],
)
def test_refused_certificates(monkeypatch, authority, client, server, refuser, reason):
    errors = shake_by_certificates(monkeypatch, authority, client, server)
    assert errors[refuser].lower().startswith(f"its certificate is refused: {reason}")
    # A server learns of its client's refusal, and a client of its server's.
    assert "alert" in errors[1 - refuser]


def test_a_client_without_a_certificate_is_refused(monkeypatch, authority):
    for variable, file in zip(("CERT", "PKEY", "CA_FILE"), GOOD, strict=True):
        monkeypatch.setenv(f"UNISONO_TLS_{variable}", str(authority / f"{file}.pem"))
    monkeypatch.setenv("UNISONO_TLS", "cert")
    context = ssl.create_default_context(cafile=str(authority / "ca.pem"))
    context.verify_flags = ssl.VerifyFlags.VERIFY_DEFAULT  # from 3.13 on a CA must say more
    ours, theirs = socket.socketpair()

    def call():
        theirs_tls = context.wrap_socket(theirs, server_hostname="host1")
        with theirs_tls, pytest.raises(OSError, match="certificate required"):
            theirs_tls.recv(1)

    thread = threading.Thread(target=call)
    thread.start()
    ours.settimeout(20)
    server = SecuredSocket(ours, [], is_server=True)
    with server, pytest.raises(OSError, match="peer did not return a certificate"):
        server.recv(1)
    thread.join()


def test_a_server_with_a_certificate_only_is_refused(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    ours, theirs = socket.socketpair()
    ours.settimeout(20)

    def serve():
        with theirs, pytest.raises(ssl.SSLError):
            context.wrap_socket(theirs, server_side=True)

    thread = threading.Thread(target=serve)
    thread.start()
    with SecuredSocket(ours, [SECRET]) as client, pytest.raises(OSError, match="certificate"):
        client.sendall(b"secret")
    thread.join()


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (ssl.TLSVersion.TLSv1_2, "the other end has no TLS 1.3"),
        (ssl.TLSVersion.TLSv1_3, "the other end has another token, or none"),
    ],
)
def test_a_client_without_the_key_is_refused(version, reason):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = version
    ours, theirs = socket.socketpair()

    def call():
        with theirs, pytest.raises(ssl.SSLError):
            context.wrap_socket(theirs)

    thread = threading.Thread(target=call)
    thread.start()
    ours.settimeout(20)
    server = SecuredSocket(ours, [SECRET], is_server=True)
    with server, pytest.raises(OSError, match=reason):
        server.recv(1)
    thread.join()


def test_a_plain_end_is_named():
    ours, theirs = socket.socketpair()
    with theirs, SecuredSocket(ours, [SECRET]) as client:
        theirs.sendall(b"hello, I do not encrypt")
        with pytest.raises(OSError, match="the other end does not encrypt"):
            client.recv(1)
        assert client.tls.first_byte == ord("h")


def test_a_blocking_socket_waits_and_has_a_time_out():
    ours, theirs = socket.socketpair()
    ours.settimeout(0.05)
    theirs.settimeout(20)
    with SecuredSocket(ours, [SECRET]) as client:
        with pytest.raises(TimeoutError):
            client.sendall(b"nobody answers")
        client.settimeout(20)
        server = SecuredSocket(theirs, [SECRET], is_server=True)
        data = bytes(range(256)) * 20_000
        thread = threading.Thread(target=client.sendall, args=(data,))
        thread.start()
        got = bytearray(len(data))
        view = memoryview(got)
        while view:
            view = view[server.recv_into(view) :]
        thread.join()
        assert got == data
        server.close()


def test_a_key_file_with_a_password_asks_nobody(certificate, monkeypatch):
    words = "rsa -aes256 -passout pass:x -in key.pem -out locked.pem"
    openssl(certificate, *words.split())
    monkeypatch.setenv("UNISONO_TLS", "cert")
    for name, file in (("CERT", "cert"), ("PKEY", "locked"), ("CA_FILE", "cert")):
        monkeypatch.setenv(f"UNISONO_TLS_{name}", str(certificate / f"{file}.pem"))
    with pytest.raises(InvalidArgumentError, match=r"cannot use the file .*locked"):
        rule_for("")


def test_rules(monkeypatch):
    def rule(mode, token):
        monkeypatch.setenv("UNISONO_TLS", mode)
        return rule_for(token)

    assert rule("auto", "") is rule("off", "t") is TlsRule.NONE
    assert rule("auto", "t") is TlsRule.OTHER_HOSTS
    assert rule("on", "t") is TlsRule.ALL
    with pytest.raises(InvalidArgumentError, match="is none of auto, on, off and cert"):
        rule("yes", "t")
    with pytest.raises(InvalidArgumentError, match="and there is no token"):
        rule("on", "")
    with pytest.raises(InvalidArgumentError, match="UNISONO_TLS=cert needs UNISONO_TLS_CERT"):
        rule("cert", "")
    monkeypatch.setenv("UNISONO_TLS_CERT", "/nowhere")
    monkeypatch.setenv("UNISONO_TLS_PKEY", "/nowhere")
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE", "/nowhere")
    with pytest.raises(InvalidArgumentError, match="UNISONO_TLS=cert cannot use the file /nowhere"):
        rule("cert", "")


def test_without_openssl(monkeypatch, caplog):
    monkeypatch.setattr(log, "_logged", set())  # the other engine's test logs the same line
    monkeypatch.setattr(tls, "why_no_tls", lambda: "it is not there")
    monkeypatch.setenv("UNISONO_TLS", "auto")
    policy = TlsPolicy.of(b"t", "rank")
    assert policy.rule is TlsRule.NONE
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert policy.call(ours) is ours
        assert not caplog.text  # within the host
        monkeypatch.setattr(tls, "is_local", lambda sock: False)
        assert policy.call(ours) is policy.call(ours) is ours
        text = "connections to other hosts are not encrypted: it is not there"
        assert caplog.text.count(text) == 1
        caplog.clear()
        monkeypatch.setattr(
            tls, "_warn_of_plain", lambda sock: pytest.fail("nothing would encrypt")
        )
        assert TlsPolicy.of(b"", "rank").call(ours) is ours
        theirs.sendall(b"\x16")
        with pytest.raises(tls.TlsRefusal, match="it encrypts, and this end does not"):
            policy.answer(ours)
    monkeypatch.setenv("UNISONO_TLS", "on")
    with pytest.raises(
        UnsupportedError, match="UNISONO_TLS=on cannot encrypt connections here: it is not there"
    ):
        rule_for("t")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc")
def test_a_connection_of_small_messages_has_a_small_buffer():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with contextlib.ExitStack() as stack:
        before, count = resident(), 300
        for _ in range(count):
            stack.enter_context(contextlib.closing(tap := Tap()))
            tap.shake()
            for _ in range(3):
                (record,) = tap.records(b"small")
                tap.far.sendall(record)
                assert tap.server.recv(100) == b"small"
        assert (resident() - before) / count < 100 << 10  # with large buffers 130 KiB more
        del tap


@pytest.mark.parametrize("makers", [("C++", "Python"), ("Python", "C++")])
def test_the_languages_understand_each_other(maker, makers, monkeypatch):
    if maker == "C++" or not is_native_built():
        pytest.skip("needs both")
    ours, theirs = socket.socketpair()
    ends = []
    for each, sock in zip(makers, (ours, theirs), strict=True):
        use(monkeypatch, each)
        ends.append(SecuredSocket(sock, [SECRET], is_server=sock is theirs))
    data = bytes(range(256)) * 4000
    for source, target in (ends, ends[::-1]):
        thread = threading.Thread(target=source.sendall, args=(data,))
        thread.start()
        got = bytearray()
        while len(got) < len(data):
            got += target.recv(1 << 16)
        thread.join()
        assert got == data
    assert [end.tls.secret_name for end in ends] == ["", "rank"]
    for end in ends:
        end.close()


def test_without_the_extension_keys_need_python_3_13(monkeypatch):
    monkeypatch.setattr(tls, "tls_maker", lambda: python_tls)
    monkeypatch.setattr(python_tls_context, "_HAS_KEYS", False)
    why = "the C\\+\\+ engine is not built, and a Python before 3.13 has certificates only"
    monkeypatch.setenv("UNISONO_TLS", "on")
    with pytest.raises(UnsupportedError, match=f"UNISONO_TLS=on cannot encrypt .* here: {why}"):
        rule_for("t")
    monkeypatch.setenv("UNISONO_TLS", "auto")
    assert rule_for("t") is TlsRule.NONE
    assert tls.protection("t") == "none"


def test_one_end_does_not_decide_alone():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        ours.sendall(b"\x16")
        with pytest.raises(tls.TlsRefusal, match="it encrypts, and this end does not"):
            TlsPolicy(TlsRule.NONE, []).answer(theirs)
        assert TlsPolicy(TlsRule.ALL, []).forbids(theirs)
        assert not TlsPolicy(TlsRule.NONE, []).forbids(theirs)
