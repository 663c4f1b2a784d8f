"""Which checks a run's config calls for, and those that need storage or torch.

The cheap ones (one child, a fraction of a second) come before each start; `ftrain doctor` asks all of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

import msgspec

from ftrain.compose.errors import UnfitError
from ftrain.compose.nodes import arena_nbytes, check_port, fleet_spec
from ftrain.compose.paths import local_dir
from ftrain.config import Config, Storage
from ftrain.phases import most_ranks
from ftrain.schemes import is_local
from recovery import logs
from recovery.notice import read_time
from recovery.ports import can_bind
from recovery.preflight import Check, Concern, Result, examine
from recovery.timeouts import Timeouts, explain

HOST = "127.0.0.1"
LOCAL_BYTES = 64 << 20  # logs and the ledger's open segment
FILES_PER_RANK, FILES = 16, 128
SKEW_S = 5.0
GPUS = "GPUs"
NO_GPU = (
    "machine.device = 'cuda', and torch finds no GPU on this machine (CUDA_VISIBLE_DEVICES may hide them): start the run on a "
    "machine that has one, or set machine.device = 'cpu' or 'auto'"
)
DATA = "data"  # the check that finds fault with the config, not with the machine


def cheap(config: Config) -> list[Check]:
    """What is asked before each start."""
    ranks = min(most_ranks(config), config.machine.ranks_per_node or most_ranks(config))  # on this machine
    return [
        Check(
            name="disk",
            entry="recovery.probes:disk",
            args={"path": str(local_dir(config)), "need_bytes": LOCAL_BYTES},
            remedy="free space, or set run.local_dir",
        ),
        Check(name="shared memory", entry="recovery.probes:shared_memory", remedy="start the container with more --shm-size"),
        Check(name="port", entry="recovery.probes:port", args={"host": HOST}),
        Check(
            name="interface",
            entry="recovery.probes:interface",
            args={"name": config.machine.interface},
            remedy="set machine.interface",
        ),
        Check(
            name="descriptors",
            entry="recovery.probes:descriptors",
            args={"need": FILES + FILES_PER_RANK * ranks},
            remedy="raise `ulimit -n`",
        ),
        Check(name="memory areas", entry="recovery.probes:anonymous_memory"),
        *([_notice(config.recovery.notice)] if is_local(config.recovery.notice) and config.recovery.notice else []),
        *([_compiler()] if config.machine.compile else []),
        *([_gpus(ranks)] if config.machine.device == "cuda" and not config.machine.ranks_per_node else []),
    ]


def _notice(where: str) -> Check:
    return Check(name="notice", entry="recovery.notice:probe", args={"where": where})


def _compiler() -> Check:
    return Check(
        name="C++ compiler",
        entry="recovery.probes:program",
        args={"names": [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]},
        remedy="install g++, name a compiler in CXX, or set machine.compile = false",
    )


def _gpus(ranks: int) -> Check:
    """Only where this machine is the one that trains: of several nodes it may be the one without a GPU."""
    return Check(name=GPUS, entry="ftrain.compose.checks:gpus", args={"ranks": ranks}, limit_s=60.0)


def thorough(config: Config) -> list[Check]:
    """Everything, from quick to slow. Where the answer, which knows the reason, names its own remedy, none stands here."""
    need = arena_nbytes(config)
    url = {"url": config.run.url, "storage": msgspec.to_builtins(config.storage)}
    return [
        *(check for check in cheap(config) if check.name != GPUS),  # "device" asks more of them
        Check(name=DATA, entry="ftrain.compose.corpora:probe", args={"config": msgspec.to_builtins(config)}, limit_s=60.0),
        Check(name="memory", entry="recovery.probes:memory", args={"need_bytes": need}),
        Check(name="storage", entry="ftrain.compose.checks:store", args=url, limit_s=60.0),
        Check(name="clock", entry="ftrain.compose.checks:clock", args=url, limit_s=60.0),
        *([_mirror(config)] if config.checkpoint.mirror_url else []),
        *_ports(config),
        *([] if is_local(config.recovery.notice) else [_notice(config.recovery.notice)]),  # a server may not answer
        Check(name="collective", entry="ftrain.compose.checks:collective", limit_s=60.0, remedy="see machine.interface"),
        Check(name="device", entry="ftrain.compose.checks:device", args={"name": config.machine.device}, limit_s=60.0),
    ]


def _mirror(config: Config) -> Check:
    args = {"config": msgspec.to_builtins(config)}
    return Check(name="mirror", entry="ftrain.compose.mirrors:probe", args=args, limit_s=60.0)


def _ports(config: Config) -> list[Check]:
    """Those that the config names. Whoever holds one may be this run itself, if it is live."""
    metrics = {"port": config.recovery.metrics_port}
    nodes = {"config": msgspec.to_builtins(config)}
    return [
        *([Check(name="metrics port", entry="ftrain.compose.checks:metrics_port", args=metrics)] if metrics["port"] else []),
        *(
            [Check(name="nodes' port", entry="ftrain.compose.checks:nodes_port", args=nodes)]
            if config.machine.port and config.machine.ranks_per_node
            else []
        ),
    ]


def metrics_port(port: int) -> str:
    """The metrics can be served; a run goes on without."""
    if not can_bind(HOST, port):
        raise Concern(f"port {port} of {HOST} is in use: without another recovery.metrics_port no metrics are served")
    return f"port {port} of {HOST} is free"


def nodes_port(config: dict[str, Any]) -> str:
    """The coordinator can wait for its nodes; a run does not start without."""
    wanted = msgspec.convert(config, Config)
    check_port(fleet_spec(wanted, local_dir(wanted)), "machine.port")
    return f"port {wanted.machine.port} is free"


def results(config: Config, *, everything: bool, env: Mapping[str, str] = os.environ) -> list[Result]:
    """The answers of this machine. Time limits in the wrong order are a warning: the run works until something hangs."""
    wrong = explain(timeouts(config, env, time.time()))
    order = Result(name="time limits", status="warning" if wrong else "ok", text=wrong or "in the right order")
    return [*examine(thorough(config) if everything else cheap(config)), order]


def before_start(config: Config) -> list[str]:
    """Ask the cheap questions; warnings in words. Raises UnfitError with all that speaks against a start here."""
    found = results(config, everything=False)
    bad = [result.line() for result in found if result.bad]
    if bad:
        raise UnfitError(["this machine is not fit for the run (`ftrain doctor` asks more):", *bad])
    unread = logs.misread(os.environ)
    return [*(result.line() for result in found if result.status == "warning"), *([unread] if unread else [])]


def timeouts(config: Config, env: Mapping[str, str], now_t: float) -> Timeouts:
    """The limits of all layers as this config and this job have them."""
    recovery = config.recovery
    ends_t = read_time(env.get("SLURM_JOB_END_TIME", ""))
    return Timeouts(
        collective_s=recovery.collective_s,
        hang_s=recovery.hang_s,
        start_s=recovery.start_s,
        stop_s=recovery.stop_s,
        lease_s=recovery.lease_s,
        scheduler_s=ends_t - now_t if ends_t is not None else None,
    )


def store(url: str, storage: dict[str, Any] | None = None) -> str:
    """The run's store can be read, written, listed, and keeps create-if-absent."""
    from ftrain.compose.stores import open_configured
    from storage.objects import check_store

    opened = open_configured(msgspec.convert(storage or {}, Storage), url)
    try:
        atomic = check_store(opened)
    finally:
        opened.close()
    if not atomic:
        raise Concern(f"{url}: create-if-absent has more than one winner there: do not start two coordinators at once")
    return f"{url}: written, read back, created once, deleted"


def clock(url: str, storage: dict[str, Any] | None = None) -> str:
    """This machine's clock against that of the store, from the time it gives to a new object."""
    from ftrain.compose.stores import open_configured

    opened = open_configured(msgspec.convert(storage or {}, Storage), url).quick()
    key = f"probe-clock-{os.getpid()}-{time.monotonic_ns()}"
    try:
        before = time.time()
        opened.put(key, b"clock")
        after = time.time()
        stamped = next(info.modified_s for info in opened.list(key))
        opened.delete(key)
    finally:
        opened.close()
    skew_s = max(before - stamped, stamped - after, 0.0)
    if skew_s > SKEW_S:
        off = f"the clock is {skew_s:.1f} s off that of {url}: retention and reports will be off as well"
        raise Concern(f"{off}; synchronise it (NTP)")
    return f"within {skew_s:.1f} s of {url}"


def collective() -> str:
    """Two ranks of this machine sum a vector. Both in one process: it is the network and the library that are asked."""
    import torch

    dist: Any = import_module("torch.distributed")  # its stubs do not list what is used here
    server = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    sums: dict[int, float] = {}

    def rank(number: int) -> None:
        client = dist.PrefixStore("probe", dist.TCPStore(HOST, server.port, is_master=False))
        group = dist.ProcessGroupGloo(client, number, 2, timedelta(seconds=20))
        vector = torch.full((1024,), float(number + 1))
        group.allreduce([vector]).wait()
        sums[number] = float(vector.sum())

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if sums != {0: 3072.0, 1: 3072.0}:
        raise RuntimeError(f"two ranks summed to {sums}, 3072 is right")
    return "two ranks sum alike over Gloo"


def gpus(ranks: int) -> str:
    """There is a GPU for each rank: a worker without one dies, and so does its successor. Asked of torch, as a worker does."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError(NO_GPU)
    if count < ranks:
        raise Concern(f"{count} GPUs for {ranks} ranks: those without one of their own will not start")
    return f"{count} GPUs for {ranks} ranks"


def device(name: str) -> str:
    """The accelerators compute: integers are exact in fp32 whatever the order of the sum, so the answer is known."""
    import torch

    count = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and count == 0):
        return "the CPU computes"
    if count == 0:
        raise RuntimeError(NO_GPU)
    for number in range(count):
        matrix = (torch.arange(512 * 512, dtype=torch.int64).reshape(512, 512) % 13).float()
        found = (matrix.to(f"cuda:{number}") @ matrix.to(f"cuda:{number}")).cpu()
        if not torch.equal(found, matrix @ matrix):
            raise RuntimeError(f"cuda:{number} multiplies wrongly")
    return f"{count} GPUs multiply rightly"
