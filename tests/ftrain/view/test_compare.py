"""`ftrain compare`: what two ledgers say when they are laid side by side."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ftrain.plan.schedule import of_total
from ftrain.view.compare import Comparison, compare, lines
from ftrain.view.gain import Suggestion
from ftrain.view.numbers import median
from ftrain.view.record import recorded
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
    assert about(found, "speed").text.startswith("not yet a gain: B (parallel.overlap_reduce = true) had ")


def test_what_a_run_drifts_by_itself_is_no_gain_of_the_other() -> None:
    """Half of A at 1.0 s, half at 1.4: the interval of its median ends at 1.4, and B's steps of 1.45 s lie outside."""
    a = plain(seconds=[1.0] * 20 + [1.4] * 20)
    found = about(laid(a.events, plain("parallel.overlap_reduce=true", seconds=1.45).events), "speed")
    assert found.text.startswith("neither is faster")
    assert any(line.startswith("A: ") and line.endswith("parts of it apart by 40 %") for line in found.evidence)


def again(*seconds: tuple[float, float], b_first: Sequence[bool] = ()) -> Comparison:
    """Pairs of a run without a switch and one with it, each with these seconds of a step; B began first where it says so."""
    pairs = []
    for number, (off, on) in enumerate(seconds):
        a, b = Story(config()), Story(config("parallel.overlap_reduce=true"))
        (a if b_first and b_first[number] else b).t += 1000.0
        made = [story.start().steps(40, seconds=each) for story, each in ((a, off), (b, on))]
        pairs.append((recorded(f"runs/off{number}", made[0].events), recorded(f"runs/on{number}", made[1].events)))
    return compare(*pairs[0], again=pairs[1:])


def test_a_slow_machine_during_one_run_is_no_gain_of_the_other() -> None:
    """As it was measured on a laptop: a switch without effect, and a neighbour while the first run went."""
    switch = "B (parallel.overlap_reduce = true)"
    alone = about(again((0.427, 0.273)), "speed")
    assert alone.text == f"not yet a gain: {switch} had 56.4 % more tokens/s"
    assert len(alone.text) <= 78
    assert "one run of each does not tell a setting from the machine's ups and downs" in alone.evidence
    two = again((0.427, 0.273), (0.441, 0.467))
    assert about(two, "speed").text == "no gain is shown: runs with the same settings differed by up to 71.1 %"
    assert about(two, "speed").evidence[0] == "B against A, pair by pair: +56.4 %, -5.6 %"
    small = again((1.0, 0.95), (1.2, 1.14))  # B is ahead in both, by less than the runs of A are apart
    assert about(small, "speed").text.startswith("no gain is shown")


def test_a_gain_that_further_runs_show_is_kept_and_the_least_of_them_counts() -> None:
    found = again((1.0, 0.8), (1.05, 0.82), b_first=(False, True))
    told = about(found, "speed")
    assert told.text == "keep B (parallel.overlap_reduce = true): 25.0 % more tokens per second, the least of 2 pairs"
    assert told.evidence[0] == "runs with the same settings differed by up to 5.0 %"
    assert not any("began with the same run" in line for line in told.evidence)
    assert found.as_dict()["again"] == [["runs/off1", "runs/on1"]]
    assert "B2 runs/on1" in lines(found)
    same_order = again((1.0, 0.8), (1.05, 0.82))
    assert any("all pairs began with the same run" in line for line in about(same_order, "speed").evidence)
    slower = about(again((0.8, 1.0), (0.82, 1.05)), "speed")
    assert slower.text.startswith("keep A (parallel.overlap_reduce = false): 25.0 % more")


def test_a_further_run_has_the_settings_of_the_first() -> None:
    a, b = (recorded("runs/a", plain().events), recorded("runs/b", plain("parallel.overlap_reduce=true").events))
    with pytest.raises(ValueError, match=r"runs/b is no second run of A \(runs/a\): parallel.overlap_reduce differs"):
        compare(a, b, again=[(b, a)])


def test_nothing_follows_from_two_runs_with_the_same_settings() -> None:
    """Another load of the machine is no merit of a config: nothing is to be kept."""
    a, noisy = plain().events, [0.8 + 0.02 * (7 * n % 20) for n in range(20)]
    text = about(laid(a, plain("run.url=runs/b", seconds=0.8).events), "speed").text
    assert text.startswith("nothing follows: the settings of a step are the same in both. B had 25.0 % more tokens per second")
    assert text.endswith("because the machine was unequal (other load, other hardware)")
    assert "within their noise" in about(laid(plain(seconds=noisy).events, plain(seconds=noisy).events), "speed").text

    other = Story(config(), layout="tp1 x pp4").start().steps(40, seconds=0.8)
    assert "they ran in other layouts (tp1 x pp1 and tp1 x pp4)" in about(laid(a, other.events), "speed").text
    saved = plain("checkpoint.every_steps=70", seconds=0.8)
    assert "differs beside the steps (checkpoint.every_steps)" in about(laid(a, saved.events), "speed").text


def test_what_makes_slower_is_no_reason_for_more_speed() -> None:
    """An interruption, and a fault that was injected, are causes where the slower run had them, and nowhere else."""
    kill = 'faults=[{kind="kill", at="step", step=20, rank=1}]'

    def broken(seconds: float) -> Sequence[Event]:
        return Story(config(kill)).start().steps(20, seconds=seconds).die().start().steps(20, seconds=seconds).events

    whole = plain(seconds=1.0).events
    for a, b in ((whole, broken(0.8)), (broken(0.8), whole)):
        text = about(laid(a, b), "speed").text
        assert text.endswith("25.0 % more tokens per second because the machine was unequal (other load, other hardware)")
    for name, a, b in (("B", whole, broken(1.25)), ("A", broken(1.25), whole)):
        text = about(laid(a, b), "speed").text
        assert f"because {name} was interrupted (1 interruption), or because the machine was unequal" in text
        assert text.endswith("differs beside the steps (faults)")


def test_the_config_compared_is_that_of_the_attempts_whose_steps_are_measured() -> None:
    """A start that failed has trained nothing: its settings and its layout explain no figure, and predict none."""
    failed = plain().launch("parallel.pp=2", "parallel.ranks=8", "machine.device=cuda", "machine.hardware=h100")
    failed.start(source="storage", ready=False).die()
    found = laid(failed.events, plain().events)
    assert found.config == ()
    assert "nothing follows" in about(found, "speed").text
    for key in ("layout", "step_s", "tokens_per_s_rank", "step_predicted_s", "memory_predicted"):
        one, two = row(found, key)
        assert one == two, key
    assert not any("cuda" in line for line in lines(found))


def test_steps_that_were_done_under_several_configs_are_said_to_be_so() -> None:
    story = plain().launch("optimizer.lr=5e-4").start(source="storage").steps(10)
    found = laid(story.events, plain().events)
    assert [(item.path, item.old, item.new) for item in found.config] == [("optimizer.lr", 5e-4, 1e-3)]
    at = lines(found).index("  A's steps were done under several configs; compared is the newest of them")
    assert lines(found)[at + 1] == "    from step 41 on  optimizer.lr: 0.001 -> 0.0005"
    assert found.as_dict()["turns"]["a"][0]["step"] == 41
    assert not any("several configs" in line for line in lines(laid(plain().events, plain().events)))


def test_measured_are_the_steps_under_the_settings_that_are_compared() -> None:
    story = plain(seconds=1.0).launch("machine.threads=2").start(source="storage").steps(30, seconds=0.5)
    assert row(laid(story.events, story.events), "step_s") == pytest.approx((0.5, 0.5))
    slower = plain(seconds=1.0).launch("optimizer.lr=5e-4").start(source="storage").steps(30, seconds=0.5)  # no other step
    assert row(laid(slower.events, slower.events), "step_s") == pytest.approx((1.0, 1.0))


def test_runs_that_began_with_other_states_are_said_to_be_so_and_nothing_is_blamed() -> None:
    """Behind the losses of a run with --from there are steps that this run has not done."""
    forked = (
        Story(config("machine.threads=2"), origin="s3://runs/a@20")
        .start(at=20, source="storage")
        .steps(20, seconds=0.8, loss=lambda step: 9.0)
    )
    found = laid(plain(seconds=1.0).events, forked.events)
    text = "\n".join(lines(found))
    assert "A began with initial values, B began with the state of step 20 of s3://runs/a" in text
    assert not found.learning.same_updates
    assert found.learning.first_difference is None
    assert "the same material, whatever" not in text
    assert "certify" not in text
    assert about(found, "speed").text.startswith("once the results agree, measure again: B (machine.threads = 2)")
    assert found.as_dict()["learning"]["origins"]["same"] is False

    both = laid(forked.events, forked.events)  # the usual way to try a switch
    assert both.learning.same_updates
    assert "  both began with the state of step 20 of s3://runs/a" in lines(both)

    other = Story(config("machine.threads=2"), origin="s3://runs/b@20").start(at=20, source="storage").steps(20)
    apart = laid(forked.events, other.events).learning.origins
    assert not apart.same
    assert apart.text == "A began with the state of step 20 of s3://runs/a, B began with the state of step 20 of s3://runs/b"

    imported = Story(config()).start(at=20, source="storage").steps(20)
    found = laid(imported.events, imported.events)
    assert found.learning.same_updates
    assert any("of an imported checkpoint; whether it is the same one is not recorded" in line for line in lines(found))
    assert "began with" not in "\n".join(lines(laid(plain().events, plain().events)))


def test_another_learning_rate_is_no_bug_to_be_found() -> None:
    other = Story(config("optimizer.lr=5e-4")).start().steps(40, loss=lambda step: 1.1 * fading(step))
    assert [item.about for item in laid(plain().events, other.events).suggestions][:1] == ["speed"]


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


def test_perfect_scaling_is_no_noise_and_the_same_speed_of_larger_updates_is_no_gain() -> None:
    twice = Story(config("parallel.ranks=8")).start().steps(40, seconds=0.5)
    assert "from 4 to 8 ranks keeps 100 %" in about(laid(plain(seconds=1.0).events, twice.events), "scaling").text
    larger = Story(config("batch.global_batch=32")).start().steps(40, seconds=2.0, tokens=2048)
    assert about(laid(plain(seconds=1.0).events, larger.events), "speed").text.startswith("neither is faster")


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
