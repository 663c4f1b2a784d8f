"""A port for a server that a test starts later: none that the kernel might give to somebody's connection in the meantime."""

from __future__ import annotations

import random
from collections.abc import Collection

from recovery.ports import can_bind, free_port

_PORTS = (12_000, 19_999)  # between those of our S3 servers and those of our agents


def later(*, taken: Collection[int] = ()) -> int:
    """Free now on loopback, and none of `taken`."""

    def free(host: str, port: int) -> bool:
        return port not in taken and can_bind(host, port)

    return free_port("127.0.0.1", _PORTS, start=random.randrange(_PORTS[1]), bind=free)
