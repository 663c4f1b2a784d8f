"""The planner's picture of the cluster in a real browser: the part under the pointer is lifted and named, the others dim."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from ftrain.cli.plan import plan
from tests.chromium import Browser

ROOT = Path(__file__).parents[3]


def test_row_80_the_pointer_lifts_a_part_and_names_it(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "topology.html"
    command = ["explain", str(ROOT / "configs/llama3-405b.toml"), "--hardware", "h100", "--rank", "5", "--html", str(page)]
    assert CliRunner().invoke(plan, command).exit_code == 0
    browser.screen(width=1200)
    browser.open(page)
    part = "document.querySelectorAll('rect.part')"
    box = browser.value(
        f"(() => {{ const box = {part}[4].getBoundingClientRect(); return [box.x, box.y, box.width, box.height] }})()"
    )
    browser("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] / 2, y=box[1] + box[3] / 2)
    name = browser.value(f"{part}[4].querySelector('title').textContent")
    assert browser.value("document.getElementById('name').textContent") == name
    style = "(which) => { const style = getComputedStyle(which); return [style.transform, style.opacity] }"
    browser.value("Promise.all(document.getAnimations().map(animation => animation.finish()))")
    lifted, dimmed = (browser.value(f"({style})({part}[{index}])") for index in (4, 9))
    assert lifted == ["matrix(1, 0, 0, 1, 0, -5)", "1"]
    assert dimmed == ["none", "0.35"]
    assert browser.problems == []
