"""What obstore's exceptions mean in our tree. They carry the server's answer as text: status, and S3's XML with its code.

The text is put back into the shape in which `storage.s3_errors` judges answers, so that both clients say the same.
"""

from __future__ import annotations

import re

from storage.errors import AccessDenied, ConfigurationError, Damaged, ObjectMissing, StorageError, Unavailable
from storage.s3_errors import Where, answered

__all__ = ["fast_translated", "is_conflict"]

_STATUS = re.compile(r"status code: (\d{3})|status: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_SAID = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_UNTRUSTED = re.compile(r"certificate|UnknownIssuer|InvalidCertificate", re.IGNORECASE)


def fast_translated(error: Exception, where: Where) -> StorageError | None:
    """The error of our tree; None if it is nothing that a server or a network does: then it is a bug, and stays."""
    text = str(error).partition("\n\nDebug source")[0]
    status, code, said = _STATUS.search(text), _CODE.search(text), _SAID.search(text)
    if status:
        number = int(status[1] or status[2])
        response = {
            "Error": {"Code": code[1] if code else str(number), "Message": said[1] if said else text[-300:]},
            "ResponseMetadata": {"HTTPStatusCode": number},
        }
        return answered(response, where)
    if isinstance(error, FileNotFoundError):
        return ObjectMissing(f"there is no object {where.url}", where.key)
    if not _of_library(error):
        return None
    if "Invalid range" in text:
        return Damaged(f"{where.url} is truncated: {text}", where.key, pack=where.key)
    name = type(error).__name__
    if code:  # an error in the body of a success
        return answered({"Error": {"Code": code[1], "Message": text}, "ResponseMetadata": {"HTTPStatusCode": 200}}, where)
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return AccessDenied(f"{where.url}: {text}. Check the credentials and what they may do", where.key)
    if name in ("UnknownConfigurationKeyError", "NotSupportedError", "InvalidPathError"):
        return ConfigurationError(f"{where.url}: {text}", where.key)
    if _UNTRUSTED.search(str(error)):
        advice = "Give the certificate of its authority as `ca_bundle` or AWS_CA_BUNDLE"
        return ConfigurationError(f"{where.endpoint} cannot be trusted: {text}. {advice}", where.key)
    return Unavailable(f"{where.endpoint} cannot be reached for {where.url}: {text}", where.key)


def is_conflict(error: Exception) -> bool:
    """Whether a refused create may still succeed: S3 answers 409 with one of these codes, and Azure 409 for what exists."""
    code = _CODE.search(str(error))
    return code is not None and code[1] in ("ConditionalRequestConflict", "OperationAborted")


def _of_library(error: Exception) -> bool:
    return any(base.__name__ == "BaseError" and base.__module__.startswith("obstore") for base in type(error).__mro__)
