"""The pictures of docs/planner.md, made by the code that makes them for users.

python tests/plan/pictures.py            # writes docs/pictures/
"""

from __future__ import annotations

import sys

from founding import ROOT

FOLDER = ROOT / "docs" / "pictures"


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    from ftrain.load import load
    from ftrain.plan import chart, draw, explain, profile
    from ftrain.plan.schedule import timeline
    from ftrain.plan.setup import Options, Setup

    config = load(str(ROOT / "configs" / "dense-500b.toml"))
    setup = Setup(config=config, profile=profile.load("b200"), options=Options())
    three, two = timeline("1f1b", p=3, m=6, v=1), timeline("1f1b", p=2, m=3, v=1)
    assert three is not None
    assert two is not None
    rank = explain.find_rank(setup, stage=3, card=2, replica=0)
    return {
        "stages.svg": chart.svg(three, title="1F1B, 3 stages, 6 micro-batches"),
        "1f1b.svg": chart.svg(two, title="1F1B, 2 stages, 3 micro-batches"),
        "topology.svg": draw.topology(setup, rank),
        "zero1.svg": draw.zero1(),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")
        sys.stderr.write(f"wrote {FOLDER / name}\n")
