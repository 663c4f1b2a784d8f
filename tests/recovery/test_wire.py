"""Frames: whole or not at all, descriptors to the right frame, nothing a peer sends can do harm."""

from __future__ import annotations

import fcntl
import os
import socket
import stat

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.messages import FromKeeper, Numbered, Payload, Ping, SetControl, ToAgent
from recovery.wire import HEADER, MAX_DESCRIPTORS, WireError, channel, connect, listen, peer_uid, socket_pair


def pair(messages=Payload | Ping, **options):
    left, right = socket_pair()
    return channel(left, messages, **options), channel(right, messages, **options)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@given(payloads=st.lists(st.binary(max_size=300), max_size=20), cuts=st.lists(st.integers(1, 50), max_size=50))
def test_frames_survive_any_cut_of_the_stream(payloads, cuts):
    left, right = socket_pair()
    receiver = channel(right, Payload)
    encoder = msgspec.msgpack.Encoder()
    bodies = [encoder.encode(Payload(payload=payload)) for payload in payloads]
    stream = b"".join(HEADER.pack(len(body), 0) + body for body in bodies)
    received = []
    for cut in [*cuts, max(1, len(stream))]:
        left.sendall(stream[:cut])
        stream = stream[cut:]
        received += receiver.read()
    assert [frame.message.payload for frame in received] == payloads
    left.close()
    receiver.close()


def test_numbered_messages_keep_their_type():
    sender, receiver = pair(Numbered)
    sender.send(Numbered(seq=3, message=FromKeeper(payload=b"x")))
    assert receiver.receive(1.0).message == Numbered(seq=3, message=FromKeeper(payload=b"x"))
    sender.close()
    receiver.close()


def test_large_frame_waits_in_the_queue_and_arrives_whole():
    sender, receiver = pair()
    big = bytes(range(256)) * 40_000
    sender.send(Payload(payload=big))
    assert sender.wants_write
    frames = []
    while not frames:
        sender.flush()
        frames = receiver.read()
    assert frames[0].message.payload == big
    assert sender.queued_bytes == 0
    sender.close()
    receiver.close()


def test_descriptors_go_to_their_own_frame_and_are_close_on_exec(tmp_path):
    before = open_fds()
    sender, receiver = pair()
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    fds = {name: os.open(tmp_path / name, os.O_RDONLY) for name in ("a", "b", "c")}
    sender.send(Payload(payload=b"x" * 1_000_000), [fds["a"], fds["b"]])
    sender.send(Ping())
    sender.send(Payload(payload=b"c"), [fds["c"]])
    for fd in fds.values():
        os.close(fd)  # the channel has duplicates of its own
    frames = []
    while len(frames) < 3:
        sender.flush()
        frames += receiver.read()
    assert [len(frame.fds) for frame in frames] == [2, 0, 1]
    received = [fd for frame in frames for fd in frame.fds]
    assert [os.read(fd, 1) for fd in received] == [b"a", b"b", b"c"]
    assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in received)
    for fd in received:
        os.close(fd)
    sender.close()
    receiver.close()
    assert open_fds() == before


def test_undelivered_descriptors_are_closed(tmp_path):
    before = open_fds()
    sender, receiver = pair()
    (tmp_path / "f").touch()
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    sender.send(Payload(payload=b"x" * 4_000_000))  # fills the socket
    sender.send(Ping(), [fd])
    os.close(fd)
    receiver.close()
    sender.close()
    assert open_fds() == before


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        pytest.param((2**31, 0), b"", "over the limit", id="huge"),
        pytest.param((2, MAX_DESCRIPTORS + 1), b"", "over the limit", id="many-descriptors"),
        pytest.param((3, 0), b"\xc1\xc1\xc1", "not a message", id="garbage"),
        pytest.param((1, 0), b"\x80", "not a message", id="no-tag"),
        pytest.param((13, 0), msgspec.msgpack.encode({"type": "Fly", "x": 1})[:13], "not a message", id="unknown-type"),
        pytest.param((11, 2), msgspec.msgpack.encode({"type": "Ping"}), "2 descriptors announced, 0 received", id="no-fds"),
    ],
)
def test_a_broken_peer_is_disconnected(header, body, message):
    left, right = socket_pair()
    receiver = channel(right, Payload | Ping)
    left.sendall(HEADER.pack(*header) + body)
    with pytest.raises(WireError, match=message):
        receiver.receive(1.0)
    assert receiver.closed
    left.close()


def test_unknown_fields_are_refused():
    left, right = socket_pair()
    receiver = channel(right, ToAgent)
    body = msgspec.msgpack.encode({"type": "SetControl", "stop": True, "save": 1, "extra": 1})
    left.sendall(HEADER.pack(len(body), 0) + body)
    with pytest.raises(WireError, match="extra"):
        receiver.receive(1.0)
    left.close()


def test_own_messages_over_the_limit_are_refused_before_they_are_sent():
    sender, receiver = pair(max_frame=100)
    with pytest.raises(WireError, match="over the frame limit of 100"):
        sender.send(Payload(payload=b"x" * 200))
    sender.send(SetControl(stop=True, save=1))
    assert not sender.closed
    sender.close()
    receiver.close()


def test_end_of_stream_comes_after_the_last_frame():
    sender, receiver = pair()
    sender.send(Payload(payload=b"last words"))
    sender.close()
    assert receiver.receive(1.0).message.payload == b"last words"
    assert receiver.receive(1.0) is None
    assert receiver.closed
    receiver.close()


def test_the_last_words_of_the_dead_are_read_also_by_who_was_just_writing_to_them():
    sender, receiver = pair()
    sender.send(Payload(payload=b"last words"))
    sender.close()
    receiver.send(Ping())
    assert receiver.closed
    assert [frame.message.payload for frame in receiver.read()] == [b"last words"]


def test_who_waits_for_an_answer_of_one_that_dies_before_it_has_read_the_question_waits_no_longer():
    sender, receiver = pair()
    sender.send(Payload(payload=bytes(8 << 20)))
    assert sender.wants_write
    receiver.close()
    assert sender.receive(20.0) is None
    assert sender.closed


def test_sending_to_the_dead_is_not_an_error():
    sender, receiver = pair()
    receiver.close()
    sender.send(Ping())
    sender.send(Ping())
    assert sender.closed


def test_receive_gives_up_in_time():
    sender, receiver = pair()
    assert receiver.receive(0.0) is None
    assert not receiver.closed
    sender.close()
    receiver.close()


def test_a_listener_may_lie_as_deep_as_it_likes(tmp_path):
    folder = tmp_path / ("deep-" * 20) / ("deeper-" * 20)
    folder.mkdir(parents=True)
    path = folder / "coordinator.sock"
    for _ in range(2):  # the second replaces what the first left behind
        listener = listen(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        client = connect(path)
        listener.setblocking(True)
        server, _ = listener.accept()
        assert peer_uid(server) == os.getuid()
        for sock in (client, server, listener):
            sock.close()
    with pytest.raises(ConnectionRefusedError):
        connect(path)
    with pytest.raises(FileNotFoundError):
        connect(folder / "nothing")


def test_a_folder_that_cannot_hold_a_socket_is_a_clear_error(tmp_path):
    with pytest.raises((WireError, OSError)):
        listen(tmp_path / "missing" / "x.sock")


def test_sockets_are_close_on_exec():
    for sock in socket_pair():
        assert isinstance(sock, socket.socket)
        assert not sock.get_inheritable()
        sock.close()
