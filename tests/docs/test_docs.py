"""The documentation: links lead somewhere, generated pages are fresh, the site builds, and the code blocks run.

A fenced block runs in a folder that each page shares with the blocks before it; the guides begin where the quick start ends.
A block that cannot run says why: ```sh no-test="reason".
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from ftrain.cli.reference import reference
from ftrain.load import resolve

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
FENCE = re.compile(r"^```(\w*)[ ]?(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
START = "quick-start.md"
QUICK = {"guides/data.md"}
"""Pages that need no run and are tested in every `make test`; the others train, and are for `make test-all`."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what stands behind it, and its text."""

    kind: str
    about: str
    text: str


def blocks(path: Path) -> list[Block]:
    return [Block(*match) for match in FENCE.findall(path.read_text(encoding="utf-8"))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    texts = (re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)) for heading in headings)
    return {re.sub(r"[-\s]+", "-", text.strip().lower()) for text in texts}


def shells() -> list[Path]:
    """Pages of the docs that have something to run."""
    return [path for path in sorted(DOCS.rglob("*.md")) if any(block.kind in ("sh", "python") for block in blocks(path))]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_link_leads_somewhere(path: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text(encoding="utf-8")))
    for target, anchor in LINK.findall(text):
        if "://" not in target and not target.startswith("mailto:"):
            there = path.parent / target if target else path
            assert there.exists(), f"{name(path)}: {target}"
            assert not anchor or there.suffix != ".md" or anchor[1:] in anchors(there), f"{name(path)}: {target}{anchor}"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_a_block_has_a_kind_and_one_that_does_not_run_says_why(path: Path) -> None:
    for block in blocks(path):
        assert block.kind, f"{name(path)}: a block without a language: {block.text[:40]!r}"
        if "no-test" in block.about:
            assert re.fullmatch(r'no-test="[^"]{10,}"', block.about), block.about


def test_what_the_readme_promises_is_what_the_page_of_guarantees_does() -> None:
    page = (DOCS / "guarantees.md").read_text().splitlines()
    promised = (ROOT / "README.md").read_text().partition("| guarantee |")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(promised) > 5
    assert [row for row in promised if row not in page] == []


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_configs_in_the_docs_are_legal(path: Path) -> None:
    demo = tomllib.loads((ROOT / "configs/demo.toml").read_text())
    for block in blocks(path):
        if block.kind == "toml" and "no-test" not in block.about:
            given = tomllib.loads(block.text)
            merged = {key: {**demo.get(key, {}), **table} if isinstance(table, dict) else table for key, table in given.items()}
            resolve({**demo, **merged})


def test_the_command_reference_is_fresh() -> None:
    fresh = (DOCS / "commands.md").read_text(encoding="utf-8") == reference()
    assert fresh, "run: python -m ftrain.cli.reference > docs/commands.md"


def test_the_site_is_built_by_one_command_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    index = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    assert "Training that does not care what breaks" in index
    assert "site_nav.py" not in {path.name for path in (tmp_path / "site").iterdir()}
    for path in DOCS.rglob("*.md"):
        if "adr" not in path.parts:
            page = str(path.relative_to(DOCS).with_suffix(".html"))
            assert f'href="{page}"' in index or page == "index.html", f"{page} is not in the navigation"
    loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"', index)
    assert not [url for url in loaded if "canonical" not in url]


def run_blocks(path: Path, folder: Path, first: int = 0, last: int | None = None) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONSAFEPATH": "1"}
    for block in [block for block in blocks(path) if block.kind in ("sh", "python") and "no-test" not in block.about][
        first:last
    ]:
        command = ["bash", "-euo", "pipefail", "-c"] if block.kind == "sh" else [sys.executable, "-c"]
        done = subprocess.run(
            [*command, block.text], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, f"{name(path)}:\n{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the quick start's first block has been carried out: there is a config."""
    folder = tmp_path_factory.mktemp("docs")
    run_blocks(DOCS / START, folder, last=1)
    return folder


@pytest.fixture(scope="session")
def started(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the whole quick start has been carried out."""
    folder = tmp_path_factory.mktemp("docs") / "started"
    shutil.copytree(begun, folder)
    run_blocks(DOCS / START, folder, first=1)
    return folder


@pytest.mark.dist
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(str(path.relative_to(DOCS)), marks=[] if str(path.relative_to(DOCS)) in QUICK else pytest.mark.slow)
        for path in shells()
    ],
)
def test_the_code_blocks_run(page: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # each block has a limit of its own
    started = request.getfixturevalue("begun" if page in QUICK else "started")
    if page == START:
        assert (started / "report.html").is_file()
        return
    folder = tmp_path / "docs"
    shutil.copytree(started, folder, ignore=shutil.ignore_patterns("*.sock"))
    run_blocks(DOCS / page, folder)
