"""A run in phases, on paper: the config of each, where each begins, what of the data each reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ftrain.config import Config, Phase
from ftrain.course import Begun, Cursor, course, cursor_at, curve, entered, recalled, tokens_after, tokens_read
from ftrain.data.dataset import _Stream
from ftrain.data.reading import ORDER, consumed, reading
from ftrain.data.source import Span
from ftrain.load import ConfigProblems, layout_summary, load, resolve, to_toml
from ftrain.phases import effective, with_layout
from ftrain.ramp import global_batch_at

CONFIG = str(Path(__file__).parents[3] / "configs" / "tiny-dp2.toml")
TOKENS = {"a": 4_000, "b": 1_500, "c": 9_000}


def config_of(phases: str, *overrides: str) -> Config:
    return load(CONFIG, (f"phases={phases}", *overrides))


@st.composite
def tables(draw: st.DrawFn) -> Config:
    """Two or three phases of random windows, batches and blends, over 40 updates; perhaps with a ramp before them."""
    plain = load(CONFIG, ("run.steps=40", "batch.micro_batch=1", "parallel.ranks=1", "evaluate.every_steps=0"))
    blends = [("a", 1.0), ("b", 2.0)], [("a", 0.7), ("b", 0.3)], [("c", 1.0)], [("b", 1.0), ("c", 3.0), ("a", 0.5)]

    def data() -> dict[str, object]:
        sources = [{"path": path, "weight": weight} for path, weight in draw(st.sampled_from(blends))]
        return {"sources": sources, "seq_len": draw(st.sampled_from([8, 16, 32]))}

    first, token = data(), draw(st.integers(1, 3_000))
    phases = []
    for _ in range(draw(st.integers(1, 3))):
        batch = {"global_batch": draw(st.sampled_from([2, 3, 8]))} if draw(st.booleans()) else {}
        phases.append({"from_tokens": token, "data": data() if draw(st.booleans()) else {}, "batch": batch})
        token += draw(st.integers(400, 3_000))
    ramp = [{"tokens": phases[0]["from_tokens"], "global_batch": 2}] if draw(st.booleans()) else []
    whole = msgspec.to_builtins(plain)
    whole["data"] |= first
    whole["batch"] |= {"global_batch": 4, "ramp": ramp}
    return msgspec.convert({**whole, "phases": phases}, Config)


def walked(config: Config) -> list[Cursor]:
    """One update after the other, as a run does them: the cursor before each, and the last."""
    cursor = entered(config, Cursor())
    found = [cursor]
    for _ in range(config.run.steps):
        size = global_batch_at(effective(config, cursor.phase), cursor.sequences)
        cursor = entered(config, cursor.after(size))
        found.append(cursor)
    return found


@given(tables())
@settings(max_examples=20, deadline=None)
def test_the_course_is_what_a_run_goes_through_and_the_same_from_every_step(config: Config) -> None:
    cursors, legs = walked(config), course(config)
    for step, cursor in enumerate(cursors):
        assert cursor == cursor_at(config, step)
        assert course(config, cursor) == legs
        assert tokens_after(config, step) == tokens_read(config, cursor)
    for leg in legs:
        assert [cursor.phase for cursor in cursors[leg.first_step : leg.stop_step]] == [leg.phase] * leg.steps
    assert sum(leg.steps for leg in legs) == config.run.steps
    for leg in legs[1:]:
        wanted = config.phases[leg.phase - 1].from_tokens
        if leg.steps:  # it begins at the first boundary at or behind its token, and not earlier
            before = tokens_read(config, cursors[leg.first_step - 1])
            assert before < wanted <= leg.first_token


def read_by(config: Config, first: int, stop: int) -> list[tuple[str, int, int]]:
    """(path, length, window) of every sequence of the updates [first, stop), read as a run does that is resumed at `first`."""
    found = []
    for step in range(first, stop):
        cursor = cursor_at(config, step)
        own = effective(config, cursor.phase)
        spans = [Span(0, TOKENS[source.path] + 1, own.data.seq_len) for source in own.data.sources]
        stream = _Stream(
            spans,
            tuple(source.weight for source in own.data.sources),
            seed=config.run.seed,
            purpose=ORDER,
            reading=reading(config, cursor),
        )
        count = global_batch_at(own, cursor.sequences)
        found += [
            (own.data.sources[source].path, own.data.seq_len, window)
            for source, _, window in stream.windows(cursor.sequences, count)
        ]
    return found


@given(tables())
@settings(max_examples=8, deadline=None)
def test_every_window_comes_once_per_pass_whatever_the_phases(config: Config) -> None:
    """And what the books say was read is what was read."""
    read = read_by(config, 0, config.run.steps)
    for path, seq_len in {(path, seq_len) for path, seq_len, _ in read}:
        windows = [window for p, s, window in read if (p, s) == (path, seq_len)]
        total = TOKENS[path] // seq_len
        for first in range(0, len(windows), total):
            once = windows[first : first + total]
            assert len(set(once)) == len(once)
            assert first + total > len(windows) or set(once) == set(range(total))
    counts = Counter((path, seq_len) for path, seq_len, _ in read)
    booked = {
        (it.path, it.seq_len): it.sequences for it in consumed(config, cursor_at(config, config.run.steps)) if it.sequences
    }
    assert booked == counts
    assert sum(it.tokens for it in consumed(config, cursor_at(config, config.run.steps))) == tokens_after(
        config, config.run.steps
    )


@given(tables(), st.integers(0, 40))
@settings(max_examples=15, deadline=None)
def test_a_run_that_is_resumed_reads_the_rest(config: Config, step: int) -> None:
    """From the record of a checkpoint, not from the walk: what was read before it and what follows are the whole."""
    cursor = walked(config)[step]
    record = {"step": step, "begun": [list(part) for part in cursor.begun]}
    again = Cursor.of(msgspec.json.decode(msgspec.json.encode(record)))
    assert again == cursor
    assert reading(config, again) == reading(config, cursor_at(config, step))


def test_a_phase_that_leaves_data_alone_reads_the_same_stream() -> None:
    """Another layout, batch or learning rate: sequence after sequence as if there were no phases."""
    plain = config_of("[]", "run.steps=30", "batch.micro_batch=1")
    phased = config_of(
        "[{from_tokens = 3000, parallel = {ranks = 1}}, {from_tokens = 9000, batch = {global_batch = 4}}]",
        "run.steps=30", "batch.micro_batch=1",
    )  # fmt: skip
    TOKENS.update({source.path: 50_000 for source in plain.data.sources})
    ours, theirs = read_by(phased, 0, 30), read_by(plain, 0, 30)
    assert ours == theirs[: len(ours)]


def test_a_checkpoint_from_before_phases_is_in_phase_0() -> None:
    assert Cursor.of({"step": 7, "sequences": 56}) == Cursor(7, (Begun(0, 56),))


def test_a_phase_is_the_config_with_other_values_and_keeps_those_before() -> None:
    config = config_of(
        "[{from_tokens = 2000, data = {seq_len = 128}, parallel = {ranks = 4, tp = 2}},"
        " {from_tokens = 9000, optimizer = {lr = 1e-4}, model = {rope_base = 1e6}}]",
        "batch.ramp=[{tokens = 1000, global_batch = 8}]",
    )
    first, second = effective(config, 1), effective(config, 2)
    assert (first.data.seq_len, first.parallel.tp, first.optimizer.lr) == (128, 2, config.optimizer.lr)
    assert (second.data.seq_len, second.parallel.tp, second.optimizer.lr) == (128, 2, 1e-4)
    assert second.model.rope_base == 1e6
    assert effective(config, 0) == msgspec.structs.replace(config, phases=())
    assert (first.phases, first.batch.ramp) == ((), ())
    assert resolve(msgspec.to_builtins(config)) == config
    import tomllib

    assert resolve(tomllib.loads(to_toml(config))) == config


def test_another_layout_is_written_into_the_phase_that_has_it() -> None:
    config = config_of("[{from_tokens = 2000, parallel = {ranks = 4}}, {from_tokens = 9000, data = {seq_len = 128}}]")
    now = msgspec.structs.replace(effective(config, 1), parallel=msgspec.structs.replace(effective(config, 1).parallel, tp=2))
    changed = with_layout(config, 1, now)
    assert effective(changed, 0) == effective(config, 0)
    assert effective(changed, 1) == now
    assert effective(changed, 2).parallel.tp == 2, "what a phase does not name stays as it was before"
    assert with_layout(config, 1, effective(config, 1)) == config
    assert with_layout(config, 0, now).parallel == now.parallel


def test_a_schedule_stretches_from_the_phase_that_gives_it_to_the_next_that_does() -> None:
    """Another peak alone goes on with the same curve."""
    config = config_of(
        '[{from_tokens = 2048, optimizer = {lr = 1e-3}}, {from_tokens = 4096, schedule = {kind = "constant"}},'
        " {from_tokens = 8192, data = {seq_len = 128}}]",
        "run.steps=20", "batch.ramp=[]", "schedule.decay_steps=1",
    )  # fmt: skip
    legs = course(config)
    tokens = config.batch.global_batch * config.data.seq_len
    stop = -(-4096 // tokens)
    assert [curve(config, legs, leg.phase) for leg in legs] == [(0, stop), (0, stop), (stop, 20), (stop, 20)]
    assert effective(config, 2).schedule.warmup_steps == 0, "what a new schedule does not name has the default"
    assert effective(config, 3).schedule == effective(config, 2).schedule


def test_everything_wrong_with_phases_is_said_at_once() -> None:
    with pytest.raises(ConfigProblems) as caught:
        config_of(
            "[{from_tokens = 8000, data = {seq_len = 127}, parallel = {ranks = 5, tp = 2}},"
            " {from_tokens = 8000, batch = {global_batch = 3, micro_batch = 2}, parallel = {layer_counts = [1]}}]"
        )
    assert [problem.path for problem in caught.value.problems] == [
        "phases.1.from_tokens",
        "phases.0.parallel.ranks",
        "phases.0.data.seq_len",
        "phases.1.parallel.layer_counts",
        "phases.1.batch.micro_batch",
    ]
    with pytest.raises(ConfigProblems) as caught:
        config_of('[{from_tokens = 8, model = {hidden = 3}, batch = {global_batch = "x"}, parallel = {tpp = 1}, data = 3}]')
    assert [problem.path for problem in caught.value.problems] == [
        "phases.0.data",
        "phases.0.batch.global_batch",
        "phases.0.parallel.tpp",
        "phases.0.model.hidden",
    ]
    assert "did you mean `tp`?" in str(caught.value)


def test_a_phase_without_an_update_and_a_schedule_that_does_not_fit_are_refused() -> None:
    with pytest.raises(ConfigProblems, match=r"phases\.0\.from_tokens: given 100, .* at least one update"):
        config_of("[{from_tokens = 100}, {from_tokens = 101}]")
    with pytest.raises(ConfigProblems, match=r"phases\.0\.schedule\.warmup_steps: given 99"):
        config_of("[{from_tokens = 100, schedule = {warmup_steps = 99}}]", "run.steps=20")


def test_a_fault_may_strike_a_rank_that_a_later_phase_has() -> None:
    fault = 'faults=[{kind = "kill", step = 30, rank = 3}]'
    config_of("[{from_tokens = 2000, parallel = {ranks = 4}}]", fault)
    with pytest.raises(ConfigProblems, match=r"faults\.0\.rank"):
        config_of("[{from_tokens = 2000, parallel = {ranks = 3}}]", fault)


def test_a_run_that_ends_before_a_phase_never_begins_it() -> None:
    config = config_of("[{from_tokens = 10_000_000, data = {seq_len = 128}}]", "run.steps=10")
    assert [leg.steps for leg in course(config)] == [10, 0]
    assert cursor_at(config, 10).phase == 0
    assert isinstance(config.phases[0], Phase)
    assert tokens_after(config, 10) == course(config)[0].stop_token


def test_a_dry_run_shows_where_each_phase_begins_and_what_it_changes() -> None:
    config = config_of(
        '[{from_tokens = 4000, data = {seq_len = 128}},'
        ' {from_tokens = 9000, optimizer = {lr = 1e-4}, schedule = {kind = "constant"}},'
        " {from_tokens = 90_000_000}]",
        "run.steps=20", "schedule.warmup_steps=0", "batch.global_batch=8",
    )  # fmt: skip
    told = [line for line in layout_summary(config).splitlines() if line.startswith("phase")]
    assert told[0].startswith("phase   0: steps 1 to 8, tokens 0 to 4,096, lr ")
    assert told[1].startswith("phase   1: steps 9 to 13, tokens 4,096 to 9,216, lr ")
    assert told[1].endswith("; data.seq_len 128")
    assert told[2].startswith("phase   2: steps 14 to 20, tokens 9,216 to 16,384, lr 0.0001 to 0.0001; optimizer.lr 0.0001")
    assert told[3] == "phase   3: from 90,000,000 tokens on: not reached"


def test_what_a_phase_passed_over_is_behind_the_phases_that_follow() -> None:
    """`data.skip` moves the cursor of its phase: the next one reads on behind it, and begins no later in a blend of its own."""
    config = config_of(
        "[{from_tokens = 4096, parallel = {ranks = 1}}, {from_tokens = 8192, data = {sources = [{path = 'c'}]}},"
        " {from_tokens = 12288, data = {sources = [{path = 'stdlib'}]}}]",
        "run.steps=60", "batch.global_batch=8", "data.sources=[{path='stdlib'}]",
    )  # fmt: skip
    firsts = [leg.first_step for leg in course(config)]
    record = {
        "step": firsts[3] + 1,
        "begun": [[first, 64] for first in firsts],
        "skipped": [(3, 4, 16), (firsts[1] + 1, firsts[1] + 1, 8)],
    }
    cursor = Cursor.of(record)
    assert [part.passed for part in cursor.begun] == [16, 8, 0, 0]
    second = Cursor(firsts[1] + 2, cursor.begun[:2])
    assert reading(config, second).start == 64 + 16, "its own eight are the loop's business"
    assert reading(config, Cursor(firsts[2], cursor.begun[:3])).start == 0
    assert reading(config, cursor).before == (64 + 16 + 64 + 8,)


def test_what_another_run_trained_in_phases_of_its_own_counts_as_phase_0() -> None:
    """`--from`: the phases of the checkpoint are those of this run only if they began at the same tokens."""
    theirs = config_of("[{from_tokens = 3000}, {from_tokens = 9000}]", "run.steps=60", "batch.micro_batch=1")
    cursor = next(it for it in walked(theirs) if it.phase == 2)
    progress = {"step": cursor.step, "sequences": cursor.total, "begun": [list(part) for part in cursor.begun]}
    progress["config"] = msgspec.to_builtins(theirs)
    assert recalled(theirs, progress) == cursor
    folded = (Begun(0, cursor.total), Begun(cursor.step, 0))
    assert recalled(replace(theirs, phases=theirs.phases[:1]), progress).begun == folded
    assert recalled(replace(theirs, phases=()), progress).begun == folded[:1]
    later = config_of("[{from_tokens = 3001}, {from_tokens = 90_000}]", "run.steps=60", "batch.micro_batch=1")
    assert recalled(later, progress).begun == folded


def test_a_schedule_that_a_phase_cuts_short_must_fit_into_what_is_left_of_it() -> None:
    phases = "[{from_tokens = 30_000, schedule = {kind = 'constant'}}]"
    config_of(phases, "run.steps=200", "schedule.warmup_steps=2")
    with pytest.raises(ConfigProblems, match=r"schedule\.warmup_steps: given 100, .* within its 30 updates"):
        config_of(phases, "run.steps=200", "schedule.warmup_steps=100")


@pytest.mark.parametrize("value", ['"x"', "2.5", "[3]", str(2**63)])
def test_a_wrong_value_in_a_phase_is_a_problem_and_no_traceback(value: str) -> None:
    with pytest.raises(ConfigProblems, match=r"phases\.0\.parallel\.ranks"):
        config_of(f"[{{from_tokens = 2000, parallel = {{ranks = {value}}}}}]", 'faults=[{kind = "kill", step = 3, rank = 0}]')
    with pytest.raises(ConfigProblems, match=r"phases\.0\.from_tokens"):
        config_of(f"[{{from_tokens = {value}}}]")
