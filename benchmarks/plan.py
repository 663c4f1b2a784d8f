"""Processor time of every `ftrain plan` command: `worst_cpu_s`, the start of Python included, bound 0.5 s.

A question that is asked twenty times while a layout is being found must not cost a coffee each. The peer of the same run is the
bare start of an interpreter: `worst_over_python` says how much of the answer is ours. Processor time of the child alone, user
and system, by getrusage: a busy machine stretches it little. Each sample is a process of its own, as a user starts it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import common

BOUND_S = 0.5
DENSE = "configs/dense-500b.toml --hardware b200"
LLAMA = "configs/llama3-405b.toml --hardware h100"
EXPERTS = "configs/mixtral-8x7b.toml --hardware h100"
PHASES = "configs/llama3-405b-phases.toml --hardware h100"
LONG = "--set parallel.cp=16 --set data.seq_len=131072 --set batch.global_batch=2048"
MANY = "--set parallel.ranks=16384 --set batch.global_batch=16384 --set evaluate.every_steps=0"
COMMANDS = {
    "memory": f"memory {DENSE}",
    "schedule": f"schedule {LLAMA}",
    "schedule_interleaved": f"schedule {DENSE} --schedule interleaved --chunks 2",
    "traffic": f"traffic {LLAMA}",
    "time": f"time {DENSE} --achieved 400 --against parallel.pp=16",
    "checkpoint": f"checkpoint {LLAMA} --stall 5",
    "search": f"search {LLAMA}",
    "search_cp16": f"search {LLAMA} {LONG}",
    "search_experts": f"search {EXPERTS}",
    "search_experts_16384": f"search {EXPERTS} {MANY}",
    "search_experts_cp16_16384": f"search {EXPERTS} {MANY} {LONG} --set batch.global_batch=16384",
    "search_phases": f"search {PHASES}",
    "sweep": f"search {DENSE} --sweep pp",
    "memory_experts": f"memory {EXPERTS}",
    "memory_phases": f"memory {PHASES}",
    "schedule_phases": f"schedule {PHASES}",
    "traffic_phases": f"traffic {PHASES}",
    "time_phases": f"time {PHASES}",
    "simulate_phases": f"simulate {PHASES}",
    "simulate_policies": f"simulate {LLAMA} --policies",
    "explain": f"explain {DENSE} --place 3,2,0",
    "simulate": f"simulate {LLAMA}",
    "simulate_10000_node_years": f"simulate {LLAMA} --days 1782",
}
"""What is asked, each kind of question in its largest form; 1,782 days of 2,048 servers are 10,000 node-years, for which the
bound is seconds. A config with phases is four plans at once."""


def cpu_s(command: Sequence[str]) -> float:
    """Processor time of one child, from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=common.ROOT, stdout=subprocess.DEVNULL, check=True, env={**os.environ, "PYTHONHASHSEED": "0"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def measure(rounds: int) -> dict[str, Any]:
    """All commands in turns; the first round warms caches of the file system and does not count."""
    ours = [sys.executable, "-P", "-m", "ftrain.cli.entry", "plan"]
    cases = {name: [*ours, *words.split(), "--json"] for name, words in COMMANDS.items()}
    cases["python"] = [sys.executable, "-P", "-c", "pass"]
    for command in cases.values():
        cpu_s(command)
    samples = common.interleaved({name: lambda _, c=command: cpu_s(c) for name, command in cases.items()}, rounds)  # type: ignore[misc]
    middle = {name: common.median(values) or 0.0 for name, values in samples.items()}
    bounded = {name: value for name, value in middle.items() if name not in ("python", "simulate_10000_node_years")}
    worst = max(bounded, key=lambda name: bounded[name])
    return {
        "worst_cpu_s": round(bounded[worst], 3),
        "worst_command": worst,
        "bound_s": BOUND_S,
        "worst_over_python": common.ratio(bounded[worst], middle["python"]),
        "node_years_10000_cpu_s": round(middle["simulate_10000_node_years"], 3),
        "commands": {name: round(value, 3) for name, value in middle.items()},
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """One JSON object on stdout."""
    asked = common.options(__doc__ or "", rounds=5).parse_args()
    print(json.dumps(measure(1 if asked.tiny else asked.rounds), indent=2))


if __name__ == "__main__":
    main()
