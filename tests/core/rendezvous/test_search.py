"""The search for rank 0's store at places that other jobs have, too."""

import socketserver
import threading
from functools import partial

import pytest

from tests.support.ports import reserved_port
from tests.support.together import on_threads
from unisono.core.rendezvous.search import search, serve_at
from unisono.core.stores.tcp.token import Answer
from unisono.errors import HandshakeError

HOST = "127.0.0.1"


class OtherJob(socketserver.ThreadingTCPServer):
    """Answers as a store whose job is on other machines and has no token."""

    daemon_threads = True

    def __init__(self):
        super().__init__((HOST, 0), socketserver.BaseRequestHandler)
        self.refused = threading.Event()

    def finish_request(self, request, client_address):
        if request.recv(1024):
            request.sendall(bytes([Answer.LOCAL_ONLY]))
            self.refused.set()


@pytest.fixture
def other_job(monkeypatch):
    monkeypatch.delenv("UNISONO_TOKEN", raising=False)
    with OtherJob() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_store_of_another_job_that_refuses_this_rank_does_not_end_the_search(other_job):
    def serve(port):
        assert other_job.refused.wait(20)
        return serve_at(HOST, [port], "job", 20)

    with reserved_port() as port:
        ports = [other_job.server_address[1], port]
        found, own = on_threads(partial(search, [HOST], ports, "job", 1, 20), partial(serve, port))
    with own, found:
        own.set("key", "of rank 0")
        assert found.get("key") == b"of rank 0"


def test_rank_that_is_refused_and_finds_no_other_store_says_so(monkeypatch, other_job):
    monkeypatch.setattr("unisono.core.stores.tcp.client._REFUSAL_GRACE_S", 0.05)
    ports = [other_job.server_address[1]]
    with (
        reserved_port() as port,
        pytest.raises(HandshakeError, match="serves only its own machine"),
    ):
        search([HOST], [*ports, port], "job", 1, 20)
