"""ftrain.Checkpointer in one process: what it saves, what it finds, what it refuses, and what it survives."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import ftrain
from ftrain.checkpoint.bind import Binder
from ftrain.checkpoint.checkpointer import Checkpointer
from ftrain.checkpoint.record import StateError
from ftrain.checkpoint.script_link import SaveError
from storage.errors import NoCheckpoint
from storage.local import LocalStore
from storage.run import RunStore

ROOT = Path(__file__).parents[3]


@contextmanager
def open_run(folder: Path, **options: Any) -> Iterator[Checkpointer]:
    """A checkpointer that is closed in any case."""
    checkpointer = Checkpointer(str(folder), **options)
    try:
        yield checkpointer
    finally:
        checkpointer.close()


def state_of(seed: int) -> dict[str, Any]:
    """A model with an optimizer that has stepped, a schedule, random generators, and odds and ends."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed, amsgrad=True)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 5], gamma=0.1)
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "random": ftrain.per_rank(ftrain.RandomState()),
        "average": {"w": torch.randn(3, 3, dtype=torch.float64).T, "half": torch.randn(7).to(torch.bfloat16)},
        "seen": [1, (2.5, None), {7: b"\0"}],
        "mask": torch.tensor([True, False]),
        "wave": torch.randn(3, dtype=torch.complex64),
        "eight": torch.randn(5).to(torch.float8_e4m3fn),
        "nothing": torch.empty(0, 4),
        "note": "seed",
    }
    train(state, seed)
    return state


def train(state: dict[str, Any], steps: int) -> list[float]:
    """A few steps; dropout and data come from the generators."""
    losses = []
    for _ in range(steps):
        loss = state["model"](torch.randn(4, 6)).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["schedule"].step()
        losses.append(loss.item())
    return losses


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    state = state_of(3)
    with open_run(tmp_path) as checkpointer:
        assert checkpointer.load(state) == 0
        checkpointer.save(3, state)
    expected = train(state, 4)
    found = state_of(1)
    with open_run(tmp_path) as checkpointer:
        assert checkpointer.load(found) == 3
    assert train(found, 4) == expected
    assert found["schedule"].state_dict() == state["schedule"].state_dict()
    for name in ("mask", "wave", "nothing"):
        assert torch.equal(found[name], state[name])
    assert torch.equal(found["eight"].view(torch.uint8), state["eight"].view(torch.uint8))
    assert torch.equal(found["average"]["w"], state["average"]["w"])
    assert found["average"]["w"].stride() == (1, 3)  # loaded into the memory that was there
    assert torch.equal(found["average"]["half"], state["average"]["half"])
    assert (found["seen"], found["note"]) == ([1, (2.5, None), {7: b"\0"}], "seed")


def test_the_copy_is_taken_at_once_and_slots_are_used_in_turns(tmp_path: Path) -> None:
    state = {"w": torch.zeros(300, 300)}
    with open_run(tmp_path) as checkpointer:
        checkpointer.load(state)
        for step in range(1, 6):
            state["w"].fill_(step)
            checkpointer.save(step, state)
            state["w"].fill_(-1)
        assert checkpointer.wait() == 5
    run = RunStore(LocalStore(str(tmp_path)))
    assert [float(run.open(step).read("w").max()) for step in range(1, 6)] == [1, 2, 3, 4, 5]
    assert not list(tmp_path.glob("checkpoints/*/*.part"))


def test_memory_that_moves_is_followed(tmp_path: Path) -> None:
    state = {"w": torch.zeros(10)}
    with open_run(tmp_path) as checkpointer:
        checkpointer.load(state)
        for step in range(1, 5):
            state["w"] = torch.full((10,), float(step))
            checkpointer.save(step, state)
        state["v"] = torch.full((2000, 20), 9.0)  # another structure: planned anew
        checkpointer.save(5, state)
        assert checkpointer.wait() == 5
    run = RunStore(LocalStore(str(tmp_path)))
    assert [float(run.open(step).read("w")[0]) for step in range(1, 6)] == [1, 2, 3, 4, 4]
    assert float(run.open(5).read("v").min()) == 9.0


class Counts(nn.Linear):
    """With state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_a_modules_extra_state_and_going_back(tmp_path: Path) -> None:
    state = {"model": nn.Sequential(Counts())}
    with open_run(tmp_path) as checkpointer:
        checkpointer.load(state)
        for step in (1, 2, 3):
            state["model"][0].calls = step
            checkpointer.save(step, state)
        with pytest.raises(ValueError, match="steps grow"):
            checkpointer.save(3, state)
        checkpointer.wait()
        assert checkpointer.load(state, step=1) == 1
        assert state["model"][0].calls == 1
        state["model"][0].calls = 20
        checkpointer.save(2, state)
    assert [str(info.state) for info in RunStore(LocalStore(str(tmp_path))).checkpoints()] == ["valid", "valid", "fenced"]
    with open_run(tmp_path) as checkpointer:
        assert checkpointer.load(state) == 2
    assert state["model"][0].calls == 20


def test_a_damaged_checkpoint_is_passed_over_and_its_history_ends(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1000)}
    with open_run(tmp_path) as checkpointer:
        checkpointer.load(state)
        for step in (1, 2):
            state["w"].fill_(step)
            checkpointer.save(step, state)
    pack = next(tmp_path.glob("checkpoints/step-00000002/*.pack"))
    data = bytearray(pack.read_bytes())
    data[77] ^= 1
    pack.write_bytes(bytes(data))
    with open_run(tmp_path) as checkpointer:
        assert checkpointer.load(state) == 1
        assert state["w"].unique().tolist() == [1.0]
        assert [step for step, _ in checkpointer.passed_over] == [2]
        assert "does not match its crc32c" in checkpointer.passed_over[0][1]
        checkpointer.save(2, state)
    states = [(info.step, str(info.state), info.epoch) for info in RunStore(LocalStore(str(tmp_path))).checkpoints()]
    assert states == [(1, "valid", 0), (2, "valid", 1)]


def test_a_keeper_that_dies_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1000)}
    with open_run(tmp_path) as checkpointer:
        checkpointer.load(state)
        checkpointer.save(1, state)
        checkpointer.wait()
        process = checkpointer._keepers.link()._process
        process.send_signal(signal.SIGSTOP)
        state["w"].fill_(2)
        checkpointer.save(2, state)  # on its way when the keeper dies
        process.kill()
        process.wait()
        state["w"].fill_(3)
        checkpointer.save(3, state)
        assert checkpointer.wait() == 3
    run = RunStore(LocalStore(str(tmp_path)))
    assert [float(run.open(step).read("w")[0]) for step in (1, 2, 3)] == [0, 2, 3]


def test_a_keeper_outlives_the_sigterm_that_a_scheduler_sends_to_every_process_of_a_job(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1000)}
    with open_run(tmp_path) as checkpointer:
        checkpointer.load(state)
        checkpointer.save(1, state)
        checkpointer.wait()
        process = checkpointer._keepers.link()._process
        process.send_signal(signal.SIGTERM)
        checkpointer.save(2, state)
        assert checkpointer.wait() == 2
        assert checkpointer._keepers.link()._process is process
        assert process.poll() is None


def test_a_keeper_that_dies_with_every_slot_in_its_hands_holds_up_nobody(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1000)}
    with open_run(tmp_path) as checkpointer:
        checkpointer.load(state)
        checkpointer.save(1, state)
        checkpointer.wait()
        kill_with(checkpointer, state, 2, 3)
        checkpointer.save(4, state)
        kill_with(checkpointer, state, 5)
        assert checkpointer.load({"w": torch.zeros(1000)}) == 5, "what was saved is there for the load that comes after it"
    assert [info.step for info in RunStore(LocalStore(str(tmp_path))).checkpoints() if info.state == "valid"] == [1, 2, 3, 4, 5]


def kill_with(checkpointer: Checkpointer, state: dict[str, Any], *steps: int) -> None:
    """Have the keeper die with these saves on their way."""
    checkpointer.wait()
    process = checkpointer._keepers.link()._process
    process.send_signal(signal.SIGSTOP)
    for step in steps:
        checkpointer.save(step, state)
    process.kill()
    process.wait()


def test_a_commit_that_a_dead_keeper_did_not_live_to_tell_is_found(tmp_path: Path) -> None:
    state = {"w": torch.zeros(10)}
    with open_run(tmp_path) as checkpointer:
        checkpointer.load(state)
        checkpointer.save(1, state)
        checkpointer.wait()
        link = checkpointer._keepers.link()
        link._whole.add(1)  # as if it had not told
        link._process.kill()
        link._process.wait()
        assert checkpointer.wait() == 1


def test_a_keeper_that_always_dies_is_given_up_and_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.zeros(10)}
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.load(state)
    monkeypatch.setattr("ftrain.checkpoint.script_link.python", lambda *words: [sys.executable, "-c", "raise SystemExit(9)"])
    checkpointer.save(1, state)
    with pytest.raises(SaveError, match=r"3 keeper processes in a row died \(status 9\)"):
        checkpointer.close()


@pytest.mark.slow
def test_a_script_that_is_killed_leaves_its_last_save_to_the_keeper(tmp_path: Path) -> None:
    script = (
        "import os, torch, ftrain\n"
        f"c = ftrain.Checkpointer({str(tmp_path)!r})\n"
        "state = {'w': torch.ones(4000, 1000)}\n"
        "c.load(state); c.save(1, state); c.wait(); c.save(2, state)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    assert done.returncode == -9
    # its stderr is the keeper's too: when `run` returned, the last of them had left
    assert RunStore(LocalStore(str(tmp_path))).open().step == 2, done.stderr


def test_states_that_do_not_fit_are_refused_and_left_alone(tmp_path: Path) -> None:
    with open_run(tmp_path) as checkpointer:
        state = {"w": torch.ones(3), "n": {"a": torch.ones(2)}, "old": 1}
        checkpointer.load(state)
        checkpointer.save(1, state)
    other = {"w": torch.zeros(4), "n": {"a": torch.zeros(2, dtype=torch.int64), "b": 5}, "new": 2}
    with open_run(tmp_path) as checkpointer:
        with pytest.raises(StateError) as caught:
            checkpointer.load(other)
        for words in (
            "w is float32 (4,), in the checkpoint float32 (3,)",
            "n.a is int64",
            "n.b is not in the checkpoint",
            "state.new is not in the checkpoint",
            "state.old is in the checkpoint, but not in the state",
            "nothing was changed",
        ):
            assert words in str(caught.value)
        assert other["w"].tolist() == [0, 0, 0, 0]
        fitting = {"w": torch.zeros(3), "extra": 7}
        assert checkpointer.load(fitting, strict=False) == 1
        assert fitting["w"].tolist() == [1, 1, 1]
        assert fitting["extra"] == 7


def test_the_same_memory_seen_another_way_is_other_values(tmp_path: Path) -> None:
    state = {"w": torch.arange(9.0).view(3, 3), "z": torch.complex(torch.arange(3.0), torch.ones(3))}
    with open_run(tmp_path) as checkpointer:
        checkpointer.load(state)
        for step in (1, 2):
            checkpointer.save(step, state)
        state = {"w": state["w"].t(), "z": state["z"].conj(), "both": state["z"], "imag": state["z"].conj().imag}
        for step in (3, 4):
            checkpointer.save(step, state)
    run = RunStore(LocalStore(str(tmp_path)))
    for step in (3, 4):
        assert run.open(step).read("w").tolist() == torch.arange(9.0).view(3, 3).t().tolist()
        assert run.open(step).read("z").tolist() == [[0, -1], [1, -1], [2, -1]]
        assert run.open(step).read("both").tolist() == [[0, 1], [1, 1], [2, 1]]
        assert run.open(step).read("imag").tolist() == [-1, -1, -1]
    with open_run(tmp_path) as checkpointer, pytest.raises(StateError, match="z is conjugated or negated by a mark"):
        checkpointer.load(state)


def holds_itself() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["again"] = [state]
    return state


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("\ud800", "v: the text '\\ud800' is not Unicode"),
        ({"\udc41": 1}, "v: the text '\\udc41' is not Unicode"),
        (bytes(13 << 20), "takes 17 MiB as text, at most 16 MiB"),
        (torch.empty(2, device="meta"), "v is a meta tensor"),
        (torch.eye(2).to_sparse(), "v is a Tensor with layout torch.sparse_coo"),
        ({1, 2}, "v is a builtins.set"),
        (holds_itself(), "nested deeper than 100 levels: does a part of it hold itself"),
    ],
)
def test_what_cannot_be_saved_is_named_and_the_next_save_is_as_ever(tmp_path: Path, values: Any, words: str) -> None:
    with open_run(tmp_path) as checkpointer:
        checkpointer.load({})
        with pytest.raises(StateError, match=re.escape(words)):
            checkpointer.save(1, {"v": values})
        checkpointer.save(1, {"v": 1})
        assert checkpointer.wait() == 1


def test_a_tensor_whose_memory_is_gone_fails_that_save_alone(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000)}
    with open_run(tmp_path) as checkpointer:
        checkpointer.load(state)
        checkpointer.save(1, state)
        state["w"].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="storage of size 0"):
            checkpointer.save(2, state)
        for step in (3, 4, 5):
            state["w"] = torch.full((1000,), float(step))
            checkpointer.save(step, state)
        assert checkpointer.wait() == 5
    found = RunStore(LocalStore(str(tmp_path))).checkpoints()
    assert [info.step for info in found if str(info.state) == "valid"] == [1, 3, 4, 5]


def test_a_record_larger_than_a_sockets_buffer_reaches_the_keeper_with_its_save(tmp_path: Path) -> None:
    state = {"w": torch.ones(10), "note": "seen " * 200_000}
    with open_run(tmp_path) as checkpointer:
        checkpointer.load(state)
        checkpointer.save(1, state)
        assert not checkpointer._keepers.link()._channel.wants_write
        assert checkpointer.wait() == 1


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FTRAIN_RUN", raising=False)
    with pytest.raises(ValueError, match="FTRAIN_RUN"):
        Checkpointer()
    with pytest.raises(ValueError, match="no other sees what is there; give a folder, file://, s3://"):
        Checkpointer("memory://x")
    with pytest.raises(ValueError, match="so write s3://bucket/key"):
        Checkpointer("s3:/bucket/key")
    state = {"w": torch.zeros(2)}
    with open_run(tmp_path) as checkpointer:
        with pytest.raises(SaveError, match=r"call load\(state\) first"):
            checkpointer.save(1, state)
        with pytest.raises(NoCheckpoint, match="no checkpoint of step 7"):
            checkpointer.load(state, step=7)
        checkpointer.load(state)
    for again in (lambda: checkpointer.save(1, state), lambda: checkpointer.load(state)):
        with pytest.raises(SaveError, match="this Checkpointer is closed"):
            again()


def test_a_failed_save_is_reported_and_raised_if_asked_for(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2)}
    with open_run(tmp_path, on_error="raise") as older, open_run(tmp_path) as newer:
        older.load(state)
        older.save(5, state)
        older.wait()
        newer.load(state)
        older.save(6, state)  # the newer one goes on from step 5: this is no part of the history any more
        with pytest.raises(SaveError, match="Fenced"):
            older.wait()


def test_what_is_kept(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2)}
    with open_run(tmp_path, keep_last=2, keep_every=4) as checkpointer:
        checkpointer.load(state)
        for step in range(1, 8):
            checkpointer.save(step, state)
            checkpointer.wait()
    valid = [info.step for info in RunStore(LocalStore(str(tmp_path))).checkpoints() if str(info.state) == "valid"]
    assert valid == [4, 6, 7]


@pytest.mark.parametrize(
    ("rule", "world", "expected"),
    [
        ("first", 3, [[0, 1, 2]] * 3),
        ("split", 3, [[0, 1, 2], [10, 11], [20, 21]]),
        ("split", 1, [[0, 1, 2, 10, 11, 20, 21]]),
        ("refuse", 2, [[0, 1, 2], [10, 11, 20, 21]]),
    ],
)
def test_rules_for_another_number_of_ranks(rule: Any, world: int, expected: list[list[int]]) -> None:
    """What each of `world` ranks gets of what two had: [0, 1, 2] and [10, 11, 20, 21]."""
    node = {"rank": rule, "values": [{"list": [0, 1, 2]}, {"list": [10, 11, 20, 21]}]}
    for rank in range(world):
        binder = Binder(None, rank, world, [])  # type: ignore[arg-type]
        live = ftrain.per_rank([], rule)
        binder.bind(live, node, "samples")()
        assert not binder.problems
        assert live.value == expected[rank]


def test_a_rule_that_does_not_apply_is_a_problem() -> None:
    binder = Binder(None, 0, 3, [])  # type: ignore[arg-type]
    binder.bind(ftrain.per_rank(0), {"rank": "refuse", "values": [1, 2]}, "loader")
    binder.bind(ftrain.per_rank(0, "split"), {"rank": "split", "values": [1, 2]}, "count")
    assert "loader was saved by 2 ranks, each its own; this is a world of 3" in binder.problems[0]
    assert "only lists can be dealt out anew" in binder.problems[1]


@pytest.mark.parametrize(
    "code",
    [
        "import ftrain; assert ftrain.progress(1) is False",
        "import ftrain.compose.supervise, ftrain.cli.supervise",
        "import ftrain.checkpoint.script_keeper",
    ],
)
def test_progress_supervisor_and_keeper_need_no_torch(code: str) -> None:
    subprocess.run([sys.executable, "-c", f"import sys; {code}; assert 'torch' not in sys.modules"], check=True, cwd="/")


@pytest.mark.parametrize("package", ["storage", "recovery"])
def test_a_folder_that_shadows_ours_is_named(tmp_path: Path, package: str) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / "train.py").write_text("import ftrain\nftrain.progress(1)\n")
    done = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert str(tmp_path / package / "__init__.py") in last
    assert str(ROOT / package / "__init__.py") in last
    assert "Rename yours" in last


def test_the_record_is_readable_without_us(tmp_path: Path) -> None:
    with open_run(tmp_path) as checkpointer:
        state = {"w": torch.ones(3), "lr": 0.25}
        checkpointer.load(state)
        checkpointer.save(1, state)
    progress = RunStore(LocalStore(str(tmp_path))).open().progress
    assert msgspec.to_builtins(progress) == {
        "step": 1,
        "world": 1,
        "state": {"map": {"w": {"array": "w", "type": ["tensor", "float32"]}, "lr": 0.25}},
    }


def test_what_is_a_step(tmp_path: Path) -> None:
    with open_run(tmp_path) as checkpointer:
        state = {"w": torch.ones(3)}
        checkpointer.load(state)
        checkpointer.save(np.arange(5)[3], state)
        for wrong, error in ((4.0, TypeError), ("4", TypeError), (None, TypeError), (-4, ValueError), (2**60, ValueError)):
            with pytest.raises(error, match="the number of finished steps"):
                checkpointer.save(wrong, state)  # type: ignore[arg-type]
        checkpointer.save(torch.tensor(4), state)  # type: ignore[arg-type]
        assert checkpointer.wait() == 4


def test_elements_of_eight_bytes_in_any_order(tmp_path: Path) -> None:
    """They are moved in halves, so the halves of one must lie side by side; the stride of a dim of one element says nothing."""
    values = torch.arange(60.0, dtype=torch.float64)
    made = {
        "column": values.view(6, 10)[:, 3:4],
        "turned": values[:6].view(1, 6).t(),
        "one": values[7::60],
        "every other": values[::2],
        "spread": values[5].expand(4, 1),
        "integers": torch.arange(12).view(3, 4).t()[:, :1],
        "complex": torch.randn(3, 4, dtype=torch.complex128).t()[:, 1:2],
    }
    with open_run(tmp_path) as checkpointer:
        checkpointer.load(made)
        checkpointer.save(1, made)
    loaded = {name: torch.zeros_like(each).contiguous() for name, each in made.items()}
    with open_run(tmp_path) as checkpointer:
        assert checkpointer.load(loaded) == 1
    assert all(torch.equal(loaded[name], each) for name, each in made.items())
