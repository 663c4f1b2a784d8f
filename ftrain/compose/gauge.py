"""A hardware profile of the machine at hand, measured: what `ftrain plan` needs where no vendor prints a peak.

All ranks of the machine are gauged at once, because cores share caches, memory and clock: a rate that one rank reaches alone
is not what a run gets. The peak is a large matrix product in fp32, in which a CPU computes unless told otherwise. The share of
it that a model reaches is measured on a dense decoder layer of the config's own sizes, both ways, in plain PyTorch: narrow
layers are mostly norms and overhead, and must not be planned at the speed of wide products. GPUs are not gauged: their peaks
are printed, and a profile must name their links.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any, cast

import msgspec

from ftrain.combinations import head_dim, kv_heads
from ftrain.compose.errors import RefusedError
from ftrain.config import Config
from ftrain.plan.profile import Assumed, Gpu, Profile, Server, Tier
from ftrain.schema import toml_text
from recovery.memory import room

SQUARE = 1024  # operands of 4 MiB: larger than the caches nearest to a core
COPY_BYTES = 64 << 20
LINK_BYTES = 64 << 20
GAUGE_S = 0.5  # of each figure
READY_S = 120.0


def gauge(config: Config) -> Profile:
    """Measure this machine as the run of `config` would use it: so many ranks, each with `machine.threads` threads.

    Raises RefusedError where a rank cannot be gauged, and for a run on GPUs.
    """
    if config.machine.device == "cuda":
        raise RefusedError(["a GPU's peak is printed by its vendor: name a profile in machine.hardware, or copy one that ships"
                            " (ftrain/plan/hardware) and put your GPU's figures into it"])  # fmt: skip
    ranks = config.machine.ranks_per_node or config.parallel.ranks
    found = _gauge_ranks(ranks, config)
    square, own = (median(rank[name] for rank in found) for name in ("square_flops", "own_flops"))
    peak, free = max(square, own), room()
    memory = min(free.limit_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    model, micro = config.model, config.batch.micro_batch
    sizes = f"{micro} sequences of {config.data.seq_len} tokens, width {model.hidden}, inner width {model.ffn}"
    return Profile(
        name="measured",
        title=f"{ranks} ranks of {config.machine.threads} CPU threads each, as measured",
        device="cpu",
        gpu=Gpu(
            memory_gb=_round(memory / ranks / 1e9),
            memory_gb_s=_round(median(rank["copy_bytes_s"] for rank in found) / 1e9),
            dense_bf16_tflops=_round(peak / 1e12),
            peak_dtype="float32",
        ),
        server=Server(
            gpus=ranks,
            link_name="loopback",
            link_lanes=1,
            link_gb_s_per_lane=_round(link := loopback_bytes_s() / 1e9),
            host_gb_s=_round(median(rank["copy_bytes_s"] for rank in found) / 1e9),
            nic_gbit_s=_round(8 * link),
            host_memory_gb=_round(memory / 1e9),
            cpus=len(os.sched_getaffinity(0)),
        ),
        tiers=(Tier(name="machine", gpus=1 << 20),),
        assumed=Assumed(kernel_share=_round(own / peak), link_share=1.0),
        sources={
            "gpu": f"measured, {ranks} ranks at once: fp32 product of {SQUARE} x {SQUARE}, copy of {COPY_BYTES >> 20} MiB;"
            f" memory of this machine ({free.source}), shared evenly",
            "server": "measured: one TCP stream over loopback",
            "network": "one machine: loopback again",
            "assumed": f"kernel share measured on a decoder layer, both ways: {sizes}; link share 1: the link was measured",
        },
    )


def as_toml(profile: Profile) -> str:
    """The profile as a file that `--hardware` and `machine.hardware` take."""
    plain = cast(dict[str, Any], msgspec.to_builtins(profile))
    tables = {key: plain.pop(key) for key in ("gpu", "server", "sources", "assumed")}
    tiers = plain.pop("tiers")
    lines = ["# Written by `ftrain doctor --measure`. Measured while nothing else ran? If not, measure again."]
    lines += [f"{key} = {toml_text(value)}" for key, value in plain.items() if value]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {toml_text(value)}" for key, value in table.items() if value)]
    for tier in tiers:
        lines += ["", "[[tiers]]", *(f"{key} = {toml_text(value)}" for key, value in tier.items())]
    return "\n".join(lines) + "\n"


def _round(value: float) -> float:
    """Three digits: more would pretend that the next measurement is the same."""
    return float(f"{value:.3g}")


def _gauge_ranks(ranks: int, config: Config) -> list[dict[str, float]]:
    """The figures of each rank. They import first, then begin together."""
    asked = json.dumps(
        {
            "threads": config.machine.threads,
            "micro": config.batch.micro_batch,
            "seq_len": config.data.seq_len,
            "hidden": config.model.hidden,
            "heads": config.model.heads,
            "kv": kv_heads(config) * head_dim(config),
            "queries": config.model.heads * head_dim(config),
            "ffn": config.model.ffn,
        }
    )
    argv = [sys.executable, "-P", "-m", "ftrain.compose.gauge", asked]
    children = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(ranks)]
    try:
        for child in children:
            _line(child)
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        return [json.loads(_line(child)) for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()


def _line(child: subprocess.Popen[str]) -> str:
    """The next line of a rank."""
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], READY_S)
    line = child.stdout.readline() if ready else ""
    if not line:
        raise RefusedError([f"a rank could not be gauged: {'it ended' if ready else f'no answer in {READY_S:.0f} s'}"])
    return line


def loopback_bytes_s() -> float:
    """Bytes a second of one TCP stream between two threads of this process, which let go of the interpreter while they copy."""
    data = bytes(1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()

    def send() -> None:
        for _ in range(LINK_BYTES // len(data)):
            sender.sendall(data)
        sender.close()

    thread = threading.Thread(target=send)
    begun = time.perf_counter()
    thread.start()
    scratch, got = bytearray(1 << 20), 0
    while count := receiver.recv_into(scratch):
        got += count
    elapsed = time.perf_counter() - begun
    thread.join()
    receiver.close()
    return got / elapsed


def measure_rank(*, threads: int, **sizes: int) -> dict[str, float]:
    """What one rank reaches now: FLOP/s of a large product and of a layer of the model's own sizes, bytes/s of a warm copy."""
    import torch

    torch.set_num_threads(threads)
    a, b = torch.ones(SQUARE, SQUARE), torch.ones(SQUARE, SQUARE)
    source, target = torch.ones(COPY_BYTES // 4), torch.zeros(COPY_BYTES // 4)
    flops, run = layer(**sizes)
    return {
        "square_flops": 2 * SQUARE**3 / _seconds(lambda: a @ b),
        "own_flops": flops / _seconds(run),
        "copy_bytes_s": COPY_BYTES / _seconds(lambda: target.copy_(source)),
    }


def layer(
    *, micro: int, seq_len: int, hidden: int, heads: int, queries: int, kv: int, ffn: int
) -> tuple[float, Callable[[], object]]:
    """A decoder layer's operations, counted as `ftrain.plan.cost` does, and what does them once, forward and backward."""
    import torch
    from torch.nn import functional

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.full((rows, columns), 1 / hidden, requires_grad=True)

    x = torch.ones(micro, seq_len, hidden, requires_grad=True)
    q, k, v, out = matrix(hidden, queries), matrix(hidden, kv), matrix(hidden, kv), matrix(queries, hidden)
    gate, up, down = matrix(hidden, ffn), matrix(hidden, ffn), matrix(ffn, hidden)
    width = queries // heads

    def split(values: torch.Tensor) -> torch.Tensor:
        shared: torch.Tensor = values.unflatten(-1, (-1, width))
        return shared.transpose(1, 2)

    def run() -> None:
        normed = functional.rms_norm(x, (hidden,))
        mixed = functional.scaled_dot_product_attention(
            split(normed @ q), split(normed @ k), split(normed @ v), is_causal=True, enable_gqa=kv != queries
        )
        between = x + mixed.transpose(1, 2).flatten(-2) @ out
        normed = functional.rms_norm(between, (hidden,))
        (between + (functional.silu(normed @ gate) * (normed @ up)) @ down).sum().backward()

    a_token = 6 * (hidden * (2 * queries + 2 * kv) + 3 * hidden * ffn) + 6 * queries * seq_len
    return float(a_token * micro * seq_len), run


def _seconds(work: Callable[[], object]) -> float:
    """Seconds of the median repetition; the first, which faults pages in, does not count."""
    work()
    took, until = list[float](), time.perf_counter() + GAUGE_S
    while time.perf_counter() < until or len(took) < 3:
        begun = time.perf_counter()
        work()
        took.append(time.perf_counter() - begun)
    return median(took)


def main() -> None:
    """A rank: say that torch is there, wait for the others, measure, answer in one line."""
    asked = json.loads(sys.argv[1])
    import torch  # noqa: F401  (before the others are told to begin)

    _say("ready")
    sys.stdin.readline()
    _say(json.dumps(measure_rank(**asked)))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
