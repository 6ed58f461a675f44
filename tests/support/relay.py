"""Somebody on the way between two ends, who reads and changes what passes."""

import contextlib
import socket
import threading


class Relay:
    """Passes bytes between a client and a server, through `change(data, to_server)`."""

    def __init__(self, port, change=lambda data, to_server: data):
        self.seen = bytearray()
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target = port
        self._socks = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._socks += [near, far]
                for ends in ((near, far, True), (far, near, False)):
                    thread = threading.Thread(target=self._pump, args=ends, daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source, target, to_server):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(self._change(data, to_server))
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        for sock in (self._listener, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._socks):
            sock.close()
