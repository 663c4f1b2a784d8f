"""Where the processes of a run on many machines find each other: a folder that all of them see.

<shared folder>/control/identity.pem       the run's key and certificate (recovery.identity), mode 0600
<shared folder>/control/coordinator.json   where the living coordinator listens, written anew by each

A coordinator may be started again elsewhere, on another port, so the address is read at each attempt to connect. It need not be
secret or true: whoever answers there must prove that it holds the run's key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from recovery.files import replace_file
from recovery.identity import KEY_FILE, context
from recovery.tls import TlsChannel, dial

ADDRESS = "coordinator.json"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a coordinator listens."""

    host: str
    port: int
    node: str = ""
    epoch: int = 0


def control_folder(shared: Path) -> Path:
    """The folder of key and address within a shared folder."""
    return shared / "control"


def publish(control: Path, address: Address) -> None:
    """Say where to connect, whole or not at all."""
    replace_file(control / ADDRESS, msgspec.json.encode(address))


def read_address(control: Path) -> Address:
    """Where the coordinator was last said to listen. FileNotFoundError if nobody ever said so, OSError if it is unreadable."""
    try:
        return msgspec.json.decode((control / ADDRESS).read_bytes(), type=Address)
    except msgspec.DecodeError as error:
        raise OSError(f"{control / ADDRESS} is not an address: {error}") from error


def dial_coordinator(control: Path, messages: Any, *, limit_s: float) -> TlsChannel[Any]:
    """A connection to the living coordinator, both ends proven. OSError if nobody answers, IdentityError for a bad key file."""
    address = read_address(control)
    return dial(address.host, address.port, context(control / KEY_FILE, server=False), messages, limit_s=limit_s)
