"""`ftrain ckpt` on a run that holds a little of everything: valid, tainted and incomplete steps."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import ftrain
from ftrain.cli.ckpt import ckpt
from ftrain.cli.sample import sample
from recovery import agent_record, paths
from recovery.agent_record import AgentRecord
from recovery.codes import ExitCode
from recovery.owner import Owner, claim, this_process
from storage.compress import Compressor
from storage.epoch import read_epochs
from storage.lease import renew
from storage.objects import open_store
from storage.retention import KeepLast
from storage.run import RunStore
from tests.commands import flip
from tests.storage import building
from tests.storage.building import COMPRESSIBLE, SPECS, random_values, save, smooth_values, write_packs

zarr = pytest.importorskip("zarr")

VALUES = random_values(SPECS, 1)


@pytest.fixture
def run(tmp_path: Path) -> RunStore:
    """10 counts; 20 is behind the onset of a divergence; 30 was never committed."""
    run = RunStore(open_store(str(tmp_path / "run")))
    epoch = run.take_epoch(owner={})
    for step in (10, 20):
        save(run, VALUES, step=step, epoch=epoch)
    run.taint(after=10, reason="the run goes back to before step 15: loss spike")
    write_packs(run.store, VALUES, step=30, epoch=run.take_epoch(owner={}, starts_from=10))
    return run


def told(*words: str) -> str:
    done = CliRunner().invoke(ckpt, words)
    assert done.exit_code == 0, done.output
    return done.stdout


def facts(*words: str) -> Any:
    return json.loads(told(*words, "--json"))


def test_ls_shows_what_is_known_and_nothing_else(run: RunStore) -> None:
    rows = {line.split()[0]: line for line in told("ls", run.store.url).splitlines()}
    assert "valid" in rows["10"]
    assert "the run goes back to before step 15: loss spike" in rows["20"]
    assert rows["30"].split() == ["30", "incomplete", "there", "is", "no", "commit"]  # neither a date of 1970 nor epoch -1
    assert [row["state"] for row in facts("ls", run.store.url)] == ["valid", "tainted", "incomplete"]


def test_a_run_that_lives_here_is_not_taken_over_by_a_copy(run: RunStore, tmp_path: Path) -> None:
    """By its lock, its agent, its lease: whichever is left. What is dead, or on another host, is taken as the option says."""
    there = RunStore(open_store(str(tmp_path / "there")))
    save(there, VALUES, step=5, epoch=there.take_epoch(owner={}))
    folder, here = tmp_path / "there/local", this_process()

    def copy() -> tuple[int, str]:
        done = CliRunner().invoke(ckpt, ["cp", f"{run.store.url}@10", there.store.url, "--take-over"])
        return done.exit_code, done.output

    def hold(owner: Owner) -> None:
        renew(there.store, epoch=0, owner=msgspec.to_builtins(owner), lease_s=600.0)

    live = claim(folder)
    code, said = copy()
    assert code == ExitCode.HELD
    assert f"process {here.pid}" in said
    assert "ftrain stop" in said
    live.release()
    agent = agent_record.lock(folder)
    assert agent is not None
    record = AgentRecord(node="here", pid=here.pid, start_time=here.start_time, boot_id=here.boot_id)
    paths.agent_record(folder).write_bytes(msgspec.json.encode(record))
    assert copy()[0] == ExitCode.HELD
    os.close(agent)
    hold(here)
    code, said = copy()
    assert code == ExitCode.HELD
    assert "ftrain stop" in said
    assert read_epochs(there.store).newest == 0, "nobody was fenced"
    hold(msgspec.structs.replace(here, start_time=here.start_time + 1))  # the number was given to another process
    assert copy()[0] == 0
    assert read_epochs(there.store).newest == 1
    hold(msgspec.structs.replace(here, host="elsewhere"))
    assert copy()[0] == 0


def test_a_tainted_checkpoint_is_shown_and_verified_by_its_step(run: RunStore) -> None:
    assert facts("show", f"{run.store.url}@20")["step"] == 20
    assert facts("show", run.store.url)["step"] == 10
    assert facts("verify", f"{run.store.url}@20")["20"]["ok"]


def test_a_retired_step_is_said_to_be_gone_and_not_to_be_damaged(run: RunStore) -> None:
    for step in (40, 50, 60):
        save(run, VALUES, step=step, epoch=1)
    run.collect([KeepLast(1)], now_s=time.time(), grace_s=3600.0)
    assert {row["step"]: row["state"] for row in facts("ls", run.store.url)}[50] == "retired"
    for words in (["verify"], ["verify", "--json"], ["show"]):
        done = CliRunner().invoke(ckpt, [*words, f"{run.store.url}@50"])
        assert (done.exit_code, done.stdout) == (ExitCode.DAMAGED, "")
        assert f"{run.store.url} has no checkpoint of step 50 to load (step 50: retired: deleted on purpose" in done.stderr
        assert "damage was found" not in done.stderr
        assert "NoCheckpoint" not in done.stderr
    nowhere = CliRunner().invoke(ckpt, ["show", f"{run.store.url}@33"])
    assert "no checkpoint of step 33 to load (there are 20, 60)" in nowhere.stderr, (
        "what can be loaded, the tainted by its step"
    )
    pack = next(info.key for info in run.store.list("checkpoints/step-00000060/") if info.key.endswith(".pack"))
    run.store.delete(pack)
    lost = CliRunner().invoke(ckpt, ["verify", f"{run.store.url}@60"])
    assert (lost.exit_code, lost.stdout) == (ExitCode.DAMAGED, f"step 60: {pack} is not there\n")
    assert (
        lost.stderr == "damage was found: a resume passes over a checkpoint whose state is damaged (weights/* it makes anew)\n"
    )


def test_a_pin_on_a_step_that_is_not_there_is_refused_and_nothing_deleted(run: RunStore) -> None:
    """Who mistypes the one step that is to stay would lose it."""
    before = [info.key for info in run.store.list("checkpoints/")]
    for words in (["--pin", "33"], ["--pin", "10", "--pin", "33", "--yes", "--grace", "0"]):
        done = CliRunner().invoke(ckpt, ["gc", run.store.url, *words])
        assert (done.exit_code, done.stdout) == (ExitCode.DAMAGED, "")
        assert "no checkpoint of step 33 to load (there are 10, 20)" in done.stderr
    assert [info.key for info in run.store.list("checkpoints/")] == before
    assert facts("gc", run.store.url, "--pin", "10")["kept"] == [10]


def test_diff_says_that_it_believes_the_recorded_digests(run: RunStore, tmp_path: Path) -> None:
    """Of a copy that is damaged since it was written it says nothing, and says so."""
    there = RunStore(open_store(str(tmp_path / "there")))
    save(there, VALUES, step=10, epoch=there.take_epoch(owner={}))
    pack = next(info.key for info in there.store.list("checkpoints/") if info.key.endswith(".pack"))
    flip(tmp_path / "there" / pack, 5)
    done = CliRunner().invoke(ckpt, ["diff", f"{run.store.url}@10", there.store.url])
    assert done.exit_code == 0
    assert "same recorded digest" in done.stdout
    assert "no array was read" in done.stderr
    assert "`ftrain ckpt verify`" in done.stderr
    assert CliRunner().invoke(ckpt, ["verify", there.store.url]).exit_code == ExitCode.DAMAGED


def test_show_says_how_far_the_run_was(tmp_path: Path) -> None:
    run = RunStore(open_store(str(tmp_path / "run")))
    progress = {
        "step": 10, "sequences": 6400, "tokens": 409_000, "begun": [[0, 3200], [5, 3200]], "eval_loss": 2.25, "eval_step": 8,
        "skipped": [[3, 4, 64]], "fingerprint": "0123456789abcdef",
    }  # fmt: skip
    manifest = write_packs(run.store, VALUES, step=10, epoch=run.take_epoch(owner={}))
    run.commit(replace(manifest, progress=progress))
    said = told("show", run.store.url)
    for line in (
        "tokens            409,000 learnt from, in 6,400 sequences",
        "phase             1, begun after step 5",
        "held-out loss     2.2500 at step 8",
        "passed over       the data of updates 3 to 4: 64 sequences",
        "config            fingerprint 0123456789abcdef",
    ):
        assert line in said.splitlines()
    assert facts("show", run.store.url)["created_s"] > 0


def test_show_says_what_compression_saved(run: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "SPECS", COMPRESSIBLE)
    save(run, smooth_values(COMPRESSIBLE, 1), step=40, epoch=1, compressor=Compressor(cname="zstd", clevel=1))
    found = facts("show", f"{run.store.url}@40")
    assert found["compressor"] == "zstd 1"
    assert found["ratio"] == found["plain_nbytes"] / found["nbytes"] > 1.02
    assert f"compressed        zstd 1: {found['ratio']:.2f} to 1" in told("show", f"{run.store.url}@40")
    plain = facts("show", f"{run.store.url}@10")
    assert plain["compressor"] == ""
    assert plain["plain_nbytes"] <= plain["nbytes"] < plain["plain_nbytes"] + 64 * 44, "the bytes between the parts"
    assert facts("diff", f"{run.store.url}@40", f"{run.store.url}@40") is not None


def script(folder: Path, epoch: int) -> str:
    """A checkpoint of a script, of one tensor and one number."""
    state = {"w": torch.ones(3), "epoch": epoch}
    checkpointer = ftrain.Checkpointer(folder)
    checkpointer.load(state)
    checkpointer.save(5, state)
    checkpointer.close()
    return str(folder)


def test_what_is_no_tensor_of_a_script_is_shown_and_compared(tmp_path: Path) -> None:
    one, other = (script(tmp_path / str(epoch), epoch) for epoch in (1, 2))
    assert "epoch  1" in told("show", one).splitlines()
    assert facts("show", one)["values"] == {"epoch": 1}
    assert "equal" in told("diff", one, one)
    done = CliRunner().invoke(ckpt, ["diff", one, other])
    assert (done.exit_code, done.stdout) == (1, "epoch: 1 in the first, 2 in the second\n")
    assert done.stderr == "0 of 1 arrays differ; and 1 of what is no array\n"
    (row,) = json.loads(CliRunner().invoke(ckpt, ["diff", one, other, "--json"]).stdout)
    assert (row["entry"], row["kind"], row["first"], row["second"]) == ("epoch", "value", "1", "2")


def test_gc_leaves_the_tainted_unless_it_is_told_otherwise(run: RunStore) -> None:
    plan = facts("gc", run.store.url, "--keep-last", "1")
    assert (plan["kept"], plan["tainted"], plan["deleted_commits"]) == ([10], [20], [])
    assert "20: kept as well; --tainted deletes them" in told("gc", run.store.url, "--keep-last", "1")
    done = facts("gc", run.store.url, "--keep-last", "1", "--tainted", "--grace", "0", "--yes")
    assert done["deleted_commits"] == [20]
    assert [row["step"] for row in facts("ls", run.store.url)] == [10, 30]


def test_view_writes_what_stock_zarr_opens(run: RunStore, tmp_path: Path) -> None:
    found = facts("view", f"{run.store.url}@10", "master/odd", "--to", str(tmp_path / "views"))
    assert found == {"files": [str(tmp_path / "views" / "e0000-a0000.zarr" / "master" / "odd.json")]}
    array = zarr.open_array(f"reference::{found['files'][0]}", mode="r")
    assert array[...].tobytes() == VALUES["master/odd"].tobytes()
    refused = CliRunner().invoke(ckpt, ["view", run.store.url, "master/none"])
    assert refused.exit_code != 0
    assert "no array master/none" in refused.output


def test_a_sample_of_a_scripts_checkpoint_says_why_not(tmp_path: Path) -> None:
    done = CliRunner().invoke(sample, [script(tmp_path / "script", epoch=1)])
    assert (done.exit_code, done.stdout) == (ExitCode.DAMAGED, "")
    assert "not of a model that `ftrain run` trains: its arrays have a script's own names (w)" in done.stderr
    assert "only the script knows how to run it" in done.stderr


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process is meant
@pytest.mark.parametrize("form", ["safetensors", "dcp", "zarr"])
def test_an_export_of_a_scripts_checkpoint_says_why_not_and_what_leads_out(tmp_path: Path, form: str) -> None:
    url, model = tmp_path / "script", torch.nn.Linear(3, 2)
    written = {"model": model.state_dict()}
    dcp.save(written, storage_writer=ftrain.DcpWriter(url, step=7), no_dist=True)  # type: ignore[attr-defined]
    done = CliRunner().invoke(ckpt, ["export", str(url), "--to", form, str(tmp_path / "out")])
    assert done.exit_code != 0
    assert not (tmp_path / "out").exists()
    for words in (
        "step 7",
        "model.bias, model.weight",
        "Hugging Face",
        "ftrain ckpt view URL@7",
        "ftrain.DcpReader(URL, step=7)",
    ):
        assert words in done.stderr
    found = {"model": torch.nn.Linear(3, 2).state_dict()}  # the ways that it names are there
    dcp.load(found, storage_reader=ftrain.DcpReader(url, step=7), no_dist=True)  # type: ignore[attr-defined]
    assert torch.equal(found["model"]["weight"], written["model"]["weight"])
    assert told("view", f"{url}@7")
