"""Facilities of the operating system that are no part of Python's portable modules.

No other package names these facilities (tests/project/test_platform.py). Where one is missing, its
function answers "", None, an empty list or an OSError. The caller then goes on without it, or
raises UnsupportedError.

- machine: cores, their order, cgroups, the names of boot and clock.
- processes: what /proc knows of a process; pidfd, subreaper, death signal, waitid.
- memory: files in memory, memory of another process, what is free, kills for lack of memory.
- network: addresses of interfaces, listening ports, the kernel's view of a TCP connection.
- peer_user: the user at the other end of a local connection.
- files: locks and terminals.
- posix: what Windows lacks, and what stands for it there.
"""
