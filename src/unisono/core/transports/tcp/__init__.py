"""The transport over TCP: links between ranks, and the thread that serves them."""
