"""Fixtures of the chaos tests: one corpus, one unbroken run to compare everything with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrain.compose.proof import stored_digests
from ftrain.data.prepare import prepare
from ftrain.data.tokenizer import load_tokenizer
from tests.runs import TinyRun, end_all
from tests.undisturbed import Ends, undisturbed_ddp


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A token file made of the license text, 8 times over."""
    folder = tmp_path_factory.mktemp("corpus")
    license_text = (Path(__file__).parents[2] / "LICENSE").read_text()
    for number in range(8):
        (folder / f"{number}.txt").write_text(license_text[number * 100 :])
    prefix = str(folder / "corpus")
    prepare(sorted(folder.glob("*.txt")), prefix, tokenizer=load_tokenizer("byte"))
    return prefix


@pytest.fixture(scope="session")
def unbroken_run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A finished run that nothing disturbed. Read it, copy it, leave it as it is."""
    run = TinyRun(folder=tmp_path_factory.mktemp("unbroken"), corpus=corpus)
    code, output = run.run()
    assert code == 0, output
    return run


@pytest.fixture(scope="session")
def unbroken(unbroken_run: TinyRun) -> dict[str, str]:
    """Its final digests, recomputed from storage."""
    step, digests = stored_digests(unbroken_run.url)
    assert step == unbroken_run.steps
    return digests


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How examples/ddp.py ends on two ranks."""
    own = tmp_path_factory.getbasetemp()
    return undisturbed_ddp(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(autouse=True)
def _nothing_lives_on() -> Iterator[None]:
    yield
    end_all()
