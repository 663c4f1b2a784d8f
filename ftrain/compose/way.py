"""What an attempt has before it, given the state it begins with: its phase, and how far it goes."""

from __future__ import annotations

import msgspec

from ftrain.checkpoint.messages import Final
from ftrain.checkpoint.restore import Restored
from ftrain.compose.args import WorkerArgs
from ftrain.config import Config
from ftrain.course import course, curve, recalled
from ftrain.data.dataset import Dataset
from ftrain.data.reading import reading
from ftrain.train.loop import Loop, Progress
from ftrain.train.step import Engine


class Way:
    """The part of a run that a worker's attempt can go."""

    def __init__(self, args: WorkerArgs, restored: Restored) -> None:
        """`restored`: the state; it may belong to another phase than the attempt was planned for."""
        self._whole = whole_config(args)
        self._planned = args.phase
        progress = {**restored.progress, "step": restored.step}
        self._cursor = recalled(self._whole, progress)
        self._legs = course(self._whole, self._cursor)

    @property
    def begun(self) -> list[tuple[int, int]]:
        """Of each phase that has begun: the updates before its first one, and the sequences read in it."""
        return [(part.first_step, part.sequences) for part in self._cursor.begun]

    def train(self, engine: Engine, loop: Loop, progress: Progress) -> Final:
        """To the end of the phase; not a step if the state is of another phase."""
        if self._cursor.phase != self._planned:
            return Final(step=self._cursor.step, outcome="phase", begun=self.begun)
        assert isinstance(engine.dataset, Dataset)
        engine.dataset.go_on(reading(self._whole, self._cursor))
        engine.curve = curve(self._whole, self._legs, self._planned)
        loop.end_after(self._legs[self._planned].stop_step)
        progress.begun = self.begun
        final = loop.run(progress)
        self._cursor = recalled(self._whole, progress.record())
        return msgspec.structs.replace(final, begun=self.begun)


def whole_config(args: WorkerArgs) -> Config:
    """The config of all phases, of which this attempt has one."""
    return msgspec.convert(args.whole or args.config, Config)
