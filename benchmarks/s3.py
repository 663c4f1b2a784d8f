"""Saving to and loading from S3: the client's processor time, wall and memory, ours with either library against PyTorch DCP.

    1 GiB of fp32 matrices, one client process at a time, SeaweedFS on loopback
    obstore, s3fs   ours: seal, stream, commit; open, read, check; through the extra `fast`, and without it
    dcp             `torch.distributed.checkpoint` with its fsspec writer and reader (s3fs)

The server spends 12 to 15 CPU seconds on each GiB it takes, and bounds the wall: the client's own CPU seconds say more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import common
from benchmarks.reshard_cases import arrays
from storage.objects import open_store
from tests.seaweed import BUCKET, SeaweedServer

CASES = ("obstore", "s3fs", "dcp")
OURS = ("obstore", "s3fs")


class Clients:
    """Runs one client after the other against one server."""

    def __init__(self, server: SeaweedServer, *, tiny: bool) -> None:
        self._server, self._size = server, "tiny" if tiny else "full"
        self.found: dict[str, list[dict[str, dict[str, float]]]] = {case: [] for case in CASES}

    def measure(self, case: str, number: int) -> float:
        """A save and a load; the sum of their wall seconds. What was stored is removed afterwards."""
        url = f"s3://{BUCKET}/{case}-{number}-{uuid.uuid4().hex[:8]}"
        env = {**os.environ, **common.environment(), **self._server.environment()}
        words = common.python("benchmarks.s3_client", case, url, self._size)
        done = subprocess.run(words, stdout=subprocess.PIPE, check=True, cwd=common.ROOT, env=env)
        answer: dict[str, dict[str, float]] = msgspec.json.decode(done.stdout)
        self.found[case].append(answer)
        store = open_store(url, options=self._server.options)
        for info in list(store.list()):
            store.delete(info.key)
        store.close()
        return answer["save"]["wall_s"] + answer["load"]["wall_s"]

    def median(self, case: str, what: str, op: str | None = None) -> float:
        """Of all rounds: a cost of one operation, or of both together."""
        ops = (op,) if op else ("save", "load")
        return common.median(sum(answer[each][what] for each in ops) for answer in self.found[case]) or 0.0


def run(folder: Path, *, rounds: int, tiny: bool) -> dict[str, Any]:
    """The whole benchmark."""
    machine = common.Machine()
    server = SeaweedServer(folder / "seaweed")
    server.start()
    try:
        clients = Clients(server, tiny=tiny)
        cases: dict[str, Callable[[int], float]] = {case: partial(clients.measure, case) for case in CASES}
        if not tiny:
            cases[CASES[0]](-1)  # the server's first volumes
            clients.found[CASES[0]].clear()
        common.interleaved(cases, rounds)
    finally:
        server.stop()
    return _result(clients, sum(array.spec().nbytes for array in arrays(tiny=tiny)), machine)


def _result(clients: Clients, state: int, machine: common.Machine) -> dict[str, Any]:
    gib = state / 2**30
    details = {
        case: {
            op: {
                "median_wall_s": round(clients.median(case, "wall_s", op), 3),
                "cpu_s_per_gib": round(clients.median(case, "cpu_s", op) / gib, 3),
                "peak_memory_over_state": round(max(answer[op]["peak"] for answer in clients.found[case]) / state, 4),
            }
            for op in ("save", "load")
        }
        for case in CASES
    }

    def against(what: str) -> dict[str, float | None]:
        return {case: common.ratio(clients.median("dcp", what), clients.median(case, what)) for case in OURS}

    wall = against("wall_s")
    return {
        "dcp_client_cpu_over_ours": against("cpu_s"),
        "dcp_wall_over_ours": wall["obstore"],
        "dcp_wall_over_ours_s3fs": wall["s3fs"],
        "peak_memory_over_state": max(details[case][op]["peak_memory_over_state"] for case in OURS for op in ("save", "load")),
        "dcp_peak_memory_over_state": max(details["dcp"][op]["peak_memory_over_state"] for op in ("save", "load")),
        "state_gib": round(gib, 4),
        "cases": details,
        "machine": machine.record(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    args = common.options(__doc__.splitlines()[0], rounds=3).parse_args(argv)
    with common.scratch(args.dir) as folder:
        result = run(folder, rounds=1 if args.tiny else args.rounds, tiny=args.tiny)
    rows = [(f"{case}: {op}", facts) for case, ops in result["cases"].items() for op, facts in ops.items()]
    keys = ("dcp_client_cpu_over_ours", "dcp_wall_over_ours", "peak_memory_over_state")
    common.emit(result, quiet=args.json, rows=[*rows, *((key, result[key]) for key in keys)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
