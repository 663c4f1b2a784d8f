"""`make demo`: the whole idea in two minutes.

The run of configs/demo.toml twice: once unbroken, once with a worker killed in the middle. Then the report of the
broken one, what the model has learnt, and the proof that nothing was lost: the digests of both final checkpoints,
recomputed from what lies in storage.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ftrain.cli import render
from ftrain.cli.problems import told
from ftrain.cli.run import run_supervised
from recovery.codes import ExitCode

if TYPE_CHECKING:
    from ftrain.config import Config

CONFIG = Path("configs/demo.toml")


def main() -> int:
    """Run the demo; 0 only if the proof holds and the model beats the bigram."""
    from ftrain.load import load

    with told():
        broken = load(str(CONFIG))
        unbroken = msgspec.structs.replace(
            broken, faults=(), run=msgspec.structs.replace(broken.run, url=broken.run.url + "-unbroken")
        )
        for title, config in (("1. the unbroken run", unbroken), ("2. the same run, with a worker killed", broken)):
            heading(title)
            train(config)
        heading("3. what happened to the second run")
        show_report(broken)
        heading("4. what the model has learnt")
        learnt = show_learning(broken)
        heading("5. proof that nothing was lost")
        proven = show_proof(unbroken, broken)
    return ExitCode.DONE if learnt and proven else ExitCode.DAMAGED


def heading(text: str) -> None:
    """A title between the parts."""
    render.data(f"\n== {text} ==\n")
    sys.stdout.flush()


def train(config: Config) -> None:
    """One run, from nothing: what an earlier demo left is removed."""
    from ftrain.compose.launch import checked, write

    shutil.rmtree(config.run.url, ignore_errors=True)
    launch, held = checked(config, accept_change=False, origin=None, take_over=False)
    with held:
        code = run_supervised(write(launch, config), held)
    if code != ExitCode.DONE:
        render.fail(f"the run of {config.run.url} ended with code {code}", ExitCode(code))


def show_report(config: Config) -> None:
    """The report of the broken run, from its ledger."""
    from ftrain.compose.ledgers import read_ledger
    from recovery.report import report
    from recovery.report_text import fold, lines

    render.data("\n".join(fold(lines(report(read_ledger(config.run.url))))))


def show_learning(config: Config) -> bool:
    """Held-out loss against the entropies of the text, and a few characters from the model."""
    from ftrain.compose.sampling import heldout_comparison, sample_text

    loss, unigram, bigram = heldout_comparison(config)
    better = loss < bigram
    render.data(f"held-out loss          {loss:.4f} nats per byte, on the slice that the run evaluates")
    render.data(f"bigram entropy         {bigram:.4f} nats per byte, of the same bytes under the training text's pair counts")
    render.data(f"unigram entropy        {unigram:.4f} nats per byte")
    render.data(f"the model {'beats' if better else 'does NOT beat'} the bigram\n")
    render.data("sample: " + repr(sample_text(config.run.url, prompt="def ", tokens=120, temperature=0.7, seed=0)))
    return better


def show_proof(a: Config, b: Config) -> bool:
    """The final digests of both runs, recomputed from storage."""
    from ftrain.compose.proof import stored_digests

    (step_a, first), (step_b, second) = stored_digests(a.run.url), stored_digests(b.run.url)
    equal = step_a == step_b and first == second
    render.data(f"{len(first)} arrays, step {step_a} of {a.run.url} and step {step_b} of {b.run.url}, every byte read back:")
    for name in list(first)[:4]:
        render.data(f"  {name:36} {first[name]}  {second.get(name)}")
    render.data("  ...")
    render.data("all digests are equal: bit for bit the same state" if equal else "the digests DIFFER")
    return equal


if __name__ == "__main__":
    sys.exit(main())
