"""Notices in the forms in which the clouds and Slurm give them (examples from their manuals), from files and servers."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from recovery.horizon import Notice
from recovery.notice import Lookout, notice_at, probe, read_left, read_notice, slurm, sources
from recovery.preflight import Concern

AZURE = (
    '{"DocumentIncarnation": 1, "Events": [{"EventId": "1", "EventType": "Preempt", "ResourceType": "VirtualMachine", '
    '"NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"}, {"EventType": "Freeze", "NotBefore": ""}]}'
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param('{"action": "terminate", "time": "2017-09-18T08:22:00Z"}', ("preemption", 1505722920.0), id="aws spot"),
        pytest.param(AZURE, ("preemption", 1474309787.0), id="azure"),
        pytest.param('{"Events": []}', None, id="azure quiet"),
        pytest.param('{"Events": [{"EventType": "Freeze"}]}', None, id="azure pause"),
        pytest.param("TRUE", ("preemption", None), id="google preempted"),
        pytest.param("FALSE\n", None, id="google not preempted"),
        pytest.param("NONE", None, id="google no maintenance"),
        pytest.param("TERMINATE_ON_HOST_MAINTENANCE", ("host_maintenance", None), id="google maintenance"),
        pytest.param("1700000000", ("preemption", 1_700_000_000.0), id="a unix time"),
        pytest.param("2023-11-14T22:13:20+00:00", ("preemption", 1_700_000_000.0), id="a date"),
        pytest.param("[1, 2]", ("preemption", None), id="something else"),
        pytest.param("nan", ("preemption", None), id="no time"),
        pytest.param("[" * 60_000, ("preemption", None), id="JSON that overwhelms its parser"),
        pytest.param("1e400", ("preemption", None), id="no time that a clock shows"),
    ],
)
def test_forms_of_a_notice(text: str, expected: tuple[str, float | None] | None) -> None:
    found = read_notice(text, by="x")
    assert (None if found is None else (found.class_, found.ends_t)) == expected


@pytest.mark.parametrize("text", ["garbage words", '{"Events": 3}', '{"time": "soon"}', "[1, 2]"])
def test_words_that_nobody_understands_are_quoted(text: str) -> None:
    """Somebody has put them there, so they are a notice; who wonders why the run stopped is told what they were."""
    found = read_notice(f"{text}\n", by="notice x")
    assert found == Notice(class_="preemption", by=f"notice x, which says {text!r}")
    long = read_notice("w" * 5000, by="notice x")
    assert long is not None
    assert long.by == f"notice x, which says {'w' * 80 + '...'!r}"
    assert [read_notice(known, by="x") for known in ("TRUE", "1700000000")] == [
        Notice(class_="preemption", by="x"),
        Notice(class_="preemption", by="x", ends_t=1.7e9),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, ""),
        ("FALSE", ""),
        ("", "nobody says when, so this step is the last. If that is an old notice, take it away first"),
        ("2020-01-01T00:00:00Z", "its time, 2020-01-01 00:00:00 UTC, is over, so this step is the last. If that is an old"),
        ("9000-01-01T00:00:00Z", " s are left of this machine"),
    ],
)
def test_before_a_start_a_file_is_looked_at(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "notice"
    if text is not None:
        path.write_text(text)
    if not says:
        assert probe(str(path)) == f"{path} announces nothing"
        return
    with pytest.raises(Concern, match=re.escape(says)):
        probe(str(path))


def test_before_a_start_a_place_where_no_notice_can_appear_is_told(tmp_path: Path) -> None:
    with pytest.raises(Concern, match=rf"there is no folder {tmp_path}/none, so no notice can appear in it"):
        probe(str(tmp_path / "none/notice"))
    with pytest.raises(Concern, match=rf"{tmp_path} cannot be asked .*no notice will be heard of"):
        probe(str(tmp_path))
    with metadata_server() as url:
        pass
    with pytest.raises(Concern, match=f"{url} cannot be asked"):
        probe(url)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-02:03:04\n", 93_784.0), ("02:03:04", 7384.0), ("3:04", 184.0), ("UNLIMITED", None), ("INVALID", None), ("", None)],
)
def test_slurm_durations(text: str, seconds: float | None) -> None:
    assert read_left(text) == seconds


def test_slurm_is_asked_now_and_then_and_what_it_says_last_holds() -> None:
    asked: list[str] = []
    answers = iter(["10:00", None, "20:00"])

    def ask(job: str) -> str | None:
        asked.append(job)
        return next(answers)

    look = slurm({"SLURM_JOB_ID": "42", "SLURM_JOB_END_TIME": "5000"}, ask)
    ends = [getattr(look(now_t), "ends_t", None) for now_t in (1000.0, 1030.0, 1060.0, 1120.0)]
    assert ends == [1600.0, 1600.0, 1600.0, 2320.0]  # asked at 1000, not at 1030; silence at 1060; the limit moved
    assert asked == ["42"] * 3


def test_without_an_answer_the_job_ends_when_it_was_started_to_end() -> None:
    look = slurm({"SLURM_JOB_ID": "42", "SLURM_JOB_END_TIME": "5000"}, lambda job: None)
    assert look(0.0) == Notice(class_="time_limit", by="time limit of Slurm job 42", ends_t=5000.0)
    assert slurm({"SLURM_JOB_ID": "42"}, lambda job: "UNLIMITED")(0.0) is None


def test_a_file_is_a_notice_as_soon_as_it_is_there(tmp_path: Path) -> None:
    look = notice_at(str(tmp_path / "notice"))
    assert look(0.0) is None
    (tmp_path / "notice").touch()
    assert look(0.0) == Notice(class_="preemption", by=f"notice {tmp_path / 'notice'}")


@contextmanager
def metadata_server(*, token: str = "", body: str | None = None) -> Iterator[str]:
    """A cloud's metadata service; with `token` it insists on one, as AWS does."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, text: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            self.answer(200 if self.headers["X-aws-ec2-metadata-token-ttl-seconds"] else 400, token)

        def do_GET(self) -> None:
            if token and self.headers.get("X-aws-ec2-metadata-token") != token:
                self.answer(401)
            else:
                self.answer(404) if body is None else self.answer(200, body)

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/latest/meta-data/spot/instance-action"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is a thread of ours, which a busy machine may keep waiting."""
    monkeypatch.setattr("recovery.notice.ASK_LIMIT_S", 60.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("token", ["", "secret"])
def test_a_server_that_has_one(token: str) -> None:
    with metadata_server(token=token, body='{"action": "stop", "time": "2017-09-18T08:22:00Z"}') as url:
        found = notice_at(url)(0.0)
    assert found == Notice(class_="preemption", by="notice of 127.0.0.1", ends_t=1505722920.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("token", ["", "secret"])
def test_a_server_that_has_none(token: str) -> None:
    with metadata_server(token=token) as url:
        assert notice_at(url)(0.0) is None


def test_a_server_that_is_not_there_is_no_notice() -> None:
    with metadata_server() as url:
        pass
    lookout = Lookout([notice_at(url)], poll_s=60.0, clock=lambda: 0.0)
    lookout.look()
    assert lookout.notice is None
    lookout.close()


def test_who_is_asked() -> None:
    assert len(sources({}, "")) == 0
    assert len(sources({"SLURM_JOB_ID": "1"}, "/somewhere")) == 2
