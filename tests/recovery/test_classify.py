"""The classifier against the open cases, against itself without what it knows from each case, and rule by rule.

The scores are printed (`pytest -s`). Cases: `cases/README.md`. A signature names its sources; one that is known from a single
public report only is taken away when that report is scored ("leave one source out"): what is left over is what the rules know
of software in general.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recovery.classify import classify, explain
from recovery.events import Verdict
from recovery.evidence import NO_COUNTER, Evidence
from recovery.injected import announcement
from recovery.literals import compiled, required_literals
from recovery.templates import Table, TableError, default_table, load_table
from tests.recovery.verdicts import STEPS, verdict

CASES = Path(__file__).parent / "cases" / "interruptions.jsonl"


@cache
def cases() -> list[tuple[dict[str, Any], Evidence]]:
    lines = CASES.read_bytes().splitlines()
    return [(json.loads(line), msgspec.json.decode(line, type=Evidence)) for line in lines]


class Score:
    """How many verdicts are right, and which are not."""

    def __init__(self, table: Table | None = None, *, leave_out: bool = False):
        self.confusion: Counter[tuple[str, str]] = Counter()
        self.count = self.strict = self.accepted = self.action = self.action_accepted = self.ranked = self.rank = 0
        self.wrongly: Counter[str] = Counter()
        self.misses: list[str] = []
        for case, evidence in cases():
            own = default_table().without_source(case["source"]) if leave_out else table
            self._add(case, classify(evidence, own))

    def _add(self, case: dict[str, Any], verdict: Verdict) -> None:
        label, accept = case["label"], case["accept"]
        class_right = verdict.class_ == label["class"]
        class_accepted = class_right or verdict.class_ in accept["class"]
        action_right = verdict.action == label["action"]
        action_accepted = action_right or verdict.action in accept["action"]
        self.count += 1
        self.strict += class_right
        self.accepted += class_accepted
        self.action += action_right
        self.action_accepted += action_accepted
        self.confusion[label["class"], verdict.class_] += 1
        if not action_accepted:
            self.wrongly[verdict.action] += 1
        if label["first_failing_rank"] is not None:
            self.ranked += 1
            self.rank += verdict.first_failing_rank == label["first_failing_rank"]
        if not (class_accepted and action_accepted):
            self.misses.append(f"{case['id']}: {label['class']}/{label['action']}, got {verdict.class_}/{verdict.action}")

    def lines(self) -> list[str]:
        """For a person."""
        n = self.count
        head = f"{n} cases: class {self.strict / n:.1%} strict, {self.accepted / n:.1%} accepted; "
        head += f"action {self.action / n:.1%} strict, {self.action_accepted / n:.1%} accepted; "
        head += f"first failing rank {self.rank} of {self.ranked}"
        off = [f"  {want} taken for {got}: {k}" for (want, got), k in sorted(self.confusion.items()) if want != got]
        return [head, *off, *(f"  wrong: {miss}" for miss in self.misses)]


def test_open_cases() -> None:
    score = Score()
    print(*score.lines(), sep="\n")  # noqa: T201  the score is wanted in the test's output
    assert score.count == 105
    assert score.accepted / score.count >= 0.95
    assert score.rank / score.ranked >= 0.90
    assert score.action_accepted / score.count >= 0.90
    assert score.wrongly["stop_for_human"] <= 2
    assert score.wrongly["restart_exclude_node"] <= 2


def test_open_cases_without_what_is_known_from_each_only() -> None:
    score = Score(leave_out=True)
    print("without the signatures known from the same report only:", *score.lines(), sep="\n")  # noqa: T201
    assert score.accepted / score.count >= 0.93
    assert score.action_accepted / score.count >= 0.90
    assert score.rank / score.ranked >= 0.90


def test_confusion_matrix_adds_up() -> None:
    score = Score()
    assert sum(score.confusion.values()) == score.count
    assert sum(k for (want, got), k in score.confusion.items() if want == got) == score.strict


def test_every_class_of_the_vocabulary_is_known() -> None:
    readme = (CASES.parent / "README.md").read_text()
    names = readme.split("Classes: ")[1].split(".")[0].replace("\n", " ").split(", ")
    assert set(default_table().classes) == {name.strip() for name in names}


def test_the_table_is_sound() -> None:
    table = default_table().check()
    assert all(signature.sources for signature in table.signature)
    by_case = {source for case, _ in cases() for source in [case["source"]]}
    from_one_case = [s.name for s in table.signature if len(s.sources) == 1 and s.sources[0] in by_case]
    assert len(from_one_case) <= len(table.signature) / 10


def test_no_signature_quotes_a_case() -> None:
    """Names that were made up for the cases (hosts, paths, addresses, ids) must not be known to the table."""
    text = "\n".join(pattern for signature in default_table().signature for pattern in signature.patterns)
    for case, _ in cases():
        for word in ("lf800", "wtrain", "nvs04", "ndv4", "marie-gpu", "gke-pool", "docker00", case["id"], case["source"]):
            assert word not in text


def test_nothing_known_is_unknown() -> None:
    found = verdict()
    assert (found.class_, found.action) == ("unknown", "restart")
    assert verdict(exit={"0": -9}).class_ == "unknown"
    assert verdict(exit={"0": 1}).class_ == "unknown"


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        ({"exit": {"0": 1, "1": -9}}, "rank 1 was killed by SIGKILL, sent by nobody known: no out-of-memory kill on record"),
        (
            {"exit": {"0": 1, "1": -9}, "order": ["1", "0"]},  # as a supervisor writes it down
            "rank 1 was killed by SIGKILL, sent by nobody known: not by this supervisor, "
            "no out-of-memory kill counted by its memory cgroup, none in the kernel log",
        ),
        (
            {"exit": {"0": 1, "1": -9}, "order": ["1"], "notes": [f"n1: {NO_COUNTER}"]},
            "rank 1 was killed by SIGKILL, sent by nobody known: not by this supervisor, "
            "no memory cgroup counts out-of-memory kills here, none in the kernel log",
        ),
        (
            {"exit": {"0": 1, "1": -9}, "order": ["1"], "notes": ["kernel log: no answer within 0.8 s"]},
            "rank 1 was killed by SIGKILL, sent by nobody known: not by this supervisor, "
            "whether by the kernel for want of memory could not be asked",
        ),
        (
            {"exit": {"0": 1, "1": -9}, "order": ["1"], "notes": ["kernel log: not readable: Operation not permitted"]},
            "rank 1 was killed by SIGKILL, sent by nobody known: not by this supervisor, "
            "no out-of-memory kill counted by its memory cgroup, the kernel log could not be read",
        ),
        (
            {"exit": {"0": 1, "1": 137}},
            "rank 1 ended with exit code 137 (128 + SIGKILL), sent by nobody known: no out-of-memory kill on record",
        ),
        (
            {"exit": {"0": None, "1": -15}, "order": ["1"]},
            "nothing says what happened; rank 1 was killed by SIGTERM, sent by nobody known: not by this supervisor",
        ),
        ({"exit": {"0": -15, "1": 0}, "ours": ["0"], "order": ["0"]}, "nothing says what happened"),
        ({"exit": {"0": 1}}, "rank 0 ended with exit code 1"),
        ({"exit": {"0": 0, "1": -11}}, "rank 1 was killed by SIGSEGV (Segmentation fault)"),
    ],
)
def test_a_bare_status_in_words_and_who_did_not_send_the_signal(evidence: dict[str, Any], reason: str) -> None:
    assert verdict(**evidence).reason == reason


def test_an_out_of_memory_kill_on_record_is_not_denied() -> None:
    kill = "Out of memory: Killed process 4 (python) total-vm:1kB"
    found = verdict(exit={"0": 1, "1": -9}, order=["1"], kernel=[kill])
    assert (found.class_, "out-of-memory kill" in found.reason) == ("host_oom", False)


def test_another_ranks_injected_fault_explains_nothing() -> None:
    found = verdict(exit={"0": -9, "1": 1}, order=["0", "1"], log=[f"[rank1]: {announcement(0, 'slow', 'step', 3)}"])
    assert found.first_failing_rank == 0
    assert "sent by nobody known" in found.reason
    assert "injected" not in "".join(line.text for line in found.evidence)


CLOSED = "[rank0]: RuntimeError: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"


@pytest.mark.parametrize(
    ("status", "class_"),
    [(-9, "unknown"), (-11, "process_crash"), (-6, "process_crash"), (-7, "host_oom"), (-8, "process_crash")],
)
def test_a_rank_that_died_comes_before_what_its_peers_say(status: int, class_: str) -> None:
    found = verdict(exit={"0": 1, "1": status}, log=[CLOSED])
    assert (found.class_, found.first_failing_rank) == (class_, 1)


TIMED_OUT = CLOSED.partition("[/gloo")[0] + "Timed out waiting 9000ms for recv operation to complete"


@pytest.mark.parametrize("said", [CLOSED, TIMED_OUT])
def test_a_rank_that_left_first_without_a_word_comes_before_what_its_peers_say_then(said: str) -> None:
    ends = {"exit": {"0": 1, "1": 1}, "log": [said]}
    found = verdict(**ends, order=["1", "0"])
    assert (found.class_, found.first_failing_rank, found.signature) == ("unknown", 1, "exit.first_to_leave")
    assert verdict(**ends, order=["0", "1"]).class_ != "unknown", "the one that complained went first"
    assert verdict(**ends).class_ != "unknown", "nobody knows who went first"
    own = "[rank1]: FileNotFoundError: [Errno 2] No such file or directory: 'x'"
    assert verdict(exit=ends["exit"], log=[own, said], order=["1", "0"]).signature != "exit.first_to_leave"


def test_what_we_killed_is_no_evidence() -> None:
    found = verdict(exit={"0": -9, "1": -11, "2": -9}, ours=["0", "2"], order=["1", "0", "2"], log=[CLOSED])
    assert (found.class_, found.first_failing_rank) == ("process_crash", 1)


def test_a_cause_beats_a_time_out_that_was_printed_first() -> None:
    log = [
        "[rank0]:[E ProcessGroupNCCL.cpp:563] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ]
    found = verdict(exit={"0": -6, "1": 1}, log=log)
    assert (found.class_, found.first_failing_rank) == ("cuda_oom", 1)


def test_the_silent_rank_is_the_suspect_of_a_hang() -> None:
    line = "[rank{0}]:[E] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE)"
    found = verdict(exit=dict.fromkeys("0123", -6), log=[line.format(rank) for rank in (0, 1, 3)])
    assert (found.class_, found.first_failing_rank) == ("collective_timeout", 2)


def test_the_rank_that_is_behind_is_the_suspect_of_a_hang() -> None:
    line = "[rank{0}]:[E] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1}, OpType=ALLREDUCE)"
    log = [line.format(rank, seq) for rank, seq in ((0, 9), (1, 9), (2, 7), (3, 9))]
    assert verdict(exit=dict.fromkeys("0123", -6), log=log).first_failing_rank == 2


@pytest.mark.parametrize(
    "line",
    [
        "sample 7: 'No space left on device, said the captain' -> target len 9",
        "INFO: CUDA out of memory detected. Train microbatch size will be decreased from 32 -> 16.",
        "WARNING:s3fs:SlowDown, retrying (attempt 1 of 5) in 1.6s",
        "on_out_of_memory: halve",
        "export CUDA_ERROR_OUT_OF_MEMORY=1",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        '    raise RuntimeError("CUDA out of memory. Tried to allocate")',
        "<|user|> why do I see Segmentation fault (core dumped)?",
    ],
)
def test_text_that_is_no_event_decides_nothing(line: str) -> None:
    shown = ['  File "/srv/job/train.py", line 3, in step', line] if line.startswith("    ") else [line]
    found = verdict(exit={"0": -9}, log=[*shown, *STEPS])
    assert (found.class_, found.confidence < 0.5) == ("unknown", True), found


def test_what_training_survived_did_not_end_it() -> None:
    oom = "[rank0]: RuntimeError: CUDA error: out of memory"
    assert verdict(exit={"0": 1}, log=[*STEPS, oom]).class_ == "cuda_oom"
    assert verdict(exit={"0": 1}, log=[oom, *STEPS]).class_ == "unknown"


@pytest.mark.parametrize(
    "log",
    [
        pytest.param(["[rank3]: KeyError: 'x'"], id="torchrun"),
        pytest.param(["[default3]:[rank3]: KeyError: 'x'"], id="tee"),
        pytest.param(["3: KeyError: 'x'"], id="srun-label"),
        pytest.param(["2021-02-16T01:05:43.434Z: [1,3]<stderr>:KeyError: 'x'"], id="mpirun-tag"),
        pytest.param(["[pod/train-worker-3/pytorch] KeyError: 'x'"], id="kubectl-prefix"),
        pytest.param(["trainer-3  | KeyError: 'x'"], id="compose"),
        pytest.param(["(worker3, rank=3, pid=881, ip=10.0.0.2) KeyError: 'x'"], id="skypilot"),
        pytest.param(["[rank: 3] KeyError: 'x'"], id="lightning"),
        pytest.param(
            ["----------Begin global rank 3 STDERR----------", "KeyError: 'x'", "----------End global rank 3 STDERR"],
            id="block",
        ),
        pytest.param(["==> logs/rank_3.log <==", "KeyError: 'x'"], id="tail"),
    ],
)
def test_who_speaks(log: list[str]) -> None:
    found = verdict(exit=dict.fromkeys("01234", 1), log=log)
    assert (found.class_, found.first_failing_rank) == ("software_error", 3)


def test_a_rank_that_is_accused_by_a_barrier_is_the_suspect() -> None:
    said = "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 3."
    assert verdict(exit=dict.fromkeys("0123", 1), log=[f"[rank1]: RuntimeError: {said}"]).first_failing_rank == 3


def test_xid_63_alone_means_nothing() -> None:
    remapped = (
        "NVRM: Xid (PCI:0000:9a:00): 63, pid=1, Row Remapper: New row (0x4a) marked for remapping, reset gpu to activate."
    )
    contained = "NVRM: Xid (PCI:0000:9a:00): 94, pid=1, name=python, Contained: CE User Channel (0x9)"
    log = ["[rank0]: KeyError: 'x'"]
    assert verdict(exit={"0": 1}, log=log, kernel=[remapped]).class_ == "software_error"
    assert verdict(exit={"0": 1}, log=log, kernel=[contained]).action == "restart"
    assert verdict(exit={"0": 1}, log=log, kernel=[contained, remapped]).action == "restart_exclude_node"


def test_the_same_crash_stops_at_the_start_and_is_tried_again_later() -> None:
    assert verdict(exit={"0": -11}, steps=0).action == "stop_for_human"
    assert verdict(exit={"0": -11}, steps=3).action == "restart"


def test_an_explanation_names_what_it_discarded() -> None:
    case = msgspec.convert({"exit": {"0": 1}, "log": ["sample 1: 'out of memory'", "[rank0]: MemoryError"]}, Evidence)
    found = explain(case)
    assert found.considered[0].signature == found.verdict.signature == "oom.alloc"
    hint = msgspec.convert({"exit": {"0": 1}, "log": ["For debugging consider passing the cudaErrorAssert flag"]}, Evidence)
    assert {gone.why for gone in explain(hint).discarded} == {"advice, not an event"}


def test_a_site_may_replace_add_and_disable(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text(
        'disable = ["oom.alloc"]\n'
        "[classes.cuda_oom]\n"
        'component = "gpu_memory"\naction = "restart"\n'
        "[[signature]]\n"
        'name = "ours.scheduler"\nclass = "preemption"\nweight = 99\n'
        "patterns = ['OURSCHED-17']\nsources = ['our scheduler']\n"
    )
    table = load_table(site)
    assert classify(Evidence(log=("OURSCHED-17 took this job away",)), table).class_ == "preemption"
    assert classify(Evidence(log=("MemoryError",)), table).class_ == "software_error"
    assert classify(Evidence(log=("CUDA out of memory. Tried to allocate 1 GiB",)), table).action == "restart"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[signature]", "not TOML"),
        ("[[signature]]\nname='a'\nclass='nonsense'\nweight=1\npatterns=['x']\nsources=['y']\n", "nonsense"),
        ("[[signature]]\nname='a'\nclass='unknown'\nweight=1\npatterns=['(']\nsources=['y']\n", "regular expression"),
        ("[[signature]]\nname='a'\nclass='unknown'\nwieght=1\npatterns=['x']\nsources=['y']\n", "wieght"),
    ],
)
def test_a_bad_table_is_refused_with_the_reason(tmp_path: Path, text: str, says: str) -> None:
    site = tmp_path / "site.toml"
    site.write_text(text)
    with pytest.raises(TableError, match=says):
        load_table(site)


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        ("oom-kill", {"oom-kill"}),
        ("(?i)No space|Disk quota", {"no space", "disk quota"}),
        (r"Xid \(.*?\): 79", {"xid ("}),
        ("(abc)?defgh", {"defgh"}),
        (r"\d+", None),
        ("abcd|x", None),
    ],
)
def test_literals_that_an_expression_needs(pattern: str, literals: set[str] | None) -> None:
    assert required_literals(pattern) == (None if literals is None else frozenset(literals))


@pytest.mark.parametrize("where", ["log", "kernel", "scheduler"])
def test_the_index_finds_what_trying_everything_finds(where: str) -> None:
    table = default_table()
    lines = {line for _, evidence in cases() for line in getattr(evidence, where)}
    for line in sorted(lines)[::7]:
        tried = [s for s in table.signature if where in s.where and any(compiled(p).search(line) for p in s.patterns)]
        assert table.by_source[where].find(line) == tried
