"""The checks that a config calls for, on this machine, and what `ftrain doctor` and `ftrain run` make of them."""

from __future__ import annotations

import base64
import os
import socket
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ftrain.compose import checks
from ftrain.compose.corpora import check_data
from ftrain.compose.errors import RefusedError
from ftrain.config import Machine
from ftrain.data.errors import DataError
from ftrain.data.stdlib import cache_root, ensure_stdlib
from ftrain.data.writer import TokenWriter
from ftrain.device import choose
from ftrain.load import load
from recovery.preflight import Concern, answer
from recovery.probes import ProbeError, program
from tests.commands import ftrain, ftrain_json
from tests.free_ports import later
from tests.runs import TinyRun


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    prefix = str(tmp_path / "corpus")
    with TokenWriter(prefix, vocab=257) as out:
        out.add(np.arange(6000) % 257)  # 300 tokens are held out: 9 sequences of 32 and the tokens after them
        out.end_document()
    return TinyRun(folder=tmp_path, corpus=prefix)


def test_doctor_finds_this_machine_fit(run: TinyRun) -> None:
    found = ftrain_json("doctor", str(run.config))
    assert {it["name"]: it["status"] for it in found if it["name"] != "shared memory"} == dict.fromkeys(
        (
            "disk",
            "port",
            "interface",
            "descriptors",
            "memory areas",
            "memory",
            "data",
            "storage",
            "clock",
            "collective",
            "device",
            "time limits",
        ),
        "ok",
    )


def test_doctor_says_whose_fault_it_is(run: TinyRun) -> None:
    done = ftrain("doctor", str(run.config), "--set", "machine.interface=nope0")
    assert done.returncode == 11
    assert "no network interface 'nope0'" in done.stdout
    taken = run.folder / "taken"
    taken.write_text("a file where the run's folder should be")
    local = run.folder / "local"
    done = ftrain("doctor", str(run.config), "--set", f'run.url="{taken}"', "--set", f'run.local_dir="{local}"')
    assert (done.returncode, "Traceback" in done.stderr) == (5, False), done.stdout


def test_a_remedy_is_named_once_and_fits_the_reason(run: TinyRun) -> None:
    """Storage that nobody may read is no reason to look at the clock, and memory says itself what makes it less."""
    asked = {check.name: check for check in checks.thorough(load(str(run.config)))}
    small = msgspec.structs.replace(asked["memory"], args={"need_bytes": 1 << 62})
    assert answer(small).line().count("checkpoint.slots") == 1
    away = msgspec.structs.replace(asked["clock"], args={"url": f"{run.config}/below-a-file"})
    assert answer(away).bad
    assert "synchronise" not in answer(away).line()
    assert "needed for the arenas of the memory tier" in answer(asked["memory"]).text


def test_ports_that_the_config_names_are_tried(run: TinyRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, free = taken.getsockname()[1], later()

        def said(*overrides: str) -> dict[str, tuple[str, str]]:
            asked = checks.thorough(load(str(run.config), overrides))
            found = [answer(check) for check in asked if check.name in ("metrics port", "nodes' port")]
            return {result.name: (result.status, result.text) for result in found}

        assert said() == {}
        nodes = ("machine.ranks_per_node=1", 'machine.interface="lo"')
        found = said(f"recovery.metrics_port={port}", f"machine.port={port}", *nodes)
        assert [status for status, _ in found.values()] == ["warning", "failed"]
        assert "without another recovery.metrics_port no metrics are served" in found["metrics port"][1]
        assert f"machine.port: port {port} of 127.0.0.1 is in use" in found["nodes' port"][1]
        found = said(f"recovery.metrics_port={free}", f"machine.port={free}", *nodes)
        assert [status for status, _ in found.values()] == ["ok", "ok"]


def test_a_notice_that_cannot_appear_is_told_at_the_start_and_one_that_is_there_already(run: TinyRun) -> None:
    away, there = run.folder / "none/notice", run.folder / "notice"
    there.write_text("garbage words")
    (said,) = checks.before_start(load(str(run.config), [f'recovery.notice="{away}"']))
    assert f"there is no folder {away.parent}" in said
    (said,) = checks.before_start(load(str(run.config), [f'recovery.notice="{there}"']))
    assert "which says 'garbage words'; nobody says when" in said
    there.unlink()
    assert checks.before_start(load(str(run.config), [f'recovery.notice="{there}"'])) == []


def test_a_variable_that_cannot_be_read_is_told_at_the_start(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTRAIN_LOG_MIB", "abc")
    (said,) = checks.before_start(load(str(run.config)))
    assert said.startswith("FTRAIN_LOG_MIB=abc: allowed: a whole number")


def test_a_start_is_refused_with_everything_that_speaks_against_it(run: TinyRun) -> None:
    with pytest.raises(RefusedError, match=r"no network interface 'nope0'; there are .*; set machine.interface"):
        checks.before_start(load(str(run.config), ["machine.interface=nope0"]))


@pytest.mark.parametrize("words", [("run",), ("doctor",)], ids=" ".join)
def test_a_gpu_that_is_not_there_is_missed_before_anything_starts(words: tuple[str, ...], run: TinyRun) -> None:
    """A change of the config that cannot work is not recorded either: the run goes on as it was."""
    done = ftrain(*words, str(run.config), "--set", "machine.device=cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    said = done.stdout + done.stderr
    assert done.returncode == 11, said
    assert said.count("torch finds no GPU on this machine") == 1
    assert "start the run on a machine that has one, or set machine.device = 'cpu' or 'auto'" in said
    assert not (run.local / "launch.json").exists()
    assert not (run.local / "ledger").exists()


def test_the_head_of_several_nodes_needs_no_gpu(run: TinyRun) -> None:
    alone = load(str(run.config), ["machine.device=cuda"])
    several = load(str(run.config), ["machine.device=cuda", "machine.ranks_per_node=1"])
    assert [checks.GPUS in {check.name for check in checks.cheap(config)} for config in (alone, several)] == [True, False]


@pytest.mark.parametrize(
    ("gpus", "advice"), [(0, "use a machine that has one, or machine.device = 'cpu' or 'auto'"), (1, "use fewer ranks")]
)
def test_a_rank_without_a_gpu_says_what_helps(gpus: int, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(RuntimeError, match=f"local rank 1 finds {gpus} GPUs: {advice}"):
        choose(Machine(device="cuda"), 1, 2)


def test_a_wrong_order_of_time_limits_is_said_and_no_more(run: TinyRun) -> None:
    said = checks.before_start(load(str(run.config), ["recovery.hang_s=5"]))
    assert any("recovery.collective_s (120 s) must be shorter than recovery.hang_s (5 s)" in line for line in said)


def test_the_schedulers_limit_is_one_of_them(run: TinyRun) -> None:
    limits = checks.timeouts(load(str(run.config)), {"SLURM_JOB_END_TIME": "1100"}, 1000.0)
    assert limits.scheduler_s == 100.0


def test_a_clock_that_is_off(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "within" in checks.clock(run.url)
    real = time.time
    monkeypatch.setattr("ftrain.compose.checks.time.time", lambda: real() + 100.0)
    with pytest.raises(Concern, match=r"the clock is (99|100)\.\d s off .*; synchronise it"):
        checks.clock(run.url)
    assert not any(name.startswith("probe") for name in os.listdir(run.url))


def test_compiling_asks_for_a_compiler_before_the_start(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "C++ compiler" not in {check.name for check in checks.cheap(load(str(run.config)))}
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiling = load(str(run.config), ["machine.compile=true"])
    (asked,) = [check for check in checks.cheap(compiling) if check.name == "C++ compiler"]
    with pytest.raises(ProbeError, match="none of no-such-compiler was found"):
        program(**asked.args)
    assert program(["no-such-compiler", "sh"]).endswith("/sh")


NOWHERE = ("--set", 'data.sources=[{path="nope"}]')
NO_TOKENIZER = ("--set", "data.tokenizer=nope.json")
TOO_MANY = ("--set", "evaluate.sequences=64")


@pytest.mark.parametrize("words", [("run", "--dry-run"), ("run",), ("doctor",)], ids=" ".join)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(
            NOWHERE,
            [
                'given "nope", and nope.idx and nope.bin are not there; allowed: ',
                "ftrain data prepare",
                f"looked for {Path.cwd()}/nope.idx and {Path.cwd()}/nope.bin: paths count from the folder",
            ],
            id="missing",
        ),
        pytest.param(
            NO_TOKENIZER,
            ["data.tokenizer: nope.json: no such file; a tokenizer is `byte`, ", f"looked for {Path.cwd()}/nope.json: paths"],
            id="no-tokenizer",
        ),
        pytest.param(
            TOO_MANY,
            ["evaluate.sequences = 64", "heldout_fraction = 0.05", "9 held-out sequences", "evaluate.sequences = 9 or less"],
            id="too-few-held-out",
        ),
    ],
)
def test_data_that_cannot_work_are_refused_before_anything_starts(
    words: tuple[str, ...], change: tuple[str, ...], says: list[str], run: TinyRun
) -> None:
    done = ftrain(words[0], str(run.config), *words[1:], *change)
    assert done.returncode == 3, done.stderr
    assert [word for word in says if word not in done.stdout + done.stderr] == []
    assert words[0] == "doctor" or not done.stdout, "no config to scroll past"
    assert "Traceback" not in done.stderr
    assert not (run.local / "launch.json").exists()
    assert not (run.local / "ledger").exists()


def test_a_tokenizer_must_be_one_and_the_models(run: TinyRun, tmp_path: Path) -> None:
    """Whoever cannot read it, for want of a library, trains all the same: ids are all that training wants."""
    with pytest.raises(RefusedError, match=r"data\.tokenizer: .*corpus\.idx: is not a tokenizer file: "):
        check_data(load(str(run.config), [f"data.tokenizer={run.corpus}.idx"]))
    words = tmp_path / "mine.tiktoken"
    words.write_bytes(b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % (byte + 43) for byte in range(256)))
    named = f"data.tokenizer={words}"
    assert "training" in check_data(load(str(run.config), [named, "model.vocab=300"]))
    with pytest.raises(RefusedError, match=r"model\.vocab: given 299, and .* has 300 tokens; .*; nearest: 300"):
        check_data(load(str(run.config), [named, "model.vocab=299"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tiktoken", None)  # as where it is not installed
        assert "training" in check_data(load(str(run.config), [named, "model.vocab=299"]))


def test_a_look_at_the_data_does_not_prepare_the_built_in_corpus(
    run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    alone = load(str(run.config), ['data.sources=[{path="stdlib"}]', "evaluate.sequences=100000"])
    assert "'stdlib' is prepared by the first run" in check_data(alone)
    beside = f'data.sources=[{{path="stdlib"}}, {{path="{run.corpus}"}}]'
    assert "1 corpora can be read" in check_data(load(str(run.config), [beside, "evaluate.sequences=64"]))
    with pytest.raises(DataError, match="corpus: has 5700 training tokens of 6000"):
        check_data(load(str(run.config), [beside, "data.seq_len=6000"]))
    assert not cache.exists()
    ensure_stdlib(cache_root())
    with pytest.raises(DataError, match=r"evaluate\.sequences = 100000, but"):
        check_data(alone)
