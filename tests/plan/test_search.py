"""The search compares floats and closed forms; asked one layout at a time, in fractions and hop by hop, it ranks the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from founding import ROOT

from ftrain.load import load
from ftrain.plan import memory, placement, profile, search
from ftrain.plan import time as clock
from ftrain.plan.setup import Setup, options_of

CASES = {
    "dense": ("llama3-8b", "h100", ()),
    "experts": ("mixtral-8x7b", "h100", ("parallel.ranks=64", "parallel.pp=2")),
    "cp": ("llama3-8b", "h100", ("parallel.cp=4", "data.seq_len=32768")),
    "odd sizes": ("dense-500b", "b200", ("parallel.ranks=1280", "batch.global_batch=640")),
    "narrow": ("llama3-405b", "h100", ("parallel.ranks=512", "batch.global_batch=256", "evaluate.every_steps=0")),
}

QUICK = ("dense", "experts", "cp")


def told(candidate: search.Candidate) -> tuple[Any, ...]:
    setup = candidate.setup
    return (setup.mesh, setup.config.batch.micro_batch, setup.options.schedule, setup.options.recompute)


def exhaustive(setup: Setup) -> list[search.Candidate]:
    """Every layout by itself, exactly."""
    found = []
    for option in search._layouts(setup):
        if search._illegal(option):
            continue
        for policy in search.RECOMPUTES:
            tried = Setup(config=option.config, profile=option.profile, options=option.with_recompute(policy).options)
            peak = max(rank.total for rank in memory.all_ranks(tried, aligned=False))
            if peak <= tried.profile.memory_bytes:
                found.append(search.Candidate(tried, clock.step(tried, exact=False), float(peak)))
                break
    return found


@pytest.mark.parametrize("case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_the_ranking_is_that_of_every_layout_asked_by_itself(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, hardware, overrides = CASES[case]
    config = load(str(ROOT / "configs" / f"{name}.toml"), overrides)
    setup = Setup(config=config, profile=profile.load(hardware), options=options_of(config))
    found = search.search(setup).fitting
    placement.path.cache_clear()
    monkeypatch.setattr(placement, "_levels", lambda *_, **__: None)  # hop by hop
    one_by_one = exhaustive(setup)
    placement.path.cache_clear()
    assert {told(candidate) for candidate in found} == {told(candidate) for candidate in one_by_one}
    alone = {told(candidate): candidate for candidate in one_by_one}
    for candidate in found:
        other = alone[told(candidate)]
        assert candidate.tokens_per_s == pytest.approx(other.tokens_per_s, rel=1e-9)
        assert candidate.peak == pytest.approx(other.peak, rel=1e-9)
    rates = [alone[told(candidate)].tokens_per_s for candidate in found]
    assert all(first >= second * (1 - 1e-8) for first, second in pairwise(rates))
