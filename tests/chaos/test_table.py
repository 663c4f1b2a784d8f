"""The table of faults (tests.chaos.table): each is injected for real into a whole run, or into its machine.

A run that is expected to finish ends bit for bit where the undisturbed one did. A few rows, drawn from a seed, run with every
test run; all of them with the slow ones.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.table import MACHINES, MUST_HOLD, ROWS, Row, check, markdown
from tests.chaos.test_table_machines import INJECTED
from tests.runs import TinyRun

SEED = 20260
ALWAYS = {row.fault for row in random.Random(SEED).sample(ROWS, 2)}
DOCS = Path(__file__).parents[2] / "docs" / "recovery.md"


@pytest.mark.dist
@pytest.mark.chaos
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.fault, marks=() if row.fault in ALWAYS else pytest.mark.slow) for row in ROWS]
)
def test_row(row: Row, tmp_path: Path, corpus: str, unbroken: dict[str, str]) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=row.extra, env=row.env)
    check(run, row, unbroken)


def test_every_fault_that_must_be_survived_is_injected_by_some_test() -> None:
    named = {fault for faults in MUST_HOLD.values() for fault in faults}
    assert named <= {row.fault for row in ROWS} | set(MACHINES)
    assert set(INJECTED) == set(MACHINES)


def test_the_docs_show_this_table() -> None:
    assert markdown() in DOCS.read_text(), "python -m tests.chaos.table"
