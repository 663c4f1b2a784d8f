"""Founding rows that a comparison of two runs shows: 20, 21, 26, 46 and 47."""

from __future__ import annotations

import pytest

from ftrain.load import parse
from ftrain.parallel.partition import balanced_counts
from ftrain.plan import cost
from ftrain.view.compare import compare, lines
from ftrain.view.predict import predict
from ftrain.view.record import recorded
from tests.ledgers import BASE, Story, config, fading


def test_row_20_more_per_update_is_not_the_same_material_sooner() -> None:
    """Twice the sequences in an update of twice the time: as many tokens a second, and at equal steps a lower loss."""
    small = Story(config()).start().steps(40, seconds=1.0, loss=lambda step: fading(step), tokens=1024).end()
    large = (
        Story(config("batch.global_batch=32")).start().steps(40, seconds=2.0, loss=lambda step: fading(2 * step), tokens=2048)
    )
    found = compare(recorded("a", small.events), recorded("b", large.events))
    rows = {row.key: row for row in found.rows}
    assert (rows["tokens_per_update"].a, rows["tokens_per_update"].b) == (1024, 2048)
    assert rows["step_s"].change == pytest.approx(1.0)
    assert rows["tokens_per_s"].change == pytest.approx(0.0)  # nothing is sooner
    assert found.learning.a_at_step != found.learning.b_at_step
    assert found.learning.common_tokens == 40 * 1024
    assert found.learning.a_at_tokens == found.learning.b_at_tokens == fading(40)  # the same material, the same loss
    assert any("the same material" in line for line in lines(found))


def test_row_21_interleaved_beside_plain_on_the_same_model_and_batch() -> None:
    """p = 8, m = 32: 17.9 % and 9.9 % of the total, beside each other."""
    eight = ("parallel.pp=8", "parallel.ranks=8", "model.layers=16", "model.ffn=131072", "batch.global_batch=32")
    virtual = ("parallel.schedule=interleaved", "parallel.virtual_stages=2")
    a = Story(config(*eight)).start().steps(20, seconds=1.1).end()
    b = Story(config(*eight, *virtual)).start().steps(20, seconds=1.0).end()
    found = compare(recorded("a", a.events), recorded("b", b.events))
    bubbles = next(row for row in found.rows if row.key == "bubble_predicted")
    # 7 / (32 + 7) and 7 / (2 x 32 + 7), of equal stages: the layers are so wide that the head is nothing beside them
    assert bubbles.a == pytest.approx(7 / 39, abs=0.0005)
    assert bubbles.b == pytest.approx(7 / 71, abs=0.0005)
    assert [item.path for item in found.config] == ["parallel.schedule", "parallel.virtual_stages"]


def test_row_26_a_switch_is_accepted_by_results_first_and_one_at_a_time() -> None:
    off = Story(config()).start().steps(40, seconds=1.0)
    wrong = Story(config("parallel.overlap_reduce=true")).start().steps(40, seconds=0.5, loss=lambda step: fading(step) * 1.001)
    found = compare(recorded("off", off.events), recorded("on", wrong.events))
    assert [item.about for item in found.suggestions][:2] == ["results", "speed"]
    assert "do not accept" in found.suggestions[0].text
    assert found.suggestions[1].text.startswith("once the results agree")
    both = Story(config("parallel.overlap_reduce=true", "parallel.overlap_gather=true")).start().steps(40, seconds=0.9)
    found = compare(recorded("off", off.events), recorded("on", both.events))
    assert found.suggestions[0].about == "one at a time"
    assert found.suggestions[0].overrides == ("parallel.overlap_reduce=true",)
    right = Story(config("parallel.overlap_reduce=true")).start().steps(40, seconds=0.9)
    found = compare(recorded("off", off.events), recorded("on", right.events))
    assert found.suggestions[0].text == "not yet a gain: B (parallel.overlap_reduce = true) had 11.1 % more tokens/s"
    pair = (recorded("off", off.events), recorded("on", right.events))
    found = compare(*pair, again=[pair])
    assert found.suggestions[0].text.startswith("keep B (parallel.overlap_reduce = true): 11.1 % more tokens per second")


def test_row_46_a_heavy_end_moves_the_cuts_and_names_its_evidence() -> None:
    """A large vocabulary makes the last stage the slowest: the suggested cuts are those that equalise time."""
    heavy = ("parallel.pp=4", "model.vocab=8192", "model.layers=16")
    run = Story(config(*heavy)).start().steps(20, seconds=1.0).end()
    found = compare(recorded("a", run.events), recorded("b", run.events))
    cuts = next(item for item in found.suggestions if item.about == "cuts")
    setup = predict(config(*heavy)).setup
    layer = float(cost.layer_flops(setup) + cost.attention_flops(setup))
    counts = balanced_counts([layer] * 16, 4, last=float(cost.head_flops(setup)))
    assert cuts.overrides == (f"parallel.layer_counts={list(counts)}",)
    better = predict(parse(BASE, [*heavy, *cuts.overrides])).setup
    assert cost.imbalance(better) < cost.imbalance(setup)
    assert f"{100 * float(cost.imbalance(setup)):.0f} % of the mean" in cuts.evidence[0]
    assert "stage 3" in cuts.text
