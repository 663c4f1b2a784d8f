"""Checkpoints as other people's files, and back: where storage's formats meet the model's names.

An export is the weights under Hugging Face's names with a `config.json`, or the whole state with the slot in front of each
name. An import makes a run of its own with one checkpoint, from which `ftrain run --from` begins: what the source does not hold
(masters, moments) is derived by the one rule there is, and the progress record says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np

from ftrain.compose.errors import RefusedError
from ftrain.compose.paths import folder_of
from ftrain.compose.stores import open_place
from ftrain.compose.weights import of_a_script, weights_of
from ftrain.config import Config, Model
from ftrain.load import load
from ftrain.model.names import (
    Family,
    UnknownModelError,
    hugging_face_config,
    hugging_face_name,
    model_of_config,
    our_names,
    pieces,
)
from ftrain.parallel.arrays import MASTER, SLOTS, WEIGHTS, StateTypes, array_specs
from ftrain.parallel.layout import ParameterSpec, parameters
from ftrain.parallel.shape import MeshShape
from ftrain.phases import config_of
from ftrain.schemes import is_local
from storage.box import Box
from storage.checkpoint import Checkpoint, native_dtype
from storage.commit import CommitRef
from storage.errors import ConfigurationError, CoverageError, FormatError, ObjectMissing
from storage.exchange.tensor import Tensor, Values, bfloat16_bits, from_checkpoint, index, stack, widened
from storage.exchange.write import Incoming, write_checkpoint
from storage.objects import ObjectStore
from storage.pack import ArraySpec
from storage.record import decode_json
from storage.run import RunStore

Form = Literal["safetensors", "dcp", "zarr"]
BUCKET_BYTES = 64 * 2**20  # the default of parallel.bucket_mib: an import's tiles are those of a run with default settings
PROGRESS = "ftrain.json"
LAST_OF_EXPORTS = ("model.safetensors", "model.safetensors.index.json", ".metadata", "zarr.json")
"""What each form writes when its arrays are whole: an export that was interrupted lacks it, and may be begun again."""
BESIDE = ("config.json", PROGRESS)
"""What an export writes after that: found without it, it is somebody else's."""
WIDENABLE = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote."""

    step: int
    arrays: int
    nbytes: int


def export(
    checkpoint: Checkpoint,
    form: Form,
    destination: ObjectStore,
    *,
    dtype: str = "bfloat16",
    state: bool = False,
    compress: bool = False,
) -> Exported:
    """Write a checkpoint as `form`. `dtype` float32: the masters instead of the weights. `state`: masters and moments too.

    `compress`: without loss; only Zarr has a word for it. Raises RefusedError where an export is already: what the new one does
    not overwrite of it would be read as its own; and where a config.json is that would be overwritten.
    """
    if found := next((key for key in LAST_OF_EXPORTS if destination.exists(key)), None):
        raise RefusedError([f"{destination.url} holds an export already ({found}), and is left as it is: give another folder"])
    if found := next((key for key in BESIDE if destination.exists(key)), None):
        raise RefusedError([f"{destination.url} holds a {found} already, and is left as it is: give another folder"])
    if compress and form != "zarr":
        raise ConfigurationError(f"{form} files are not compressed; leave out --compress, or export to zarr")
    tensors = list(_outgoing(checkpoint, dtype=dtype, state=state))
    if not tensors:
        raise FormatError(_nameless(checkpoint))
    _write(form, destination, tensors, compress)
    if state:
        destination.put(PROGRESS, msgspec.json.format(msgspec.json.encode(checkpoint.progress), indent=2))
    config = _config_json(checkpoint, dtype)
    if config is not None:
        destination.put("config.json", msgspec.json.format(msgspec.json.encode(config), indent=2))
    return Exported(step=checkpoint.step, arrays=len(tensors), nbytes=sum(tensor.nbytes for tensor in tensors))


def _nameless(checkpoint: Checkpoint) -> str:
    """Why nothing can be exported of a script's checkpoint, and what can be done with it."""
    step = checkpoint.step
    return (
        f"{of_a_script(checkpoint)}, Hugging Face has none for them, and any export is under its names. Each array under its "
        f"own name: `ftrain ckpt view URL@{step}` for plain Zarr; in Python torch.distributed.checkpoint, with "
        f"`dcp.load(state, storage_reader=ftrain.DcpReader(URL, step={step}))`"
    )


def _outgoing(checkpoint: Checkpoint, *, dtype: str, state: bool) -> Iterator[Tensor]:
    kind: Family = "qwen3_moe" if f"{MASTER}/layers.0.attention.q_norm" in checkpoint.names else "mixtral"
    if dtype != "float32":
        for tensor in weights_of(checkpoint):
            yield from _theirs(tensor, tensor.name, kind)
    for name in checkpoint.names:
        slot, _, parameter = name.partition("/")
        if slot == MASTER and dtype == "float32":
            yield from _theirs(from_checkpoint(checkpoint, name, name), parameter, kind)
        if state and slot in SLOTS and slot != WEIGHTS:
            yield from _theirs(from_checkpoint(checkpoint, name, name), parameter, kind, f"{slot}/")


def _theirs(tensor: Tensor, parameter: str, kind: Family, prefix: str = "") -> Iterator[Tensor]:
    """A parameter's array under the names it goes by elsewhere, where every expert's matrix has one of its own."""
    for number, piece in enumerate(pieces(parameter, tensor.shape)):
        name = prefix + hugging_face_name(piece, kind)
        yield replace(tensor, name=name) if piece == parameter else index(tensor, number, name)


def _write(form: Form, destination: ObjectStore, tensors: list[Tensor], compress: bool) -> None:
    if form == "safetensors":
        from storage.exchange.safetensors import write_safetensors

        write_safetensors(destination, tensors)
    elif form == "dcp":
        from storage.exchange.dcp import write_dcp

        write_dcp(destination, tensors)
    else:
        from storage.exchange.zarr_folder import write_zarr

        write_zarr(destination, tensors, compress=compress)


def _config_json(checkpoint: Checkpoint, dtype: str) -> dict[str, Any] | None:
    """The model's `config.json`, if the progress record says which model it is."""
    saved = _saved(checkpoint.progress)
    if "model" not in saved:
        return None
    model = msgspec.convert(saved["model"], Model)
    seq_len = saved.get("data", {}).get("seq_len") or saved.get("seq_len") or 4096
    return hugging_face_config(model, seq_len=seq_len, dtype=dtype)


def _saved(progress: dict[str, Any]) -> dict[str, Any]:
    """What is known of the config: that of the checkpoint's phase, or what an import noted."""
    if not progress.get("config"):
        return dict(progress.get("imported") or {})
    try:
        return dict(msgspec.to_builtins(config_of(progress)))
    except msgspec.ValidationError:
        return dict(progress["config"])  # written by another version


def import_run(form: Literal["safetensors", "dcp"], source: str, url: str, *, config: str | None = None) -> CommitRef:
    """Make a run at `url` of the model in `source`. `config`: a run's TOML or a Hugging Face config.json, if not beside it.

    Raises CoverageError with everything that is missing, extra or of another shape, before anything is written;
    ConfigurationError if there is nothing at `source`.
    """
    store, target = open_place(source), open_place(url)
    try:
        run = RunStore(target)
        if run.checkpoints():
            raise RefusedError([f"{url} has checkpoints already: an import makes a run of its own, give another URL"])
        with _there(store, source):
            model, seq_len = _model(store, config)
            with _opened(form, store) as found:
                given = _Given(found)
                specs = parameters(model, MeshShape())
                given.require(specs)
                progress = _progress(store, given, form, source, model, seq_len)
                epoch = run.take_epoch(owner={"import": source, "form": form}, starts_from=None)
                arrays = array_specs(specs, MeshShape(), bucket_bytes=BUCKET_BYTES, types=StateTypes())
                arrays.sort(key=lambda spec: (spec.name.partition("/")[2], spec.name))  # a parameter's slots follow one another
                incoming = [Incoming(spec, given.reader(spec)) for spec in arrays]
                return write_checkpoint(
                    run, incoming, step=progress["step"], epoch=epoch, progress=progress, created_s=time.time()
                )
    finally:
        store.close()
        target.close()


@contextmanager
def _there(store: ObjectStore, source: str) -> Iterator[None]:
    """Of a source that is not there at all, whatever is missed first (a config, a file) would be no help to anybody."""
    place = folder_of(source) if is_local(source) else None
    wanted = "give the folder, or the URL, of the model's files"
    if place is not None and not place.is_dir():
        why = "a file" if place.exists() else "no such folder"
        raise ConfigurationError(f"{source}: there is {why}; {wanted}")
    try:
        yield
    except (ConfigurationError, ObjectMissing) as error:
        if place is not None or any(True for _ in store.list("")):
            raise
        raise ConfigurationError(f"{source}: nothing is there; {wanted}") from error


def _other_form(form: str, store: ObjectStore) -> str:
    """The form of what is there, if it is plainly not the one that was named; else empty."""
    if store.exists(".metadata") == (form == "dcp"):
        return ""
    files = any(info.key.endswith(".safetensors") and "/" not in info.key for info in store.list(""))
    return "" if files == (form == "safetensors") else "safetensors" if files else "dcp"


@contextmanager
def _opened(form: str, store: ObjectStore) -> Iterator[Mapping[str, Tensor]]:
    if other := _other_form(form, store):
        raise ConfigurationError(f"{store.url} holds no {form} checkpoint but {other} files: say --from {other}")
    if form == "dcp":
        from storage.exchange.dcp import read_dcp

        with read_dcp(store) as tensors:
            yield tensors
    else:
        from storage.exchange.safetensors import read_safetensors

        yield read_safetensors(store)


def _model(store: ObjectStore, config: str | None) -> tuple[Model, int | None]:
    """The model, and the longest sequence it is said to take."""
    if config is not None and config.endswith(".toml"):
        run: Config = load(config)
        return run.model, run.data.seq_len
    try:
        raw = _read_local(config) if config is not None else store.get("config.json")
    except ObjectMissing as missing:
        text = f"{store.url} has no config.json: give the model with --config (a run's TOML, or a Hugging Face config.json)"
        raise ConfigurationError(text) from missing
    found = decode_json(raw, dict[str, Any], key="config.json")
    try:
        return model_of_config(found), found.get("max_position_embeddings")
    except UnknownModelError as error:
        raise ConfigurationError(f"config.json describes a model that ours is not: {error}") from error


def _read_local(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error


class _Given:
    """What the source holds, sorted by our slots and names."""

    def __init__(self, found: Mapping[str, Tensor]) -> None:
        self.slots: dict[str, dict[str, Tensor]] = {slot: {} for slot in SLOTS}
        self.unknown: list[str] = []
        for slot in SLOTS:
            prefix = "" if slot == WEIGHTS else f"{slot}/"
            keys = [key for key in found if (key.startswith(prefix) if prefix else key.split("/")[0] not in SLOTS[1:])]
            try:
                names, unknown = our_names(key.removeprefix(prefix) for key in keys)
            except UnknownModelError as error:
                raise CoverageError(str(error), problems=error.problems) from error
            self.slots[slot] = {name: found[prefix + key] for name, key in names.items()}
            self.unknown += [prefix + key for key in unknown]

    @property
    def has_state(self) -> bool:
        """Whether masters and both moments are there."""
        return all(self.slots[slot] for slot in SLOTS[1:])

    def require(self, specs: Iterable[ParameterSpec]) -> None:
        """That it is this model, whole, and nothing else; `CoverageError` with every difference if not."""
        problems = [f"{key} is no parameter of this model" for key in self.unknown]
        wanted = {piece: shape for spec in specs for piece, shape in pieces(spec.name, spec.shape).items()}
        for slot, held in self.slots.items():
            if slot != WEIGHTS and not held:
                continue
            self._drop_tied(held, wanted, problems)
            problems += [f"{slot}: {name} is missing" for name in wanted if name not in held]
            problems += [f"{slot}: {name} is no parameter of this model" for name in held if name not in wanted]
            for name in wanted.keys() & held.keys():
                if held[name].shape != wanted[name]:
                    problems.append(f"{slot}: {name} has shape {held[name].shape} instead of {wanted[name]}")
                elif held[name].dtype not in WIDENABLE:
                    problems.append(f"{slot}: {name} is {held[name].dtype}; weights are {', '.join(WIDENABLE)}")
            problems += [f"{slot}: the experts of {name} are of several types" for name in _mixed(held)]
        if problems:
            text = f"the source does not hold this model: {'; '.join(problems[:8])}"
            raise CoverageError(text, problems=problems)

    @staticmethod
    def _drop_tied(held: dict[str, Tensor], wanted: dict[str, Any], problems: list[str]) -> None:
        """Some files hold the head of a tied model a second time: it must be the same values."""
        if "head" in wanted or "head" not in held or "embedding" not in held:
            return
        head, embedding = held.pop("head"), held["embedding"]
        pairs = zip(head.slabs(), embedding.slabs(), strict=False)
        if (head.shape, head.dtype) != (embedding.shape, embedding.dtype) or not all(np.array_equal(a, b) for a, b in pairs):
            problems.append("the config ties head and embedding, but the source holds two different arrays")

    def reader(self, spec: ArraySpec) -> Any:
        """Where the values of one of our arrays come from."""
        slot, _, name = spec.name.partition("/")
        master = self._whole(MASTER, name, spec) or self._whole(WEIGHTS, name, spec)
        assert master is not None, "checked by `require`"
        if slot == MASTER:
            return lambda box: widened(master.read(box), master.dtype)
        if slot == WEIGHTS:  # always the rounded master: whoever loads the state relies on it
            return lambda box: bfloat16_bits(widened(master.read(box), master.dtype))
        given = self._whole(slot, name, spec)
        if given is None:
            return lambda box: _zeros(spec, box)
        return lambda box: widened(given.read(box), given.dtype)

    def _whole(self, slot: str, name: str, spec: ArraySpec) -> Tensor | None:
        """A parameter of a slot, put together of its pieces; None if the slot holds nothing."""
        held = self.slots[slot]
        found = [held[piece] for piece in pieces(name, spec.shape) if piece in held]
        if not found:
            return None
        return stack(found, name) if name not in held else found[0]


def _mixed(held: Mapping[str, Tensor]) -> list[str]:
    """Arrays whose pieces have more than one type, and so cannot be read together."""
    types: dict[str, set[str]] = {}
    for piece, tensor in held.items():
        types.setdefault(piece.partition("[")[0], set()).add(tensor.dtype)
    return [name for name, found in types.items() if len(found) > 1]


def _zeros(spec: ArraySpec, box: Box) -> Values:
    return np.zeros(box.shape, native_dtype(spec.dtype))


def _progress(store: ObjectStore, given: _Given, form: str, source: str, model: Model, seq_len: int | None) -> dict[str, Any]:
    """The progress record: that of the exported run if its whole state is there, else a beginning."""
    record: dict[str, Any] = {"step": 0, "sequences": 0, "tokens": 0, "eval_loss": None, "eval_step": None}
    if given.has_state:
        try:
            exported = decode_json(store.get(PROGRESS), dict[str, Any], key=PROGRESS)
            record |= {key: exported[key] for key in record if key in exported}
        except ObjectMissing:
            pass  # written by another program: moments without a step count begin at 0
    record["imported"] = {
        "form": form,
        "source": source,
        "masters": "as in the source" if given.slots[MASTER] else "weights of the source, widened to float32",
        "moments": "as in the source" if given.has_state else "zero",
        "model": msgspec.to_builtins(model),
        **({"seq_len": seq_len} if seq_len else {}),
    }
    return record
