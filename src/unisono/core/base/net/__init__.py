"""The networks of this host, and sockets: interfaces, ports, connections, silent hosts."""
