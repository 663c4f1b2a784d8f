"""`ftrain compare`: what two ledgers say when they are laid side by side."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ftrain.plan.schedule import of_total
from ftrain.view.compare import Comparison, compare, lines
from ftrain.view.numbers import median
from ftrain.view.record import recorded
from ftrain.view.suggest import Suggestion
from recovery.events import Event
from tests.ledgers import Story, config, fading


def laid(a: Sequence[Event], b: Sequence[Event]) -> Comparison:
    return compare(recorded("runs/a", a), recorded("runs/b", b))


def plain(*overrides: str, seconds: float | Sequence[float] = (1.0, 1.01, 0.99)) -> Story:
    return Story(config(*overrides)).start().steps(40, seconds=seconds)


def about(found: Comparison, topic: str) -> Suggestion:
    return next(item for item in found.suggestions if item.about == topic)


def row(found: Comparison, key: str) -> tuple[object, object]:
    return next((row.a, row.b) for row in found.rows if row.key == key)


def test_a_roll_back_takes_its_steps_out_of_the_final_history() -> None:
    story = Story(config()).start().steps(10).die().start(at=6, start_s=3.0).steps(4, loss=lambda step: 9.0).end()
    run = recorded("runs/a", story.events)
    assert [done.record.step for done in run.steps] == list(range(1, 11))
    assert [done.record.step for done in run.undone] == [7, 8, 9, 10]
    assert [done.record.loss for done in run.steps[6:]] == [9.0] * 4  # of the attempt that counts
    assert run.tokens_by_step()[10] == 10 * 1024


def test_the_first_step_of_an_attempt_and_waiting_for_checkpoints_are_no_training_time() -> None:
    story = Story(config()).start().steps(1, seconds=60.0).steps(20, seconds=2.0, blocked_s=0.5).end()
    found = laid(story.events, story.events)
    assert row(found, "step_s") == pytest.approx((2.0, 2.0))
    assert row(found, "blocked_s") == pytest.approx((20 * 0.5 / 21, 20 * 0.5 / 21))
    assert row(found, "tokens_per_s") == pytest.approx((512.0, 512.0))


def test_the_interval_of_a_median_is_that_of_its_order_statistics() -> None:
    found = median(list(range(1, 101)))
    assert found is not None
    assert found.value == 50.5
    assert (found.low, found.high) == (41, 60)  # P(40 <= Binomial(100, 1/2) < 60) = 0.954
    three = median([1.0, 2.0, 3.0])
    assert three is not None
    assert (three.low, three.high) == (1.0, 3.0)


def test_a_difference_within_the_noise_is_no_gain() -> None:
    noisy = [0.8 + 0.02 * (7 * n % 20) for n in range(20)]  # 0.8 to 1.18 s, shuffled
    found = laid(plain(seconds=noisy).events, plain("parallel.overlap_reduce=true", seconds=[t - 0.01 for t in noisy]).events)
    assert "neither is faster" in about(found, "speed").text
    found = laid(plain(seconds=noisy).events, plain("parallel.overlap_reduce=true", seconds=[t - 0.3 for t in noisy]).events)
    assert "keep B (parallel.overlap_reduce = true)" in about(found, "speed").text


def test_nothing_follows_from_two_runs_with_the_same_settings() -> None:
    """Another load of the machine is no merit of a config: nothing is to be kept."""
    a, noisy = plain().events, [0.8 + 0.02 * (7 * n % 20) for n in range(20)]
    text = about(laid(a, plain("run.url=runs/b", seconds=0.8).events), "speed").text
    assert text.startswith("nothing follows: the settings of a step are the same in both. B had 25.0 % more tokens per second")
    assert text.endswith("because the machine was unequal (other load, other hardware)")
    assert "within their noise" in about(laid(plain(seconds=noisy).events, plain(seconds=noisy).events), "speed").text

    broken = Story(config()).start().steps(20, seconds=0.8).die().start().steps(20, seconds=0.8)
    assert "because B was interrupted (1 interruption), or because the machine" in about(laid(a, broken.events), "speed").text
    other = Story(config(), layout="tp1 x pp4").start().steps(40, seconds=0.8)
    assert "they ran in other layouts (tp1 x pp1 and tp1 x pp4)" in about(laid(a, other.events), "speed").text
    saved = plain("checkpoint.every_steps=70", seconds=0.8)
    assert "differs beside the steps (checkpoint.every_steps)" in about(laid(a, saved.events), "speed").text


def test_what_differs_is_named_and_the_urls_are_not() -> None:
    found = laid(plain().events, plain("run.url=runs/b", "parallel.tp=2").events)
    assert [item.path for item in found.config] == ["parallel.tp"]


def test_runs_of_other_models_get_no_verdict_on_speed() -> None:
    found = laid(plain().events, plain("model.layers=4", seconds=0.5).events)
    assert "do not train the same" in about(found, "speed").text


@pytest.mark.parametrize(
    ("overrides", "identities", "differ"),
    [
        ((), ("", ""), False),
        ((), ("aa", "aa"), False),
        (('data.sources=[{path="elsewhere"}]',), ("aa", "aa"), False),  # another path, the same tokens
        (('data.sources=[{path="elsewhere"}]',), ("", ""), True),
        ((), ("aa", "bb"), True),  # the same path, another text
        (("data.heldout_fraction=0.25",), ("", ""), True),
    ],
)
def test_other_corpora_are_said_and_no_losses_are_compared(
    overrides: tuple[str, ...], identities: tuple[str, str], differ: bool
) -> None:
    runs = [recorded("runs", plain(*more).events) for more in ((), overrides)]
    found = compare(*runs, identities=identities)
    assert bool(found.learning.corpora) is differ
    assert found.learning.same_updates is not differ
    text = "\n".join(lines(found))
    assert ("different corpora" in text) is differ
    assert ("the same material, whatever" in text) is not differ


def test_scaling_is_judged_by_the_speed_of_a_rank() -> None:
    """Twice the ranks at 1.6 times the speed keep 80 %."""
    twice = Story(config("parallel.ranks=8")).start().steps(40, seconds=1 / 1.6)
    found = laid(plain(seconds=1.0).events, twice.events)
    assert "from 4 to 8 ranks keeps 80 %" in about(found, "scaling").text
    rates = row(found, "tokens_per_s_rank")
    assert rates == pytest.approx((256.0, 204.8))


def test_an_empty_run_is_compared_too() -> None:
    empty = Story(config()).start().end()
    found = laid(empty.events, plain().events)
    assert about(found, "speed").text.startswith("run both for more steps")
    assert "no step in common" in found.learning.verdict
    assert any("no step in common" in line for line in lines(found))


def test_losses_are_compared_digit_by_digit() -> None:
    same = laid(plain().events, plain("parallel.recompute=full").events)
    assert "identical, digit by digit, over 40" in same.learning.verdict
    off = Story(config("parallel.recompute=full")).start().steps(40, loss=lambda step: fading(step) + 1e-9 * (step >= 7))
    found = laid(plain().events, off.events)
    assert found.learning.first_difference == 7
    assert found.learning.is_rounding
    assert "promises the same bits" in about(found, "results").text  # rounding is no excuse for a switch that keeps bits


def test_the_suggestion_for_waiting_is_what_the_planner_says_of_the_same_batch() -> None:
    from fractions import Fraction

    p, m = 4, 16
    run = plain("parallel.pp=4", "model.ffn=2048")
    found = about(laid(plain().events, run.events), "waiting")
    assert found.overrides == ("parallel.schedule=interleaved", "parallel.virtual_stages=2")
    now, then = (100 * float(of_total(Fraction(p - 1, v * m))) for v in (1, 2))
    assert f"falls from {now:.1f} % to {then:.1f} %" in found.evidence[1]
