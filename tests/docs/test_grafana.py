"""The Grafana dashboard asks for metrics that the supervisor exports, with labels that they have, and for all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from recovery.exposition import exposition
from recovery.report import report
from tests.ledgers import Story, config

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs/grafana.json").read_text(encoding="utf-8"))
NAME = re.compile(r"\bftrain_\w+")


def exported() -> dict[str, set[str]]:
    """Metric -> its labels, of a run that has everything."""
    story = Story(config()).start().steps(5).die().start(at=5).steps(5).end()
    found: dict[str, set[str]] = {}
    for line in exposition(report(story.events)).splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', rest))
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_metric_of_the_dashboard_is_exported_and_every_exported_one_is_shown() -> None:
    asked = {name for expression in expressions() for name in NAME.findall(expression)}
    assert asked == set(exported())


def test_labels_are_those_that_the_metrics_have() -> None:
    known = exported()
    for expression in expressions():
        (name,) = set(NAME.findall(expression))
        used = set(re.findall(r"(\w+)=~?\"", expression)) | set(re.findall(r"by \((\w+)\)", expression))
        assert used <= known[name], expression
    legends = {
        label
        for panel in DASHBOARD["panels"]
        for t in panel["targets"]
        for label in re.findall(r"{{(\w+)}}", t["legendFormat"])
    }
    assert legends <= {"run", "bucket"}


def test_panels_do_not_overlap_and_have_their_own_ids() -> None:
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
