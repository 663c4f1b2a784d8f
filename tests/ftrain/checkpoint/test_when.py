"""Save decisions: every rank must come to the same one, and the last state of a run is never let go."""

from __future__ import annotations

import msgspec
import pytest

from ftrain.checkpoint.when import SaveDecision, StepFacts, decide, is_regular
from ftrain.config import Checkpoint

CONFIG = Checkpoint(snapshot_steps=10, every_steps=50)


def facts(step: int, **changed: bool) -> StepFacts:
    quiet = {"stop": False, "save": False, "no_slot": False, "uploading": False}
    return StepFacts(step=step, last_step=150, **(quiet | changed))


@pytest.mark.parametrize(
    ("step", "snapshot", "upload"),
    [(7, False, False), (10, True, False), (50, True, True), (150, True, True), (151, True, True)],
)
def test_intervals(step: int, snapshot: bool, upload: bool) -> None:
    assert decide(CONFIG, facts(step)) == SaveDecision(snapshot=snapshot, upload=upload)


@pytest.mark.parametrize("asked", ["stop", "save"])
def test_a_request_saves_to_storage_at_any_step(asked: str) -> None:
    assert decide(CONFIG, facts(7, **{asked: True})) == SaveDecision(snapshot=True, upload=True)


def test_zero_means_never_but_the_last_step_is_stored() -> None:
    never = Checkpoint(snapshot_steps=0, every_steps=0)
    assert not decide(never, facts(100)).snapshot
    assert decide(never, facts(150)).upload


def test_a_memory_snapshot_needs_a_slot_but_not_the_end_of_an_upload() -> None:
    skip = msgspec.structs.replace(CONFIG, if_busy="skip")
    assert decide(skip, facts(10, uploading=True)).snapshot
    assert not decide(skip, facts(10, no_slot=True)).snapshot
    assert decide(skip, facts(50, uploading=True)).skipped


@pytest.mark.parametrize("policy", ["wait", "skip", "fail"])
def test_policies_of_a_busy_save(policy: str) -> None:
    decision = decide(msgspec.structs.replace(CONFIG, if_busy=policy), facts(50, uploading=True))
    assert (decision.snapshot, decision.upload) == ((policy == "wait"),) * 2
    assert bool(decision.skipped) == (policy == "skip")
    assert bool(decision.failed) == (policy == "fail")


@pytest.mark.parametrize("policy", ["wait", "skip", "fail"])
@pytest.mark.parametrize("asked", [{}, {"stop": True}, {"save": True}])
def test_who_is_busy_changes_what_is_done_at_regular_steps_only(policy: str, asked: dict[str, bool]) -> None:
    config = msgspec.structs.replace(CONFIG, if_busy=policy, local_every_steps=4)
    assert [step for step in range(1, 13) if is_regular(config, step)] == [4, 8, 10, 12]
    for step in (step for step in range(1, 160) if not is_regular(config, step)):
        free, busy = decide(config, facts(step, **asked)), decide(config, facts(step, no_slot=True, uploading=True, **asked))
        assert (free.snapshot, free.upload, free.skipped, free.failed) == (busy.snapshot, busy.upload, "", "")
        assert (busy.skipped, busy.failed) == ("", "")


@pytest.mark.parametrize("policy", ["skip", "fail"])
@pytest.mark.parametrize("must", [facts(150, uploading=True), facts(7, stop=True, no_slot=True)])
def test_the_last_save_is_never_let_go_whatever_the_policy(policy: str, must: StepFacts) -> None:
    decision = decide(msgspec.structs.replace(CONFIG, if_busy=policy), must)
    assert decision == SaveDecision(snapshot=True, upload=True)
