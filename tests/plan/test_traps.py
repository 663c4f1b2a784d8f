"""The traps found while reproducing the founding rows, one test each."""

from __future__ import annotations

from fractions import Fraction

import pytest
from founding import A, B, ask

from ftrain.parallel.shape import MeshShape
from ftrain.plan import profile
from ftrain.plan.placement import crossing_share, key, path, ring_hops


def test_trap_1_the_optimizer_is_divided_by_dp_times_cp() -> None:
    reply = ask(f"plan memory {A} --set parallel.cp=2")
    assert reply.text("state") == "48.046875 GB"
    assert reply.value("optimizer_divisor") == 80
    naive = Fraction(500 * 10**9, 64) * (6 + Fraction(12, 40))
    assert naive == Fraction("49.21875e9")
    assert "6 + 12/40 = 6.3 B would divide by DP alone" in reply.said


def test_trap_2_pipeline_inside_data_makes_a_replica_contiguous() -> None:
    ours = MeshShape(tp=8, pp=8, dp=80)
    assert ours.group(0, ("tp", "cp", "pp")) == tuple(range(64))
    megatron = MeshShape(tp=8, pp=8, dp=80, order=("tp", "cp", "dp", "pp"))
    assert megatron.group(0, ("tp", "cp", "pp")) == tuple(card + 640 * stage for stage in range(8) for card in range(8))
    reply = ask(f"plan explain {A} --rank 0")
    assert reply.text("replica_span").startswith("64 cards = 8 servers")


def test_trap_3_two_definitions_of_one_bubble() -> None:
    reply = ask(f"plan schedule {B}")
    assert reply.text("bubble_of_total") == "48.4 %"
    assert reply.text("bubble_of_compute") == "93.75 %"


@pytest.mark.parametrize(("tokens", "factor"), [(8192, "1.04 x"), (131072, "1.40 x")])
def test_trap_4_attention_in_full_changes_the_utilisation(tokens: int, factor: str) -> None:
    reply = ask(f"plan time {B} --set data.seq_len={tokens}")
    assert reply.text("full_attention_factor") == factor
    assert reply.value("mfu_full") / reply.value("mfu") == pytest.approx(reply.value("full_attention_factor"))


def test_trap_5_the_printed_41_is_quoted_and_not_corrected() -> None:
    reply = ask(f"plan time {B} --achieved 400")
    assert reply.text("mfu_achieved") == "40.4 %"
    assert reply.rows("published")[1]["MFU printed"] == "41 %"
    assert "not corrected" in reply.data["tables"]["published"]["title"]


def test_trap_6_ep_never_multiplies() -> None:
    reply = ask(f"plan memory {A}")
    assert reply.text("layout") == "TP8 x CP1 x PP8 x DP80 = 5,120"
    assert "EP never multiplies" in reply.data["figures"]["layout"]["formula"]


def test_bandwidths_are_per_direction_and_peaks_are_dense() -> None:
    h100 = profile.load("h100")
    assert (h100.link_gb_s, h100.nic_gb_s) == (450, 50)
    assert h100.peak_flops == 989e12
    assert h100.gpu.sparse_bf16_tflops == 1979


def test_an_unknown_peak_gives_no_utilisation() -> None:
    reply = ask("plan time configs/demo.toml --hardware laptop")
    assert "mfu" not in reply.data["figures"]
    assert "peak unknown" in reply.said


def counted_share(mesh: MeshShape, axis: str, unit: int) -> float:
    """By brute force: over all units, the largest share of ranks whose ring successor is outside."""
    outside: dict[int, int] = {}
    for sender, receiver in ring_hops(mesh, (axis,)):  # type: ignore[arg-type]
        if sender // unit != receiver // unit:
            outside[sender // unit] = outside.get(sender // unit, 0) + 1
    return max(outside.values(), default=0) / unit


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "dp"])
@pytest.mark.parametrize("unit", [8, 16, 24, 64, 96])
@pytest.mark.parametrize("sizes", [(8, 1, 4, 6), (4, 2, 2, 12), (2, 3, 4, 8)])
def test_the_closed_form_of_crossing_is_the_count(axis: str, unit: int, sizes: tuple[int, int, int, int]) -> None:
    tp, cp, pp, dp = sizes
    mesh = MeshShape(tp=tp, cp=cp, pp=pp, dp=dp)
    assert crossing_share(mesh, (axis,), unit) == pytest.approx(counted_share(mesh, axis, unit))  # type: ignore[arg-type]


def test_contiguous_replicas_bear_an_oversubscribed_network() -> None:
    """A ring in rank order crosses pods with 1/24 of its cards: 1:7 does not slow it, although 50/7 would."""
    way = path(MeshShape(tp=8, pp=16, dp=128), ("dp",), key(profile.load("h100")))
    assert way.link == "cluster"
    assert way.gb_s == 50
    assert way.crowded_gb_s == pytest.approx(50 / 7)
