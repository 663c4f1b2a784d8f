"""The keeper's process: frames from the agent in, the Keeper's work, payloads for the coordinator out. Imports no torch."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from ftrain.checkpoint.keeper import Keeper
from ftrain.checkpoint.messages import (
    Buddies,
    KeeperMessage,
    KeeperRequest,
    KeepSnapshots,
    Owed,
    Resend,
    Settled,
    StoreSnapshot,
    decode_request,
    decode_snapshot,
    encode,
)
from ftrain.checkpoint.names import is_peer
from ftrain.checkpoint.outbox import Outbox
from ftrain.checkpoint.peers import Peers
from ftrain.compose.args import KeeperArgs
from ftrain.compose.stores import open_configured
from ftrain.config import Fault, Storage
from ftrain.faults import Faults
from recovery.messages import KeeperForget, KeeperMemfds, Payload, ToKeeperFromWorker, ToKeeperProcess
from recovery.network import interface_address
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
    node = Path(argv[0]).parent.name if args.several_nodes else ""  # the folder of a node is named after it

    def send(message: KeeperMessage) -> None:
        told = msgspec.structs.replace(message, node=node) if isinstance(message, Owed) else message
        outbox.put(Payload(payload=encode(told)))

    keeper = Keeper(
        lambda: open_configured(storage, args.url),
        send,
        local=(lambda: open_store(args.local_url)) if args.local_url else None,
        local_every=args.local_every_steps,
        reached=faults.reached,
    )
    peers = open_peers(args, node, send)
    while not link.closed:
        for frame in outbox.wait():
            handle(keeper, peers, frame.message, frame.fds)
    if peers is not None:
        peers.close()
    return 0


def open_peers(args: KeeperArgs, node: str, send: Callable[[KeeperMessage], None]) -> Peers | None:
    """This node's part in the peer tier, if there is one."""
    if not args.control:
        return None
    return Peers(node=node, control=Path(args.control), host=interface_address(args.interfaces)[1], send=send)


def handle(keeper: Keeper, peers: Peers | None, message: ToKeeperProcess, fds: tuple[int, ...]) -> None:
    """One message of the agent."""
    if isinstance(message, KeeperMemfds):
        for name, fd in zip(message.memfds, fds, strict=True):
            if not is_peer(name):
                keeper.adopt(name, fd)
            if peers is not None:
                peers.adopt(name, fd)
            os.close(fd)
    elif isinstance(message, KeeperForget):
        for name in message.names:
            keeper.drop(name)
            if peers is not None:
                peers.drop(name)
    elif isinstance(message, ToKeeperFromWorker):
        keeper.snapshot_ready(decode_snapshot(message.payload).slot)
    else:
        obey(keeper, peers, decode_request(message.payload))


def obey(keeper: Keeper, peers: Peers | None, request: KeeperRequest) -> None:
    """What the coordinator asks for."""
    match request:
        case Settled():
            keeper.settled(request)
            if peers is not None:
                peers.settled(request)
        case StoreSnapshot():
            keeper.store(request, peers.lend(request) if peers is not None else {})
        case Resend():
            keeper.resend()
        case Buddies() if peers is not None:
            peers.buddies(request)
        case KeepSnapshots() if peers is not None:
            peers.keep(request)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
