"""The founding rows: what each is, the command that shows it, and the tests that pin it.

    python tests/plan/founding.py            # writes docs/founding-rows.md

The rows are the two documents' systems, mechanisms and figures, numbered as in the project's specification. A row's test is
any function in tests/ called `test_row_NN_...`; its command is the one that the planner's tests run.
"""

from __future__ import annotations

import ast
import json
import shlex
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "founding-rows.md"

A = "configs/dense-500b.toml --hardware b200 --params 500e9"
B = "configs/llama3-405b.toml --hardware h100"
PHASES = "configs/llama3-405b-phases.toml --hardware h100"
B405 = f"{B} --params 405e9"
DP_ONLY = "--set parallel.tp=1 --set parallel.pp=1 --set batch.global_batch=5120"
EXPERTS = "configs/mixtral-8x7b.toml --hardware h100"
SMALL = "configs/llama3-8b.toml --hardware h100"
TINY_CP = "--set parallel.cp=2 --set data.seq_len=8"
DOCS = "docs/planner.md"

# number: (what, command of the planner or page of the docs; empty where the engine, the tests or the report show it)
ROWS: dict[int, tuple[str, str]] = {
    1: ("Capacity gap: 1 TB of weights, 180 GB a card, not pooled; pure DP is impossible", f"plan memory {A} {DP_ONLY}"),
    2: ("Four kinds of memory", f"plan memory {A}"),
    3: ("Order of decisions: fit first, then throughput", f"plan search {A}"),
    4: ("Pipeline: weights stay, activations go forward, gradients back", f"plan schedule {A} --stages 3 --microbatches 6"),
    5: ("Why 8 stages: smaller shard, more hand-off and waiting", f"plan search {A} --sweep pp"),
    6: ("Pipeline acceptance: per-card peak, per-stage time", "report RUN"),
    7: ("Layer to stage map; cuts equalise time", f"plan schedule {B}"),
    8: ("Tensor parallel worked example", f"plan explain {A} --topic tp"),
    9: ("Column and row split: the pairing decides where to exchange", ""),
    10: ("TP inside a server", f"plan traffic {A} --set parallel.tp=16"),
    11: ("One replica: 64 cards", f"plan memory {A}"),
    12: ("80 replicas, 640 servers; DP is derived", f"plan memory {A}"),
    13: ("Stage 3, card 2 reduces with 79 others", f"plan explain {A} --place 3,2,0"),
    14: ("Data parallel worked example: both replicas reach 9.7", f"plan explain {A} --topic dp"),
    15: ("Hierarchy picture: card, server, replica, cluster", "docs/pictures/topology.svg"),
    16: ("1F1B, 2 stages, 3 micro-batches: 25 % idle", f"plan schedule {A} --stages 2 --microbatches 3"),
    17: ("Few micro-batches idle, many make an update large", f"plan schedule {A}"),
    18: ("Batch account: 10,485,760 tokens; by 80, not by 64", f"plan time {A} --replicas 64"),
    19: ("Micro-batch calculator", ""),
    20: ("More per update is not the same material sooner", "compare RUN_A RUN_B"),
    21: ("Plain against interleaved: 17.9 % and 9.9 %", f"plan schedule {A}"),
    22: ("Distributed optimizer: whole W and G, shared M and Adam", "docs/pictures/zero1.svg"),
    23: ("Reduce-scatter and all-gather", f"plan explain {A} --topic zero1"),
    24: ("Compute and communication overlap", "report RUN"),
    25: ("Overlap switches default off", ""),
    26: ("Accepting a switch: off first, one at a time", "compare RUN_A RUN_B"),
    27: ("16 and 18 bytes a parameter: 8 and 9 TB", f"plan memory {A}"),
    28: ("State table: 2, 4, 4, 8; the last two over 80", f"plan memory {A}"),
    29: ("140.625 GB and 48.046875 GB a card", f"plan memory {A}"),
    30: ("What 48 GB leaves out", f"plan memory {A}"),
    31: ("Checkpoint: 14 B, 7 TB, not times 80", f"plan checkpoint {A}"),
    32: ("FSDP as the route to compare", f"plan traffic {A} --sharding fsdp"),
    33: ("FSDP in Megatron 0.19", DOCS),
    34: ("HFSDP: 1/2, 1/2, 1/4", f"plan memory {A} --sharding hfsdp --inner 2"),
    35: ("Layout line: 5,120", f"plan memory {A}"),
    36: ("Sequence parallelism", ""),
    37: ("Context parallelism: CP2 makes DP40", f"plan memory {A} --set parallel.cp=2"),
    38: ("Dynamic CP at equal valid tokens", f"plan simulate {SMALL} {TINY_CP} --lengths 4:2,8:1"),
    39: ("Loss by valid tokens", ""),
    40: ("Expert parallelism, not used for the dense plan", f"plan explain {A} --topic ep"),
    41: ("Activation recompute", "compare RUN_A RUN_B"),
    42: ("Launch: 640 nodes x 8, DP80 inferred from 5,120 processes", f"plan memory {A}"),
    43: ("Rank relations: 7 TP peers, stages before and after, 79 DP peers", f"plan explain {A} --place 3,2,0"),
    44: ("Software stack map", DOCS),
    45: ("Split validation on a small model", ""),
    46: ("Tuning: each change answers one found problem", f"plan schedule {SMALL} --set parallel.tp=8 --set parallel.pp=8"),
    47: ("Gradual scale-out", "report RUN"),
    48: ("The checkpoint closes the loop", ""),
    49: ("Glossary", DOCS),
    50: ("405B, 15.6T tokens, 3.79e25 FLOP", f"plan time {B405} --tokens 15.6e12"),
    51: ("Packing: 16 servers = 8 racks = 128 GPUs = a replica", f"plan explain {B} --rank 0"),
    52: ("Parallelism buys time, not quality", f"plan time {B405} --tokens 15.6e12 --set parallel.ranks=8192"),
    53: ("Weights: 810 GB, 10.125 cards, so 11", f"plan memory {B405}"),
    54: ("16 B: 6.48 TB, 81 cards; 18 B beside it", f"plan memory {B405}"),
    55: ("3,010 years on one GPU, 67.1 days on 16,384", f"plan time {B} --flops 3.8e25 --achieved 400"),
    56: ("Server: size, weight, cards, power; 11.47 MW", f"plan traffic {B}"),
    57: ("NVLink: 18 x 25 = 450 GB/s a direction", f"plan traffic {B}"),
    58: ("Network card: 50 GB/s, 1/9 of NVLink", f"plan traffic {B}"),
    59: ("Rack 16, pod 3,072, cluster 24,576, 1:7", f"plan traffic {B}"),
    60: ("Batch: 131,072 tokens a replica, 16,777,216 a step", f"plan time {B}"),
    61: ("ZeRO-1: 4.09375 B, 25.6 %", f"plan memory {B405}"),
    62: ("Ring: 1.75 and 1.984375, 14 and 254 steps", f"plan traffic {B} --ring 8"),
    63: ("Ring times: 19.84 GB, 0.397 s, 0.0441 s", f"plan traffic {B} --ring 128 --size 10e9"),
    64: ("TP: two all-reduces forward, two backward", f"plan traffic {B}"),
    65: ("126 layers on 16 stages: 7, 14 x 8, 7", f"plan schedule {B}"),
    66: ("GPipe bubble: 0.4839, 0.1899, 0.1049", f"plan schedule {B} --schedule gpipe --microbatches 64"),
    67: ("m >= 4p is not negligible: 19 %", f"plan schedule {B} --microbatches 64"),
    68: ("Interleaved: (p-1)/(V m) of compute, not of total", f"plan schedule {B} --schedule interleaved --chunks 2"),
    69: ("4D layouts: DP 128, and 8 in the long phase", f"plan memory {PHASES} --phase 3"),
    70: ("Nesting order", f"plan traffic {B} --set 'parallel.order=[\"dp\",\"tp\",\"cp\",\"pp\"]'"),
    71: ("EP is a fifth cut, not used by the dense model, and no factor of the ranks", f"plan memory {EXPERTS}"),
    72: ("MFU with its peak", f"plan time {B} --achieved 400"),
    73: ("Why 43 becomes 41", f"plan time {B} --set parallel.ranks=8192 --against parallel.ranks=16384"),
    74: ("Interruptions: 466 = 47 + 419; 2.78 h, 3.09 h", f"plan checkpoint {B}"),
    75: ("Causes that add up", f"plan checkpoint {B}"),
    76: ("One card can stop the job", ""),
    77: ("Checkpoint of a GPU: 1 MB to 4 GB; interval", f"plan checkpoint {B} --stall 5"),
    78: ("Throughput by time of day", "report RUN"),
    79: ("Power swing", f"plan traffic {B}"),
    80: ("The part under the pointer is lifted and named", f"plan explain {B} --html topology.html"),
    81: ("Out of scope", DOCS),
}  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """What a command printed with --json."""

    code: int
    data: dict[str, Any]

    def text(self, key: str) -> str:
        """A figure as printed."""
        return str(self.data["figures"][key]["text"])

    def value(self, key: str) -> Any:
        """A figure as a number."""
        return self.data["figures"][key]["value"]

    def rows(self, key: str) -> list[dict[str, Any]]:
        """The rows of a table."""
        return list(self.data["tables"][key]["rows"])

    @property
    def said(self) -> str:
        """Everything in sentences."""
        return "\n".join([*self.data["notes"], *self.data["warnings"], *self.data["refusals"]])


@cache
def ask(command: str) -> Reply:
    """Run a command of the planner (`plan memory CONFIG ...`) with --json, in this process."""
    from click.testing import CliRunner

    from ftrain.cli.plan import plan

    arguments = [word.replace("configs/", f"{ROOT}/configs/") for word in shlex.split(command)[1:]]
    result = CliRunner().invoke(plan, [*arguments, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.stdout, result.stderr
    return Reply(result.exit_code, json.loads(result.stdout))


def row(number: int, more: str = "") -> Reply:
    """Run the command that shows a row, with more options."""
    return ask(f"{ROWS[number][1]} {more}".strip())


def tests_by_row() -> dict[int, list[str]]:
    """Where each row is tested: every `test_row_NN_...` under tests/."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_row_"):
                number = node.name.removeprefix("test_row_").split("_")[0]
                if number.isdecimal():
                    found.setdefault(int(number), []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def page() -> str:
    """docs/founding-rows.md."""
    tests = tests_by_row()
    lines = [
        "# The founding rows",
        "",
        "Two documents founded this project: a plan for a dense 500B model on 5,120 GPUs (rows 1 to 49), and an account of",
        "Llama 3 405B on 16,384 GPUs (rows 50 to 81). Each row is one system, mechanism or figure of theirs. Shown by: the",
        "command that prints it (add `--explain` for formula, inputs and source), or the page or picture. Tested by: the tests",
        "that pin it; a dash means that the part of the project which holds that row has no test of that name yet.",
        "",
        "Generated by `python tests/plan/founding.py`; a test checks that it is fresh.",
        "",
        "| row | what | shown by | tested by |",
        "|---|---|---|---|",
    ]
    for number, (what, shown) in ROWS.items():
        command = (
            f"`ftrain {shown}`" if shown.startswith(("plan ", "report ", "compare ")) else (f"`{shown}`" if shown else "-")
        )
        where = "<br>".join(f"`{name}`" for name in tests.get(number, [])) or "-"
        lines.append(f"| {number} | {what} | {command.replace('|', chr(92) + '|')} | {where} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stderr.write(f"wrote {PAGE}\n")
