"""Who belongs to a run, over a network: whoever holds the run's private key, and nobody else.

Each run has one key and one self-signed certificate, in one file of mode 0600 in a folder that all its nodes see. Coordinator
and agents both present this certificate and accept no other, so one TLS handshake tells both ends that the other may read that
file, which is what "same run, same user" means. No second secret is passed on: nothing is in argv, environment or ledger.

The names in the certificate are not looked at (nodes come and go, addresses change), nor are its dates (a node's clock may be
wrong): the key is the identity. Python can speak TLS but cannot make a certificate, hence `cryptography`, imported only here,
and only where several machines meet.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import ssl
from datetime import UTC, datetime
from pathlib import Path

KEY_FILE = "identity.pem"


class IdentityError(Exception):
    """The run's key cannot be used; the message says what to do."""


def make_identity(folder: Path) -> Path:
    """The key and certificate in `folder`, made now if they are not there. Of two who make one at once, one wins for both."""
    path = folder / KEY_FILE
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = folder / f"{KEY_FILE}.{secrets.token_hex(8)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(_generate())
        file.flush()
        os.fsync(file.fileno())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # unlike a rename, it never replaces what another has just made
    finally:
        draft.unlink()
    return path


def _generate() -> bytes:
    """PEM of a fresh P-256 key and of a certificate that it signs for itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ftrain run")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2200, 1, 1, tzinfo=UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private + certificate.public_bytes(serialization.Encoding.PEM)


def context(path: Path, *, server: bool) -> ssl.SSLContext:
    """One end of a connection: TLS 1.3, this certificate shown and demanded. IdentityError if others could read the key."""
    try:
        state = path.stat()
    except OSError as error:
        raise IdentityError(f"{path}: {error.strerror}; the folder must be the one that the coordinator uses") from error
    if state.st_mode & 0o077:
        raise IdentityError(f"{path} may be read by others (mode {state.st_mode & 0o777:03o}): delete it, or chmod 600 it")
    if state.st_uid != os.getuid():
        raise IdentityError(f"{path} belongs to user {state.st_uid}, this process to {os.getuid()}")
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    try:
        made.load_cert_chain(path)
        made.load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError) as error:
        raise IdentityError(f"{path} is not a key with its certificate: {error}; delete it while the run is down") from error
    return made
