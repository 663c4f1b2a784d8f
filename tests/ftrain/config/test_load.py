"""The loader: everything wrong at once, each with where, what, what is allowed and a hint; nothing wrong passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.config import Config, KeepBest, KeepEvery, KeepLast, canonical
from ftrain.load import (
    ConfigProblems,
    active_parameters,
    changes,
    fingerprint,
    layout_summary,
    load,
    num_parameters,
    parse,
    resolve,
    to_toml,
)

MINIMAL = """
[run]
url = "runs/x"
steps = 10
[model]
layers = 2
hidden = 32
heads = 4
ffn = 64
vocab = 257
[data]
sources = [{path = "stdlib"}]
seq_len = 16
[batch]
global_batch = 4
[optimizer]
lr = 1e-3
"""


def problems(text: str, *overrides: str) -> dict[str, str]:
    """Path of each problem -> the problem in words."""
    with pytest.raises(ConfigProblems) as caught:
        parse(text, overrides)
    return {problem.path: str(problem) for problem in caught.value.problems}


def test_defaults_file_and_overrides_in_this_precedence() -> None:
    config = parse(MINIMAL + "[schedule]\nwarmup_steps = 3", ["schedule.warmup_steps=5", "model.tied=true", "optimizer.lr=1"])
    assert config.schedule.warmup_steps == 5
    assert config.schedule.kind == "cosine"
    assert config.model.tied is True
    assert config.optimizer.lr == 1.0


def test_overrides_reach_into_lists_and_take_bare_words() -> None:
    config = parse(
        MINIMAL,
        ["data.sources.0.weight=2", "run.url=s3://bucket/a-b", "faults=[{step = 3}]", "faults.0.step=4", "schedule.kind=wsd"],
    )
    assert config.data.sources[0].weight == 2.0
    assert config.run.url == "s3://bucket/a-b"
    assert config.faults[0].step == 4
    assert config.schedule.kind == "wsd"


@pytest.mark.parametrize(
    ("written", "begins", "ends"),
    [
        ('["data/texts"]', 'data.sources.0: given "data/texts" (text); ', '; write {path = "data/texts"}'),
        ("data/texts", 'data.sources: given "data/texts" (text); ', '; write [{path = "data/texts"}]'),
        ("[3]", "data.sources.0: given 3 ", "; allowed: table with path, weight"),
    ],
)
def test_what_stands_alone_is_shown_as_the_table_that_it_should_be(written: str, begins: str, ends: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        parse(MINIMAL, [f"data.sources={written}"])
    (told,) = [str(problem) for problem in caught.value.problems]
    assert (told.startswith(begins), told.endswith(ends)) == (True, True), told


@pytest.mark.parametrize("word", ["2024-01-01", "a b", "/tmp/x=y", "12:30:00"])
def test_what_is_no_toml_value_is_text(word: str) -> None:
    assert parse(MINIMAL, [f"run.url={word}"]).run.url == word


def test_a_number_where_text_is_wanted_is_text() -> None:
    """The shell takes quotes away: 60 is a time limit as Slurm writes it, and a path may be a number."""
    config = parse(MINIMAL, ["slurm.time=60", "slurm.sbatch=['--x']", "slurm.sbatch.0=7", "data.sources.0.path=1.50"])
    assert (config.slurm.time, config.slurm.sbatch, config.data.sources[0].path) == ("60", ("7",), "1.50")


def test_retention_is_a_tagged_list() -> None:
    text = '[checkpoint]\nretention = [{keep = "last", n = 2}, {keep = "every", steps = 5}, {keep = "best"}]'
    config = parse(MINIMAL + text, ["evaluate.every_steps=5"])
    assert config.checkpoint.retention == (KeepLast(n=2), KeepEvery(steps=5), KeepBest(n=1))


def test_hardware_that_is_none_is_told_with_a_wrong_value() -> None:
    for extra in ("run.steps=abc", "batch.micro_batch=0", "machine.threadz=1"):
        found = problems(MINIMAL, extra, "machine.hardware=h1000")
        assert set(found) == {extra.partition("=")[0], "machine.hardware"}
    assert set(problems(MINIMAL, "run.steps=abc", "machine=3")) == {"run.steps", "machine"}
    assert set(problems(MINIMAL, "machine.hardware=3")) == {"machine.hardware"}


def test_all_problems_come_at_once() -> None:
    text = """
    [run]
    url = ""
    stepz = 3
    [model]
    layers = "4"
    hidden = 30
    heads = 4
    ffn = 0
    vocab = 100
    [data]
    sources = []
    seq_len = 8
    [batch]
    global_batch = 4.0
    [optimizer]
    lr = nan
    [schedule]
    kind = "cosin"
    [parallel]
    tpp = 2
    [checkpoint]
    retention = [{keep = "lst"}, {n = 3}, {keep = "every"}]
    """
    found = problems(text, "batch.micro_batch=x", "schedule.warmup_steps.y=3", "nonsense")
    assert found == {
        "--set nonsense": "--set nonsense: not of the form a.b=v; allowed: e.g. --set parallel.ranks=4",
        "run.url": 'run.url: given "" (text); allowed: non-empty text',
        "run.stepz": "run.stepz: unknown key; allowed: url, steps, seed, local_dir; did you mean `steps`?",
        "run.steps": "run.steps: required, but missing; allowed: whole number >= 1; optimizer steps of the whole run; "
        "another number reshapes the learning rate's curve (cosine, wsd)",
        "model.layers": 'model.layers: given "4" (text); allowed: whole number >= 1 and <= 8192',
        "model.ffn": "model.ffn: given 0 (whole number); allowed: whole number >= 1",
        "data.sources": "data.sources: given an empty list; allowed: non-empty list of tables",
        "batch.global_batch": "batch.global_batch: given 4.0 (number); allowed: whole number >= 1 and <= 16777216",
        "batch.micro_batch": 'batch.micro_batch: given "x" (text); allowed: whole number >= 1 and <= 16777216',
        "optimizer.lr": "optimizer.lr: given nan (number); allowed: number > 0",
        "schedule.kind": 'schedule.kind: given "cosin" (text); allowed: one of "constant", "cosine", "wsd"; '
        "did you mean `cosine`?",
        "schedule.warmup_steps": "schedule.warmup_steps: given {y = 3} (table); allowed: whole number >= 0",
        "parallel.tpp": "parallel.tpp: unknown key; allowed: ranks, tp, cp, pp, ep, order, sp, sp_regather, tp_overlap, "
        "cp_exchange, sharding, fsdp_inner, bucket_mib, schedule, virtual_stages, layer_counts, recompute, overlap_reduce, "
        "overlap_gather; did you mean `tp`?",
        "checkpoint.retention.0.keep": 'checkpoint.retention.0.keep: given "lst" (text); '
        'allowed: one of "last", "every", "best", "pinned", "young"; did you mean `last`?',
        "checkpoint.retention.1.keep": "checkpoint.retention.1.keep: required, but missing; "
        'allowed: one of "last", "every", "best", "pinned", "young"',
        "checkpoint.retention.2.steps": "checkpoint.retention.2.steps: required, but missing; "
        "allowed: whole number >= 1; multiple of this many steps",
        # combinations that no wrong value takes part in are found beside them
        "model.hidden": "model.hidden: given 30, with model.heads = 4 and no model.head_dim; "
        "allowed: a multiple of model.heads; nearest: 28 or 32, or give model.head_dim",
        "model.vocab": 'model.vocab: given 100, with data.tokenizer = "byte"; '
        "allowed: at least 257: 256 bytes and the end-of-document token; nearest: 257",
    }


def test_layouts_to_certify_are_checked_with_the_rest() -> None:
    listed = """certify.layouts=["dp=2", "tp=3", "banana", "tp=2,tp=4", " ", "sauce.x=1", "pp=2;pp=9", "model.layerz=3"]"""
    with pytest.raises(ConfigProblems) as caught:
        parse(MINIMAL, [listed])
    told = [str(problem) for problem in caught.value.problems]
    for index, words in (
        (1, 'given "tp=3": parallel.tp: given 3, with model.heads = 4; allowed: a divisor'),
        (2, """given "banana"; allowed: key=value"""),
        (3, "allowed: once in a layout"),
        (4, 'given " "; allowed: a layout such as'),
        (5, "allowed: such as model or batch"),
        (6, 'given "pp=2;pp=9": pp=9: parallel.pp: given 9'),
        (7, "did you mean `layers`?"),
    ):
        assert any(text.startswith(f"certify.layouts.{index}: ") and words in text for text in told), (index, told)
    assert not any(text.startswith("certify.layouts.0") for text in told)


@pytest.mark.parametrize("wrong", ["run.steps=no", "model.hidden=33"])
def test_one_mistake_outside_is_not_told_of_each_layout(wrong: str) -> None:
    """The words are looked at all the same; what they come to is told when the rest is well."""
    found = problems(MINIMAL, wrong, 'certify.layouts=["tp=2", "dp=2", "tp=3", "tp=x"]')
    assert set(found) == {wrong.partition("=")[0], "certify.layouts.3"}


def test_a_combination_with_a_wrong_value_in_it_is_not_guessed() -> None:
    assert set(problems(MINIMAL, "parallel.tp=0", "model.hidden=30", "batch.micro_batch=-1")) == {
        "parallel.tp",
        "batch.micro_batch",
        "model.hidden",
    }


def test_an_item_of_a_list_that_the_file_leaves_out_is_that_of_the_default() -> None:
    assert parse(MINIMAL, ["checkpoint.retention.0.n=7"]).checkpoint.retention == (KeepLast(n=7),)
    assert parse(MINIMAL).checkpoint.retention == (KeepLast(n=3),), "the default is what it was"
    given = ["checkpoint.retention=[{keep='last', n=1}, {keep='every', steps=5}]", "checkpoint.retention.1.steps=9"]
    assert parse(MINIMAL, given).checkpoint.retention == (KeepLast(n=1), KeepEvery(steps=9))


def test_a_missing_section_is_reported_by_its_missing_keys() -> None:
    found = problems("")
    assert set(found) == {
        "run.url",
        "run.steps",
        "model.layers",
        "model.hidden",
        "model.heads",
        "model.ffn",
        "model.vocab",
        "data.sources",
        "data.seq_len",
        "batch.global_batch",
        "optimizer.lr",
    }


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        pytest.param("steps=3", "steps", "did you mean `run.steps`?", id="key at the top that belongs into a section"),
        pytest.param("modle.layers=3", "modle", "did you mean `model`?", id="section"),
        pytest.param("data.sources.3.path=x", "data.sources.3.path", "no item 3", id="item that is not there"),
        pytest.param(
            "faults.0.step=2", "faults.0.step", "the whole list: --set 'faults=[...]'", id="item of a list that is empty"
        ),
        pytest.param("run.steps.x=1", "run.steps.x", "`run.steps` is a value", id="path through a value"),
        pytest.param("model=3", "model", "given 3 (whole number); allowed: table with layers", id="value for a section"),
        pytest.param("model.tied=1", "model.tied", "allowed: true or false", id="number for a boolean"),
        pytest.param("run.steps=true", "run.steps", "given true (boolean)", id="boolean for a number"),
        pytest.param("optimizer.lr=inf", "optimizer.lr", "given inf", id="infinite"),
        pytest.param("optimizer.beta1=1", "optimizer.beta1", "number >= 0 and < 1", id="end exclusive"),
        pytest.param("data.sources=stdlib", "data.sources", 'given "stdlib" (text)', id="text for a list"),
        pytest.param("faults=[{step = 1, at = 'stpe'}]", "faults.0.at", "did you mean `step`?", id="unknown fault point"),
        pytest.param("checkpoint.retention=[3]", "checkpoint.retention.0", "table with `keep`", id="item of the wrong kind"),
        pytest.param('parallel.order=["tp", "xp"]', "parallel.order.1", 'given "xp"', id="unknown axis"),
    ],
)
def test_single_problems(override: str, path: str, words: str) -> None:
    assert words in problems(MINIMAL, override)[path]


def test_a_file_that_cannot_be_read_or_parsed(tmp_path: Path) -> None:
    with pytest.raises(ConfigProblems, match="No such file"):
        load(str(tmp_path / "missing.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigProblems, match="not TOML"):
        load(str(broken))
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigProblems, match="not UTF-8"):
        load(str(broken))


@given(url=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip))
def test_resolved_toml_and_record_load_back_equal(url: str) -> None:
    plain = parse(MINIMAL, ["faults=[{step = 3}]"])
    config = msgspec.structs.replace(plain, run=msgspec.structs.replace(plain.run, url=url))
    assert parse(to_toml(config)) == config
    assert resolve(msgspec.json.decode(canonical(config))) == config


def test_fingerprint_ignores_what_is_free_and_nothing_else() -> None:
    config = parse(MINIMAL)
    assert fingerprint(config) == fingerprint(parse(to_toml(config)))
    assert fingerprint(config) == fingerprint(parse(MINIMAL, ["run.url=elsewhere", "faults=[{step=1}]", "recovery.stop_s=1"]))
    others = [
        "run.steps=11",
        "model.tied=true",
        "data.seq_len=32",
        "optimizer.lr=1",
        "parallel.ranks=2",
        "data.sources.0.weight=2",
    ]
    assert len({fingerprint(config), *(fingerprint(parse(MINIMAL, [other])) for other in others)}) == 1 + len(others)


def test_fingerprint_is_the_same_in_another_process() -> None:
    code = f"from ftrain.load import fingerprint, parse; print(fingerprint(parse({MINIMAL!r})))"
    out = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == fingerprint(parse(MINIMAL))


def test_changes_name_path_values_and_class() -> None:
    old = parse(MINIMAL)
    new = parse(MINIMAL, ["run.url=b", "optimizer.lr=2", "data.seq_len=32", "model.hidden=64", "data.sources.0.weight=3"])
    assert [(c.path, c.old, c.new, c.kind) for c in changes(old, new)] == [
        ("run.url", "runs/x", "b", "free"),
        ("model.hidden", 32, 64, "refused"),
        ("data.sources", [{"path": "stdlib", "weight": 1.0}], [{"path": "stdlib", "weight": 3.0}], "accept"),
        ("data.seq_len", 16, 32, "accept"),
        ("optimizer.lr", 0.001, 2.0, "recorded"),
    ]
    assert changes(old, old) == []


def test_every_field_has_a_class_and_a_meaning() -> None:
    from msgspec import inspect as mi

    from ftrain.schema import bare, description

    top = mi.type_info(Config)
    assert isinstance(top, mi.StructType)
    for section in top.fields:
        inner = bare(section.type)
        fields = inner.fields if isinstance(inner, mi.StructType) else (section,)
        for field in fields:
            where = f"{section.name}.{field.name}"
            assert description(field.type), where
            assert isinstance(field.type, mi.Metadata), where
            assert (field.type.extra or {}).get("on_resume") in ("free", "recorded", "accept", "refused"), where


@given(
    layers=st.integers(1, 5),
    heads=st.integers(1, 4),
    size=st.sampled_from([2, 4]),
    ffn=st.integers(1, 9),
    tied=st.booleans(),
    experts=st.integers(0, 3),
)
def test_parameters_are_counted_as_the_shapes_say(
    layers: int, heads: int, size: int, ffn: int, tied: bool, experts: int
) -> None:
    sets = ["model.experts_per_token=1", f"model.experts={experts}"]
    sets += [f"model.layers={layers}", f"model.heads={heads}", f"model.ffn={ffn}", f"model.tied={str(tied).lower()}"]
    config = parse(MINIMAL, [*sets, f"model.hidden={heads * size}"])
    hidden = heads * size
    shapes = [(257, hidden), *([] if tied else [(257, hidden)]), (hidden,)]
    swiglu = [(hidden, ffn)] * 3
    layer = [(hidden, hidden)] * 4 + swiglu * max(1, experts) + [(hidden,)] * 2 + [(experts, hidden)] * bool(experts)
    total = sum(a[0] * (a[1] if len(a) > 1 else 1) for a in shapes + layer * layers)
    assert num_parameters(config) == total
    assert active_parameters(config) == total - layers * max(0, experts - 1) * 3 * hidden * ffn


def test_layout_summary_says_unequal_shares() -> None:
    text = layout_summary(parse(MINIMAL, ["parallel.ranks=3", "batch.global_batch=8"]))
    assert "dp 3" in text
    assert "8 micro-batches of 1 over 3 replicas: 3 on 2, 2 on 1" in text


def test_the_loader_does_not_import_torch() -> None:
    modules = "ftrain.load, ftrain.reference, ftrain.data.dataset, ftrain.cli.data"
    code = f"import sys; import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
