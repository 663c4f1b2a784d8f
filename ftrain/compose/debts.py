"""What storage is still owed: snapshots complete on every rank whose step is neither committed nor given up.

While a debt is open the run may not be called stopped or finished: the agent's end would take the only copy with it. A
coordinator that takes over knows of no debt; it asks the keeper, and until the answer is there it must assume one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ftrain.checkpoint.messages import Share

Group = tuple[int, int]  # (attempt, step) of a snapshot


class Debts:
    """The open debts of all agents. Used by the coordinator's thread."""

    def __init__(self) -> None:
        self._owed: set[Group] = set()
        self._epochs: dict[int, int] = {}
        self._silent: set[str] = set()  # nodes whose keepers were asked and have not answered yet
        self._told: dict[Group, set[int]] = defaultdict(set)  # ranks whose shares the keepers' answers have named so far

    @property
    def asked(self) -> bool:
        """Whether some keeper was asked and has not answered yet."""
        return bool(self._silent)

    @property
    def open(self) -> bool:
        """Whether something is owed, or may be."""
        return self.asked or bool(self._owed)

    @property
    def newest(self) -> int:
        """The newest step that is known to be owed; 0 if none is."""
        return max((step for _, step in self._owed), default=0)

    @property
    def writers(self) -> frozenset[tuple[int, int]]:
        """(epoch, attempt) of those whose packs must not be taken for leavings: the newest attempt, and every owed one.

        Workers that a coordinator adopted write under the epoch they were started in, which is not the newest. Safe to
        read from another thread.
        """
        attempts = {attempt for attempt, _ in self._owed.copy()} | set(sorted(self._epochs)[-1:])
        return frozenset((self._epochs[attempt], attempt) for attempt in attempts if attempt in self._epochs)

    def started(self, attempt: int, epoch: int) -> None:
        """An attempt writes under this epoch from now on."""
        self._epochs[attempt] = epoch

    def add(self, group: Group) -> None:
        """A snapshot that goes to storage is complete on all ranks."""
        self._owed.add(group)

    def settle(self, group: Group) -> None:
        """Its step is committed, or given up."""
        self._owed.discard(group)

    def ask(self, nodes: Iterable[str]) -> None:
        """The keepers of these nodes are being asked what they owe ("" for the only one)."""
        self._silent = set(nodes)
        self._told.clear()

    def told(self, node: str, shares: Iterable[Share]) -> None:
        """A keeper's answer. A snapshot is owed if all of its ranks' shares are."""
        self._silent.discard(node)
        for share in shares:
            self._epochs[share.attempt] = share.epoch
            ranks = self._told[share.attempt, share.step]
            ranks.add(share.rank)
            if len(ranks) == share.world:
                self._owed.add((share.attempt, share.step))

    def dropped(self, attempt: int, step: int) -> list[Group]:
        """Those of earlier attempts that are later than the step which this one goes on from: its workers have dropped them, so
        that some keepers will never answer, and others with a slot that is being filled anew.
        """
        return [group for group in self._owed if group[0] < attempt and group[1] > step]

    def before(self, attempt: int) -> bool:
        """Whether storage may be owed something of an earlier attempt."""
        return self.asked or any(owed < attempt for owed, _ in self._owed)

    def clear(self) -> None:
        """The agent is gone, and with it every snapshot."""
        self._owed.clear()
        self._silent.clear()
        self._told.clear()
