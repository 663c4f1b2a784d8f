"""An HTTP proxy in front of an S3 server that makes weather: refusals, broken bodies, stalls, credentials that run out.

Unlike `fault_proxy`, which loses bytes, this one reads requests and answers some of them itself. Which ones is drawn from a
seed, so that a test that fails fails again.
"""

import random
import socket
import threading
from collections import Counter
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>weather</Message></Error>'


class Weather:
    """Shares (0 to 1) of requests that meet each kind; `counts` says how many did. `port` may change while it runs."""

    def __init__(self, port: int, *, seed: int = 0) -> None:
        self.port = port
        self.refused = 0.0
        """503 SlowDown."""
        self.broken = 0.0
        """Of the answers with a body: it breaks off in the middle. Of requests with a body: the connection is reset in it."""
        self.conflict = 0.0
        """409 ConditionalRequestConflict, for writes."""
        self.false_success = 0.0
        """200 with an error in its body, for completions of uploads."""
        self.stalled = 0.0
        self.stall_s = 5.0
        self.expired = 0
        """So many of the next requests find that their token has expired."""
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        handler = type("Handler", (_Handler,), {"weather": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def draw(self, kind: str, share: float) -> bool:
        """Whether this request meets that weather."""
        with self._lock:
            hit = self._rng.random() < share
            self.counts[kind] += hit
        return hit

    def expires(self) -> bool:
        with self._lock:
            if self.expired <= 0:
                return False
            self.expired -= 1
            self.counts["expired"] += 1
        return True

    def wait(self, seconds: float) -> None:
        self._closing.wait(seconds)


class _Handler(BaseHTTPRequestHandler):
    weather: Weather
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            return

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        weather, body = self.weather, self._body()
        if weather.draw("stalled", weather.stalled):
            weather.wait(weather.stall_s)
        if weather.expires():
            return self._refuse(400, "ExpiredToken")
        if weather.draw("refused", weather.refused):
            return self._refuse(503, "SlowDown")
        if self.command == "PUT" and weather.draw("conflict", weather.conflict):
            return self._refuse(409, "ConditionalRequestConflict")
        if body and weather.draw("broken", weather.broken):
            return self._reset()
        if b"<CompleteMultipartUpload" in body and weather.draw("false success", weather.false_success):
            return self._answer(200, [("Content-Type", "application/xml")], ERROR.format(code="InternalError").encode())
        return self._forward(body)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(pieces)

    def _forward(self, body: bytes) -> None:
        upstream = HTTPConnection("127.0.0.1", self.weather.port, timeout=60)
        skipped = ("connection", "expect", "transfer-encoding", "content-length")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in skipped}
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                upstream.putheader(name, value)
            if body or self.command in ("PUT", "POST"):
                upstream.putheader("Content-Length", str(len(body)))
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            data = answer.read()
        except (OSError, HTTPException):  # the server is away
            return self._reset()
        finally:
            upstream.close()
        size = answer.headers.get("Content-Length", str(len(data)))
        kept = [
            (k, v) for k, v in answer.headers.items() if k.lower() not in ("connection", "transfer-encoding", "content-length")
        ]
        if len(data) > 1000 and self.weather.draw("broken", self.weather.broken):
            self._answer(answer.status, kept, data[: len(data) // 2], size=size)
            return self._reset()
        return self._answer(answer.status, kept, data, size=size)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, [("Content-Type", "application/xml")], ERROR.format(code=code).encode())

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, size: str | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", size if size is not None else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.connection.close()
