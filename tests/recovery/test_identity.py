"""Both ends of a connection prove that they hold the run's key; whoever does not is nobody."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from pathlib import Path

import pytest

from recovery.identity import IdentityError, context, make_identity
from recovery.messages import ClientReply, ClientRequest, ToCoordinator
from recovery.tls import TlsChannel, dial, tls_channel
from recovery.wire import MAX_FRAME, WireError

LIMIT_S = 10.0


def connected(server_key: Path, client_key: Path) -> tuple[TlsChannel, TlsChannel]:
    """A coordinator's and an agent's end, over the loopback network."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[TlsChannel] = []

        def accept() -> None:
            sock, _ = listener.accept()
            accepted.append(tls_channel(sock, context(server_key, server=True), ToCoordinator, server=True))
            accepted[0].receive(LIMIT_S)  # carries the handshake on; its first frame, if there is one, is looked at by nobody

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            port = listener.getsockname()[1]
            client = dial("127.0.0.1", port, context(client_key, server=False), ClientReply, limit_s=LIMIT_S)
            client.send(ClientRequest(kind="first"))
        finally:
            thread.join(LIMIT_S)
    return accepted[0], client


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_identity(tmp_path / "control")


def test_the_key_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = make_identity(tmp_path / "control")
    first = path.read_bytes()
    assert make_identity(tmp_path / "control").read_bytes() == first
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(it.name for it in path.parent.iterdir()) == ["identity.pem"]


def test_of_many_who_make_one_at_once_all_get_the_same(tmp_path: Path) -> None:
    threads = [threading.Thread(target=make_identity, args=(tmp_path,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(it.name for it in tmp_path.iterdir()) == ["identity.pem"]


def test_frames_of_any_size_cross_in_both_directions(key: Path) -> None:
    server, client = connected(key, key)
    for size in (0, 1, 70_000, 3 << 20):
        data = {"text": "x" * size}
        done = threading.Thread(target=lambda: client.drain(LIMIT_S))
        client.send(ClientRequest(kind="k", args=data))
        done.start()
        frame = server.receive(LIMIT_S)
        done.join()
        assert frame is not None
        assert frame.message.args == data
    server.send(ClientReply(ok=True, data={"a": 1}))
    frame = client.receive(LIMIT_S)
    assert frame is not None
    assert frame.message.data == {"a": 1}
    client.close()
    assert server.receive(LIMIT_S) is None
    assert server.by_peer  # the other end's machine has said so: this is no mere silence


def test_a_key_of_another_run_opens_nothing(tmp_path: Path, key: Path) -> None:
    other = make_identity(tmp_path / "other")
    with pytest.raises(ssl.SSLError):  # the agent does not believe the coordinator
        connected(key, other)
    assert os.path.exists(other)


def speak(sock: ssl.SSLSocket) -> None:
    """Say something and wait for an answer."""
    with sock:
        sock.sendall(b"\x05\0\0\0\0\0\0\0hello")
        assert sock.recv(1) == b"an answer"


def test_a_client_without_a_certificate_is_hung_up_on_and_nothing_it_says_is_heard(key: Path) -> None:
    naked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    naked.check_hostname = False
    naked.load_verify_locations(cafile=key)
    heard: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            sock, _ = listener.accept()
            channel = tls_channel(sock, context(key, server=True), ToCoordinator, server=True)
            heard.append(channel.receive(LIMIT_S))
            heard.append(channel.closed)

        thread = threading.Thread(target=accept)
        thread.start()
        with socket.create_connection(listener.getsockname(), timeout=LIMIT_S) as sock, pytest.raises(OSError):
            speak(naked.wrap_socket(sock))  # in TLS 1.3 the refusal comes with the first answer, or while it is still speaking
        thread.join(LIMIT_S)
    assert heard == [None, True]


def test_noise_is_hung_up_on(key: Path) -> None:
    heard: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            sock, _ = listener.accept()
            channel = tls_channel(sock, context(key, server=True), ToCoordinator, server=True)
            heard.extend((channel.receive(LIMIT_S), channel.closed))

        thread = threading.Thread(target=accept)
        thread.start()
        with socket.create_connection(listener.getsockname(), timeout=LIMIT_S) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            thread.join(LIMIT_S)
    assert heard == [None, True]


def test_the_size_cap_holds_over_tls_too(key: Path) -> None:
    server, client = connected(key, key)
    client.sock.send((MAX_FRAME + 1).to_bytes(4, "little") + bytes(4))
    with pytest.raises(WireError, match="over the limit"):
        server.receive(LIMIT_S)
    client.close()


def test_descriptors_do_not_travel_between_machines(key: Path) -> None:
    server, client = connected(key, key)
    with pytest.raises(WireError, match="between machines"):
        client.send(ClientRequest(kind="k"), (0,))
    server.close()
    client.close()


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_may_read_is_refused(key: Path, mode: int) -> None:
    key.chmod(mode)
    with pytest.raises(IdentityError, match="may be read by others"):
        context(key, server=False)


def test_a_key_that_is_not_there_or_is_none_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="No such file"):
        context(tmp_path / "identity.pem", server=False)
    (tmp_path / "identity.pem").write_text("no key")
    (tmp_path / "identity.pem").chmod(0o600)
    with pytest.raises(IdentityError, match="not a key with its certificate"):
        context(tmp_path / "identity.pem", server=False)
