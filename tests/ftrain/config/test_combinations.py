"""Impossible combinations: each is found, with the nearest legal values, and all together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.combinations import RULES, combinations
from ftrain.load import ConfigProblems, layout_summary, parse
from ftrain.nearest import nearest, nearest_divisor

BASE = """
run = {url = "x", steps = 10}
model = {layers = 4, hidden = 64, heads = 8, ffn = 96, vocab = 257}
data = {sources = [{path = "stdlib"}], seq_len = 24}
batch = {global_batch = 12}
optimizer = {lr = 1}
"""

CASES = [
    pytest.param(["parallel.tp=2", "parallel.ranks=3"], "parallel.ranks", "nearest: 2 or 4", id="ranks"),
    pytest.param(["parallel.order=['tp', 'tp']"], "parallel.order", "exactly once", id="order"),
    pytest.param(["parallel.tp=3", "parallel.ranks=3"], "parallel.tp", "nearest: 2 or 4", id="heads by tp"),
    pytest.param(["model.kv_heads=3"], "model.kv_heads", "nearest: 2 or 4", id="heads by kv heads"),
    pytest.param(
        ["model.heads=6", "model.kv_heads=3", "parallel.tp=2", "parallel.ranks=2", "model.hidden=96"],
        "parallel.tp",
        "a multiple or a divisor of model.kv_heads; nearest: 1 or 3",
        id="kv heads by tp",
    ),
    pytest.param(["model.hidden=60"], "model.hidden", "nearest: 56 or 64, or give model.head_dim", id="width"),
    pytest.param(["model.head_dim=7"], "model.head_dim", "nearest: 6 or 8", id="odd head"),
    pytest.param(["model.ffn=97", "parallel.tp=2", "parallel.ranks=2"], "model.ffn", "nearest: 96 or 98", id="ffn by tp"),
    pytest.param(["parallel.pp=5", "parallel.ranks=5"], "parallel.pp", "nearest: 4", id="layers by pp"),
    pytest.param(
        ["parallel.pp=3", "parallel.ranks=3", "parallel.schedule=zb_v"],
        "parallel.pp",
        "with model.layers = 4 and 2 stages on each rank; allowed: at most one stage per layer; nearest: 2",
        id="layers by virtual stages",
    ),
    pytest.param(["parallel.virtual_stages=2"], "parallel.virtual_stages", "nearest: 1", id="virtual stages of 1f1b"),
    pytest.param(
        ["parallel.virtual_stages=3", "parallel.schedule=zb_v"], "parallel.virtual_stages", "nearest: 2", id="a V of three"
    ),
    pytest.param(
        ["parallel.schedule=interleaved", "parallel.pp=2", "parallel.ranks=2"],
        "parallel.virtual_stages",
        "nearest: 2",
        id="interleaved without virtual stages",
    ),
    pytest.param(
        ["parallel.schedule=interleaved", "parallel.virtual_stages=2"], "parallel.pp", "nearest: 2", id="interleaved alone"
    ),
    pytest.param(
        ["parallel.pp=2", "parallel.ranks=2", "parallel.layer_counts=[3, 2]"],
        "parallel.layer_counts",
        "allowed: 2 numbers, each at least 1, that add up to model.layers = 4; nearest: [2, 2]",
        id="layers dropped or made up",
    ),
    pytest.param(
        ["parallel.pp=2", "parallel.ranks=2", "parallel.layer_counts=[0, 4]"],
        "parallel.layer_counts",
        "each at least 1",
        id="an empty stage",
    ),
    pytest.param(
        [
            "parallel.schedule=interleaved",
            "parallel.virtual_stages=2",
            "parallel.pp=2",
            "parallel.ranks=4",
            "batch.global_batch=10",
        ],
        "batch.global_batch",
        "nearest: 8 or 12",
        id="groups of interleaving",
    ),
    pytest.param(["data.seq_len=22", "parallel.cp=2", "parallel.ranks=2"], "data.seq_len", "nearest: 20 or 24", id="2 cp"),
    pytest.param(["data.seq_len=23", "parallel.tp=2", "parallel.ranks=2"], "data.seq_len", "nearest: 22 or 24", id="seq by tp"),
    pytest.param(
        ["data.document_mask=true", "data.isolate_documents=false"], "data.document_mask", "cannot see", id="a mask alone"
    ),
    pytest.param(["parallel.sharding=fsdp"], "parallel.sharding", "nobody to share with", id="fsdp alone"),
    pytest.param(
        ["parallel.sharding=fsdp", "parallel.ranks=4", "parallel.pp=2", "parallel.schedule=zb_h1"],
        "parallel.sharding",
        "behind each backward",
        id="fsdp and zero bubble",
    ),
    pytest.param(
        ["parallel.sharding=fsdp", "parallel.ranks=4", "parallel.pp=2", "model.tied=true"],
        "parallel.sharding",
        "untied head",
        id="fsdp, tied, in a pipeline",
    ),
    pytest.param(
        ["parallel.sharding=fsdp", "parallel.ranks=2", "parallel.overlap_reduce=true"],
        "parallel.overlap_reduce",
        "nearest: false",
        id="fsdp and our overlaps",
    ),
    pytest.param(["parallel.sharding=fsdp", "parallel.ranks=5"], "batch.global_batch", "nearest: 10 or 15", id="fsdp shares"),
    pytest.param(
        ["parallel.sharding=hfsdp", "parallel.ranks=4", "parallel.fsdp_inner=3"],
        "parallel.fsdp_inner",
        "nearest: 2",
        id="inner groups",
    ),
    pytest.param(["parallel.fsdp_inner=2"], "parallel.fsdp_inner", "no effect", id="inner groups of zero1"),
    pytest.param(["parallel.ep=2", "parallel.ranks=2"], "parallel.ep", "no experts to share out; nearest: 1", id="ep alone"),
    pytest.param(
        ["model.experts=4", "model.experts_per_token=5"], "model.experts_per_token", "nearest: 4", id="too many chosen"
    ),
    pytest.param(
        ["model.experts=4", "parallel.ep=3", "parallel.ranks=6"], "parallel.ep", "nearest: 2", id="experts over ranks"
    ),
    pytest.param(
        ["model.experts=8", "parallel.ep=4", "parallel.ranks=6"],
        "parallel.ep",
        "given 4, with dp x cp = 6 x 1; allowed: a divisor of dp x cp: experts are shared out among replicas; nearest: 2",
        id="ranks over experts",
    ),
    pytest.param(
        ["model.experts=4", "parallel.ep=2", "parallel.ranks=8"],
        "batch.global_batch",
        "replicas that share experts take equal shares; nearest: 8 or 16",
        id="shares of replicas with experts",
    ),
    pytest.param(
        ["model.experts=4", "parallel.ranks=2", "parallel.sharding=fsdp"],
        "parallel.sharding",
        "nearest: zero1",
        id="fsdp of experts",
    ),
    pytest.param(["batch.micro_batch=5"], "batch.micro_batch", "nearest: 4 or 6", id="micro"),
    pytest.param(["parallel.ranks=13"], "batch.global_batch", "nearest: 13", id="fewer micro-batches than replicas"),
    pytest.param(["schedule.warmup_steps=11"], "schedule.warmup_steps", "nearest: 10", id="warm-up"),
    pytest.param(
        ["schedule.kind=wsd", "schedule.warmup_steps=6", "schedule.decay_steps=5"],
        "schedule.warmup_steps",
        "nearest: 5",
        id="warm-up and decay",
    ),
    pytest.param(["schedule.decay_steps=2"], "schedule.decay_steps", "no effect", id="decay without wsd"),
    pytest.param(["checkpoint.every_steps=4"], "checkpoint.snapshot_steps", "nearest: 4", id="snapshots that never happen"),
    pytest.param(['checkpoint.retention=[{keep = "best"}]'], "checkpoint.retention", "evaluate.every_steps", id="best of none"),
    pytest.param(["evaluate.every_steps=5", "data.heldout_fraction=0"], "data.heldout_fraction", "above 0", id="no held-out"),
    pytest.param(
        ["run.url=memory://x"], "run.url", "no other sees what is there; allowed: a folder, file://, s3://", id="memory"
    ),
    pytest.param(["run.url=ftp://x/y"], "run.url", "was not there before; allowed: a folder, file://, s3://", id="ftp"),
    pytest.param(
        ["run.url=S3:/bucket/key"], "run.url", "a folder named S3:, so write s3://bucket/key; allowed: a folder", id="one slash"
    ),
    pytest.param(["run.url=file:/tmp/x"], "run.url", "a folder named file:, so write file:///tmp/x", id="one slash of a file"),
    pytest.param(
        ["checkpoint.mirror_url=memory://x"], "checkpoint.mirror_url", "no other sees what is there", id="mirror in memory"
    ),
    pytest.param(
        ["checkpoint.local_url=memory://x", "checkpoint.local_every_steps=10"],
        "checkpoint.local_url",
        "no other sees what is there",
        id="local tier in memory",
    ),
    pytest.param(["run.local_dir=s3://b/x"], "run.local_dir", "a folder that this machine sees", id="local folder elsewhere"),
    pytest.param(["machine.shared_dir=s3://b/x"], "machine.shared_dir", "a folder", id="shared folder elsewhere"),
    pytest.param(["recovery.backoff_max_s=0.5"], "recovery.backoff_max_s", "nearest: 1.0", id="back-off"),
    pytest.param(["model.vocab=256"], "model.vocab", "nearest: 257", id="vocabulary"),
    pytest.param(["data.tokenizer=t.json"], "data.sources.0.path", "corpus of bytes", id="stdlib with a tokenizer"),
    pytest.param(["faults=[{step = 1, rank = 1}]"], "faults.0.rank", "nearest: 0", id="fault on no rank"),
]


@pytest.mark.parametrize(("overrides", "path", "words"), CASES)
def test_each_combination_is_found(overrides: list[str], path: str, words: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        parse(BASE, overrides)
    texts = [str(problem) for problem in caught.value.problems if problem.path == path]
    assert any(words in text for text in texts), caught.value


def test_every_rule_has_a_case() -> None:
    assert len(RULES) <= len(CASES)
    assert combinations(parse(BASE)) == []


def test_all_combinations_at_once() -> None:
    with pytest.raises(ConfigProblems) as caught:
        parse(BASE, ["parallel.tp=3", "parallel.ranks=10", "parallel.pp=5", "batch.micro_batch=5", "model.vocab=3"])
    assert {problem.path for problem in caught.value.problems} == {
        "parallel.ranks",
        "parallel.tp",
        "parallel.pp",
        "batch.micro_batch",
        "model.vocab",
    }


@given(value=st.integers(1, 500), unit=st.integers(1, 50))
def test_nearest_multiples_enclose_the_value(value: int, unit: int) -> None:
    options = [int(word) for word in nearest(value, multiple_of=unit).removeprefix("nearest: ").split(" or ")]
    assert all(option % unit == 0 and option > 0 and abs(option - value) <= unit for option in options)


@given(value=st.integers(1, 500), whole=st.integers(1, 500))
def test_nearest_divisors_divide(value: int, whole: int) -> None:
    options = [int(word) for word in nearest_divisor(value, whole).removeprefix("nearest: ").split(" or ")]
    assert all(whole % option == 0 for option in options)
    between = range(min(options), max(options) + 1)
    assert not [n for n in between if whole % n == 0 and n not in options]


def test_a_dry_run_shows_which_stage_gets_how_many_layers() -> None:
    config = parse(BASE, ["parallel.pp=2", "parallel.ranks=2", "parallel.layer_counts=[1, 3]", "parallel.schedule=zb_h1"])
    assert "stages  zb_h1, 2 on 2 ranks; layers of each: 1 3" in layout_summary(config)
