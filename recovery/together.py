"""One answer out of the answers of many nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from recovery.evidence import Evidence


class Together:
    """Waits for an answer of each node; `done` is called once, with those that came."""

    def __init__(self, nodes: Iterable[str], done: Callable[[Mapping[str, Any]], None]) -> None:
        """Nothing has come yet; of no nodes, nothing will."""
        self._missing = set(nodes)
        self._parts: dict[str, Any] = {}
        self._done: Callable[[Mapping[str, Any]], None] | None = done
        if not self._missing:
            self.finish()

    def answer(self, node: str, message: Any) -> None:
        """One node's answer."""
        self._parts[node] = message
        self._missing.discard(node)
        if not self._missing:
            self.finish()

    def finish(self) -> None:
        """No more is waited for."""
        done, self._done = self._done, None
        if done is not None:
            done(self._parts)


def merged_evidence(found: Mapping[str, Evidence], asked: Sequence[str]) -> Evidence:
    """What several nodes know, as one: each line of a host says which host it is of, and who was silent is noted."""
    silent = tuple(f"node {node} did not answer" for node in asked if node not in found)
    notes = tuple(f"{node}: {note}" for node, evidence in found.items() for note in evidence.notes)
    return Evidence(
        exit={rank: status for evidence in found.values() for rank, status in evidence.exit.items()},
        log=_lines(found, "log"),
        kernel=_lines(found, "kernel"),
        scheduler=_lines(found, "scheduler"),
        ours=_lines(found, "ours"),
        order=_lines(found, "order"),
        notes=notes + silent,
    )


def _lines(found: Mapping[str, Evidence], field: str) -> tuple[str, ...]:
    return tuple(line for evidence in found.values() for line in getattr(evidence, field))
