"""Certificates from the command line: a small one always, the shipped list in `make test-all`."""

import faulthandler
from functools import partial
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from ftrain.cli.certify import certify
from ftrain.load import load
from ftrain.train.certify import certify as module
from ftrain.train.certify.layouts import parse_layouts
from ftrain.train.certify.pool import Pool, TaskFailedError
from ftrain.train.certify.verdict import Certificate
from recovery.codes import ExitCode

HERE = Path(__file__).parent
CONFIG = str(HERE.parents[2] / "configs" / "certify.toml")
SMALL = "tp=2,dp=2;pp=2,schedule=zb_v;dp=3,model.tied=true"


def called(*arguments):
    return CliRunner().invoke(certify, [CONFIG, "--set", "model.layers=4", "--set", "data.seq_len=8", *arguments])


@pytest.mark.dist
def test_row_45_a_small_model_before_and_after_splitting_forward_and_update(tmp_path):
    out = tmp_path / "certificate.json"
    done = called("--layouts", SMALL, "--steps", "1", "--modes", "fp64,fp32", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "every layout is one process" in done.stdout
    certificate = msgspec.json.decode(out.read_bytes(), type=Certificate)
    assert certificate.holds
    assert [(row.layout, row.mode) for row in certificate.rows] == [
        (name, mode) for name in SMALL.split(";") for mode in ("fp64", "fp32")
    ]
    assert all({w.what for w in row.worst} == set(EVERYTHING) for row in certificate.rows)
    assert certificate.ring == ["tp=2,dp=2", "pp=2,schedule=zb_v", "one process", "dp=3,model.tied=true", "one process"]
    assert certificate.pairs == 3 * 3 + 2 * 2


EVERYTHING = ("loss", "norm", "grad", "master", "exp_avg", "exp_avg_sq")


@pytest.mark.dist
def test_a_failed_certificate_is_exit_code_12(monkeypatch):
    monkeypatch.setattr(module, "Certifier", partial(module.Certifier, defect="certify_defects:weight_decay_on_norms"))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    done = called("--layouts", "dp=2", "--steps", "1", "--modes", "fp64", "--json")
    assert done.exit_code == ExitCode.NUMERICS
    certificate = msgspec.json.decode(done.stdout, type=Certificate)
    assert all(failure.what == "master" and "norm" in failure.parameter for failure in certificate.failures)
    assert "dp=2 fp64 step 1: master of" in done.stderr


def test_impossible_layouts_are_refused_before_anything_starts():
    done = called("--layouts", "tp=3;pp=2")
    assert done.exit_code == ExitCode.CONFIG
    assert "tp=3: parallel.tp" in done.stderr
    assert called("--layouts", "tp=2", "--modes", "fp8").exit_code == ExitCode.USAGE


@pytest.mark.dist
def test_a_rank_that_raises_fails_its_layout_only(tmp_path):
    config = load(CONFIG, ["model.layers=2", "data.seq_len=8", "certify.layouts=[]"])
    with Pool(2, env={"PYTHONPATH": str(HERE)}) as pool:
        with pytest.raises(TaskFailedError, match="rank 1: ValueError: I am rank 1"):
            pool.run([], world=2, defect="certify_defects:raises_on_rank_1")
        certifier = module.Certifier(pool=pool, folder=tmp_path, steps=1, modes=["fp64"])
        assert certifier.certify(config, parse_layouts("dp=2", config)).holds


@pytest.mark.dist
@pytest.mark.slow
def test_state_goes_from_layout_to_layout_and_training_goes_on():
    """Each loads what the one before it saved, digests equal, and updates like one process."""
    ring = ["tp=2,pp=2", "dp=2,sharding=fsdp", "dp=3,sharding=fsdp", "dp=4,cp=2", "cp=4,cp_exchange=ring"]
    done = called("--layouts", ";".join(ring), "--set", "batch.global_batch=12", "--modes", "fp64", "--steps", "1", "--json")
    assert done.exit_code == 0, done.output
    assert msgspec.json.decode(done.stdout, type=Certificate).ring == [*ring, "one process"]


@pytest.mark.dist
@pytest.mark.slow
def test_the_shipped_list_holds():
    faulthandler.cancel_dump_traceback_later()  # some sixty layouts in three precisions take longer than any other test
    done = CliRunner().invoke(certify, [CONFIG])
    assert done.exit_code == 0, done.output
