"""A state machine against a model: what owners, zombies, keepers, readers and collectors may do, in any order, with a crash at
any operation of any of it.

The model is a few dictionaries that say what must be true; the run under test lives in a store that may die at operation k.
After each step whoever looks sees exactly what the model says, or, where a crash left it open, one of two things it allows.
"""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from storage.catalog import CheckpointState
from storage.errors import Fenced, NoCheckpoint
from storage.manifest import Manifest
from storage.objects import ObjectStore
from storage.retention import KeepLast
from storage.run import RunStore
from storage.testing import Crash, CrashingStore
from tests.storage.building import SPECS, Values, random_values, write_packs
from tests.storage.crashing import ClockStore
from tests.storage.test_commit import holds

GRACE = 100.0
VALUES = [random_values(SPECS, seed) for seed in range(4)]
When = Literal["before", "after"]
crashes = st.none() | st.tuples(st.integers(0, 14), st.sampled_from(["before", "after"]))


class StorageMachine(RuleBasedStateMachine):
    """`epochs`: number -> step it starts from. `commits`: (epoch, step) -> which values. `packs`: stored, not committed yet.
    `tainted`: commits that a roll-back distrusts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = ClockStore()
        self.epochs: dict[int, int] = {}
        self.commits: dict[tuple[int, int], int] = {}
        self.packs: list[tuple[Manifest, int]] = []
        self.tainted: set[tuple[int, int]] = set()
        self.attempt = 0

    # -- what counts, by the rule of the architecture ----------------------------------------------------------------------

    def counts(self, epoch: int, step: int) -> bool:
        return (epoch, step) not in self.tainted and self.unfenced(epoch, step)

    def unfenced(self, epoch: int, step: int) -> bool:
        return not any(later > epoch and start < step for later, start in self.epochs.items())

    def visible(self) -> dict[int, int]:
        """Step -> values of the newest epoch's commit that counts."""
        found: dict[int, tuple[int, int]] = {}
        for (epoch, step), values in self.commits.items():
            if self.counts(epoch, step):
                found[step] = max(found.get(step, (-1, -1)), (epoch, values))
        return {step: values for step, (_, values) in found.items()}

    def dying(self, crash: tuple[int, When] | None) -> ObjectStore:
        return CrashingStore(self.store, at=crash[0], when=crash[1]) if crash else self.store

    # -- what may happen ---------------------------------------------------------------------------------------------------

    @initialize()
    def first_owner(self) -> None:
        self.take_epoch(None, back=0)

    @rule(crash=crashes, back=st.integers(0, 3))
    def take_epoch(self, crash: tuple[int, When] | None, back: int) -> None:
        """A coordinator starts: from the newest checkpoint, or from an older one."""
        steps = sorted(self.visible(), reverse=True)
        start = steps[min(back, len(steps) - 1)] if steps else None
        number = max(self.epochs, default=-1) + 1
        try:
            taken = RunStore(self.dying(crash)).take_epoch(owner={}, starts_from=start)
        except Crash:
            if not self.store.exists(f"epochs/e{number:04d}.json"):
                return
            taken = number
        assert taken == number
        self.epochs[number] = -1 if start is None else start

    @precondition(lambda self: self.visible())
    @rule(crash=crashes, back=st.integers(1, 3))
    def roll_back(self, crash: tuple[int, When] | None, back: int) -> None:
        """Results are distrusted: what came after some checkpoint is tainted, perhaps not all of it; then an epoch is taken."""
        steps = sorted(self.visible())
        start = steps[-1 - back] if back < len(steps) else None
        after = [group for group in self.commits if self.counts(*group) and (start is None or group[1] > start)]
        try:
            RunStore(self.dying(crash)).taint(after=start, reason="loss spike")
        except Crash:
            self.tainted |= {g for g in after if self.store.exists(f"checkpoints/step-{g[1]:08d}/tainted-e{g[0]:04d}.json")}
            return
        self.tainted |= set(after)
        self.take_epoch(None, back=0)

    @rule(crash=crashes, values=st.integers(0, 3), ahead=st.integers(1, 3), old=st.integers(0, 2))
    def put_parts(self, crash: tuple[int, When] | None, values: int, ahead: int, old: int) -> None:
        """A keeper of some epoch, perhaps a zombie's, stores the packs of a step."""
        epoch = max(max(self.epochs) - old, 0)
        step = max(self.visible(), default=0) + 10 * ahead
        self.attempt += 1
        try:
            packs = write_packs(self.dying(crash), VALUES[values], step=step, epoch=epoch, attempt=self.attempt)
        except Crash:
            return
        self.packs.append((packs, values))

    @precondition(lambda self: self.packs)
    @rule(crash=crashes, which=st.integers(0, 100))
    def commit(self, crash: tuple[int, When] | None, which: int) -> None:
        """A coordinator, perhaps a zombie, commits what its keepers have stored."""
        manifest, values = self.packs.pop(which % len(self.packs))
        group = (manifest.epoch, manifest.step)
        key = f"checkpoints/step-{manifest.step:08d}/commit-e{manifest.epoch:04d}.json"
        before = self.store.exists(key)
        try:
            ref = RunStore(self.dying(crash)).commit(manifest)
        except Fenced:
            assert not self.counts(*group)
            assert self.store.exists(key) == before
            return
        except Crash:
            if not before and self.store.exists(key):
                self.commits[group] = values
            return
        assert self.counts(*group), "a zombie was not refused"
        assert ref.created == (not before)
        if ref.created:
            self.commits[group] = values

    @rule(crash=crashes, keep=st.integers(1, 3), later=st.sampled_from([0.0, GRACE, 10 * GRACE]))
    def collect(self, crash: tuple[int, When] | None, keep: int, later: float) -> None:
        """The newest owner collects; packs that wait for a commit are named as live."""
        self.store.now += later
        visible = self.visible()
        kept = set(sorted(visible)[-keep:])
        run = RunStore(self.dying(crash))
        run.epoch = max(self.epochs)
        live = frozenset(pack.name for manifest, _ in self.packs for pack in manifest.packs)
        live |= frozenset(info.key for info in self.store.list("checkpoints/") if self._waits(info.key))
        try:
            run.collect([KeepLast(keep)], now_s=self.store.now, grace_s=GRACE, live=live)
        except Crash:
            gone = {g for g in self.commits if not self._committed(*g)}
            assert not {step for epoch, step in gone if self.counts(epoch, step)} & kept, "what is kept is never touched"
        else:
            gone = {g for g in self.commits if visible and g[1] not in kept} - self.tainted
        self.commits = {group: values for group, values in self.commits.items() if group not in gone}

    def _waits(self, key: str) -> bool:
        return any(f"step-{m.step:08d}/" in key and f"e{m.epoch:04d}-a{m.attempt:04d}" in key for m, _ in self.packs)

    def _committed(self, epoch: int, step: int) -> bool:
        return self.store.exists(f"checkpoints/step-{step:08d}/commit-e{epoch:04d}.json")

    # -- what must be true -------------------------------------------------------------------------------------------------

    @invariant()
    def whoever_looks_sees_what_the_model_says(self) -> None:
        run, visible = RunStore(self.store), self.visible()
        infos = run.checkpoints()
        assert {info.step for info in infos if info.state is CheckpointState.VALID} == set(visible)
        tainted = {info.step for info in infos if info.state is CheckpointState.TAINTED}
        assert tainted == {step for _, step in self.tainted} - set(visible)
        try:
            opened = run.open()
        except NoCheckpoint:
            assert not visible
            return
        assert opened.step == max(visible)
        assert opened.passed_over == []
        assert opened.verify().ok
        assert self._holds(opened.step, visible[opened.step])

    def _holds(self, step: int, values: int) -> bool:
        state: Values = VALUES[values]
        return holds(RunStore(self.store).open(step), state)

    def teardown(self) -> None:
        """At the end every checkpoint there is verifies, not only the newest, and of the tainted none is lost."""
        for epoch, step in self.tainted:
            assert self._committed(epoch, step)
            if step not in self.visible():
                assert RunStore(self.store).open(step).verify().ok
        for step, values in self.visible().items():
            assert RunStore(self.store).open(step).verify().ok
            assert self._holds(step, values)


HOW = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def test_any_order_of_events_with_crashes_ends_where_the_model_says() -> None:
    run_state_machine_as_test(StorageMachine, settings=settings(max_examples=12, stateful_step_count=20, **HOW))


@pytest.mark.slow
def test_very_many_orders_of_events() -> None:
    run_state_machine_as_test(StorageMachine, settings=settings(max_examples=400, stateful_step_count=40, **HOW))
