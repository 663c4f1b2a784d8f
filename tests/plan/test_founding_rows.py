"""One test for each founding row that the planner shows, named by its number: figures to the last printed digit."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner
from founding import B405, DOCS, PAGE, ROOT, A, B, ask, page, row

SVG = "{http://www.w3.org/2000/svg}"


def words(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_page_of_rows_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/plan/founding.py"


def test_row_01_capacity_gap() -> None:
    reply = row(1)
    assert reply.text("weights") == "1 TB"
    assert reply.text("card_gb") == "180 GB"
    assert reply.text("server_gb") == "1,440 GB"
    assert reply.code == 3
    assert "data parallelism alone cannot hold this model" in reply.said


def test_row_02_four_kinds_of_memory() -> None:
    kinds = set(row(2).rows("stages")[0])
    assert {"weights", "grads", "master", "adam", "activations"} <= kinds
    assert row(2).code == 0


def test_row_03_fit_first_then_throughput() -> None:
    reply = row(3)
    assert reply.data["sections"][0] == "Legality, then fit, then throughput"
    assert reply.value("tried") > reply.value("legal") > reply.value("fitting") > 0
    assert any("does not fit" in dropped["reason"] for dropped in reply.rows("dropped"))


def test_row_04_stages_hand_on_activations_and_never_weights() -> None:
    assert "never weights" in ask(f"plan traffic {A}").data["tables"]["groups"]["formulas"]["PP"]
    assert row(4).value("bubble_of_total") == pytest.approx(2 / 8)
    drawn = ET.fromstring(words("docs/pictures/stages.svg"))
    assert [text.text for text in drawn.iter(f"{SVG}text") if (text.text or "").startswith("stage")] == [
        "stage 0",
        "stage 1",
        "stage 2",
    ]


def test_row_05_more_stages_shrink_the_shard_and_cost_waiting() -> None:
    rows = {entry["pp"]: entry for entry in row(5).rows("stages_sweep")}
    few, many = rows[4], rows[8]
    number = lambda text: float(text.split()[0])  # noqa: E731
    assert number(many["state"]) < number(few["state"])
    assert number(many["waiting"]) > number(few["waiting"])
    assert rows[8]["hand-offs sent"] == "1.21 GB"
    assert rows[4]["hand-offs sent"] == "603.98 MB"
    assert rows[2]["fits"] == "no"


def test_row_08_tensor_parallel_worked_example() -> None:
    reply = row(8)
    assert reply.text("tp_a") == "[2, 3]"
    assert reply.text("tp_b") == "[5, 8]"
    assert reply.text("tp_joined") == "[2, 3, 5, 8]"


def test_row_10_tp_stays_inside_a_server() -> None:
    reply = row(10)
    assert reply.code == 3
    assert "cross servers of 8 cards" in reply.said
    links = {entry["group"]: entry["slowest link"] for entry in ask(f"plan traffic {A}").rows("groups")}
    assert links == {"TP": "NVLink 5", "PP": "fabric", "DP x CP": "fabric"}


def test_row_11_one_replica_is_64_cards() -> None:
    assert row(11).value("replica_cards") == 64


def test_row_12_replicas_are_derived() -> None:
    assert row(12).value("replicas") == 80
    assert row(12).value("servers") == 640


def test_row_13_the_same_parameters_are_reduced_over_80() -> None:
    reply = row(13)
    assert reply.text("coordinate") == "tp 2, cp 0, pp 3, dp 0"
    assert reply.value("dp_peers") == 79


def test_row_14_data_parallel_worked_example_is_shown() -> None:
    assert row(14).text("dp_mean") == "3"
    assert row(14).text("dp_after") == "9.7"


def test_row_15_picture_from_card_to_cluster() -> None:
    drawn = ET.fromstring(words("docs/pictures/topology.svg"))
    texts = " ".join(text.text or "" for text in drawn.iter(f"{SVG}text"))
    for part in ("1 card", "8 cards: a server", "8 servers: replica 0", "80 replicas"):
        assert part in texts
    assert len(list(drawn.iter(f"{SVG}line"))) == 79  # the sync line of one shard joins 80 cards


def test_row_16_chart_of_two_stages_and_three_microbatches() -> None:
    reply = row(16)
    assert reply.data["drawings"] == ["s0 | F1 F2 .  .  B1 B1 F3 B2 B2 .  B3 B3\ns1 | .  F1 B1 B1 F2 B2 B2 F3 B3 B3 .  ."]
    assert reply.text("bubble_of_total") == "25.0 %"


def test_row_17_few_microbatches_idle_and_many_make_updates_large() -> None:
    curve = [(entry["micro-batches"], entry["idle of total"], entry["tokens per update"]) for entry in row(17).rows("curve")]
    assert curve == [
        (4, "63.6 %", "1,310,720"),
        (8, "46.7 %", "2,621,440"),
        (16, "30.4 %", "5,242,880"),
        (32, "17.9 %", "10,485,760"),
        (64, "9.9 %", "20,971,520"),
    ]


@pytest.mark.parametrize("wrong", [64, 5120])
def test_row_18_batch_account_refuses_double_counting(wrong: int) -> None:
    right = ask(f"plan time {A}")
    assert right.value("sequences") == 1 * 32 * 80 == 2560
    assert right.text("tokens_per_update") == "10,485,760 tokens"
    refused = ask(f"plan time {A} --replicas {wrong}")
    assert refused.code == 3
    assert "There are 80 replicas" in refused.said
    assert ask(f"plan time {A} --replicas 80").code == 0


def test_row_21_plain_and_interleaved_side_by_side() -> None:
    shown = {(entry["schedule"], entry["v"]): entry["idle of total"] for entry in row(21).rows("schedules")}
    assert shown["1f1b", 1] == "17.9 %"
    assert shown["interleaved", 2] == "9.9 %"


def test_row_22_picture_of_the_distributed_optimizer() -> None:
    drawn = ET.fromstring(words("docs/pictures/zero1.svg"))
    width = {}
    for bar in drawn.iter(f"{SVG}rect"):
        title = bar.find(f"{SVG}title")
        if title is not None and (title.text or "").endswith("on member 0"):
            width[(title.text or "").removesuffix(" on member 0")] = float(bar.get("width", "0"))
    assert width["M fp32"] == width["Adam 2 x fp32"] == width["W bf16"] / 2 == width["G fp32"] / 2


def test_row_23_bytes_of_reduce_scatter_and_all_gather() -> None:
    assert row(23).text("zero1_sent") == "3 B"  # half of 4 + half of 2
    assert "4 B reduce-scatter + 2 B all-gather" in ask(f"plan traffic {A}").data["tables"]["groups"]["formulas"]["DP x CP"]


def test_row_27_two_conventions() -> None:
    assert row(27).text("state_16") == "8 TB"
    assert row(27).text("state_18") == "9 TB"


def test_row_28_state_table() -> None:
    table = [(entry["record"], entry["bytes a parameter"], entry["part kept"]) for entry in row(28).rows("state_kinds")]
    assert table == [("weights", 2, "1/1"), ("gradients", 4, "1/1"), ("master", 4, "1/80"), ("moments", 8, "1/80")]


def test_row_29_state_of_a_card() -> None:
    assert row(29).text("local_params") == "7.8125 B"
    assert row(29).text("state_unsharded") == "140.625 GB"
    assert row(29).text("state") == "48.046875 GB"
    assert row(29).value("state") == 48_046_875_000


def test_row_30_what_is_left_out_is_named() -> None:
    for part in ("fragmentation", "NCCL", "not free space"):
        assert part in row(30).said
    first, middle = row(30).rows("stages")[0], row(30).rows("stages")[1]
    assert first["params"] > middle["params"]  # the embedding


def test_row_31_checkpoint_size() -> None:
    assert row(31).text("stored_bytes_per_param") == "14 B"
    assert row(31).text("size") == "7 TB"
    assert "not times the 80 replicas" in row(31).said


def test_row_33_fsdp_of_the_reference_engine() -> None:
    assert "0.19.0 (August 2026)" in words(DOCS)


def test_row_34_two_level_sharding() -> None:
    small = "configs/llama3-8b.toml --hardware h100 --set parallel.ranks=4 --set parallel.tp=1 --set batch.global_batch=4"
    parts = {
        entry["record"]: entry["part kept"]
        for entry in ask(f"plan memory {small} --sharding hfsdp --inner 2").rows("state_kinds")
    }
    assert parts == {"weights": "1/2", "gradients": "1/2", "master": "1/4", "moments": "1/4"}
    assert "cross servers of 8 cards" in row(34).said  # TP 8 fills the server


def test_row_35_layout_line() -> None:
    assert row(35).text("layout") == "TP8 x CP1 x PP8 x DP80 = 5,120"


def test_row_37_context_parallelism_keeps_the_state() -> None:
    assert row(37).text("layout") == "TP8 x CP2 x PP8 x DP40 = 5,120"
    assert row(37).text("state") == "48.046875 GB"


def test_row_38_dynamic_context_parallelism() -> None:
    reply = row(38)
    assert {entry["length"]: entry["dynamic"] for entry in reply.rows("members")} == {4: 1, 8: 2}
    assert reply.value("valid_tokens") == 16
    assert reply.value("speedup") > 1  # the short ones no longer exchange


def test_row_42_dp_is_inferred_from_the_processes() -> None:
    assert row(42).text("layout").endswith("DP80 = 5,120")
    assert row(42).value("servers") * 8 == 5120


def test_row_43_rank_relations() -> None:
    reply = row(43)
    assert (reply.value("tp_peers"), reply.value("dp_peers")) == (7, 79)
    assert (reply.text("previous_stage"), reply.text("next_stage")) == ("rank 18", "rank 34")


def test_row_44_software_stack() -> None:
    for part in (
        "Slurm",
        "Pyxis",
        "Enroot",
        "PyTorch autograd",
        "CUDA",
        "Transformer Engine",
        "torch.distributed",
        "NCCL",
        "NVLink",
    ):
        assert part in words(DOCS)


def test_row_46_a_heavy_end_is_named_with_its_evidence() -> None:
    assert "stage 7 does 142.9 % of the mean work" in row(46).said


def test_row_49_glossary() -> None:
    text = words(DOCS).lower()
    for word in (
        "pp,",
        "activation",
        "gradient",
        "tensor",
        "tp,",
        "dp,",
        "replica",
        "micro-batch",
        "accumulation",
        "global batch",
    ):
        assert f"| {word}" in text
    for word in (
        "bubble",
        "1f1b",
        "reduce-scatter",
        "all-gather",
        "optimizer state",
        "distributed optimizer",
        "overlap",
        "sp,",
    ):
        assert f"| {word}" in text


def test_row_50_scale() -> None:
    assert row(50).text("flops") == "3.7908e+25 FLOP"
    assert ask(f"plan memory {B}").text("params") == "405,853,388,800"  # 405.853B


def test_row_51_packing() -> None:
    assert row(51).text("replica_span").startswith("128 cards = 16 servers = 8 racks")
    assert row(51).text("replica_span").endswith("x 128 replicas = 16,384")


def test_row_52_parallelism_buys_time_not_quality() -> None:
    assert row(52).text("flops") == row(50).text("flops")
    assert row(52).value("tokens_per_update") == row(60).value("tokens_per_update")
    assert "buys time, not quality" in words(DOCS)


def test_row_53_weights() -> None:
    assert row(53).text("weights") == "810 GB"
    assert row(53).text("cards_weights") == "10.125"
    assert row(53).value("cards_weights_whole") == 11


def test_row_54_mixed_adam() -> None:
    assert row(54).text("state_16") == "6.48 TB"
    assert row(54).value("cards_state_16") == 81
    assert row(54).text("state_18") == "7.29 TB"


def test_row_55_time() -> None:
    assert row(55).text("years_on_one") == "3,010 years"
    assert row(55).text("days") == "67.1 days"


def test_row_56_server() -> None:
    facts = {entry["what"]: entry["value"] for entry in row(56).rows("server")}
    assert facts["size"] == "380 x 537 x 805 mm"
    assert facts["weight"] == "118.7 kg"
    assert (facts["CPUs"], facts["GPUs"], facts["switches"], facts["fans"]) == (2, 8, 4, 16)
    assert facts["network cards"] == "8 x 400G, one for each GPU"
    assert (facts["power of a GPU"], facts["cooling"]) == ("700 W", "air")
    assert row(56).text("gpu_power_mw") == "11.47 MW"


def test_row_57_nvlink_per_direction() -> None:
    assert row(57).text("link_gb_s") == "450 GB/s"
    assert row(57).text("link_both_gb_s") == "900 GB/s"


def test_row_58_network_card() -> None:
    assert row(58).text("nic_gb_s") == "50 GB/s"
    assert row(58).text("nic_over_link") == "1/9"


def test_row_59_three_level_network() -> None:
    tiers = [(entry["tier"], entry["GPUs"], entry["oversubscription"]) for entry in row(59).rows("tiers")[1:]]
    assert tiers == [("rack", "16", "1:1"), ("pod", "3,072", "1:1"), ("cluster", "24,576", "1:7")]
    links = {entry["group"]: entry["slowest link"] for entry in row(59).rows("groups")}
    assert links == {"TP": "NVLink 4", "PP": "pod", "DP x CP": "cluster"}


def test_row_60_batch() -> None:
    assert row(60).value("sequences_per_replica") == 16
    assert row(60).text("tokens_per_replica") == "131,072"
    assert row(60).text("tokens_per_update") == "16,777,216 tokens"


def test_row_61_zero1_keeps_a_quarter() -> None:
    assert row(61).text("zero_claim_bytes") == "4.09375 B"
    assert row(61).text("zero_claim_share") == "25.6 %"


def test_row_62_ring() -> None:
    eight, many = row(62), ask(f"plan traffic {B} --ring 128")
    assert (eight.text("ring_factor"), eight.value("ring_steps")) == ("1.75", 14)
    assert (many.text("ring_factor"), many.value("ring_steps")) == ("1.984375", 254)


def test_row_63_ring_times() -> None:
    assert row(63).text("ring_sent") == "19.84 GB"
    assert row(63).text("ring_nic") == "0.397 s"
    assert row(63).text("ring_link") == "0.0441 s"


def test_row_64_tensor_parallel_collectives_of_a_layer() -> None:
    assert row(64).value("tp_all_reduces") == 4


def test_row_65_uneven_stages() -> None:
    assert [entry["layers"] for entry in row(65).rows("stage_work")] == [7, *[8] * 14, 7]


@pytest.mark.parametrize(("m", "share"), [(16, 0.4839), (64, 0.1899), (128, 0.1049)])
def test_row_66_gpipe_bubble(m: int, share: float) -> None:
    reply = ask(f"plan schedule {B} --schedule gpipe --microbatches {m}")
    assert round(reply.value("bubble_of_total"), 4) == share
    assert round(reply.value("formula_of_total"), 4) == share


def test_row_67_four_times_the_stages_is_not_negligible() -> None:
    assert "m = 64 >= 4p = 64 is often called negligible" in row(67).said
    assert "it is 19.0 % of the time" in row(67).said


def test_row_68_interleaved_bubble_is_of_compute() -> None:
    reply = row(68)
    assert reply.value("bubble_of_compute") == pytest.approx(15 / (2 * 16))
    assert reply.value("bubble_of_total") == pytest.approx(15 / (2 * 16 + 15))


def test_row_69_four_dimensional_layouts() -> None:
    assert ask(f"plan memory {B}").text("layout") == "TP8 x CP1 x PP16 x DP128 = 16,384"
    assert row(69).text("layout") == "TP8 x CP16 x PP16 x DP8 = 16,384"


def test_row_70_nesting_order() -> None:
    assert ask(f"plan traffic {B}").data["warnings"] == []
    assert row(70).code == 3
    assert "tp first in parallel.order" in row(70).said


def test_row_72_mfu_with_its_peak() -> None:
    shown = [(entry["MFU printed"], entry["rate / peak"]) for entry in row(72).rows("published")]
    assert shown == [("43 %", "43.5 %"), ("41 %", "40.4 %"), ("38 %", "38.4 %")]
    assert "989 TFLOP/s dense" in row(72).data["figures"]["mfu"]["label"]


def test_row_73_why_43_becomes_41() -> None:
    reply = row(73)
    assert reply.text("mfu_direction") == "lower: bubble takes a larger share of the step"
    per_replica = next(entry for entry in reply.rows("beside") if entry["part"] == "tokens of a replica")
    assert (per_replica["here"], per_replica["there"]) == ("262,144", "131,072")


def test_row_74_interruptions() -> None:
    assert row(74).value("interruptions") == 466 == 47 + row(74).value("unplanned")
    assert row(74).text("mtbi_all_h") == "2.78 h"
    assert row(74).text("mtbi_unplanned_h") == "3.09 h"


def test_row_75_causes_add_up() -> None:
    causes = row(75).rows("causes")
    counts = [entry["count"] for entry in causes[:-1]]
    assert counts[:5] == [148, 72, 54, 35, 32]
    assert sum(counts[:5]) == 341
    assert sum(counts[5:]) == 78
    assert causes[-1]["count"] == sum(counts) == 419
    assert sum(float(entry["share"].split()[0]) for entry in causes[:-1]) == pytest.approx(100, abs=0.5)
    assert row(75).text("hardware_share") == "76.6 %"  # the paper says about 78 %


def test_row_77_checkpoint_of_a_gpu_and_its_interval() -> None:
    reply = row(77)
    assert 1e6 < reply.value("rank_bytes") < 4e9
    assert reply.value("young_s") == pytest.approx((2 * 5 * reply.value("mtbf_s")) ** 0.5)
    assert round(reply.value("effective"), 3) == 0.917


def test_row_79_power_swing() -> None:
    assert row(79).value("gpu_power_mw") == pytest.approx(16384 * 700 / 1e6)
    assert "swings the site" in row(79).said


def test_row_80_the_part_under_the_pointer_is_lifted_and_named(tmp_path: Path) -> None:
    from ftrain.cli.plan import plan

    target = tmp_path / "topology.html"
    config = f"{ROOT}/configs/llama3-405b.toml"
    result = CliRunner().invoke(plan, ["explain", config, "--hardware", "h100", "--rank", "26", "--html", str(target)])
    assert result.exit_code == 0, result.output
    text = target.read_text(encoding="utf-8")
    for part in (
        ".part:hover{transform:translateY",
        "opacity:.35",
        "rank 26: stage 3, card 2, replica 0",
        'id="name"',
    ):
        assert part in text


def test_row_81_out_of_scope_is_said() -> None:
    assert "## Out of scope" in words(DOCS)


def test_row_40_eight_tokens_go_to_their_experts_and_come_back_in_order() -> None:
    reply = row(40)
    routed = [part.split(": ") for part in reply.text("ep_routed").split(", ")]
    choices = {int(token): [int(expert) for expert in experts.split()] for token, experts in routed}
    assert list(choices) == list(range(1, 9))
    sent = [[word.split(">") for word in reply.text(f"ep_sent_{card}").split()] for card in (0, 1)]
    assert [sorted({int(expert) for _, expert in rows}) for rows in sent] == [[0, 1], [2, 3]]
    assert sum(map(len, sent)) == reply.value("ep_rows") == 16
    made = [reply.text(f"ep_made_{card}").split() for card in (0, 1)]
    assert made == [[str((int(expert) + 1) * int(token)) for token, expert in rows] for rows in sent]
    wanted = [0.75 * (first + 1) * token + 0.25 * (second + 1) * token for token, (first, second) in choices.items()]
    assert [float(value) for value in reply.text("ep_combined").split()] == wanted
    assert "one path of a token" in reply.said


def test_row_71_ep_is_no_factor_of_the_layout() -> None:
    assert "EP" not in ask(f"plan memory {B405}").text("layout")
    experts = row(71)
    assert experts.text("layout") == "TP1 x CP1 x DP32 x PP4 = 128 (EP8 inside DP x CP)"
    assert experts.value("replicas") * experts.value("replica_cards") == 128
