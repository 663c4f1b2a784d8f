"""`ftrain certify`: is a layout one process?

ftrain certify ftrain.toml --layouts "tp=2;pp=2;tp=2,dp=2"
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import msgspec

from ftrain.cli import render
from ftrain.cli.output import CERTIFICATE, OutputFile, write
from ftrain.cli.problems import told
from ftrain.load import load
from recovery.codes import ExitCode

MODES = ("fp64", "fp32", "bf16")


@click.command()
@click.argument("config")
@click.option("--layouts", default="", help='Such as "tp=2;pp=2,schedule=zb_v;tp=2,dp=2". Default: certify.layouts of CONFIG.')
@click.option(
    "--steps", type=click.IntRange(1, 4), default=2, show_default=True, help="Updates, each from the reference's state."
)
@click.option("--modes", default="fp64,fp32,bf16", show_default=True, help="What is computed in.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=V", help="Override a value of the config; repeatable.")
@click.option("--out", type=OutputFile(CERTIFICATE), metavar="FILE", help="Also write the certificate, as JSON, to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def certify(
    config: str, layouts: str, steps: int, modes: str, overrides: tuple[str, ...], out: Path | None, as_json: bool
) -> None:
    """Compare layouts with one process: loss, every gradient, norm, update, state; exit code 12 if one differs.

    \b
    Example:
      ftrain certify ftrain.toml --layouts "tp=2;pp=2;tp=2,dp=2" --modes fp64
    """
    from ftrain.train.certify.certify import Certifier
    from ftrain.train.certify.layouts import parse_layouts
    from ftrain.train.certify.pool import Pool
    from ftrain.train.certify.verdict import text

    chosen = [mode.strip() for mode in modes.split(",") if mode.strip()]
    if not chosen or set(chosen) - set(MODES):
        raise click.UsageError(f"--modes {modes!r}: wanted some of {', '.join(MODES)}")
    with told(), tempfile.TemporaryDirectory(prefix="ftrain-certify-") as folder:
        loaded = load(config, (*overrides, *(["certify.layouts=[]"] if layouts else [])))
        parsed = parse_layouts(layouts or ";".join(loaded.certify.layouts), loaded)
        with Pool(max(layout.config.parallel.ranks for layout in parsed)) as pool:
            certifier = Certifier(pool=pool, folder=Path(folder), steps=steps, modes=chosen, note=render.note)
            certificate = certifier.certify(loaded, parsed)
    if as_json:
        render.json(certificate)
    else:
        render.data(text(certificate))
    if out:
        write(out, CERTIFICATE, msgspec.json.format(msgspec.json.encode(certificate), indent=2).decode())
    if not certificate.holds:
        render.fail(f"{len(certificate.failures)} failures, the first: {certificate.failures[0]}", ExitCode.NUMERICS)
