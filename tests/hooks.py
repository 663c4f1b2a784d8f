"""A real HTTP server on loopback that keeps what is posted to it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hook:
    """A server that keeps what it was sent and answers as told."""

    def __init__(self, answers: list[int], drip: threading.Event | None) -> None:
        self.received: list[dict[str, Any]] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if drip is not None:
                    drip.wait()
                self.send_response(answers.pop(0) if answers else 200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def hook(*answers: int, drip: threading.Event | None = None) -> Iterator[Hook]:
    made = Hook(list(answers), drip)
    try:
        yield made
    finally:
        if drip is not None:
            drip.set()
        made.close()
