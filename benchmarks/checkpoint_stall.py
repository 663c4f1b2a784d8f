"""How long a save stops training: ours against a memcpy of the same bytes and against PyTorch DCP's `async_save`, in one run.

    2 ranks x 256 MiB of state (14 bytes per parameter), a real engine under DP 2
    ours      Saver.save into arena slots, then a real keeper process stores them on the local disk
    memcpy    the same bytes, tensor by tensor, between warm private buffers, both ranks at once
    memcpy_one_call         all of them in one call, as no state lies in memory (docs/adr/0033)
    dcp_*     async_save in thread and process mode, with the defaults and with a stager that is kept
    step, overlapped        a step of training without a save, and one with the copy of the state before it beside it
    overlapped_stored       the same, and the keeper stores it beside the step, too
    dcp_*_async_stager      a step with an `async_save` before it that stages in a thread, and then stores

The cases around a step are measured in rounds of their own, more of them, because the difference of two steps is sought: it is
paired within a round, and given with the bounds between which its median lies at 90 %.

`dcp_over_ours`: the shortest stall of any of DCP's forms, with its defaults or tuned, over the shortest of ours; `blocking` and
`overlapped` say the same of the forms of one kind (docs/adr/0032).

A round's figure is the maximum over the ranks; everything stored is awaited before the next case begins. The first call of
each case is warm-up. Each of our saves is compared with the live state by digest, and the last one is committed and verified
from storage: a save that is fast and wrong ends the benchmark with an error.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import common
from benchmarks.peers.dcp import BESIDE, FORMS
from benchmarks.stall_messages import ForKeeper, FromRank, Leave, Measure, Measured, RankArgs, Up
from ftrain.checkpoint.arena import slot_name
from ftrain.checkpoint.layout import rank_slot_nbytes
from ftrain.checkpoint.messages import PackStored, Settled, decode_keeper, encode
from ftrain.compose.args import KeeperArgs
from ftrain.config import Config
from ftrain.load import parse
from recovery.launch import Spawn, spawn
from recovery.launch import python as installed
from recovery.memory import Areas
from recovery.messages import FromKeeperProcess, KeeperMemfds, Payload, ToKeeperFromWorker
from recovery.wire import Channel, channel, socket_pair
from storage.local import LocalStore
from storage.merge import merge
from storage.run import RunStore

PEERS = tuple(f"dcp_{form}" for form in FORMS)
PEERS_BESIDE = tuple(f"dcp_{form}" for form in BESIDE)
CASES = ("memcpy", "memcpy_one_call", "ours", *PEERS)
BESIDE_STEP = ("step", "overlapped", "overlapped_stored", *PEERS_BESIDE)
WARM_UP = 1_000_000  # a number that no measured round has
ROUNDS_BESIDE = 3  # for each round of the others
TIMEOUT_S = 300.0
CONFIG = """
run = {{ url = "{url}", steps = 1000000, seed = 1 }}
model = {{ layers = {layers}, hidden = {hidden}, heads = 16, kv_heads = 4, ffn = {ffn}, vocab = {vocab} }}
data = {{ sources = [{{ path = "stdlib" }}], seq_len = {seq_len} }}
batch = {{ global_batch = 2 }}
parallel = {{ ranks = {ranks} }}
optimizer = {{ lr = 1e-4 }}
schedule = {{ kind = "constant" }}
machine = {{ device = "cpu" }}
"""
FULL = {
    "layers": 3,
    "hidden": 1024,
    "ffn": 2816,
    "vocab": 2240,
    "seq_len": 64,
}  # 38.4 M parameters: 4 KiB norms to 11 MiB matrices
TINY = {"layers": 2, "hidden": 128, "ffn": 192, "vocab": 257, "seq_len": 16}


class Peer:
    """A process with a channel to it; its log is shown if it dies."""

    def __init__(self, process: subprocess.Popen[bytes], link: Channel[Any], log: Path) -> None:
        self.process, self.link, self._log = process, link, log

    def receive(self) -> Any:
        """The next message."""
        frame = self.link.receive(TIMEOUT_S)
        if frame is None:
            tail = self._log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{self._log.stem} is gone or silent for {TIMEOUT_S:.0f} s:\n{tail}")
        return frame.message


@contextmanager
def started(argv: Sequence[str], log: Path, messages: Any, *, fds: Sequence[int] = ()) -> Iterator[Peer]:
    """A child with a socket, whose descriptor is its last argument; ended with us."""
    ours, theirs = socket_pair()
    how = Spawn(
        argv=[*argv, str(theirs.fileno())], log=log, env=common.environment(), fds=(*fds, theirs.fileno()), dies_with_us=True
    )
    try:
        process = spawn(how)
    finally:
        theirs.close()
    peer = Peer(process, channel(ours, messages), log)
    try:
        yield peer
    finally:
        peer.link.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Stall:
    """Ranks, arenas, keeper and store of one measurement: in place of agent and coordinator, which only relay."""

    def __init__(self, folder: Path, config: Config, stack: ExitStack) -> None:
        self._store = LocalStore(str(folder / "run"))
        self._run = RunStore(self._store)
        self._epoch = self._run.take_epoch(owner={"benchmark": "checkpoint_stall"}, starts_from=None)
        self._last: list[PackStored] = []
        self.cpu: dict[str, list[float]] = {}
        self.blocked: dict[str, list[float]] = {}
        self.world = config.parallel.ranks
        sizes = rank_slot_nbytes(config)
        names = {rank: [slot_name(rank, index, 0) for index in range(config.checkpoint.slots)] for rank in range(self.world)}
        areas = Areas()
        stack.callback(areas.close)
        areas.prepare({name: sizes[rank] for rank, held in names.items() for name in held})
        fds = {rank: {name: areas.fd(name) for name in held} for rank, held in names.items()}
        self._keeper = stack.enter_context(_keeper(folder, config))
        self._keeper.link.send(KeeperMemfds(memfds=areas.sizes()), tuple(areas.fd(name) for name in areas.sizes()))
        self._ranks = [stack.enter_context(_rank(folder, config, rank, self._epoch, fds[rank])) for rank in range(self.world)]
        self.ups: list[Up] = [rank.receive() for rank in self._ranks]
        stack.callback(self._leave)

    def _leave(self) -> None:
        for rank in self._ranks:
            rank.link.send(Leave())
            rank.link.drain(5)

    def measure(self, case: str, number: int) -> float:
        """The case once on all ranks; the slowest one's seconds. On return nothing is being stored any more."""
        for rank in self._ranks:
            rank.link.send(Measure(case=case, number=number))
        measured = [self._measured(number, rank) for number, rank in enumerate(self._ranks)]
        self.blocked.setdefault(case, []).append(max(each.blocked_s for each in measured))
        if case == "ours" or case.startswith("overlapped"):
            self._stored([each.digests for each in measured])
        self.cpu.setdefault(case, []).append(max(each.cpu_seconds for each in measured))
        return max(each.seconds for each in measured)

    def _measured(self, number: int, rank: Peer) -> Measured:
        while isinstance(message := rank.receive(), ForKeeper):
            self._keeper.link.send(ToKeeperFromWorker(rank=number, attempt=0, payload=message.payload))
        assert isinstance(message, Measured)
        return message

    def _stored(self, live: list[dict[str, str]]) -> None:
        """Wait for the keeper, compare what it stored with what was live, and let the slots go."""
        packs: dict[int, PackStored] = {}
        while len(packs) < self.world:
            message = decode_keeper(self._keeper.receive().payload)
            if not isinstance(message, PackStored):
                raise RuntimeError(f"the keeper did not store a pack: {message}")
            packs[message.rank] = message
        for rank, expected in enumerate(live):
            found = {name: f"{value:016x}" for name, value in packs[rank].manifest.digests.items() if value}
            wrong = sorted(name for name in expected | found if expected.get(name) != found.get(name))
            if wrong:
                raise RuntimeError(f"rank {rank} stored other values than the live ones: {wrong[:5]}")
        for old in self._last:
            self._store.delete(self._run.pack_key(old.step, old.epoch, old.attempt, old.rank))
        self._last = [packs[rank] for rank in range(self.world)]
        self._keeper.link.send(Payload(payload=encode(Settled(attempt=0, step=self._last[0].step))))

    def verify(self) -> int:
        """Commit the last save and read it back: every checksum, and the digests of every array. Returns the bytes read."""
        first = self._last[0]
        manifest = merge(
            [each.manifest for each in self._last],
            step=first.step,
            epoch=first.epoch,
            attempt=first.attempt,
            progress=first.progress,
            created_s=time.time(),
        )
        self._run.commit(manifest)
        report = self._run.open(first.step).verify()
        if not report.ok or not report.complete:
            raise RuntimeError(f"what was stored does not verify: {report.problems[:5]}")
        return report.read_bytes


@contextmanager
def _keeper(folder: Path, config: Config) -> Iterator[Peer]:
    args = KeeperArgs(url=str(folder / "run"), local_dir=str(folder), upload_mib_s=config.checkpoint.upload_mib_s, faults=[])
    path = folder / "keeper.json"
    path.write_bytes(msgspec.json.encode(args))
    with started(installed("ftrain.compose.keeper", str(path)), folder / "keeper.log", FromKeeperProcess) as peer:
        yield peer


@contextmanager
def _rank(folder: Path, config: Config, rank: int, epoch: int, slots: dict[str, int]) -> Iterator[Peer]:
    args = RankArgs(
        rank=rank,
        world=config.parallel.ranks,
        epoch=epoch,
        config=msgspec.to_builtins(config),
        rendezvous=str(folder / "rendezvous"),
        folder=str(folder / "dcp"),
        slots=slots,
    )
    path = folder / f"rank{rank}.json"
    path.write_bytes(msgspec.json.encode(args))
    argv = common.python("benchmarks.stall_rank", str(path))
    with started(argv, folder / f"rank{rank}.log", FromRank, fds=tuple(slots.values())) as peer:
        yield peer


def run(folder: Path, *, rounds: int, tiny: bool) -> dict[str, Any]:
    """The whole benchmark; the result as it is printed."""
    machine = common.Machine()
    config = parse(CONFIG.format(url=folder / "run", ranks=2, **(TINY if tiny else FULL)))
    with ExitStack() as stack:
        stall = Stall(folder, config, stack)
        cases: dict[str, Callable[[int], float]] = {case: partial(stall.measure, case) for case in (*CASES, *BESIDE_STEP)}
        for name, case in cases.items():  # warm-up: first calls allocate, start processes, make views (ours: of each slot)
            for number in range(config.checkpoint.slots if name in ("ours", "overlapped") else 1):
                case(WARM_UP + number)
        beside = rounds if tiny else ROUNDS_BESIDE * rounds
        stall.cpu.clear()
        stall.blocked.clear()
        seconds = common.interleaved({case: cases[case] for case in CASES}, rounds)
        seconds |= common.interleaved({case: cases[case] for case in BESIDE_STEP}, beside)
        verified = stall.verify()
    medians = {case: common.median(values) or 0.0 for case, values in seconds.items()}
    cpu = {case: common.median(values) or 0.0 for case, values in stall.cpu.items()}
    best = min(PEERS, key=medians.__getitem__)
    defaults = min(medians["dcp_thread"], medians["dcp_process"])
    waits = {case: common.median(stall.blocked[case]) or 0.0 for case in BESIDE_STEP if case != "step"}
    stalls = {case: medians[case] for case in PEERS} | {case: waits[case] for case in PEERS_BESIDE}
    return {
        "blocked_over_memcpy": common.ratio(medians["ours"], medians["memcpy"]),
        "blocked_over_memcpy_one_call": common.ratio(medians["ours"], medians["memcpy_one_call"]),
        "dcp_over_ours": common.ratio(min(stalls.values()), min(medians["ours"], waits["overlapped_stored"])),
        "dcp_best": min(stalls, key=stalls.__getitem__),
        "blocking": {
            "dcp_over_ours": common.ratio(medians[best], medians["ours"]),
            "dcp_best": best,
            "dcp_defaults_over_ours": common.ratio(defaults, medians["ours"]),
        },
        "overlapped": _overlapped(seconds, waits, stall.blocked),
        "cpu_blocked_over_memcpy": common.ratio(cpu["ours"], cpu["memcpy"]),
        "mib_per_rank": round(max(up.logical_nbytes for up in stall.ups) / 2**20, 1),
        "parameters": sum(up.parameters for up in stall.ups),
        "verified_bytes": verified,
        "cases": {case: {**common.summary(seconds[case]), "median_cpu_s": round(cpu[case], 4)} for case in seconds},
        "machine": machine.record(),
    }


def _overlapped(
    seconds: Mapping[str, Sequence[float]], waits: Mapping[str, float], blocked: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """The copy beside the next step: what the step waits for, and how much longer it takes, against a memcpy of the bytes.

    `waits` are the medians of `blocked`. What a save adds to a step is the median over the rounds of a step with it less one
    without, in the same round.
    """
    memcpy = common.median(seconds["memcpy"])
    best = min(PEERS_BESIDE, key=waits.__getitem__)
    added: dict[str, dict[str, float | None]] = {}
    for case in waits:
        pairs = zip(seconds[case], seconds["step"], strict=True)
        middle, low, high = common.median_within([with_save - without for with_save, without in pairs])
        over = {"over_memcpy": middle, "low_over_memcpy": low, "high_over_memcpy": high}
        added[case] = {"median_s": round(middle, 4), **{name: common.ratio(value, memcpy) for name, value in over.items()}}
    return {
        "blocked_over_memcpy": common.ratio(waits["overlapped"], memcpy),
        "step_inflation_over_memcpy": added["overlapped"]["over_memcpy"],
        "dcp_over_ours": common.ratio(waits[best], waits["overlapped_stored"]),
        "dcp_best": best,
        "blocked": {case: common.summary(blocked[case]) for case in waits},
        "inflation": added,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    args = common.options(__doc__.splitlines()[0], rounds=7).parse_args(argv)
    with common.scratch(args.dir) as folder:
        result = run(folder, rounds=1 if args.tiny else args.rounds, tiny=args.tiny)
    rows = [
        (case, f"{1000 * record['median_s']:.1f} ms, cpu {1000 * record['median_cpu_s']:.1f} ms")
        for case, record in result["cases"].items()
    ]
    figures = ("blocked_over_memcpy", "blocked_over_memcpy_one_call", "cpu_blocked_over_memcpy", "dcp_over_ours", "dcp_best")
    rows += [(f"blocking: {name}", value) for name, value in result["blocking"].items()]
    rows += [(f"overlapped: {name}", value) for name, value in result["overlapped"].items() if name != "blocked"]
    common.emit(result, quiet=args.json, rows=[*rows, *((name, result[name]) for name in figures)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
