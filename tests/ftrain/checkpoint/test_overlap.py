"""Saves that return before their copy: what waits for it, what is never put off, what is refused, and what a kill leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftrain
from ftrain.checkpoint import script_slots
from ftrain.checkpoint.checkpointer import Checkpointer
from ftrain.checkpoint.copy import CopyPair, run_copy
from ftrain.checkpoint.record import StateError
from ftrain.checkpoint.script_slots import ScriptSlots
from storage.local import LocalStore
from storage.run import RunStore


def state_of() -> dict[str, Any]:
    """A model with parameters and buffers, an optimizer that has stepped, and an average that somebody else changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "average": torch.zeros(30, 40)}
    forward_backward(state)
    optimizer.step()
    return state


def forward_backward(state: dict[str, Any]) -> None:
    """Changes gradients, and the running statistics of the normalization."""
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, 40)).square().mean().backward()


class Held:
    """The copy beside training stands still until somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits = 0
        self._may_go = threading.Event()
        self._finish = ScriptSlots.finish
        monkeypatch.setattr(script_slots, "run_copy", self.copy)
        monkeypatch.setattr(ScriptSlots, "finish", lambda slots: self.finish(slots))

    def copy(self, pairs: list[CopyPair]) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self._may_go.wait(60)
        run_copy(pairs)

    def finish(self, slots: ScriptSlots) -> None:
        self.waits += slots.copying
        self._may_go.set()
        self._finish(slots)
        self._may_go.clear()


@pytest.mark.parametrize("steps_by", ["optimizer", "wait_copied", "next save"])
def test_what_is_stored_is_the_state_at_the_call_although_it_changes_right_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_by: str
) -> None:
    state = state_of()
    blocking = Checkpointer(str(tmp_path / "blocking"))
    blocking.load(state)
    blocking.save(1, state)
    blocking.close()
    held = Held(monkeypatch)
    overlapped = Checkpointer(str(tmp_path / "overlapped"), overlap=True)
    overlapped.load(state)
    overlapped.save(1, state)
    assert held.waits == 0
    forward_backward(state)  # buffers change beside the copy
    state["average"].fill_(7)
    if steps_by == "optimizer":
        state["optimizer"].step()
    elif steps_by == "wait_copied":
        assert overlapped.wait_copied() >= 0
        assert overlapped.wait_copied() == 0
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.zero_()
    else:
        overlapped.save(2, state)
    assert held.waits == 1
    overlapped.close()
    state["optimizer"].step()  # the hooks are gone
    assert held.waits == (2 if steps_by == "next save" else 1)
    expected, found = (RunStore(LocalStore(str(tmp_path / name))).open(1) for name in ("blocking", "overlapped"))
    assert found.verify().ok
    assert found.manifest.digests == expected.manifest.digests
    assert len(found.manifest.digests) == 20  # 4 parameters, 3 buffers, 3 of the optimizer for each parameter, the average


def test_an_optimizer_that_is_loaded_waits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of()
    held = Held(monkeypatch)
    checkpointer = Checkpointer(str(tmp_path), overlap=True)
    checkpointer.load(state)
    checkpointer.save(1, state)
    state["optimizer"].load_state_dict(state["optimizer"].state_dict())
    assert held.waits == 1
    checkpointer.close()


def test_an_optimizer_that_was_replaced_is_let_go(tmp_path: Path) -> None:
    state = state_of()
    checkpointer = Checkpointer(str(tmp_path), overlap=True)
    checkpointer.load(state)
    replaced, state["optimizer"] = state["optimizer"], torch.optim.SGD(state["model"].parameters(), momentum=0.9)
    checkpointer.save(1, state)
    assert [held for held, _ in checkpointer._beside._hooks.values()] == [state["optimizer"]]
    assert not replaced._optimizer_step_pre_hooks
    checkpointer.close()
    assert not state["optimizer"]._optimizer_step_pre_hooks


def test_a_state_that_nobody_could_wait_for_is_refused_before_training(tmp_path: Path) -> None:
    state = {"w": torch.zeros(10)}
    checkpointer = Checkpointer(str(tmp_path), overlap=True)
    with pytest.raises(StateError, match=r'the state has none: put it in, or say overlap="manual" and call wait_copied'):
        checkpointer.load(state)
    checkpointer.close()


def test_manual_puts_off_everything_until_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.zeros(300, 300), "scalar": torch.tensor(3.0)}
    held = Held(monkeypatch)
    checkpointer = Checkpointer(str(tmp_path), overlap="manual")
    checkpointer.load(state)
    for step in (1, 2, 3):
        state["w"].fill_(step)
        checkpointer.save(step, state)
        checkpointer.wait_copied()
        state["w"].fill_(-1)
    assert checkpointer.wait() == 3
    checkpointer.close()
    assert held.waits == 3
    run = RunStore(LocalStore(str(tmp_path)))
    assert [float(run.open(step).read("w").max()) for step in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.parametrize("keeper", ["lives", "dies"])
def test_a_copy_that_fails_is_that_saves_failure_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeper: str
) -> None:
    state = state_of()
    checkpointer = Checkpointer(str(tmp_path), overlap=True, on_error="raise")
    checkpointer.load(state)
    with monkeypatch.context() as patched:

        def fails(pairs: list[CopyPair]) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise MemoryError("no page")

        patched.setattr(script_slots, "run_copy", fails)
        checkpointer.save(1, state)
        process = checkpointer._keepers.link()._process
        if keeper == "dies":
            process.send_signal(signal.SIGSTOP)
        state["optimizer"].step()
        if keeper == "dies":  # before it has heard of it: its successor must
            process.kill()
            process.wait()
    with pytest.raises(ftrain.SaveError, match=r"step 1 is not saved: .*the copy failed: MemoryError: no page"):
        checkpointer.wait()
    checkpointer.save(2, state)
    assert checkpointer.wait() == 2
    checkpointer.close()


def test_what_changes_during_the_copy_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An embedding's max_norm, a forgotten wait_copied: a mixture of old and new values must not become a checkpoint. It is
    told once, though the keeper of the only rank has to tell it of its share and of the whole.
    """
    state = state_of()
    checkpointer = Checkpointer(str(tmp_path), overlap=True, on_error="raise")
    checkpointer.load(state)
    Held(monkeypatch)
    checkpointer.save(1, state)
    torch.nn.init.ones_(state["model"][0].weight)
    with pytest.raises(
        ftrain.SaveError, match=r"step 1 is not saved: .*changed while it was copied: model/0\.weight; call"
    ) as told:
        checkpointer.wait()
    assert str(told.value).count("step 1") == caplog.text.count("step 1 is not saved") == 1
    checkpointer.save(2, state)
    assert checkpointer.wait() == 2
    checkpointer.close()
    assert [info.step for info in RunStore(LocalStore(str(tmp_path))).checkpoints() if info.state == "valid"] == [2]


def test_all_threads_that_step_optimizers_wait_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward may step them on a thread for each device: the second must not take the first one's waiting for an end."""
    state, go, copying = state_of(), threading.Event(), threading.Event()

    def copy(pairs: list[CopyPair]) -> None:
        if threading.current_thread().name.startswith("ftrain-copy"):
            copying.set()
            assert go.wait(60)
        run_copy(pairs)

    monkeypatch.setattr(script_slots, "run_copy", copy)
    checkpointer = Checkpointer(str(tmp_path), overlap=True)
    checkpointer.load(state)
    checkpointer.save(1, state)
    assert copying.wait(60)
    stepped, entered = threading.Semaphore(0), threading.Semaphore(0)
    finish = ScriptSlots.finish

    def told(slots: ScriptSlots) -> None:
        entered.release()
        finish(slots)

    def step() -> None:
        state["optimizer"].step()
        stepped.release()

    monkeypatch.setattr(ScriptSlots, "finish", told)
    threads = [threading.Thread(target=step) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.acquire(timeout=60)
    assert entered.acquire(timeout=60)
    assert not stepped.acquire(timeout=0.2), "a step came before the end of the copy"
    go.set()
    for thread in threads:
        thread.join()
    assert checkpointer.wait() == 1
    checkpointer.close()


SCRIPT = """
import os, threading, torch, ftrain
from ftrain.checkpoint import script_slots
from ftrain.checkpoint.copy import run_copy
model = torch.nn.Linear(2000, 1000)
optimizer = torch.optim.AdamW(model.parameters())
state = {{"model": model, "optimizer": optimizer}}
def step():
    optimizer.zero_grad(); model(torch.ones(2, 2000)).square().mean().backward(); optimizer.step()
step()
c = ftrain.Checkpointer({folder!r}, overlap=True)
c.load(state); c.save(1, state); c.wait()
torch.nn.init.ones_(model.weight)
if {in_the_copy}:
    def stuck(pairs):
        if threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), 9)
        run_copy(pairs)
    script_slots.run_copy = stuck
c.save(2, state)
step()
os.kill(os.getpid(), 9)
"""


@pytest.mark.chaos
@pytest.mark.parametrize(("in_the_copy", "newest"), [pytest.param(True, 1, marks=pytest.mark.slow), (False, 2)])
def test_what_a_kill_leaves(tmp_path: Path, in_the_copy: bool, newest: int) -> None:
    """In the copy: nothing of it. Right after the next step: all of it, as it was before that step."""
    script = SCRIPT.format(folder=str(tmp_path), in_the_copy=in_the_copy)
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    assert done.returncode == -9, done.stderr
    run = RunStore(LocalStore(str(tmp_path)))  # the keeper has left: it holds the same stderr
    assert run.open().step == newest, done.stderr
    assert not list(tmp_path.glob(f"checkpoints/step-{newest + 1:08d}/*.pack"))
    weight = run.open().read("model/weight")
    assert bool((weight == 1).all()) == (newest == 2)
