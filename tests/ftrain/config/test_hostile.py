"""Values that a person may type and no run can have: each is refused in words, at once, and nothing counts up to it."""

from __future__ import annotations

import pytest

from ftrain.load import ConfigProblems, parse
from ftrain.nearest import divisors, nearest_divisor
from tests.ftrain.config.test_combinations import BASE

REFUSED = [
    ('slurm.time="tomorrow"', 'slurm.time: given "tomorrow" (text); allowed: text such as "60" or "2-00:00:00"'),
    ("slurm.time=٣", 'allowed: text such as "60"'),
    ('run.url="  "', "non-empty text"),
    ('run.local_dir="a\\u0000b"', "a NUL character ends every file name"),
    ("run.url=\udcff", "bytes that are not UTF-8 cannot be recorded"),
    ("run.steps=" + "9" * 5000, "whole number >= 1"),
    ("run.steps=0x" + "f" * 5000, "a number of 20000 bits"),
    ("run.steps=" + "[" * 3000, "whole number >= 1"),
    ("model.layers=9223372036854775807", "<= 8192"),
    ("model.heads=4611686018427387904", "<= 65536"),
    ("batch.global_batch=9223372036854775807", "<= 16777216"),
    ("parallel.ranks=9223372036854775807", "<= 1048576"),
    ("machine.profile_steps=[11, 12]", "with run.steps = 10; allowed: steps of the run"),
    ("machine.profile_steps=[9, 11]", "nearest: [9, 10], or more run.steps"),
]


@pytest.mark.parametrize(("override", "said"), REFUSED, ids=lambda it: it[:32].encode("ascii", "replace").decode())
def test_a_value_that_no_run_can_have_is_one_problem(override: str, said: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        parse(BASE, [override])
    (problem,) = caught.value.problems
    assert problem.path == override.partition("=")[0]
    assert said in str(problem)


@pytest.mark.parametrize("item", ["²", "9" * 5000, "-1", "1"])
def test_an_item_that_is_not_there_is_told(item: str) -> None:
    with pytest.raises(ConfigProblems, match=r"no item .*; allowed: 0 to 0"):
        parse(BASE, [f"data.sources.{item}.path=x"])


@pytest.mark.parametrize("text", ["[" * 5000, "v = " + "9" * 5000, "v = " + "[" * 5000])
def test_a_file_that_overwhelms_the_parser_is_not_toml(text: str) -> None:
    with pytest.raises(ConfigProblems, match="not TOML"):
        parse(text, origin="c.toml")


def test_the_last_step_may_be_traced() -> None:
    assert parse(BASE, ["machine.profile_steps=[9, 10]"]).machine.profile_steps == (9, 10)


def test_divisors_are_those_that_divide() -> None:
    assert all(divisors(whole) == [n for n in range(1, whole + 1) if whole % n == 0] for whole in range(1, 300))


def test_the_divisors_of_a_slip_of_the_keyboard_are_found_at_once() -> None:
    assert nearest_divisor(2, 2**63 - 1) == "nearest: 1 or 7"  # 7^2 x 73 x 127 x 337 x 92737 x 649657
