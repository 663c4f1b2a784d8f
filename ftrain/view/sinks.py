"""A run's curves in other people's dashboards: TensorBoard and Weights & Biases, fed from the ledger.

They are fed by a process of their own, not by the run: a dashboard that is slow, full or gone must not cost a step, and a run
that was never told of them can still be shown afterwards. Both libraries are extras, imported when asked for.

A roll-back is told to TensorBoard as it expects it (a session that starts at a step: what was written beyond is hidden).
Weights & Biases cannot take steps back, so there the x axis is a metric of its own, and every point carries its attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from recovery.events import Evaluated, Event, InterruptionClassified, Ready, RunStarted, steps_of

Values = dict[str, float]


class MissingExtraError(ValueError):
    """The library of a dashboard is not installed."""


class Sink(Protocol):
    """A dashboard. Steps come in the order in which they were done; `t` is unix time."""

    def values(self, step: int, t: float, values: Values) -> None:
        """Points of curves at a step."""

    def back(self, step: int, t: float) -> None:
        """The run goes on from the state of `step`: what came after it is undone."""

    def said(self, step: int, t: float, text: str) -> None:
        """Something that happened, in words."""

    def close(self) -> None:
        """Everything is written."""


class TensorBoard:
    """Event files in a folder, without torch and without TensorFlow."""

    def __init__(self, folder: Path) -> None:
        """`folder` is made if it is missing."""
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtraError("TensorBoard is not installed: pip install 'ftrain-runtime[tensorboard]'") from error
        folder.mkdir(parents=True, exist_ok=True)
        self._event, self._summary = event_pb2, summary_pb2
        self._file = EventFileWriter(str(folder))

    def values(self, step: int, t: float, values: Values) -> None:
        """One event a step."""
        points = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._file.add_event(self._event.Event(wall_time=t, step=step, summary=self._summary.Summary(value=points)))

    def back(self, step: int, t: float) -> None:
        """A session starts at the step after."""
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._file.add_event(self._event.Event(wall_time=t, step=step + 1, session_log=start))

    def said(self, step: int, t: float, text: str) -> None:
        """A text summary."""
        from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2, types_pb2

        data = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, tensor_shape=shape, string_val=[text.encode()])
        metadata = self._summary.SummaryMetadata(plugin_data=data)
        value = self._summary.Summary.Value(tag="events", metadata=metadata, tensor=tensor)
        self._file.add_event(self._event.Event(wall_time=t, step=step, summary=self._summary.Summary(value=[value])))

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


class WeightsAndBiases:
    """One run of a project; its own variables (WANDB_MODE, WANDB_DIR, ...) hold."""

    def __init__(self, project: str, run_id: str) -> None:
        """`run_id`: the same one goes on with the same curves."""
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("Weights & Biases is not installed: pip install 'ftrain-runtime[wandb]'") from error
        name = "".join(character if character.isalnum() or character in "-_" else "-" for character in run_id).strip("-")
        self._run = wandb.init(project=project, id=name[-64:], name=run_id, resume="allow")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._attempt = 0

    def values(self, step: int, t: float, values: Values) -> None:
        """One point a step."""
        self._run.log({"step": step, "attempt": self._attempt, "time": t, **values})

    def back(self, step: int, t: float) -> None:
        """Points that follow belong to the next attempt."""
        self._attempt += 1

    def said(self, step: int, t: float, text: str) -> None:
        """An alert, where those are on."""
        self._run.alert(title=f"step {step}", text=text)

    def close(self) -> None:
        """Everything is handed over."""
        self._run.finish()


class Pump:
    """Hands a run's events to a sink: `add` what is new, as often as wanted."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._step, self._attempts = sink, 0, 0

    def add(self, events: Iterable[Event], lines: Iterable[dict[str, Any]] = ()) -> None:
        """`lines` are of metrics.jsonl: what only the ranks know of a step, about a step later."""
        for event in events:
            self._event(event)
        for line in lines:
            told = dict(_of_line(line))
            if told:
                self._sink.values(int(line["step"]), float(line["t_end"]), told)

    def _event(self, event: Event) -> None:
        if isinstance(event, Ready):
            if self._attempts and event.step < self._step:
                self._sink.back(event.step, event.t)
            self._attempts, self._step = self._attempts + 1, event.step
        for record in steps_of(event):
            seconds = record.t_end - record.t_begin
            found = {"train/loss": record.loss, "train/grad_norm": record.grad_norm, "train/lr": record.lr}
            values = {name: value for name, value in found.items() if value is not None}
            rate = {"speed/tokens_per_s": record.tokens / seconds} if seconds > 0 else {}
            self._sink.values(record.step, record.t_end, {**values, **rate, "speed/step_s": seconds})
            self._step = record.step
        if isinstance(event, Evaluated) and event.loss is not None:
            self._sink.values(event.step, event.t, {"eval/loss": event.loss})
        if isinstance(event, InterruptionClassified):
            self._sink.said(self._step, event.t, f"{event.verdict.class_}: {event.verdict.reason}")
        if isinstance(event, RunStarted) and self._attempts:
            self._sink.said(self._step, event.t, "a supervisor took the run up again")


def _of_line(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for bucket, seconds in line.get("mean", {}).items():
        yield f"step/{bucket}_s", float(seconds)
    if line.get("mfu") is not None:
        yield "speed/mfu", float(line["mfu"])
    if line.get("tflops") is not None:
        yield "speed/tflops_a_rank", float(line["tflops"])
    if line.get("memory"):
        yield "memory/peak_bytes", float(max(row[4] for row in line["memory"]))
