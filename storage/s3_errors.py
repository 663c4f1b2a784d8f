"""What an answer of an S3 server, or the lack of one, means to a person, and which class of our tree it is.

The classes decide about retries (only `Unavailable` and `Throttled` are tried again), so each code that S3, MinIO, Ceph or
SeaweedFS is known to answer has its place here; what is unknown is judged by its HTTP status.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from storage.errors import (
    AccessDenied,
    ConfigurationError,
    Damaged,
    ExpiredCredentials,
    NoSpace,
    ObjectMissing,
    StorageError,
    Throttled,
    Unavailable,
)

__all__ = ["CREDENTIALS", "Where", "answered", "code_of", "translated"]

_THROTTLED = {"SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException", "TooManyRequests", "429"}
_THROTTLED |= {"RequestLimitExceeded", "RequestThrottled", "BandwidthLimitExceeded", "503", "ServiceUnavailable", "Busy"}
_UNAVAILABLE = {"InternalError", "RequestTimeout", "OperationAborted", "ConditionalRequestConflict", "409", "408"}
_UNAVAILABLE |= {"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "IncompleteBody", "InvalidDigest"}
_PASSING = {200, 408, 409, 500}  # 200: an error in the body of a success. 501 does not pass: the server lacks the feature
_FULL = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage", "507"}
_MISSING = {"NoSuchKey", "404", "NotFound"}
_NO_BUCKET = {"NoSuchBucket", "InvalidBucketName"}
_REGION = {
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "TemporaryRedirect",
    "301",
}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_DENIED = {
    "InvalidAccessKeyId": "this server does not know the access key. Check AWS_ACCESS_KEY_ID or the profile, and the endpoint",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key. Check AWS_SECRET_ACCESS_KEY or the profile",
    "InvalidToken": "the session token is not valid. Check AWS_SESSION_TOKEN or the profile",
    "RequestTimeTooSkewed": "the clocks of this machine and of the server differ too much. Set this machine's clock",
}

CREDENTIALS = (
    "They come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, from a profile in ~/.aws/credentials (AWS_PROFILE, or "
    "storage.profile in the config), or from a role of the machine"
)
"""What helps where there are none."""


@dataclass(frozen=True, slots=True)
class Where:
    """What the request was about."""

    bucket: str
    endpoint: str
    """URL of the server, or "AWS"."""
    key: str
    """Key of the seam, for `StorageError.key`."""
    url: str
    """s3:// URL of the object."""


def code_of(error: BaseException) -> str:
    """The server's error code ("NoSuchKey", or the status if it gave none), "" if it gave no answer at all."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def translated(error: Exception, where: Where) -> StorageError | None:
    """The error of our tree; None if `error` is nothing that a server or a network does: then it is a bug, and stays."""
    response = _response(error)
    if response:
        return answered(response, where)
    return _not_answered(error, where)


def _response(error: BaseException) -> Mapping[str, Any]:
    """The server's answer: s3fs puts botocore's error, which has it, behind an OSError of its own."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, Mapping):
            return response
    return {}


def answered(response: Mapping[str, Any], where: Where) -> StorageError:
    """The error of our tree for an answer in botocore's shape: code and message of the error, and the HTTP status."""
    code = str(response.get("Error", {}).get("Code", ""))
    said = response.get("Error", {}).get("Message") or code
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    key, what = where.key, f"{where.endpoint} answered {status} {code} for {where.url}: {said}"
    if code in _NO_BUCKET:
        message = f"there is no bucket {where.bucket!r} at {where.endpoint}. Create it, or correct run.url or the endpoint"
        return ConfigurationError(message, key)
    if code in _EXPIRED:
        return ExpiredCredentials(f"{where.url}: the credentials have expired ({where.endpoint}). Get new ones", key)
    if code in _DENIED:
        return AccessDenied(f"{where.url}: {_DENIED[code]} ({where.endpoint})", key)
    if code in _MISSING:
        return ObjectMissing(f"there is no object {where.url}", key)
    if code in ("InvalidRange", "416"):
        return Damaged(f"{where.url} is truncated: {said}", key, pack=key)
    if code in _REGION or status in (301, 307):
        return ConfigurationError(f"{what}. The bucket is in another region: set `region` or AWS_DEFAULT_REGION", key)
    if code in _FULL or status == 507:
        return NoSpace(f"{what}. Free some space, or keep fewer checkpoints", key)
    if code in _THROTTLED or status in (429, 503):
        return Throttled(what, key)
    if code in _UNAVAILABLE or status in _PASSING or status > 501:
        return Unavailable(what, key)
    if code in ("AccessDenied", "AllAccessDisabled", "AccountProblem") or status in (401, 403):
        advice = "The access key is valid for other things or other buckets: check its policy"
        return AccessDenied(f"{what}. {advice}", key)
    if status == 404:
        return ObjectMissing(f"there is no object {where.url}", key)
    return ConfigurationError(what, key)


def _not_answered(error: Exception, where: Where) -> StorageError | None:
    import aiohttp

    exceptions = import_module("botocore.exceptions")  # this way, because botocore has no types
    parsers = import_module("botocore.parsers")
    reason = str(error) or type(error).__name__
    if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
        return AccessDenied(f"no credentials for {where.url}: {reason}. {CREDENTIALS}", where.key)
    if isinstance(error, exceptions.SSLError):
        advice = "Give the certificate of its authority as `ca_bundle` or AWS_CA_BUNDLE"
        return ConfigurationError(f"{where.endpoint} cannot be trusted: {reason}. {advice}", where.key)
    lost = (exceptions.HTTPClientError, exceptions.ConnectionError, exceptions.IncompleteReadError, exceptions.ChecksumError)
    if isinstance(
        error, (*lost, exceptions.TokenRetrievalError, exceptions.CredentialRetrievalError, parsers.ResponseParserError)
    ):
        return Unavailable(f"{where.endpoint} cannot be reached for {where.url}: {reason}", where.key)
    if isinstance(error, (aiohttp.ClientError, asyncio.TimeoutError, TimeoutError, ConnectionError)):
        return Unavailable(f"the connection to {where.endpoint} broke or stalled for {where.url}: {reason}", where.key)
    if isinstance(error, exceptions.BotoCoreError) or (isinstance(error, ValueError) and "ndpoint" in reason):
        return ConfigurationError(f"{where.url} at {where.endpoint}: {reason}", where.key)
    if isinstance(error, OSError):
        return Unavailable(f"{where.url} at {where.endpoint}: {reason}", where.key)
    return None
