"""Fixtures of the chaos tests: one corpus, one unbroken run to compare everything with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ftrain.compose.proof import stored_digests
from ftrain.data.prepare import prepare
from ftrain.data.tokenizer import load_tokenizer
from tests.once import once
from tests.runs import TinyRun, end_all
from tests.undisturbed import Ends, undisturbed_ddp


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A token file made of the license text, 8 times over."""
    license_text = (Path(__file__).parents[2] / "LICENSE").read_text()

    def make(folder: Path) -> None:
        for number in range(8):
            (folder / f"{number}.txt").write_text(license_text[number * 100 :])
        prepare(sorted(folder.glob("*.txt")), str(folder / "corpus"), tokenizer=load_tokenizer("byte"))

    return str(once(tmp_path_factory, "corpus", make) / "corpus")


@pytest.fixture(scope="session")
def unbroken_run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A finished run that nothing disturbed. Read it, copy it, leave it as it is."""

    def make(folder: Path) -> None:
        code, output = TinyRun(folder=folder, corpus=corpus).run()
        assert code == 0, output

    return TinyRun(folder=once(tmp_path_factory, "unbroken", make), corpus=corpus)


@pytest.fixture(scope="session")
def unbroken(unbroken_run: TinyRun) -> dict[str, str]:
    """Its final digests, recomputed from storage."""
    step, digests = stored_digests(unbroken_run.url)
    assert step == unbroken_run.steps
    return digests


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How examples/ddp.py ends on two ranks."""
    return undisturbed_ddp(tmp_path_factory)


@pytest.fixture(autouse=True)
def _nothing_lives_on() -> Iterator[None]:
    yield
    end_all()
