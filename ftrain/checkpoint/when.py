"""When state is copied to memory and when it goes to storage: one pure decision per finished step, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from ftrain.config import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What all ranks know after a step: sums over ranks, so every rank decides alike."""

    step: int
    last_step: int
    stop: bool  # somebody asked the run to stop after this step
    save: bool  # somebody asked for a checkpoint now
    no_slot: bool  # some rank has no slot it may overwrite
    uploading: bool  # some rank's previous upload still runs


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecision:
    """What to do with the state now, and why. Who is to save waits first until it has a slot and no upload of its own runs."""

    snapshot: bool
    upload: bool
    skipped: str = ""  # set if the policy let a save go
    failed: str = ""  # set if the policy says a busy save fails


def is_due(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every`; 0 means never."""
    return every > 0 and step % every == 0


def is_regular(config: Checkpoint, step: int) -> bool:
    """Whether there is to be a snapshot after `step` without anybody asking for it. Only then does it matter who is busy."""
    return any(is_due(step, every) for every in (config.snapshot_steps, config.every_steps, config.local_every_steps))


def decide(config: Checkpoint, facts: StepFacts) -> SaveDecision:
    """The save decision after a step. The last save of a run is never skipped."""
    must = facts.stop or facts.save or facts.step >= facts.last_step
    upload = must or is_due(facts.step, config.every_steps)
    snapshot = upload or is_regular(config, facts.step)
    busy = snapshot and (facts.no_slot or (upload and facts.uploading))
    if not busy or must or config.if_busy == "wait":
        return SaveDecision(snapshot=snapshot, upload=upload)
    reason = f"the previous upload still runs at step {facts.step} (checkpoint.if_busy = {config.if_busy!r})"
    if config.if_busy == "fail":
        return SaveDecision(snapshot=False, upload=False, failed=reason)
    return SaveDecision(snapshot=False, upload=False, skipped=reason)
