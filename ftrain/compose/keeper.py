"""The keeper's process: frames from the agent in, the Keeper's work, payloads for the coordinator out. Imports no torch."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import msgspec

from ftrain.checkpoint.keeper import Keeper
from ftrain.checkpoint.messages import Settled, StoreSnapshot, decode_request, decode_snapshot, encode
from ftrain.checkpoint.outbox import Outbox
from ftrain.compose.args import KeeperArgs
from ftrain.compose.stores import open_configured
from ftrain.config import Fault, Storage
from ftrain.faults import Faults
from recovery.messages import KeeperForget, KeeperMemfds, Payload, ToKeeperFromWorker, ToKeeperProcess
from recovery.wire import channel
from storage.objects import open_store
from storage.traffic import configure


def main(argv: list[str]) -> int:
    """`python -P -m ftrain.compose.keeper ARGS.json SOCKET_FD`: serve until the agent closes the socket."""
    args = msgspec.json.decode(Path(argv[0]).read_bytes(), type=KeeperArgs)
    link = channel(socket.socket(fileno=int(argv[1])), ToKeeperProcess)
    outbox = Outbox(link)
    faults = Faults([msgspec.convert(fault, Fault) for fault in args.faults], Path(args.local_dir) / "faults")

    storage = msgspec.convert(args.storage, Storage)
    configure(in_flight_bytes=int(storage.in_flight_mib * 2**20), upload_bytes_per_s=args.upload_mib_s * 2**20)
    keeper = Keeper(
        lambda: open_configured(storage, args.url),
        lambda message: outbox.put(Payload(payload=encode(message))),
        local=(lambda: open_store(args.local_url)) if args.local_url else None,
        local_every=args.local_every_steps,
        reached=faults.reached,
    )
    while not link.closed:
        for frame in outbox.wait():
            handle(keeper, frame.message, frame.fds)
    return 0


def handle(keeper: Keeper, message: ToKeeperProcess, fds: tuple[int, ...]) -> None:
    """One message of the agent."""
    if isinstance(message, KeeperMemfds):
        for name, fd in zip(message.memfds, fds, strict=True):
            keeper.adopt(name, fd)
            os.close(fd)
    elif isinstance(message, KeeperForget):
        for name in message.names:
            keeper.drop(name)
    elif isinstance(message, ToKeeperFromWorker):
        keeper.snapshot_ready(decode_snapshot(message.payload).slot)
    else:
        request = decode_request(message.payload)
        if isinstance(request, Settled):
            keeper.settled(request)
        elif isinstance(request, StoreSnapshot):
            keeper.store(request)
        else:
            keeper.resend()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
