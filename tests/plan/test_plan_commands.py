"""The command line of the planner: light, complete with reasons, honest exit codes, pictures that parse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner
from founding import ROOT, A, B, ask
from pictures import FOLDER, pictures

from ftrain.cli.plan import plan
from ftrain.plan import figure, profile

COMMANDS = {
    "memory": A,
    "schedule": A,
    "traffic": A,
    "time": f"{A} --achieved 400 --against parallel.pp=16",
    "checkpoint": A,
    "search": A,
    "explain": f"{A} --rank 7",
    "simulate": f"{A} --days 5",
}


def test_all_commands_of_the_contract_are_there() -> None:
    assert set(plan.commands) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_number_says_how_it_came_about(name: str) -> None:
    reply = ask(f"plan {name} {COMMANDS[name]}")
    for key, entry in reply.data["figures"].items():
        assert entry["formula"], key
        assert entry["source"], key
        assert entry["text"], key


@pytest.mark.parametrize("name", COMMANDS)
def test_text_and_explanation_are_printed(name: str) -> None:
    arguments = [word.replace("configs/", f"{ROOT}/configs/") for word in COMMANDS[name].split()]
    short = CliRunner().invoke(plan, [name, *arguments])
    long = CliRunner().invoke(plan, [name, *arguments, "--explain"])
    assert short.exit_code == long.exit_code == 0, short.output
    assert "source:" not in short.stdout
    assert "source:" in long.stdout
    assert len(short.stdout.splitlines()) < len(long.stdout.splitlines())


def test_the_planner_imports_no_torch_and_no_zarr() -> None:
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from ftrain.cli.plan import plan\n"
        "for name, more in (('memory', []), ('search', ['--top', '1']), ('explain', []), ('simulate', ['--days', '1'])):\n"
        "    common = ['--hardware', 'h100', '--recompute', 'full']\n"
        f"    result = CliRunner().invoke(plan, [name, {str(ROOT / 'configs/llama3-8b.toml')!r}, *common, *more])\n"
        "    assert result.exit_code == 0, result.output\n"
        "found = {'torch', 'zarr', 's3fs', 'fsspec'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["memory", "none.toml"], "cannot be read"),
        (["memory", "CONFIG", "--hardware", "h900"], "give one of a100, b200, h100"),
        (["memory", "CONFIG", "--set", "parallel.tp=3"], "a divisor of model.heads"),
        (["memory", "CONFIG", "--sharding", "hfsdp", "--inner", "3"], "wanted a divisor of DP x CP = 32 x 1"),
        (["schedule", "CONFIG", "--schedule", "2f2b"], "no schedule is called '2f2b'"),
        (["schedule", "CONFIG", "--stages", "64", "--microbatches", "512", "--svg", "x.svg"], "fewer --microbatches"),
        (["explain", "CONFIG", "--rank", "64"], "ranks 0 to 63"),
        (["explain", "CONFIG", "--place", "0,0"], "wanted STAGE,CARD,REPLICA"),
        (["explain", "CONFIG", "--place", "1,0,0"], "pp = 1: this mesh has 1"),
        (["simulate", "CONFIG", "--lengths", "4:1"], "give --set parallel.cp=2"),
        (["simulate", "CONFIG", "--lengths", "4:x", "--set", "parallel.cp=2"], "wanted LENGTH:COUNT"),
        (["simulate", "CONFIG", "--lengths", "9000", "--set", "parallel.cp=2"], "more than data.seq_len"),
        (["simulate", "CONFIG", "--hardware", "laptop"], "peak unknown"),
        (["search", "CONFIG", "--sharding", "hsdp", "--inner", "3"], "wanted a divisor of DP x CP = 32 x 1"),
        (["traffic", "CONFIG", "--sharding", "hsdp"], "2 or more"),
        (["memory", "CONFIG", "--inner", "4"], "no effect on zero1: use --sharding hsdp or hfsdp"),
        (["traffic", "CONFIG", "--sharding", "fsdp", "--schedule", "zb-h1", "--set", "parallel.pp=2"], "FSDP sums gradients"),
        (["memory", "CONFIG", "--sharding", "fsdp", "--set", "model.tied=true", "--set", "parallel.pp=2"], "an untied head"),
        (["simulate", "CONFIG", "--assume", "nodes=0"], "nodes=0: wanted 1 or more"),
        (["simulate", "CONFIG", "--assume", "nodes=inf"], "nodes=inf: wanted 1 or more"),
        (["simulate", "CONFIG", "--assume", "spares=1.5"], "wanted a whole number"),
        (["simulate", "CONFIG", "--assume", "step_s=0"], "wanted a time above 0"),
        (["simulate", "CONFIG", "--assume", "repair_s=-1"], "wanted 0 or more"),
        (["simulate", "CONFIG", "--assume", "upload_s=nan"], "wanted a finite number"),
        (["simulate", "CONFIG", "--assume", "straggler_speed=0"], "above 0 and at most 1"),
        (["simulate", "CONFIG", "--assume", "nodes_per_replica=100"], "or no replica is whole"),
        (["simulate", "CONFIG", "--rate", "1e9", "--days", "1"], "Lower --days, --rate or --stragglers"),
        (["simulate", "CONFIG", "--lengths", "4:99999999", "--set", "parallel.cp=2"], "wanted at most 100,000 in all"),
    ],
)
def test_what_is_wrong_is_said_and_ends_with_the_config_code(arguments: list[str], message: str) -> None:
    config = str(ROOT / "configs/llama3-8b.toml")
    result = CliRunner().invoke(plan, [config if word == "CONFIG" else word for word in arguments])
    text = result.stdout + result.stderr
    assert message in text, text
    assert result.exit_code == 3


def test_without_hardware_the_assumption_is_said() -> None:
    result = CliRunner().invoke(plan, ["memory", str(ROOT / "configs/demo.toml")])
    assert "laptop assumed" in result.stderr
    large = ["memory", str(ROOT / "configs/llama3-8b.toml")]
    assert "h100 assumed" in CliRunner().invoke(plan, [*large, "--set", 'machine.hardware=""']).stderr
    assert "assumed" not in CliRunner().invoke(plan, large).stderr, "the config names its hardware"


def test_the_pictures_in_the_docs_are_fresh_and_parse() -> None:
    for name, svg in pictures().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == svg, "run: python tests/plan/pictures.py"
        ET.fromstring(svg)


def test_schedule_files_are_the_simulated_schedule(tmp_path: Path) -> None:
    svg, trace = tmp_path / "chart.svg", tmp_path / "chart.json"
    config = str(ROOT / "configs/llama3-405b.toml")
    files = ["--svg", str(svg), "--perfetto", str(trace)]
    result = CliRunner().invoke(
        plan, ["schedule", config, "--stages", "4", "--microbatches", "8", "--schedule", "zb-v", *files]
    )
    assert result.exit_code == 0, result.output
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 8 * 8 * 3  # stages x micro-batches x (forward, input, weight)
    assert {event["cat"] for event in events} == {"forward", "backward_input", "backward_weight"}
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx((3 * 8 + 1.5) * 1000)
    bars = [bar for bar in ET.fromstring(svg.read_text()).iter("{http://www.w3.org/2000/svg}rect") if len(bar)]
    assert len(bars) == len(events) + 4  # and the idle ground of each rank


def test_search_ranks_what_fits_and_places_the_config() -> None:
    reply = ask(f"plan search {B} --top 100")
    rows = reply.rows("layouts")
    rates = [float(entry["tokens/s"].replace(",", "")) for entry in rows]
    assert rates == sorted(rates, reverse=True)
    assert all(float(entry["peak"].split()[0]) <= 80 for entry in rows)
    assert all(entry["tp"] * entry["cp"] * entry["pp"] * entry["dp"] == 16384 and entry["tp"] <= 8 for entry in rows)
    assert "TP8 x CP1 x PP16 x DP128 = 16,384, is number" in reply.said
    dropped = sum(entry["layouts"] for entry in reply.rows("dropped"))
    assert reply.value("tried") == dropped + reply.value("fitting")


def test_a_time_that_no_run_takes_is_said_to_be_none() -> None:
    """Llama 3 8B whole on each of 64 cards of 80 GB needs recompute; with it nothing is warned of, and the search says so."""
    config = "configs/llama3-8b.toml --hardware h100 --set parallel.tp=1"
    (warned,) = ask(f"plan time {config}").data["warnings"]
    assert "no run takes this time" in warned
    assert "does not fit: pipeline rank 0 needs 93.1 GB of 80 GB" in warned
    assert not ask(f"plan time {config} --recompute full").data["warnings"]
    notes = json.dumps(ask(f"plan search {config}").data, ensure_ascii=False)
    assert "with recompute full" in notes


def test_small_models_and_short_runs_are_printed_in_units_that_fit() -> None:
    """Not 0.000857472 B, which reads like bytes, and not 0.0002 days; the values in JSON stay what they were."""
    small = ask("plan memory configs/demo.toml --hardware laptop")
    assert (small.text("local_params"), small.value("local_params")) == ("857,472", pytest.approx(857_472e-9))
    short = ask("plan time configs/demo.toml --hardware laptop --peak 0.05 --achieved 0.01")
    assert short.text("predicted_days") == figure.seconds(86_400 * short.value("predicted_days")) == "17.1 s"
    assert [short.text(key) for key in ("years_on_one", "days", "days_with_failures")] == ["2.63 min", "1.32 min", "17.1 s"]


def test_a_prediction_far_from_the_rate_that_was_given_says_why() -> None:
    """400 TFLOP/s were published for Llama 3 405B; the config's 1f1b on 16 stages waits half of the time."""
    (note,) = [line for line in ask(f"plan time {B} --achieved 400").data["notes"] if "prediction" in line]
    assert "own schedule, 1f1b with 16 stages, 16 micro-batches and 1 virtual stage a rank" in note
    assert "183 TFLOP/s a GPU where 400 was given; what differs most is its bubble" in note
    assert "prediction" not in str(ask(f"plan time {B} --achieved 190").data["notes"])  # 4 % apart
    assert "prediction" not in str(ask(f"plan time {B}").data["notes"])


def test_one_stage_cannot_be_interleaved() -> None:
    rows = ask("plan schedule configs/llama3-8b.toml --hardware h100").rows("schedules")
    assert {row["idle of compute"] for row in rows if row["schedule"] == "interleaved"} == {"needs two stages or more"}


def test_search_refuses_what_cannot_fit() -> None:
    reply = ask(
        "plan search configs/llama3-405b.toml --hardware h100 --set parallel.ranks=16 --set parallel.pp=1 --set parallel.tp=8"
    )
    assert reply.code == 3
    assert "no layout of 16 ranks on h100 fits" in reply.said


def test_a_save_that_comes_too_late_is_refused() -> None:
    base = f"plan checkpoint {B} --stall 5 --store-gb-s 100"
    assert ask(f"{base} --left 30").code == 3
    assert "would not be committed" in ask(f"{base} --left 30").said
    assert ask(f"{base} --left 300").code == 0
    assert ask(base).value("upload_s") == pytest.approx(ask(base).value("size") / 100e9)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (Fraction(78125, 10000), None, "7.8125"),
        (Fraction(1, 3), None, "0.333"),
        (10_485_760, None, "10,485,760"),
        (0.123456789, None, "0.123457"),
        (Fraction(2, 3), 1, "0.7"),
        (-5, None, "-5"),
    ],
)
def test_numbers_are_printed_exactly(value: Fraction | float, digits: int | None, text: str) -> None:
    assert figure.decimal(value, digits=digits) == text


def test_sizes_and_times_are_printed_for_people() -> None:
    assert figure.decimal(1e300) == "1.0000e+300"
    assert figure.decimal(Fraction(10**400, 3)) == "3.3333e+399"
    assert figure.size(48_046_875_000) == "48.046875 GB"
    assert figure.size(-1500) == "-1.5 kB"
    assert figure.size(12) == "12 B"
    assert figure.seconds(0.9996) == "1000 ms" or figure.seconds(0.9996) == "1,000 ms"
    assert figure.seconds(3010 * 31_557_600) == "3,010 years"
    assert figure.seconds(5.5e-6) == "5.50 us"


def test_answers_name_the_figures_they_have() -> None:
    answer = figure.Answer(command="x", title="x", sections=())
    with pytest.raises(KeyError, match="no figure 'y'"):
        answer.figure("y")


@pytest.mark.parametrize("name", profile.names())
def test_profiles_are_plausible(name: str) -> None:
    found = profile.load(name)
    assert found.link_gb_s >= found.nic_gb_s
    assert [tier.gpus for tier in found.tiers] == sorted(tier.gpus for tier in found.tiers)
    assert {"gpu", "server", "network", "assumed"} <= set(found.sources)
    assert found.gpu.sparse_bf16_tflops in (0, pytest.approx(2 * found.gpu.dense_bf16_tflops, rel=0.01))


def test_a_profile_of_ones_own_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((profile.FOLDER / "h100.toml").read_text().replace('name = "h100"', 'name = "mine"'))
    assert profile.load(str(path)).name == "mine"
    good = path.read_text()
    for old, new, said in [
        ("memory_gb = 80", "memory_gb = inf", r"gpu.memory_gb = inf: wanted a finite number"),
        ("gpus = 16", "gpus = 4", "each as large as what it holds"),
        ("assumed =", "guessed =", "sources has no assumed"),
        ("[gpu]", "[gpu", f"hardware profile {path}"),
    ]:
        path.write_text(good.replace(old, new))
        with pytest.raises(ValueError, match=re.escape(said)):
            profile.load(str(path))
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=re.escape(f"hardware profile {path}")):
        profile.load(str(path))
    path.write_text(good.replace("memory_gb =", "memory_gib ="))
    with pytest.raises(ValueError, match="memory_gib"):
        profile.load(str(path))


COUNTED = "ranks|cards|stages|replicas|GPUs|servers|micro-batches|days|steps|layers|checkpoints|sequences|tokens|nodes"


@pytest.mark.parametrize("command", ["memory", "schedule", "traffic", "time", "checkpoint", "search", "explain", "simulate"])
def test_one_is_singular(command: str) -> None:
    """One rank, one stage, one replica, one card, one micro-batch, one day."""
    alone = ["--set", "parallel.ranks=1", "--set", "batch.global_batch=8", "--set", "faults=[]", "--peak", "0.05"]
    days = ["--days", "1"] if command == "simulate" else []
    result = CliRunner().invoke(plan, [command, str(ROOT / "configs/demo.toml"), *alone, *days, "--explain"])
    assert result.exit_code == 0, result.output
    assert not re.findall(rf"(?<![\d.,])1 (?:[a-z]+ )?(?:{COUNTED})\b", result.stdout)


def test_a_table_without_rows_says_nothing_rather_than_a_head() -> None:
    """Failures are rare on a small machine: a day without any has no causes."""
    result = CliRunner().invoke(plan, ["simulate", str(ROOT / "configs/llama3-8b.toml"), "--days", "1"])
    assert "at its first occurrence: nothing" in result.stdout
    assert "no failure in 1.00 days" in result.stdout
    assert "cause  count" not in result.stdout
