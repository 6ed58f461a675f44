"""Ports for servers that only one test knows."""

import contextlib
import socket


@contextlib.contextmanager
def reserved_port():
    """Yield a port of all addresses that the kernel gives to nobody else inside the block.

    A socket stays bound to the port and does not listen. A server that sets SO_REUSEADDR can
    listen on the port beside it.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as holder:
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]
