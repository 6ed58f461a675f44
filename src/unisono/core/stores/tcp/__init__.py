"""TCPStore: a client, and servers in Python and in C++, which speak torch's wire protocol."""
