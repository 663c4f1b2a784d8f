"""A batch ramp: which update takes how many sequences, from the position alone."""

from pathlib import Path

import msgspec
import pytest

from ftrain.config import Batch, Config, Ramp
from ftrain.load import ConfigProblems, layout_summary, load
from ftrain.ramp import batches, global_batch_at, position, stretches

CONFIGS = Path(__file__).parents[3] / "configs"


def ramped(*parts: tuple[int, int], steps: int = 20) -> Config:
    """Sequences of 64 tokens; 8 at the end of the ramp."""
    config = load(str(CONFIGS / "tiny-dp2.toml"), (f"run.steps={steps}", "data.seq_len=64"))
    ramp = tuple(Ramp(tokens=tokens, global_batch=size) for tokens, size in parts)
    return msgspec.structs.replace(config, batch=Batch(global_batch=8, micro_batch=1, ramp=ramp))


def by_hand(config: Config) -> list[tuple[int, int]]:
    """(first sequence, size) of each update, one after the other."""
    first, found = 0, []
    for _ in range(config.run.steps):
        size = global_batch_at(config, first)
        found.append((first, size))
        first += size
    return found


def test_an_update_takes_the_batch_of_the_part_in_which_it_begins() -> None:
    config = ramped((5 * 64, 2), (10 * 64, 4))
    assert [size for _, size in by_hand(config)][:7] == [2, 2, 2, 4, 8, 8, 8]  # begins at 0, 2, 4 | 6 | 10 ...


@pytest.mark.parametrize("parts", [(), ((1, 2),), ((5 * 64, 2), (10 * 64, 4)), ((333, 2), (334, 4), (5000, 6)), ((10**9, 2),)])
def test_stretches_are_the_updates_one_after_the_other(parts: tuple[tuple[int, int], ...]) -> None:
    config = ramped(*parts)
    found = [
        (part.first_sequence + index * part.global_batch, part.global_batch)
        for part in stretches(config)
        for index in range(part.stop_step - part.first_step)
    ]
    assert found == by_hand(config)
    for step, (first, _) in enumerate(by_hand(config)):
        assert position(config, step) == first
    assert set(batches(config)) >= {size for _, size in found}


def test_a_dry_run_shows_the_ramp() -> None:
    text = layout_summary(ramped((5 * 64, 2), (10 * 64, 4)))
    assert "steps 1 to 3: 2 sequences" in text
    assert "steps 4 to 4: 4 sequences" in text
    assert "steps 5 to 20: 8 sequences" in text
    assert "20 steps = 8.83K tokens" in text  # (6 + 4 + 128) x 64


def test_everything_wrong_with_a_ramp_is_said_at_once(tmp_path: Path) -> None:
    text = (CONFIGS / "tiny-dp2.toml").read_text()
    path = tmp_path / "config.toml"
    path.write_text(text)
    ramp = "batch.ramp=[{tokens = 100, global_batch = 3}, {tokens = 100, global_batch = 2}]"
    with pytest.raises(ConfigProblems) as caught:
        load(
            str(path),
            (ramp, "batch.micro_batch=2", "batch.global_batch=8", 'machine.hardware="h1000"', "machine.profile_steps=[3]"),
        )
    found = [problem.path for problem in caught.value.problems]
    assert found == [
        "batch.micro_batch",
        "batch.ramp.1.global_batch",
        "batch.ramp.1.tokens",
        "machine.profile_steps",
        "machine.hardware",
    ]
