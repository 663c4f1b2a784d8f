"""Whether an endpoint's create-if-absent has one winner: tried, not believed.

S3 has had it since 2024; of what speaks its protocol some ignore the header, and then every racer "wins". So two creates of one
probe object race, once per endpoint and process. Where both win, or a second create overwrites, `create_record` (see
`storage.epoch`) looks before it creates, waits until a racer's write would show, and reads back whose nonce stands. That leaves
a window of the length of one request in which two epochs could be taken at once, and the run says so; it cannot make a commit
wrong, because commits carry their epoch in their name and have one writer.
"""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from storage.errors import StorageError
from storage.objects import ObjectStore

__all__ = ["creates_atomically", "forget_probes", "probe_create"]

ROUNDS = 3
_found: dict[str, bool] = {}
_lock = threading.Lock()


def probe_create(store: ObjectStore) -> bool:
    """Race creates, unless it is known already; whether each round had one winner whose bytes stand there.

    Local and in-memory stores know by themselves. Raises the store's own error if it cannot be used at all.
    """
    if store.capabilities.local or not store.capabilities.atomic_create or store.endpoint.startswith("memory:"):
        return store.capabilities.atomic_create
    with _lock:
        if store.endpoint not in _found:
            _found[store.endpoint] = all(_round(store.quick()) for _ in range(ROUNDS))
        return _found[store.endpoint]


def creates_atomically(store: ObjectStore) -> bool:
    """What is declared, unless a probe of this process found otherwise."""
    return store.capabilities.atomic_create and _found.get(store.endpoint, True)


def forget_probes() -> None:
    """Try every endpoint anew."""
    _found.clear()


def _round(store: ObjectStore) -> bool:
    key = f"probe-{uuid.uuid4().hex}-race"
    barrier = threading.Barrier(2)

    def racer(number: int) -> bool:
        barrier.wait()
        return store.create(key, b"%d" % number)

    try:
        with ThreadPoolExecutor(2) as pool:
            won = list(pool.map(racer, range(2)))
        if won.count(True) != 1 or store.create(key, b"late"):
            return False
        return store.get(key) == b"%d" % won.index(True)
    finally:
        with suppress(StorageError):
            store.delete(key)
