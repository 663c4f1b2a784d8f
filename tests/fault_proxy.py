"""A TCP proxy on loopback that loses things on request: the network between us and an S3 server.

It forwards bytes and knows no HTTP, apart from the test's rules. One thread a connection and direction; `close` ends them.
"""

import socket
import threading
from contextlib import suppress


class FaultProxy:
    """Forwards connections to 127.0.0.1:`port`. The faults are switches that a test sets."""

    def __init__(self, port: int) -> None:
        self.drop_answers = 0
        """So many of the next answers are swallowed: the request was carried out, the client sees a reset."""
        self.drop_only = b""
        """Only answers to requests that contain these bytes are swallowed."""
        self.cut_after: int | None = None
        """Bytes of the next answer that pass before the connection breaks; then None again."""
        self.num_dropped = 0
        self._upstream = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = {self._listener}
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """Break all connections and wait for the threads."""
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._upstream)
            except OSError:
                return
            asked = bytearray()
            with self._lock:
                self._sockets |= {client, server}
            for source, target, answers in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pump, args=(source, target, asked, answers), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, target: socket.socket, asked: bytearray, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if not answers:
                    asked += data
                else:
                    data = self._spoil(data, bytes(asked))
                    if data is None:
                        break
                    asked.clear()
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _spoil(self, data: bytes, asked: bytes) -> bytes | None:
        with self._lock:
            if self.drop_answers and self.drop_only.lower() in asked.lower():
                self.drop_answers -= 1
                self.num_dropped += 1
                return None
            if self.cut_after is not None and self.drop_only.lower() in asked.lower():
                if len(data) > self.cut_after:
                    self.cut_after = None
                    self.num_dropped += 1
                    return None
                self.cut_after -= len(data)
        return data
