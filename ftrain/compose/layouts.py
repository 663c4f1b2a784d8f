"""Which layout the attempts of a run have, where their ranks sit, and which memory areas hold their snapshots.

Of a run in phases it is the layout of the phase that the next attempt is in.

What was asked for (`wish`) and what runs (`now`) may differ: while places are missing the run goes on with the best layout for
what is left, chosen by the planner's own prediction, and returns to the wish when there is room for it. Each layout has areas
of its own, a *generation*: the old ones are read by the first attempt of the new layout, and given back once that has a
snapshot and storage is owed nothing of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec
from msgspec.structs import replace

from ftrain.checkpoint.arena import slot_name
from ftrain.checkpoint.layout import layout_text, rank_slot_nbytes
from ftrain.checkpoint.names import PEER_SLOTS, area_name, is_peer, peer_name
from ftrain.compose.args import Memo, WorkerArgs, worker_spec
from ftrain.compose.seats import in_whole_groups, seated
from ftrain.config import Certify, Config, Parallel
from ftrain.load import changes, parse, resolve, to_toml
from ftrain.phases import effective, with_layout
from ftrain.plan.elastic import best, rate
from ftrain.plan.profile import Profile
from ftrain.plan.profile import load as load_profile
from ftrain.plan.profile import of as profile_of
from ftrain.schema import ConfigProblems
from ftrain.units import plural
from recovery.events import ConfigChanged, Event, LayoutChosen
from recovery.memory import MemoryLimitError, check_fits, room
from recovery.messages import WorkerSpec
from recovery.places import Place

RESIZABLE = ("parallel.", "batch.micro_batch")


class Layouts:
    """The layouts of one run. Used by the delegate's one thread."""

    def __init__(self, config: Config) -> None:
        """Nothing has been started: what is wished for will be."""
        self.whole = config
        """All phases, as they are asked for."""
        self.phase = 0
        self.wish = effective(config, 0)
        self.now = self.wish
        self._told = self.now, layout_text(self.now)
        self._asked = self.wish  # when the newest layout was chosen
        self.places: tuple[Place, ...] = ()
        """Where the ranks of the newest attempt sit; empty before the first."""
        self.generation = 0
        self._held: dict[int, dict[str, int]] = {}  # generation -> its areas and their bytes
        self._homes: dict[str, str] = {}  # area -> its node, where ranks sit on several
        self._snapshot: int | None = None  # generation of the newest whole snapshot
        self._attempts: dict[int, tuple[int, int]] = {}  # attempt -> its ranks, and its generation
        self.fits = True
        """Whether the areas of the newest attempt had room beside older ones."""

    @property
    def ranks(self) -> int:
        """Of the newest attempt, or of the next one if it has been chosen."""
        return self.now.parallel.ranks

    @property
    def text(self) -> str:
        """The layout in words."""
        if self._told[0] is not self.now:  # asked for with each step
            self._told = self.now, layout_text(self.now)
        return self._told[1]

    @property
    def wish_text(self) -> str:
        """The layout that is asked for, in words."""
        return layout_text(self.wish)

    @property
    def needed(self) -> int:
        """Ranks of the next attempt: those of a phase that is to begin, or as it is."""
        return self.ranks if self.wish.parallel == self._asked.parallel else self.wish.parallel.ranks

    @property
    def recorded(self) -> Config:
        """All phases, with this one's layout as it runs: what checkpoints remember."""
        return with_layout(self.whole, self.phase, self.now)

    def enter(self, phase: int) -> None:
        """The next attempt is in this phase; its layout is chosen when the attempt is planned."""
        self.phase, self.wish = phase, effective(self.whole, phase)

    def resume(self, phase: int) -> None:
        """The run is in this phase, with the layout that is asked for."""
        self.enter(phase)
        self.now = self._asked = self.wish

    def ranks_of(self, attempt: int) -> int:
        """How many ranks an attempt has."""
        return self._attempts.get(attempt, (self.ranks, 0))[0]

    # -- the choice ------------------------------------------------------------------------------------------------------

    def choose(self, places: Sequence[Place], why: str) -> list[Event]:
        """The layout on `places`; nothing to tell if all may stay as they are. Raises ValueError if there is none."""
        target = self._target(places)
        keep = self.places if target.parallel == self.now.parallel else ()
        seats = seated(places, target.parallel, keep)
        cut_again = target.parallel != self.now.parallel
        same = not cut_again and target.batch.micro_batch == self.now.batch.micro_batch
        before, self.now, self._asked = self.now, target, self.wish
        if same and (not self.places or seats == self.places):
            self.places = seats
            return []
        self.places = seats
        self.generation += cut_again
        return [chosen(before, target, why, load_profile(profile_of(self.wish)), wished=target is self.wish)]

    def _target(self, places: Sequence[Place]) -> Config:
        """The layout for as many of these places as it can seat."""
        count = len(places)
        while True:
            target = self._sized(count)
            if len(in_whole_groups(places, target.parallel)) >= target.parallel.ranks:
                return target
            count = min(count, target.parallel.ranks) - 1

    def _sized(self, count: int) -> Config:
        wish, recovery = self.wish, self.wish.recovery
        if count >= wish.parallel.ranks or not self.wish.recovery.elastic:
            if count < wish.parallel.ranks:
                left = f"{plural(count, 'place')} left for {plural(wish.parallel.ranks, 'rank')}"
                raise ValueError(f"{left}, and recovery.elastic is false")
            return wish
        known = bool(wish.machine.hardware) or wish.machine.device == "cuda"
        profile = load_profile(profile_of(wish))
        found = best(wish, count, profile, least_ranks=recovery.least_ranks, known=known) if count else None
        if found is None:
            least = f" and at least {recovery.least_ranks} (recovery.least_ranks)" if recovery.least_ranks > 1 else ""
            raise ValueError(f"no layout of at most {plural(count, 'rank')}{least} is legal and fits")
        return found.config

    def resize(self, args: Mapping[str, Any], places: Sequence[Place]) -> list[Event]:
        """A person wishes for other ranks (`ranks`) or sizes (`set`: a.b=v). Raises ValueError in words."""
        wish = self._wished(args)
        if len(places) < wish.parallel.ranks:
            raise ValueError(f"{plural(wish.parallel.ranks, 'rank')} asked for, of {plural(len(places), 'place')} there")
        made = [
            {"path": change.path, "old": change.old, "new": change.new, "kind": change.kind}
            for change in changes(self.wish, wish)
        ]
        whole = self._checked(with_layout(self.whole, self.phase, wish))
        self.whole, self.wish = whole, wish
        by = str(args.get("by", "a person"))
        told = self.choose(places, f"{by} asked for {plural(wish.parallel.ranks, 'rank')} ({layout_text(wish)})")
        return [ConfigChanged(t=time.time(), changes=tuple(made)), *told] if made else told

    def _wished(self, args: Mapping[str, Any]) -> Config:
        overrides = [str(change) for change in args.get("set", ())]
        for change in overrides:
            if not change.startswith(RESIZABLE):
                raise ValueError(f"{change}: only {' and '.join(RESIZABLE)}... can be changed while the run goes on")
        if args.get("ranks"):
            overrides.append(f"parallel.ranks={int(args['ranks'])}")
        if not overrides:
            raise ValueError("nothing was asked for: give --ranks N, or --set parallel.tp=N")
        bare = replace(self.wish, faults=(), certify=Certify())
        try:
            return replace(parse(to_toml(bare), overrides, origin="resize"), faults=self.wish.faults, certify=self.wish.certify)
        except ConfigProblems as error:
            raise ValueError(str(error)) from error

    def _checked(self, whole: Config) -> Config:
        """Later phases have what this one does not name otherwise: they must be possible too."""
        try:
            resolve(msgspec.to_builtins(replace(whole, faults=(), certify=Certify())), origin="resize")
        except ConfigProblems as error:
            raise ValueError(str(error)) from error
        return whole

    def place_of(self, rank: int) -> Place | None:
        """Where a rank sits."""
        return self.places[rank] if rank < len(self.places) else None

    def workers(self, args: WorkerArgs) -> tuple[WorkerSpec, ...]:
        """The ranks of the next attempt; `args` has what is the same for all of them, and the areas of all as `own_slots`."""
        slots = max((place.slot for place in self.places), default=self.ranks - 1) + 1
        return tuple(
            worker_spec(
                rank,
                replace(
                    args,
                    own_slots=of_ranks(args.own_slots, [rank]),
                    source_slots=self._sources(args, rank),
                    spread=self.spread,
                    nodes=self.copied_nodes,
                    slot=self.places[rank].slot if self.places else rank,
                    slots=slots,
                ),
                self.now.machine,
            )
            for rank in range(self.ranks)
        )

    @property
    def spread(self) -> bool:
        """Whether the ranks sit on several nodes, each with its own memory."""
        return len({place.node for place in self.places}) > 1

    @property
    def copied(self) -> bool:
        """Whether each node's snapshots are copied to another node."""
        return self.spread and self.wish.checkpoint.peer_copy

    @property
    def copied_nodes(self) -> list[str]:
        """The node of each rank, where they copy to each other; else none."""
        return [place.node for place in self.places] if self.copied else []

    @property
    def ring(self) -> list[str]:
        """The nodes in the order of their ranks: each one's copies are with the next."""
        return list(dict.fromkeys(place.node for place in self.places))

    def _home(self, name: str) -> str:
        """The node of an area of the layout as it is."""
        area, ring = area_name(name), self.ring
        node = self.places[area.rank].node
        return ring[(ring.index(node) + 1) % len(ring)] if area.peer else node

    def _sources(self, args: WorkerArgs, rank: int) -> list[str]:
        """The slots that a rank may read a snapshot from: all, or those of its own node.

        Without copies of each other's snapshots nodes only read their own, in the layout as it is.
        """
        if not self.spread:
            return args.source_slots
        if self.copied:
            return [name for name in args.source_slots if self._homes.get(name) == self.places[rank].node]
        here = [other for other, place in enumerate(self.places) if place.node == self.places[rank].node]
        return of_ranks(args.own_slots, here)

    # -- memory areas ----------------------------------------------------------------------------------------------------

    def areas(self) -> dict[str, int]:
        """The areas of the layout as it is now: name -> bytes."""
        slots, sizes = range(self.now.checkpoint.slots), rank_slot_nbytes(self.now)
        found = {slot_name(rank, index, self.generation): size for rank, size in enumerate(sizes) for index in slots}
        if self.copied:
            copies = range(PEER_SLOTS)
            found |= {peer_name(rank, index, self.generation): size for rank, size in enumerate(sizes) for index in copies}
        return found

    def started(self, attempt: int) -> tuple[dict[str, int], dict[str, int]]:
        """An attempt is being started: its own areas, and the older ones that it may read its state from."""
        self._attempts[attempt] = self.ranks, self.generation
        own, fresh = self.areas(), self.generation not in self._held
        self._homes |= {name: self._home(name) for name in own} if self.spread else {}
        self.fits = not fresh or fits_beside(self._busiest(own))
        self._held[self.generation] = own
        nodes = {place.node for place in self.places}
        older = {
            name: size
            for number, areas in self._held.items()
            for name, size in areas.items()
            if number != self.generation and (name not in self._homes or self._homes[name] in nodes)
        }
        return own, older

    def snapshot(self, attempt: int) -> None:
        """An attempt has a snapshot that is whole on all ranks. (Another layout may have been chosen meanwhile.)"""
        self._snapshot = self._attempts[attempt][1] if attempt in self._attempts else self._snapshot

    def superfluous(self) -> tuple[str, ...]:
        """Areas of older layouts that no attempt will need to start from; they are not held any more after this."""
        if self._snapshot != self.generation:
            return ()
        return self._drop([number for number in self._held if number != self.generation])

    def void(self) -> tuple[str, ...]:
        """All areas, because what they hold is no part of the history any more; the next attempt has new ones."""
        self.generation += 1
        self._snapshot = None
        return self._drop(list(self._held))

    def only_own(self) -> tuple[str, ...]:
        """Areas of older layouts, given up although they may hold the newest snapshot: there is no room for both."""
        return self._drop([number for number in self._held if number != self.generation])

    def _busiest(self, own: Mapping[str, int]) -> int:
        """Bytes of the areas on the node that has most of them."""
        nodes: dict[str, int] = {}
        for name, size in own.items():
            node = self._homes.get(name, "")
            nodes[node] = nodes.get(node, 0) + size
        return max(nodes.values(), default=0)

    def agent_lost(self) -> None:
        """All areas are gone. Of several nodes only those of one; which, need not be known: a new agent begins with none."""
        if not self.spread:
            self._held.clear()
        self._snapshot = None

    def _drop(self, generations: Sequence[int]) -> tuple[str, ...]:
        names = tuple(name for number in generations for name in self._held.pop(number))
        for name in names:
            self._homes.pop(name, None)
        return names

    # -- what a successor must know --------------------------------------------------------------------------------------

    @property
    def asked(self) -> str:
        """Digest of what the run is asked to be, by config or resize; injected faults apart."""
        whole = msgspec.json.encode(replace(self.whole, faults=()), order="deterministic")
        return sha256(whole).hexdigest()

    def memo(self, epoch: int, attempt: int, skips: Sequence[tuple[int, int]]) -> bytes:
        """For a coordinator that finds this one's agent. `skips`: what the workers pass over."""
        held = {number: areas for number, areas in self._held.items() if number != self.generation}
        memo = Memo(
            generation=self.generation,
            epoch=epoch,
            attempt=attempt,
            parallel=msgspec.to_builtins(self.now.parallel),
            phase=self.phase,
            places=self.places,
            held=held,
            homes={name: node for name, node in self._homes.items() if area_name(name).generation != self.generation},
            asked=self.asked,
            skips=list(skips),
        )
        return msgspec.msgpack.encode(memo)

    def adopt(self, memo: Memo) -> None:
        """Go on from an earlier coordinator's layout."""
        self.generation, self.places = memo.generation, memo.places
        self.resume(memo.phase)
        if memo.parallel:
            self.now = replace(self.wish, parallel=msgspec.convert(memo.parallel, Parallel))
        self._held = {**memo.held, self.generation: self.areas()}
        self._homes = dict(memo.homes)
        if self.spread:
            self._homes |= {name: self._home(name) for name in self._held[self.generation]}
        self._attempts[memo.attempt] = self.ranks, self.generation


def of_ranks(names: Sequence[str], ranks: Sequence[int]) -> list[str]:
    """The slots of these ranks; copies of their snapshots are no slots of theirs."""
    wanted = set(ranks)
    return [name for name in names if not is_peer(name) and area_name(name).rank in wanted]


def fits_beside(nbytes: int) -> bool:
    """Whether the areas of a new layout fit beside what is there already."""
    try:
        check_fits(nbytes, room())
    except MemoryLimitError:
        return False
    return True


UNRATED = "of the legal layouts the busiest rank computes least in this one; no speed is predicted, as no peak is known"
"""By what a layout is chosen where nobody says how fast a rank is."""


def chosen(before: Config, after: Config, why: str, profile: Profile, *, wished: bool) -> LayoutChosen:
    """The decision as the ledger keeps it; `wished`: the layout is the config's or a person's. A share of the tokens/s before
    is predicted only by a profile that has a speed.
    """
    rated = profile.peak_flops > 0
    now, then = (rate(before, profile), rate(after, profile)) if rated else (0.0, 0.0)
    share = then / now if now else None
    same = before.parallel == after.parallel
    costs = "a restart; the layout stays" if same else "a restart and a load under the new layout"
    if share is not None and not same:
        named = profile.name if after.machine.hardware else f"{profile.name} assumed"
        costs += f"; then {share:.0%} of the tokens/s before (predicted, {named})"
    return LayoutChosen(
        t=time.time(),
        ranks=after.parallel.ranks,
        layout=layout_text(after),
        was=layout_text(before),
        reason=why if wished else f"{why}: {'best predicted tokens/s' if rated else UNRATED}",
        costs=costs,
        tokens_per_s=share,
        changes=tuple(
            {"path": it.path, "old": it.old, "new": it.new}
            for it in changes(before, after)
            if it.path.startswith(RESIZABLE)  # what else a phase changes is told with the phase
        ),
    )
