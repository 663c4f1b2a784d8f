"""The run's metrics for Prometheus: `<local>/metrics.prom`, and the same text on a loopback port if one is configured.

A thread of its own reads the ledger's segments as anybody else would, so that the coordinator's loop, which must answer a death
at once, never pays for them. Making the books costs time in proportion to the run's length: the pause between two editions is
at least fifty times what the last one took.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ftrain.compose.ledgers import LedgerTail
from recovery.exposition import CONTENT_TYPE, exposition
from recovery.files import replace_file
from recovery.report import ReportBuilder, ReportError

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
PAUSE_S = 15.0
SHARE = 50.0


class Exporter:
    """One thread that writes, and one that serves if `port` is not 0. `close` writes the last edition."""

    def __init__(self, folder: Path, *, port: int = 0) -> None:
        self._path = folder / "metrics.prom"
        self._tail = LedgerTail(folder / "ledger", from_start=True)
        self._books = ReportBuilder()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self.unserved = ""  # why nobody can ask the port, in words
        self._server = self._serve(port) if port else None
        self._thread.start()

    def close(self) -> None:
        """The last edition; then silence."""
        self._over.set()
        self._thread.join(10.0)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _serve(self, port: int) -> ThreadingHTTPServer | None:
        """A port that is taken costs the metrics, not the run."""
        try:
            return _server(self._path, port)
        except OSError as error:
            self.unserved = (
                f"no metrics are served on port {port} of {HOST} ({error.strerror}): set another recovery.metrics_port; "
                f"{self._path} has the same"
            )
            return None

    def _work(self) -> None:
        last = False
        while not last:
            begin = time.monotonic()
            self._publish()
            cost_s = time.monotonic() - begin
            last = self._over.is_set()
            if not last:
                self._over.wait(max(PAUSE_S, SHARE * cost_s))

    def _publish(self) -> None:
        try:
            for event in self._tail.new():
                self._books.add(event)
            text = exposition(self._books.build(None))
            replace_file(self._path, text.encode())
        except ReportError:
            return  # nothing has happened yet
        except OSError as error:
            log.warning("metrics cannot be written: %s", error)


def _server(path: Path, port: int) -> ThreadingHTTPServer:
    """Serves the file on the loopback interface. OSError if it cannot."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b""
            with contextlib.suppress(OSError):
                body = path.read_bytes()
            self.send_response(200 if self.path in ("/", "/metrics") else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Whoever looks is not news."""

    server = ThreadingHTTPServer((HOST, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="metrics-http", daemon=True).start()
    return server
