"""Ports for servers that only one test knows."""

import socket


def free_port():
    """Return a port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
