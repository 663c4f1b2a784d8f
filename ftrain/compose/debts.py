"""What storage is still owed: snapshots complete on every rank whose step is neither committed nor given up.

While a debt is open the run may not be called stopped or finished: the agent's end would take the only copy with it. A
coordinator that takes over knows of no debt; it asks the keeper, and until the answer is there it must assume one.
"""

from __future__ import annotations

from collections.abc import Iterable

Group = tuple[int, int]  # (attempt, step) of a snapshot


class Debts:
    """The open debts of one agent. Used by the coordinator's thread."""

    def __init__(self) -> None:
        self._owed: set[Group] = set()
        self._epochs: dict[int, int] = {}
        self.asked = False  # the keeper was asked and has not answered yet

    @property
    def open(self) -> bool:
        """Whether something is owed, or may be."""
        return self.asked or bool(self._owed)

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

    def ask(self) -> None:
        """The keeper is being asked what it owes."""
        self.asked = True

    def told(self, groups: Iterable[Group]) -> None:
        """The keeper's answer."""
        self.asked = False
        self._owed |= set(groups)

    def before(self, attempt: int) -> bool:
        """Whether storage may be owed something of an earlier attempt."""
        return self.asked or any(owed < attempt for owed, _ in self._owed)

    def clear(self) -> None:
        """The agent is gone, and with it every snapshot."""
        self._owed.clear()
        self.asked = False
