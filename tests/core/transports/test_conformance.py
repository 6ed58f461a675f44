import socket

import pytest

from unisono.testing.transport_suite import TRANSPORT_CHECKS, check_vanishing


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_transport(make, check):
    check(make)


def test_vanishing(make):
    if make.kind == "tcp" and make.messages:
        pytest.skip("there may be no link to cut; tests/faults kills whole processes")

    def vanish(transport):
        if make.kind == "inproc":
            transport.vanish("its process was killed")
            return
        if make.kind == "unix":
            transport.spread = lambda error: None
            for sock in transport.sockets[1:]:
                sock.shutdown(socket.SHUT_RDWR)
            return
        # To its peers a killed process is a connection that ends without a good-bye.
        # Its thread must not see one link end and tell of that over another one.
        assert transport.hold()
        try:
            transport._close_listeners()
            for link in list(transport._links.values()):
                if link.sock is not None:
                    link.sock.shutdown(socket.SHUT_RDWR)
        finally:
            transport.release()

    check_vanishing(make, vanish)
