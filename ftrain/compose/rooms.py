"""Saves that storage had no room for: which of them are worth another try, once room was made (ADR 34)."""

from __future__ import annotations

from ftrain.checkpoint.keeper import ROOM_TRIES
from ftrain.checkpoint.messages import PackFailed
from ftrain.compose.debts import Group


class Rooms:
    """Used by the coordinator's thread. A save is named by attempt and step."""

    def __init__(self) -> None:
        self._waiting: dict[Group, PackFailed] = {}
        self._tries: dict[Group, int] = {}

    @property
    def writers(self) -> frozenset[tuple[int, int]]:
        """(epoch, attempt) of those that room is made for: what other ranks have stored of them is needed. Safe to read from
        another thread.
        """
        return frozenset((failed.epoch, failed.attempt) for failed in self._waiting.copy().values())

    def is_waiting(self, group: Group) -> bool:
        """Whether room is being made for it: what else of it fails meanwhile will be tried again as well."""
        return group in self._waiting

    def wait(self, failed: PackFailed) -> bool:
        """Whether to make room for what failed. Not for ever: what is freed may be too little."""
        group = (failed.attempt, failed.step)
        if not failed.no_space or self._tries.get(group, 0) >= ROOM_TRIES:
            return False
        self._waiting[group] = failed
        return True

    def made(self, group: Group, freed_bytes: int) -> PackFailed | None:
        """What to give up, None if it is worth another try: room was made for it, now or the last time."""
        failed = self._waiting.pop(group)
        if not freed_bytes and group not in self._tries:
            return failed
        self._tries[group] = self._tries.get(group, 0) + 1
        return None
