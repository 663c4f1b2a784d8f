"""Each answer of a server has its class, its sentence, and so its retries."""

import pytest
from botocore import exceptions
from botocore.exceptions import ClientError

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
from storage.s3_errors import Where, code_of, translated

WHERE = Where("bucket", "http://server", "step/pack", "s3://bucket/run/step/pack")


def answered(code: str, status: int) -> OSError:
    """As s3fs raises it: botocore's error behind an OSError."""
    error = OSError("translated by s3fs")
    response = {"Error": {"Code": code, "Message": "said the server"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error.__cause__ = ClientError(response, "PutObject")
    return error


@pytest.mark.parametrize(
    ("code", "status", "expected", "words"),
    [
        ("SlowDown", 503, Throttled, "said the server"),
        ("503", 503, Throttled, "503"),
        ("TooManyRequests", 429, Throttled, "429"),
        ("Unheard", 503, Throttled, "Unheard"),
        ("InternalError", 500, Unavailable, "said the server"),
        ("InternalError", 200, Unavailable, "said the server"),
        ("502", 502, Unavailable, "502"),
        ("RequestTimeout", 400, Unavailable, "RequestTimeout"),
        ("BadDigest", 400, Unavailable, "BadDigest"),
        ("ConditionalRequestConflict", 409, Unavailable, "409"),
        ("NoSuchKey", 404, ObjectMissing, "no object s3://bucket/run/step/pack"),
        ("404", 404, ObjectMissing, "no object"),
        ("NoSuchBucket", 404, ConfigurationError, "no bucket 'bucket'"),
        ("AccessDenied", 403, AccessDenied, "check its policy"),
        ("403", 403, AccessDenied, "403"),
        ("InvalidAccessKeyId", 403, AccessDenied, "AWS_ACCESS_KEY_ID"),
        ("SignatureDoesNotMatch", 403, AccessDenied, "AWS_SECRET_ACCESS_KEY"),
        ("ExpiredToken", 400, ExpiredCredentials, "expired"),
        ("RequestTimeTooSkewed", 403, AccessDenied, "clock"),
        ("PermanentRedirect", 301, ConfigurationError, "region"),
        ("InvalidRange", 416, Damaged, "truncated"),
        ("QuotaExceeded", 403, NoSpace, "Free some space"),
        ("XMinioStorageFull", 507, NoSpace, "Free some space"),
        ("InvalidArgument", 400, ConfigurationError, "InvalidArgument"),
        ("NotImplemented", 501, ConfigurationError, "NotImplemented"),
    ],
)
def test_answers(code: str, status: int, expected: type[StorageError], words: str) -> None:
    error = translated(answered(code, status), WHERE)
    assert type(error) is expected
    assert words in str(error)
    assert error.key == "step/pack"
    assert code_of(answered(code, status)) == code


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (exceptions.EndpointConnectionError(endpoint_url="http://server"), Unavailable, "cannot be reached"),
        (exceptions.ReadTimeoutError(endpoint_url="http://server"), Unavailable, "cannot be reached"),
        (exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), Unavailable, "cannot be reached"),
        (ConnectionResetError(104, "Connection reset by peer"), Unavailable, "broke or stalled"),
        (TimeoutError(), Unavailable, "TimeoutError"),
        (exceptions.NoCredentialsError(), AccessDenied, "come from AWS_ACCESS_KEY_ID"),
        (exceptions.SSLError(endpoint_url="https://server", error="self-signed"), ConfigurationError, "ca_bundle"),
        (exceptions.ProfileNotFound(profile="x"), ConfigurationError, "profile"),
        (exceptions.ParamValidationError(report="Invalid bucket name"), ConfigurationError, "bucket name"),
        (ValueError("Invalid endpoint: x"), ConfigurationError, "Invalid endpoint"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_no_answer(error: Exception, expected: type[StorageError], words: str) -> None:
    ours = translated(error, WHERE)
    assert type(ours) is expected
    assert words in str(ours)


def test_a_bug_stays_a_bug() -> None:
    assert translated(TypeError("not a server's doing"), WHERE) is None
    assert translated(ValueError("too many values"), WHERE) is None
