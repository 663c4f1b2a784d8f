"""`ftrain report --html` in a real browser: what is on the page, on a phone, in the dark and on paper."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from ftrain.view.html import page
from ftrain.view.plot import thin, ticks
from ftrain.view.record import recorded
from tests.chromium import Browser
from tests.ledgers import Story, config

HOSTILE = '</script><img src=x onerror="window.hit=1">'
BUCKETS = {"compute": 0.5, "tp": 0.05, "cp": 0.0, "pp": 0.05, "dp": 0.1, "bubble": 0.2, "imbalance": 0.1}


def story() -> Story:
    """Two attempts, two interruptions, evaluations, a text that tries to be a script."""
    made = Story(config("parallel.pp=4", "parallel.ranks=8", "run.steps=200"), layout="pp4 x dp2")
    made.start().steps(60).evaluate(2.3)
    made.die(class_=HOSTILE, component="gpu").start(at=50, layout="pp4 x dp1", ranks=4).steps(70, seconds=2.0).evaluate(2.1)
    return (
        made.die(class_="preemption", component="host", planned=True).start(layout="pp4 x dp1", ranks=4).steps(20, seconds=2.0)
    )


def times(attempt: int, step: int) -> dict[str, Any]:
    memory = [[rank, rank % 4, 900, 1000, 1_000_000 * (1 + rank % 4)] for rank in range(4)]
    worst = {name: [0, 2 * seconds] for name, seconds in BUCKETS.items()}
    rates = {
        "tflops": 1.0,
        "tflops_full": 1.1,
        "mfu": None,
        "mfu_full": None,
        "peak": "unknown",
        "device": "cpu",
        "dtype": "fp32",
    }
    line = {"attempt": attempt, "layout": "pp4 x dp1", "step": step, "tokens": 1024, "seconds": 2.0}
    stages = {"stages": [BUCKETS] * 4, "actions": {"F": [0.01] * 4, "B": [0.02] * 4}}
    return {**line, **rates, **stages, "mean": BUCKETS, "worst": worst, "memory": memory}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = recorded("runs/a", story().events, [times(1, step) for step in range(51, 121)] + [times(2, 130)])
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(run), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Browser, report: Path) -> Browser:
    browser.screen(width=1000)
    browser.open(report)
    return browser


def test_the_page_needs_nothing_but_itself_and_complains_of_nothing(opened: Browser, report: Path) -> None:
    assert opened.requests == [report.as_uri()]
    assert opened.problems == []
    assert opened.value("window.hit") is None  # text of a ledger stays text
    assert opened.value("document.querySelectorAll('script[src], link[rel=stylesheet], img').length") == 0


def test_the_facts_of_the_run_are_on_the_page(opened: Browser) -> None:
    rows = "document.querySelectorAll('#interruption-table tbody tr').length"
    assert opened.value(rows) == 2
    assert opened.value("document.querySelectorAll('#attempt-table tbody tr').length") == 3
    assert opened.value("document.querySelectorAll('#timeline rect.attempt').length") == 3
    assert opened.value("document.querySelectorAll('#timeline line.mark').length") == 1  # unplanned
    assert opened.value("document.querySelectorAll('#timeline line.planned').length") == 1
    assert opened.value("document.querySelectorAll('#timeline rect.discarded').length") == 1  # steps 51 to 60 of attempt 0
    assert opened.value("document.querySelectorAll('svg[data-plot=loss] line.mark').length") == 2
    assert opened.value("document.querySelectorAll('svg[data-plot=loss] circle.heldout').length") == 2
    assert opened.value("document.querySelectorAll('svg[data-plot=loss] polyline.undone').length") == 1
    assert (
        opened.value("document.querySelectorAll('#predicted rect.kF').length") == 4 * 16
    )  # stages x micro-batches of the newest layout
    assert opened.value("document.querySelectorAll('svg#measured rect.kB').length") == 4 * 16
    assert "idle 15.8 % of the total, 570.0 ms" in opened.value("document.querySelector('svg#measured').textContent")  # 3 / 19
    shares = opened.value(
        "[...document.querySelectorAll('#buckets td:nth-child(3)')].map(cell => parseFloat(cell.textContent))"
    )
    assert sum(shares[:-1]) == pytest.approx(100, abs=0.05 * len(shares))  # printed with one digit each
    assert shares[-1] == 100
    assert opened.value("document.querySelectorAll('#memory rect.measured').length") == 4
    assert HOSTILE in opened.value("document.querySelector('#interruption-table').textContent")


def test_each_layout_has_its_own_heading_and_figures(opened: Browser) -> None:
    headings = opened.value("[...document.querySelectorAll('#predicted-beside-measured h3')].map(it => it.textContent)")
    assert [text.split(",")[0] for text in headings] == ["pp4 x dp2 on 8 ranks", "pp4 x dp1 on 4 ranks"]
    assert "steps 1 to 50" in headings[0]
    assert opened.value("document.querySelectorAll('#grade-0, #grade').length") == 2
    assert opened.value("document.querySelectorAll('#memory-0 rect.measured').length") == 0  # nothing recorded of its ranks
    notes = opened.value("document.querySelector('#predicted-beside-measured').textContent")
    assert "(1) not predicted: the hardware profile names no peak" in notes
    assert "not comparable at this size: planned are tensors alone" in notes
    assert "not comparable: the whole process" not in notes
    assert "planned are tensors alone" in opened.value("document.querySelector('#memory-of-the-ranks').textContent")


def test_buckets_of_a_step_add_up(opened: Browser) -> None:
    shares = opened.value(
        "[...document.querySelectorAll('#step-table td:nth-child(3)')].map(cell => parseFloat(cell.textContent))"
    )
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))


def test_the_pointer_reads_the_curve_out(opened: Browser) -> None:
    box = opened.value(
        "(() => { const svg = document.querySelector('svg[data-plot=loss]'); svg.scrollIntoView();"
        " const box = svg.getBoundingClientRect(); return [box.left, box.top, box.width, box.height] })()"
    )
    x, y = box[0] + box[2] - 15, box[1] + box[3] / 2
    opened("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    told = opened.value("document.querySelector('output[data-plot=loss]').textContent")
    assert told.startswith("loss 2.0214 at 143,360")  # 2 + 3 / 140 after 140 x 1,024 tokens


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_scrolls_tables_and_never_the_page(opened: Browser, width: int) -> None:
    opened.screen(width=width)
    assert opened.value("document.documentElement.scrollWidth") <= width
    assert opened.value("document.querySelector('#interruption-table').parentElement.scrollWidth") > width  # by itself
    sizes = opened.value(
        "[...document.querySelectorAll('svg.plot, svg.clock, svg.gantt, #memory')].map(svg => svg.clientWidth"
        " / svg.viewBox.baseVal.width * parseFloat(getComputedStyle(svg.querySelector('text')).fontSize))"
    )
    assert len(sizes) == 7
    assert min(sizes) >= 10  # px, as seen


def test_dark_mode_is_dark_and_legible(opened: Browser) -> None:
    light = opened.value("getComputedStyle(document.body).backgroundColor")
    opened.screen(width=1000, dark=True)
    dark = opened.value("getComputedStyle(document.body).backgroundColor")
    ink = opened.value("getComputedStyle(document.body).color")
    assert light == "rgb(255, 255, 255)"
    assert _contrast(ink, dark) >= 7  # WCAG 2, level AAA
    label = opened.value("getComputedStyle(document.querySelector('svg.plot text')).fill")
    assert _contrast(label, dark) >= 4.5  # level AA


def test_paper_has_no_controls_and_dark_ink(opened: Browser) -> None:
    opened.screen(width=1000, dark=True, media="print")
    assert opened.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.value("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert opened.value("getComputedStyle(document.querySelector('output')).display") == "none"
    assert base64.b64decode(opened("Page.printToPDF")["data"]).startswith(b"%PDF")


def test_an_empty_run_has_a_page_too(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "empty.html"
    path.write_text(page(recorded("runs/a", Story(config()).end().events)), encoding="utf-8")
    browser.open(path)
    assert browser.problems == []
    assert "no interruption" in browser.value("document.body.textContent")


def test_a_long_curve_keeps_its_spikes() -> None:
    points = [(float(x), 1.0) for x in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    kept = thin(points)
    assert len(kept) <= 700
    assert (54_321.0, 99.0) in kept
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (4.75, 5.6, [4.8, 5.0, 5.2, 5.4, 5.6]), (-1, 1, [-1, -0.5, 0, 0.5, 1]), (3, 3, [3])],
)
def test_ticks_are_round(low: float, high: float, wanted: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(wanted)


def _contrast(one: str, two: str) -> float:
    """WCAG 2 contrast of two `rgb(...)` colours."""
    first, second = sorted((_luminance(one), _luminance(two)), reverse=True)
    return (first + 0.05) / (second + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
