"""The webhook of a stop, against a real server on loopback: what arrives, and that nobody waits for one that hangs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ftrain.compose.packets import packet_file
from ftrain.compose.webhook import announce, stop_packet, tell
from recovery.events import Decided
from recovery.packet import Packet
from recovery.state import RunState
from tests.hooks import hook

PACKET = Packet(headline="software_error in software", cause="a bug", reason="it failed twice alike", evidence=(), tried=(),
                options=(), command="ftrain run my.toml")  # fmt: skip


def test_the_packet_arrives_with_a_text_for_people() -> None:
    with hook() as server:
        assert announce(server.url, PACKET, run_url="runs/mine", limit_s=10) == ""
    (received,) = server.received
    assert received["run"] == "runs/mine"
    assert received["packet"]["command"] == "ftrain run my.toml"
    assert received["text"].startswith("runs/mine: software_error in software\n")


def test_a_server_in_trouble_is_asked_once_more_and_a_refusal_is_final() -> None:
    with hook(503, 200) as server:
        assert announce(server.url, PACKET, run_url="r", limit_s=10) == ""
    assert len(server.received) == 2
    with hook(403) as server:
        assert announce(server.url, PACKET, run_url="r", limit_s=10) == "answered 403"
    assert len(server.received) == 1


def test_one_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    with hook(drip=release) as server:
        assert announce(server.url, PACKET, run_url="r", limit_s=0.2) == "no answer within 0.2 s"
        assert not release.is_set()  # the server still hangs


def test_nobody_there_is_said() -> None:
    assert "refused" in announce("http://127.0.0.1:9/hook", PACKET, run_url="r", limit_s=5)


def test_only_a_stop_for_a_person_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import msgspec

    path = packet_file(tmp_path, "v1")
    path.parent.mkdir()
    path.write_bytes(msgspec.json.encode(PACKET))
    stop = RunState(last_decision=Decided(t=0, action="stop_for_human", reason="", verdict_id="v1"))
    assert stop_packet(tmp_path, stop) == PACKET
    assert stop_packet(tmp_path, RunState(last_decision=Decided(t=0, action="restart", reason="", verdict_id="v1"))) is None
    assert stop_packet(tmp_path, RunState()) is None
    with hook(500, 500) as server:
        tell(server.url, tmp_path, stop, run_url="r", limit_s=10)
        tell(server.url, tmp_path, RunState(), run_url="r", limit_s=10)
        tell("", tmp_path, stop, run_url="r", limit_s=10)
    assert len(server.received) == 2  # one stop, asked twice
    assert "answered 500" in caplog.text
