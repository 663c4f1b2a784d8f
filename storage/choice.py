"""Which client library speaks to a remote store, and how our options are said in its words.

The rule: obstore for s3://, gs:// and az:// if it is installed (extra `fast`) and can do what the options ask for; else s3fs
for s3://, and whichever fsspec file system knows the URL for everything else. `backend="obstore"` or `"s3fs"` decides it: what
cannot be had is then an error. Credentials are found by botocore in both cases, so that a profile, a role, an SSO session or a
container's endpoint works the same; options that only botocore understands go to s3fs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from storage.errors import AccessDenied, ConfigurationError
from storage.fast import FastStore, ForkSafeStore
from storage.objects import ObjectStore
from storage.s3 import S3Options, S3Store
from storage.s3_errors import CREDENTIALS, Where

__all__ = ["choose_s3", "cloud_store", "has_obstore"]

PATIENCE = timedelta(seconds=300)
_SSE = {
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
}
_CLOUDS = {
    "gs": ("GCSStore", "Google"),
    "gcs": ("GCSStore", "Google"),
    "az": ("AzureStore", "Azure"),
    "abfs": ("AzureStore", "Azure"),
}


def has_obstore() -> bool:
    """Whether the extra `fast` is installed."""
    return importlib.util.find_spec("obstore") is not None


def choose_s3(url: str, options: S3Options, backend: str) -> ObjectStore:
    """The store at an s3:// URL; `backend`: auto, obstore or s3fs."""
    s3 = S3Store(url, options)
    if backend not in ("auto", "obstore", "s3fs"):
        raise ConfigurationError(f"{url}: backend is auto, obstore or s3fs, got {backend!r}")
    why = _why_not(options) if has_obstore() else "it is not installed: pip install 'ftrain-runtime[fast]'"
    if backend == "obstore" and why:
        raise ConfigurationError(f"{url}: backend 'obstore' cannot be used: {why}")
    if backend == "s3fs" or why:
        return s3
    bucket, _, prefix = url.partition("://")[2].partition("/")
    where = Where(bucket, options.endpoint_url or _environment_endpoint() or "AWS", prefix.strip("/"), s3.url)
    return ForkSafeStore(FastStore(where, _connect_s3(bucket, options), shape=options.parts, uploads=s3), s3)


def _why_not(options: S3Options) -> str:
    """Why obstore cannot do what these options ask for; empty if it can."""
    odd = sorted(set(options.s3_additional_kwargs) - set(_SSE)) + sorted(set(options.config_kwargs) - {"proxies", "s3"})
    odd += sorted(set(_mapping(options.config_kwargs.get("s3"))) - {"addressing_style"})
    endpoint = options.endpoint_url or _environment_endpoint() or "https://"
    if not endpoint.startswith(("http://", "https://")):
        return "the endpoint is no URL"
    return f"only s3fs knows {', '.join(odd)}" if odd else ""


def _environment_endpoint() -> str:
    import os

    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _connect_s3(bucket: str, options: S3Options) -> Callable[[bool], Any]:
    def connect(patient: bool) -> Any:
        store = import_module("obstore.store")
        endpoint = options.endpoint_url or _environment_endpoint()
        style = _mapping(options.config_kwargs.get("s3")).get("addressing_style", "path" if endpoint else "virtual")
        config: dict[str, Any] = {
            **({"endpoint": endpoint} if endpoint else {}),
            **({"skip_signature": True} if options.anon else {}),
            **{_SSE[name]: value for name, value in options.s3_additional_kwargs.items()},
            "virtual_hosted_style_request": style == "virtual",
        }
        found, region = (None, options.region) if options.anon else _credentials(options)
        if region:
            config["region"] = region
        return store.S3Store(
            bucket,
            config=config,
            client_options=_client(
                options.request_timeout_s, endpoint, options.ca_bundle, options.config_kwargs.get("proxies")
            ),
            retry_config=_retries(patient),
            credential_provider=found,
        )

    return connect


def _credentials(options: S3Options) -> tuple[Callable[[], dict[str, Any]], str | None]:
    """What botocore finds, asked again by the library before it expires; and the region."""
    session = import_module("botocore.session").Session(profile=options.profile)
    if options.key is not None:
        session.set_credentials(options.key, options.secret, options.token)
    held = session.get_credentials()
    if held is None:
        raise AccessDenied(f"no credentials were found. {CREDENTIALS}")

    def provide() -> dict[str, Any]:
        frozen = held.get_frozen_credentials()
        expires_at = getattr(held, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expires_at,
        }

    return provide, options.region or session.get_config_variable("region")


def _client(timeout_s: float, endpoint: str, ca_bundle: str | None, proxies: object) -> dict[str, Any]:
    import os

    bundle = ca_bundle or os.environ.get("AWS_CA_BUNDLE")
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=5),
        "allow_http": endpoint.startswith("http://"),
    }
    if bundle:
        try:
            client["root_certificate"] = Path(bundle).read_bytes()
        except OSError as error:
            raise ConfigurationError(f"{endpoint}: the CA bundle {bundle} cannot be read: {error.strerror}") from error
    proxy = _mapping(proxies).get("https" if endpoint.startswith("https") or not endpoint else "http")
    if proxy:
        client["proxy_url"] = str(proxy)
    return client


def _retries(patient: bool) -> dict[str, Any]:
    """None of its own, because ours are counted and know what a lost create means; but the parts of a stream have no others."""
    backoff = {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=15), "base": 2}
    return {"max_retries": 40 if patient else 0, "retry_timeout": PATIENCE, "backoff": backoff}


def cloud_store(url: str, given: Mapping[str, object]) -> ObjectStore | None:
    """The store at a gs:// or az:// URL; None if obstore cannot or shall not be used. Options are obstore's config keys."""
    scheme, _, rest = url.partition("://")
    options = dict(given)
    backend = options.pop("backend", "auto")
    if scheme not in _CLOUDS or backend not in ("auto", "obstore") or not has_obstore():
        return None
    bucket, _, prefix = rest.partition("/")
    kind, name = _CLOUDS[scheme]
    timeout_s = float(str(options.pop("request_timeout_s", 120.0)))
    ca_bundle, proxies = options.pop("ca_bundle", None), options.pop("proxies", None)
    endpoint = str(options.get("endpoint") or options.get("azure_endpoint") or "")

    def connect(patient: bool) -> Any:
        return getattr(import_module("obstore.store"), kind)(
            bucket,
            config=options,
            client_options=_client(timeout_s, endpoint, str(ca_bundle) if ca_bundle else None, proxies),
            retry_config=_retries(patient),
        )

    return FastStore(Where(bucket, endpoint or name, prefix.strip("/"), url.rstrip("/")), connect)
