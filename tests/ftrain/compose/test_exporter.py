"""The metrics of a run as Prometheus would read them, from the file and from the port."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest

from ftrain.compose.exporter import Exporter
from recovery import events
from recovery.events import encode_line
from tests.free_ports import later


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A local folder whose ledger knows of one finished step."""
    (tmp_path / "ledger").mkdir()
    told = [
        events.RunStarted(t=100.0, run_id="runs/x"),
        events.AttemptStarted(t=101.0, attempt=0, ranks=2, source="init"),
        events.Ready(t=102.0, attempt=0, step=0),
        events.StepFinished(t=104.0, attempt=0, step=1, t_begin=102.0, t_end=104.0, loss=2.5, tokens=64),
    ]
    (tmp_path / "ledger" / "e0001-000001.jsonl.open").write_bytes(b"".join(map(encode_line, told)))
    return tmp_path


def test_the_last_edition_holds_what_the_ledger_holds(folder: Path) -> None:
    Exporter(folder).close()
    lines = (folder / "metrics.prom").read_text().splitlines()
    assert 'ftrain_step{run="runs/x"} 1' in lines
    assert 'ftrain_effective_time_ratio{run="runs/x"} 0.5' in lines  # 2 s of step in 4 s
    assert 'ftrain_tokens_total{run="runs/x"} 64' in lines


def test_it_is_served_on_loopback(folder: Path) -> None:
    Exporter(folder).close()
    port = later()
    exporter = Exporter(folder, port=port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert b"ftrain_loss" in answer.read()
    finally:
        exporter.close()


def test_a_taken_port_costs_the_metrics_only(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        exporter = Exporter(folder, port=taken.getsockname()[1])
        exporter.close()
    assert exporter.unserved.startswith("no metrics are served on port ")
    assert "set another recovery.metrics_port" in exporter.unserved
    assert (folder / "metrics.prom").exists()


def test_a_run_in_which_nothing_has_happened_has_no_metrics(tmp_path: Path) -> None:
    Exporter(tmp_path).close()
    assert not (tmp_path / "metrics.prom").exists()
