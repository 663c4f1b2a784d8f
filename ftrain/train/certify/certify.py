"""The certificate, in order: the references of each model, then every layout against them, the ring, the pairs.

Each layout starts every step from the state of the reference, so an error cannot grow over the steps and hide its origin: what
fails, fails by itself. One failed layout does not end the certificate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from ftrain.config import Config
from ftrain.load import fingerprint
from ftrain.parallel.shape import mesh_shape
from ftrain.train.certify.compare import (
    Result,
    Truth,
    exact_truth,
    failures_of,
    held_failures,
    rounded_truth,
)
from ftrain.train.certify.layouts import Layout, in_mode
from ftrain.train.certify.messages import Job, JobDone, Ring, Role, StepDone, Steps
from ftrain.train.certify.planning import check_pairs
from ftrain.train.certify.pool import Pool, TaskFailedError
from ftrain.train.certify.runs import commit, new_run, widen
from ftrain.train.certify.verdict import Certificate, Failure, Row, worst_of
from storage.errors import StorageError
from storage.run import RunStore

MAX_STEPS = 4
RING = "ring"
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One process in one mode: what a layout of the same model is held against."""

    states: RunStore  # with the states of all steps
    routes: str  # where it wrote which experts it chose; empty: nowhere
    truths: list[Truth]  # of each update
    data: list[list[tuple[int, str]]]  # the sequences of each update
    digests: dict[str, int]  # of the initial state


@dataclass(slots=True, kw_only=True)
class Certifier:
    """Everything that all layouts share. `defect`: for tests, what is broken in the layouts' workers."""

    pool: Pool
    folder: Path
    steps: int
    modes: Sequence[str]
    defect: str = ""
    note: Note = lambda line: None
    rows: list[Row] = field(default_factory=list, init=False)
    failures: list[Failure] = field(default_factory=list, init=False)
    ring: list[str] = field(default_factory=list, init=False)
    _references: dict[tuple[bytes, str], Reference] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def certify(self, config: Config, layouts: Sequence[Layout]) -> Certificate:
        """All layouts, grouped by their models. May be called again: references are kept."""
        self.rows, self.failures, self.ring, pairs = [], [], [], 0
        for group in by_model(layouts):
            self.note(f"reference of {len(group)} layouts")
            for mode in self.modes:
                if (group[0].model_key, mode) not in self._references:
                    self._references[group[0].model_key, mode] = self._reference(group[0].one, mode)
            references = {mode: self._references[group[0].model_key, mode] for mode in self.modes}
            self._layouts(group, references)
            count, failures = check_pairs([Layout("one process", group[0].one), *group])
            pairs += count
            self.failures += failures
        return Certificate(
            version=version("ftrain-runtime"),
            config_fingerprint=fingerprint(config),
            environment={"torch": version("torch")},
            steps=self.steps,
            modes=list(self.modes),
            rows=self.rows,
            ring=self.ring,
            pairs=pairs,
            failures=self.failures,
        )

    # --- one process ------------------------------------------------------------------------------------------------------

    def _reference(self, one: Config, mode: str) -> Reference:
        states, results = self._run(), self._run()
        routes = self._run().store.url if one.model.experts and mode != "fp64" else ""
        ((done,),) = self.pool.run([self._job(one, mode, "reference", states, results, routes)], world=1)
        saved = [commit(states, [pack], step) for step, pack in enumerate(done.states)]
        singles = [self._result(results, [step]) for step in done.steps]
        if mode == "fp64":
            truths = [exact_truth(single) for single in singles]
        else:
            wide, exact = self._run(), self._run()
            for checkpoint in saved:
                widen(checkpoint, wide)
            ((oracle,),) = self.pool.run([self._job(one, "fp64", "oracle", wide, exact, routes)], world=1)
            pairs = zip(oracle.steps, singles, strict=True)
            truths = [rounded_truth(self._result(exact, [step]), single, mode) for step, single in pairs]
        data = [step.data for step in done.steps]
        return Reference(states=states, routes=routes, truths=truths, data=data, digests=done.digests)

    # --- layouts ----------------------------------------------------------------------------------------------------------

    def _layouts(self, group: Sequence[Layout], references: dict[str, Reference]) -> None:
        ring_mode = next((mode for mode in self.modes if mode != "fp64"), self.modes[0])
        source = references[ring_mode].states
        links = [*group, Layout("one process", group[0].one)]
        for layout in links:
            target, failed = self._run(), len(self.failures)
            steps: dict[str, Steps] = {}
            runs: dict[str, RunStore] = {}
            if layout is not links[-1]:
                for mode, reference in references.items():
                    runs[mode] = self._run()
                    steps[mode] = self._job(layout.config, mode, "layout", reference.states, runs[mode], reference.routes)
            ring = Ring(
                config=in_mode(layout.config, ring_mode), source=source.store.url, target=target.store.url, step=self.steps
            )
            done = self._carry_out(layout, [*steps.values(), ring])
            if done is None:
                self.rows += [Row(layout=layout.name, mode=mode, failures=1) for mode in steps]
                continue
            for mode, ranks in zip(steps, done, strict=False):
                self._judge(layout, mode, references[mode], runs[mode], ranks)
            if self._judge_ring(layout, ring_mode, source, target, done[-1]):
                source = target
            self.note(f"{layout.name}: {'failed' if len(self.failures) > failed else 'equal'}")

    def _carry_out(self, layout: Layout, jobs: Sequence[Job]) -> list[list[JobDone]] | None:
        try:
            return self.pool.run(jobs, world=layout.config.parallel.ranks, defect=self.defect)
        except TaskFailedError as error:
            self.failures.append(Failure(layout=layout.name, mode="", step=0, what="run", parameter="", reason=str(error)))
            self.note(f"{layout.name}: failed")
            return None

    def _judge(self, layout: Layout, mode: str, reference: Reference, run: RunStore, ranks: list[JobDone]) -> None:
        found: list[Failure] = []
        for name, digest in reference.digests.items():
            if any(rank.digests.get(name) != digest for rank in ranks):
                kind, _, parameter = name.partition("/")
                found.append(_told(layout, mode, 0, "digest", parameter, f"initial {kind} has other bits"))
        worst = []
        for index, truth in enumerate(reference.truths):
            dones = [rank.steps[index] for rank in ranks]
            found += _data_failures(layout, mode, dones, reference.data[index])
            if not dones[0].applied:
                found.append(_told(layout, mode, dones[0].step, "update", "", "not finite, and so not applied"))
                continue
            try:
                result = self._result(run, dones)
            except StorageError as error:
                found.append(_told(layout, mode, dones[0].step, "boxes", "", str(error)))
                continue
            differences = list(truth.differences(result))
            worst += differences
            found += failures_of(differences, layout.name, mode)
            found += held_failures(result, dones, layout.name, mode)
        row = Row(
            layout=layout.name,
            mode=mode,
            worst=worst_of(worst),
            compared=len(worst),
            beyond_own=sum(one.beyond_own for one in worst),
            failures=len(found),
            flips=sum(step.flips for rank in ranks for step in rank.steps),
            routed=sum(step.routed for rank in ranks for step in rank.steps),
        )
        self.rows.append(row)
        self.failures += found

    def _judge_ring(self, layout: Layout, mode: str, source: RunStore, target: RunStore, ranks: list[JobDone]) -> bool:
        """Whether what this layout loaded, and saved again, is bit for bit what was in `source`."""
        stored = source.open(self.steps).manifest.digests
        loaded = ranks[0].digests
        try:
            saved = commit(target, [pack for rank in ranks for pack in rank.states], self.steps).manifest.digests
        except StorageError as error:
            self.failures.append(_told(layout, mode, self.steps, RING, "", str(error)))
            return False
        wrong = [name for name, digest in stored.items() if loaded.get(name) != digest or saved.get(name) != digest]
        for name in wrong:
            reason = f"{name} has other bits after a load and a save"
            self.failures.append(_told(layout, mode, self.steps, RING, name.partition("/")[2], reason))
        self.ring.append(layout.name)
        return not wrong

    # --- runs -------------------------------------------------------------------------------------------------------------

    def _run(self) -> RunStore:
        return new_run(str(self.folder / f"run-{next(self._numbers):04d}"))

    def _job(self, config: Config, mode: str, role: Role, states: RunStore, results: RunStore, routes: str) -> Steps:
        return Steps(
            config=in_mode(config, mode),
            role=role,
            states=states.store.url,
            results=results.store.url,
            steps=self.steps,
            routes=routes,
        )

    def _result(self, run: RunStore, ranks: Sequence[StepDone]) -> Result:
        """What all ranks wrote of one update."""
        return Result(ranks[0], commit(run, [rank.pack for rank in ranks if rank.pack], ranks[0].step))


def by_model(layouts: Sequence[Layout]) -> list[list[Layout]]:
    """Layouts that are compared with the same process, together, in the order of the list."""
    groups: dict[bytes, list[Layout]] = {}
    for layout in layouts:
        groups.setdefault(layout.model_key, []).append(layout)
    return list(groups.values())


def _data_failures(
    layout: Layout, mode: str, ranks: Sequence[StepDone], expected: Sequence[tuple[int, str]]
) -> Iterator[Failure]:
    """The replicas at each place of the model must read, together, each sequence of the global batch once."""
    shape = mesh_shape(layout.config)
    for place in shape.coordinates():
        if place.dp == 0:
            members = [shape.rank(replace(place, dp=dp)) for dp in range(shape.dp)]
            read = [item for rank in members for item in ranks[rank].data]
            if read != list(expected):
                reason = (
                    f"ranks {members} read sequences {[index for index, _ in read]}, in one process other ones or others' text"
                )
                yield _told(layout, mode, ranks[0].step, "data", "", reason)


def _told(layout: Layout, mode: str, step: int, what: str, parameter: str, reason: str) -> Failure:
    return Failure(layout=layout.name, mode=mode, step=step, what=what, parameter=parameter, reason=reason)
