"""Opens stores as the config's [storage] section says, in every process alike.

Credentials never pass through here: a config is recorded in checkpoints and ledgers. Each process finds its own, in the
environment that it inherits or in the machine's role.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from ftrain.compose.paths import absolute_url, local_dir_of
from ftrain.config import Config, Storage
from ftrain.schemes import CLOUDS, S3, is_local
from storage.objects import ObjectStore, open_store
from storage.run import RunStore
from storage.traffic import configure

__all__ = ["limit_traffic", "local_tier_url", "open_configured", "open_known", "open_place", "opened_run", "store_options"]


def store_options(storage: Storage, url: str) -> dict[str, object]:
    """What `open_store` is given for `url`. Sections that say nothing give nothing, so that the environment decides."""
    scheme = url.partition("://")[0]
    if is_local(url) or scheme not in S3 + CLOUDS:
        return {}
    options: dict[str, Any] = {"backend": storage.backend, "request_timeout_s": storage.request_timeout_s}
    proxies = {"http": storage.proxy, "https": storage.proxy} if storage.proxy else {}
    if scheme in CLOUDS:
        return {**options, **({"proxies": proxies} if proxies else {}), **_given(ca_bundle=storage.ca_bundle)}
    config: dict[str, Any] = {"proxies": proxies} if proxies else {}
    if storage.addressing != "auto":
        config["s3"] = {"addressing_style": storage.addressing}
    encryption = _given(ServerSideEncryption=storage.sse, SSEKMSKeyId=storage.sse_kms_key_id)
    named = _given(endpoint_url=storage.endpoint, region=storage.region, profile=storage.profile, ca_bundle=storage.ca_bundle)
    return {**options, **named, **_given(config_kwargs=config, s3_additional_kwargs=encryption)}


def _given(**values: object) -> dict[str, object]:
    return {name: value for name, value in values.items() if value}


def open_configured(storage: Storage, url: str) -> ObjectStore:
    """The store at `url`, reached as configured."""
    return open_store(url, options=store_options(storage, url))


def open_known(url: str) -> ObjectStore:
    """The store of a run that may have been started on this machine: then reached as its config says.

    For commands that a person waits for: a store that does not answer at all is given up in seconds.
    """
    url = absolute_url(url)
    return open_store(url, options={**store_options(_recorded(url), url), **_watched(url)})


def open_place(url: str) -> ObjectStore:
    """What such a command reads or writes beside the run: reached as the environment says."""
    url = absolute_url(url)
    return open_store(url, options=_watched(url))


def _watched(url: str) -> dict[str, object]:
    from storage.retry import WATCHED

    return {} if is_local(url) or url.startswith("memory://") else {"retry": WATCHED}


@contextmanager
def opened_run(url: str) -> Iterator[RunStore]:
    """The checkpoints of such a run, for as long as they are looked at."""
    store = open_known(url)
    try:
        yield RunStore(store)
    finally:
        store.close()


def _recorded(url: str) -> Storage:
    if is_local(url):
        return Storage()
    try:
        recorded = msgspec.json.decode((local_dir_of(url) / "config.json").read_bytes(), type=dict[str, Any])
        return msgspec.convert(recorded.get("storage", {}), Storage)
    except (OSError, msgspec.MsgspecError):
        return Storage()


def local_tier_url(config: Config) -> str:
    """This run's folder in the local tier; empty if there is no such tier."""
    local = config.checkpoint.local_url
    return f"{local.rstrip('/')}/{hashlib.sha256(config.run.url.encode()).hexdigest()[:16]}" if local else ""


def limit_traffic(config: Config) -> None:
    """Hold this process to the configured cap and rate."""
    configure(
        in_flight_bytes=int(config.storage.in_flight_mib * 2**20), upload_bytes_per_s=config.checkpoint.upload_mib_s * 2**20
    )
