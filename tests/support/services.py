"""Real servers of other projects, on free ports, for as long as a test needs them."""

import contextlib
import functools
import shutil
import socket
import subprocess
import time

import pytest

LIMIT_S = 60.0
NEEDS = {"redis": ("redis-server", "redis"), "etcd": ("etcd", "etcd3gw")}
_TRIES = 5


@functools.cache
def why_not(program, module):
    """Return why a server cannot be used here, or None."""
    if shutil.which(program) is None:
        return f"{program} is not installed; `make servers`"
    try:
        __import__(module)
    except ImportError as error:
        return f"{error} (make setup)"
    return None


def needs(kind):
    """Return the mark that skips a test where a kind of server cannot be used."""
    reason = why_not(*NEEDS[kind])
    return pytest.mark.skipif(reason is not None, reason=str(reason))


def _free_ports(count):
    """Return ports that nobody has now; somebody may be faster, so starting is tried again."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Server:
    """A process that listens on a port of loopback."""

    def __init__(self, words, port, folder):
        self.port = port
        self._process = subprocess.Popen(
            words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    @property
    def pid(self):
        return self._process.pid

    def wait_until_up(self):
        """Return whether it listens, as opposed to having ended."""
        give_up = time.monotonic() + LIMIT_S
        while self._process.poll() is None and time.monotonic() < give_up:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return True
            time.sleep(0.01)
        return False

    def kill(self):
        self._process.kill()
        self._process.wait()


def certificate(folder):
    """Make a certificate for localhost that is its own authority; return its files."""
    files = f"{folder}/cert.pem", f"{folder}/key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=DNS:localhost", "-out", files[0], "-keyout", files[1]]
    subprocess.run(words, check=True, capture_output=True, timeout=LIMIT_S)
    return files


@contextlib.contextmanager
def redis(folder, *, secured=False):
    """Run a Redis server that writes nothing to disk; `secured`: TLS, and the password p@ss."""
    for _ in range(_TRIES):
        (port,) = _free_ports(1)
        words = ["redis-server", "--bind", "127.0.0.1", "--save", ""]
        if secured:
            cert, key = certificate(folder)
            words += ["--port", "0", "--tls-port", str(port), "--requirepass", "p@ss"]
            words += ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert]
            words += ["--tls-auth-clients", "no"]
        else:
            words += ["--port", str(port)]
        server = Server(words, port, folder)
        try:
            if server.wait_until_up():
                yield server
                return
        finally:
            server.kill()
    raise OSError("redis-server does not start")


@contextlib.contextmanager
def etcd(folder, members=1, *, secured=False):
    """Run an etcd cluster; yields its members. `secured`: TLS, and clients need a certificate."""
    files = certificate(folder) if secured else None
    for attempt in range(_TRIES):
        servers = _etcd_members(folder, members, attempt, files)
        try:
            if all(server.wait_until_up() for server in servers):
                yield servers
                return
        finally:
            for server in servers:
                server.kill()
    raise OSError("etcd does not start")


def _etcd_members(folder, members, attempt, files):
    ports = _free_ports(2 * members)
    clients, peers = ports[:members], ports[members:]
    urls = [f"http://127.0.0.1:{port}" for port in peers]
    cluster = ",".join(f"m{index}={url}" for index, url in enumerate(urls))
    servers = []
    for index, (port, url) in enumerate(zip(clients, urls, strict=True)):
        options = {
            "name": f"m{index}",
            "data-dir": f"{folder}/etcd{attempt}.{index}",
            "listen-client-urls": f"http{'s' if files else ''}://127.0.0.1:{port}",
            "advertise-client-urls": f"http{'s' if files else ''}://127.0.0.1:{port}",
            "listen-peer-urls": url,
            "initial-advertise-peer-urls": url,
            "initial-cluster": cluster,
            "heartbeat-interval": "50",
            "election-timeout": "500",
            "log-level": "error",
        }
        if files:
            cert, key = files
            options |= {"cert-file": cert, "key-file": key, "trusted-ca-file": cert}
            options |= {"client-cert-auth": "true"}
        words = ["etcd", *(f"--{name}={value}" for name, value in options.items())]
        servers.append(Server(words, port, folder))
    return servers


KINDS = [pytest.param(kind, marks=needs(kind)) for kind in NEEDS]


@contextlib.contextmanager
def server_of(kind, folder, **options):
    """Run one server of a kind."""
    if kind == "redis":
        with redis(folder, **options) as server:
            yield server
    else:
        with etcd(folder, **options) as (server,):
            yield server
