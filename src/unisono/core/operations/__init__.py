"""Every operation of a group: its method, its checks, and the way of a call to the backend."""
