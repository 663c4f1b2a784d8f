"""The simulated run: every second counted once, the estimate matched where it holds, the real policy and retention met."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from founding import ROOT, Reply, ask
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.load import load
from ftrain.plan import failure_source, failure_table, interval, profile, simulation
from ftrain.plan.failure_source import Failure
from ftrain.plan.setup import Options, Setup
from ftrain.plan.simulate import Outcome, Rules, Simulation
from recovery.policy import Limits
from storage.retention import KeepLast

LLAMA = failure_table.load("llama3")
SIMPLE = Rules(
    step_s=1.0,
    snapshot_steps=10,
    every_steps=100,
    stall_s=0.0,
    upload_s=0.0,
    nodes=4,
    detect_s=0.0,
    restart_s=0.0,
    load_memory_s=0.0,
    load_storage_s=0.0,
    human_s=0.0,
    spares=10**9,
)


def play(
    rules: Rules, failures: Iterator[Failure] | list[Failure], seconds: float, *, actions: dict[str, str] | None = None
) -> Outcome:
    outcome = Simulation(rules, limits=Limits(), actions=actions or {}, retention=(KeepLast(3),)).run(failures, seconds=seconds)
    assert sum(outcome.buckets.values()) == pytest.approx(outcome.wall_s)
    assert min(outcome.buckets.values()) >= 0
    return outcome


def at(t: float, class_: str = "unknown") -> Failure:
    return Failure(t, class_, "unknown", class_)


def test_without_failures_all_time_counts_but_the_stalls() -> None:
    outcome = play(replace(SIMPLE, stall_s=1.0), [], 110.0)
    assert outcome.step == 100
    assert outcome.buckets["saving"] == 10
    assert outcome.buckets["productive"] == 100


def test_a_save_cut_short_is_no_snapshot() -> None:
    outcome = play(replace(SIMPLE, stall_s=4.0), [at(26.0)], 26.5)  # steps 11 to 20 end at 24: two seconds into the copy
    assert outcome.step == 10
    assert outcome.buckets["saving"] == 6


def test_a_failure_costs_the_steps_since_the_snapshot() -> None:
    outcome = play(SIMPLE, [at(37.5)], 47.5)
    assert outcome.step == 30 + 10
    assert outcome.buckets["repeated"] == pytest.approx(7.5)
    assert outcome.restores == {"memory": 1}


def test_a_lost_host_goes_back_to_the_last_commit() -> None:
    outcome = play(SIMPLE, [at(237.0, "node_failure")], 247.0)
    assert outcome.step == 200 + 10
    assert outcome.restores == {"storage": 1}


def test_an_upload_that_had_not_ended_does_not_count() -> None:
    outcome = play(replace(SIMPLE, upload_s=50.0), [at(237.0, "node_failure")], 237.5)
    assert outcome.step == 100


def test_a_slow_store_skips_saves() -> None:
    outcome = play(replace(SIMPLE, upload_s=250.0), [at(950.0, "node_failure")], 950.5)
    assert outcome.step == 600  # a save every 300 steps; that of step 900 was still on its way


def test_a_failure_during_recovery_starts_it_again() -> None:
    outcome = play(replace(SIMPLE, restart_s=20.0), [at(30.0), at(40.0)], 70.0)
    assert outcome.buckets["restarting"] == 30
    assert outcome.buckets["waiting"] == 1  # the policy backs off: the second failure brought no new step
    assert outcome.step == 30 + 9


def test_fewer_replicas_go_on_more_slowly_and_the_machine_comes_back() -> None:
    rules = replace(SIMPLE, spares=0, repair_s=100.0)
    outcome = play(rules, [at(10.0, "gpu_lost")], 110.0, actions={"gpu_lost": "restart_exclude_node"})
    assert outcome.step == 10 + 75  # three of four replicas
    assert outcome.buckets["slowed"] == pytest.approx(25.0)


def test_a_slow_machine_slows_all_until_it_is_replaced() -> None:
    rules = replace(SIMPLE, straggler_s=100.0, straggler_speed=0.5, restart_s=10.0)
    outcome = play(rules, [at(50.0, "straggler")], 210.0)
    assert outcome.step == 50 + 50 + 50
    assert outcome.buckets["slowed"] == pytest.approx(50.0)
    assert outcome.buckets["restarting"] == 10.0
    assert outcome.buckets["repeated"] == 0


def test_the_real_policy_gives_up_on_a_crash_loop() -> None:
    outcome = play(replace(SIMPLE, human_s=500.0), [at(10.0 + i / 10) for i in range(4)], 600.0)
    assert outcome.buckets["waiting"] >= 500.0  # unknown causes without a new step: the third asks for a person
    assert outcome.reasons["unknown"].startswith("restart: unknown")


def test_silent_corruption_goes_back_to_what_retention_kept() -> None:
    rules = replace(SIMPLE, corruption_s=1e-9)
    outcome = play(rules, [at(750.0, "silent_corruption")], 750.5, actions={"silent_corruption": "roll_back"})
    assert outcome.step == 700
    late = play(
        replace(rules, corruption_s=1e6, seed=3),
        [at(750.0, "silent_corruption")],
        750.5,
        actions={"silent_corruption": "roll_back"},
    )
    assert late.step == 0  # the last three commits are all newer than the corruption


@pytest.mark.parametrize("nodes", [128, 512, 2048, 4096])
@pytest.mark.parametrize("stall_s", [5.0, 60.0])
@pytest.mark.parametrize("restart_s", [120.0, 600.0])
def test_estimate_and_simulation_agree_within_five_per_cent(nodes: int, stall_s: float, restart_s: float) -> None:
    rate = LLAMA.per_1000_node_days
    mtbf_s = failure_table.mtbf_s(rate, nodes)
    best = interval.young(stall_s, mtbf_s)
    rules = replace(SIMPLE, snapshot_steps=round(best), stall_s=stall_s, restart_s=restart_s, nodes=nodes)
    seconds = 1500 * mtbf_s
    drawn = failure_source.drawn(LLAMA, rate=rate, nodes=nodes, seconds=seconds, seed=1)
    outcome = play(rules, (replace(f, class_="network_timeout", needs_human=False) for f in drawn), seconds)
    expected = interval.effective(best, stall_s=stall_s, restart_s=restart_s + rules.hang_s, mtbf_s=mtbf_s)
    assert outcome.effective == pytest.approx(expected, rel=0.05)


def test_drawn_failures_have_the_rate_and_the_mix_of_the_table() -> None:
    year = 365 * 86400.0
    drawn = list(failure_source.drawn(LLAMA, rate=LLAMA.per_1000_node_days, nodes=2048, seconds=10 * year, seed=0))
    assert len(drawn) == pytest.approx(2048 * 3650 * LLAMA.per_1000_node_days / 1000, rel=0.03)
    gpus = sum(failure.name == "Faulty GPU" for failure in drawn) / len(drawn)
    assert gpus == pytest.approx(148 / 419, abs=0.01)
    assert [f.t for f in drawn] == sorted(f.t for f in drawn)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 2000), max_size=12), st.sampled_from([0, 7, 10]), st.floats(0, 30))
def test_every_second_is_counted_once(times: list[float], snapshot: int, stall_s: float) -> None:
    rules = replace(
        SIMPLE, snapshot_steps=snapshot, stall_s=stall_s, restart_s=11.0, load_storage_s=5.0, spares=1, repair_s=300.0
    )
    classes = ("unknown", "gpu_lost", "node_failure", "silent_corruption")
    failures = [at(t, classes[i % 4]) for i, t in enumerate(sorted(times))]
    actions = {"gpu_lost": "restart_exclude_node", "node_failure": "restart_exclude_node", "silent_corruption": "roll_back"}
    outcome = play(rules, failures, 2000.0, actions=actions)
    assert outcome.buckets["productive"] == pytest.approx(outcome.step * rules.step_s)


def test_the_llama_run_with_ten_minute_restarts_and_five_second_stalls() -> None:
    """At the optimal interval, when any failure can be restored from memory: about 0.92, as published estimates say."""
    mtbf_s = failure_table.mtbf_s(LLAMA.per_1000_node_days, 2048)
    best = interval.young(5, mtbf_s)
    assert round(interval.effective(best, stall_s=5, restart_s=600, mtbf_s=mtbf_s), 2) == 0.92
    rules = replace(SIMPLE, snapshot_steps=round(best), stall_s=5.0, restart_s=600.0, nodes=2048, hang_s=0.0)
    seconds = 540 * 86400.0
    drawn = failure_source.drawn(LLAMA, rate=LLAMA.per_1000_node_days, nodes=2048, seconds=seconds, seed=0)
    outcome = play(rules, (replace(f, class_="network_timeout", needs_human=False) for f in drawn), seconds)
    assert outcome.effective == pytest.approx(0.92, abs=0.01)


def test_the_project_s_measured_recovery_reaches_99_per_cent_on_llama_s_failures() -> None:
    """Restart of 0.5 s and detection of 0.05 s as measured on two ranks; a copy of 6 ms allows a snapshot after every step."""
    measured = "--assume restart_s=0.5 --assume detect_s=0.05 --assume load_memory_s=0.2 --assume load_storage_s=60"
    rest = "--assume spares=64 --assume snapshot_steps=1 --assume every_steps=50 --assume corruption_s=1200"
    reply = ask(f"plan simulate configs/llama3-405b.toml --hardware h100 {measured} {rest}")
    assert reply.value("effective") >= 0.99
    assert reply.text("limit").startswith("repeated")
    gains = {entry["assumption"]: float(entry["gain"].split()[0]) for entry in reply.rows("limits")}
    worst = reply.text("limiting_assumption").split(" = ")[0]
    assert gains[worst] == max(gains.values())
    again = ask(
        f"plan simulate configs/llama3-405b.toml --hardware h100 {measured} {rest} --assume {worst}={_half(reply, worst)}"
    )
    assert 100 * (again.value("effective") - reply.value("effective")) == pytest.approx(gains[worst], abs=6e-4)


def _half(reply: Reply, name: str) -> float:
    return float(next(entry["value"] for entry in reply.rows("assumptions") if entry["name"] == name)) / 2


def test_the_command_s_own_figures_agree_with_the_formula() -> None:
    base = "plan simulate configs/llama3-405b.toml --hardware h100 --days 200 --assume spares=1000 --assume corruption_s=0"
    times = "--assume restart_s=600 --assume stall_s=5 --assume upload_s=0"
    reply = ask(f"{base} {times} --assume snapshot_steps=33 --assume every_steps=33")
    assert reply.value("effective") == pytest.approx(reply.value("estimate"), rel=0.05)
    shares = [float(entry["share"].split()[0]) for entry in reply.rows("buckets")]
    assert sum(shares[:-1]) == pytest.approx(100, abs=0.05)


def test_the_classifier_s_own_actions_are_used() -> None:
    actions = simulation.default_actions()
    assert {cause.class_ for cause in LLAMA.causes} <= set(actions)
    assert set(actions.values()) <= {
        "restart",
        "restart_exclude_node",
        "restart_after_wait",
        "roll_back",
        "stop_for_human",
        "finish",
    }


def test_other_policies_cost_what_they_must() -> None:
    """Three lost machines, 1,000 s apart: a person takes 100 s each time; without a spare one of four replicas is away."""
    lost = [at(1000.5 * k, "node_failure") for k in (1, 2, 3)]
    variants = simulation.other_policies(replace(SIMPLE, spares=0, human_s=100.0, repair_s=500.0))
    found = {name: play(rules, lost, 4500.0, actions=actions) for name, (rules, actions) in variants.items()}
    assert found["a person decides every time"].buckets["waiting"] == pytest.approx(300.0)
    assert found["never another machine"].buckets["slowed"] == 0.0
    assert found["one spare machine in a hundred (1)"].buckets["slowed"] == 0.0
    slowed = found["no spare machine"].buckets["slowed"]  # 3 x 500 s at three quarters of the speed, in whole steps
    assert slowed == pytest.approx(3 * 500 / 4, rel=0.01)
    assert found["as the config says"].buckets == found["no spare machine"].buckets


def test_policies_are_compared_on_the_same_failures() -> None:
    reply = ask("plan simulate configs/llama3-405b.toml --hardware h100 --days 30 --policies")
    rows = {entry["policy"]: float(entry["effective"].split()[0]) for entry in reply.rows("policies")}
    assert rows["as the config says"] == pytest.approx(100 * reply.value("effective"), abs=0.01)
    assert rows["a person decides every time"] < rows["as the config says"]


def test_a_trace_and_a_ledger_are_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"t_s": 5, "class": "gpu_lost", "node": "n1"}\n{"t_s": 2, "class": "unknown"}\n')
    assert [failure.t for failure in failure_source.read(str(trace))] == [2, 5]
    ledger = tmp_path / "e0001-000001.jsonl"
    verdict = {"class": "network_link", "component": "network"}
    events = [
        {"event": "RunStarted", "t": 100.0},
        {"event": "InterruptionClassified", "t": 160.0, "verdict": verdict},
        {"event": "InterruptionClassified", "t": 170.0, "verdict": verdict | {"planned": True}},
    ]
    ledger.write_text("\n".join(json.dumps(event) for event in events))
    (failure,) = failure_source.read(str(ledger))
    assert (failure.t, failure.class_) == (60.0, "network_link")
    config = f"{ROOT}/configs/llama3-8b.toml --hardware h100".replace(f"{ROOT}/", "")
    assert ask(f"plan simulate {config} --trace {trace} --days 1").value("failures") == 2


def test_bad_traces_and_assumptions_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        failure_source.read(str(tmp_path / "none"))
    broken = tmp_path / "broken"
    broken.write_text('{"t_s": 1}\n[1]\n')
    with pytest.raises(ValueError, match="line 2: wanted an object"):
        failure_source.read(str(broken))
    broken.write_text("nonsense")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        failure_source.read(str(broken))
    setup = Setup(config=load(str(ROOT / "configs/llama3-8b.toml")), profile=profile.load("h100"), options=Options())
    with pytest.raises(ValueError, match="there is no 'spare'; there are"):
        simulation.rules(setup, simulation.Question(assume=("spare=1",)))
    with pytest.raises(ValueError, match="wanted spares=NUMBER"):
        simulation.rules(setup, simulation.Question(assume=("spares=many",)))
    with pytest.raises(ValueError, match="no failure table"):
        failure_table.load("llama9")


def test_interval_formulas() -> None:
    mtbf_s = 3.09 * 3600
    assert interval.young(5, mtbf_s) == pytest.approx(5.56 * 60, rel=0.01)
    assert interval.daly(5, mtbf_s) == pytest.approx(interval.young(5, mtbf_s), rel=0.02)
    assert interval.daly(3 * mtbf_s, mtbf_s) == mtbf_s
    parts = interval.reach(300, stall_s=5, restart_s=600, mtbf_s=mtbf_s)
    assert parts.effective == pytest.approx(interval.effective(300, stall_s=5, restart_s=600, mtbf_s=mtbf_s))
    assert parts.largest() == "restarting"
    assert interval.effective(300, stall_s=5, restart_s=1e9, mtbf_s=mtbf_s) == 0


@pytest.mark.parametrize(
    ("nodes", "rate", "stall_s", "expected"),
    [
        (128, 2.34, 60, (0.979, 0.978, 0.976)),
        (128, 6.50, 60, (0.965, 0.961, 0.955)),
        (512, 3.79, 60, (0.947, 0.936, 0.923)),
        (2048, 3.79, 60, (0.891, 0.850, 0.799)),
        (2048, 3.79, 5, (0.960, 0.917, 0.864)),
        (4096, 3.79, 5, (0.937, 0.853, 0.747)),
        (12500, 2.34, 5, (0.904, 0.746, 0.549)),
    ],
)
def test_effective_time_at_the_optimal_interval(nodes: int, rate: float, stall_s: float, expected: tuple[float, ...]) -> None:
    """The published estimator's table, for restarts of 2, 10 and 20 minutes."""
    mtbf_s = failure_table.mtbf_s(rate, nodes)
    best = interval.young(stall_s, mtbf_s)
    for restart_min, value in zip((2, 10, 20), expected, strict=True):
        found = interval.effective(best, stall_s=stall_s, restart_s=60 * restart_min, mtbf_s=mtbf_s)
        assert found == pytest.approx(value, abs=0.002)
