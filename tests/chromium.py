"""A headless Chromium over its DevTools pipe: no port, no driver, no library. Debian: `apt install chromium-headless-shell`."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """The browser's path, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one page. Everything that the page logged, threw or asked the network for is kept."""

    def __init__(self, profile: Path) -> None:
        """`profile` is an empty folder."""
        program = find_chromium()
        assert program is not None
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        shell = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$0" "$@"'  # the pipe is always descriptors 3 and 4
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program, *options],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._session, self._rest = 0, "", b""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._events: list[str] = []
        target = next(info for info in self("Target.getTargets")["targetInfos"] if info["type"] == "page")
        self._session = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there."""
        self.problems.clear()
        self.requests.clear()
        self._events.clear()
        self("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in self._events:
            self._next()

    def value(self, expression: str) -> Any:
        """What a script's expression gives."""
        found = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screen(self, *, width: int, height: int = 800, dark: bool = False, media: str = "screen") -> None:
        """Another device: its width in CSS pixels, its colour scheme, or paper."""
        mobile = width < 600
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def close(self) -> None:
        """End the browser."""
        os.close(self._write)
        os.close(self._read)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, about: dict[str, Any]) -> None:
        self._events.append(event)
        said = event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert")
        if said or event in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(json.dumps(about))
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
