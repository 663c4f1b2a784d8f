"""What the tests of the classifier share: a verdict on evidence written as keywords, and a log of steps that went well."""

from __future__ import annotations

from typing import Any

import msgspec

from recovery.classify import classify
from recovery.events import Verdict
from recovery.evidence import Evidence

STEPS = ["step 10 loss 2.31 tokens/s 812", "step 11 loss 2.30 tokens/s 815"]


def verdict(**evidence: Any) -> Verdict:
    return classify(msgspec.convert(evidence, Evidence))
