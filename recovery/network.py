"""The address of this machine on the network that a run uses."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

SIOCGIFADDR = 0x8915
IFREQ = struct.Struct("16s24x")  # struct ifreq: the name, then a sockaddr
ADDRESS_AT = 20  # of an IPv4 address within it


class NoInterfaceError(Exception):
    """None of the wanted network interfaces is here; the message lists those that are."""


def names_of(text: str) -> list[str]:
    """The interfaces of `machine.interface`: several are separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def first_present(text: str) -> str:
    """The first of these interfaces that this machine has; the very first if it has none of them."""
    known, names = {name for _, name in socket.if_nameindex()}, names_of(text)
    return next((name for name in names if name in known), names[0] if names else "")


def usual_names() -> list[str]:
    """The interfaces of this machine, the most likely one for traffic between machines first: that of the default route, then
    every other one, loopback last."""
    known = [name for _, name in socket.if_nameindex()]
    routed = _default_routes(Path("/proc/net/route").read_text())
    return sorted(known, key=lambda name: (name == "lo", routed.index(name) if name in routed else len(routed)))


def _default_routes(table: str) -> list[str]:
    """Interfaces with a default route, the cheapest first, from the text of /proc/net/route."""
    rows = [line.split() for line in table.splitlines()[1:]]
    found = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"]
    return [name for _, name in sorted(found)]


def interface_address(names: Sequence[str]) -> tuple[str, str]:
    """The first of these interfaces that this machine has, and its IPv4 address."""
    found = (((name, _address(name))) for name in names)
    for name, address in found:
        if address is not None:
            return name, address
    known = ", ".join(name for _, name in socket.if_nameindex())
    raise NoInterfaceError(
        f"no IPv4 address on {' or '.join(names)}; this machine has {known}: name one of them (machine.interface, --interface)"
    )


def _address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, IFREQ.pack(name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[ADDRESS_AT : ADDRESS_AT + 4])
