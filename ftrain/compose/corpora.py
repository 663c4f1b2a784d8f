"""Whether the data of a config can be trained on, and its texts be read, asked before the first process is started.

A worker that finds a corpus missing, or too short for its config, dies; so does its successor, and the run is given up over
what was a slip in the config. Opening the files as a worker does costs a look at their index: the tokens are mapped, not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ftrain.compose.errors import RefusedError
from ftrain.config import Config
from ftrain.data.dataset import Dataset
from ftrain.data.errors import LibraryMissingError, TokenizerError
from ftrain.data.stdlib import STDLIB, cache_root, find_stdlib
from ftrain.data.tokenizer import load_tokenizer
from ftrain.phases import effective, num_phases


def check_data(config: Config, *, prepare: bool = False, tokenizer: bool = True) -> str:
    """What there is to train on, in words. Raises RefusedError or DataError (given, allowed, what to do) if it cannot be used.

    Without `prepare`, a built-in corpus that no run has prepared yet is passed over, and with it the size of the held-out text.
    """
    if tokenizer:
        check_tokenizer(config)
    return "; ".join(
        _check_phase(effective(config, number), f"phase {number}: " if config.phases else "", prepare=prepare)
        for number in range(num_phases(config))
    )


def _check_phase(config: Config, name: str, *, prepare: bool) -> str:
    _check_files(config)
    waits = not prepare and any(source.path == STDLIB for source in config.data.sources) and find_stdlib(cache_root()) is None
    if waits:
        others = tuple(source for source in config.data.sources if source.path != STDLIB)
        if others:
            Dataset(_only(config, others), root=cache_root())
        return f"{name}{len(others)} corpora can be read; {STDLIB!r} is prepared by the first run"
    data = Dataset(config, root=cache_root())
    train = data.train_tokens_per_pass // data.seq_len
    return f"{name}{train} training and {data.num_heldout} held-out sequences of {data.seq_len} tokens"


def probe(config: dict[str, Any]) -> str:
    """`check_data` as a check of `ftrain doctor`, in a process that may hang on a dead file system."""
    return check_data(msgspec.convert(config, Config))


def check_tokenizer(config: Config) -> None:
    """Training reads ids and needs no tokenizer; whoever wants a text of the model does, when the run is paid for.

    So it is a fault of a run that begins, and none of one that goes on. Raises RefusedError.
    """
    name, vocab = config.data.tokenizer, config.model.vocab
    try:
        words = load_tokenizer(name)
    except LibraryMissingError:
        return  # where the texts are read it may be installed
    except TokenizerError as error:
        raise RefusedError([f"data.tokenizer: {error}{_counted_from([name])}"]) from error
    if words.vocab > vocab:
        raise RefusedError(
            [
                f'model.vocab: given {vocab}, and data.tokenizer "{name}" has {words.vocab} tokens; allowed: at least as many; '
                f"nearest: {words.vocab}"
            ]
        )


def _check_files(config: Config) -> None:
    lacks = {
        source.path: [source.path + ending for ending in (".idx", ".bin") if not Path(source.path + ending).is_file()]
        for source in config.data.sources
        if source.path != STDLIB
    }
    problems = [
        f'data.sources: given "{path}", and {" and ".join(missing)} {"is" if len(missing) == 1 else "are"} not there; allowed: '
        f'the prefix of a pair of .idx and .bin, or "{STDLIB}"; `ftrain data prepare TEXTS --out {path}` makes a pair'
        f"{_counted_from(missing)}"
        for path, missing in lacks.items()
        if missing
    ]
    if problems:
        raise RefusedError(problems)


def _counted_from(paths: list[str]) -> str:
    """Where relative paths were looked for: whoever stands in another folder than usual sees it by that."""
    if all(Path(path).is_absolute() for path in paths):
        return ""
    looked = " and ".join(str(Path(path).absolute()) for path in paths)
    return f"; looked for {looked}: paths count from the folder the command is given in, not from the config's"


def _only(config: Config, sources: tuple[Any, ...]) -> Config:
    """The config with some of its corpora: how much they hold out together says nothing, so it is not asked."""
    replace = msgspec.structs.replace
    return replace(config, data=replace(config.data, sources=sources), evaluate=replace(config.evaluate, every_steps=0))
