"""A stop for a person leaves a packet on disk, and the report shows it until something is started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from ftrain.compose.packets import Packets, packet_file, waiting
from recovery import events
from recovery.events import Event, Verdict
from recovery.packet import Packet
from recovery.state import RunState, apply

VERDICT = Verdict(class_="disk_full", component="storage", first_failing_rank=1, reason="no space left", confidence=0.9)


def story(action: events.Action, verdict: Verdict = VERDICT) -> list[Event]:
    """A run that committed step 10, reached step 14 and was interrupted there."""
    record = [events.StepFinished(t=3.0 + n, attempt=0, step=n, t_begin=2.0 + n, t_end=3.0 + n) for n in range(1, 15)]
    return [
        events.RunStarted(t=0.0, run_id="runs/x"),
        events.AttemptStarted(t=1.0, attempt=0, ranks=2, source="init"),
        events.Ready(t=2.0, attempt=0, step=0),
        *record,
        events.CheckpointCommitted(t=18.0, attempt=0, step=10),
        events.InterruptionClassified(t=19.0, attempt=0, verdict_id="e1-v1", verdict=verdict),
        events.Decided(t=19.5, attempt=0, action=action, reason="nothing is gained by trying", verdict_id="e1-v1"),
    ]


def tell(folder: Path, told: list[Event], *, memory: int = 0) -> None:
    state = RunState()
    packets = Packets(folder, "ftrain run x.toml", lambda: state, stored=lambda keep: memory if keep else 0)
    for event in told:
        state = apply(state, event)
        packets.on_event(event)


def test_a_stop_leaves_a_packet_with_costs_and_the_command(tmp_path: Path) -> None:
    told = story("stop_for_human")
    tell(tmp_path, told)
    packet = waiting(told, tmp_path)
    assert isinstance(packet, Packet)
    assert packet.command == "ftrain run x.toml"
    assert packet.tried == ()  # this interruption is no earlier try
    assert packet.options[-1].costs.startswith("4 steps done again")
    assert "disk_full in storage, first rank 1" in packet.headline


@pytest.mark.parametrize(("class_", "costs"), [("software_error", 1), ("numeric_divergence", 4), ("disk_full", 4)])
def test_what_memory_holds_is_stored_before_the_run_is_left_and_costs_nothing(tmp_path: Path, class_: str, costs: int) -> None:
    told = story("stop_for_human", replace(VERDICT, class_=class_))
    tell(tmp_path, told, memory=13)
    packet = waiting(told, tmp_path)
    assert isinstance(packet, Packet)
    assert packet.options[-1].costs.startswith(f"{costs} steps done again")


def test_it_is_shown_until_something_is_started_again(tmp_path: Path) -> None:
    told = story("stop_for_human")
    tell(tmp_path, told)
    told += [events.RunStarted(t=30.0, run_id="runs/x"), events.AttemptStarted(t=31.0, attempt=1, ranks=2, source="storage")]
    assert waiting(told, tmp_path) is None


def test_a_restart_leaves_none(tmp_path: Path) -> None:
    tell(tmp_path, story("restart"))
    assert not (tmp_path / "packets").exists()


def test_a_folder_that_cannot_be_written_does_not_stop_the_supervisor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "packets").write_text("in the way")
    tell(tmp_path, story("stop_for_human"))
    assert str(packet_file(tmp_path, "e1-v1")) in caplog.text


@pytest.mark.parametrize(
    ("reason", "watch"), [("loss spike: 9 is 30 robust deviations above 1", "spike_z"), ("loss not finite", "nonfinite_steps")]
)
def test_a_run_in_doubt_goes_back_and_a_person_can_say_that_nothing_is_wrong(tmp_path: Path, reason: str, watch: str) -> None:
    verdict = Verdict(class_="numeric_divergence", component="numerics", reason=reason)
    told = story("stop_for_human")
    told[-2:-2] = [events.Suspected(t=18.5, attempt=0, since=18.0, reason=reason, onset=9, until=14)]
    told[-2] = events.InterruptionClassified(t=19.0, attempt=0, verdict_id="e1-v1", verdict=verdict)
    state = RunState()
    packets = Packets(tmp_path, "ftrain run x.toml", lambda: state, skips=())
    for event in told:
        state = apply(state, event)
        packets.on_event(event)
    packet = waiting(told, tmp_path)
    assert packet is not None
    *_, trusting, again = packet.options
    assert trusting.command == f"ftrain run x.toml --set recovery.{watch}=0"
    assert again.what == "go back to before step 9 and try again"
    assert (
        again.costs == "the steps since the newest checkpoint before step 9 done again, and the same failure if nothing changed"
    )
